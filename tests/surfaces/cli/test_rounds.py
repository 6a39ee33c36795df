"""`retinue run --rounds`: rounds for one run, with every setting that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retinue.build.parts import Parts
from retinue.build.project import enable_rounds
from retinue.core.rounds import Rounds
from tests.agent.rounds.kit import answer, evaluator
from tests.surfaces.cli.shell import Project, one_line_error
from tests.surfaces.cli.test_help_and_run_names import show_on_terminal

AGENTS: dict[str, Any] = {"main": [answer("one"), answer("two")], "round_evaluator": evaluator()}
CRITERIA = """\
orchestrator:
  coordination:
    checklist_criteria_inline: [{text: It rhymes., category: should}]
    round_evaluator_transformation_pressure: gentle
"""


@pytest.mark.requirement("MASS-40")
def test_the_option_sets_every_key_that_rounds_need(project: Project) -> None:
    parts = enable_rounds(Parts(project=Path(), enable_subagents=False), Rounds(4))
    assert (parts.rounds, parts.teams.enabled, parts.enable_subagents) == (Rounds(4), True, True)
    assert [profile.name for profile in parts.profiles] == ["round_evaluator"]
    (project.folder / "retinue.yaml").write_text(CRITERIA)
    done = project.run("--rounds", "2", "--yes", agents=AGENTS)
    assert (done.returncode, done.stdout) == (0, "two\n"), done.stderr
    lines = done.stderr.splitlines()
    told = [
        "◇ round 1 ends with the answer agent1.1",
        "◇ round 2 begins with the plan of its evaluator: 2 tasks",
        "◇ round 2 ends with the answer agent1.2",
    ]
    assert [line for line in lines if line.startswith("◇")] == told
    assert (lines.count("one"), lines.count("two")) == (1, 0), "an answer that is not the last is shown here"
    shown = project.retinue("show").stdout
    assert "\n  2      1, done    the plan of its evaluator: 2 tasks  agent1.2\n" in shown
    assert "\npacket of round 2\n  ## criteria_interpretation\n" in shown
    [first, *_], [evaluator_spawned, *_] = (
        [event for event in project.events() if event["kind"] == "run.spawned" and event["run"] == run]
        for run in (0, 1)
    )
    assert first["rounds"] == {
        "answers": 2,
        "criteria": [{"text": "It rhymes.", "category": "should"}],
        "pressure": "gentle",
    }
    assert (evaluator_spawned["agent"], evaluator_spawned["label"]) == ("round_evaluator", "evaluator of round 2")


def test_a_table_of_rounds_fits_a_narrow_terminal(project: Project) -> None:
    project.run("--rounds", "2", "--yes", agents=AGENTS)
    lines = show_on_terminal(project, "show", COLUMNS="50")
    [head] = [line for line in lines if "EVALUATOR" in line]
    [row] = [line for line in lines if "1, done" in line]
    assert row.startswith("  2 ") and "the plan of" in row and "…" in row
    assert max(len(head), len(row)) <= 50


def test_a_wrong_number_of_rounds_is_one_line(project: Project) -> None:
    done = project.run("--rounds", "0", agents=AGENTS)
    assert done.returncode == 2
    assert "rounds must be a whole number from 1 to 20, got 0" in one_line_error(done)
