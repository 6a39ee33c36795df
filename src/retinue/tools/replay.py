"""A tool that answers as it was recorded: it runs nothing, but what it spawned is spawned again."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any, Protocol

import msgspec

from retinue.core.approvals import edited
from retinue.core.errors import ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome
from retinue.core.records import CallRecord, EndOfRecord


class Player(Protocol):
    """Who has the record of the run that calls."""

    def recorded(self, call: Call) -> CallRecord | None: ...
    def play(self, steps: list[Any], link: Link) -> Awaitable[None]: ...
    def structured(self) -> Any: ...


class ReplayTool:
    """Any tool of one recorded run."""

    def __init__(self, spec: ToolSpec, player: Player) -> None:
        self.spec = spec
        self._player = player

    def preview(self, call: Call, folders: Folders) -> str:
        record = self._player.recorded(call)
        if record is None:
            return ""
        if record.body.tier == "none" and record.result is not None:
            raise ToolError(record.result.text)
        return record.asked.preview if record.asked is not None else ""

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        record = self._player.recorded(call)
        if record is None or record.result is None:
            raise EndOfRecord  # seen to by the link, before it comes here
        await self._player.play(record.steps, link)
        result = record.result
        text = result.text
        if record.decided is not None and record.decided.args is not None:
            text = text.removeprefix(f"{edited(record.decided.args)}\n")
        data = self._player.structured() if result.success else None
        return Outcome(text, result.success, data=data, file=result.file)


class RecordedSpec(ToolSpec, frozen=True, gc=False):
    """A tool's spec for one call, with what the policy said of that call."""

    verdict: Any = None

    @classmethod
    def of(cls, spec: ToolSpec, verdict: Any) -> RecordedSpec:
        return cls(**msgspec.structs.asdict(spec), verdict=verdict)
