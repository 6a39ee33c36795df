"""The driver: takes each run from `run.spawned` to `run.ended`, and makes sure that every run ends exactly once.

The driver gets a run with its services, already in its tree. It does not know who spawned the run, or whether the run
is new or restored. To execute a run at a peer, it starts the run or attaches to it through an adapter, and adopts the
reports one by one. The reference of the run is in the log before the peer is asked, so a resumed tree attaches to the
same run. The limits left to the run travel down with the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing, suppress
from functools import partial

import msgspec

from retinue.agent.runs import run_job
from retinue.concurrency import call_when_done, start_task
from retinue.core.context import CURRENT, METADATA_MAX_SUBAGENT_DEPTH, METADATA_SUBAGENT_DEPTH, Context
from retinue.core.control import Control
from retinue.core.errors import Disconnected, Failed, Limited, RetinueError, StreamCut, Unconfirmed
from retinue.core.events import Gap, RunEnded, RunRemote, TurnEnded, Warned
from retinue.core.messages import SystemPrompt, UserTurn
from retinue.core.plans import Job
from retinue.core.ports import Timer
from retinue.core.results import STATUSES, Ending, ending_texts, make_unconfirmed_ending, stalled_texts
from retinue.remote.port import (
    STARTED,
    Peer,
    RemoteAdapter,
    RemoteRequest,
    RemoteRuntime,
    Report,
    StartedRun,
    Undelivered,
)
from retinue.remote.validator import Rejected
from retinue.supervisor.adoption import Adoption
from retinue.supervisor.approvals import Approvals
from retinue.supervisor.caller_limits import find_remaining_limits
from retinue.supervisor.ports import SupervisorPorts
from retinue.supervisor.run_logs import RunLogs
from retinue.supervisor.run_messages import notify_parent
from retinue.supervisor.run_services import RunServices
from retinue.supervisor.tree import Run, Tree, TreeRegistry

WORKSPACE_IS_COPY = "a copy of {source}: what you change is in your copy only, until it is applied"
MARGIN_SECONDS = 5.0
BEFORE = "This continues an earlier run of yours, whose messages were these: "
UNKNOWN_ENDING = "the peer did not say how it ended"
MISSED = "what the peer reported while nobody was attached is not known"


class Driver:
    """The driver of the runs of all trees. Python functions get `control` in the context of their run."""

    def __init__(
        self, ports: SupervisorPorts, trees: TreeRegistry, control: Control, approvals: Approvals, run_logs: RunLogs
    ) -> None:
        self._clock, self._state, self._hook = ports.clock, ports.state, ports.hook
        self._trees, self._control, self._approvals, self._run_logs = trees, control, approvals, run_logs
        self._loop = asyncio.get_running_loop()
        self._on_stop = self._start_grace  # one bound method for all runs

    def start(self, run: Run, services: RunServices, written: Awaitable[None] | None) -> None:
        """Start driving a run. `written` is done when its first event is in the log."""
        task = self._loop.create_task(self._drive(run, services, written), name=run.ref.path)
        run.attach_driver(task, self._on_stop)

    async def _drive(self, run: Run, services: RunServices, written: Awaitable[None] | None) -> None:
        run.begin_driving()
        try:
            job = None
            if run.stopping is None:
                if written is not None and _may_ask_ahead(run):
                    run.ask_ahead(written)
                elif written is not None:
                    await written
                if run.slot.needs_slot:
                    await run.slot.acquire()
                job = self._begin_work(run, services)
            ending = make_stopped_ending(run) if job is None else await self._execute(run, job, services)
            if self._hook is not None:
                await self._hook.settle(run.ref)
            if run.stopping is not None:
                ending = make_stopped_ending(run)
        except asyncio.CancelledError:
            ending = make_stopped_ending(run)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the boundary to everything a run can do
            ending = make_failed_ending(run, error) if run.stopping is None else make_stopped_ending(run)
        if run.left_open:
            await self._leave_open(run)
        elif not run.ending:
            await self._end(run, ending)

    def _begin_work(self, run: Run, services: RunServices) -> Job | None:
        """Start the clocks and return the job of the run, or None if the run has no time left."""
        if not run.start_clocks():
            return None
        plan, history = run.plan, run.history
        started = plan.runtime.started
        if started is not None and (history is None or run.view.started != started):
            run.write(started)
        if run.queues and self._run_logs.is_kept(run.tree.id, run.ref.run):  # tool replies name its workspace
            run.folders.make_named_folder()
        if plan.host or plan.profile.call is not None:
            CURRENT.set(self._make_context(run, services))
        elif CURRENT.get() is not None:  # inherited from the parent's task
            CURRENT.set(None)
        return Job(
            ref=run.ref,
            plan=plan,
            task=run.task,
            system=_make_system_prompt(run),
            max_turns=run.max_turns,
            thread=(UserTurn(run.task.text),) if history is None else history.thread,
            folders=run.folders,
            context=run.context,
            past=history,
        )

    def _make_context(self, run: Run, services: RunServices) -> Context:
        metadata = {METADATA_SUBAGENT_DEPTH: run.depth, METADATA_MAX_SUBAGENT_DEPTH: run.max_depth}
        context = Context(services, control=self._control, workspace=run.folders.path, metadata=metadata)
        run.attach_context(context)
        return context

    def _execute(self, run: Run, job: Job, services: RunServices) -> Awaitable[Ending]:
        runtime = run.plan.runtime
        if isinstance(runtime, RemoteRuntime):
            return self._drive_remote(run, runtime, job, services)
        return run_job(job, services)

    async def _drive_remote(self, run: Run, runtime: RemoteRuntime, job: Job, services: RunServices) -> Ending:
        """Run a run at a peer until it has ended there. If this task is cancelled, cancel the run at the peer and wait
        for its last reports."""
        await runtime.prepare(job, services.emit)
        adapter = runtime.adapter
        remote = await self._begin_remote(run, adapter)
        who = f"the peer of '{adapter.name}'"
        peer = Peer(runtime=adapter.name, who=who, where=f"at {who}")
        adoption = Adoption(run.tree, peer, remote, state=self._state, approvals=self._approvals, account=run.account)
        adoption.add_run(STARTED, run)
        for below in _list_peer_runs(run):
            adoption.add_run(below.view.spawned.remote_id, below)
        adoption.restore(run.remote_tail)
        run.set_relay(partial(adoption.send, STARTED))
        reading = start_task(_adopt_all(run, adapter, remote, adoption))
        try:
            return await asyncio.shield(reading)
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

    async def _begin_remote(self, run: Run, adapter: RemoteAdapter) -> StartedRun:
        """Start the run at the peer, or attach to it if the log has its reference."""
        request = _make_request(run)
        known = run.view.remote
        if known is None:
            remote = adapter.start(request)
            written = run.write(RunRemote(adapter=adapter.name, reference=remote.reference), True)
            if written is not None:
                await written
            return remote
        remote = adapter.attach(request, reference=known.reference, cursor=known.cursor)
        if not remote.capabilities.replay:
            run.write(Gap(1, MISSED))
        return remote

    async def _end(self, run: Run, ending: Ending) -> None:
        """End all runs below, then the run. The ending is written before anybody is told. A cancel of the driver's
        task cannot come between the two."""
        run.begin_ending()
        if run.children:
            await _end_children(run)
        run.stop_clocks()
        run.slot.leave()
        if ending.status == "done" and not ending.text and ending.structured is None:
            run.write(Warned("the run ended without any text", code="empty_result"))
        if ending.status == "done" and run.account is not None:
            own = run.find_own_account()
            if own is not None and (excess := own.describe_excess()):
                run.write(Warned(excess, code="budget"))
        duration = round(run.measure_duration() * 1000)
        written = run.write(make_ended_event(run, ending, duration_ms=duration), True)
        if written is None:
            self._finish(run)
        else:  # if the write fails, the result stands: closing the log reports the error
            call_when_done(written, partial(self._finish, run))

    def _finish(self, run: Run, _: object = None) -> None:
        """Notify the parent and all waiters of a run. Its ending is written by now."""
        if run is run.tree.root:
            self._forget_tree(run.tree)
        elif run.background and run.parent is not None and not run.parent.ending:
            notify_parent(run)
        run.finish()

    async def _leave_open(self, run: Run) -> None:
        """End the runs below a waiting conversation, and forget its tree here. The log keeps it for the next
        process."""
        await _end_children(run)
        run.stop_clocks()
        self._forget_tree(run.tree)
        run.finish()

    def _forget_tree(self, tree: Tree) -> None:
        self._trees.pop(tree.id, None)
        self._run_logs.end_tree(tree.id)
        tree.release()

    def _start_grace(self, run: Run) -> Timer:
        """Start the grace period of a run that was told to stop."""
        return self._clock.call_later(run.plan.runtime.grace, lambda: self._abandon(run))

    def _abandon(self, run: Run) -> None:
        """End a run that did not stop within its grace period. Its later events are dropped."""
        if run.ending:
            return
        grace = run.plan.runtime.grace
        run.write(Warned(f"did not stop within {grace:g} s and was abandoned", code="abandoned"))
        task = self._loop.create_task(self._end(run, make_stopped_ending(run)))
        run.attach_driver(task, self._on_stop)


async def _end_children(run: Run) -> None:
    """Stop all runs below, and wait for their endings."""
    try:
        for child in run.children:
            child.stop("cancelled")
        for child in run.children:
            if not child.finished:
                await child.join()
    except asyncio.CancelledError:
        pass  # cancelled a second time; the run ends all the same


def _may_ask_ahead(run: Run) -> bool:
    """Return True if the run may ask its model before its first event is on disk. This needs a run that does nothing
    before the first reply: no setup of a copy, no function, no call from an earlier process. A run that waits for a
    slot has time to wait for the disk."""
    plan = run.plan
    return (
        run.tree.log.ahead
        and plan.model is not None
        and plan.run_job is None
        and not isinstance(plan.runtime, RemoteRuntime)
        and run.folders.workspace_copy is None
        and run.history is None
        and not run.task.conversation  # an interrupt could come between the reply and the write
        and not run.slot.is_queued
    )


def _make_system_prompt(run: Run) -> SystemPrompt:
    """Return the instructions, the context of the task, and the folders that the run may read and write."""
    plan, folders, about_folders = run.plan, run.folders, ""
    parts = [plan.system] if plan.system else []
    if run.task.context:
        parts.append(run.task.context)
    if plan.tools:
        readable = ", ".join(folders.readable) or "nothing else"
        copy = folders.workspace_copy
        copied = "" if copy is None else f" It is {WORKSPACE_IS_COPY.format(source=copy.source)}."
        about_folders = f"Your workspace is {folders.path}.{copied} You may also read: {readable}."
        parts.append(about_folders)
    return SystemPrompt("\n\n".join(parts), about_folders)


# Endings. An unknown status or error is a failure, never `done`.


def make_failed_ending(run: Run, error: BaseException) -> Ending:
    """Return the ending of a run whose work raised `error`."""
    primary = run.is_primary
    match error:
        case Limited():
            text, details = ending_texts("limited", name=run.name, primary=primary, detail=str(error))
            return Ending("limited", text, details)
        case Unconfirmed():
            return make_unconfirmed_ending(name=run.name, primary=primary, tool=str(error))
        case StreamCut():
            return Ending("disconnected", *ending_texts("disconnected", name=run.name, primary=primary))
        case Disconnected():
            text, details = ending_texts("disconnected", name=run.name, primary=primary)
            return Ending("disconnected", text, f"{details}: {error}")
        case RetinueError() | Failed():
            return Ending("failed", str(error), str(error))
        case _:
            text = f"{run.name} panicked: {type(error).__name__}: {error}"
            return Ending("failed", text, text)


def make_stopped_ending(run: Run) -> Ending:
    """Return the ending of a run that was told to stop, or whose task was cancelled without a request to stop."""
    status = run.stopping or "disconnected"
    if run.failure:
        return Ending("failed", run.failure, run.failure)
    stall = run.stall_timer
    if status == "timed_out" and stall is not None and stall.expired and stall.seconds is not None:
        return Ending(status, *stalled_texts(name=run.name, primary=run.is_primary, seconds=2 * stall.seconds))
    detail = "" if run.seconds is None else f"{round(run.seconds * 1000, 3):.3f}".rstrip("0").rstrip(".")
    return Ending(status, *ending_texts(status, name=run.name, primary=run.is_primary, detail=detail))


def make_ended_event(run: Run, ending: Ending, *, duration_ms: int) -> RunEnded:
    """Return the event of an ending. The text of an unfinished run is kept in `partial`, in addition to the text of its
    ending."""
    partial = ""
    if ending.status != "done":
        if ending.status not in STATUSES:
            ending = Ending("failed", *ending_texts("failed", name=run.name, primary=run.is_primary))
        if ending.status == "refused":
            text = ending.text or ending_texts("refused", name=run.name, primary=run.is_primary)[0]
            ending = Ending("refused", text, text)
        is_whole = run.view.remote is not None and bool(run.partial)  # a peer has joined its replies already
        partial = run.partial if is_whole else run.view.join_unfinished(run.partial)
    text, file = run.folders.fit_event_text(ending.text)
    changes = run.folders.changes
    return RunEnded(
        status=ending.status,
        final_response=text,
        duration_ms=duration_ms,
        error_details=ending.error,
        partial=partial,
        structured=ending.structured,
        file=file,
        changed_files=() if changes is None else changes.files,
        changed_count=0 if changes is None else changes.count,
        code=ending.code,
    )


def _make_request(run: Run) -> RemoteRequest:
    task = run.task
    workspace, readable = run.folders.resolve_for_peer()
    words = [text for text in (task.context, task.text) if text]
    words += [said.text for said in run.take_messages()]  # sent before the run could begin
    return RemoteRequest(
        ref=run.ref,
        profile=run.plan.profile.name,
        text="\n\n".join(words),
        before=_format_earlier_messages(run),
        continues="" if run.history is None else run.history.reference,
        workspace=workspace,
        readable=readable,
        limits=find_remaining_limits(run),
    )


def _format_earlier_messages(run: Run) -> str:
    """Return the messages of the run that this run continues, which the peer can only get from us."""
    past = run.history
    if past is None or past.reply is not None or len(past.thread) < 2:
        return ""
    return BEFORE + msgspec.json.encode(past.thread[:-1]).decode()


def _list_peer_runs(run: Run) -> list[Run]:
    """Return all runs that the peer has made below `run`, including ended ones."""
    found: list[Run] = []
    for child in run.children:
        if child.view.spawned.remote_id:
            found += [child, *_list_peer_runs(child)]
    return found


async def _adopt_all(run: Run, adapter: RemoteAdapter, remote: StartedRun, adoption: Adoption) -> Ending:
    """Adopt the reports of the peer until it reports the ending of the run itself, and return this ending. Raises
    Disconnected if the reports stop without it."""
    reports: AsyncGenerator[Report]
    known = remote.reference
    async with aclosing(remote.reports()) as reports:
        async for report in reports:
            try:
                ended = adoption.adopt(report)
            except Rejected:
                continue  # there is nobody to tell; the peer's own log has the report
            if ended is not None:
                run.keep_partial(ended.partial)
                for below in _list_peer_runs(run):
                    below.stop("disconnected")
                return ended.ending
            is_place = report.cursor and isinstance(report.body, TurnEnded | RunEnded) and not adoption.is_asking
            if is_place or remote.reference != known:
                known = remote.reference
                run.write(RunRemote(adapter=adapter.name, reference=known, cursor=report.cursor))
    raise Disconnected(UNKNOWN_ENDING)
