"""The tools that touch the machine: each runs where its run does, behind the same wall."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retinue.core.messages import ToolSpec
from retinue.core.ports import Tool
from retinue.core.rules import CODE_MODE
from retinue.tools.code_mode import ExecutePython
from retinue.tools.files import Edit, Read, Write
from retinue.tools.search import Glob, Grep
from retinue.tools.shell import Shell

LOCAL: dict[str, Callable[[], Tool]] = {
    "read": Read, "write": Write, "edit": Edit, "glob": Glob, "grep": Grep, "shell": Shell, CODE_MODE: ExecutePython,
}  # fmt: skip
EDITING = frozenset({"write", "edit"})


def local(name: str, lent: Sequence[ToolSpec]) -> Tool:
    """One of them, in the worker that runs it; `lent` are the host's tools that programs can call."""
    if name == CODE_MODE:
        return ExecutePython(lent, walled=True)
    return Shell(walled=True) if name == "shell" else LOCAL[name]()
