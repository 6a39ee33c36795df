"""The supervisor's end of a link, for a run in this process: plain calls on the same port as over any wire."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.errors import ModelError, RetinueError, StreamCut, ToolError
from retinue.core.events import Body, Delta, Message, Thinking, ToolCall, ToolResult, UsageReported
from retinue.core.messages import Call, Reply, Request, RunRef, ToolSpec, Turn, UserTurn
from retinue.core.ports import Order, Outcome, Row, Ticket
from retinue.core.profiles import Profile
from retinue.core.results import Result
from retinue.core.rules import ALLOW
from retinue.supervisor import seats
from retinue.supervisor.nodes import Node
from retinue.supervisor.trees import Tree

if TYPE_CHECKING:
    from retinue.supervisor.supervisor import Supervisor

_ALLOW = Allow()
_NOTHING = Deny("there is nothing to run")


class RunLink:
    """What one run can ask for. Everything it says is stamped with the run this link was made for."""

    __slots__ = ("emit", "node", "ref", "supervisor", "tree")

    def __init__(self, supervisor: Supervisor, tree: Tree, node: Node) -> None:
        self.supervisor = supervisor
        self.tree = tree
        self.node = node
        self.ref: RunRef = node.ref
        self.emit: Callable[[Body], Any] = partial(tree.write, node)

    async def begin(self, call: Call, spec: ToolSpec, preview: str) -> Decision:
        node = self.node
        node.inflight += 1
        body = ToolCall(call.id, call.name, call.args, spec.tier, spec.display_name, spec.waits, _timeout(call))
        # What may run twice, and what only spawns (the child waits for its own first event), need not be on disk first.
        written = self.tree.write(node, body, wait=not (spec.repeatable or spec.waits))
        if written is not None:
            await written
        if spec.tier == "none":
            return _NOTHING
        verdict = node.policy.judge(spec, call.args, primary=node.parent is None, workspace=node.folders.path)
        if verdict is ALLOW or (verdict.what == "allow" and not verdict.rule):
            return _ALLOW
        desk = self.supervisor.desk
        return await desk.settle(self.tree, node, call, spec=spec, preview=preview, verdict=verdict)

    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None:
        body = ToolResult(call.id, call.name, outcome.text, outcome.success, duration_ms, outcome.file)
        self.tree.write(self.node, body)
        self.node.inflight -= 1
        seats.leave_if_only_waiting(self.tree, self.node)

    async def complete(self, turn: int, system: str, thread: list[Turn], tools: tuple[ToolSpec, ...]) -> Reply:
        plan = self.node.plan
        if plan.model is None:
            raise ModelError(f"{self.ref.agent} has no model")
        request = Request(self.ref, turn, plan.model_name, system, thread, tools)
        try:
            reply = await plan.model.complete(request, self._delta)
        except ModelError as error:
            self._failed(error, plan.model_name)
            raise
        except RetinueError:
            raise
        except Exception as error:  # the boundary to providers: what breaks there is told, with its own words
            raise ModelError(f"model provider panicked: {type(error).__name__}: {error}") from error
        self._report(reply, plan.model_name)
        return reply

    def lend(self, call: Call) -> Awaitable[Outcome]:
        run, context = self.node.plan.host.get(call.name), self.node.context
        if run is None or context is None:
            raise ToolError(f"There is no host-side tool '{call.name}'.")
        return run(call.args, context)

    async def spawn(self, order: Order) -> Ticket:
        return self.supervisor.spawn_child(self.tree, self.node, order)

    def wait(self, runs: Sequence[int]) -> Awaitable[list[Result[Any]]]:
        return self.supervisor.wait_for(self.tree, self.node, runs)

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
            await seats.wait_without(self.tree, node, self._news(asyncio.Event()))
        return bool(node.inbox)

    async def _news(self, news: asyncio.Event) -> None:
        node = self.node
        node.news = news
        while node.live_background() and not node.inbox:
            news.clear()
            await news.wait()

    def _delta(self, kind: str, text: str) -> None:
        ref = self.ref
        self.supervisor.log.show(Delta(ref.tree, ref.run, ref.path, ref.agent, text, kind))

    def _report(self, reply: Reply, model: str) -> None:
        write, node = self.tree.write, self.node
        for thought in reply.thoughts:
            text, file = node.folders.fitting(thought.text)
            write(node, Thinking(text, thought.type, thought.signature, file))
        if reply.text and not reply.refused:
            text, file = node.folders.fitting(reply.text)
            write(node, Message(text, not reply.calls, file))
        write(node, UsageReported(model, reply.usage))

    def _failed(self, error: ModelError, model: str) -> None:
        if error.usage.total_tokens:
            self.tree.write(self.node, UsageReported(model, error.usage))
        if isinstance(error, StreamCut):
            self.node.partial = error.partial


def _timeout(call: Call) -> float | None:
    """The seconds a call gives itself, for the header that shows it."""
    value = call.args.get("executionTimeout", call.args.get("timeout"))
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
