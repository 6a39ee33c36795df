"""The tool by which a model takes over what a subagent changed in its own copy of the folder. The host does it."""

from __future__ import annotations

from collections.abc import Awaitable

from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome
from retinue.tools.arguments import read_argument, reveal_text


class ApplySubagent:
    """`apply_subagent`: asked about once, with the whole diff, which the host makes."""

    spec = ToolSpec(
        "apply_subagent",
        "Take over the files that a finished subagent changed in its own copy or worktree into your workspace: all of "
        "them, or, where they conflict with yours, none. 'subagent_id' is its id, its label, or the N of agent:N.",
        {
            "type": "object",
            "properties": {"subagent_id": {"type": "string"}},
            "required": ["subagent_id"],
        },
        tier="confirm",
        display_name="Apply subagent",
    )

    async def preview(self, call: Call, folders: Folders) -> str:
        return reveal_text(read_argument(call, "subagent_id", str))

    def __call__(self, call: Call, folders: Folders, link: Link) -> Awaitable[Outcome]:
        return link.lend(call)
