"""The port for remote runs: the interface of an adapter for runs whose loop is not ours, and the reports of its peer.

An adapter turns the messages of one kind of peer (a host behind an outbox, an A2A or ACP agent) into `Report`s, and our
commands into messages. It knows no tree and writes no event. The MCP servers behind the collector need no adapter: they
report the runs they start without being asked. Every report, theirs too, passes a `ReportValidator`; then the
supervisor's adoption turns it into events of our runs. The peer's runs are named by the ids that the peer gives them;
the requested run is `STARTED`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import ClassVar, Protocol

import msgspec

from retinue.core.approvals import Decision
from retinue.core.caller import Caller
from retinue.core.events import Body, Delta, Event, RunSpawned, UsageReported
from retinue.core.messages import RunRef
from retinue.core.plans import Job
from retinue.core.ports import Emit

STARTED = ""  # the id of the requested run among the runs of its peer


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The commands that a peer supports for its runs, besides a cancel. `replay` means that `attach` reports everything
    after the cursor again, and not only new events."""

    send: bool = False
    answer: bool = False
    replay: bool = False


class Peer(msgspec.Struct, frozen=True, kw_only=True):
    """The names of a peer.

    - `runtime`: its name in the log.
    - `who`: its name in the texts of gaps.
    - `where`: its name in the texts of receipts.
    - `server`: the MCP server, if the peer is one."""

    runtime: str
    who: str
    where: str
    server: str = ""


class RemoteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request to a peer for a run: its place in our tree, the profile's name, the task text, its folders and its
    remaining limits.

    If the run continues another run of the same peer, `continues` is the reference of that run. `before` is the
    conversation so far, for a peer that does not store it."""

    ref: RunRef
    profile: str
    text: str
    before: str = ""
    continues: str = ""
    workspace: str
    readable: Sequence[str] = ()
    limits: Caller


class RemoteSpawned(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A report that the peer created a run below its run `parent`. `is_at_work` means that the run has already
    started, for a peer that does not report starts."""

    parent: str
    agent: str
    task: str = ""
    label: str = ""
    subagent_id: str = ""
    model: str = ""
    call_id: str = ""
    is_at_work: bool = False


class RemoteDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of text from a speaking run of the peer, with the fields of `Delta`. It is shown, but not written to the
    log."""

    text: str
    kind: str = "text"
    turn: int = 0
    offset: int = 0


class Report(msgspec.Struct, frozen=True, gc=False):
    """A statement of a peer about its run `run`.

    `seq` numbers the reports of the run from 1, if the peer numbers them. `cursor` is the position in the peer's
    stream after this report, if the stream has positions. `size` is the size of the report in bytes. `spent` is the
    usage of the model call behind the report, if the peer sends both together."""

    run: str
    body: Body | RemoteSpawned | RemoteDelta
    seq: int | None = None
    cursor: str = ""
    size: int = 0
    spent: UsageReported | None = None


def make_report(item: Event | Delta) -> Report | None:
    """Return the report for an event or a delta of another Retinue's tree, whose primary is the requested run. Return
    None for the first event of the primary and for events that a peer may not report."""
    run = _name_run(item.run)
    if isinstance(item, Delta):
        return Report(run, RemoteDelta(item.text, item.kind, item.turn, item.offset))
    event, body = item, item.body
    if isinstance(body, RunSpawned):
        if body.parent is None:
            return None
        spawned = RemoteSpawned(
            parent=_name_run(body.parent),
            agent=event.agent,
            task=body.task,
            label=body.label,
            subagent_id=body.subagent_id,
            model=body.model,
            call_id=body.call_id,
        )
        return Report(run, spawned)
    return Report(run, body) if isinstance(body, Body) else None


def _name_run(number: int) -> str:
    return STARTED if number == 0 else str(number)


class Undelivered(Exception):
    """Raised when a message, an answer or a cancel did not reach the peer. The text says why."""


class RemoteRun(Protocol):
    """The commands for a run of a peer and all runs below it. `run` is the id of any of these runs. A command raises
    `Undelivered` if it does not reach the peer."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def send(self, run: str, text: str) -> None:
        """Send a message to a running run. The peer confirms it with a report of `Inbox(text, source=ASKER)`."""
        ...

    def cancel(self, run: str) -> None:
        """Ask the peer to stop a run and all runs below it, without waiting. The ending arrives as a report."""
        ...

    async def answer(self, run: str, approval_id: str, decision: Decision) -> None:
        """Answer an `ApprovalAsked` that the peer has reported."""
        ...


class StartedRun(RemoteRun, Protocol):
    """A run that this process started or attached to. `reference` identifies the run to another process. The reference
    may change while the run reports, once the peer has assigned an id."""

    @property
    def reference(self) -> str: ...

    def reports(self) -> AsyncGenerator[Report]:
        """Yield the peer's reports until the run has ended. Raises `Disconnected` when the peer is lost. Closing the
        generator releases all resources of the run in this process."""
        ...


class RemoteAdapter(Protocol):
    """The adapter for one kind of peer. A cancelled run gets `grace` seconds to report its ending."""

    @property
    def name(self) -> str: ...

    @property
    def grace(self) -> float: ...

    def start(self, request: RemoteRequest) -> StartedRun:
        """Make a new reference. The request is sent when `reports` is first awaited. By then the reference is in the
        log, so a crash cannot lead to a second run."""
        ...

    def attach(self, request: RemoteRequest, *, reference: str, cursor: str) -> StartedRun:
        """Continue a run that an earlier process started, after the cursor of its last logged report. If the request
        never reached the peer, it is sent now."""
        ...


class RemoteRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime of runs that `adapter` starts at a peer. `prepare` creates the workspaces that the peer may use."""

    adapter: RemoteAdapter
    prepare: Callable[[Job, Emit], Awaitable[None]]
    started: ClassVar[None] = None  # the peer reports when a run has started

    @property
    def name(self) -> str:
        return self.adapter.name

    @property
    def grace(self) -> float:
        return self.adapter.grace
