"""Tests of a project with another user's state, settings or agents: none of them runs or writes."""

import json
import os
import shutil
import signal
from pathlib import Path

import pytest

from retinue.workspaces.atomic_apply import Journal, write_journal
from tests.surfaces.cli.shell import Project, one_line_error
from tests.surfaces.cli.test_terminal import Terminal
from tests.workspaces.kit import git, repository, shell

FOREIGN = ".retinue has no signature of yours for this place, so nothing in it is used"


@pytest.fixture
def clone(tmp_path: Path) -> Project:
    """Clone an attacker's repository. Its state holds an interrupted apply, and an interrupted `inherited` tree with a
    standing yes and a scripted model."""
    theirs = Project(repository(tmp_path / "theirs"))
    marker = tmp_path / "marker"
    agents = {"main": [shell("true"), shell("true"), shell(f"touch '{marker}'"), "end"]}
    home = {"XDG_STATE_HOME": str(tmp_path / "their-home")}
    died = theirs.run("--yes", agents=agents, RETINUE_FAILPOINT="turn.started:2", **home)
    assert died.returncode == -signal.SIGKILL
    assert (
        theirs.run("--yes", "--workspace", "copy", agents={"main": [shell("echo 1 > b"), "x"]}, **home).returncode == 0
    )
    plant_journal(theirs.folder / ".retinue/applying/0123", root=tmp_path / "mine", path=".git/hooks/pre-commit")
    shutil.copytree(theirs.folder, tmp_path / "mine")
    mine = Project(tmp_path / "mine")
    mine.runtime = ""
    return mine


def plant_journal(staging: Path, *, root: Path, path: str) -> None:
    """A journal of the kind that the first version acted on: it restores a file of the attacker's."""
    staging.mkdir(parents=True)
    (staging / "old-0").write_text("#!/bin/sh\n")
    (staging / "old-0").chmod(0o755)
    journal = {"root": str(root), "paths": [path], "removed": [path], "folders": []}
    (staging / "journal.json").write_text(json.dumps(journal))
    (staging / "journal.json").chmod(0o600)


@pytest.mark.finding("X1")
@pytest.mark.parametrize(
    "words",
    [
        ("resume", "--yes"),
        ("apply", "--yes"),
        ("ps", "--all"),
        ("show",),
        ("tail",),
        ("usage",),
        ("diff",),
        ("approvals",),
        ("approve", "1"),
        ("cancel", "x"),
        ("send", "x", "hello"),
        ("continue", "x", "more", "--yes"),
        ("gc",),
        ("run", "x", "--model", "scripted:script.yaml", "--yes"),
    ],
    ids=lambda words: words[0],
)
def test_no_command_uses_state_that_came_with_a_clone(clone: Project, tmp_path: Path, words: tuple[str, ...]) -> None:
    assert FOREIGN in one_line_error(clone.retinue(*words))
    assert not (clone.folder / ".git/hooks/pre-commit").exists()
    assert not (tmp_path / "marker").exists()


@pytest.mark.finding("X1")
def test_doctor_says_what_is_wrong_and_a_user_can_take_the_state_over(clone: Project) -> None:
    assert f"fail  state     {clone.folder}/{FOREIGN}" in clone.doctor().stdout
    assert "to take it over without a terminal give --yes" in one_line_error(clone.retinue("trust", "--state"))
    terminal = Terminal(clone, "trust", "--state")
    terminal.read_until("Take it over?")
    terminal.type("n\n")
    assert terminal.end() == 1
    assert FOREIGN in one_line_error(clone.retinue("ps", "--all"))
    assert clone.retinue("trust", "--state", "--yes").stdout == f"{clone.folder}/.retinue is yours.\n"
    assert clone.retinue("trust", "--state").stdout == f"{clone.folder}/.retinue is yours already.\n"
    assert len(clone.rows("--all")) == 2


@pytest.mark.finding("X1")
def test_taken_over_state_still_has_no_journal_of_somebody_else(clone: Project) -> None:
    assert clone.retinue("trust", "--state", "--yes").returncode == 0
    text = one_line_error(clone.retinue("apply", "--yes"))
    assert "records an interrupted apply that you did not start here, so it is not undone: move it away" in text
    assert not (clone.folder / ".git/hooks/pre-commit").exists()


@pytest.mark.finding("X1")
def test_a_journal_that_a_pull_brings_into_our_own_state_is_not_acted_on(project: Project, tmp_path: Path) -> None:
    """`.retinue` ignores itself in git, but a repository can track files in it all the same."""
    repository(project.folder)
    assert project.run("--yes", "--workspace", "copy", agents={"main": [shell("echo 1 > b"), "x"]}).returncode == 0
    plant_journal(project.folder / ".retinue/applying/0123", root=tmp_path, path="outside")
    assert "that you did not start here" in one_line_error(project.retinue("apply", "--yes"))
    assert not (tmp_path / "outside").exists() and not (project.folder / "b").exists()


