"""Applying the changes that runs made in their copied workspaces: for a person (`retinue diff`, `apply`, `gc`) and for
the model of a parent (`apply_subagent`). Knows nothing of how copies are made or files are replaced."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.concurrency import finish_despite_cancel
from retinue.core.control import Changes
from retinue.core.errors import RetinueError, ToolError
from retinue.core.events import RunSpawned, decode_raw
from retinue.core.messages import Call
from retinue.core.ports import Outcome
from retinue.core.results import ChangedFile
from retinue.supervisor.run import Run
from retinue.workspaces import atomic_apply as swapping
from retinue.workspaces import merge as merging
from retinue.workspaces import tree_workspaces
from retinue.workspaces.merge import Plan
from retinue.workspaces.workspace import (
    APPLIED_FILE,
    CHANGES_FILE,
    WORKSPACE_FILE,
    ApplyRecord,
    ChangesRecord,
    Workspace,
    WorkspaceRecord,
    read_record,
    write_record,
)

APPLY = "apply_subagent"
COPIES = ("copy", "worktree")
SANDBOXED = ("isolated", "container")
NO_COPY = "{who} worked in no copy, so there is nothing to take over: its workspace is {workspace}"
ELSEWHERE = "{who} ran in the MCP server '{server}': it worked there, so there is nothing of it here to take over"
NOTHING = "{who} changed no files"
ALREADY = "the changes of {who} were taken over already, into {into}, {at}"
CONFLICTS = "nothing was changed: {count} of the files cannot be taken over:\n{why}"
UNASKED = ""  # instead of a digest: there was nothing to say yes to
PREVIEW_BYTES = 1024 * 1024  # of a diff in a question, and so in the log


_STATUS = {"A": "added", "D": "deleted"}


@dataclass(frozen=True)
class Copied:
    """The copied workspace of one run and what is known of it. `changes` is None for a run that nobody saw end."""

    workspace: Workspace
    name: str
    changes: ChangesRecord | None
    applied: ApplyRecord | None

    @property
    def open(self) -> bool:
        """True if there are, or may be, changes that nobody has applied."""
        return self.applied is None and (self.changes is None or self.changes.count > 0)


def copied(state: str, tree: str, run: int) -> Copied | None:
    """Return the copied workspace of a run; None if it had none."""
    own = f"{state}/runs/{tree}/{run}"
    fact = read_record(own, WORKSPACE_FILE, WorkspaceRecord)
    if fact is None:
        return None
    workspace = Workspace(fact.kind, tree, run, own, fact.path, fact.source, fact.project)
    return Copied(
        workspace,
        f"{tree}/{run}",
        read_record(own, CHANGES_FILE, ChangesRecord),
        read_record(own, APPLIED_FILE, ApplyRecord),
    )


def copied_by(run: Run) -> Copied | None:
    """Return the copied workspace of a run of a live tree, also of one that ended in an earlier process."""
    return copied(str(Path(run.folders.own).parents[2]), run.ref.tree, run.ref.run)


def is_unmade(spawned: RunSpawned) -> bool:
    """Tell whether the run's copy was never made: the first call that needs it makes it, and there was none."""
    profile = decode_raw(spawned.profile)
    kind, is_sandboxed = profile.get("workspace"), profile.get("runtime") in SANDBOXED
    has_copy = kind in COPIES or (kind is None and is_sandboxed)
    return has_copy and not spawned.server and not Path(spawned.workspace).exists()


def no_copy(who: str, spawned: RunSpawned) -> str:
    """Return why a run has no copied workspace."""
    if spawned.server:
        return ELSEWHERE.format(who=who, server=spawned.server)
    if is_unmade(spawned):
        return NOTHING.format(who=who)
    return NO_COPY.format(who=who, workspace=spawned.workspace)


def all_copied(state: str, tree: str) -> list[Copied]:
    """Return the copied workspaces of a tree, in the order of its runs."""
    folder = Path(state, "runs", tree)
    runs = sorted(int(entry.name) for entry in folder.iterdir() if entry.name.isdigit()) if folder.is_dir() else []
    return [found for found in (copied(state, tree, run) for run in runs) if found is not None]


def unapplied(folder: Path) -> list[str]:
    """Return the runs of a tree's folder whose changes nobody has applied."""
    found = all_copied(str(folder.parent.parent), folder.name)
    return [one.name for one in found if one.open]


def changes_of(one: Copied) -> ChangesRecord:
    """Return the changes of an ended run; looks at the files if nobody has."""
    if one.changes is not None:
        return one.changes
    return tree_workspaces.record_changes(one.workspace)[0]


def diff(one: Copied, *options: str, live: bool = False) -> bytes:
    """Return the changes of a run as git shows them; of a `live` one, those so far."""
    store, ref = tree_workspaces.find_store(one.workspace.own), one.workspace.end
    if live:
        ref = f"refs/runs/{one.workspace.run}/now"
        tree_workspaces.record_files(one.workspace, store, store.list_files(one.workspace.base), ref=ref)
    else:
        changes_of(one)
    return store.diff(one.workspace.base, ref, *options)


def numbers(one: Copied, *, live: bool = False) -> list[dict[str, Any]]:
    """Return each changed file for programs: its status, and its added and removed lines (None for a binary file)."""
    words = ("--no-renames", "-z")
    statuses = diff(one, "--name-status", *words, live=live).decode("utf-8", "backslashreplace").split("\0")
    counts = diff(one, "--numstat", *words, live=live).decode("utf-8", "backslashreplace").split("\0")
    by_path = {line.split("\t", 2)[2]: line.split("\t", 2)[:2] for line in counts if line}
    found = []
    for letter, path in zip(statuses[::2], statuses[1::2], strict=False):
        added, removed = (None if number == "-" else int(number) for number in by_path.get(path, ["-", "-"]))
        status = _STATUS.get(letter, "modified")
        found.append({"status": status, "path": path, "added": added, "removed": removed, "binary": added is None})
    return found


