"""A log that is deleted or replaced while a run is at work is noticed: the run says so and fails."""

from pathlib import Path

import pytest

from retinue.core.errors import LogLost
from retinue.log.sqlite import SqliteLog
from tests.log.kit import fill, make_ended, make_event, write
from tests.surfaces.cli.shell import Project
from tests.workspaces.kit import shell

NOTICE = "was deleted or replaced while this process was writing it"


@pytest.mark.finding("R4")
@pytest.mark.parametrize(
    "command",
    [
        "rm -rf .retinue",
        "rm -rf .retinue/logs",
        "rm .retinue/logs/0001.db-wal",
        "cp -r .retinue x; rm -rf .retinue; mv x .retinue",
    ],
)
def test_a_run_whose_state_is_deleted_or_replaced_says_so_and_fails(project: Project, command: str) -> None:
    agents = {"main": [shell(command), shell("touch unlogged"), "the answer"]}
    done = project.run("--yes", "--runtime", "inherited", agents=agents)
    assert (done.returncode, done.stdout) == (1, "")
    assert not (project.folder / "unlogged").exists()
    assert f"failed: the log {project.folder}/.retinue/logs/0001.db {NOTICE}" in done.stderr
    assert done.stderr.count("lost\n") == 2  # the run, and the events that nobody can read any more
    assert "Traceback" not in done.stderr and "internal error" not in done.stderr


@pytest.mark.finding("R4")
async def test_a_log_that_vanishes_after_its_last_event_is_told_of_at_the_end(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "logs")
    await fill(log, 3)
    (tmp_path / "logs").rename(tmp_path / "moved")
    with pytest.raises(LogLost, match=NOTICE):
        await log.close()


@pytest.mark.finding("R4")
async def test_nothing_counts_as_written_to_a_log_that_is_gone(tmp_path: Path) -> None:
    log = SqliteLog(tmp_path / "logs")
    await fill(log, 3, end=False)
    log.path.unlink()
    for seq in (4, 5):
        with pytest.raises(LogLost, match=NOTICE):
            await write(log, make_event(seq))
    with pytest.raises(LogLost, match=NOTICE):
        log.append(make_ended(6))
    with pytest.raises(LogLost, match="1 event is lost"):
        await log.close()
