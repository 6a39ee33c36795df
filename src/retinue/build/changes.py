"""The changes that the runs of a project left in copied workspaces, for the commands that show and apply them.

Needs no living process: a copy is found by the folder of its run, and several are applied as one.
"""

from retinue.workspaces.atomic_apply import recover_folder
from retinue.workspaces.copies import (
    CopiedWorkspace,
    carry_out_plan,
    explain_missing_copy,
    find_copy,
    is_unmade,
    list_copies,
    list_unapplied,
    plan_apply,
)

__all__ = [
    "CopiedWorkspace", "carry_out_plan", "explain_missing_copy", "find_copy", "is_unmade", "list_copies",
    "list_unapplied", "plan_apply", "recover_folder",
]  # fmt: skip
