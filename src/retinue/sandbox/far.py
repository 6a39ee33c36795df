"""The worker's end of a link to the host: the Link port for a run in a process of its own.

The host holds the thread, the arguments of what it runs and everybody's answers; this end names calls and waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from retinue.core.approvals import Decision
from retinue.core.errors import RetinueError, ToolError
from retinue.core.events import Body
from retinue.core.messages import Call, Reply, RunRef, ToolSpec, Turn, UserTurn
from retinue.core.ports import Folders, Made, Maker, Order, Outcome, Row, Ticket
from retinue.core.profiles import Profile
from retinue.core.results import Result
from retinue.protocol import link as wire
from retinue.sandbox.channel import Channel


class FarLink:
    """What the loop asks goes over the channel; each question has a number, and its answer the same."""

    def __init__(self, ref: RunRef, channel: Channel) -> None:
        self.ref = ref
        self._channel = channel
        self._asked = 0
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._programs: dict[str, Callable[[bool], None]] = {}
        self.emit: Callable[[Body], Any] = self._emit

    def answer(self, frame: Any) -> None:
        """Takes what the host answers; an answer nobody waits for any more is dropped."""
        waiting = self._waiting.pop(frame.id, None)
        if waiting is not None and not waiting.done():
            waiting.set_result(frame)

    async def begin(self, call: Call, spec: ToolSpec, preview: str) -> Decision:
        answer = await self._ask(lambda number: wire.Begin(number, call.id, spec.tier != "none", preview))
        decision: Decision = answer.decision
        return decision

    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None:
        self._channel.send(wire.Finish(call.id, outcome.text, outcome.success, duration_ms, outcome.file))

    async def complete(self, turn: int, system: str, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        answer = await self._ask(wire.Ask)
        return Reply("", answer.calls, refused=answer.refused)

    async def lend(self, call: Call) -> Outcome:
        answer = await self._ask(lambda number: wire.Lend(number, call.id))
        if answer.error:
            raise ToolError(answer.text)
        return Outcome(answer.text, answer.success, file=answer.file)

    @contextmanager
    def program(
        self, call: Call, *, kept: Callable[[Call, Outcome], Outcome], person: Callable[[bool], None]
    ) -> Iterator[Maker]:
        """What the log keeps of the calls is the host's to say; it ends them with the call itself."""

        async def make(name: str, args: dict[str, Any]) -> Made:
            answer = await self._ask(lambda number: wire.Make(number, call.id, name, args))
            return Made(answer.value, answer.error, answer.note)

        self._programs[call.id] = person
        try:
            yield make
        finally:
            del self._programs[call.id]

    def person(self, frame: wire.Person) -> None:
        if frame.call in self._programs:
            self._programs[frame.call](frame.waits)

    def inbox(self) -> Sequence[UserTurn]:
        return ()  # the host puts words into the thread itself, in the moment the turn starts

    async def children_done(self) -> bool:
        answer = await self._ask(wire.Idle)
        return bool(answer.more)

    async def spawn(self, orders: Sequence[Order]) -> list[Ticket]:
        _elsewhere()

    def wait(self, runs: Sequence[int]) -> Awaitable[list[Result[Any]]]:
        _elsewhere()

    def agents(self) -> list[Row]:
        _elsewhere()

    def profiles(self) -> Sequence[Profile]:
        _elsewhere()

    def _emit(self, body: Body) -> None:
        self._channel.send(wire.Fact(body))  # type: ignore[arg-type]  # the host refuses what a run may not say

    async def _ask(self, question: Callable[[int], wire.Frame]) -> Any:
        await self._channel.room()
        self._asked += 1
        number = self._asked
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._channel.send(question(number))
            return await waiting
        finally:
            self._waiting.pop(number, None)


class LentTool:
    """A tool of the host, as the loop here sees it: its preview is the host's too."""

    def __init__(self, name: str) -> None:
        self.spec = ToolSpec(name, "", {})

    def preview(self, call: Call, folders: Folders) -> str:
        return ""

    def __call__(self, call: Call, folders: Folders, link: Any) -> Awaitable[Outcome]:
        outcome: Awaitable[Outcome] = link.lend(call)
        return outcome


def _elsewhere() -> NoReturn:
    raise RetinueError("tools that spawn run with the host")
