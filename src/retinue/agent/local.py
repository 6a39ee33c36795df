"""The tools that touch the machine: each runs where its run does, behind the same wall."""

from __future__ import annotations

from collections.abc import Callable

from retinue.core.ports import Tool
from retinue.tools.files import Edit, Read, Write
from retinue.tools.search import Glob, Grep
from retinue.tools.shell import Shell

LOCAL: dict[str, Callable[[], Tool]] = {
    "read": Read, "write": Write, "edit": Edit, "glob": Glob, "grep": Grep, "shell": Shell,
}  # fmt: skip
EDITING = frozenset({"write", "edit"})
