"""The services of the supervisor for one run. Fulfils the Link port of the loop.

Every event written through the services belongs to their run. This module knows approvals, budgets and the run's tree;
spawning is passed in as a callable.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path

import msgspec
from msgspec import UNSET

from retinue.agent.tool_calls import run_tool_call
from retinue.core import secrets
from retinue.core.approvals import Allow, Decision
from retinue.core.context import QuestionTool
from retinue.core.errors import (
    CallCancelled,
    Limited,
    ModelError,
    RetinueError,
    Stop,
    StreamCut,
    ToolError,
    Unconfirmed,
)
from retinue.core.events import Body, Thinking, ToolCall, ToolResult, UsageReported
from retinue.core.limits import OUTPUT_TOKENS
from retinue.core.messages import (
    NOTHING_TO_RUN,
    QUESTION,
    USERS_OWN,
    Call,
    Model,
    OnDelta,
    Reply,
    Request,
    RunRef,
    SystemPrompt,
    ToolSpec,
    Turn,
    UserTurn,
)
from retinue.core.ports import Outcome, Preview, RunState
from retinue.core.round_state import RoundState
from retinue.core.rules import ALLOW, Verdict
from retinue.core.sendable import repair_reply
from retinue.core.servers import PREFIX
from retinue.core.teams import TeamState
from retinue.core.usage import NO_USAGE, Usage, estimate_missing
from retinue.log.summaries import describe_call
from retinue.log.threads import OpenCall
from retinue.supervisor import apply_changes
from retinue.supervisor.approvals import current_spec, judge_call
from retinue.supervisor.budgets import CallReservation
from retinue.supervisor.run_events import copy_args, write_message
from retinue.supervisor.run_roles import (
    ChildServices,
    ConversationServices,
    FileServices,
    ReplyDeltas,
    SharedServices,
)
from retinue.supervisor.tree import Run

_ALLOW = Allow()
NOBODY_ASKED = "Nobody could be asked."
NOT_JUDGED = (USERS_OWN, NOTHING_TO_RUN)
NO_SPEC = ToolSpec("", "", {})
TOOL_CHANGED = "{tool} was changed by its server after this call was allowed, so it was not run. Call it again."


class RunServices(msgspec.Struct, eq=False, gc=False):
    """The services of one run."""

    _run: Run
    _shared: SharedServices
    _shown_changes: dict[str, str] | None = None  # digests of the previews of apply_subagent, by call id
    _seals: dict[str, str] | None = None  # of the MCP tools by which allowed calls were judged, by call id
    _written_calls: dict[str, Awaitable[None] | None] | None = None  # calls of the reply that have not begun yet
    _deltas: ReplyDeltas | None = None  # of the model call in flight
    _reservation: CallReservation | None = None  # of the model call in flight, inside a budget
    _sent_thread: secrets.ListRedactor | None = None  # the thread without secrets, if any are known
    _open_calls: dict[str, OpenCall] | None = None  # begun by an earlier process, without a result

    @property
    def ref(self) -> RunRef:
        return self._run.ref

    @property
    def state(self) -> RunState:
        view = self._run.view
        return RunState(
            self._run.task,
            str(Path(self._run.folders.own).parent),
            view.team or TeamState(),
            view.rounds or RoundState(),
        )

    def emit(self, body: Body) -> None:
        self._run.write(body)

    # Roles, made when they are used: most runs use one or none

    @property
    def children(self) -> ChildServices:
        return ChildServices(self._run, self._shared)

    @property
    def commands(self) -> ChildServices:
        return ChildServices(self._run, self._shared)

    @property
    def conversation(self) -> ConversationServices:
        return ConversationServices(self._run, self._deltas)

    @property
    def team(self) -> Run:
        return self._run

    @property
    def files(self) -> FileServices:
        return FileServices(self._run)

    @property
    def local_calls(self) -> Run:
        return self._run

    # Tool calls

    def write_calls(self, calls: Sequence[tuple[Call, ToolSpec]]) -> None:
        self._run.check_wanted()
        self._written_calls = {call.id: self._write_call(call, spec) for call, spec in calls}

    async def begin(self, call: Call, spec: ToolSpec, preview: Preview) -> Decision:
        run = self._run
        run.check_wanted()
        if spec.host:  # calls of a model are counted all at once, when its reply comes
            run.slot.begin_calls()
        try:
            calls = self._written_calls
            written = calls.pop(call.id) if calls and call.id in calls else self._write_call(call, spec)
            self._report_progress(call)
            if written is not None:
                await written
            if spec.tier in NOT_JUDGED:
                return _ALLOW
            if spec.server:
                spec = self._seal(call, spec)
            if self._open_calls and (said := await self._recall_decision(call, spec)) is not None:
                return said
            verdict = judge_call(run, spec, call)
            if verdict is ALLOW or (verdict.what == "allow" and not verdict.rule):
                return _ALLOW
            return await self._decide(call, spec, preview, verdict)
        except ToolError:
            raise  # from the preview: the call gets a result
        except BaseException:
            if not call.within:  # else `give_up` ends it
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
        return self._run.write(body, not (spec.repeatable or spec.waits))

    async def _recall_decision(self, call: Call, spec: ToolSpec) -> Decision | None:
        """Return the decision about a call that an earlier process began, or None."""
        return None

    def _seal(self, call: Call, spec: ToolSpec) -> ToolSpec:
        """Return the current spec of an MCP tool. Only this version of the tool is judged, shown and run."""
        now = current_spec(self._run, spec)
        if self._seals is None:
            self._seals = {}
        self._seals[call.id] = now.seal
        return now

    async def _decide(self, call: Call, spec: ToolSpec, preview: Preview | str, verdict: Verdict) -> Decision:
        """Decide about a call that the policy does not simply allow."""
        if call.name == apply_changes.APPLY and verdict.what == "ask":
            shown, digest = await apply_changes.preview_child(self._run, call)
            if self._shown_changes is None:
                self._shown_changes = {}
            self._shown_changes[call.id] = digest
            if shown is None:
                return _ALLOW  # there is nothing to approve: the call itself says why
            preview = shown
        decision = await self._shared.approvals.decide(self._run, call, spec=spec, preview=preview, verdict=verdict)
        self._run.check_wanted()
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
        self._run.write(body)
        self._report_progress(call, outcome)
        self._run.slot.end_call()

    def _report_progress(self, call: Call, outcome: Outcome | None = None) -> None:
        """Write into the thread of the parent that this subagent begins a tool call, or has its `outcome`. Only
        children of `subagent_NAME` do this. For a parent that spawns many children at once, the log would have their
        events twice."""
        run, parent = self._run, self._run.parent
        if parent is None or run.queues:
            return
        profile = run.plan.profile
        turns, about = profile.limits.turns, describe_call(call.name, call.args)
        max_turns, success = None if turns is UNSET else turns, None if outcome is None else outcome.success
        told = run.view.describe_progress(run.tree.id, call.name, about, success, profile.nickname, max_turns)
        parent.write(told)

    def run_host_tool(self, call: Call) -> Awaitable[Outcome]:
        run = self._run
        run.check_wanted()
        tool, context = run.plan.host.get(call.name), run.context
        if tool is None and call.name == apply_changes.APPLY:
            digest = None if self._shown_changes is None else self._shown_changes.pop(call.id, None)
            return apply_changes.apply_child(run, call, shown_digest=digest)
        if tool is None or context is None:
            raise ToolError(f"There is no host-side tool '{call.name}'.")
        seal = None if self._seals is None else self._seals.pop(call.id, None)
        if seal is not None and seal != getattr(tool, "spec", NO_SPEC).seal:
            raise ToolError(TOOL_CHANGED.format(tool=call.name))
        return tool(call.args, context)

    def give_up(self, call: Call, text: str, duration_ms: int) -> None:
        if not (call.within and self._run.is_stopping):
            self.finish(call, Outcome(text, success=False), duration_ms)

    # Python functions and MCP tools

    def spill(self, name: str) -> Path:
        return self._run.folders.spill(name)

    def record_activity(self) -> None:
        self._run.record_activity()

    async def ask(self, call: Call, question: QuestionTool, asker: Sequence[str] = ()) -> None:
        needs_person = question.spec.tier == QUESTION
        run, call_id = self._find_asker(call.name, asker), call.id or f"{call.name}_{self._run.tree.seq + 1}"
        call = Call(call_id, call.name, call.args)
        services = QuestionServices(run, self._shared) if needs_person else self
        run.check_wanted()  # before the call is written, so that every call written has a result
        started = time.monotonic()
        try:
            await run_tool_call(call, question, run.folders, services)
        except BaseException as error:
            if not needs_person:
                raise
            is_unasked = isinstance(error, Unconfirmed | asyncio.CancelledError)
            text, duration = NOBODY_ASKED if is_unasked else str(error), round((time.monotonic() - started) * 1000)
            run.write(ToolResult(call.id, call.name, text, success=False, duration_ms=duration))
            if not isinstance(error, Unconfirmed):
                raise

    def _find_asker(self, name: str, reported: Sequence[str]) -> Run:
        """Return the run that asks through a call of this run: a run below that the server of the question `name`
        reports under one of these ids. If the server names no such run of its own, return this run."""
        for run in self._run.tree.runs:
            spawned = run.view.spawned
            is_theirs = spawned.remote_id in reported and name == f"{PREFIX}{spawned.server}"
            if is_theirs and self._run in run.lineage and not run.is_stopping:
                return run
        return self._run

    # Model calls

    async def complete(self, turn: int, system: SystemPrompt, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        run, plan = self._run, self._run.plan
        run.check_wanted()
        if plan.model is None:
            raise ModelError(f"{run.name} has no model")
        account, reservation, usage, estimated = run.account, None, NO_USAGE, False
        again = None if account is None else self._reserve_again
        if secrets.known:
            system, thread = _clean_prompt(system), self._clean_thread(thread)
        # Positional, as the reservation: keywords take 0.3 % of the instructions of a run (`bench counts`).
        request = Request(
            run.ref, turn, plan.model_name, system.text, thread, tools, OUTPUT_TOKENS, 0, again, system.folders
        )
        if account is not None:
            prices = self._shared.prices if account.counts_cost else None
            reservation = CallReservation(account, request, plan.tools_bytes, prices, OUTPUT_TOKENS)
            waiting = account.reserve(reservation)
            if waiting is not None:
                await run.without_stall_timer(account.wait(reservation, waiting))
            self._reservation = reservation
        try:
            deltas = ReplyDeltas(run, turn)
            self._deltas = deltas
            reply = await (
                _complete_clean(plan.model, request, deltas) if secrets.known else plan.model.complete(request, deltas)
            )
            usage = reply.usage
            reply = repaired if (repaired := repair_reply(reply)).counted else _complete_usage(repaired, request)
            usage, estimated = reply.usage, reply.estimated
            self._deltas = None
        except (ModelError, Limited) as error:
            usage, estimated = error.usage, error.estimated
            self._report_failure(error, plan.model_name)
            raise
        except CallCancelled as error:
            usage, estimated = error.usage, error.estimated
            run.keep_partial(error.partial)
            cost = self._shared.prices.price(plan.model_name, usage)
            self.emit(UsageReported(plan.model_name, usage, cost, estimated))
            raise asyncio.CancelledError from None
        except (RetinueError, Stop):
            raise
        except Exception as error:  # the boundary to providers: report their errors in their own words
            raise ModelError(f"model provider panicked: {type(error).__name__}: {error}") from error
        finally:
            if reservation is not None:  # release the part of the worst case that was not spent
                self._reservation = None
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
        if self._sent_thread is None:
            self._sent_thread = secrets.ListRedactor()
        return self._sent_thread.clean(thread)

    async def _reserve_again(self, spent: Usage, *, estimated: bool = False) -> None:
        """Settle the attempts of a model call so far, and reserve its worst case again for the retry."""
        if self._reservation is not None:
            await self._reservation.reserve_again(spent, self._run.without_stall_timer, estimated=estimated)

    def _with_own_ids(self, reply: Reply) -> Reply:
        """Return the reply with call ids that are unique in the run."""
        calls = reply.calls
        for index, call in enumerate(reply.calls):
            own = self._run.claim_call_id(call.id)
            if own != call.id:
                calls = (*calls[:index], msgspec.structs.replace(call, id=own), *calls[index + 1 :])
        return reply if calls is reply.calls else msgspec.structs.replace(reply, calls=calls)

    def _report_reply(self, reply: Reply, model: str) -> None:
        if reply.natives or reply.thoughts:
            self._report_thinking(reply)
        if reply.text and not reply.refused:
            write_message(self._run, reply.text, is_final=not reply.calls)
        cost = self._shared.prices.price(model, reply.usage)
        self._run.write(UsageReported(model, reply.usage, cost, reply.estimated))

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
            text, file = self._run.folders.fit_event_text(thought.text)
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
            self.emit(UsageReported(model, error.usage, self._shared.prices.price(model, error.usage), error.estimated))
        if isinstance(error, StreamCut):
            self._run.keep_partial(error.partial)

    # Inbox

    def inbox(self) -> Sequence[UserTurn]:
        return self._run.take_messages() if self._run.inbox else ()

    async def children_done(self) -> bool:
        if self._run.waits_for_news and not self._run.task.conversation:
            await self._run.slot.wait_without_slot(self._run.wait_for_news())
        return bool(self._run.inbox)


class QuestionServices(RunServices, eq=False, gc=False):
    """The services of a run for a question that only a person can answer. It is not progress of the run."""

    def _report_progress(self, call: Call, outcome: Outcome | None = None) -> None:
        pass


def _complete_usage(reply: Reply, request: Request) -> Reply:
    """Return the reply with an estimate of tokens that its model did not report, so that budgets count them."""
    usage = reply.usage
    if usage.input_tokens and usage.output_tokens:
        return reply
    sent = len(request.system) + sum(len(turn.text) for turn in request.thread)
    received = len(reply.text) + sum(len(str(call.args)) for call in reply.calls)
    received += sum(len(thought.text) for thought in reply.thoughts)
    usage = estimate_missing(usage, sent=sent, received=received)
    return reply if usage == reply.usage else msgspec.structs.replace(reply, usage=usage, estimated=True)


def _asked_timeout(call: Call) -> float | None:
    """Return the timeout among the arguments of a call, for the header that shows it."""
    value = call.args.get("executionTimeout", call.args.get("timeout"))
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _clean_prompt(system: SystemPrompt) -> SystemPrompt:
    return SystemPrompt(secrets.clean_text(system.text), folders=secrets.clean_text(system.folders))


async def _complete_clean(model: Model, request: Request, on_delta: OnDelta) -> Reply:
    """Make a model call, and remove known secrets from its deltas and its reply."""
    streams: dict[str, secrets.SecretStream] = {}

    def flush() -> None:
        for kind, stream in streams.items():
            rest = stream.rest()
            if rest:
                on_delta(kind, rest)

    def show(kind: str, text: str) -> None:
        if kind == "retry":
            flush()  # the held-back tail of the failed attempt must not join the next attempt
            shown = secrets.clean_text(text)
        else:
            shown = streams.setdefault(kind, secrets.SecretStream()).feed(text)
        if shown:
            on_delta(kind, shown)

    reply = repair_reply(await model.complete(request, show))  # before `clean_value` walks its values
    flush()
    return msgspec.structs.replace(
        reply,
        text=secrets.clean_text(reply.text),
        calls=secrets.clean_value(reply.calls),
        thoughts=secrets.clean_value(reply.thoughts),
    )
