"""The tools that touch files, processes or the network, by name.

They run in a run's sandbox: in the supervisor's process, or in the tool server inside a container or bubblewrap.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retinue.core.messages import ToolSpec
from retinue.core.ports import LocalTool
from retinue.core.rules import CODE_MODE
from retinue.tools.code_mode import ExecutePython
from retinue.tools.files import Edit, Read, Write
from retinue.tools.search import Glob, Grep
from retinue.tools.shell import Shell

LOCAL: dict[str, Callable[[], LocalTool]] = {
    "read": Read, "write": Write, "edit": Edit, "glob": Glob, "grep": Grep, "shell": Shell, CODE_MODE: ExecutePython,
}  # fmt: skip
EDITING = frozenset({"write", "edit"})
COMMANDS = frozenset({"shell", CODE_MODE})


def make_sandboxed_tool(name: str, program_tools: Sequence[ToolSpec]) -> LocalTool:
    """Make the local tool `name` for a tool server. Programs of code mode can call the tools `program_tools`."""
    if name == CODE_MODE:
        return ExecutePython(program_tools, sandboxed=True)
    return Shell(sandboxed=True) if name == "shell" else LOCAL[name]()
