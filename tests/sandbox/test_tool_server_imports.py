"""The tool server imports little: it starts inside a sandbox, next to the commands of a model."""

from __future__ import annotations

import grimp

PACKAGES = ("retinue.core.", "retinue.protocol.", "retinue.files.")
MODULES = {
    "retinue.concurrency",
    "retinue.processes.group",
    "retinue.sandbox.byte_streams",
    "retinue.sandbox.channel",
    "retinue.sandbox.process_privacy",
    # The local tools and their parts.
    "retinue.tools.arguments",
    "retinue.tools.code_mode",
    "retinue.tools.code_program",
    "retinue.tools.command_process",
    "retinue.tools.files",
    "retinue.tools.live_output",
    "retinue.tools.local",
    "retinue.tools.paths",
    "retinue.tools.search",
    "retinue.tools.shell",
    "retinue.tools.truncate",
}


def test_the_tool_server_imports_only_core_protocol_files_and_the_local_tools() -> None:
    # The graph of the import linter: it also has the imports inside functions and those for type checking.
    graph = grimp.build_graph("retinue", cache_dir=None)
    imported = graph.find_upstream_modules("retinue.sandbox.tool_server")
    assert {name for name in imported if not name.startswith(PACKAGES)} == MODULES
