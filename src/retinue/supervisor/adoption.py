"""Adoption: runs of a peer become runs of our tree, and the peer's reports become their events.

One `Adoption` holds the runs of one peer below one run of ours: runs reported by an MCP server, or runs below a run
started through an adapter. Numbers, paths, names and the ids of questions are ours. The validator checks every report
first. An adopted run holds no slot and no tools. It ends once: when the peer reports its ending, when the run above it
ends, or when it is stopped here. Messages, cancels and answers go to the peer through the `RemoteRun` of the adapter.

A question of a peer that takes answers is ours: a person is asked here, and meanwhile the clocks of our runs stand
still, as for our own questions. Any other question is only the peer's claim that somebody is asked elsewhere. Clocks
stand still for such claims too, because people do answer at an honest peer, but not longer than `ELSEWHERE_SECONDS`
in all: a peer must not be able to switch off the deadlines of the runs that wait for it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from retinue.concurrency import Deadline, TaskOwner
from retinue.core.approvals import INPUT_REQUIRED, Allow, Decision, Deny
from retinue.core.control import ONLY_WATCHED
from retinue.core.errors import Unconfirmed
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Event,
    Gap,
    Inbox,
    RunEnded,
    RunSpawned,
    RunStarted,
    UsageReported,
    Warned,
)
from retinue.core.messages import ASKER, FOREIGN, QUESTION, Call, RunRef, ToolSpec
from retinue.core.plans import Plan
from retinue.core.ports import Clock, Receipt
from retinue.core.profiles import Profile, Task
from retinue.core.results import Ending, Status, ending_texts
from retinue.core.secrets import SecretStream, clean_value
from retinue.log.blocks import format_json
from retinue.log.runs import RunView
from retinue.remote.port import Peer, RemoteDelta, RemoteRun, RemoteSpawned, Report, Undelivered
from retinue.remote.validator import Bounds, Rejected, ReportValidator
from retinue.sandbox.in_process import IN_PROCESS
from retinue.supervisor.approvals import Approvals, judge_call
from retinue.supervisor.budgets import Account
from retinue.supervisor.slots import SlotHolder
from retinue.supervisor.tree import Run, Tree, new_span_id
from retinue.workspaces.run_folders import RunFolders, StateFolder

CONFIRM_SECONDS = 5.0
ELSEWHERE_SECONDS = 3600.0
MOST_QUESTIONS = 100
BY_PEER = "peer"  # the author of an answer that was given at the peer
UNCONFIRMED = "the peer has not confirmed that the run received the message"
FROM_PEER = "[as the remote agent shows it, where it runs]"
NOBODY_ASKED = "nobody could be asked"
UNDELIVERED = "the answer did not reach the agent: {why}"
TOO_MANY = f"more than {MOST_QUESTIONS} questions are open"
ASKED_AGAIN = "the question was open when the process ended; the run asks again if it still needs an answer"
_OWN_PACE = (ApprovalAsked, ApprovalDecided)  # asked again after a crash, so never skipped as written


class AdoptedRun(Run, eq=False):
    """A run of a peer, as a run of our tree. `key` is the peer's id for the run. `adoption` is None if the log has the
    run but no peer reports it any more."""

    key: str = ""
    adoption: Adoption | None = None

    def stop(self, status: Status, *, failure: str = "") -> bool:
        """End the run here at once, and ask its peer to stop it. Later reports about the run are rejected."""
        if self.ending:
            return False
        self.mark_stopping(status)
        text, error = (failure, failure) if failure else ending_texts(status, name=self.name, primary=False)
        self.end(Ending("failed" if failure else status, text, error), below=status)
        if self.adoption is not None:
            self.adoption.cancel(self)
        return True

    def end(self, ending: Ending, *, partial: str = "", below: Status = "disconnected") -> None:
        """Write the ending of the run, unless it has an ending. First end the unfinished runs below, with the status
        `below`."""
        if self.ending:
            return
        self.begin_ending()
        if self.adoption is not None:
            self.adoption.forget(self.key)
        for child in self.children:
            child.stop(below)
        partial = partial or self.view.last_message
        milliseconds = round(self.measure_duration() * 1000)
        self.write(RunEnded.from_ending(ending, duration_ms=milliseconds, partial=partial))
        self.finish()

    def release(self) -> None:
        Run.release(self)
        self.set_relay(None)
        self.adoption = None

    def attach(self, adoption: Adoption) -> None:
        """Connect the run to `adoption`, which takes reports about the run and carries messages to it."""
        self.adoption = adoption
        self.set_relay(partial(adoption.send, self.key))


@dataclass(slots=True, eq=False)
class _PeerQuestion:
    """A question of a peer that is asked here. `approval_id` is its id here, once a person is asked. `is_closed` is
    True if the peer has closed it after a person's answer, which may still be on its way."""

    task: asyncio.Task[None]
    approval_id: str = ""
    is_closed: bool = False


