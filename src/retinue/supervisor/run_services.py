"""The services of the supervisor for one run. Fulfils the Link port of the loop.

Every event written through the services belongs to their run. This module knows approvals, budgets and the run's tree;
spawning is passed in as a callable.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET

from retinue.concurrency import start_task
from retinue.core import secrets
from retinue.core.approvals import Allow, Decision, Deny, describe_denial
from retinue.core.control import Control, ResumeOverrides
from retinue.core.errors import (
    CallCancelled,
    ConfigError,
    Limited,
    ModelError,
    RetinueError,
    Stop,
    StreamCut,
    ToolError,
    Unconfirmed,
)
from retinue.core.events import (
    INTERRUPTED,
    Body,
    Delta,
    Message,
    RunWaiting,
    Thinking,
    ToolCall,
    ToolResult,
    UsageReported,
    Warned,
)
from retinue.core.limits import EVENT_BYTES, OUTPUT_TOKENS
from retinue.core.messages import ASKER, USERS_OWN, Call, Reply, Request, RunRef, ToolSpec, Turn, UserTurn
from retinue.core.ports import HandedFiles, Log, Order, Outcome, Preview, Prices, Receipt, Row, RunningTeam, Ticket
from retinue.core.profiles import Profile, Task
from retinue.core.results import Result
from retinue.core.round_state import RoundState
from retinue.core.rules import ALLOW, Verdict
from retinue.core.sendable import repair_reply
from retinue.core.teams import TeamState
from retinue.core.usage import NO_USAGE, Usage, estimate_missing
from retinue.files.content import read_small_file
from retinue.files.opening import RefusedFile, open_folder
from retinue.log.reading import wait_until_read
from retinue.log.runs import describe_view
from retinue.log.summaries import describe_call
from retinue.supervisor import apply_changes
from retinue.supervisor.approvals import ASKS_PERSON, GIVEN_UP, TURN_INTERRUPTED, Approvals, current_spec, judge_call
from retinue.supervisor.budgets import CallReservation
from retinue.supervisor.run import Run
from retinue.supervisor.runfiles import RunFiles
from retinue.supervisor.tree import Tree, check_message
from retinue.workspaces.recording import NO_SNAPSHOT, publish_so_far
from retinue.workspaces.run_folders import RunFolders
from retinue.workspaces.workspace import is_empty_folder

T = TypeVar("T")
_ALLOW = Allow()
_PLAIN = (str, int, float, bool, NoneType)
NOBODY_ASKED = "Nobody could be asked."
NOTHING_TO_RUN = Deny("there is nothing to run")
NO_SPEC = ToolSpec("", "", {})
INTERRUPTED_CALL = (
    "The user interrupted this call before it had a result, so nobody knows whether it took effect. "
    "Look at how things are before you make it again."
)
NOT_RUN_CALL = "The user interrupted the turn before this call: it was not run."
TOOL_CHANGED = "{tool} was changed by its server after this call was allowed, so it was not run. Call it again."

SpawnChildren = Callable[[Tree, Run, Sequence[Order]], list[Ticket]]


class SharedServices(msgspec.Struct, frozen=True, eq=False):
    """The services that all runs of a supervisor share."""

    approvals: Approvals
    prices: Prices
    files: RunFiles
    spawn_children: SpawnChildren
    control: Control


class RunServices(msgspec.Struct, eq=False, gc=False):
    """The services of one run."""

    tree: Tree
    run: Run
    shared: SharedServices
    shown_changes: dict[str, str] | None = None  # digests of the previews of apply_subagent, by call id
    written_calls: dict[str, Awaitable[None] | None] | None = None  # calls of the reply that have not begun yet
    spoken: Sequence[str] = ()  # the pieces of text of the model call in flight
    reservation: CallReservation | None = None  # of the model call in flight, inside a budget
    sent_thread: secrets.GrowingList | None = None  # the thread without secrets, if any are known

    @property
    def ref(self) -> RunRef:
        return self.run.ref

    @property
    def task(self) -> Task:
        return self.run.task

    def emit(self, body: Body) -> None:
        self.tree.write(self.run, body)

    # Tool calls

    def write_calls(self, calls: Sequence[tuple[Call, ToolSpec]]) -> None:
        self._check_wanted()
        self.written_calls = {call.id: self._write_call(call, spec) for call, spec in calls}

    async def begin(self, call: Call, spec: ToolSpec, preview: Preview) -> Decision:
        run = self.run
        self._check_wanted()
        if spec.host:  # calls of a model are counted all at once, when its reply comes
            run.slot.begin_calls()
        try:
            calls = self.written_calls
            written = calls.pop(call.id) if calls and call.id in calls else self._write_call(call, spec)
            self._report_progress(call)
            if written is not None:
                await written
            if spec.tier == "none":
                return NOTHING_TO_RUN
            if spec.tier == USERS_OWN:
                return _ALLOW
            if spec.server:
                spec = self._seal(call, spec)
            verdict = judge_call(run, spec, call)
            if verdict is ALLOW or (verdict.what == "allow" and not verdict.rule):
                return _ALLOW
            return await self._decide(call, spec, preview, verdict)
        except ToolError:
            raise  # from the preview: the call gets a result
        except BaseException:
            if not call.within:  # else `withdraw` ends it
                run.slot.drop_call()
            raise

    def _write_call(self, call: Call, spec: ToolSpec) -> Awaitable[None] | None:
        """Write a call. A repeatable call need not wait for the disk. Nor need a spawning call: a child waits for its
        own first event, with its first reply at the latest."""
        body = ToolCall(
            call_id=call.id,
            name=call.name,
            args=copy_args(call.args),
            tier=spec.tier,
            display_name=spec.display_name,
            waits=spec.waits,
            timeout_seconds=_asked_timeout(call),
            host=spec.host,
            within=call.within,
        )
        return self.tree.write(self.run, body, not (spec.repeatable or spec.waits))

    def _seal(self, call: Call, spec: ToolSpec) -> ToolSpec:
        """Return the current spec of an MCP tool. Only this version of the tool is judged, shown and run."""
        now = current_spec(self.run, spec)
        self.run.seal_call(call.id, now.seal)
        return now

    async def _decide(self, call: Call, spec: ToolSpec, preview: Preview | str, verdict: Verdict) -> Decision:
        """Decide about a call that the policy does not simply allow."""
        if call.name == apply_changes.APPLY and verdict.what == "ask":
            shown, digest = await apply_changes.preview_child(self.run, call)
            if self.shown_changes is None:
                self.shown_changes = {}
            self.shown_changes[call.id] = digest
            if shown is None:
                return _ALLOW  # there is nothing to approve: the call itself says why
            preview = shown
        decision = await self.shared.approvals.decide(
            self.tree, self.run, call, spec=spec, preview=preview, verdict=verdict
        )
        self._check_wanted()
        return decision

    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None:
        body = ToolResult(
            call_id=call.id,
            name=call.name,
            text=outcome.text,
            success=outcome.success,
            duration_ms=duration_ms,
            file=outcome.file,
            outcome=outcome.code,
            sandbox=outcome.sandbox,
            gives=outcome.gives,
        )
        self.tree.write(self.run, body)
        self._report_progress(call, outcome)
        self.run.slot.end_call()

    def _report_progress(self, call: Call, outcome: Outcome | None = None) -> None:
        """Write into the thread of the parent that this subagent begins a tool call, or has its `outcome`. Only
        children of `subagent_NAME` do this. For a parent that spawns many children at once, the log would have their
        events twice."""
        run, parent = self.run, self.run.parent
        if parent is None or run.queues:
            return
        profile, turns = run.plan.profile, run.plan.profile.limits.turns
        told = run.view.describe_progress(
            self.tree.id,
            call.name,
            describe_call(call.name, call.args),
            nickname=profile.nickname,
            max_turns=None if turns is UNSET else turns,
            success=None if outcome is None else outcome.success,
        )
        self.tree.write(parent, told)

    def lend(self, call: Call) -> Awaitable[Outcome]:
        self._check_wanted()
        tool, context = self.run.plan.host.get(call.name), self.run.context
        if tool is None and call.name == apply_changes.APPLY:
            digest = None if self.shown_changes is None else self.shown_changes.pop(call.id, None)
            return apply_changes.apply_child(self.run, call, shown_digest=digest)
        if tool is None or context is None:
            raise ToolError(f"There is no host-side tool '{call.name}'.")
        seal = self.run.take_seal(call.id)
        if seal is not None and seal != getattr(tool, "spec", NO_SPEC).seal:
            raise ToolError(TOOL_CHANGED.format(tool=call.name))
        return tool(call.args, context)

    def withdraw(self, call: Call) -> None:
        if not self.run.is_stopping:
            self.finish(call, Outcome(GIVEN_UP, success=False), 0)

    def show_output(self, call_id: str, text: str) -> None:
        if text:
            self.show_delta("output", text, call_id=call_id)

    def claim_call_id(self, wanted: str) -> str:
        return self.run.claim_call_id(wanted)

    def spill(self, name: str) -> Path:
        return self.run.folders.spill(name)

    def record_activity(self) -> None:
        self.run.record_activity()

    async def ask_person(
        self, name: str, args: dict[str, Any], preview: str, asker: Sequence[str] = ()
    ) -> Decision | None:
        tree, run = self.tree, self._find_asker(asker)
        call = Call(f"{name}_{tree.seq + 1}", name, args)
        spec = ToolSpec(name, preview, {}, host=True)
        began = time.monotonic()
        tree.write(run, ToolCall(call.id, name, copy_args(args), host=True))
        self.run.slot.begin_calls()
        outcome = Outcome(NOBODY_ASKED, success=False)
        try:
            decision = await self.shared.approvals.decide(
                tree, run, call, spec=spec, preview=preview, verdict=ASKS_PERSON
            )
            outcome = Outcome("answered")
            if isinstance(decision, Deny):
                outcome = Outcome(describe_denial(decision), success=False)
            return decision
        except Unconfirmed:
            return None
        finally:
            duration = round((time.monotonic() - began) * 1000)
            tree.write(run, ToolResult(call.id, name, outcome.text, outcome.success, duration))
            self.run.slot.end_call()

    def _find_asker(self, reported: Sequence[str]) -> Run:
        """Return the run that asks through a call of this run: a peer's run below, reported under one of these ids. If
        the peer names no such run, return this run."""
        for run in self.tree.runs:
            if run.view.spawned.remote_id in reported and self.run in run.lineage and not run.is_stopping:
                return run
        return self.run

    def on_question(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        self.run.add_question_listener(listener)
        return partial(self.run.remove_question_listener, listener)

    # Model calls

    async def complete(self, turn: int, system: str, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        run, plan = self.run, self.run.plan
        self._check_wanted()
        if plan.model is None:
            raise ModelError(f"{run.name} has no model")
        account, reservation, usage, estimated = run.account, None, NO_USAGE, False
        again = None if account is None else self._reserve_again
        if secrets.has_secrets():
            system, thread = secrets.clean_text(system), self._clean_thread(thread)
        request = Request(run.ref, turn, plan.model_name, system, thread, tools, OUTPUT_TOKENS, 0, again)
        if account is not None:
            prices = self.shared.prices if account.counts_cost else None
            reservation = CallReservation(account, request, plan.tools_json, prices, OUTPUT_TOKENS)
            waiting = reservation.acquire()
            if waiting is not None:
                await run.without_stall_timer(waiting)
            self.reservation = reservation
        try:
            deltas = ReplyDeltas(self, turn)
            self.spoken = deltas.texts
            reply = await plan.model.complete(request, deltas)
            usage = reply.usage
            reply = _complete_usage(repair_reply(reply), request)
            usage, estimated = reply.usage, reply.estimated
            self.spoken = ()
        except (ModelError, Limited) as error:
            usage, estimated = error.usage, error.estimated
            self._report_failure(error, plan.model_name)
            raise
        except CallCancelled as error:
            usage, estimated = error.usage, error.estimated
            run.keep_partial(error.partial)
            cost = self.shared.prices.price(plan.model_name, usage)
            self.emit(UsageReported(plan.model_name, usage, cost, estimated))
            raise asyncio.CancelledError from None
        except (RetinueError, Stop):
            raise
        except Exception as error:  # the boundary to providers: report their errors in their own words
            raise ModelError(f"model provider panicked: {type(error).__name__}: {error}") from error
        finally:
            if reservation is not None:  # release the part of the worst case that was not spent
                self.reservation = None
                reservation.settle(usage, estimated=estimated)
        if reply.calls:
            reply = self._with_own_ids(reply)
            run.slot.begin_calls(len(reply.calls))
        self._report_reply(reply, plan.model_name)
        if run.first_write is not None:
            await run.wait_for_first_write()
        return reply

    def _clean_thread(self, thread: list[Turn]) -> list[Turn]:
        """Return the thread without known secrets. Turns that were cleaned before are not scanned again."""
        if self.sent_thread is None:
            self.sent_thread = secrets.GrowingList()
        return self.sent_thread.clean(thread)

    async def _reserve_again(self, spent: Usage, *, estimated: bool = False) -> None:
        """Settle the attempts of a model call so far, and reserve its worst case again for the retry."""
        if self.reservation is not None:
            await self.reservation.reserve_again(spent, self.run.without_stall_timer, estimated=estimated)

    def _with_own_ids(self, reply: Reply) -> Reply:
        """Return the reply with call ids that are unique in the run."""
        calls = reply.calls
        for index, call in enumerate(reply.calls):
            own = self.run.claim_call_id(call.id)
            if own != call.id:
                calls = (*calls[:index], msgspec.structs.replace(call, id=own), *calls[index + 1 :])
        return reply if calls is reply.calls else msgspec.structs.replace(reply, calls=calls)

    def show_delta(self, kind: str, text: str, turn: int = 0, offset: int = 0, *, call_id: str = "") -> None:
        """Show a piece of a reply, with its offset in the reply, or a piece of a call's output."""
        run, ref = self.run, self.run.ref
        if run.ending:
            return
        run.record_activity()
        if kind == "retry":
            self.emit(Warned(text, code="retry"))
            return
        delta = Delta(ref.tree, ref.run, ref.path, ref.agent, text, kind, turn=turn, offset=offset, call_id=call_id)
        if run.first_write is None:
            self.tree.log.show(delta)
        else:  # in order, and not before `run.spawned` is written
            run.first_write.add_done_callback(partial(_show_when_written, self.tree.log, delta))

    def _report_reply(self, reply: Reply, model: str) -> None:
        if reply.natives or reply.thoughts:
            self._report_thinking(reply)
        if reply.text and not reply.refused:
            self._write_message(reply.text, is_final=not reply.calls)
        cost = self.shared.prices.price(model, reply.usage)
        self.tree.write(self.run, UsageReported(model, reply.usage, cost, reply.estimated))

    def _write_message(self, text: str, *, is_final: bool) -> None:
        run, file = self.run, ""
        if len(text) * 4 > EVENT_BYTES:
            text, file = run.folders.fit_event_text(text)
        self.tree.write(run, Message(text, is_final, file, replies_to=run.view.replying_to if is_final else ""))

    def _report_thinking(self, reply: Reply) -> None:
        """Write the provider's own tool calls and its thinking, which came before the reply."""
        for native in reply.natives:
            self.emit(ToolCall(native.id, native.name, native.args, "provider"))
            self.emit(
                ToolResult(
                    call_id=native.id,
                    name=native.name,
                    text=native.result,
                    success=native.success,
                    content=native.content,
                    origin=native.origin,
                )
            )
        for thought in reply.thoughts:
            text, file = self.run.folders.fit_event_text(thought.text)
            self.emit(
                Thinking(
                    text,
                    thought.type,
                    signature=thought.signature,
                    file=file,
                    block_id=thought.id,
                    origin=thought.origin,
                    layout=thought.layout,
                )
            )

    def _report_failure(self, error: ModelError | Limited, model: str) -> None:
        if error.usage.total_tokens:
            self.emit(UsageReported(model, error.usage, self.shared.prices.price(model, error.usage), error.estimated))
        if isinstance(error, StreamCut):
            self.run.keep_partial(error.partial)

    # Children and inbox

    async def spawn(self, orders: Sequence[Order]) -> list[Ticket]:
        tickets = self.shared.spawn_children(self.tree, self.run, orders)
        if orders[0].files and orders[0].background:
            await self.shared.files.begun(self.tree.id, [ticket.run for ticket in tickets])
        return tickets

    async def wait(self, runs: Sequence[int]) -> list[Result[Any]]:
        children = self._find_below(runs)
        if children and children[0].queues:
            await self.run.slot.wait_without_slot(_join_all(children))
            await self.run.without_stall_timer(self.shared.files.written(self.tree.id, runs))
        else:
            await _join_all(children)
        return [child.result() for child in children]

    async def wait_for_any(self, runs: Sequence[int], seconds: float | None) -> None:
        wanted = self._find_below(runs)
        if not any(each.finished for each in wanted):
            await self.run.slot.wait_without_slot(_join_any(wanted, seconds))
        ended = [
            each.ref.run for each in wanted if each.finished and self.shared.files.keeps(self.tree.id, each.ref.run)
        ]
        if ended:
            await self.run.without_stall_timer(self.shared.files.written(self.tree.id, ended))

    async def cancel_run(self, run: int) -> bool:
        [wanted] = self._find_below([run])
        return wanted.stop("cancelled")

    async def send_message(self, run: int, text: str, *, seconds: float) -> Receipt:
        self._find_below([run])
        try:
            message = check_message(text)
        except ConfigError as error:
            raise ToolError(str(error)) from None
        receipt = await self.tree.send_message(run, message, source=ASKER)
        return await wait_until_read(self.tree.log, self.tree.id, run, receipt, seconds=seconds)

    async def continue_run(self, run: int, text: str, *, seconds: float | None, call_id: str) -> Ticket:
        [old] = self._find_below([run])
        self._check_wanted()
        waits = call_id if old.parent is self.run else ""  # else its own parent is told of the ending
        overrides = ResumeOverrides(seconds=seconds, files=True, call_id=waits)
        try:
            continued = await self.shared.control.continue_run(self.tree.id, run, text, overrides)
        except RetinueError as error:
            raise ToolError(str(error)) from None
        return self.ticket(continued.number)

    def ticket(self, run: int) -> Ticket:
        [wanted] = self._find_below([run])
        return wanted.ticket()

    def _find_below(self, numbers: Sequence[int]) -> list[Run]:
        """Return the runs below this run with these numbers. Raises ToolError for any other number."""
        found = []
        for number in numbers:
            below = self.tree.find_run(number)
            if below is None or not below.is_below(self.run):
                raise ToolError(f"There is no agent:{number} below this run.")
            found.append(below)
        return found

    def agents(self) -> list[Row]:
        """Return every run below this run, in the order they were made, including ended runs."""
        below = sorted(self.run.view.walk(), key=lambda view: view.number)
        return [describe_view(view, self.tree.id) for view in below if view is not self.run.view]

    def profiles(self) -> Sequence[Profile]:
        return self.run.plan.children

    def inbox(self) -> Sequence[UserTurn]:
        return self.run.take_messages() if self.run.inbox else ()

    async def children_done(self) -> bool:
        if self.run.waits_for_news and not self.run.task.conversation:
            await self.run.slot.wait_without_slot(self.run.wait_for_news())
        return bool(self.run.inbox)

    # Conversations

    async def run_interruptible(self, work: Coroutine[Any, Any, T]) -> T | None:
        run, task = self.run, start_task(work)
        run.attach_message(task)
        try:
            if run.leaving:
                run.interrupt_turn()
            return await task
        except asyncio.CancelledError:
            if not run.is_interrupted or run.is_stopping:
                raise
            await _join_all([child for child in run.children if child.stopping is not None])
            return None
        finally:
            run.attach_message(None)

    def keep_spoken(self) -> str:
        text, self.spoken = "".join(self.spoken), ()
        if text.strip():
            self._write_message(text, is_final=True)
        return text if text.strip() else ""

    def break_off_calls(self, calls: Sequence[Call]) -> dict[str, Outcome]:
        run, outcomes = self.run, {}
        begun = {call.call_id for call in run.view.calls}
        for call in calls:
            if call.id not in begun:
                self.emit(ToolCall(call.id, call.name, copy_args(call.args), tier="none"))
            text = INTERRUPTED_CALL if call.id in begun else NOT_RUN_CALL
            if call.id in (run.withheld_calls or ()):
                text = describe_denial(Deny(TURN_INTERRUPTED))
            outcomes[call.id] = Outcome(text, success=False)
            self.emit(ToolResult(call.id, call.name, text, success=False, outcome=INTERRUPTED))
        return outcomes

    async def wait_for_message(self, waiting: RunWaiting) -> bool:
        if not self.run.view.waits:  # else an earlier process wrote it
            self.emit(waiting)
        if not self.run.inbox:
            await self.run.wait_for_message()
        return not self.run.leaving

    # Teams

    @property
    def team_state(self) -> TeamState:
        return self.run.view.team or TeamState()

    def lead_team(self, team: RunningTeam) -> None:
        self.run.find_team().set_result(team)

    async def join_team(self) -> RunningTeam:
        assert self.run.parent is not None
        return await asyncio.shield(self.run.parent.find_team())

    async def publish_workspace(self, name: str) -> str:
        folders = self.run.folders
        if not folders.snapshots or is_empty_folder(folders.path):
            return ""
        try:
            warning, folder = await asyncio.to_thread(publish_so_far, folders, name, self.run.ref.run)
        except (RetinueError, OSError) as error:  # a full disk costs the copy, not the answer
            warning, folder = NO_SNAPSHOT.format(why=f"could not be copied: {error}"), ""
        if warning:
            self.emit(Warned(warning, code="workspace"))
        return folder

    @property
    def round_state(self) -> RoundState:
        return self.run.view.rounds or RoundState()

    async def read_handed_files(self, run: int, names: Sequence[str], limit: int) -> HandedFiles:
        [wanted] = self._find_below([run])
        team, handed = wanted.view.team, HandedFiles()
        given: Sequence[Run] = [wanted]
        if wanted.plan.team is not None or team is not None:
            decided = None if team is None else team.decided
            given = [each for each in wanted.children if decided is None or each.ref.run == decided.member_run]
        for each in given:  # of an undecided team, the first member that has the first file
            handed = await asyncio.to_thread(read_own_files, each.folders, names, limit)
            if names[0] in handed.found:
                break
        return handed

    async def wait_for_others(self, awaited: Awaitable[None]) -> None:
        await self.run.without_stall_timer(self.run.slot.wait_without_slot(awaited))

    def fit_event_text(self, text: str) -> tuple[str, str]:
        return self.run.folders.fit_event_text(text)

    def _check_wanted(self) -> None:
        """Raise CancelledError if the run was told to stop or is ending. A run that ignores the cancel gets nothing
        more."""
        if self.run.stopping is not None or self.run.ending:
            raise asyncio.CancelledError