@pytest.mark.finding("X1")
@pytest.mark.parametrize(
    "path", ["../outside", ".git/hooks/pre-commit", ".GIT/config", "a/.retinue/x", "/etc/x", "a//b"]
)
def test_even_our_own_journal_restores_only_what_an_apply_may_write(project: Project, path: str) -> None:
    repository(project.folder)
    assert project.run("--yes", "--workspace", "copy", agents={"main": [shell("echo 1 > b"), "x"]}).returncode == 0
    staging = project.folder / ".retinue/applying/0123"
    plant_journal(staging, root=project.folder, path=path)
    journal = Journal(root=str(project.folder), paths=(path,), removed=(path,), folders=())
    write_journal(staging, journal)
    assert "that you did not start here" in one_line_error(project.retinue("apply", "--yes"))
    assert staging.exists()


@pytest.mark.finding("X1")
def test_an_interrupted_apply_is_undone_after_the_question(project: Project) -> None:
    repository(project.folder)
    assert project.run("--yes", "--workspace", "copy", agents={"main": [shell("echo 1 > b"), "x"]}).returncode == 0
    staging = project.folder / ".retinue/applying/0123"
    staging.mkdir(parents=True)
    (staging / "new-0").write_text("half\n")
    os.link(staging / "new-0", project.folder / "half.txt")
    journal = Journal(root=str(project.folder), paths=("half.txt",), removed=(), folders=())
    write_journal(staging, journal)
    assert "there is no terminal to ask on" in one_line_error(project.retinue("apply"))
    terminal = Terminal(project, "apply")
    assert "  half.txt" in terminal.read_until("put them back as they were before it?")
    terminal.type("n\n")
    assert terminal.end() == 1 and (project.folder / "half.txt").exists()
    terminal = Terminal(project, "apply")
    terminal.read_until("put them back as they were before it?")
    terminal.type("y\n")
    terminal.read_until("apply these changes?")
    assert not (project.folder / "half.txt").exists() and not (project.folder / "b").exists()
    terminal.type("y\n")
    assert terminal.end() == 0 and (project.folder / "b").exists()


@pytest.mark.finding("X1")
def test_a_moved_project_goes_on_where_it_is_and_a_copied_one_does_not(project: Project, tmp_path: Path) -> None:
    agents = {"main": [shell("echo 1 > one"), shell("echo 2 > two"), shell("echo 3 > three"), "end"]}
    assert project.run("--yes", agents=agents, RETINUE_FAILPOINT="turn.started:2").returncode == -signal.SIGKILL
    shutil.copytree(project.folder, tmp_path / "copy")
    assert FOREIGN in one_line_error(Project(tmp_path / "copy").retinue("resume", "--yes"))
    project.folder.rename(tmp_path / "moved")
    moved = Project(tmp_path / "moved")
    assert moved.retinue("resume", "--yes", "--model", "scripted:script.yaml").returncode == 0
    assert (moved.folder / "three").exists() and not project.folder.exists()


