"""The tool `apply_subagent`: the model of a parent applies the changes that a child made in its copy. This module
knows nothing about making copies or replacing files."""

from __future__ import annotations

import asyncio

from retinue.concurrency import finish_despite_cancel
from retinue.core.errors import RetinueError, ToolError
from retinue.core.messages import Call
from retinue.core.ports import Outcome
from retinue.core.results import format_changed_files
from retinue.files.state_folder import find_state_folder
from retinue.supervisor.policy import find_write_denial
from retinue.supervisor.tree import Run
from retinue.workspaces.copies import CopiedWorkspace, TargetFolder, explain_missing_copy, find_copy
from retinue.workspaces.merge import MergePlan

APPLY = "apply_subagent"
UNASKED = ""  # instead of a digest: there was nothing to approve
PREVIEW_BYTES = 1024 * 1024  # of a diff in a question, and so in the log


async def preview_child(run: Run, call: Call) -> tuple[str | None, str]:
    """Return the preview of a child's changes, for the person who approves them, and its digest. The preview is None
    if nothing can be applied. In this case the call itself says why, and changes nothing."""
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
        target = _find_target(run)
        target.undo_interrupted_apply()
        one, plan = _plan_child(run, call)
        unchanged = shown_digest in (None, plan.digest) or (shown_digest == UNASKED and plan.conflicts)
        if not unchanged:
            raise ToolError(f"{APPLY}: the files changed after the question was asked; nothing was applied")
        target.carry_out(plan, [one])
        changes = one.find_changes()
        lines = format_changed_files(changes.files, changes.count)
        return Outcome("\n".join([f"Applied the changes of {call.args['subagent_id']}:", *lines]))

    try:
        return await finish_despite_cancel(asyncio.to_thread(work))
    except ToolError:
        raise
    except RetinueError as error:
        raise ToolError(f"{APPLY}: {error}") from None


def _plan_child(run: Run, call: Call) -> tuple[CopiedWorkspace, MergePlan]:
    wanted = str(call.args.get("subagent_id", ""))
    child = _find_child(run, wanted)
    if not child.finished:
        raise ToolError(f"{APPLY}: '{wanted}' has not ended yet")
    one = _find_copy_of(child)
    if one is None:
        raise ToolError(f"{APPLY}: {explain_missing_copy(wanted, child.view.spawned)}")
    why = one.explain_nothing_to_apply()
    if why:
        raise ToolError(f"{APPLY}: {why}")
    plan = _find_target(run).plan([one])
    _check_rules(run, plan)
    return one, plan


def _check_rules(run: Run, plan: MergePlan) -> None:
    """Raise ToolError if a rule about paths forbids the run to write one of the files."""
    for change in plan.changes:
        if rule := find_write_denial(run.policy, change.path, run.folders.path):
            raise ToolError(f"{APPLY}: the rule {rule} forbids to write {change.path}; nothing was applied")


def _find_copy_of(run: Run) -> CopiedWorkspace | None:
    """Return the copied workspace of a run, or of the presenter if the run is a team. The run may have ended in an
    earlier process."""
    return find_copy(str(find_state_folder(run.folders.own)), run.ref.tree, run.view.find_presented().number)


def _find_child(run: Run, wanted: str) -> Run:
    for child in reversed(run.children):
        if wanted in (child.ref.subagent_id, child.ref.label, str(child.ref.run), f"agent:{child.ref.run}"):
            return child
    raise ToolError(f"{APPLY}: there is no subagent '{wanted}' of this run")


def _find_target(run: Run) -> TargetFolder:
    return TargetFolder(run.folders.path, state=str(find_state_folder(run.folders.own)))
