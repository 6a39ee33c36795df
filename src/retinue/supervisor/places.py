"""Where a run stands: the folders it gets, what it is told of them, and its row in a list."""

from __future__ import annotations

from retinue.core.messages import RunRef
from retinue.core.ports import Row
from retinue.core.profiles import Profile, Task, WorkspaceName
from retinue.log.runs import RunView
from retinue.runtime.folders import RunFolders, StateFolder
from retinue.runtime.spaces.space import Space
from retinue.supervisor.nodes import Node

COPIED = "a copy of {source}: what you change is in your copy only, until it is taken over"


def folders_of(
    state: StateFolder, ref: RunRef, parent: Node | None, profile: Profile, task: Task, readable: list[str]
) -> RunFolders:
    """The primary shares the project unless told; a child has a folder of its own and may read its parent's."""
    above = state.project if parent is None else parent.folders.path
    kind = profile.workspace or default_kind(state, profile, primary=parent is None)
    own = state.run_folder(ref.tree, ref.run)
    others, snapshots = list(readable), state.snapshots(ref.tree)
    if task.include_temp_workspace:
        others.insert(0, snapshots)
    if task.include_parent_workspace and kind != "shared":
        others.insert(0, above)
    if kind == "shared":
        return RunFolders(own, above, others)
    workspace = f"{own}/workspace"
    if parent is None:
        snapshots = ""  # it has no siblings
    if kind == "scratch":
        return RunFolders(own, workspace, others, None, snapshots)
    begun, source = _source(state, parent, kind)
    space = Space(kind, ref.tree, ref.run, own, workspace, source, state.project, begun)
    return RunFolders(own, workspace, others, space, snapshots)


def default_kind(state: StateFolder, profile: Profile, *, primary: bool) -> WorkspaceName:
    """For a profile that says nothing. Behind a wall nobody works in the project itself."""
    if profile.runtime == "inherited":
        return "shared" if primary else "scratch"
    if state.in_repository:
        return "worktree"
    return "copy" if primary else "scratch"


def _source(state: StateFolder, parent: Node | None, kind: str) -> tuple[Space | None, str]:
    """The folder a copy starts from: the parent's. A worktree starts from the nearest one that is the project's."""
    node = parent
    while node is not None:
        space, folders = node.folders.space, node.folders
        if space is not None:
            return space, space.path
        is_scratch = folders.path == f"{folders.own}/workspace"
        if is_scratch and kind == "copy":
            return None, folders.path
        node = node.parent
    return None, state.project


def system_of(node: Node) -> str:
    """The instructions, what the parent says the run should know, and where it may read and write."""
    parts = [part for part in (node.plan.system, node.wish.context) if part]
    folders = node.folders
    if node.plan.tools:
        readable = ", ".join(folders.readable) or "nothing else"
        copied = "" if folders.space is None else f" It is {COPIED.format(source=folders.space.source)}."
        parts.append(f"Your workspace is {folders.path}.{copied} You may also read: {readable}.")
    return "\n\n".join(parts)


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
    )
