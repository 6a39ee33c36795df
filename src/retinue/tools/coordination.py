"""The tools with which runs reach a common or better answer: those of team members, and those of a run in rounds.

The team implements the tools of its members. The tools of rounds get their implementation as `work`. All are safe to
call again with the same call id.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome
from retinue.core.rounds import GET_TASK_PLAN, IMPACTS, PROPOSE_IMPROVEMENTS, SCORE_MAX, SUBMIT_CHECKLIST
from retinue.core.teams import NEW_ANSWER, VOTE
from retinue.tools.arguments import read_argument, show_arguments

Work = Callable[[Call, Link], Awaitable[Outcome]]


def _make_spec(name: str, title: str, description: str, properties: dict[str, Any], *, waits: bool = False) -> ToolSpec:
    return ToolSpec(
        name,
        description,
        {"type": "object", "properties": properties, "required": list(properties)},
        tier="observe",
        display_name=title,
        repeatable=True,
        waits=waits,
        exclusive=waits,
    )


def _make_answer_spec(description: str) -> ToolSpec:
    content = {"type": "string", "description": "The answer"}
    return _make_spec(NEW_ANSWER, "New answer", description, {"content": content}, waits=True)


def _make_vote_spec(description: str, *, choices: str) -> ToolSpec:
    """Return the spec of `vote`. `choices` describes the answers to vote for."""
    properties = {
        "agent_id": {"type": "string", "description": choices},
        "reason": {"type": "string", "description": "Why it is the best, in a sentence or two"},
    }
    return _make_spec(VOTE, "Vote", description, properties, waits=True)


@dataclass(eq=False)
class CoordinationTool:
    """A tool of a team member, or of a run that works in rounds. `work` executes its calls."""

    spec: ToolSpec
    work: Work

    async def preview(self, call: Call, folders: Folders) -> str:
        return show_arguments(call.args, "content", "agent_id", "reason")

    def __call__(self, call: Call, folders: Folders, link: Link) -> Awaitable[Outcome]:
        return self.work(call, link)


async def _give_answer(call: Call, link: Link) -> Outcome:
    content = read_argument(call, "content", str)
    return await (await link.team.join_team()).give_answer(link, call.id, content)


async def _cast_vote(call: Call, link: Link) -> Outcome:
    choice, reason = read_argument(call, "agent_id", str), read_argument(call, "reason", str, "")
    return await (await link.team.join_team()).cast_vote(link, call.id, choice, reason)


# A team member has these tools in addition to those of its profile.
TEAM_TOOLS = {
    NEW_ANSWER: CoordinationTool(
        _make_answer_spec(
            "Give your answer to the task: whole and on its own, for it replaces your earlier one. "
            "Returns when there is something to do next."
        ),
        _give_answer,
    ),
    VOTE: CoordinationTool(
        _make_vote_spec(
            "Vote for the best answer to the task. Returns when there is something to do next.",
            choices="The agent, or its answer, such as agent2 or agent2.1",
        ),
        _cast_vote,
    ),
}
_SCORE = {
    "type": "object",
    "properties": {
        "score": {"type": "number", "minimum": 0, "maximum": SCORE_MAX},
        "reasoning": {"type": "string", "description": "What shows it"},
    },
    "required": ["score", "reasoning"],
}
_IMPROVEMENT = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "description": "What will be different in the next answer"},
        "impact": {"type": "string", "enum": list(IMPACTS)},
        "criterion": {"type": "string", "description": "The criterion that it raises, such as E2"},
        "verification": {"type": "string", "description": "How you will see that it is done"},
    },
    "required": ["description", "impact"],
}
ROUND_SPECS = {
    spec.name: spec
    for spec in (
        _make_answer_spec(
            "End the round with your answer to the task: whole and on its own, for it replaces your earlier one. "
            "Returns what the next round starts from."
        ),
        _make_vote_spec("Decide for one of your answers, and end.", choices="The answer, such as agent1.2"),
        _make_spec(GET_TASK_PLAN, "Task plan", "Get the plan of this round: its tasks, and how each is verified.", {}),
        _make_spec(
            SUBMIT_CHECKLIST,
            "Checklist",
            "Score your newest answer by every criterion. Only for a round that has no task plan.",
            {
                "scores": {
                    "type": "object",
                    "additionalProperties": _SCORE,
                    "description": "An entry for each criterion: E1, E2 and so on",
                }
            },
        ),
        _make_spec(
            PROPOSE_IMPROVEMENTS,
            "Improvements",
            "Say what the next answer will do better, after a checklist with the verdict iterate.",
            {"improvements": {"type": "array", "items": _IMPROVEMENT}},
        ),
    )
}
