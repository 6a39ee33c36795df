"""Where a run stands: the folders it gets, what it is told of them, and its row in a list."""

from __future__ import annotations

import random

from retinue.core.context import METADATA_MAX_SUBAGENT_DEPTH, METADATA_SUBAGENT_DEPTH, Context
from retinue.core.control import RunHandle
from retinue.core.events import RunSpawned
from retinue.core.messages import RunRef
from retinue.core.plans import JobRunner, Plan
from retinue.core.ports import Order, Row, Ticket
from retinue.core.profiles import Task, WorkspaceName
from retinue.log.runs import RunView
from retinue.supervisor.nodes import Node
from retinue.supervisor.trees import Tree
from retinue.workspaces.run_folders import RunFolders, StateFolder
from retinue.workspaces.workspace import Workspace

COPIED = "a copy of {source}: what you change is in your copy only, until it is taken over"


def folders_of(
    state: StateFolder, ref: RunRef, parent: Node | None, plan: Plan, task: Task, readable: list[str]
) -> RunFolders:
    """The primary shares the project unless told; a child has a folder of its own and may read its parent's."""
    above = state.project if parent is None else parent.folders.path
    started = plan.runtime.started
    sandboxed = started is not None and bool(started.sandbox)
    kind = plan.profile.workspace or default_kind(state, sandboxed=sandboxed, primary=parent is None)
    own = state.run_folder(ref.tree, ref.run)
    folders_above = None if parent is None else parent.folders
    snapshots = state.snapshots(ref.tree)
    others = (snapshots, *readable) if task.include_temp_workspace else tuple(readable)
    if kind == "shared":
        return RunFolders(own, above, others, parent=folders_above)
    if task.include_parent_workspace:
        others = (above, *others)
    workspace = f"{own}/workspace"
    if parent is None:
        snapshots = ""  # it has no siblings
    if kind == "scratch":
        return RunFolders(own, workspace, others, None, snapshots, parent=folders_above)
    source_workspace, source = _source(state, parent, kind)
    copy = Workspace(kind, ref.tree, ref.run, own, workspace, source, state.project, source_workspace)
    return RunFolders(own, workspace, others, copy, snapshots, parent=folders_above)


def default_kind(state: StateFolder, *, sandboxed: bool, primary: bool) -> WorkspaceName:
    """For a profile that says nothing. In a sandbox nobody works in the project itself."""
    if not sandboxed:
        return "shared" if primary else "scratch"
    if state.in_repository:
        return "worktree"
    return "copy" if primary else "scratch"


def _source(state: StateFolder, parent: Node | None, kind: str) -> tuple[Workspace | None, str]:
    """The folder a copy starts from: the parent's. A worktree starts from the nearest one that is the project's."""
    node = parent
    while node is not None:
        copy, folders = node.folders.workspace_copy, node.folders
        if copy is not None:
            return copy, copy.path
        is_scratch = folders.path == f"{folders.own}/workspace"
        if is_scratch and kind == "copy":
            return None, folders.path
        node = node.parent
    return None, state.project


def may_ask_ahead(tree: Tree, node: Node) -> bool:
    """Tell whether the run may ask its model while its first event is on the way to the disk. Only one that does
    nothing before it has the reply: no set-up of a copy, no function, no call of an earlier life. Who waits for a slot
    has the time to wait for the disk."""
    plan = node.plan
    return (
        tree.log.ahead
        and plan.model is not None
        and not isinstance(plan.runtime, JobRunner)
        and node.folders.workspace_copy is None
        and node.past is None
        and not node.slot.is_queued
    )


def system_of(node: Node) -> str:
    """The instructions, what the parent says the run should know, and where it may read and write."""
    plan, folders = node.plan, node.folders
    parts = [plan.system] if plan.system else []
    if node.wish.context:
        parts.append(node.wish.context)
    if plan.tools:
        readable = ", ".join(folders.readable) or "nothing else"
        copied = (
            "" if folders.workspace_copy is None else f" It is {COPIED.format(source=folders.workspace_copy.source)}."
        )
        parts.append(f"Your workspace is {folders.path}.{copied} You may also read: {readable}.")
    return "\n\n".join(parts)


def context_of(node: Node) -> Context:
    """For what runs with the supervisor: host-side functions and callables."""
    metadata = {METADATA_SUBAGENT_DEPTH: node.depth, METADATA_MAX_SUBAGENT_DEPTH: node.max_depth}
    handle = RunHandle(node.link.supervisor.control, node.ref)
    node.context = Context(node.link, handle=handle, workspace=node.folders.path, metadata=metadata)
    return node.context


def ticket_of(node: Node) -> Ticket:
    """A child as the one who asked for it gets it."""
    status_file = f"{node.folders.own}/full_logs/status.json"
    return Ticket(node.ref.run, node.ref, node.folders.path, node.seconds, status_file)


def spawned_of(tree: Tree, node: Node, order: Order) -> RunSpawned:
    """The first event of a run: all there is to know of it before it begins."""
    plan, ref, task = node.plan, node.ref, node.wish
    own = None if node.parent is not None and node.account is node.parent.account else node.account
    return RunSpawned(  # by position: so many names would take five times as long
        None if node.parent is None else node.parent.ref.run,
        ref.label,
        node.depth,
        task.text,
        ref.subagent_id,
        node.folders.path,
        plan.profile_json,
        plan.tools_json,
        task.context,
        plan.model_name,
        order.call_id,
        order.background,
        node.slot.is_queued,
        node.seconds,
        node.max_turns,
        None if own is None else own.tokens,
        None if own is None else own.cost,
        None if node.stall is None else node.stall.seconds,
        tree.trace_id,
        random.getrandbits(64).to_bytes(8, "big").hex(),
        order.limits,
        tuple(task.context_paths),
        task.include_parent_workspace,
        task.include_temp_workspace,
        order.continues,
        order.origin,
        "" if node.parent is not None else tree.traceparent,
    )


def row_of(view: RunView, tree: str) -> Row:
    """One run in a list."""
    spawned = view.spawned
    return Row(
        view.number,
        spawned.parent,
        view.path,
        view.label,
        view.agent,
        spawned.subagent_id,
        view.state,
        view.status,
        spawned.task,
        spawned.workspace,
        view.spawned_at,
        view.result(tree) if view.ended is not None else None,
        spawned.call_id,
    )


def lasting_path(node: Node) -> str:
    """The path of a run with its number among its parent's children: the same whatever other runs did meanwhile."""
    path = ""
    while node.parent is not None:
        siblings = [child for child in node.parent.children if not child.view.spawned.remote_id]
        path = f"/{node.name}-{siblings.index(node) + 1}{path}"
        node = node.parent
    return f"{node.ref.path}{path}"
