"""The model that replays one run of the log, and the playing of a recorded reply, which cassettes share. Knows no
storage of records."""

from __future__ import annotations

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


class ReplayModel:
    """The model that replays one run of the log. A request that differs is reported and still gets its reply, so that
    the rest of the tree is compared too."""

    def __init__(self, record: RunRecord, on_difference: Callable[[Difference], None]) -> None:
        self.name = record.spawned.model
        self._record = record
        self._on_difference = on_difference

    async def complete(self, request: Request, on_delta: OnDelta) -> Reply:
        recorded = self._record.find_exchange(request.turn)
        if recorded is not None:
            lines = diff_requests(recorded.request, RecordedRequest.from_request(request))
            if lines:
                self._report("request", request.turn, lines)
            return play_reply(recorded, on_delta)
        if not self._record.cut:
            lines = diff_lines([f"{len(self._record.turns)} turns"], [f"asks for turn {request.turn}"])
            self._report("turn", request.turn, lines)
        raise EndOfRecord

    def _report(self, what: str, turn: int, lines: tuple[str, ...]) -> None:
        record = self._record
        self._on_difference(Difference(run=record.number, path=record.path, turn=turn, what=what, lines=lines))


def diff_requests(recorded: RecordedRequest, asked: RecordedRequest) -> tuple[str, ...]:
    """Return the lines of a diff between two requests; none if they are equal."""
    return diff_lines(recorded.format_lines(), asked.format_lines())


def play_reply(recorded: RecordedExchange, on_delta: OnDelta) -> Reply:
    """Return a recorded reply and send its deltas. Raises EndOfRecord if the run ended before it."""
    if recorded.reply is None:
        raise EndOfRecord
    for thought in recorded.reply.thoughts:
        if thought.text:
            on_delta("thinking", thought.text)
    if recorded.reply.text:
        on_delta("text", recorded.reply.text)
    return msgspec.structs.replace(recorded.reply, counted=True)
