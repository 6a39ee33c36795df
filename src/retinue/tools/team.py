"""`new_answer` and `vote`: how a member of a team answers, and says which answer is the best. The team does the work;
both wait until the member has something to do next."""

from __future__ import annotations

from typing import Any

from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome
from retinue.core.teams import NEW_ANSWER, VOTE
from retinue.tools.arguments import read_argument, show_arguments


def _make_spec(name: str, description: str, properties: dict[str, Any], title: str) -> ToolSpec:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return ToolSpec(
        name,
        description,
        schema,
        tier="observe",
        display_name=title,
        repeatable=True,
        waits=True,
        exclusive=True,
    )


class NewAnswer:
    """`new_answer`: the member's answer to the task, or a better one."""

    spec = _make_spec(
        NEW_ANSWER,
        "Give your answer to the task: whole and on its own, for it replaces your earlier one. "
        "Returns when there is something to do next.",
        {"content": {"type": "string", "description": "The answer"}},
        "New answer",
    )

    async def preview(self, call: Call, folders: Folders) -> str:
        return show_arguments(call.args, "content")

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        content = read_argument(call, "content", str)
        return await (await link.join_team()).give_answer(link, call.id, content)


class Vote:
    """`vote`: which of the answers is the best."""

    spec = _make_spec(
        VOTE,
        "Vote for the best answer to the task. Returns when there is something to do next.",
        {
            "agent_id": {"type": "string", "description": "The agent, or its answer, such as agent2 or agent2.1"},
            "reason": {"type": "string", "description": "Why it is the best, in a sentence or two"},
        },
        "Vote",
    )

    async def preview(self, call: Call, folders: Folders) -> str:
        return show_arguments(call.args, "agent_id", "reason")

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        choice, reason = read_argument(call, "agent_id", str), read_argument(call, "reason", str, "")
        return await (await link.join_team()).cast_vote(link, call.id, choice, reason)


def make_team_tools() -> dict[str, NewAnswer | Vote]:
    """Return the tools that a member has beside those of its profile."""
    return {NEW_ANSWER: NewAnswer(), VOTE: Vote()}
