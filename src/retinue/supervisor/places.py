"""Where a run stands: the folders it gets, what it is told of them, and its row in a list."""

from __future__ import annotations

from retinue.core.messages import RunRef
from retinue.core.ports import Row
from retinue.core.profiles import Profile, Task
from retinue.log.runs import RunView
from retinue.runtime.folders import RunFolders, StateFolder
from retinue.supervisor.nodes import Node


def folders_of(
    state: StateFolder, ref: RunRef, parent: Node | None, profile: Profile, task: Task, readable: list[str]
) -> RunFolders:
    """The primary shares the project unless told; a child has a folder of its own and may read its parent's."""
    above = state.project if parent is None else parent.folders.path
    kind = profile.workspace or ("shared" if parent is None else "scratch")
    own = state.run_folder(ref.tree, ref.run)
    others = list(readable)
    if task.include_temp_workspace:
        others.insert(0, state.snapshots(ref.tree))
    if task.include_parent_workspace and kind != "shared":
        others.insert(0, above)
    return RunFolders(own, above if kind == "shared" else f"{own}/workspace", others)


def system_of(node: Node) -> str:
    """The instructions, what the parent says the run should know, and where it may read and write."""
    parts = [part for part in (node.plan.system, node.wish.context) if part]
    folders = node.folders
    if node.plan.tools:
        readable = ", ".join(folders.readable) or "nothing else"
        parts.append(f"Your workspace is {folders.path}. You may also read: {readable}.")
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