def plan(runs: Sequence[Copied], target: str) -> Plan:
    """Return what applying the changes of these runs, one after the other, would do to the folder."""
    store = tree_workspaces.find_store(runs[0].workspace.own)
    for one in runs:
        changes_of(one)
    steps = [(store.list_files(one.workspace.base), store.list_files(one.workspace.end)) for one in runs]
    return merging.plan_changes(target, steps, store)


def carry_out(made: Plan, runs: Sequence[Copied], *, aside: str) -> None:
    """Make the changes, all or none, and record it."""
    if made.conflicts:
        raise RetinueError(CONFLICTS.format(count=len(made.conflicts), why=made.describe_conflicts()))
    if made.changes:
        swapping.apply_changes(
            made.target, made.changes, tree_workspaces.find_store(runs[0].workspace.own), aside=aside
        )
    for one in runs:
        write_record(one.workspace.own, APPLIED_FILE, ApplyRecord(made.target, time.time(), changes_of(one).count))


def take_over(one: Copied) -> Sequence[ChangedFile]:
    """Apply the changes of a run to the folder its copy was made of. Return as many as fit in a list."""
    why = why_not(one)
    if one.applied is not None:
        raise RetinueError(why)
    if not why:
        source = one.workspace.source
        aside = f"{source}/.retinue/applying" if source == one.workspace.project else f"{Path(source).parent}/applying"
        swapping.recover_folder(aside)
        carry_out(plan([one], source), [one], aside=aside)
    return changes_of(one).files


def describe(one: Copied) -> Changes:
    """Return the changes of an ended run as Control gives them."""
    found = changes_of(one)
    applied = "" if one.applied is None else one.applied.into
    return Changes(tuple(found.files), found.count, one.workspace.source, applied)


def recover(aside: str) -> bool:
    """Put back what a process that died had half applied; True if there was something."""
    return swapping.recover_folder(aside)


def why_not(one: Copied) -> str:
    """Return why an ended run has no changes to apply; empty if it has."""
    if one.applied is not None:
        at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.applied.at))
        return ALREADY.format(who=one.name, into=one.applied.into, at=at)
    return "" if changes_of(one).count else NOTHING.format(who=one.name)


def listed(files: Sequence[ChangedFile], count: int) -> list[str]:
    """Return one line for each file, and one that counts the rest."""
    more = [f"and {count - len(files)} more"] if count > len(files) else []
    return [*(f"{file.status:<8} {file.path}" for file in files), *more]


# The parent model's own


async def preview_child(run: Run, call: Call) -> tuple[str | None, str]:
    """Return what a person is shown before a parent applies the changes of a child, and its digest. The preview is None
    if nothing can be applied; then the call itself says why and changes nothing."""
    try:
        one, plan = await asyncio.to_thread(_plan_child, run, call)
    except RetinueError:
        return None, UNASKED
    if plan.conflicts:
        return None, UNASKED
    text = plan.diff[:PREVIEW_BYTES].decode("utf-8", "backslashreplace")
    rest = len(plan.diff) - PREVIEW_BYTES
    more = f"\n[... {rest} bytes more: retinue diff {one.name}]" if rest > 0 else ""
    return f"{one.name} into {plan.target}:\n{text}{more}", plan.digest


async def apply_child(run: Run, call: Call, *, shown_digest: str | None) -> Outcome:
    """Apply the changes of a child, unless the diff differs from the one the user approved."""

    def work() -> Outcome:
        one, plan = _plan_child(run, call)
        unchanged = shown_digest in (None, plan.digest) or (shown_digest == UNASKED and plan.conflicts)
        if not unchanged:
            raise ToolError(f"{APPLY}: the files changed after the question was asked; nothing was taken over")
        carry_out(plan, [one], aside=_aside(run))
        lines = listed(changes_of(one).files, changes_of(one).count)
        return Outcome("\n".join([f"Taken over from {call.args['subagent_id']}:", *lines]))

    try:
        return await finish_despite_cancel(asyncio.to_thread(work))
    except ToolError:
        raise
    except RetinueError as error:
        raise ToolError(f"{APPLY}: {error}") from None


def _plan_child(run: Run, call: Call) -> tuple[Copied, Plan]:
    wanted = str(call.args.get("subagent_id", ""))
    child = _find_child(run, wanted)
    if not child.finished:
        raise ToolError(f"{APPLY}: '{wanted}' has not ended yet")
    one = copied_by(child)
    if one is None:
        raise ToolError(f"{APPLY}: {no_copy(wanted, child.view.spawned)}")
    why = why_not(one)
    if why:
        raise ToolError(f"{APPLY}: {why}")
    swapping.recover_folder(_aside(run))
    return one, plan([one], run.folders.path)


def _find_child(run: Run, wanted: str) -> Run:
    for child in reversed(run.children):
        if wanted in (child.ref.subagent_id, child.ref.label, str(child.ref.run), f"agent:{child.ref.run}"):
            return child
    raise ToolError(f"{APPLY}: there is no subagent '{wanted}' of this run")


def _aside(run: Run) -> str:
    folders = run.folders
    return f"{folders.own}/applying" if folders.workspace_copy is not None else f"{folders.path}/.retinue/applying"
