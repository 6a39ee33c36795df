"""The collector, to which the MCP servers that we started report their subagents over HTTP on the loopback interface.

Each server gets its own address with an unguessable path. The collector decides which run ids a server may report and
where they belong in our trees. The supervisor's adoption checks and writes the reports. The collector stores and
prints nothing. Servers use the CPE format (`protocol.reports`): a call may lack an id, an ending may lack a status,
and any event may be the first of a run. The limits of the calling run travel down. Host, Origin, path, method, type
and size of a request are checked before its body is read.

An unannounced run is placed by its `parentRunID`, or by the caller tag that a server of ours appends to the ids of its
own calls. A plain CPE process sends neither for its own calls. While such a process is running on the server, an
unknown id therefore counts as a run below that process. Other unknown ids are refused.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Protocol

import msgspec

from retinue.core.approvals import Decision
from retinue.core.caller import Caller
from retinue.core.events import Body, RunEnded, Thinking, ToolCall, ToolResult, UsageReported
from retinue.core.limits import DEFAULT_DEPTH, Limits
from retinue.core.messages import RunRef
from retinue.core.ports import Outcome
from retinue.core.results import Status, ending_texts
from retinue.core.secrets import forget_secret, hide_secret
from retinue.core.traces import baggage_of
from retinue.http.listener import HOST, Listener
from retinue.http.server import HttpError, HttpRequest, ServerConnection
from retinue.protocol import inherited_limits
from retinue.protocol import reports as collected
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS, ROUTE, Reported, make_caller_tag, read_arguments
from retinue.protocol.strict_json import InvalidBody
from retinue.remote.port import Capabilities, Peer, RemoteRun, RemoteSpawned, Report, Undelivered
from retinue.remote.validator import NAMELESS, Bounds, Rejected, clean_name

MOST_CONNECTIONS = 1024
BOUNDS = Bounds()
SWEPT = 4096
MOST_OPEN_CALLS = 1000  # whose duration is measured, per run
IDLE_SECONDS = 120.0
END = "subagent_end"
OURS = "\0"  # prefix of the keys of our own runs: no id of a server has a control character in it
NOT_YOURS = "run '{run}' is not below a call that was made on this server"
UNKNOWN = "there is no run '{run}': report under the runId of the call, or name the run above it as parentRunID"
HAS_ENDED = "run '{run}' has ended{how}: its reports are no longer accepted"
CALLER_ENDED = "the run that made the call of '{run}' has ended: reports of it are no longer accepted"
TOO_DEEP = f"runs are nested deeper than {BOUNDS.depth}"
_REFUSALS = {
    "too_deep": (403, TOO_DEEP),
    "parent_ended": (409, CALLER_ENDED),
    "ended": (409, HAS_ENDED),
    "unknown": (403, NOT_YOURS),
}
RUNTIME = "foreign"  # the runtime of reported runs, and the tier of their calls


class ServerAdoption(Protocol):
    """The runs of one server in one tree."""

    @property
    def is_over(self) -> bool:
        """True if the tree has ended."""
        ...

    def adopt(self, report: Report, *, below: int | None = None) -> object:
        """Write a report to our tree. The report of a new run may name the run of ours that made the call, by the
        number `below`. Raises Rejected for a report that the server may not make."""
        ...

    def find_status(self, key: str) -> str | None:
        """Return the status of a reported run, "" if it has not ended, or None if no report has made it a run of
        ours."""
        ...


class RunAdopter(Protocol):
    """The part of the supervisor that the collector uses."""

    def adopt_runs(self, tree: str, peer: Peer, remote: RemoteRun, *, bounds: Bounds) -> ServerAdoption | None:
        """Return the adoption of a peer's runs in a tree, or None if the tree is not at work."""
        ...

    def is_live(self, tree: str) -> bool:
        """Return True for a tree that is at work in this process."""
        ...

    def find_remaining(self, ref: RunRef) -> Caller:
        """Return the remaining limits of a run. For a run that is not at work, nothing remains."""
        ...


