"""kill -9 from outside at random moments, of the run and of what goes on with it, until it is through."""

from __future__ import annotations

import random
import threading

import pytest

from retinue.core.events import RunEnded
from tests.cli.shell import Project, read_until
from tests.crash.tree import ANSWER, agents, check, events

SPAN = 0.6  # about as long as the tree takes


def crash(project: Project, moment: float, *arguments: str) -> None:
    """Kills it so many seconds after its first words."""
    with project.running(*arguments) as process:
        read_until(process.stderr, "\n")
        threading.Event().wait(moment)
        process.kill()
        process.wait()


def through(project: Project) -> bool:
    """Whether the tree came to its end before the process did."""
    last = events(project)[-1]
    return last.run == 0 and isinstance(last.body, RunEnded)


def survive(project: Project, seed: int) -> None:
    moments = random.Random(seed)
    script = project.script(agents(project.folder, delay=0.05))
    crash(project, moments.uniform(0, SPAN), "run", "the task", "--model", script, "--yes")
    before = events(project)
    while not through(project) and moments.random() < 0.3:
        crash(project, moments.uniform(0, SPAN / 2), "resume", "--yes")
    if not through(project):
        done = project.retinue("resume", "--yes")
        assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr
    check(project, before)


@pytest.mark.parametrize("seed", range(12))
def test_a_crash_at_a_random_moment(seed: int, project: Project) -> None:
    survive(project, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 300))
def test_two_hundred_crashes(seed: int, project: Project) -> None:
    survive(project, seed)