class _Speech:
    """One kind of streamed text of a peer's run, made ready to be shown: without secrets, and each piece with its
    offset in the reply. A piece that does not follow the previous piece leaves a gap, until the event with the whole
    text arrives."""

    __slots__ = ("_clean", "_heard", "_shown", "_turn")

    def __init__(self) -> None:
        self._clean, self._turn, self._heard, self._shown = SecretStream(), 0, 0, 0

    def apply(self, piece: RemoteDelta) -> RemoteDelta:
        if (piece.turn, piece.offset) != (self._turn, self._heard):
            self._clean, self._turn, self._shown = SecretStream(), piece.turn, piece.offset
        self._heard = piece.offset + (len(piece.text) if piece.kind == "text" else 0)
        shown, offset = self._clean.feed(piece.text), self._shown
        self._shown += len(shown) if piece.kind == "text" else 0
        return msgspec.structs.replace(piece, text=shown, offset=offset)


class _Patience:
    """The time for which the clocks of our runs stand still because the peer says that it asks a person:
    `ELSEWHERE_SECONDS` for all its questions together. Then the clocks go on, whatever the peer says."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._rest: Deadline | None = None  # runs while a clock stands still
        self._is_used_up = False
        self._paused: dict[str, Run] = {}

    def pause(self, key: str, run: Run) -> None:
        """Stop the clocks of a run and of the runs above it, unless they stand still already or the time is used
        up."""
        if key in self._paused or self._is_used_up:
            return
        if self._rest is None:
            self._rest = Deadline(ELSEWHERE_SECONDS, self._clock, self._resume_all)
        elif not self._paused:
            self._rest.resume()
        self._paused[key] = run
        run.pause_for_person()

    def resume(self, key: str) -> None:
        """Let the clocks of a run go on, if they were stopped for it."""
        run = self._paused.pop(key, None)
        if run is None:
            return
        run.resume_after_person()
        if not self._paused and self._rest is not None and not self._is_used_up:
            self._rest.pause()

    def _resume_all(self) -> None:
        self._is_used_up = True
        for key in list(self._paused):
            self.resume(key)


class Adoption:
    """The runs of one peer in one tree. `account` pays for their spending, if they were started from here."""

    def __init__(
        self,
        tree: Tree,
        peer: Peer,
        remote: RemoteRun,
        *,
        state: StateFolder,
        approvals: Approvals,
        account: Account | None = None,
        bounds: Bounds | None = None,
    ) -> None:
        self._tree, self._peer, self._remote = tree, peer, remote
        self._state, self._approvals, self._account = state, approvals, account
        self._validator = ReportValidator(peer.who, bounds)
        self._runs: dict[str, Run] = {}
        self._anchors: set[str] = set()
        self._words: dict[str, deque[tuple[str, str, asyncio.Future[int]]]] = {}  # text, message id, seq
        self._tasks = TaskOwner()
        # The open questions, by the peer's ids of the run and of the question:
        self._questions: dict[tuple[str, str], _PeerQuestion] = {}  # asked here
        self._elsewhere: dict[tuple[str, str], ApprovalAsked] = {}  # asked at the peer, with an id of ours
        self._patience = _Patience(tree.clock)
        self._written: deque[tuple[int, str]] = deque()
        self._speech: dict[tuple[str, str], _Speech] = {}

    @property
    def is_over(self) -> bool:
        """True if the tree has ended. A run that continues it in this process belongs to another Tree object."""
        return self._tree.is_over

    @property
    def is_asking(self) -> bool:
        """True while a question of the peer has no answer."""
        return bool(self._elsewhere or self._questions)

    def add_run(self, key: str, run: Run) -> None:
        """Take reports about `run` under this `key`, and about runs below it."""
        if key not in self._runs:
            self._runs[key] = run
            self._validator.announce(key, depth=run.depth)
            if isinstance(run, AdoptedRun):
                run.attach(self)
                for asked in run.view.approvals:  # by an earlier process
                    self._write_answer(run, asked, by="expiry", allowed=False, reason=ASKED_AGAIN)
            if run.ended:
                self._validator.end(key)

    def restore(self, written: Iterable[Event]) -> None:
        """Skip reports that an earlier process has written as events. `written` holds these events, in order."""
        self._written = deque((event.run, event.kind) for event in written)

    def find_status(self, key: str) -> str | None:
        """Return the status of a run of the peer, "" if it has not ended, or None if no report has made it a run of
        ours."""
        found = self._runs.get(key)
        if not isinstance(found, AdoptedRun):
            return None
        return found.view.status or ""

    def forget(self, key: str) -> None:
        """Reject all further reports about a run, and give up its open questions and unconfirmed messages."""
        self._validator.end(key)
        for _, _, place in self._words.pop(key, ()):
            if not place.done():
                place.set_result(0)
        for (run, _), question in list(self._questions.items()):
            if run == key:
                question.task.cancel()
        for asked in [asked for asked in self._elsewhere if asked[0] == key]:
            del self._elsewhere[asked]
        self._patience.resume(key)

    def close(self) -> None:
        for key in list(self._runs):
            self.forget(key)

    # Reports of the peer

    def adopt(self, report: Report, *, below: int | None = None) -> RunEnded | None:
        """Write a report of the peer as an event. Return the ending if the report ends a run other than an AdoptedRun,
        for the driver of the run. A new run may be below our run number `below`, about which the peer reports nothing
        itself. Raises Rejected if the peer may not report this."""
        if below is not None and isinstance(report.body, RemoteSpawned):
            self._anchors.add(report.body.parent)
            self.add_run(report.body.parent, self._tree.runs[below])
        parent = self._runs.get(report.body.parent) if isinstance(report.body, RemoteSpawned) else None
        if parent is not None and (parent.ending or parent.stopping is not None):
            raise Rejected("parent_ended", report.run)
        if report.run in self._anchors:
            raise Rejected("unknown", report.run)
        ending = None
        for each in self._validator.check(report):
            ending = self._apply(each) or ending
        return ending

    def _apply(self, report: Report) -> RunEnded | None:
        body = report.body
        if isinstance(body, RemoteSpawned):
            self._spawn(report.run, body)
            return None
        run = self._runs[report.run]
        match body:
            case RemoteDelta():
                self._show(report.run, run, body)
            case RunEnded() if isinstance(run, AdoptedRun):
                below: Status = "cancelled" if body.status == "cancelled" else "disconnected"
                run.end(body.ending, partial=body.partial, below=below)
            case RunEnded():
                return body
            case RunStarted(sandbox=sandbox):
                self._write(run, RunStarted(self._peer.runtime, sandbox))
            case Inbox(source=source) if source == ASKER and self._words.get(report.run):
                self._confirm(report.run, run)
            case ApprovalAsked() if self._remote.capabilities.answer:
                self._ask(report.run, run, body)
            case ApprovalAsked():
                self._note_question(report.run, run, body)
            case ApprovalDecided():
                self._close_question(report.run, run, body)
            case _:
                self._write(run, body)
        return None

    def _show(self, key: str, run: Run, said: RemoteDelta) -> None:
        """Show a piece of text while a run of the peer streams it."""
        run.record_activity()
        body = self._speech.setdefault((key, said.kind), _Speech()).apply(said)
        if body.text:
            run.show_delta(body.kind, body.text, body.turn, body.offset)

    def _write(self, run: Run, body: Body) -> None:
        if self._written and not isinstance(body, _OWN_PACE) and self._is_written(run, body):
            return
        run.write(body)
        if isinstance(body, ApprovalAsked):
            self._tree.count_question()
        elif isinstance(body, UsageReported) and self._account is not None:
            self._account.add_reported(body)

    def _is_written(self, run: Run, body: Body) -> bool:
        """Return True if an earlier process has written this event. Reports come again in their first order, so events
        that only we have written are passed over."""
        while self._written:
            if self._written.popleft() == (run.ref.run, body.kind):
                return True
        return False

    def _spawn(self, key: str, body: RemoteSpawned) -> None:
        tree, parent = self._tree, self._runs[body.parent]
        label, subagent_id = _choose_name(tree, body.label or body.agent), _choose_name(tree, body.subagent_id or key)
        runtime = self._peer.runtime
        ref = tree.name_next_run(parent, body.agent, label=label, subagent_id=subagent_id)
        run = make_adopted(ref, Task(body.task), parent, state=self._state, runtime=runtime, key=key)
        run.open(
            RunSpawned(
                parent=parent.ref.run,
                label=ref.label,
                depth=run.depth,
                task=body.task,
                subagent_id=subagent_id,
                workspace="",
                profile={"name": body.agent, "runtime": runtime},
                model=body.model,
                call_id=body.call_id,
                trace_id=tree.trace_id,
                span_id=new_span_id(),
                server=self._peer.server,
                remote_id=key,
            ),
        )
        self.add_run(key, run)
        if body.is_at_work:
            run.write(RunStarted(runtime))

    # Questions of the peer

    def _note_question(self, key: str, run: Run, body: ApprovalAsked) -> None:
        """Write a question that is answered at the peer, under an id of ours."""
        place = key, body.approval_id
        if place in self._elsewhere:
            return
        if len(self._elsewhere) >= MOST_QUESTIONS:
            run.write(Gap(1, f"{self._peer.who} asks again, but {TOO_MANY}"))
            return
        asked = self._elsewhere[place] = msgspec.structs.replace(
            body,
            approval_id=run.next_approval_id(),
            label=None if run.parent is None else run.ref.label,
        )
        self._write(run, asked)
        self._patience.pause(key, run)

    def _close_question(self, key: str, run: Run, body: ApprovalDecided) -> None:
        """Close a question that was answered at the peer. An answer to a question that was not asked is nothing. An
        answer that a person has already given here is still sent."""
        place = key, body.approval_id
        question = self._questions.get(place)
        if question is not None:
            written = [asked for asked in run.view.approvals if asked.approval_id == question.approval_id]
            question.is_closed = True
            if written or not question.approval_id:
                del self._questions[place]
                question.task.cancel()
        else:
            written = [self._elsewhere.pop(place)] if place in self._elsewhere else []
            if all(other != key for other, _ in self._elsewhere):
                self._patience.resume(key)
        for asked in written:
            self._write_answer(run, asked, by=BY_PEER, allowed=body.allowed, reason=body.reason, args=body.args)

    def _write_answer(
        self, run: Run, asked: ApprovalAsked, *, by: str, allowed: bool, reason: str, args: dict[str, Any] | None = None
    ) -> None:
        """Write the answer to a question that nobody has answered here. It is about this one call."""
        body = ApprovalDecided(
            approval_id=asked.approval_id,
            call_id=asked.call_id,
            allowed=allowed,
            reason=reason,
            by=by,
            tool=asked.tool,
            args=args,
        )
        run.write(body)

    def _ask(self, key: str, run: Run, body: ApprovalAsked) -> None:
        place = key, body.approval_id
        known = self._questions.get(place)
        if known is not None and known.is_closed:
            known.task.cancel()  # its answer must not go to this question
        if known is None or known.is_closed:
            is_flood = len(self._questions) >= MOST_QUESTIONS
            task = self._tasks.start(self._refuse(key, body) if is_flood else self._answer(key, run, body))
            self._questions[place] = _PeerQuestion(task)
            task.add_done_callback(partial(self._forget_question, place))

    async def _refuse(self, key: str, body: ApprovalAsked) -> None:
        """Answer no without asking a person, who could not read so many questions."""
        with suppress(Undelivered):
            await self._remote.answer(key, body.approval_id, Deny(TOO_MANY))

    def _forget_question(self, place: tuple[str, str], task: asyncio.Task[None]) -> None:
        if place in self._questions and self._questions[place].task is task:
            del self._questions[place]

    async def _answer(self, key: str, run: Run, body: ApprovalAsked) -> None:
        """Ask the peer's question here, and send the answer to the peer. If nobody can be asked, the answer is no."""
        question = self._questions[key, body.approval_id]
        call = Call(body.call_id or body.approval_id, body.tool, body.args)
        spec = ToolSpec(body.tool, "", {}, tier=QUESTION if body.tool == INPUT_REQUIRED else FOREIGN)
        verdict = judge_call(run, spec, call)
        preview = body.preview
        if spec.tier == FOREIGN:
            preview = f"{FROM_PEER}\n{preview or format_json(clean_value(body.args))}"
        decision: Decision = Allow()

        def note_id(approval_id: str) -> None:
            question.approval_id = approval_id

        if verdict.what != "allow" or verdict.rule:
            try:
                decision = await self._approvals.decide(
                    run, call, spec=spec, preview=preview, verdict=verdict, runs_here=False, on_asked=note_id
                )
            except Unconfirmed:
                decision = Deny(NOBODY_ASKED)
        try:
            await self._remote.answer(key, body.approval_id, decision)
        except Undelivered as error:  # the peer's next reports say how it continues
            run.write(Warned(UNDELIVERED.format(why=error), code="answer_undelivered"))

    # Commands for the peer

    async def send(self, key: str, text: str, message_id: str = "") -> Receipt:
        """Send a message to a run of the peer. The message is written when the peer confirms it."""
        run = self._runs[key]
        if not self._remote.capabilities.send:
            who = f"{run.ref.tree}/{run.ref.run}"
            return Receipt("elsewhere", why=ONLY_WATCHED.format(who=who, where=self._peer.where))
        place: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        words = self._words.setdefault(key, deque())
        words.append((text, message_id, place))
        sending = self._tasks.start(self._remote.send(key, text))
        try:
            either: set[asyncio.Future[Any]] = {sending, place}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not place.done():
                await sending
                await asyncio.wait([place], timeout=CONFIRM_SECONDS)
        except Undelivered as error:
            if (text, message_id, place) in words:
                words.remove((text, message_id, place))
            return Receipt("too_late", why=str(error))
        finally:
            sending.cancel()
        seq = place.done() and place.result()
        return Receipt("queued", seq) if seq else Receipt("too_late", why=UNCONFIRMED)

    def _confirm(self, key: str, run: Run) -> None:
        text, message_id, place = self._words[key].popleft()
        run.write(Inbox(text, source="user", message_id=message_id))
        if not place.done():
            place.set_result(self._tree.seq)

    def cancel(self, run: AdoptedRun) -> None:
        """Ask the peer to stop a run, unless a run of the peer above it is told to stop too. The peer ends everything
        below a run with it; if it heard of the run below first, the run above would go on for a moment."""
        above = run.parent
        if above is not None and above.stopping is not None and above in self._runs.values():
            return
        with suppress(Undelivered):  # the run has ended here, whatever its peer still does
            self._remote.cancel(run.key)


