"""kill -9 at every named point of a tree of depth 3, then `resume`: nothing twice, nothing lost, the answer arrives."""

from __future__ import annotations

import signal

import pytest

from retinue.log.failpoints import AFTER, BEFORE
from tests.cli.shell import Project
from tests.crash.tree import ANSWER, agents, check, events

ASKING = {"approval_asked", "approval_answered", "tool_started", "cancel_sent", "run_resumed"}
POINTS = sorted({*AFTER, *BEFORE} - ASKING)


@pytest.mark.requirement("P23")
@pytest.mark.parametrize("nth", [1, 3])
@pytest.mark.parametrize("point", POINTS)
def test_a_tree_goes_on_after_a_crash_at(point: str, nth: int, project: Project) -> None:
    died = project.run("--yes", agents=agents(project.folder), RETINUE_FAILPOINT=f"{point}:{nth}")
    assert died.returncode == -signal.SIGKILL, died.stderr
    before = events(project)
    done = project.retinue("resume", "--yes")
    assert (done.returncode, done.stdout) == (0, f"{ANSWER}\n"), done.stderr
    check(project, before)
