"""Short ways to run a scripted primary in rounds and look at what it and its evaluators did."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import retinue
from retinue import Event, Limits, Profile, Result, Rounds
from retinue.core.events import ToolResult
from retinue.core.rounds import PACKET_FILE, SECTIONS, TASKS_FILE
from retinue.testing import scripted
from tests.supervisor.tree.kit import bodies, call

PACKET = "\n\n".join(f"## {name}\n\nabout {name}" for name in SECTIONS)
TASKS: dict[str, Any] = {
    "schema_version": "1",
    "objective": "be shorter",
    "primary_strategy": "cut",
    "tasks": [
        {"id": "cut", "description": "cut the second half", "verification": "wc -w", "depends_on": []},
        {"id": "check", "description": "read it aloud", "verification": "it flows", "depends_on": ["cut"]},
    ],
}

CONFIG = """\
model: scripted:script.yaml
orchestrator:
  voting_sensitivity: checklist_gated
  coordination:
    subagent_types: [round_evaluator]
    subagent_orchestrator: {enabled: true, agents: [{model: "scripted:script.yaml"}, {model: "scripted:script.yaml"}]}
    round_evaluator_before_checklist: true
    orchestrator_managed_round_evaluator: true
    round_evaluator_transformation_pressure: aggressive
    checklist_criteria_inline: [{text: It rhymes., category: should}]
"""


def answer(content: str) -> dict[str, Any]:
    return call("new_answer", content=content)


def vote(choice: str, reason: str = "it is right") -> dict[str, Any]:
    return call("vote", agent_id=choice, reason=reason)


def checklist(*scores: float) -> dict[str, Any]:
    entries = {f"E{n}": {"score": score, "reasoning": "seen"} for n, score in enumerate(scores, 1)}
    return call("submit_checklist", scores=entries)


def improve(*impacts: str) -> dict[str, Any]:
    return call("propose_improvements", improvements=[{"description": "better", "impact": each} for each in impacts])


def write(name: str, content: str) -> dict[str, Any]:
    return call("write", path=name, content=content)


def evaluator(packet: str | None = PACKET, tasks: Any = TASKS) -> list[Any]:
    """The replies of an evaluator that writes these files, and ends."""
    said: list[Any] = [] if packet is None else [write(PACKET_FILE, packet)]
    if tasks is not None:
        said.append(write(TASKS_FILE, tasks if isinstance(tasks, str) else json.dumps(tasks)))
    return [*said, "judged"]


def main(said: Sequence[Any], evaluators: Any = None, **fields: Any) -> Profile:
    """Script a primary, and its evaluators: one list of replies for all of them, or a list for each round."""
    agents: dict[str, Any] = {"main": list(said)}
    if isinstance(evaluators, dict):
        agents |= {f"evaluator of round {number}": replies for number, replies in evaluators.items()}
    else:
        agents["round_evaluator"] = evaluator() if evaluators is None else evaluators
    return Profile("main", "You are main.", model=scripted(agents), **fields)


async def run_rounds(
    profile: Profile, rounds: Rounds | int = 2, *, limits: Limits | None = None, **options: Any
) -> tuple[Result[Any], list[Event]]:
    options = {"mode": "yes", **options}
    wanted = Rounds(rounds, criteria=["It runs."]) if isinstance(rounds, int) else rounds
    async with retinue.open(**options) as r:
        run = await r.spawn(profile, "write a poem", limits=limits, rounds=wanted)
        events = [event async for event in run.events()]
        return await run.result(), events


def results(events: Sequence[Event], *, run: int = 0) -> list[tuple[str, str]]:
    """The tool results of a run: the name of the tool, and what it returned."""
    return [(body.name, body.text) for body in bodies(events, ToolResult, run=run)]
