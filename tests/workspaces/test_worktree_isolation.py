"""A worktree is held by its sandbox and not by the current folder: git, links and leftovers lead to no other."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

import retinue
from retinue import ConfigError, Profile
from retinue.core.events import ToolResult, Warned
from retinue.testing import scripted
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call
from tests.surfaces.cli.shell import Project, one_line_error
from tests.workspaces.kit import changes, git, hashed, repository, seen, shell, work

pytestmark = [needs_bubblewrap, pytest.mark.requirement("P31")]
SAVE = "-c user.name=x -c user.email=x@x"
TRICKS = {
    "another folder": f"git -C {{project}} {SAVE} commit --allow-empty -m evil",
    "another git folder": f"GIT_DIR={{project}}/.git GIT_WORK_TREE=$PWD git {SAVE} commit --allow-empty -m evil",
    "another work tree": "git --git-dir=.git --work-tree={project} checkout -f HEAD~0 -- a.txt; "
    "rm -f x; git --work-tree={project} clean -fdx",
    "a branch": "git --git-dir={project}/.git update-ref refs/heads/evil HEAD",
    "a reset": "cd {project} && git reset --hard HEAD && git stash && git gc",
    "a setting": "git config -f {project}/.git/config core.hooksPath $PWD",
    "a hook": 'echo evil > {project}/.git/hooks/pre-commit; ln -s "$PWD" {project}/.git/hooks/post-checkout',
    "a worktree of theirs": "git -C {project} worktree add ../../evil; git worktree add {project}/evil",
    "a push": "git push -f {project} HEAD:refs/heads/evil; git remote add up {project} && git push up HEAD:evil",
    "the shared objects": "for f in $(cat .git/objects/info/alternates); do touch $f/evil; rm -rf $f/*; done; "
    "git prune --expire=now; git gc --prune=now --aggressive",
    "the index": "GIT_INDEX_FILE={project}/.git/index git add -A; : > {project}/.git/index.lock",
    "a link in its own place": "cd ..; mv workspace away; ln -s {project} workspace; echo evil > workspace/a.txt",
}


async def test_no_trick_of_git_gets_from_a_worktree_to_the_repository(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{"kept.txt": "k\n"})
    tmp_path.chmod(0o755)
    (project / "a.txt").write_text("changed and not committed\n")
    (project / "x").write_text("not even added\n")
    subprocess.run(["chmod", "-R", "a+rwX", project], check=True)  # so that it is not the user alone who holds it
    before = hashed(project)
    commands = [f"({trick.format(project=shlex.quote(str(project)))}) 2>&1; true" for trick in TRICKS.values()]
    result = await work(project, *commands, "cat a.txt x; git log --format=%s | tail -1; pwd", runtime="isolated")
    assert (result.status, result.tool_count) == ("done", len(TRICKS) + 1)
    assert hashed(project) == before
    git(project, "fsck", "--strict")


async def test_no_tool_resolves_a_path_to_the_parents_files(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    tmp_path.chmod(0o755)
    before = hashed(project)
    links = f"ln -s '{project}/a.txt' file; ln -s '{project}' folder; ln -s ../../../../.. up"
    paths = [f"{project}/a.txt", "../../../../../a.txt", "file", "folder/a.txt", "up/a.txt", "folder/new.txt"]
    writes = [call("write", path=path, content="evil\n") for path in paths]
    edits = [call("edit", path=path, old_string="line 1\n", new_string="evil\n") for path in paths[:-1]]
    agents = {"main": [shell(links), *writes, *edits, {"text": "x"}]}
    result, events = await seen(project, agents, kind="worktree", runtime="isolated")
    assert result.status == "done" and hashed(project) == before
    assert not any(body.success for body in bodies(events, ToolResult)[1:])


async def test_nobody_gets_a_worktree_that_somebody_had_before(tmp_path: Path) -> None:
    """Each run starts from the working state of that moment, whatever others have left in theirs."""
    project = repository(tmp_path / "p")
    tmp_path.chmod(0o755)
    look = "cat b.txt a.txt | head -2; git status --short; git branch --list"
    first = await work(project, "echo mine > b.txt; git checkout -qb mine; git add -A", look, runtime="isolated")
    (project / "a.txt").write_text("newer\n")
    agents = {"main": [shell(look), {"text": "{{last_result}}"}]}
    second, _ = await seen(project, agents, kind="worktree", runtime="isolated")
    assert first.workspace != second.workspace and changes(first) == {"b.txt": "added"}
    assert second.final_response.splitlines()[:2] == ["cat: b.txt: No such file or directory", "newer"]
    assert "mine" not in second.final_response


async def test_a_worktree_that_is_gone_is_not_taken_from_elsewhere_when_its_run_goes_on(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    tmp_path.chmod(0o755)
    model = scripted({"main": [shell("echo one > b.txt"), {"hang": True}]})
    profile = Profile("main", model=model, workspace="worktree", runtime="isolated")
    async with retinue.open(project / ".retinue", mode="yes") as r:
        run = await r.spawn(profile, "go")
        async for event in run.events():
            if isinstance(event.body, ToolResult):
                break
        workspace = Path(r.control.trees[run.tree].runs[0].folders.path)
        workspace.rename(workspace.with_name("away"))
        workspace.symlink_to(project)
        before = hashed(project)
        await r.control.cancel(run.tree)
        result = await run.result()
    assert result.status == "cancelled" and hashed(project) == before
    assert not result.changed_files  # the link was not looked through


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("closed", ["all", "one object", "nothing"])
async def test_git_works_in_a_worktree_of_a_repository_that_only_root_may_read(tmp_path: Path, closed: str) -> None:
    project = repository(tmp_path / "p")
    tmp_path.chmod(0o755)
    objects = project / ".git" / "objects"
    if closed == "all":  # as with umask 077
        subprocess.run(["chmod", "-R", "go-rwx", project], check=True)
    elif closed == "one object":
        next(path for path in objects.rglob("*") if path.is_file()).chmod(0o400)
    before = hashed(project)
    commands = (
        f"echo new > b.txt; git add -A && git {SAVE} commit -qm second && git log --format=%s && git fsck --strict"
    )
    agents = {"main": [shell(commands), {"text": "{{last_result}}"}]}
    result, events = await seen(project, agents, kind="worktree", runtime="isolated")
    assert result.final_response.split() == ["second", "first"]
    assert changes(result) == {"b.txt": "added"} and hashed(project) == before
    alternates = Path(result.workspace, ".git", "objects", "info", "alternates")
    assert alternates.exists() == (closed == "nothing")
    assert [body.code for body in bodies(events, Warned)] == []


@pytest.fixture
def project(tmp_path: Path) -> Project:
    tmp_path.chmod(0o755)
    made = Project(repository(tmp_path / "p", **{"retinue.yaml": "", ".gitignore": "script.yaml\n"}))
    made.runtime = ""
    return made


def test_what_a_run_committed_is_not_pristine_and_is_not_swept(project: Project) -> None:
    """For git there is nothing to do in such a worktree; for the user there is."""
    saves = shell(f"echo new > b.txt; git add -A; git {SAVE} commit -qm work; git status --short | wc -l")
    done = project.run("--yes", "--json", agents={"main": [saves, {"text": "{{last_result}}"}]})
    result = json.loads(done.stdout)
    assert result["final_response"] == "0\n" and [file["path"] for file in result["changed_files"]] == ["b.txt"]
    report = json.loads(project.retinue("gc", "--older-than", "0s", "--json").stdout)
    assert report["removed"] == [] and list(report["kept"]) == [result["tree"]]
    assert project.retinue("apply", "--yes").returncode == 0
    assert (project.folder / "b.txt").read_text() == "new\n"


@pytest.mark.parametrize("name", ["", "runs", "logs", "control"])
def test_a_state_folder_that_a_clone_brought_as_a_link_is_not_written_through(project: Project, name: str) -> None:
    elsewhere = project.folder.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    link = project.folder / ".retinue" / name if name else project.folder / ".retinue"
    link.parent.mkdir(exist_ok=True)
    link.symlink_to(elsewhere)
    before = hashed(elsewhere)
    for done in (project.run("--yes", agents={"main": [{"text": "x"}]}), project.retinue("gc", "--older-than", "0s")):
        assert one_line_error(done).startswith(f"{link} is a link, but must be a real folder")
    if name:  # the folder itself is what a program has named
        with pytest.raises(ConfigError, match="is a link"):
            retinue.run_sync(Profile("a", model=scripted({"a": ["x"]})), "go", path=project.folder / ".retinue")
    assert hashed(elsewhere) == before


def test_removing_a_tree_does_not_follow_what_its_run_left(project: Project) -> None:
    precious = project.folder.parent / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    leaves = shell(f"ln -s '{precious}' link; ln -s '{project.folder}' p; mkdir d; ln -s / d/root")
    done = project.run("--yes", "--json", agents={"main": [leaves, {"text": "x"}]})
    assert done.returncode == 0, done.stderr
    before = hashed(project.folder), hashed(precious)
    tree = json.loads(done.stdout)["tree"]
    done = project.retinue("gc", "--older-than", "0s", "--force", "--json")
    assert json.loads(done.stdout)["removed"] == [tree]
    assert (hashed(project.folder), hashed(precious)) == before
    assert (
        subprocess.run(["git", "status", "--short"], cwd=project.folder, capture_output=True, check=True).stdout == b""
    )
