"""A model that says again what a recorded run was told, and notices when it is asked something else."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from retinue.core.messages import Reply, Request
from retinue.core.records import Departed, EndOfRecord, RunRecord, request_lines


class ReplayModel:
    """The model of one run: its n-th call gets the n-th recorded reply. `departed` is told of the first request that
    is not the recorded one; the replies go on, so that the rest of the tree is seen too."""

    def __init__(self, record: RunRecord, departed: Departed) -> None:
        self.name = record.spawned.model
        self._record = record
        self._departed = departed

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        record, turn = self._record, self._record.turn(request.turn)
        if turn is None:
            if not record.cut:
                then, now = [f"{len(record.turns)} turns"], [f"asks for turn {request.turn}"]
                self._departed(request.turn, "turn", then, now)
            raise EndOfRecord
        then = request_lines(record.system(), record.thread(request.turn), record.tools())
        now = request_lines(request.system, request.thread, request.tools)
        if then != now:
            self._departed(request.turn, "request", then, now)
        if turn.reply is None:
            raise EndOfRecord
        for kind, texts in (("thinking", [t.text for t in turn.reply.thoughts]), ("text", [turn.reply.text])):
            for text in filter(None, texts):
                on_delta(kind, text)
        return msgspec.structs.replace(turn.reply, usage=turn.usage)