@pytest.mark.finding("X1")
def test_a_log_never_loosens_the_runtime_that_the_settings_say(project: Project, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    agents = {"main": [shell("true"), shell("true"), shell(f"touch '{outside}'"), "end"]}
    died = project.run("--yes", "--runtime", "inherited", agents=agents, RETINUE_FAILPOINT="turn.started:2")
    assert died.returncode == -signal.SIGKILL
    project.runtime = ""
    done = project.retinue("resume", "--yes")
    assert (
        "ran with runtime 'inherited'; it resumes with 'isolated' (--runtime inherited keeps it as it was)"
        in done.stderr
    )
    assert done.returncode == 0 and not outside.exists()


@pytest.mark.finding("X2")
@pytest.mark.parametrize("mark", ["retinue.yaml", ".agent", ".git", ".agent/subagent_types/x/SUBAGENT.md"])
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_project_of_another_user_is_refused(tmp_path: Path, mark: str) -> None:
    """Somebody else's files in a folder above, such as /tmp, or a user's own while root works in them."""
    above = tmp_path / "shared"
    target = above / mark
    target.parent.mkdir(parents=True)
    if target.suffix:
        target.write_text("---\nname: x\ndescription: x\n---\nx\n" if target.suffix == ".md" else "")
    else:
        target.mkdir()
    os.chown(target, 54321, 54321)
    below = Project(above / "below")
    (below.folder / "retinue.yaml").unlink()
    below.runtime = ""
    for command in (("run", "x", "--yes"), ("profiles",), *([] if "SUBAGENT" in mark else [("ps",), ("trust",)])):
        text = one_line_error(below.retinue(*command))
        assert text.startswith(f"{target} belongs to user 54321, and you are root: ")
        assert f"`retinue trust --owner` in {above}" in text
    assert not (above / ".retinue").exists()
    assert below.retinue("init", ".", "--yes").returncode == 0  # what the error advises
    assert below.retinue("ps").returncode == 0


@pytest.mark.finding("X2")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_an_owner_can_be_accepted_and_revoked(project: Project) -> None:
    for name in ("retinue.yaml", "."):
        os.chown(project.folder / name, 54321, 54321)
    assert "belongs to user 54321" in one_line_error(project.retinue("ps"))
    assert "to accept that without a terminal give --yes" in one_line_error(project.retinue("trust", "--owner"))
    assert project.retinue("trust", "--owner", "--yes").returncode == 0
    assert project.retinue("ps").returncode == 0
    os.chown(project.folder / "retinue.yaml", 54322, 54322)  # another one was not accepted
    assert "belongs to user 54322" in one_line_error(project.retinue("ps"))
    os.chown(project.folder / "retinue.yaml", 54321, 54321)
    assert project.retinue("trust", "--revoke").returncode == 0
    assert "belongs to user 54321" in one_line_error(project.retinue("ps"))


@pytest.mark.finding("X2")
@pytest.mark.parametrize(("mode", "who"), [(0o666, "every user of this machine"), (0o664, "other users of its group")])
def test_settings_that_others_may_write_are_refused(project: Project, mode: int, who: str) -> None:
    file = project.folder / "retinue.yaml"
    if who.startswith("other") and os.geteuid() == 0:
        os.chown(file, 0, 54321)
    file.chmod(mode)
    if who.startswith("other") and os.geteuid() != 0:
        return  # the group of an ordinary user is often a private one, and then may write
    text = one_line_error(project.retinue("ps"))
    assert text.startswith(f"{who} may write {file}, so it could run their commands as you: `chmod ")


@pytest.mark.finding("X2")
def test_settings_behind_a_link_belong_to_the_owner_of_the_file(project: Project) -> None:
    file = project.folder / "retinue.yaml"
    file.unlink()
    if os.geteuid() == 0:
        (project.folder / "other").touch()
        os.chown(project.folder / "other", 54321, 54321)
        file.symlink_to("other")
    else:
        file.symlink_to("/etc/hostname")
    assert f"{file} belongs to " in one_line_error(project.retinue("ps"))


@pytest.mark.finding("X1")
def test_git_ignores_state_and_a_link_in_its_place_is_not_written_through(project: Project, tmp_path: Path) -> None:
    (project.folder / ".retinue").mkdir()
    (project.folder / ".retinue/.gitignore").symlink_to(tmp_path / "made")
    git(repository(project.folder), "status")
    assert project.run("--yes", agents={"main": ["end"]}).returncode == 0
    assert not (tmp_path / "made").exists()
    assert (
        git(project.folder, "status", "--porcelain", "--untracked-files=all", ".retinue") == " T .retinue/.gitignore\n"
    )


@pytest.mark.finding("X1")
def test_a_clone_cannot_have_its_users_state_published(project: Project) -> None:
    """A folder that has nothing but a `.gitignore` is taken for empty."""
    repository(project.folder, **{".retinue/.gitignore": "!*\n"})
    (project.folder / ".retinue").chmod(0o700)
    assert project.run("--yes", agents={"main": ["end"]}).returncode == 0
    status = git(project.folder, "status", "--porcelain", "--untracked-files=all", ".retinue")
    assert status.strip() == "M .retinue/.gitignore"


@pytest.mark.finding("X1")
@pytest.mark.parametrize("how", ["file", "journal"])
def test_a_log_that_a_pull_brings_into_our_own_state_is_not_read(project: Project, tmp_path: Path, how: str) -> None:
    """A repository can track files below `.retinue`: a log of its own, or a journal of SQLite beside ours, which SQLite
    would play into it."""
    marker = tmp_path / "marker"
    home = {"XDG_STATE_HOME": str(tmp_path / "their-home")}
    agents = {"main": [shell("true"), shell("true"), shell(f"touch '{marker}'"), "end"]}
    theirs = Project(tmp_path / "theirs")
    assert theirs.run("--yes", agents=agents, RETINUE_FAILPOINT="turn.started:2", **home).returncode == -signal.SIGKILL
    assert project.run("--yes", agents={"main": ["end"]}).returncode == 0
    ours = project.folder / ".retinue/logs"
    if how == "file":
        for file in (theirs.folder / ".retinue/logs").iterdir():
            shutil.copy(file, ours / file.name.replace("0001", "0002"))
    else:
        shutil.copy(theirs.folder / ".retinue/logs/0001.db-wal", ours / "0001.db-wal")
    done = project.retinue("resume", "--yes")
    assert done.returncode != 0 and "holds events that you did not write" in done.stderr
    assert not marker.exists()
    assert "fail  logs" in project.doctor().stdout


@pytest.mark.finding("X1")
def test_a_link_in_the_place_of_a_log_or_its_lock_is_not_written_through(project: Project, tmp_path: Path) -> None:
    assert project.run("--yes", agents={"main": ["end"]}).returncode == 0
    precious = tmp_path / "precious"
    precious.write_text("mine\n")
    lock = project.folder / ".retinue/logs/0001.lock"
    lock.unlink()
    lock.symlink_to(precious)
    done = project.run("--yes", agents={"main": ["end"]})
    assert done.returncode != 0 and "cannot write the log" in done.stderr
    assert precious.read_text() == "mine\n"