@dataclass(eq=False)
class _Server:
    """A started server. `open` holds the ids of its unfinished calls. `plain` holds its runs that a plain CPE process
    reports, newest last; they may have ended."""

    name: str
    secret: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    open: set[str] = field(default_factory=set)
    plain: dict[str, None] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _ReportedRun:
    """A run id that one server may report, and the conversion of its events into reports.

    `parent` is the key of the run above, or the number of the run of ours that made the call. `give_up` abandons the
    call, if the run is the call's own. `is_over` is True once the call has returned. `open_calls` holds the run's tool
    calls without a result: id, tool name and monotonic start time. `agent` is known once the run was reported."""

    server: _Server
    tree: str
    parent: str | int
    give_up: Callable[[], object] | None = None
    is_over: bool = False
    open_calls: list[tuple[str, str, float]] = field(default_factory=list)
    call_count: int = 0
    agent: str = ""

    def make_spawn_report(self, event: Reported, *, size: int) -> Report:
        """Return the report that creates the run, made from the first event posted about it."""
        is_start = event.type == "subagent_start"
        self.agent = clean_name(event.subagent_name) or NAMELESS
        body = RemoteSpawned(
            parent=self.parent if isinstance(self.parent, str) else f"{OURS}{self.parent}",
            agent=self.agent,
            task=event.payload or "" if is_start else "",
            label=clean_name(event.run_id),
            subagent_id=event.run_id,
            is_at_work=True,
        )
        return Report(event.run_id, body, seq=event.seq if is_start else None, size=size if is_start else 0)

    def make_body_report(self, event: Reported, *, size: int) -> Report | None:
        """Return the report for the content of an event, apart from the start of the run. Return None if there is no
        content."""
        usage = event.usage
        spent = None if usage is None else UsageReported(f"mcp:{self.server.name}", usage, event.spent)
        body = self._make_body(event)
        if body is None:
            return None if spent is None else Report(event.run_id, spent)
        return Report(event.run_id, body, seq=event.seq, size=size, spent=spent)

    def _make_body(self, event: Reported) -> Body | None:
        payload = event.payload or ""
        match event.type:
            case "thought_trace":
                return Thinking(payload, event.reasoning_type or "")
            case "tool_call":
                return self._open_call(event, payload)
            case "tool_result":
                name = event.tool_name or ""
                call_id, milliseconds = self._close_call(event.call_id, name)
                return ToolResult(call_id, name, payload, success=event.success, duration_ms=milliseconds)
            case "subagent_end":
                return _read_ending(event.status, payload)
            case _:
                return None

    def _open_call(self, event: Reported, payload: str) -> ToolCall:
        name = event.tool_name or ""
        self.call_count += 1
        call_id = event.call_id or f"call-{self.call_count}"
        if len(self.open_calls) < MOST_OPEN_CALLS:
            self.open_calls.append((call_id, name, monotonic()))
        args, raw = read_arguments(payload)
        timeout = event.execution_timeout_seconds
        return ToolCall(call_id, name, args, RUNTIME, timeout_seconds=timeout or None, raw=raw)

    def _close_call(self, call_id: str | None, name: str) -> tuple[str, int]:
        """Return the id and duration in milliseconds of the call that a result belongs to. A result without a call id
        belongs to the tool's oldest open call."""
        for call in self.open_calls:
            if call[0] == call_id or (not call_id and call[1] == name):
                self.open_calls.remove(call)
                return call[0], round((monotonic() - call[2]) * 1000)
        return call_id or "", 0


class _ServerRuns:
    """The commands for the runs that a server reports. The only supported command is to cancel a run by abandoning its
    call."""

    capabilities = Capabilities()

    def __init__(self, runs: Mapping[str, _ReportedRun]) -> None:
        self._runs = runs

    def cancel(self, run: str) -> None:
        known = self._runs.get(run)
        if known is None or known.give_up is None:
            raise Undelivered("only the run of a call can be cancelled at an MCP server, with its call")
        known.give_up()

    async def send(self, run: str, text: str) -> None:
        raise Undelivered("a run in an MCP server cannot receive messages")

    async def answer(self, run: str, approval_id: str, decision: Decision) -> None:
        raise Undelivered("a question of a run in an MCP server cannot be answered from here")


