"""The port of remote runs: what an adapter does for a run whose loop is not ours, and what its peer may report.

An adapter turns the messages of one kind of peer (an MCP server, a host behind an outbox, an A2A or ACP agent) into
`Report`s and our commands into messages. It knows no tree and writes no event: every report goes through a
`ReportValidator`, then the supervisor's adoption makes events of our runs from it. Runs of the peer are named by
the ids that the peer gives them; the run that was asked for is `STARTED`.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Protocol

import msgspec

from retinue.core.approvals import Decision
from retinue.core.caller import Caller
from retinue.core.events import Body, Delta, Event, RunSpawned, UsageReported
from retinue.core.messages import RunRef
from retinue.core.plans import Job
from retinue.core.ports import Link

STARTED = ""  # the id of the run that was asked for, among the runs of its peer


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """The commands that reach the runs of a peer. `replay` says that `attach` reports everything after the cursor once
    more, and not only what happens from then on."""

    send: bool = False
    cancel: bool = False
    answer: bool = False
    replay: bool = False


class RemoteRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A run that a peer is asked for: its place in our tree, a profile name, the words, the folders it works on, and
    the limits that are left to it. A run that continues another one has the `reference` of that one, where the peer
    had it too, and its conversation so far for a peer that does not keep it."""

    ref: RunRef
    profile: str
    text: str
    before: str = ""
    continues: str = ""
    workspace: str
    readable: Sequence[str] = ()
    limits: Caller


class RemoteSpawned(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A report that a peer has made a run below its run `parent`. `is_at_work` says that it has begun already, for a
    peer that does not report that."""

    parent: str
    agent: str
    task: str = ""
    label: str = ""
    subagent_id: str = ""
    model: str = ""
    call_id: str = ""
    is_at_work: bool = False


class RemoteDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of text while a run of the peer speaks, with the fields of `Delta`. It is shown and not written."""

    text: str
    kind: str = "text"
    turn: int = 0
    offset: int = 0


class Report(msgspec.Struct, frozen=True, gc=False):
    """One thing that a peer says about its run `run`. `seq` counts the reports of that run from 1, where the peer
    counts. `cursor` is the place in the peer's stream after this report, where it has places. `size` is how many bytes
    the report took. `spent` is what the model call behind it spent, where the peer says both at once."""

    run: str
    body: Body | RemoteSpawned | RemoteDelta
    seq: int | None = None
    cursor: str = ""
    size: int = 0
    spent: UsageReported | None = None


def make_report(item: Event | Delta) -> Report | None:
    """Return the report that an event or a delta of another retinue's tree is, whose primary is the run that was asked
    for; None for the first event of that run, and for what no peer may say."""
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
    """Words, an answer or a cancel did not reach the peer; the text says why."""


class RemoteRun(Protocol):
    """The commands for the runs of one peer that belong together: a run and everything that the peer makes below it.
    `run` is the id of one of them. A command that does not reach the peer raises `Undelivered`."""

    @property
    def capabilities(self) -> Capabilities: ...

    async def send(self, run: str, text: str) -> None:
        """Bring words to a run at work. The peer confirms them with a report of `Inbox(text, source=ASKER)`."""
        ...

    def cancel(self, run: str) -> None:
        """Ask the peer to stop a run and all below it, without waiting. The ending comes as a report."""
        ...

    async def answer(self, run: str, approval_id: str, decision: Decision) -> None:
        """Answer an `ApprovalAsked` that the peer has reported."""
        ...


class StartedRun(RemoteRun, Protocol):
    """A run that was started or attached to from here. `reference` finds it again in another process. It may change
    while the run reports, once the peer has given it an id."""

    @property
    def reference(self) -> str: ...

    def reports(self) -> AsyncGenerator[Report]:
        """Yield what the peer says, until the run has ended. Raises `Disconnected` when the peer is lost. Closing the
        generator releases everything that this process holds of the run."""
        ...


class RemoteAdapter(Protocol):
    """Starts runs at one kind of peer. `grace` is how many seconds a cancelled run gets to report its ending."""

    @property
    def name(self) -> str: ...

    @property
    def grace(self) -> float: ...

    def start(self, request: RemoteRequest) -> StartedRun:
        """Make a new reference. The peer is asked when `reports` is first awaited: the reference is in the log then, so
        that no crash can lead to a second run."""
        ...

    def attach(self, request: RemoteRequest, *, reference: str, cursor: str) -> StartedRun:
        """Go on with a run that an earlier process has started, after the cursor of the last report it logged. A
        request that never reached the peer is made now."""
        ...


class RemoteRuntime(msgspec.Struct, frozen=True, kw_only=True):
    """The runtime of runs that `adapter` starts at a peer, which says when they have started. `prepare` makes the
    workspaces above such a run, which its peer may read."""

    name: str
    adapter: RemoteAdapter
    prepare: Callable[[Job, Link], Awaitable[None]]
    started: None = None

    @property
    def grace(self) -> float:
        return self.adapter.grace
