"""The driver of a run that a peer executes: started or attached to through an adapter, then adopted report by report.

The reference of the run is in the log before the peer is asked, so that a resumed tree attaches to the same run. The
limits that are left to the run travel down with the request.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import Disconnected
from retinue.core.events import Gap, RunEnded, RunRemote, TurnEnded
from retinue.core.ports import Clock
from retinue.core.results import Ending
from retinue.remote.port import STARTED, RemoteAdapter, RemoteRequest, Report, StartedRun, Undelivered
from retinue.remote.validator import Rejected
from retinue.supervisor.adoption import Adoption, Peer
from retinue.supervisor.approvals import Approvals
from retinue.supervisor.remaining_limits import left_to
from retinue.supervisor.run import Run
from retinue.supervisor.tree import Tree
from retinue.workspaces.run_folders import StateFolder

MARGIN_SECONDS = 5.0
BEFORE = "This goes on from an earlier run of yours, whose messages were these: "
UNKNOWN_ENDING = "the peer did not say how it ended"
MISSED = "what the peer reported while nobody was attached is not known"


async def drive_remote_run(
    tree: Tree, run: Run, adapter: RemoteAdapter, *, clock: Clock, state: StateFolder, approvals: Approvals
) -> Ending:
    """Run a run at a peer until it has ended there. Cancelling the task cancels the run at the peer, and waits for
    what it still reports."""
    remote = await _begin(tree, run, adapter, clock)
    who = f"the peer of '{adapter.name}'"
    peer = Peer(runtime=adapter.name, who=who, where=f"at {who}")
    adoption = Adoption(tree, peer, remote, clock=clock, state=state, approvals=approvals, account=run.account)
    adoption.place(STARTED, run)
    for below in _runs_of_peer(run):
        adoption.place(below.view.spawned.remote_id, below)
    adoption.restore(run.remote_tail)
    run.set_relay(partial(adoption.send, STARTED))
    reading = TaskOwner().start(_read(tree, run, adapter, remote, adoption))
    try:
        ended = await asyncio.shield(reading)
        run.keep_partial(ended.partial)
        return ended.ending
    except asyncio.CancelledError:
        with suppress(Undelivered):
            remote.cancel(STARTED)
        await asyncio.wait([reading], timeout=max(0.0, adapter.grace - MARGIN_SECONDS))
        raise
    finally:
        run.set_relay(None)
        reading.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await reading
        adoption.close()


async def _begin(tree: Tree, run: Run, adapter: RemoteAdapter, clock: Clock) -> StartedRun:
    """Start the run, or attach to it if the log has its reference."""
    request = _request_of(tree, run, clock)
    known = run.view.remote
    if known is None:
        remote = adapter.start(request)
        written = tree.write(run, RunRemote(adapter=adapter.name, reference=remote.reference), True)
        if written is not None:
            await written
        return remote
    remote = adapter.attach(request, reference=known.reference, cursor=known.cursor)
    if not remote.capabilities.replay:
        tree.write(run, Gap(1, MISSED))
    return remote


def _request_of(tree: Tree, run: Run, clock: Clock) -> RemoteRequest:
    task, folders = run.task, run.folders
    words = [text for text in (task.context, _before(run), task.text) if text]
    words += [said.text for said in run.take_messages()]  # sent before the run could begin
    return RemoteRequest(
        ref=run.ref,
        profile=run.plan.profile.name,
        text="\n\n".join(words),
        workspace=os.path.realpath(folders.workspace),
        readable=[os.path.realpath(path) for path in folders.readable if Path(path).exists()],
        limits=left_to(tree, run, clock),
    )


def _before(run: Run) -> str:
    """Return the messages of the run that this one continues, which the peer has only from us."""
    past = run.history
    if past is None or past.reply is not None or len(past.thread) < 2:
        return ""
    return BEFORE + msgspec.json.encode(past.thread[:-1]).decode()


def _runs_of_peer(run: Run) -> list[Run]:
    """Return the runs that the peer has made below a run, those that have ended included."""
    found: list[Run] = []
    for child in run.children:
        if child.view.spawned.remote_id:
            found += [child, *_runs_of_peer(child)]
    return found


async def _read(tree: Tree, run: Run, adapter: RemoteAdapter, remote: StartedRun, adoption: Adoption) -> RunEnded:
    """Adopt what the peer reports, until it reports the ending of the run itself. Raises Disconnected without one."""
    reports: AsyncGenerator[Report]
    async with aclosing(remote.reports()) as reports:
        async for report in reports:
            try:
                ended = adoption.adopt(report)
            except Rejected:
                continue  # there is nobody to tell; the peer's log has what ours does not show
            if ended is not None:
                for below in _runs_of_peer(run):
                    below.stop("disconnected")
                return ended
            if report.cursor and isinstance(report.body, TurnEnded | RunEnded) and not adoption.is_asking:
                tree.write(run, RunRemote(adapter=adapter.name, reference=remote.reference, cursor=report.cursor))
    raise Disconnected(UNKNOWN_ENDING)
