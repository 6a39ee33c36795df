"""The supervisor's end of a link, for a run in this process: plain calls on the same port as over any wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from copy import deepcopy
from types import NoneType
from typing import TYPE_CHECKING, Any

import msgspec

from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.errors import CallCancelled, Limited, ModelError, RetinueError, Stop, StreamCut, ToolError
from retinue.core.events import Body, Delta, Message, Thinking, ToolCall, ToolResult, UsageReported, Warned
from retinue.core.limits import EVENT_BYTES, OUTPUT_TOKENS
from retinue.core.messages import USERS_OWN, Call, Reply, Request, RunRef, ToolSpec, Turn, UserTurn
from retinue.core.ports import Order, Outcome, Preview, Row, Ticket
from retinue.core.profiles import Profile
from retinue.core.results import Result
from retinue.core.rules import ALLOW, Verdict
from retinue.core.usage import NO_USAGE, Usage
from retinue.supervisor import apply_changes as takeover
from retinue.supervisor.budgets import CallReservation
from retinue.supervisor.nodes import Node
from retinue.supervisor.questions import GIVEN_UP, current, judged
from retinue.supervisor.trees import Tree

if TYPE_CHECKING:
    from retinue.supervisor.supervisor import Supervisor

_ALLOW = Allow()
_PLAIN = (str, int, float, bool, NoneType)
APPLY = takeover.APPLY
NOTHING = Deny("there is nothing to run")
NO_SEAL = ToolSpec("", "", {})
ANOTHER_TOOL = "{tool} was changed by its server after this call was allowed, so it was not run. Call it again."


class RunLink(msgspec.Struct, eq=False):
    """What one run can ask for. Everything it says is stamped with the run this link was made for."""

    supervisor: Supervisor
    tree: Tree
    node: Node
    ref: RunRef

    def emit(self, body: Body) -> None:
        self.tree.write(self.node, body)

    async def begin(self, call: Call, spec: ToolSpec, preview: Preview) -> Decision:
        node = self.node
        if node.stopping is not None or node.ending:
            raise asyncio.CancelledError
        body = ToolCall(
            call.id, call.name, own(call.args), spec.tier, spec.display_name, spec.waits, _timeout(call), spec.host,
            call.within,
        )  # fmt: skip
        node.slot.begin_calls(int(spec.host))  # a model's calls are counted when its reply comes, all at once
        try:
            # What may run twice need not wait for the disk, nor what spawns: a child waits for its own first event,
            # with its first reply at the latest.
            written = self.tree.write(node, body, not (spec.repeatable or spec.waits))
            if written is not None:
                await written
            if spec.tier == "none":
                return NOTHING
            if spec.tier == USERS_OWN:
                return _ALLOW
            if spec.server:
                spec = self._seal(call, spec)
            verdict = judged(node, spec, call)
            if verdict is ALLOW or (verdict.what == "allow" and not verdict.rule):
                return _ALLOW
            return await self._settle(call, spec, preview, verdict)
        except ToolError:
            raise  # of its preview: the call gets a result
        except BaseException:
            if not call.within:  # else it is withdrawn
                node.slot.drop_call()
            raise

    def _seal(self, call: Call, spec: ToolSpec) -> ToolSpec:
        """The tool of an MCP server as it is now: that, and nothing else, is judged, shown and run."""
        node, now = self.node, current(self.node, spec)
        if node.seals is None:
            node.seals = {}
        node.seals[call.id] = now.seal
        return now

    async def _settle(self, call: Call, spec: ToolSpec, preview: Preview | str, verdict: Verdict) -> Decision:
        """Decide about a call that the policy does not simply let pass."""
        if call.name == APPLY and verdict.what == "ask":
            shown = await takeover.question(self, call)
            if shown is None:
                return _ALLOW  # there is nothing to say yes to: the call itself says why
            preview = shown
        desk = self.supervisor.desk
        decision = await desk.settle(self.tree, self.node, call, spec=spec, preview=preview, verdict=verdict)
        self._still_wanted()
        return decision

    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None:
        node = self.node
        body = ToolResult(
            call.id, call.name, outcome.text, outcome.success, duration_ms, outcome.file, outcome.code,
            sandbox=outcome.sandbox,
        )  # fmt: skip
        self.tree.write(node, body)
        node.slot.end_call()

    async def complete(self, turn: int, system: str, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        node = self.node
        plan = node.plan
        if node.stopping is not None or node.ending:
            raise asyncio.CancelledError
        if plan.model is None:
            raise ModelError(f"{self.ref.agent} has no model")
        account, reservation, usage = node.account, None, NO_USAGE
        again = None if account is None else self._again
        request = Request(self.ref, turn, plan.model_name, system, thread, tools, OUTPUT_TOKENS, 0, again)
        if account is not None:
            prices = self.supervisor.prices if account.counts_cost else None
            reservation = CallReservation(account, request, plan.tools_json, prices, OUTPUT_TOKENS)
            await reservation.acquire(node.without_stall_timer)
            node.reservation = reservation
        try:
            reply = await plan.model.complete(request, self._delta)
            usage = reply.usage
        except (ModelError, Limited) as error:
            usage = error.usage
            self._failed(error, plan.model_name)
            raise
        except CallCancelled as error:
            usage, node.partial = error.usage, error.partial
            cost = self.supervisor.prices.price(plan.model_name, usage)
            self.tree.write(node, UsageReported(plan.model_name, usage, cost, error.estimated))
            raise asyncio.CancelledError from None
        except (RetinueError, Stop):
            raise
        except Exception as error:  # the boundary to providers: what breaks there is told, with its own words
            raise ModelError(f"model provider panicked: {type(error).__name__}: {error}") from error
        finally:
            if reservation is not None:  # what it did not spend of its worst case is given back
                node.reservation = None
                reservation.settle(usage)
        if reply.calls:
            reply = self._with_own_ids(reply)
            node.slot.begin_calls(len(reply.calls))
        self._report(reply, plan.model_name)
        if node.written is not None:
            written, node.written = node.written, None
            await written
        return reply

    async def _again(self, spent: Usage) -> None:
        """The call is to be made once more: it is settled, and reserved like another one."""
        node = self.node
        if node.reservation is not None:
            await node.reservation.reserve_again(spent, node.without_stall_timer)

    def lend(self, call: Call) -> Awaitable[Outcome]:
        self._still_wanted()
        run, context = self.node.plan.host.get(call.name), self.node.context
        if run is None and call.name == APPLY:
            return takeover.apply_child(self, call)
        if run is None or context is None:
            raise ToolError(f"There is no host-side tool '{call.name}'.")
        if self.node.seals and self.node.seals.pop(call.id, "") != getattr(run, "spec", NO_SEAL).seal:
            raise ToolError(ANOTHER_TOOL.format(tool=call.name))
        return run(call.args, context)

    def withdraw(self, call: Call) -> None:
        if self.node.stopping is None and not self.node.ending:
            self.finish(call, Outcome(GIVEN_UP, success=False), 0)

    def show_output(self, text: str) -> None:
        if text:
            self._delta("output", text)

    def claim_call_id(self, wanted: str) -> str:
        seen = self.node.call_ids
        if seen is None:
            seen = self.node.call_ids = set()
        while wanted in seen:
            wanted += "+"
        seen.add(wanted)
        return wanted

    def on_question(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        node = self.node
        for _ in range(node.asking):
            listener(True)
        node.persons += (listener,)

        def forget() -> None:
            node.persons = tuple(each for each in node.persons if each is not listener)

        return forget

    async def spawn(self, orders: Sequence[Order]) -> list[Ticket]:
        tickets = self.supervisor.spawn_children(self.tree, self.node, orders)
        if orders[0].files and orders[0].background:
            await self.supervisor.files.begun(self.tree.id, [ticket.run for ticket in tickets])
        return tickets

    async def wait(self, runs: Sequence[int]) -> list[Result[Any]]:
        children = self._find_children(runs)
        if children and children[0].queues:
            await self.node.slot.wait_without_slot(_join_all(children))
            await self.node.without_stall_timer(self.supervisor.files.written(self.ref.tree, runs))
        else:
            await _join_all(children)
        return [child.result() for child in children]

    def _find_children(self, runs: Sequence[int]) -> list[Node]:
        """Return the children with these numbers; raises ToolError for a number that is none."""
        found, nodes = [], self.tree.nodes
        for run in runs:
            child = nodes[run] if 0 <= run < len(nodes) else None
            if child is None or child.parent is not self.node:
                raise ToolError(f"agent:{run} is not a child of this run")
            found.append(child)
        return found

    def agents(self) -> list[Row]:
        return self.supervisor.rows_below(self.tree, self.node)

    def profiles(self) -> Sequence[Profile]:
        return self.node.plan.children

    def inbox(self) -> Sequence[UserTurn]:
        if not self.node.inbox:
            return ()
        words, self.node.inbox = self.node.inbox, ()
        return words

    async def children_done(self) -> bool:
        node = self.node
        if node.live_background() and not node.inbox:
            await node.slot.wait_without_slot(self._news(asyncio.Event()))
        return bool(node.inbox)

    async def _news(self, news: asyncio.Event) -> None:
        node = self.node
        node.news = news
        while node.live_background() and not node.inbox:
            news.clear()
            await news.wait()

    def _still_wanted(self) -> None:
        """A run that was told to stop, and did not listen, gets nothing more."""
        if self.node.stopping is not None or self.node.ending:
            raise asyncio.CancelledError

    def _with_own_ids(self, reply: Reply) -> Reply:
        """The reply with call ids that no earlier call of the run has: answers, approvals and results go by them."""
        seen = self.node.call_ids
        if seen is None:
            seen = self.node.call_ids = set()
        if len(reply.calls) == 1:
            name = reply.calls[0].id
            if name not in seen:
                seen.add(name)
                return reply
        calls = []
        for call in reply.calls:
            name, number = call.id, 2
            while name in seen:
                name, number = f"{call.id}-{number}", number + 1
            seen.add(name)
            calls.append(call if name == call.id else msgspec.structs.replace(call, id=name))
        return msgspec.structs.replace(reply, calls=tuple(calls))

    def _delta(self, kind: str, text: str) -> None:
        ref, node, show = self.ref, self.node, self.tree.log.show
        if node.ending:
            return
        if node.stall is not None:
            node.stall.record_activity()
        if kind == "retry":
            self.tree.write(node, Warned(text, code="retry"))
            return
        delta = Delta(ref.tree, ref.run, ref.path, ref.agent, text, kind)
        if node.written is None:
            show(delta)
        else:  # in order, and not before there is a run to those who watch
            node.written.add_done_callback(lambda done: done.cancelled() or done.exception() or show(delta))

    def _report(self, reply: Reply, model: str) -> None:
        write, node = self.tree.write, self.node
        if reply.natives or reply.thoughts:
            self._report_thinking(reply)
        text, file = reply.text, ""
        if text and not reply.refused:
            if len(text) * 4 > EVENT_BYTES:
                text, file = node.folders.fit_event_text(text)
            write(node, Message(text, not reply.calls, file))
        write(node, UsageReported(model, reply.usage, self.supervisor.prices.price(model, reply.usage)))

    def _report_thinking(self, reply: Reply) -> None:
        """What the provider did on its own before it spoke."""
        write, node = self.tree.write, self.node
        for done in reply.natives:
            write(node, ToolCall(done.id, done.name, done.args, "provider"))
            write(
                node,
                ToolResult(done.id, done.name, done.result, done.success, content=done.content, origin=done.origin),
            )
        for thought in reply.thoughts:
            text, file = node.folders.fit_event_text(thought.text)
            signed = thought.signature, file, thought.id, thought.origin, thought.layout
            write(node, Thinking(text, thought.type, *signed))

    def _failed(self, error: ModelError | Limited, model: str) -> None:
        if error.usage.total_tokens:
            cost = self.supervisor.prices.price(model, error.usage)
            self.tree.write(self.node, UsageReported(model, error.usage, cost))
        if isinstance(error, StreamCut):
            self.node.partial = error.partial


async def _join_all(nodes: Sequence[Node]) -> None:
    for node in nodes:
        if not node.finished:
            await node.join()


def own(args: dict[str, Any]) -> dict[str, Any]:
    """A copy nobody else can change: what is shown and logged must stay what was asked."""
    copied = args.copy()
    for name, value in args.items():
        if type(value) not in _PLAIN:
            copied[name] = deepcopy(value)
    return copied


def _timeout(call: Call) -> float | None:
    """The seconds a call gives itself, for the header that shows it."""
    value = call.args.get("executionTimeout", call.args.get("timeout"))
    if value is None or isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None