def _choose_name(tree: Tree, wanted: str) -> str:
    """Return a name for a run of a peer that names no other run of the tree, not even by its number: who names a run
    of ours must not get the peer's instead."""
    taken = {name for run in tree.runs for name in (run.ref.label, run.ref.subagent_id, run.ref.path)}
    name, count = wanted, 1
    while name in taken or name.removeprefix("agent:").removeprefix(f"{tree.id}/").isdigit():
        count += 1
        name = f"{wanted}-{count}"
    return name


def make_adopted(
    ref: RunRef,
    task: Task,
    parent: Run,
    *,
    state: StateFolder,
    runtime: str,
    key: str,
    account: Account | None = None,
    view: RunView | None = None,
) -> AdoptedRun:
    """Return a new AdoptedRun, or one with its `view` from the log. The caller adds it to the tree."""
    folders = RunFolders(state.run_folder(ref.tree, ref.run), "", ())
    run = AdoptedRun(
        tree=parent.tree,
        ref=ref,
        plan=Plan(profile=Profile(runtime), runtime=IN_PROCESS),
        task=task,
        parent=parent,
        folders=folders,
        policy=parent.policy,
        slot=SlotHolder(None),
        account=account,
        depth=parent.depth + 1,
        started=parent.tree.clock.monotonic(),
        key=key,
        view=view,  # type: ignore[arg-type] # set when `run.spawned` is folded
    )
    run.set_stall_timer(None)
    return run
