"""kill -9 at every named point of a tree of depth 3, then `resume`: nothing twice, nothing lost, the answer arrives."""

from __future__ import annotations

import signal

import pytest

from retinue.core.events import ApprovalAsked, RunResumed, ToolResult
from tests.crash.tree import ANSWER, agents, check, events, marks
from tests.surfaces.cli.shell import Project, interrupt, one_line_error, read_until

# Points that need somebody who answers or cancels, or that are of a resume itself, have tests of their own below.
POINTS = (
    "run.spawned", "run.started", "turn.started", "message", "usage", "tool.call", "tool.result", "before-tool.result",
    "turn.ended", "run.ended",
)  # fmt: skip
TWICE = ("run.resumed", "tool.call", "before-tool.result", "run.ended")
MARK = {"name": "shell", "args": {"command": "echo once >> marks.txt"}}


def goes_on(project: Project, *arguments: str) -> None:
    before = events(project)
    done = project.retinue("resume", "--yes", *arguments)
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr
    check(project, before)


@pytest.mark.requirement("P23")
@pytest.mark.parametrize("point", [f"{name}:{nth}" for name in POINTS for nth in (1, 4)])
def test_a_tree_goes_on_after_a_crash_at(point: str, project: Project) -> None:
    died = project.run("--yes", agents=agents(project.folder), RETINUE_FAILPOINT=point)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert {row["state"] for row in project.rows()} <= {"interrupted", "done"}
    goes_on(project)


@pytest.mark.parametrize("point", TWICE)
def test_a_crash_while_it_goes_on_is_survived_too(point: str, project: Project) -> None:
    project.run("--yes", agents=agents(project.folder), RETINUE_FAILPOINT="tool.call:3")
    again = project.retinue("resume", "--yes", RETINUE_FAILPOINT=f"{point}:2")
    assert again.returncode == -signal.SIGKILL, again.stderr
    goes_on(project)
    resumed = [event.run for event in events(project) if isinstance(event.body, RunResumed)]
    # What dies right before a write may do so before anything of its resume is on disk.
    assert resumed.count(0) == 2 or (point.startswith("before-") and resumed.count(0) == 1)


@pytest.mark.requirement("P15")
@pytest.mark.parametrize(
    ("point", "asked", "marked"), [("approval.asked", 2, 1), ("approval.decided", 1, 1), ("tool.started", 1, 0)]
)
def test_an_answer_takes_effect_at_most_once(point: str, asked: int, marked: int, project: Project) -> None:
    """A question is asked again; an answer that had not reached its call does now; after that nobody knows."""
    script = project.script({"main": [{"tools": [MARK]}, ANSWER]})
    arguments = ("--model", script, "--wait-approvals", "200")
    with project.running("run", "go", *arguments, RETINUE_FAILPOINT=point) as process:
        if point != "approval.asked":
            read_until(process.stderr, "shell(")
            project.retinue("approve", "--yes", "1")
        assert process.wait() == -signal.SIGKILL
    with project.running("resume", "--wait-approvals", "200") as process:
        if point == "approval.asked":
            read_until(process.stderr, "shell(")
            assert project.retinue("approve", "--yes", "2").returncode == 0
        out, error = process.communicate()
    assert (process.returncode, out) == (0, f"{ANSWER}\n"), error
    now = events(project)
    assert len([event for event in now if isinstance(event.body, ApprovalAsked)]) == asked
    assert marks(project)["once"] == marked
    outcomes = [event.body.outcome for event in now if isinstance(event.body, ToolResult)]
    assert outcomes == (["unknown_after_crash"] if not marked else [""])


def answered(project: Project, script: str, point: str, *how: str) -> None:
    """A run whose first question was answered, and which died at that point."""
    arguments = ("--model", script, "--wait-approvals", "200")
    with project.running("run", "go", *arguments, RETINUE_FAILPOINT=point) as process:
        read_until(process.stderr, "shell(")
        project.retinue("approve", "--yes", "1", *how)
        assert process.wait() == -signal.SIGKILL


def test_an_answer_that_takes_effect_after_a_crash_does_so_once(project: Project) -> None:
    answered(project, project.script({"main": [{"tools": [MARK]}, ANSWER]}), "approval.decided")
    assert project.retinue("resume", RETINUE_FAILPOINT="before-tool.result").returncode == -signal.SIGKILL
    assert marks(project)["once"] == 1
    done = project.retinue("resume")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr
    assert marks(project)["once"] == 1  # nobody knows that it ran, so it does not run again
    assert [e.body.outcome for e in events(project) if isinstance(e.body, ToolResult)] == ["unknown_after_crash"]


def test_an_answer_for_the_rest_of_a_run_outlives_a_crash(project: Project) -> None:
    answered(project, project.script({"main": [{"tools": [MARK]}, {"hang": True}]}), "turn.ended", "--run")
    project.script({"main": [{"tools": [MARK]}, {"tools": [MARK]}, ANSWER]})
    done = project.retinue("resume")  # there is nobody to ask
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr
    assert marks(project)["once"] == 2


def test_a_tree_that_was_being_cancelled_goes_on(project: Project) -> None:
    look = {"tools": [{"name": "list_agents"}]}
    script = project.script({"main": [look, {"hang": True}]})
    with project.running("run", "go", "--model", script, "--yes", RETINUE_FAILPOINT="before-run.ended") as process:
        read_until(process.stderr, "list_agents")
        interrupt(process)
        assert process.wait() == -signal.SIGKILL
    project.script({"main": [look, ANSWER]})
    done = project.retinue("resume", "--yes")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr


def test_a_crash_in_the_cleanup_leaves_a_finished_tree(project: Project) -> None:
    died = project.run("--yes", agents={"main": [ANSWER]}, RETINUE_FAILPOINT="cleanup")
    assert died.returncode == -signal.SIGKILL
    tree = project.rows()[0]["tree"]
    assert one_line_error(project.retinue("resume", tree)).startswith(f"{tree} has ended: done; `retinue continue")
    assert one_line_error(project.retinue("resume")).startswith("no tree here is interrupted")


def test_an_unknown_point_is_an_error_that_names_the_others(project: Project) -> None:
    error = one_line_error(project.run(agents={"main": [ANSWER]}, RETINUE_FAILPOINT="nowhere"))
    assert error.startswith(
        "RETINUE_FAILPOINT: there is no point 'nowhere'; available: cleanup, before-KIND, run.spawned, "
    )
