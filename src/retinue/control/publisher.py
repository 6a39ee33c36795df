"""Reports the runs of this process to the collector of the process that started it.

Stands between the supervisor and its log, and posts what is written there of each run: its start, thoughts, tool calls
and results, and its end; one event, one post, in order. What must arrive is waited for: no run begins and no tool runs
before it is reported. Strict (the default): a run of which something cannot be reported ends `failed`, with the reason;
only for its end, sent whatever became of the run, a warning has to do. With `strict=False` runs go on, unreported.
A run that is not wanted any more where it is reported is cancelled.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from retinue.concurrency import TaskOwner
from retinue.control.poster import POST_SECONDS, Poster, PostFailed, Unwanted
from retinue.core.events import (
    Body,
    Event,
    RunEnded,
    RunSpawned,
    Thinking,
    ToolCall,
    ToolResult,
    UsageReported,
    Warned,
)
from retinue.core.ports import Log
from retinue.core.secrets import hide
from retinue.log.forwarding_log import ForwardingLog
from retinue.protocol.reports import ROUTE, Sender, ending

if TYPE_CHECKING:
    from retinue.core.results import Status
    from retinue.supervisor.run import Run
    from retinue.supervisor.supervisor import Supervisor
    from retinue.supervisor.tree import Tree

AGAIN_SECONDS = 5.0
FAILED = "cannot report to the collector: {why}"
GOES_ON = "cannot report to the collector: {why}; the runs go on unreported (best_effort)"
UNTOLD = "the end of '%s' was not reported: %s"
POSTED = frozenset({RunSpawned, Thinking, ToolCall, ToolResult, UsageReported, RunEnded})
_LOG = logging.getLogger(__name__)


class _Called(NamedTuple):
    """What a call said: the run id of the primary it makes (empty when that stands for the caller and is not reported
    itself), and the ids of what is above."""

    run_id: str
    parent_id: str
    root_id: str


_CALLED: ContextVar[_Called | None] = ContextVar("retinue_called", default=None)


class _Line:
    """One run that is reported: what says its events, the last of its posts, and why it had to fail."""

    __slots__ = ("failure", "last", "parent", "sender")

    def __init__(self, sender: Sender, parent: _Line | None) -> None:
        self.sender = sender
        self.parent = parent
        self.last: asyncio.Task[None] | None = None
        self.failure = ""


class Publisher:
    """Made by `build` around a log; `supervisor` is set when there is one."""

    def __init__(self, address: str, *, strict: bool) -> None:
        self._poster = Poster(address, ROUTE)
        self.strict = strict
        self.supervisor: Supervisor | None = None
        self._lines: dict[str, dict[int, _Line]] = {}
        self._told = False
        self._away_until = 0.0
        self._sending = TaskOwner()
        for part in urlsplit(address).path.split("/"):
            hide(part)

    @contextmanager
    def calling(self, run_id: str = "", *, parent_id: str = "", root_id: str = "") -> Iterator[None]:
        """Around whatever makes runs for a call: the run it makes is reported under this id; without one a primary
        that continues none stands for the caller, and what it makes is reported below `parent_id`."""
        token = _CALLED.set(_Called(run_id, parent_id, root_id))
        try:
            yield
        finally:
            _CALLED.reset(token)

    def ids_of(self, tree: str, run: int) -> tuple[str, str]:
        """Under which id a run is reported, and the first of its line."""
        line = self._lines.get(tree, {}).get(run)
        if line is None:
            called = _CALLED.get()
            return ("", "") if called is None else (called.parent_id, called.root_id)
        return line.sender.run_id, line.sender.root_id

    def mark(self, event: Event) -> Event:
        """The first event of a tree that is reported says so, which is why screens here do not show the tree."""
        body, called = event.body, _CALLED.get()
        if not isinstance(body, RunSpawned) or body.parent is not None or called is None:
            return event
        name = called.run_id or called.parent_id or f"{event.tree}-0"
        return msgspec.structs.replace(event, body=msgspec.structs.replace(body, reported=name))

    def take(self, event: Event, written: Awaitable[None] | None) -> Awaitable[None] | None:
        """Reports an event, if it is one to report; what comes back is done when it was written, and, where that
        matters, reported too."""
        body = event.body
        lines = self._lines.get(event.tree)
        if isinstance(body, RunSpawned):
            if lines is None:
                lines = self._lines[event.tree] = {}
            line = self._begin(event, body, lines)
        else:
            line = None if lines is None else lines.get(event.run)
        if isinstance(body, RunEnded) and event.run == 0:
            self._lines.pop(event.tree, None)
        if line is None or not isinstance(body, Body):
            return written
        if isinstance(body, UsageReported):
            line.sender.spend(body.usage, body.cost)
            return written
        data = line.sender.post(body, event.at)
        if data is None:
            return written
        before = [line.last]
        if isinstance(body, RunEnded) and lines is not None:
            before += [other.last for other in lines.values() if other.parent is line]
        sent = line.last = self._sending.start(self._send(line, event, data, before))
        if not self.strict or isinstance(body, Thinking | ToolResult):
            return written
        return _Reported(written, sent, line if not isinstance(body, RunEnded) else None)

    async def settle(self, node: Run) -> None:
        """Until all that the run did is reported; raises PostFailed when something could not be."""
        line = self._lines.get(node.ref.tree, {}).get(node.ref.run)
        if line is not None and line.last is not None:
            await asyncio.shield(line.last)
            if line.failure:
                raise PostFailed(line.failure)

    def end(self, run_id: str, status: Status, text: str) -> None:
        """Ends a run of somebody else, who reported it where we do and may not be there any more."""
        self._sending.start(self._post_end(run_id, ending(run_id, status, text, time.time())))

    async def _post_end(self, run_id: str, data: bytes) -> None:
        try:
            await self._poster.post(data)
        except PostFailed as failed:
            _LOG.warning(UNTOLD, run_id, failed)

    def _begin(self, event: Event, body: RunSpawned, lines: dict[int, _Line]) -> _Line | None:
        called = _CALLED.get()
        above = None if body.parent is None else lines.get(body.parent)
        if body.server or (body.parent is None and (called is None or not (called.run_id or body.origin))):
            return None  # reported by whoever runs it, or it stands for the caller, or nobody asked for it
        name = f"{event.tree}-{event.run}"
        if above is not None:
            parent_id, root_id = above.sender.run_id, above.sender.root_id
        elif called is not None:
            name, parent_id, root_id = called.run_id or name, called.parent_id, called.root_id
        else:
            return None
        line = lines[event.run] = _Line(Sender(event.agent, name, parent_id=parent_id, root_id=root_id), above)
        return line

    async def _send(self, line: _Line, event: Event, data: bytes, before: list[asyncio.Task[None] | None]) -> None:
        """In a task of its own: what becomes of the run does not touch it. Never raises."""
        for earlier in before:
            if earlier is not None:
                await earlier
        ends = isinstance(event.body, RunEnded)
        if (line.failure and not ends) or asyncio.get_running_loop().time() < self._away_until:
            return
        try:
            await self._poster.post(data)
        except Unwanted as refused:
            self._stop(line, event, "cancelled", FAILED.format(why=refused))
        except PostFailed as failed:
            self._failed(line, event, str(failed))
        except Exception as error:  # noqa: BLE001 - an event that cannot be sent is one that did not arrive
            self._failed(line, event, f"{type(error).__name__}: {error}")

    def _failed(self, line: _Line, event: Event, why: str) -> None:
        if not self.strict:
            self._away_until = asyncio.get_running_loop().time() + AGAIN_SECONDS
            if not self._told:
                self._told = True
                self._warn(event, GOES_ON.format(why=why))
        elif isinstance(event.body, RunEnded):
            _LOG.warning(UNTOLD, line.sender.run_id, why)
        else:
            self._stop(line, event, "failed", FAILED.format(why=why))

    def _stop(self, line: _Line, event: Event, status: Status, why: str) -> None:
        line.failure = why
        tree = self._tree(event)
        node = None if tree is None else tree.runs[event.run]
        if node is not None and not node.ending and node.stopping is None:
            node.set_failure(why if status == "failed" else "")
            node.stop(status)

    def _warn(self, event: Event, text: str) -> None:
        tree = self._tree(event)
        if tree is None or tree.runs[event.run].ended:
            _LOG.warning("%s", text)
        else:
            tree.write(tree.runs[event.run], Warned(text, code="unreported"))

    def _tree(self, event: Event) -> Tree | None:
        return None if self.supervisor is None else self.supervisor.trees.get(event.tree)

    async def close(self) -> None:
        """What is on its way gets as long as a post may take."""
        await self._sending.wait(POST_SECONDS)
        self._poster.close()


class _Reported:
    """Awaited: written, and reported. Not awaiting it is no mistake. `line` is that of a run which fails without it."""

    __slots__ = ("_line", "_sent", "_written")

    def __init__(self, written: Awaitable[None] | None, sent: asyncio.Task[None], line: _Line | None) -> None:
        self._written = written
        self._sent = sent
        self._line = line

    def __await__(self) -> Generator[Any, None, None]:
        if self._written is not None:
            yield from self._written.__await__()
        yield from asyncio.shield(self._sent).__await__()
        if self._line is not None and self._line.failure:
            raise PostFailed(self._line.failure)


class PublishedLog(ForwardingLog):
    """The log it is made of, with what is written to it reported. Closing it closes that log."""

    def __init__(self, log: Log, publisher: Publisher) -> None:
        super().__init__(log)
        self.ahead = False  # no run begins before it is reported
        self.publisher = publisher

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        if type(event.body) not in POSTED:
            return self._log.append(event, wait)
        if event.seq == 1:
            event = self.publisher.mark(event)
        return self.publisher.take(event, self._log.append(event, wait))

    async def close(self) -> None:
        await self.publisher.close()
        await super().close()


def publisher_of(log: Log) -> Publisher | None:
    """Who reports what is written to this log, if anybody does."""
    return log.publisher if isinstance(log, PublishedLog) else None
