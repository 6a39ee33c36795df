"""Both ends of reporting for one process, as `build` needs them.

An MCP server that found an address in its environment reports there and passes it on. A process that starts servers
itself has a collector of its own.

The publisher reports the runs of this process to the collector of the process that started it. A `CommitHook`: it posts
what the log is given of each run (its start, thoughts, tool calls and results, and its end), one event a post, in
order. What must arrive is waited for: no run begins and no tool runs before it is reported. Strict (the default): a run
of which something cannot be reported ends `failed`, with the reason; only for its end, sent whatever became of the run,
a warning has to do. With `strict=False` runs continue unreported. A run that the collector does not want any more is
cancelled. The supervisor stops runs; the publisher only asks for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from retinue.concurrency import TaskOwner
from retinue.control.collector import Collector, Downward, mint
from retinue.core.caller import NOBODY
from retinue.core.errors import ConfigError, RetinueError
from retinue.core.events import Body, Event, RunEnded, RunSpawned, Thinking, ToolCall, ToolResult, UsageReported
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import Clock, CommitHook, Log, Outcome, RunStopper
from retinue.core.results import Status
from retinue.core.secrets import hide_secret
from retinue.http.client import ClientConnection, IncompleteResponse, NoResponse, ResponseError
from retinue.log.forwarding_log import ForwardingLog
from retinue.protocol import inherited_limits as travel
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS, ROUTE, Sender, encode_ending
from retinue.supervisor.caller_limits import CALL
from retinue.supervisor.supervisor import Supervisor

AGAIN_SECONDS = 5.0
FAILED = "cannot report to the collector: {why}"
GOES_ON = "cannot report to the collector: {why}; the runs go on unreported (best_effort)"
UNTOLD = "the end of '%s' was not reported: %s"
POSTED = frozenset({RunSpawned, Thinking, ToolCall, ToolResult, UsageReported, RunEnded})
_LOG = logging.getLogger(__name__)
POST_SECONDS = 5.0
MAX_CONNECTIONS = 8
UNUSED_SECONDS = 30.0
ANSWER_BYTES = 64 * 1024
WHAT = f"{ADDRESS}: the address to report to"


@dataclass(slots=True, eq=False)
class _Line:
    """One reported run: the sender of its events, the last of its posts, and why it had to fail."""

    sender: Sender
    parent: _Line | None
    last: asyncio.Task[None] | None = None
    failure: str = ""


class Publisher:
    """Posts to one address. `runs` is the supervisor, set when there is one."""

    def __init__(self, address: str, *, strict: bool) -> None:
        self._poster = Poster(address, ROUTE)
        self.strict = strict
        self.runs: RunStopper | None = None
        self._lines: dict[str, dict[int, _Line]] = {}
        self._has_warned = False
        self._away_until = 0.0
        self._sending = TaskOwner()
        for part in urlsplit(address).path.split("/"):
            hide_secret(part)

    def ids_of(self, tree: str, run: int) -> tuple[str, str]:
        """Return the id under which a run is reported, and that of the first run of its line."""
        line = self._lines.get(tree, {}).get(run)
        if line is None:
            caller = NOBODY if (call := CALL.get()) is None else call.caller
            return caller.parent_id, caller.root_id
        return line.sender.run_id, line.sender.root_id

    def take(self, event: Event, written: Awaitable[None] | None) -> Awaitable[None] | None:
        body = event.body
        if type(body) not in POSTED or not isinstance(body, Body):
            return written
        lines = self._lines.get(event.tree)
        if isinstance(body, RunSpawned):
            if lines is None:
                lines = self._lines[event.tree] = {}
            line = self._open_line(event, body, lines)
        else:
            line = None if lines is None else lines.get(event.run)
        if isinstance(body, RunEnded) and event.run == 0:
            self._lines.pop(event.tree, None)
        if line is None:
            return written
        if isinstance(body, UsageReported):
            line.sender.add_usage(body.usage, body.cost)
            return written
        data = line.sender.encode_event(body, event.at)
        if data is None:
            return written
        before = [line.last]
        if isinstance(body, RunEnded) and lines is not None:
            before += [other.last for other in lines.values() if other.parent is line]
        line.last = self._sending.start(self._send(line, event, data, before))
        if not self.strict or isinstance(body, Thinking | ToolResult):
            return written
        return _Reported(written, line.last, line if not isinstance(body, RunEnded) else None)

    async def settle(self, ref: RunRef) -> None:
        line = self._lines.get(ref.tree, {}).get(ref.run)
        if self.strict and line is not None and line.last is not None:
            await asyncio.shield(line.last)
            if line.failure:
                raise PostFailed(line.failure)

    def end(self, run_id: str, status: Status, text: str) -> None:
        """Report the end of a run of another process, which reports where we do and may be gone."""
        self._sending.start(self._post_end(run_id, encode_ending(run_id, status, text, time.time())))

    async def _post_end(self, run_id: str, data: bytes) -> None:
        try:
            await self._poster.post(data)
        except PostFailed as failed:
            _LOG.warning(UNTOLD, run_id, failed)

    def _open_line(self, event: Event, body: RunSpawned, lines: dict[int, _Line]) -> _Line | None:
        """Return the line of a new run; None for one that its own process reports, for a primary that stands for the
        caller, and for one that no call has asked for."""
        call = CALL.get()
        if body.server:
            return None
        name, above = travel.make_run_id(event.tree, event.run), None if body.parent is None else lines.get(body.parent)
        if above is not None:
            sender = Sender(event.agent, name, parent_id=above.sender.run_id, root_id=above.sender.root_id)
        elif call is None or (body.parent is None and not (call.caller.run_id or body.origin)):
            return None
        else:
            caller = call.caller
            sender = Sender(event.agent, caller.run_id or name, parent_id=caller.parent_id, root_id=caller.root_id)
        line = lines[event.run] = _Line(sender, above)
        return line

    async def _send(self, line: _Line, event: Event, data: bytes, before: list[asyncio.Task[None] | None]) -> None:
        """Post one event after those before it. Runs in a task of its own, so that cancelling the run does not lose
        it. Never raises."""
        for earlier in before:
            if earlier is not None:
                await earlier
        ends = isinstance(event.body, RunEnded)
        if (line.failure and not ends) or asyncio.get_running_loop().time() < self._away_until:
            return
        try:
            await self._poster.post(data)
        except Unwanted as refused:
            self._stop_run(line, event, "cancelled", FAILED.format(why=refused))
        except PostFailed as failed:
            self._handle_failure(line, event, str(failed))
        except Exception as error:  # noqa: BLE001 - an event that cannot be sent is one that did not arrive
            self._handle_failure(line, event, f"{type(error).__name__}: {error}")

    def _handle_failure(self, line: _Line, event: Event, why: str) -> None:
        if not self.strict:
            self._away_until = asyncio.get_running_loop().time() + AGAIN_SECONDS
            if not self._has_warned:
                self._has_warned = True
                text = GOES_ON.format(why=why)
                if self.runs is None or not self.runs.warn_run(event.tree, event.run, text, code="unreported"):
                    _LOG.warning("%s", text)
        elif isinstance(event.body, RunEnded):
            _LOG.warning(UNTOLD, line.sender.run_id, why)
        else:
            self._stop_run(line, event, "failed", FAILED.format(why=why))

    def _stop_run(self, line: _Line, event: Event, status: Status, why: str) -> None:
        line.failure = why
        if self.runs is not None:
            self.runs.stop_run(event.tree, event.run, status, failure=why if status == "failed" else "")

    async def close(self) -> None:
        """Wait for the posts on their way, as long as one post may take."""
        await self._sending.wait(POST_SECONDS)
        self._poster.close()


@dataclass(slots=True, eq=False)
class _Reported:
    """Done when an event is written and reported. Not awaiting it is no mistake. `line` is that of a run which fails
    without it."""

    written: Awaitable[None] | None
    sent: asyncio.Task[None]
    line: _Line | None

    def __await__(self) -> Generator[Any, None, None]:
        if self.written is not None:
            yield from self.written.__await__()
        yield from asyncio.shield(self.sent).__await__()
        if self.line is not None and self.line.failure:
            raise PostFailed(self.line.failure)


class HookedLog(ForwardingLog):
    """A log whose events a CommitHook takes too. Closing it closes the hook and the log inside."""

    def __init__(self, log: Log, hook: CommitHook) -> None:
        super().__init__(log)
        self.ahead = False  # no run begins before the hook has taken its first event
        self._hook = hook

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        return self._hook.take(event, self._log.append(event, wait))

    async def close(self) -> None:
        await self._hook.close()
        await super().close()


class PostFailed(RetinueError):
    """An event did not arrive; the text says why."""


class Unwanted(PostFailed):
    """The collector does not want the run any more: its call was given up, or a person cancelled it."""


class Poster:
    """A client that posts to `http://HOST:PORT[/PATH]` over connections that it keeps, one request per event. Its
    errors never name the path, which is a secret."""

    def __init__(self, address: str, route: str) -> None:
        try:
            parts = urlsplit(address)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
        if host is None or port is None or parts.scheme != "http" or parts.query or parts.fragment or parts.username:
            raise ConfigError(f"{WHAT} must be http://HOST:PORT, with a path at most")
        if host not in ("127.0.0.1", "localhost", "::1"):
            raise ConfigError(f"{WHAT} is not on this machine: {host}")
        self.where = f"{host}:{port}"
        self._host, self._port = host, port
        self._target = f"{parts.path.rstrip('/')}{route}"
        self._headers = {"Host": parts.netloc, "Content-Type": "application/json"}
        self._idle: list[tuple[float, ClientConnection]] = []
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)

    async def post(self, body: bytes) -> None:
        """Post once, within 5 s. Raises PostFailed.

        A kept connection that turns out to be closed is replaced. Either the receiver had taken nothing of the request
        by then, or it recognizes the event by its number.
        """
        try:
            async with asyncio.timeout(POST_SECONDS), self._slots:
                connection = self._take_idle_connection()
                answer = None if connection is None else await self._exchange(connection, body)
                if answer is None:
                    answer = await self._exchange(await self._connect(), body)
        except TimeoutError:
            raise PostFailed(f"no answer from {self.where} within {POST_SECONDS:g} s") from None
        if answer is None:
            raise PostFailed(f"{self.where} closed the connection without an answer")
        status, text = answer
        if not 200 <= status < 300:
            raise (Unwanted if status == 409 else PostFailed)(f"{self.where} answered {status}{text}")

    def close(self) -> None:
        for _, connection in self._idle:
            connection.close()
        self._idle = []

    def _take_idle_connection(self) -> ClientConnection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            since, connection = self._idle.pop()
            if now - since < UNUSED_SECONDS and not connection.is_closed:
                return connection
            connection.close()
        return None

    async def _connect(self) -> ClientConnection:
        try:
            return ClientConnection(*await asyncio.open_connection(self._host, self._port))
        except OSError as error:
            words = error.strerror or str(error)
            raise PostFailed(f"cannot reach {self.where}: {words.splitlines()[0] if words else 'no reason'}") from None

    async def _exchange(self, connection: ClientConnection, body: bytes) -> tuple[int, str] | None:
        """Send one post. Returns its status and text, or None if the peer closed the connection without an answer."""
        is_reusable = False
        try:
            connection.send_request("POST", self._target, self._headers, body)
            await connection.drain()
            response = await connection.read_response()
            text = await connection.read_body(ANSWER_BYTES)
            is_reusable = connection.start_next_request()
            return response.status, _shorten_text(text)
        except (NoResponse, OSError):
            return None
        except IncompleteResponse:
            raise PostFailed(f"{self.where} broke off its answer") from None
        except ResponseError:
            raise PostFailed(f"what answers at {self.where} is no collector") from None
        finally:
            if is_reusable:
                self._idle.append((asyncio.get_running_loop().time(), connection))
            else:
                connection.close()


def _shorten_text(said: bytes) -> str:
    text = " ".join(said[:400].decode("utf-8", "replace").split())
    return "" if text in ("", "{}") else f": {text}"


class Relay:
    """The collector's port in a process that is an MCP server: opens nothing, and passes on the address it got, if it
    got one. Limits travel down in any case.

    `publisher` knows the ids under which the runs of this process are reported; None if they are not."""

    def __init__(self, down: Downward, address: str | None, publisher: Publisher | None) -> None:
        self._down = down
        self._addresses = {ADDRESS: address, CPE_ADDRESS: address} if address else {}
        self._publisher = publisher

    def environment(self, server: str) -> Mapping[str, str]:
        return {**self._down.variables(), **self._addresses}

    def call(self, server: str, ref: RunRef, name: str, give_up: Callable[[], object] | None = None) -> str:
        return mint(name, caller=self._ids_of(ref)[0])

    def meta(self, ref: RunRef) -> Mapping[str, Any]:
        parent_id, root_id = self._ids_of(ref)
        return travel.to_meta(self._down.find_remaining(ref, parent_id=parent_id, root_id=root_id))

    def _ids_of(self, ref: RunRef) -> tuple[str, str]:
        return ("", "") if self._publisher is None else self._publisher.ids_of(ref.tree, ref.run)

    def end_call(self, run_id: str, outcome: Outcome | None) -> None:
        """Report the end of a call that failed or was given up, in case the process that ran it is gone. The first
        reported end of a run counts."""
        if self._publisher is None:
            return
        if outcome is None:
            self._publisher.end(run_id, "cancelled", "")
        elif not outcome.success:
            self._publisher.end(run_id, "failed", outcome.text)

    def end_server(self, server: str) -> None:
        """Do nothing: the open calls of the server fail, and `end_call` reports those."""

    async def close(self) -> None:
        """Nothing was opened."""


class Reporting:
    """The reporting of one process. `collector` is for whoever starts MCP servers; `attach` a supervisor before the
    first of them is started. A process that is reported, or that `serves` as an MCP server, opens no collector."""

    def __init__(self, address: str | None, *, serves: bool, strict: bool, limits: Limits, clock: Clock) -> None:
        self._down = Downward(limits, clock)
        self.publisher = Publisher(address, strict=strict) if address else None
        self.collector: Collector | Relay
        if address or serves:
            self.collector = Relay(self._down, address, self.publisher)
        else:
            self.collector = Collector(self._down)

    def hook_log(self, log: Log) -> Log:
        """Return the log, with its events reported if there is a collector to report to."""
        return log if self.publisher is None else HookedLog(log, self.publisher)

    def attach(self, supervisor: Supervisor) -> None:
        self._down.supervisor = supervisor
        if self.publisher is not None:
            self.publisher.runs = supervisor

    async def close(self) -> None:
        await self.collector.close()
