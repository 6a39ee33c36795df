"""Independent witnesses of a tree: a model that notes its requests, and a log that counts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import msgspec

import retinue
from retinue import Allow, Approval, Context, Deny, Profile
from retinue.core.errors import ModelError
from retinue.core.events import Event
from retinue.core.messages import Reply, Request, RunRef, Turn
from retinue.core.ports import Clock, Log
from retinue.core.usage import NO_USAGE, Usage
from retinue.log.forwarding_log import ForwardingLog
from retinue.log.memory import MemoryLog
from retinue.testing import scripted
from tests.soak.wild import Wild

ANSWER = {"type": "object", "properties": {"answer": {"type": "integer"}}, "required": ["answer"]}


class Asked(msgspec.Struct, frozen=True):
    """One model call: the thread that the model saw, and its scripted reply."""

    ref: RunRef
    turn: int
    thread: list[Turn]
    reply: dict[str, Any]


class Witness:
    """Plays a case, in its own time, and keeps what really happened in it."""

    name = "witness"

    def __init__(self, case: Wild, *, clock: Clock | None = None) -> None:
        self.case = case
        self.asked: list[Asked] = []
        self.spent: dict[int, Usage] = {}
        self.busy: Counter[int] = Counter()
        self.most_busy = 0
        self.asking = 0
        self.most_asking = 0
        self.effects: Counter[str] = Counter()
        self.questions: Counter[str] = Counter()
        self.allowed: set[str] = set()
        self._model = scripted(case.agents, clock=clock)
        self._random = random.Random(f"witness {case.seed}")

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        ref = request.ref
        said = self._script_of(ref, request.turn)
        self.asked.append(Asked(ref, request.turn, list(request.thread), said))
        usage = NO_USAGE if "crash" in said else Usage(**said.get("usage", {}))
        self.enter(ref.run)
        self.asking += ref.run != 0
        self.most_asking = max(self.most_asking, self.asking)
        try:
            await self.dawdle()
            reply = await self._model.complete(request, on_delta)
        except ModelError:
            self.spent[ref.run] = self.spent.get(ref.run, NO_USAGE) + usage
            raise
        finally:
            self.asking -= ref.run != 0
            self.leave(ref.run)
        self.spent[ref.run] = self.spent.get(ref.run, NO_USAGE) + usage
        return reply

    def _script_of(self, ref: RunRef, turn: int) -> dict[str, Any]:
        for key in (ref.path, ref.label, ref.subagent_id, ref.agent):
            if key in self.case.agents:
                replies = self.case.agents[key]
                return replies[turn - 1] if turn <= len(replies) else {"text": "done"}
        return {"text": "done"}

    async def dawdle(self) -> None:
        for _ in range(self._random.choice((0, 0, 1, 3, 9))):
            await asyncio.sleep(0)

    def enter(self, run: int) -> None:
        """The run does something itself, and so must have its slot. The primary needs none."""
        if run:
            self.busy[run] += 1
            self.most_busy = max(self.most_busy, len(self.busy))

    def leave(self, run: int) -> None:
        if run:
            self.busy[run] -= 1
            if not self.busy[run]:
                del self.busy[run]

    async def decide(self, question: Approval) -> Allow | Deny:
        self.questions[question.id] += 1
        await self.dawdle()
        chance = self._random.random()
        if chance < 0.7:
            self.allowed.add(question.id)
            return Allow()
        if chance < 0.95:
            return Deny("not today")
        raise RuntimeError("the approver broke")

    def primary(self) -> Profile:
        @retinue.tool(tier="confirm")
        async def effect(ctx: Context, what: str) -> str:
            """Does something that must not happen twice."""
            self.enter(ctx.run)
            try:
                await self.dawdle()
                self.effects[ctx.path] += 1
            finally:
                self.leave(ctx.run)
            return what

        @retinue.tool(tier="observe", repeatable=True)
        async def look(ctx: Context, turns: int) -> list[int]:
            """Takes a while."""
            self.enter(ctx.run)
            try:
                for _ in range(turns):
                    await asyncio.sleep(0)
            finally:
                self.leave(ctx.run)
            return list(range(turns))

        @retinue.tool(tier="observe")
        def breaks() -> None:
            """Never works."""
            raise ValueError("broken")

        names = ("read", "write", "glob", "grep", "spawn_subagents", "list_agents", "get_agent")
        tools = [*names, effect, look, breaks, *KIDS]
        return Profile("main", "You are main.", model=self, tools=tools)


KIDS = (Profile("alpha"), Profile("beta"), Profile("typed", output=ANSWER))


class Tee(ForwardingLog):
    """A log before another that keeps all it was given in memory too, and at event number `at` takes an action."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.log = log
        self.memory = MemoryLog()
        self.count = 0
        self.at: int | None = None
        self.action: Callable[[], Coroutine[Any, Any, None]] | None = None
        self.turns = 0
        self.acting: asyncio.Task[None] | None = None

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        self.count += 1
        self.memory.append(event)
        if self.count == self.at:
            asyncio.get_running_loop().call_soon(self.take_action)
        return self.log.append(event, wait)

    def take_action(self) -> None:
        """Take the action `turns` turns of the loop from now, once."""
        if self.turns > 0:
            self.turns -= 1
            asyncio.get_running_loop().call_soon(self.take_action)
            return
        if self.action is not None and self.acting is None:
            self.acting = asyncio.create_task(self.action())
