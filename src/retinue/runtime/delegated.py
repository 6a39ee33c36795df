"""`delegated`: the run lives on the host of the container we are in, where a watcher starts it (`retinue watch`).

We write what is asked as a file into the outbox, read what happens there as another, and wait for the response. The run
on the host is a tree of its own; here its runs become runs of our tree, with numbers and paths of ours. What the file
says of them is data: kinds a run may say of itself, in sizes that fit.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, cast

import msgspec

from retinue.core.errors import Disconnected, ModelError, RetinueError, SpawnRefused
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
    RunStarted,
    Thinking,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
    UsageReported,
    Warned,
    decode,
)
from retinue.core.limits import CANCEL_ASK_SECONDS, EVENT_BYTES, TERM_SECONDS
from retinue.core.messages import Reply, Request
from retinue.core.plans import Job
from retinue.core.ports import Link, Order
from retinue.core.profiles import Profile, Task, check_name
from retinue.core.results import STATUSES, Ending
from retinue.runtime.folders import RunFolders
from retinue.runtime.mailbox import Mailbox, Unreadable, reached
from retinue.wire import outbox as wire

SIDE = "asks"
POLL_SECONDS = 0.05
UNCLAIMED_SECONDS = 10.0
ANSWER_SECONDS = 10.0
FACTS = 100_000
MOST_RUNS = 1000
CHARACTERS = 200
SAID = (
    TurnStarted, Thinking, Message, ToolCall, ToolResult, ApprovalAsked, ApprovalDecided, Inbox, UsageReported,
    TurnEnded, Warned, Gap,
)  # fmt: skip
UNCLAIMED = (
    "no watcher has taken the request for {seconds:g} s: on the host, run "
    "`retinue watch --outbox {folder} --allow-root PATH`"
)
DEAF = "words for a run on the host do not reach it from here: {text}"


class HostLink(Link, Protocol):
    """The link as this runtime needs it: what is left to the run, that somebody elsewhere is asked about it, and what
    it had said when it did not finish."""

    def left(self) -> tuple[int, float | None]:
        """How many levels may stand below the run, and its seconds."""
        ...

    def person(self, waits: bool) -> None: ...

    def salvage(self, partial: str) -> None: ...


class Delegated:
    """Asks through one outbox. What is written when a run begins comes from the host, so `started` is nothing."""

    name = "delegated"
    grace = CANCEL_ASK_SECONDS + TERM_SECONDS + ANSWER_SECONDS
    started = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        Mailbox(folder, SIDE).close()  # a folder that is not there is told before anything runs
        self._mirrors: dict[Profile, _Mirror] = {}

    async def run(self, job: Job, link: Link) -> Ending:
        mirror = self._mirrors.pop(job.plan.profile, None)
        if mirror is not None:
            return await mirror.play(link)
        return await _Errand(self._folder, self._mirrors, job, cast(HostLink, link)).run()


class _Errand:
    """One request, from its file to its response."""

    def __init__(self, folder: Path, mirrors: dict[Profile, _Mirror], job: Job, link: HostLink) -> None:
        self._job, self._link, self._mirrors = job, link, mirrors
        self._box = Mailbox(folder, SIDE)
        agent = "".join(c if c.isascii() and c.isalnum() else "-" for c in job.ref.agent.lower())[:20]
        self._id = f"{agent}-{job.ref.tree}-{job.ref.run}-{secrets.token_hex(4)}"
        self._runs: dict[int, _Mirror] = {0: _Mirror(mirrors)}
        self._events: int | None = None
        self._rest = b""
        self._answered = False

    async def run(self) -> Ending:
        try:
            self._ask()
        except OSError as error:
            self._box.close()
            raise RetinueError(f"cannot write to the outbox {self._box.folder}: {error.strerror or error}") from None
        reading = asyncio.create_task(self._read())
        try:
            return await self._runs[0].play(self._link)
        except asyncio.CancelledError:
            await self._cancel(reading)
            raise
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            try:
                self._tidy()
            finally:
                for profile in [each for each, mirror in self._mirrors.items() if mirror in self._runs.values()]:
                    del self._mirrors[profile]  # of runs that never had their turn
                if self._events is not None:
                    os.close(self._events)
                self._box.close()

    def _ask(self) -> None:
        job = self._job
        assert isinstance(job.folders, RunFolders)
        depth, seconds = self._link.left()
        task = job.task
        request = wire.Request(
            id=self._id,
            task=f"{task.context}\n\n{task.text}" if task.context else task.text,
            profile=job.plan.profile.name,
            workspace=os.path.realpath(job.folders.workspace),
            context_paths=[os.path.realpath(path) for path in job.folders.readable if Path(path).exists()],
            timeout_seconds=seconds,
            depth=depth,
        )
        data = wire.encode_request(request)
        if len(data) > wire.REQUEST_BYTES:
            raise RetinueError(f"the task is larger than the {wire.REQUEST_BYTES} bytes of a request to the host")
        self._box.put(wire.request_name(self._id), data, reader=self._box.owner)
        reached("request_renamed")

    async def _read(self) -> None:
        """Hands on what the host writes until it has answered."""
        root = self._runs[0]
        try:
            waited = 0.0
            while True:
                response = self._response()
                self._new_events()
                if response is not None:
                    break
                for words in self._link.inbox():
                    self._link.emit(Warned(DEAF.format(text=words.text[:CHARACTERS]), code="not_delivered"))
                if waited < UNCLAIMED_SECONDS <= waited + POLL_SECONDS and self._is_unclaimed():
                    text = UNCLAIMED.format(seconds=UNCLAIMED_SECONDS, folder=self._box.folder)
                    self._link.emit(Warned(text, code="unclaimed"))
                waited += POLL_SECONDS
                await asyncio.sleep(POLL_SECONDS)
            self._answered = True
            for mirror in self._runs.values():
                if mirror is not root:
                    mirror.close()
            if response.warning:
                root.put(Warned(response.warning[:EVENT_BYTES]))
            root.partial = response.partial[:EVENT_BYTES]
            root.put(wire.ending_of(response, agent=self._job.ref.agent, primary=self._job.ref.run == 0))
        except Exception as error:  # noqa: BLE001 - what a file says must not leave the run waiting for ever
            root.put(Disconnected(f"the outbox cannot be read: {error}"))

    def _response(self) -> wire.Response | None:
        try:
            data, _ = self._box.read(wire.response_name(self._id), most=wire.RESPONSE_BYTES)
        except FileNotFoundError:
            return None
        except Unreadable as error:
            raise wire.RequestError(f"the response {error}") from None
        return wire.parse_response(data, self._id)

    def _is_unclaimed(self) -> bool:
        return self._events is None and not self._box.exists(wire.claim_name(self._id))

    def _new_events(self) -> None:
        if self._events is None:
            try:
                self._events = self._box.open(wire.events_name(self._id))
            except FileNotFoundError:
                return
            except Unreadable as error:
                raise wire.RequestError(f"the file of events {error}") from None
        while piece := os.read(self._events, 1024 * 1024):
            *lines, self._rest = (self._rest + piece).split(b"\n")
            if len(self._rest) > wire.LINE_BYTES:
                raise wire.RequestError("the file of events has a line that is too long")
            for line in lines:
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            event = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._runs[0].put(Gap(1, "a line from the host is not an event"))
            return
        if isinstance(event.body, RunSpawned):
            self._spawned(event, event.body)
            return
        mirror = self._runs.get(event.run)
        if mirror is None:
            return
        if isinstance(event.body, RunEnded):
            if event.run != 0:  # of the first it is the response that says so
                mirror.end(event.body)
        elif isinstance(event.body, RunStarted):
            walls = tuple(wall[:CHARACTERS] for wall in event.body.walls[:32])
            mirror.put(RunStarted(Delegated.name, walls))
        elif (body := _checked(event)) is not None:
            mirror.put(body)

    def _spawned(self, event: Event, body: RunSpawned) -> None:
        parent = None if body.parent is None else self._runs.get(body.parent)
        if parent is None or event.run in self._runs or len(self._runs) >= MOST_RUNS:
            return
        self._runs[event.run] = child = _Mirror(self._mirrors)
        parent.put(_Child(child, event.agent, body))

    async def _cancel(self, reading: asyncio.Task[None]) -> None:
        """Asks the host to stop, and waits for what it says: the run there is what has to be stopped."""
        with suppress(OSError):
            self._box.mark(wire.cancel_name(self._id))
        await asyncio.wait([reading], timeout=self._job.plan.runtime.grace - ANSWER_SECONDS / 2)
        self._runs[0].drain(self._link)

    def _tidy(self) -> None:
        """An errand that was answered, or never taken, leaves nothing; another its cancel file, for who took it."""
        box, name = self._box, self._id
        with suppress(OSError):
            if not self._answered:
                box.mark(wire.cancel_name(name))
                if box.exists(wire.claim_name(name)):
                    return
            for file in (wire.request_name, wire.response_name, wire.events_name, wire.cancel_name):
                box.remove(file(name))


class _Child(msgspec.Struct, frozen=True):
    """A run that the host has made below another."""

    mirror: _Mirror
    agent: str
    body: RunSpawned


_Item = Body | _Child | Ending | BaseException


class _Mirror:
    """One run on the host, as a run of our tree says it again."""

    def __init__(self, mirrors: dict[Profile, _Mirror]) -> None:
        self._mirrors = mirrors
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

    async def play(self, link: Link) -> Ending:
        children: list[int] = []
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
                if isinstance(item, _Child):
                    children += await self._spawn(item, link)
                else:
                    self._say(item, cast(HostLink, link))
        finally:
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
        before = bool(self._asked)
        if isinstance(body, ApprovalAsked):
            self._asked.add(body.approval_id)
        elif isinstance(body, ApprovalDecided):
            self._asked.discard(body.approval_id)
        link.emit(body)
        if bool(self._asked) is not before:
            link.person(bool(self._asked))

    async def _spawn(self, child: _Child, link: Link) -> list[int]:
        body = child.body
        try:
            profile = Profile(
                check_name(child.agent), model=_Elsewhere(body.model[:CHARACTERS]), tools=(), runtime="delegated"
            )
            self._mirrors[profile] = child.mirror
            name = body.subagent_id[:CHARACTERS]
            minted = name.startswith(f"{child.agent}_")  # there; here it gets one of ours
            task = Task(body.task[:EVENT_BYTES], label=body.label[:CHARACTERS], subagent_id=None if minted else name)
            order = Order(profile, task, call_id=body.call_id[:CHARACTERS], asked_by_model=False)
            [ticket] = await link.spawn([order])
        except (SpawnRefused, RetinueError) as error:
            link.emit(Warned(f"a run on the host is not shown here: {error}"))
            return []
        return [ticket.run]


class _Elsewhere:
    """The model of a run that is not here: only its name is known."""

    def __init__(self, name: str) -> None:
        self.name = name

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        raise ModelError("the model of this run is the host's")


def _checked(event: Event) -> Body | None:
    """What the run says of itself, with names that are short and no path of the host's; None for what it may not."""
    body = event.body
    if not isinstance(body, SAID):
        return None
    if isinstance(body, Warned):
        return None if body.code == "empty_result" else body  # that one is said here too
    short = {
        name: value[:CHARACTERS]
        for name in ("call_id", "approval_id", "name", "tool", "tier", "display_name", "by", "scope", "model", "type")
        if isinstance(value := getattr(body, name, None), str) and len(value) > CHARACTERS
    }
    if getattr(body, "file", ""):
        short["file"] = ""
    return msgspec.structs.replace(body, **short) if short else body
