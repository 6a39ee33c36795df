"""Tests with kill -9 from outside at random moments, of a run and of each process that resumes it, until the tree
ends."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from retinue.core.events import RunEnded
from tests.crash.tree import ANSWER, agents, check, events
from tests.sandbox.crash_scenes import cmdline
from tests.sandbox.places import needs_bubblewrap
from tests.surfaces.cli.shell import Project, read_until, until

SPAN, SANDBOXED_SPAN = 0.6, 2.2  # about as long as the tree takes


def crash(project: Project, moment: float, *arguments: str) -> None:
    """Kills it so many seconds after its first words."""
    with project.running(*arguments, quick=False) as process:
        read_until(process.stderr, "\n")
        threading.Event().wait(moment)
        process.kill()
        process.wait()


def through(project: Project) -> bool:
    """Return True if the tree ended before its process did."""
    last = events(project)[-1]
    return last.run == 0 and isinstance(last.body, RunEnded)


def survive(project: Project, seed: int, *, span: float = SPAN) -> None:
    moments = random.Random(seed)
    script = project.script(agents(project.folder if project.runtime == "inherited" else Path(), delay=0.05))
    crash(project, moments.uniform(0, span), "run", "the task", "--model", script, "--yes")
    before = events(project)
    while not through(project) and moments.random() < 0.3:
        crash(project, moments.uniform(0, span / 2), "resume", "--yes")
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


@needs_bubblewrap
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(300, 350))
def test_crashes_of_runs_in_sandboxes(seed: int, project: Project, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    project.runtime = "isolated"
    survive(project, seed, span=SANDBOXED_SPAN)
    mine = str(project.folder)
    until(lambda: not [path for path in Path("/proc").glob("[0-9]*") if mine in cmdline(int(path.name))])
