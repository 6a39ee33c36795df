"""Both ends of reporting for one process, as `build` needs them.

An MCP server with a collector's address in its environment reports there and passes the address on. A process that
starts servers itself has its own collector.

The publisher reports the runs of this process to the collector of its parent process. As a `CommitHook`, it posts each
run's logged events (start, thoughts, tool calls and results, end) in order, one event per post. In strict mode (the
default), no run starts and no tool runs before the event is reported. If an event cannot be reported, the run ends
`failed`, with the reason; for the end event itself, only a warning is logged. With `strict=False`, runs continue
unreported. A run is cancelled if the collector no longer wants it. The publisher only requests a stop; the supervisor
stops the run.
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
from retinue.core.caller import NOBODY, Caller
from retinue.core.errors import ConfigError, LogLost, RetinueError
from retinue.core.events import Body, Event, RunEnded, RunSpawned, Thinking, ToolCall, ToolResult, UsageReported
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.ports import CommitHook, Log, Outcome, ReportedRuns
from retinue.core.results import Status
from retinue.core.secrets import hide_secret
from retinue.http.client import ClientConnection, IncompleteResponse, NoResponse, ResponseError
from retinue.log.forwarding_log import ForwardingLog
from retinue.protocol import inherited_limits
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS, ROUTE, Sender, encode_ending
from retinue.remote.collector import LoopbackCollector, RemainingLimits, RunAdopter, generate_run_id

AGAIN_SECONDS = 5.0
FAILED = "cannot report to the collector: {why}"
GOES_ON = "cannot report to the collector: {why}; the runs continue unreported (best_effort)"
UNTOLD = "the end of '%s' was not reported: %s"
POSTED = frozenset({RunSpawned, Thinking, ToolCall, ToolResult, UsageReported, RunEnded})
_LOG = logging.getLogger(__name__)
POST_SECONDS = 5.0
MAX_CONNECTIONS = 8
UNUSED_SECONDS = 30.0
ANSWER_BYTES = 64 * 1024
WHAT = f"{ADDRESS}: the address to report to"


@dataclass(slots=True, eq=False)
class _PostedRun:
    """One reported run: the sender of its events, its latest post, and the reason why it had to fail."""

    sender: Sender
    parent: _PostedRun | None
    last: asyncio.Task[None] | None = None
    failure: str = ""


class Publisher:
    """A commit hook that posts to one address. `runs` is the supervisor, set after construction."""

    def __init__(self, address: str, *, strict: bool) -> None:
        self._poster = Poster(address, ROUTE)
        self.strict = strict
        self.runs: ReportedRuns | None = None
        self._posted: dict[str, dict[int, _PostedRun]] = {}
        self._has_warned = False
        self._away_until = 0.0
        self._sending = TaskOwner()
        for part in urlsplit(address).path.split("/"):
            hide_secret(part)

    def find_ids(self, tree: str, run: int) -> tuple[str, str]:
        """Return the reported ids of a run and of its root run. For an unreported run, return the ids of its
        caller."""
        reported = self._posted.get(tree, {}).get(run)
        if reported is None:
            caller = self._find_caller() or NOBODY
            return caller.parent_id, caller.root_id
        return reported.sender.run_id, reported.sender.root_id

    def take(self, event: Event, written: Awaitable[None] | None) -> Awaitable[None] | None:
        body = event.body
        if type(body) not in POSTED or not isinstance(body, Body):
            return written
        runs = self._posted.get(event.tree)
        if isinstance(body, RunSpawned):
            if runs is None:
                runs = self._posted[event.tree] = {}
            run = self._open_run(event, body, runs)
        else:
            run = None if runs is None else runs.get(event.run)
        if isinstance(body, RunEnded) and event.run == 0:
            self._posted.pop(event.tree, None)
        if run is None:
            return written
        if isinstance(body, UsageReported):
            run.sender.add_usage(body.usage, body.cost)
            return written
        data = run.sender.encode_event(body, event.at)
        if data is None:
            return written
        before = [run.last]
        if isinstance(body, RunEnded) and runs is not None:
            before += [other.last for other in runs.values() if other.parent is run]
        run.last = self._sending.start(self._send(run, event, data, before))
        if not self.strict or isinstance(body, Thinking | ToolResult):
            return written
        return _Report(written, run.last, run if not isinstance(body, RunEnded) else None)

    async def settle(self, ref: RunRef) -> None:
        run = self._posted.get(ref.tree, {}).get(ref.run)
        if self.strict and run is not None and run.last is not None:
            await asyncio.shield(run.last)
            if run.failure:
                raise PostFailed(run.failure)

    def report_end(self, run_id: str, status: Status, text: str) -> None:
        """Report the end of a run of another process. That process reports to the same collector, but may be gone."""
        self._sending.start(self._post_end(run_id, encode_ending(run_id, status, text, time.time())))

    async def _post_end(self, run_id: str, data: bytes) -> None:
        try:
            await self._poster.post(data)
        except PostFailed as failed:
            _LOG.warning(UNTOLD, run_id, failed)

    def _find_caller(self) -> Caller | None:
        return None if self.runs is None else self.runs.find_served_caller()

    def _open_run(self, event: Event, body: RunSpawned, runs: dict[int, _PostedRun]) -> _PostedRun | None:
        """Begin to report a new run. Return None if another process reports the run, if the run is a primary that
        represents the caller, or if no call asked for the run."""
        caller = self._find_caller()
        if body.server:
            return None
        name = inherited_limits.make_run_id(event.tree, event.run)
        above = None if body.parent is None else runs.get(body.parent)
        if above is not None:
            sender = Sender(event.agent, name, parent_id=above.sender.run_id, root_id=above.sender.root_id)
        elif caller is None or (body.parent is None and not (caller.run_id or body.origin)):
            return None
        else:
            sender = Sender(event.agent, caller.run_id or name, parent_id=caller.parent_id, root_id=caller.root_id)
        run = runs[event.run] = _PostedRun(sender, above)
        return run

    async def _send(self, run: _PostedRun, event: Event, data: bytes, before: list[asyncio.Task[None] | None]) -> None:
        """Post one event after the posts in `before`. Runs in a separate task, so that cancelling the run does not
        lose the event. Never raises."""
        for earlier in before:
            if earlier is not None:
                await earlier
        ends = isinstance(event.body, RunEnded)
        if (run.failure and not ends) or asyncio.get_running_loop().time() < self._away_until:
            return
        try:
            await self._poster.post(data)
        except RunNoLongerWanted as refused:
            self._stop_run(run, event, "cancelled", FAILED.format(why=refused))
        except PostFailed as failed:
            self._handle_failure(run, event, str(failed))
        except Exception as error:  # noqa: BLE001 - any error means that the event did not arrive
            self._handle_failure(run, event, f"{type(error).__name__}: {error}")

    def _handle_failure(self, run: _PostedRun, event: Event, why: str) -> None:
        if not self.strict:
            self._away_until = asyncio.get_running_loop().time() + AGAIN_SECONDS
            if not self._has_warned:
                self._has_warned = True
                text = GOES_ON.format(why=why)
                if self.runs is None or not self.runs.warn_run(event.tree, event.run, text, code="unreported"):
                    _LOG.warning("%s", text)
        elif isinstance(event.body, RunEnded):
            _LOG.warning(UNTOLD, run.sender.run_id, why)
        else:
            self._stop_run(run, event, "failed", FAILED.format(why=why))

    def _stop_run(self, run: _PostedRun, event: Event, status: Status, why: str) -> None:
        run.failure = why
        if self.runs is not None:
            self.runs.stop_run(event.tree, event.run, status, failure=why if status == "failed" else "")

    async def close(self) -> None:
        """Wait for pending posts, for at most the timeout of one post."""
        await self._sending.wait(POST_SECONDS)
        self._poster.close()


@dataclass(slots=True, eq=False)
class _Report:
    """An awaitable that completes when an event is written and reported. Awaiting it is optional. `run` is set if the
    run must fail when the report fails."""

    written: Awaitable[None] | None
    sent: asyncio.Task[None]
    run: _PostedRun | None

    def __await__(self) -> Generator[Any, None, None]:
        if self.written is not None:
            yield from self.written.__await__()
        yield from asyncio.shield(self.sent).__await__()
        if self.run is not None and self.run.failure:
            raise PostFailed(self.run.failure)


class HookedLog(ForwardingLog):
    """A log that also passes its events to a CommitHook. Closing it closes the hook and the inner log."""

    def __init__(self, log: Log, hook: CommitHook) -> None:
        super().__init__(log)
        self.ahead = False  # no run starts before the hook has its first event
        self._hook = hook

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        try:
            written = self._log.append(event, wait)
        except LogLost:
            if isinstance(event.body, RunEnded):  # the caller still learns that the run is over
                self._hook.take(event, None)
            raise
        return self._hook.take(event, written)

    async def close(self) -> None:
        await self._hook.close()
        await super().close()


class PostFailed(RetinueError):
    """Raised when an event did not arrive. The text says why."""


class RunNoLongerWanted(PostFailed):
    """Raised when the collector no longer wants a run, because its call was abandoned or a user cancelled it."""


class Poster:
    """A client that posts to `http://HOST:PORT[/PATH]` over reused connections, one request per event. Its errors
    never contain the path, which is a secret."""

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
        """Post once, within `POST_SECONDS`. Raises PostFailed.

        If a reused connection turns out to be closed, the post is repeated on a new one. This is safe: either the
        receiver got nothing of the request, or it recognises the event by its number."""
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
            raise (RunNoLongerWanted if status == 409 else PostFailed)(f"{self.where} answered {status}{text}")

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
        """Send one post. Return its status and text, or None if the peer closed the connection without an answer."""
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
            raise PostFailed(f"what answers at {self.where} is not a collector") from None
        finally:
            if is_reusable:
                self._idle.append((asyncio.get_running_loop().time(), connection))
            else:
                connection.close()


def _shorten_text(said: bytes) -> str:
    text = " ".join(said[:400].decode("utf-8", "replace").split())
    return "" if text in ("", "{}") else f": {text}"


class Relay:
    """The collector's port in an MCP server process. It opens no socket and passes on the process's own reporting
    address, if any. Limits always travel down.

    `publisher` knows the ids under which this process reports its runs; None if the runs are not reported."""

    def __init__(self, remaining: RemainingLimits, address: str | None, publisher: Publisher | None) -> None:
        self._remaining = remaining
        self._addresses = {ADDRESS: address, CPE_ADDRESS: address} if address else {}
        self._publisher = publisher

    def environment(self, server: str) -> Mapping[str, str]:
        return {**self._remaining.variables(), **self._addresses}

    def call(self, server: str, ref: RunRef, name: str, give_up: Callable[[], object] | None = None) -> str:
        return generate_run_id(name, caller=self._find_ids(ref)[0])

    def meta(self, ref: RunRef) -> Mapping[str, Any]:
        parent_id, root_id = self._find_ids(ref)
        return inherited_limits.to_meta(self._remaining.find_remaining(ref, parent_id=parent_id, root_id=root_id))

    def _find_ids(self, ref: RunRef) -> tuple[str, str]:
        return ("", "") if self._publisher is None else self._publisher.find_ids(ref.tree, ref.run)

    def end_call(self, run_id: str, outcome: Outcome | None) -> None:
        """Report the end of a call that failed or was abandoned, in case the process that ran it is gone. Only the
        first reported end of a run counts."""
        if self._publisher is None:
            return
        if outcome is None:
            self._publisher.report_end(run_id, "cancelled", "")
        elif not outcome.success:
            self._publisher.report_end(run_id, "failed", outcome.text)

    def end_server(self, server: str) -> None:
        """Do nothing: the server's open calls fail, and `end_call` reports them."""

    async def close(self) -> None:
        """Do nothing: nothing was opened."""


class Reporting:
    """The reporting of one process. Code that starts MCP servers uses `collector`. Call `attach` with the supervisor,
    in both of its roles, before the first server starts. A reported process, or one that `serves` as an MCP server,
    opens no collector."""

    def __init__(self, address: str | None, *, serves: bool, strict: bool, limits: Limits, caller: Caller) -> None:
        self._remaining = RemainingLimits(limits, caller)
        self.publisher = Publisher(address, strict=strict) if address else None
        self.collector: LoopbackCollector | Relay
        if address or serves:
            self.collector = Relay(self._remaining, address, self.publisher)
        else:
            self.collector = LoopbackCollector(self._remaining)

    def hook_log(self, log: Log) -> Log:
        """Return the log, wrapped to report its events if there is a collector to report to."""
        return log if self.publisher is None else HookedLog(log, self.publisher)

    def attach(self, adopter: RunAdopter, reported: ReportedRuns) -> None:
        self._remaining.attach(adopter)
        if self.publisher is not None:
            self.publisher.runs = reported

    async def close(self) -> None:
        await self.collector.close()