class LoopbackCollector(Listener):
    """The Collector at an address of this machine. The socket opens before the first server starts, and `close` closes
    it. `build` creates the collector in the supervisor's event loop."""

    def __init__(self, remaining: RemainingLimits) -> None:
        super().__init__("the collector", max_connections=MOST_CONNECTIONS, idle_seconds=IDLE_SECONDS)
        self._remaining = remaining
        self._port = 0
        self._paths: dict[str, _Server] = {}
        self._servers: dict[str, _Server] = {}
        self._secrets: list[str] = []
        self._runs: dict[str, _ReportedRun] = {}
        self._adoptions: dict[tuple[str, str], ServerAdoption] = {}
        self._callers: dict[tuple[str, int], str] = {}  # by tree and run: the id by which all servers may name the run
        self._any_server = _Server("")  # in place of one server, for these ids
        self._tagged: dict[str, str] = {}

    # For code that starts and calls servers

    def environment(self, server: str) -> Mapping[str, str]:
        if not self._port:
            self._port = self.listen()
        started = self._servers[server] = _Server(server)
        self._paths[f"/{started.secret}{ROUTE}"] = started
        self._secrets.append(started.secret)
        hide_secret(started.secret)
        address = f"http://{HOST}:{self._port}/{started.secret}"
        return {**self._remaining.variables(), ADDRESS: address, CPE_ADDRESS: address}

    def call(self, server: str, ref: RunRef, name: str, give_up: Callable[[], object] | None = None) -> str:
        self._sweep()
        run_id, started = generate_run_id(name), self._servers.get(server)
        if started is not None:
            started.open.add(run_id)
            self._keep_run(run_id, _ReportedRun(started, ref.tree, ref.run, give_up))
        return run_id

    def meta(self, ref: RunRef) -> Mapping[str, Any]:
        """Return the limits of a run for the `_meta` of its call. They include an id of the run, below which a server
        can report runs other than the call's own."""
        run_id = self._callers.get((ref.tree, ref.run))
        if run_id is None:
            self._sweep()
            run_id = self._callers[ref.tree, ref.run] = f"{ref.tree}-{ref.run}-{secrets.token_hex(8)}"
            self._keep_run(run_id, _ReportedRun(self._any_server, ref.tree, ref.run))
        return inherited_limits.to_meta(self._remaining.find_remaining(ref, parent_id=run_id))

    def end_call(self, run_id: str, outcome: Outcome | None) -> None:
        run = self._runs.get(run_id)
        if run is None or run.is_over:
            return
        run.is_over = True
        run.server.open.discard(run_id)
        if outcome is None:
            self._end_run(run_id, run, "cancelled")
        else:
            self._end_run(run_id, run, "done" if outcome.success else "failed", outcome.text)

    def end_server(self, server: str) -> None:
        started = self._servers.pop(server, None)
        if started is None:
            return
        del self._paths[f"/{started.secret}{ROUTE}"]
        for name, run in list(self._runs.items()):
            if run.server is started and name not in started.open:  # open calls end by end_call
                self._end_run(name, run, "disconnected")

    def _end_run(self, run_id: str, run: _ReportedRun, status: Status, text: str = "") -> None:
        """End a reported run, unless it has ended or was never reported."""
        adoption = self._adoptions.get((run.server.secret, run.tree))
        if adoption is not None:
            error = text or ending_texts(status, name=run.agent, primary=False)[1]
            with suppress(Rejected):
                adoption.adopt(Report(run_id, RunEnded(status, text, 0, error)))

    def _find_status(self, run_id: str) -> str | None:
        """Return the status of a run, "" if it has not ended, or None if no event about it has been reported."""
        run = self._runs.get(run_id)
        adoption = None if run is None else self._adoptions.get((run.server.secret, run.tree))
        return None if adoption is None else adoption.find_status(run_id)

    def _keep_run(self, run_id: str, run: _ReportedRun) -> None:
        self._runs[run_id] = run
        self._tagged[make_caller_tag(run_id)] = run_id

    def _sweep(self) -> None:
        """Forget ended trees, once there are many entries."""
        if len(self._runs) < SWEPT:
            return
        is_live = self._remaining.runs.is_live
        for name in [name for name, run in self._runs.items() if not is_live(run.tree)]:
            del self._runs[name]
        self._adoptions = {place: each for place, each in self._adoptions.items() if is_live(place[1])}
        self._callers = {place: name for place, name in self._callers.items() if is_live(place[0])}
        self._tagged = {make_caller_tag(name): name for name in self._runs}

    # Listening

    async def close(self) -> None:
        await self.stop_listening()
        await self.end_connections()
        for secret in self._secrets:
            forget_secret(secret)

    async def respond(self, request: HttpRequest, connection: ServerConnection) -> None:
        server = self._paths.get(request.path)
        if server is None:
            raise HttpError(404, "there is no such address")
        if request.method != "POST":
            raise HttpError(405, "this address takes POST only", Allow="POST")
        body = await connection.read_json_body(request, collected.BODY_BYTES)
        try:
            event = collected.decode_report(body)
        except InvalidBody as error:
            raise HttpError(400, str(error)) from None
        self._handle_report(server, event, len(body))
        connection.send_response(200, b"{}")
        await connection.drain()

    # Handling reports

    def _handle_report(self, server: _Server, event: Reported, size: int) -> None:
        run = self._runs.get(event.run_id)
        if run is None:
            run = self._find_place(server, event)
            if event.type == END:
                return  # the run was never reported, so there is nothing to end
        elif run.server is not server:
            raise HttpError(403, NOT_YOURS.format(run=event.run_id))
        status = self._find_status(event.run_id)
        if run.is_over or status:
            if event.type == END:
                return
            how = f" ({status})" if status else ""
            raise HttpError(409, HAS_ENDED.format(run=event.run_id, how=how))
        adoption = self._get_adoption(run)
        if adoption is None:
            raise HttpError(409, CALLER_ENDED.format(run=event.run_id))
        if status is None:
            below = run.parent if isinstance(run.parent, int) else None
            _adopt(adoption, run.make_spawn_report(event, size=size), below=below)
            if adoption.find_status(event.run_id) is None:
                return  # over the limit; the parent's log has a gap that says so
            self._keep_run(event.run_id, run)
            if event.root_id is None:
                server.plain[event.run_id] = None
        report = run.make_body_report(event, size=size)
        if report is not None:
            _adopt(adoption, report)

    def _find_place(self, server: _Server, event: Reported) -> _ReportedRun:
        """Return the place of an unannounced run: below the run that the event or its run id names, or below a plain
        CPE process."""
        named = event.parent_id or self._tagged.get(event.run_id.rpartition("-")[2])
        key = named or self._find_plain_run(server)
        if key is None:
            raise HttpError(404, UNKNOWN.format(run=event.run_id))
        above = self._runs.get(key)
        if above is None or above.server not in (server, self._any_server):
            raise HttpError(403, NOT_YOURS.format(run=event.run_id))
        return _ReportedRun(server, above.tree, key if self._find_status(key) == "" else above.parent)

    def _find_plain_run(self, server: _Server) -> str | None:
        """Return the newest running run of the server that a plain CPE process reports, or None."""
        for run_id in reversed(list(server.plain)):
            if self._find_status(run_id) == "":
                return run_id
            del server.plain[run_id]
        return None

    def _get_adoption(self, run: _ReportedRun) -> ServerAdoption | None:
        """Return the adoption of the server's runs in the run's tree, or None if the tree has ended."""
        if not self._remaining.runs.is_live(run.tree):
            return None
        name, place = run.server.name, (run.server.secret, run.tree)
        adoption = self._adoptions.get(place)
        if adoption is None or adoption.is_over:
            peer = Peer(runtime=RUNTIME, who=f"server '{name}'", where=f"in the MCP server '{name}'", server=name)
            adoption = self._remaining.runs.adopt_runs(run.tree, peer, _ServerRuns(self._runs), bounds=BOUNDS)
            if adoption is None:
                return None
            self._adoptions[place] = adoption
        return adoption


