"""One question that waits for an answer: what was asked, whose it is, and who is being asked. Kept by the desk."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from copy import deepcopy

from retinue.core.approvals import SCOPES, Allow, Approval, Decision, Deny, digest_of
from retinue.core.events import ApprovalAsked
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Timer
from retinue.core.rules import FILES, Verdict, derive, is_a
from retinue.core.secrets import clean, clean_value
from retinue.supervisor.nodes import Node
from retinue.supervisor.policy import SANDBOXED_TOOLS, inside, subjects_of
from retinue.supervisor.trees import Tree

GIVEN_UP = "The program that made this call ended before it; nobody waited for its result."
CHANGED = "the call changed while it was being asked about"
ANOTHER = "It was allowed before, but its server describes it differently now."


class Question:
    """`answer` is what it came to, None when nobody came; `written` is done when the log has it."""

    __slots__ = ("answer", "approval", "asking", "call", "node", "spec", "timers", "tree", "written")

    def __init__(self, tree: Tree, node: Node, call: Call, spec: ToolSpec, approval: Approval) -> None:
        self.tree = tree
        self.node = node
        self.call = call
        self.spec = spec
        self.approval = approval
        self.answer: asyncio.Future[Decision | None] = asyncio.get_running_loop().create_future()
        self.written: Awaitable[None] | None = None
        self.asking: asyncio.Task[None] | None = None
        self.timers: list[Timer] = []

    @property
    def open(self) -> bool:
        return not self.answer.done() and self.node.stopping is None and not self.node.ending

    @property
    def changed(self) -> bool:
        """Whether the call, or the tool, is no longer the one that was shown."""
        if self.spec.server and current(self.node, self.spec).seal != self.spec.seal:
            return True
        return digest(self.tree, self.node, self.call) != self.approval.digest

    def judged(self) -> Verdict:
        return judged(self.node, self.spec, self.call)

    def close(self) -> None:
        """Nobody needs to be asked any more."""
        for timer in self.timers:
            timer.cancel()
        if self.asking is not None and self.asking is not asyncio.current_task():
            self.asking.cancel()


def judged(node: Node, spec: ToolSpec, call: Call) -> Verdict:
    """What the policy of the run says of the call."""
    policy = node.policy
    if spec.name in SANDBOXED_TOOLS and not spec.host and spec.name not in node.plan.host and _is_sandboxed(node):
        policy = inside(policy)
    return policy.judge(spec, call.args, primary=node.parent is None, workspace=node.folders.path)


def current(node: Node, spec: ToolSpec) -> ToolSpec:
    """A tool of an MCP server as the server describes it now."""
    now: ToolSpec = getattr(node.plan.host.get(spec.name), "spec", spec)
    return now


def _is_sandboxed(node: Node) -> bool:
    """Tell whether what it changes is in a folder of its own, in a sandbox that is closed to the network."""
    started = node.plan.runtime.started
    sandbox = () if started is None else started.sandbox
    return bool(sandbox) and "full_network" not in sandbox and node.folders.path.startswith(f"{node.folders.own}/")


def minted(tree: Tree, node: Node) -> str:
    """An id of ours: where the next event stands, so nothing a model or a peer says can be one."""
    return f"{tree.id}/{node.ref.run}/{tree.seq + 1}"


def digest(tree: Tree, node: Node, call: Call) -> str:
    return digest_of(tree.id, run=node.ref.run, call_id=call.id, tool=call.name, args=call.args)


def approval_of(
    tree: Tree, node: Node, call: Call, *, spec: ToolSpec, preview: str, verdict: Verdict, project: str
) -> Approval:
    ref = node.ref
    return Approval(
        minted(tree, node),
        tree.id,
        ref.run,
        ref.path,
        ref.agent,
        clean(call.name),
        clean_value(deepcopy(call.args)),
        clean(call.id),
        label=None if node.parent is None else ref.label,
        preview=clean(preview),
        rule="" if verdict.rule else _rule(node, call, project, spec.seal),
        digest=digest(tree, node, call),
    )


def _rule(node: Node, call: Call, project: str, seal: str) -> str:
    """The rule for this call in the whole project. There is none for a file of a workspace that is not the project:
    under the same name the rule would be about another file."""
    if is_a(call.name, FILES) and node.folders.path != project:
        return ""
    subjects = subjects_of(call.name, call.args, workspace=node.folders.path, project=project)
    rule = derive(call.name, subjects[0] if subjects else None, seal)
    return "" if rule is None else str(rule)


def asked_body(approval: Approval) -> ApprovalAsked:
    a = approval
    return ApprovalAsked(a.id, a.call_id, a.tool, deepcopy(a.args), a.label, a.preview, a.rule, a.digest)


def sound(decision: object) -> Decision:
    """The decision, if it is one. Fails closed: what is not a clear yes is a no."""
    if not isinstance(decision, Allow | Deny):
        return Deny(f"the approver answered {decision!r}, which is neither Allow nor Deny")
    if isinstance(decision, Deny):
        return decision if isinstance(decision.reason, str) else Deny(str(decision.reason or ""))
    if decision.scope not in SCOPES:
        return Deny(f"the approver answered with a scope of {decision.scope!r}; there is {', '.join(SCOPES)}")
    if decision.args is not None and not isinstance(decision.args, dict):
        return Deny(f"the approver answered with arguments that are {type(decision.args).__name__}, not a mapping")
    return decision
