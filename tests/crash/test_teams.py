"""Tests with kill -9 from outside at random moments, of a team and of each process that resumes it, until the tree
ends."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from retinue.core.events import AnswerGiven, RunEnded, RunSpawned, TeamDecided, VoteCast
from tests.crash.test_moments import crash, through
from tests.crash.tree import events
from tests.surfaces.cli.shell import Project

SPAN = 0.6
CONFIG = """\
orchestrator:
  coordination:
    subagent_types: [explorer]
    subagent_orchestrator:
      enabled: true
      shared_child_team_types: [explorer]
      final_answer_strategy: winner_present
      agents:
        - {{id: one, model: "{script}"}}
        - {{id: two, model: "{script}"}}
        - {{id: three, model: "{script}"}}
"""


def _call(name: str, **args: Any) -> dict[str, Any]:
    return {"tools": [{"name": name, "args": args}]}


def _script() -> dict[str, Any]:
    votes = {"agent1": "agent2", "agent2": "agent2", "agent3": "agent1"}
    script: dict[str, list[dict[str, Any]]] = {
        agent: [
            _call("write", path="mine.txt", content=agent),
            _call("new_answer", content=f"answer of {agent}"),
            _call("vote", agent_id=choice, reason="it is right"),
        ]
        for agent, choice in votes.items()
    }
    script["agent2"].append({"text": "presented by agent2"})
    task = {"task": "look around", "subagent_type": "explorer"}
    script["main"] = [_call("spawn_subagents", tasks=[task]), {"text": "all done"}]
    for replies in script.values():
        for reply in replies:
            reply["delay"] = 0.04
    return script


@pytest.fixture
def team_project(project: Project) -> Project:
    script = project.script(_script())
    Path(project.folder, "retinue.yaml").write_text(CONFIG.format(script=script))
    trusted = project.retinue("trust", "--yes")
    assert trusted.returncode == 0, trusted.stderr
    return project


def survive(project: Project, seed: int) -> None:
    moments = random.Random(seed)
    script = project.script(_script())
    crash(project, moments.uniform(0, SPAN), "run", "the task", "--model", script, "--yes")
    before = events(project)
    while not through(project) and moments.random() < 0.3:
        crash(project, moments.uniform(0, SPAN / 2), "resume", "--yes")
    if not through(project):
        done = project.retinue("resume", "--yes")
        assert (done.returncode, done.stdout) == (0, "all done\n"), done.stderr
    now = events(project)
    assert now[: len(before)] == before
    assert sum(isinstance(event.body, RunSpawned) for event in now) == 5
    assert sorted(event.run for event in now if isinstance(event.body, RunEnded)) == [0, 1, 2, 3, 4]
    assert Counter(e.body.label for e in now if isinstance(e.body, AnswerGiven)) == Counter(
        {"agent1.1": 1, "agent2.1": 1, "agent3.1": 1}
    )
    assert Counter(e.body.member for e in now if isinstance(e.body, VoteCast)) == Counter(
        {"agent1": 1, "agent2": 1, "agent3": 1}
    )
    [decided] = [e.body for e in now if isinstance(e.body, TeamDecided)]
    assert decided.votes == {"agent1.1": 1, "agent2.1": 2, "agent3.1": 0}
    [ended] = [e.body for e in now if e.run == 1 and isinstance(e.body, RunEnded)]
    assert ended.final_response == "presented by agent2"


@pytest.mark.parametrize("seed", range(2))
def test_a_team_is_killed_at_a_random_moment(seed: int, team_project: Project) -> None:
    survive(team_project, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(500, 540))
def test_forty_crashes_of_a_team(seed: int, team_project: Project) -> None:
    survive(team_project, seed)