class ReplyDeltas(msgspec.Struct, eq=False, gc=False):
    """The callback for the deltas of one model call. It shows each delta with its offset in the reply. `texts` holds
    the pieces of text."""

    services: RunServices
    turn: int
    offset: int = 0
    texts: list[str] = []

    def __call__(self, kind: str, text: str) -> None:
        self.services.show_delta(kind, text, self.turn, self.offset)
        if kind == "text":
            self.offset += len(text)
            self.texts.append(text)
        elif kind == "retry":
            self.offset = 0
            self.texts.clear()


def _show_when_written(log: Log, delta: Delta, written: asyncio.Future[None]) -> None:
    if not written.cancelled() and written.exception() is None:
        log.show(delta)


def _complete_usage(reply: Reply, request: Request) -> Reply:
    """Return the reply with an estimate of tokens that its model did not report, so that budgets count them."""
    usage = reply.usage
    if reply.counted or (usage.input_tokens and usage.output_tokens):
        return reply
    sent = len(request.system) + sum(len(turn.text) for turn in request.thread)
    received = len(reply.text) + sum(len(str(call.args)) for call in reply.calls)
    received += sum(len(thought.text) for thought in reply.thoughts)
    usage = estimate_missing(usage, sent=sent, received=received)
    return reply if usage == reply.usage else msgspec.structs.replace(reply, usage=usage, estimated=True)