def _adopt(adoption: ServerAdoption, report: Report, *, below: int | None = None) -> None:
    try:
        adoption.adopt(report, below=below)
    except Rejected as rejected:
        status, text = _REFUSALS[rejected.code]
        raise HttpError(status, text.format(run=report.run, how="")) from None


def _read_ending(status: str | None, payload: str) -> RunEnded:
    """Return the ending. CPE processes send no status; a text at the end means an error."""
    if status is None:
        status = "failed" if payload else "done"
    text = payload if status in ("done", "failed") else ""
    return RunEnded(status, text, 0, payload or None)


class RemainingLimits:
    """The limits that travel down from the runs of this process. `caller` holds the limits that the process got.
    `attach` sets `runs`."""

    runs: RunAdopter

    def __init__(self, limits: Limits, caller: Caller) -> None:
        self._caller = caller
        self._limits = limits if isinstance(limits.depth, int) else Limits(depth=DEFAULT_DEPTH).override(limits)

    def attach(self, runs: RunAdopter) -> None:
        self.runs = runs

    def variables(self) -> dict[str, str]:
        """Return the limits that hold for all calls on a server, from any run, as environment variables."""
        own = self._caller.narrow(self._limits)
        tokens = own.tokens if isinstance(own.tokens, int) else None
        cost = own.cost if own.cost is not msgspec.UNSET else None
        depth = own.depth if isinstance(own.depth, int) else 0
        holds = Caller(
            depth=depth,
            deadline=self._caller.deadline,
            tokens=tokens,
            cost=cost,
            traceparent=os.environ.get(inherited_limits.TRACE, ""),
            baggage=baggage_of(os.environ.get(inherited_limits.BAGGAGE, "")),
        )
        return inherited_limits.to_environment(holds)

    def find_remaining(self, ref: RunRef, *, parent_id: str, root_id: str = "") -> Caller:
        """Return the remaining limits of a run that is reported as `parent_id`."""
        return msgspec.structs.replace(self.runs.find_remaining(ref), parent_id=parent_id, root_id=root_id)


def generate_run_id(name: str, *, caller: str = "") -> str:
    """Return a new, readable run id: the tool's name and random letters. `caller` is the id of the calling run, for a
    process whose calls are not announced to the collector."""
    tag = f"-{make_caller_tag(caller)}" if caller else ""
    return f"{clean_name(name) or 'run'}-{secrets.token_hex(6)}{tag}"
