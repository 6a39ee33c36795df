"""A run that lives elsewhere, said again as a run of our tree: ids and paths are ours, what it says of itself is data.

Made by `delegated`, which reads what the host writes and hands it on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Protocol, cast

import msgspec

from retinue.core.errors import Disconnected, ModelError, RetinueError
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Event,
    Gap,
    Inbox,
    Message,
    RunEnded,
    RunSpawned,
    Thinking,
    ToolCall,
    ToolResult,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    UsageReported,
    Warned,
)
from retinue.core.limits import EVENT_BYTES
from retinue.core.messages import Reply, Request
from retinue.core.ports import Link, Order, Receipt
from retinue.core.profiles import Profile, Task, check_name
from retinue.core.results import STATUSES, Ending
from retinue.protocol.outbox import ASKER

FACTS = 100_000
CHARACTERS = 200
MOST_SPENT = 10**12
SAID = (
    TurnStarted, Thinking, Message, ToolCall, ToolStarted, ToolResult, ApprovalAsked, ApprovalDecided, Inbox,
    UsageReported, TurnEnded, Warned, Gap,
)  # fmt: skip


Carry = Callable[[str], Awaitable[Receipt]]


class HostLink(Link, Protocol):
    """The link as this runtime needs it: what is left to the run, that somebody elsewhere is asked about it, and what
    it had said when it did not finish."""

    def left(self) -> tuple[int, float | None]:
        """How many levels may stand below the run, and its seconds."""
        ...

    def person(self, waits: bool) -> None: ...

    def salvage(self, partial: str) -> None: ...

    def relay(self, carry: Carry | None) -> None:
        """How words reach the run; none once it is over."""
        ...

    def heard(self, words: str) -> int:
        """Writes that the run has them; at which place of the order."""
        ...


class Child(msgspec.Struct, frozen=True):
    """A run that the host has made below another."""

    mirror: Mirror
    agent: str
    body: RunSpawned


_Item = Body | Child | Ending | BaseException


class Mirror:
    """One run on the host, as a run of our tree says it again. `carry` brings words to it."""

    def __init__(self, mirrors: dict[Profile, Mirror], carry: Callable[[Mirror, str], Awaitable[Receipt]]) -> None:
        self._mirrors, self._carry = mirrors, carry
        self._words: deque[tuple[str, asyncio.Future[int]]] = deque()
        self._queue: asyncio.Queue[_Item] = asyncio.Queue()
        self._facts = 0
        self._closed = False
        self._asked: set[str] = set()
        self.partial = ""

    def put(self, item: _Item) -> None:
        if self._closed:
            return
        self._facts += 1
        if isinstance(item, Body) and self._facts > FACTS:
            if self._facts == FACTS + 1:
                self._queue.put_nowait(
                    Gap(1, f"the run on the host says more than {FACTS} things; the rest is its log")
                )
            return
        self._closed = isinstance(item, Ending | BaseException)
        self._queue.put_nowait(item)

    def end(self, body: RunEnded) -> None:
        status: Any = body.status if body.status in STATUSES else "failed"
        error = None if status == "done" else body.error_details or body.final_response
        self.partial = body.partial[:EVENT_BYTES]
        self.put(Ending(status, body.final_response, error, body.structured))

    def close(self) -> None:
        """The tree on the host has ended, whatever it said of this run."""
        self.put(Disconnected("the host did not say how it ended"))

    def told(self, text: str) -> asyncio.Future[int]:
        """Words are on their way; at which place they are written when the host has them, or 0 when it is over."""
        place = asyncio.get_running_loop().create_future()
        self._words.append((text, place))
        return place

    def taken_back(self, place: asyncio.Future[int]) -> None:
        self._words = deque(each for each in self._words if each[1] is not place)

    async def play(self, link: Link) -> Ending:
        children: list[int] = []
        cast(HostLink, link).relay(partial(self._carry, self))
        try:
            while True:
                item = await self._queue.get()
                if isinstance(item, BaseException):
                    raise item
                if isinstance(item, Ending):
                    if children:
                        await link.wait(children)
                    cast(HostLink, link).salvage(self.partial)
                    return item
                if isinstance(item, Child):
                    children += await self._spawn(item, link)
                else:
                    self._say(item, cast(HostLink, link))
        finally:
            cast(HostLink, link).relay(None)
            for _, place in self._words:
                if not place.done():
                    place.set_result(0)
            if self._asked:
                self._asked.clear()
                cast(HostLink, link).person(False)

    def drain(self, link: HostLink) -> None:
        """Says what has come in since nobody plays any more."""
        while not self._queue.empty():
            item = self._queue.get_nowait()
            if isinstance(item, Body):
                link.emit(item)

    def _say(self, body: Body, link: HostLink) -> None:
        if isinstance(body, Inbox) and body.source == ASKER and self._words:
            text, place = self._words.popleft()
            seq = link.heard(text)
            if not place.done():
                place.set_result(seq)
            return
        before = bool(self._asked)
        if isinstance(body, ApprovalAsked):
            self._asked.add(body.approval_id)
        elif isinstance(body, ApprovalDecided):
            self._asked.discard(body.approval_id)
        link.emit(body)
        if bool(self._asked) is not before:
            link.person(bool(self._asked))

    async def _spawn(self, child: Child, link: Link) -> list[int]:
        body = child.body
        try:
            profile = Profile(
                check_name(child.agent), model=Elsewhere(body.model[:CHARACTERS]), tools=(), runtime="delegated"
            )
            self._mirrors[profile] = child.mirror
            name = body.subagent_id[:CHARACTERS]
            minted = name.startswith(f"{child.agent}_")  # there; here it gets one of ours
            task = Task(body.task[:EVENT_BYTES], label=body.label[:CHARACTERS], subagent_id=None if minted else name)
            order = Order(profile, task, call_id=body.call_id[:CHARACTERS], asked_by_model=False)
            [ticket] = await link.spawn([order])
        except RetinueError as error:
            link.emit(Warned(f"a run on the host is not shown here: {error}"))
            return []
        return [ticket.run]


class Elsewhere:
    """The model of a run that is not here: only its name is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        raise ModelError("the model of this run is the host's")


def checked(event: Event) -> Body | None:
    """What the run says of itself, with names that are short and no path of the host's; None for what it may not."""
    body = event.body
    if not isinstance(body, SAID):
        return None
    if isinstance(body, Warned):
        return None if body.code == "empty_result" else body  # that one is said here too
    if isinstance(body, UsageReported) and not _is_usage(body):
        return Gap(1, "what the host says of a model call cannot be")
    short = {
        name: value[:CHARACTERS]
        for name in ("call_id", "approval_id", "name", "tool", "tier", "display_name", "by", "scope", "model", "type")
        if isinstance(value := getattr(body, name, None), str) and len(value) > CHARACTERS
    }
    if getattr(body, "file", ""):
        short["file"] = ""
    return msgspec.structs.replace(body, **short) if short else body


def _is_usage(body: UsageReported) -> bool:
    """Whether these are numbers that can be added up."""
    numbers = [number for number in msgspec.structs.astuple(body.usage) if number is not None]
    cost = body.cost
    return all(0 <= number <= MOST_SPENT for number in numbers) and (
        cost is None or (cost.is_finite() and 0 <= cost <= MOST_SPENT and cost.adjusted() > -20)
    )
