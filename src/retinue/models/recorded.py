"""Models that replay recorded replies: the base class, and the model for a run of the log. `cassettes.py` has the
model for cassettes. This module compares a request with its record; it does not know the source of records."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from retinue.core.messages import OnDelta, Reply, Request
from retinue.core.records import (
    Difference,
    EndOfRecord,
    RecordedExchange,
    RecordedRequest,
    RunRecord,
    diff_lines,
)


class RecordedModel(ABC):
    """A model with recorded replies. Subclasses find the record of a request, and handle a request without a record or
    with a different one."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def complete(self, request: Request, on_delta: OnDelta) -> Reply:
        asked, recorded = self.look_up(request)
        if recorded is None:
            return await self.handle_missing(asked, request, on_delta)
        lines = diff_lines(recorded.request.format_lines(), asked.request.format_lines())
        if lines:
            self.handle_difference(asked, lines)
        if recorded.reply is None:
            raise EndOfRecord
        for thought in recorded.reply.thoughts:
            if thought.text:
                on_delta("thinking", thought.text)
        if recorded.reply.text:
            on_delta("text", recorded.reply.text)
        return msgspec.structs.replace(recorded.reply, counted=True)

    @abstractmethod
    def look_up(self, request: Request) -> tuple[RecordedExchange, RecordedExchange | None]:
        """Return the request in the form of a record, and the exchange recorded for it, if any."""

    @abstractmethod
    async def handle_missing(self, asked: RecordedExchange, request: Request, on_delta: OnDelta) -> Reply:
        """Answer a request for which nothing is recorded, or raise."""

    @abstractmethod
    def handle_difference(self, asked: RecordedExchange, lines: tuple[str, ...]) -> None:
        """Report a request that differs from the recorded one. Raise to give no reply."""


class ReplayModel(RecordedModel):
    """The model that replays one run of the log. A request that differs is reported and still gets its reply, so that
    the rest of the tree is compared too."""

    def __init__(self, record: RunRecord, on_difference: Callable[[Difference], None]) -> None:
        super().__init__(record.spawned.model)
        self._record = record
        self._on_difference = on_difference

    def look_up(self, request: Request) -> tuple[RecordedExchange, RecordedExchange | None]:
        asked = RecordedExchange(
            run=self._record.path,
            turn=request.turn,
            agent=self._record.agent,
            request=RecordedRequest.from_request(request),
        )
        return asked, self._record.find_exchange(request.turn)

    async def handle_missing(self, asked: RecordedExchange, request: Request, on_delta: OnDelta) -> Reply:
        if not self._record.cut:
            recorded, now = [f"{len(self._record.turns)} turns"], [f"asks for turn {asked.turn}"]
            self._report("turn", asked.turn, diff_lines(recorded, now))
        raise EndOfRecord

    def handle_difference(self, asked: RecordedExchange, lines: tuple[str, ...]) -> None:
        self._report("request", asked.turn, lines)

    def _report(self, what: str, turn: int, lines: tuple[str, ...]) -> None:
        record = self._record
        self._on_difference(Difference(run=record.number, path=record.path, turn=turn, what=what, lines=lines))