async def _join_any(runs: Sequence[Run], seconds: float | None) -> None:
    """Wait until one of the runs has ended, for at most `seconds`."""
    joined = [run.join() for run in runs]
    try:
        await asyncio.wait(joined, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in joined:
            each.cancel()


async def _join_all(runs: Sequence[Run]) -> None:
    for run in runs:
        if not run.finished:
            await run.join()


def read_own_files(folders: RunFolders, names: Sequence[str], limit: int) -> HandedFiles:
    """Read files from the workspace of a run. A shared workspace is refused: none of its files is known to be the
    run's own."""
    found: dict[str, bytes] = {}
    refused: dict[str, str] = {}
    if folders.is_shared:
        return HandedFiles(refused=dict.fromkeys(names, "is not read from a shared workspace"))
    try:
        folder = open_folder(folders.path)
    except OSError:
        return HandedFiles()
    try:
        for name in names:
            try:
                found[name] = read_small_file(name, limit, dir_fd=folder)
            except FileNotFoundError:
                continue
            except RefusedFile as error:
                refused[name] = error.text
            except OSError as error:
                refused[name] = f"cannot be read: {error.strerror}"
    finally:
        os.close(folder)
    return HandedFiles(found, refused)


def copy_args(args: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that nobody else can change. The arguments shown and logged must stay the ones asked about."""
    copied = args.copy()
    for name, value in args.items():
        if type(value) not in _PLAIN:
            copied[name] = deepcopy(value)
    return copied


def _asked_timeout(call: Call) -> float | None:
    """Return the timeout among the arguments of a call, for the header that shows it."""
    value = call.args.get("executionTimeout", call.args.get("timeout"))
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
