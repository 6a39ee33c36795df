"""Tests of a copied workspace in every kind of repository: its first contents, and a project left untouched."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import ConfigError, Profile, Result, Team
from retinue.core.errors import RetinueError
from retinue.core.events import RunSpawned, ToolCall, ToolResult, Warned
from retinue.files.scratch import sweep_scratch_folders
from retinue.supervisor.spawner import default_workspace
from retinue.testing import scripted
from retinue.workspaces import ignores
from retinue.workspaces.create import Workspaces
from retinue.workspaces.git import find_git, find_repository
from retinue.workspaces.recording import record_changes
from retinue.workspaces.run_folders import StateFolder
from retinue.workspaces.workspace import Workspace
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call, spawn
from tests.workspaces.kit import LINES, changes, copied, git, hashed, repository, seen, shell, work


def workspace(result: retinue.Result) -> Path:
    return Path(result.workspace)


@pytest.mark.requirement("MASS-1", "MASS-23")
async def test_a_worktree_starts_from_the_working_state(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{".gitignore": "*.o\nbuild/\n", "gone.txt": "x"})
    (project / "a.txt").write_text("uncommitted\n")
    (project / "new.txt").write_text("untracked\n")
    (project / "junk.o").write_text("ignored\n")
    (project / "build").mkdir()
    (project / "build/out").write_text("ignored\n")
    (project / "gone.txt").unlink()
    before, status = hashed(project), git(project, "status", "--porcelain")
    result = await work(project, "git status --porcelain > status; git log --format=%s > log; git branch > branch")
    made = workspace(result)
    assert (made / "a.txt").read_text() == "uncommitted\n" and (made / "new.txt").read_text() == "untracked\n"
    assert not (made / "junk.o").exists() and not (made / "build").exists() and not (made / "gone.txt").exists()
    assert (made / "status").read_text() == " M a.txt\n D gone.txt\n?? new.txt\n?? status\n"
    assert (made / "log").read_text() == "first\n" and (made / "branch").read_text() == "* main\n"
    assert (made / ".git/objects/info/alternates").read_text() == f"{project}/.git/objects\n"
    assert changes(result) == {"branch": "added", "log": "added", "status": "added"}
    assert hashed(project) == before and git(project, "status", "--porcelain") == status


@pytest.mark.parametrize(("folder", "inside"), [("a\nb", ""), ("end\n", ""), ("plain", "s\nt"), ("a\nb", "c/end\n")])
async def test_folders_whose_names_contain_newlines(tmp_path: Path, folder: str, inside: str) -> None:
    """Git separates its answers by newlines, and does not quote them in paths."""
    files = {".gitignore": "*.o\n", f"{inside}/b.txt".lstrip("/"): "b\n"}
    top = repository(tmp_path / folder, **files)
    project = top / inside
    (project / "junk.o").write_text("ignored\n")
    found = find_repository(str(project))
    assert found is not None and found.is_own
    assert (found.top, found.folder, found.prefix) == (str(top), f"{top}/.git", f"{inside}/" if inside else "")
    assert os.path.samefile(found.objects, top / ".git/objects")
    result = await work(project, "git log --format=%s > log; git status --porcelain > status")
    made = workspace(result)
    assert (made / "b.txt").read_text() == "b\n" and not (made / "junk.o").exists()
    assert (made / "status").read_text() == "?? log\n?? status\n" and (made / "log").read_text()
    assert changes(result) == {"log": "added", "status": "added"}


@pytest.mark.parametrize("runtime", ["inherited", pytest.param("isolated", marks=needs_bubblewrap)])
async def test_a_repository_that_reads_another_s_objects_is_whole_in_a_worktree(tmp_path: Path, runtime: str) -> None:
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    repository(tmp_path / "first one")
    git(tmp_path, "clone", "-q", "--shared", "first one", "second")
    (tmp_path / "second" / "b.txt").write_text("b\n")
    git(tmp_path / "second", "add", "-A")
    git(tmp_path / "second", "commit", "-q", "-m", "next")
    git(tmp_path, "clone", "-q", "--shared", "second", "p")
    project, secret = tmp_path / "p", tmp_path / "secret"
    (secret / "pack").mkdir(parents=True)
    (secret / "key").write_text("planted")
    named = project / ".git/objects/info/alternates"
    relative = "../../../second/.git/objects"
    named.write_text(f"# theirs\n{relative}\n{secret}\n/nowhere\n\0\n" + f'"{tmp_path}/first\\040one/.git/objects"\n')
    settings = tmp_path / "settings.yaml"
    settings.write_text(f"expose_paths: ['{tmp_path}/second/.git/objects', '{tmp_path}/first one']\n")
    result = await work(
        project,
        "git fsck --full > fsck 2>&1; git log --format=%s > log; git status --porcelain > status",
        runtime=runtime,
        config=settings,
    )
    assert result.status == "done", result.error_details
    made = workspace(result)
    assert (made / "log").read_text() == "next\nfirst\n" and "missing" not in (made / "fsck").read_text()
    assert (made / "status").read_text() == "?? fsck\n?? log\n?? status\n"
    objects = [f"{tmp_path}/{name}/.git/objects" for name in ("p", "second", "first one")]
    assert (made / ".git/objects/info/alternates").read_text().splitlines() == objects


@pytest.mark.finding("X6", "X8")
async def test_a_pattern_that_git_cannot_answer_shows_no_ignored_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = repository(tmp_path / "p", **{".gitignore": ".env\n"})
    (project / ".env").write_text("hunter2")
    silent = tmp_path / "git"
    silent.write_text(f'#!/bin/sh\ncase "$*" in *check-ignore*) exec sleep 300 ;; esac\nexec {find_git()} "$@"\n')
    silent.chmod(0o755)
    monkeypatch.setattr("retinue.workspaces.git.find_git", lambda: str(silent))
    monkeypatch.setattr(ignores, "SECONDS", 0.1)
    result = await work(project, "cat .env")
    assert result.status == "failed" and "a pattern in .gitignore takes it too long" in str(result.error_details)
    assert not workspace(result).exists()


PRIVATE = "the user's private source"
LOOK = (
    "git log --all --format=%s; git cat-file --batch-all-objects --batch; cat '{project}/.env' '{project}/.git/config' "
    ".env .git/config; grep -rsh token '{project}' .; "
    "git -C '{project}' config -l; ls -a '{project}'; env; git log -1 --format=%s; git status -s; "
    "echo new > new; git add new; git -c user.name=x -c user.email=x@x commit -qm next && git diff HEAD~1 --stat"
)


async def look_around(project: Path, **options: Any) -> tuple[Result[Any], str]:
    for folder in (project.parent, project.parent.parent):
        folder.chmod(0o755)
    agents = {"main": [shell(f"({LOOK.format(project=project)}) 2>&1"), {"text": "done"}]}
    result, events = await seen(project, agents, runtime="isolated", **options)
    return result, "\n".join(body.text for body in bodies(events, ToolResult))


@needs_bubblewrap
@pytest.mark.finding("X6")
@pytest.mark.parametrize("kind", ["worktree", "shared", "scratch"])
async def test_a_sandboxed_run_sees_no_token_of_git_and_a_worktree_no_ignored_file(tmp_path: Path, kind: str) -> None:
    project = repository(tmp_path / "p", **{".gitignore": ".env\n"})
    (project / ".env").write_text("KEY=hunter2-env\n")
    git(project, "remote", "add", "origin", "https://user:hunter2-token@example.com/x.git")
    settings = (project / ".git/config").read_text()
    places = [".git/modules/sub/config", ".git/modules/a/b/modules/c/config", ".git/worktrees/w/config.worktree"]
    for place in (*places, "vendor/one/.git/config"):
        (project / place).parent.mkdir(parents=True)
        (project / place).write_text(settings)
    result, text = await look_around(project, kind=kind)
    assert result.status == "done" and "hunter2-token" not in text
    if kind == "worktree":
        assert "hunter2" not in text and "first" in text and "1 file changed, 1 insertion(+)" in text


@needs_bubblewrap
@pytest.mark.finding("X6")
async def test_a_worktree_subagent_sees_no_ignored_file_of_the_project_either(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{".gitignore": ".env\n"})
    (project / ".env").write_text("KEY=hunter2\n")
    tmp_path.chmod(0o755)
    coder = Profile("coder", "You code.", workspace="worktree", runtime="isolated")
    calls = [call("subagent_coder", task="look"), {"text": "done"}]
    look = shell(f"cat '{project}/.env' .env; ls -a '{project}' .; true")
    agents = {"main": calls, "coder": [look, {"text": "done"}]}
    _, events = await seen(project, agents, kind="shared", profiles=[coder])
    assert "a.txt" in str(events) and "hunter2" not in str(events)


@needs_bubblewrap
@pytest.mark.finding("X6")
@pytest.mark.parametrize("how", ["alternates", "gitdir", "link", "objects", "commondir"])
async def test_a_clone_cannot_show_another_repository_to_a_sandboxed_run(tmp_path: Path, how: str) -> None:
    private = repository(tmp_path / "private", **{"key.py": PRIVATE})
    project = tmp_path / "p"
    if how in ("gitdir", "link"):
        project.mkdir()
        (project / "a.txt").write_text("a")
        if how == "gitdir":
            (project / ".git").write_text(f"gitdir: {private}/.git\n")
        else:
            (project / ".git").symlink_to(private / ".git")
    else:
        repository(project)
    if how == "alternates":
        (project / ".git/objects/info/alternates").write_text(f"{private}/.git/objects\n")
    elif how == "objects":
        shutil.rmtree(project / ".git/objects")
        (project / ".git/objects").symlink_to(private / ".git/objects")
    elif how == "commondir":
        (project / ".git/commondir").write_text(f"{private}/.git\n")
    result, text = await look_around(project, kind="worktree")
    assert PRIVATE not in text and PRIVATE not in str(result)
    assert result.status == "failed" and "git here reads objects of another repository" in str(result.error_details)
    assert f"`expose_paths: [{private}/.git/objects]`" in str(result.error_details)


@needs_bubblewrap
@pytest.mark.finding("X6")
@pytest.mark.parametrize("how", ["linked", "submodule", "subfolder"])
async def test_worktrees_and_submodules_of_the_user_need_no_question(tmp_path: Path, how: str) -> None:
    main = repository(tmp_path / "main", **{"sub/b.txt": "b\n"})
    project = {"linked": tmp_path / "linked", "submodule": main / "lib", "subfolder": main / "sub"}[how]
    if how == "linked":
        git(main, "worktree", "add", "-q", "--detach", str(project))
    elif how == "submodule":
        repository(tmp_path / "lib")
        git(main, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(tmp_path / "lib"), "lib")
    result, text = await look_around(project, kind="worktree")
    assert result.status == "done", result.error_details
    assert "1 file changed, 1 insertion(+)" in text


async def test_a_copy_has_what_git_ignores_too_but_no_git_and_nothing_of_ours(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{".gitignore": "*.o\n"})
    (project / "junk.o").write_text("ignored\n")
    result = await work(project, "echo more >> junk.o; echo 2 > other.o; echo x > seen", kind="copy")
    made = workspace(result)
    assert (made / "junk.o").read_text() == "ignored\nmore\n"
    assert not (made / ".git").exists() and not (made / ".retinue").exists()
    assert changes(result) == {"seen": "added"}
    assert (project / "junk.o").read_text() == "ignored\n"


async def test_a_copy_needs_no_repository(tmp_path: Path) -> None:
    project = tmp_path / "plain"
    (project / "inner").mkdir(parents=True)
    (project / "inner/a").write_text("1")
    repository(project / "nested")
    result = await work(project, "echo 2 > inner/a; echo 3 > nested/a.txt", kind="copy")
    assert changes(result) == {"inner/a": "modified", "nested/a.txt": "modified"}
    assert not (workspace(result) / "nested/.git").exists()


async def test_a_worktree_without_a_repository_is_refused_before_there_is_a_run(tmp_path: Path) -> None:
    project = tmp_path / "plain"
    project.mkdir()
    why = f"workspace 'worktree' needs a git repository, and {project} is in none: use copy"
    with pytest.raises(ConfigError, match=re.escape(why)):
        await work(project, "true")
    coder = Profile("coder", "You code.", workspace="worktree")
    team = Team("team", "You code.", members=["scripted", "scripted"], workspace="worktree")
    agents = {
        "main": [call("subagent_coder", task="x"), call("subagent_team", task="x"), shell("git init"),
                 call("subagent_coder", task="x"), "done"],
        "coder": ["coded"],
    }  # fmt: skip
    _, events = await seen(project, agents, profiles=[coder, team], kind="shared")
    refused, also_refused, _, coded = bodies(events, ToolResult)
    assert why in refused.text and why in also_refused.text and "coded" in coded.text
    assert len(bodies(events, RunSpawned)) == 2  # the primary, and the child after `git init`


async def test_a_repository_without_commits(tmp_path: Path) -> None:
    project = tmp_path / "p"
    project.mkdir()
    git(project, "init", "-q", "-b", "trunk")
    (project / "a").write_text("1")
    result = await work(
        project, "git status --porcelain -b; git add . && git -c user.name=x -c user.email=x commit -qm x"
    )
    assert result.tool_logs[0].success
    assert (workspace(result) / ".git/HEAD").read_text() == "ref: refs/heads/trunk\n"
    assert changes(result) == {}


async def test_a_detached_head_a_tag_and_a_linked_worktree_of_the_users_own(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    git(project, "tag", "v1")
    git(project, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    linked = tmp_path / "linked"
    result = await work(linked, "git rev-parse HEAD > head; git describe --tags > tag; git symbolic-ref -q HEAD > ref")
    made = workspace(result)
    assert (made / "head").read_text() == git(project, "rev-parse", "HEAD")
    assert (made / "tag").read_text() == "v1\n" and (made / "ref").read_text() == ""


async def test_a_shallow_clone_keeps_its_end(tmp_path: Path) -> None:
    origin = repository(tmp_path / "origin")
    git(origin, "commit", "-q", "--allow-empty", "-m", "second")
    git(tmp_path, "clone", "-q", "--depth=1", f"file://{origin}", "p")
    result = await work(tmp_path / "p", "git log --format=%s > log; git fsck")
    assert (workspace(result) / "log").read_text() == "second\n"
    assert all(log.success for log in result.tool_logs)


async def test_a_project_that_is_a_folder_of_a_repository(tmp_path: Path) -> None:
    top = repository(tmp_path / "top", **{".gitignore": "*.log\n", "part/b.txt": "b\n", "other/c.txt": "c\n"})
    project = top / "part"
    (project / "x.log").write_text("ignored above\n")
    result = await work(
        project, "git status --porcelain > ../status.$$; cat ../status.$$ > s; echo 1 > y.log; echo 2 >> b.txt"
    )
    made = workspace(result)
    assert sorted(os.listdir(made)) == [".git", "b.txt", "s", "y.log"]
    assert (made / "s").read_text() in ("", "?? s\n")
    assert changes(result) == {"b.txt": "modified", "s": "added"}
    assert git(made, "log", "--format=%s").startswith("part at ")


async def test_submodules_and_nested_repositories_are_plain_files(tmp_path: Path) -> None:
    library = repository(tmp_path / "library")
    project = repository(tmp_path / "p")
    git(project, "-c", "protocol.file.allow=always", "submodule", "add", "-q", str(library), "lib")
    git(project, "commit", "-q", "-m", "with a submodule")
    repository(project / "nested")
    result = await work(project, "echo new > lib/a.txt; git status --porcelain")
    made = workspace(result)
    assert (made / "nested/a.txt").read_text() == LINES
    assert not (made / "lib/.git").exists() and not (made / "nested/.git").exists()
    assert changes(result) == {"lib/a.txt": "modified"}


async def test_names_modes_links_and_endings_come_through_as_they_are(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    names = ["-dash", "new\nline", 'quo"te', "back\\slash", "tab\t", "ümlaut", " space ", os.fsdecode(b"by\xfftes")]
    for name in names:
        (project / name).write_bytes(b"x\r\ny\n")
    (project / "Clash").write_text("1")
    (project / "clash").write_text("2")
    (project / "run.sh").write_text("#!/bin/sh\n")
    (project / "run.sh").chmod(0o755)
    (project / "lfs.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    (project / ".gitattributes").write_text("* text=auto eol=lf\n*.bin filter=lfs -text\n")
    (project / "link").symlink_to("a.txt")
    (project / "out").symlink_to("/etc/passwd")
    (project / "dangling").symlink_to("nowhere")
    (project / "big").write_bytes(os.urandom(5_000_000))
    result = await work(project, "true")
    expected = hashed(project)
    found = hashed(workspace(result))
    files = {name for name in expected if not name.startswith(".git/") and name != ".git"}
    assert {name for name in found if not name.startswith(".git/") and name != ".git"} == files
    assert {name: found[name].split()[1] for name in files} == {name: expected[name].split()[1] for name in files}
    assert os.access(workspace(result) / "run.sh", os.X_OK) and not os.access(workspace(result) / "clash", os.X_OK)
    assert os.readlink(workspace(result) / "out") == "/etc/passwd"
    assert changes(result) == {} and result.changed_count == 0


async def test_what_is_no_file_is_left_out_and_said(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    os.mkfifo(project / "fifo")
    here = os.getcwd()
    with socket.socket(socket.AF_UNIX) as listening:
        os.chdir(project)
        try:
            listening.bind("sock")
        finally:
            os.chdir(here)
        result, events = await seen(project, {"main": [shell("true"), {"text": "done"}]}, kind="copy")
    [warning] = bodies(events, Warned)
    assert warning.text == "not in the workspace: fifo (a FIFO), sock (a socket)"
    assert result.status == "done" and result.warning == warning.text


async def test_a_copy_that_would_be_too_large_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    (project / "retinue.yaml").write_text("workspace_max_mib: 1\n")
    (project / "large").write_bytes(b"x" * 2_000_000)
    result = await work(project, "true", kind="copy", config=project / "retinue.yaml")
    assert result.status == "failed"
    assert "the workspace would be larger than 1 MiB (it was full at large)" in str(result.error_details)
    assert not workspace(result).exists()


CODER = Profile("coder", "You code.", workspace="worktree")


@pytest.mark.requirement("MASS-19", "MASS-22")
async def test_a_child_of_a_child_starts_from_its_parents_state(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{".gitignore": "*.o\n"})
    inner = Profile("inner", "You code too.", workspace="worktree")
    agents = {
        "main": [call("subagent_coder", task="go"), {"text": "done"}],
        "coder": [shell("echo mine > mine.txt; echo x > a.txt; echo o > t.o; git add -A"),
                  shell("git -c user.name=x -c user.email=x commit -qm x"),
                  call("subagent_inner", task="go"), {"text": "done"}],
        "inner": [shell("cat mine.txt a.txt && echo theirs > theirs.txt; ls; git log --format=%s"), {"text": "done"}],
    }  # fmt: skip
    before = hashed(project)
    result, _ = await seen(project, agents, profiles=[CODER, inner])
    [coder] = result.children
    [child] = coder.children
    made = workspace(child)
    assert (made / "mine.txt").read_text() == "mine\n" and (made / "a.txt").read_text() == "x\n"
    assert not (made / "t.o").exists()
    assert changes(child) == {"theirs.txt": "added"}
    assert changes(coder) == {"mine.txt": "added", "a.txt": "modified"}
    assert copied(child).workspace.source == coder.workspace
    assert git(made, "log", "--format=%s") == "first\n"  # the parent's own `.git` is not asked
    assert hashed(project) == before


async def test_a_worktree_below_a_scratch_run_is_one_of_the_project(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    agents = {
        "main": [spawn({"task": "a", "subagent_id": "lead"}), {"text": "done"}],
        "lead": [shell("echo note > note"), call("subagent_coder", task="go"), {"text": "done"}],
        "coder": [shell("echo 1 >> a.txt"), {"text": "done"}],
    }
    result, _ = await seen(project, agents, profiles=[CODER])
    [lead] = result.children
    [coder] = lead.children
    assert copied(coder).workspace.source == str(project)
    assert changes(coder) == {"a.txt": "modified"} and lead.changed_files == ()


async def test_a_search_finds_each_file_once(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    agents = {
        "main": [call("subagent_coder", task="go"), {"text": "done"}],
        "coder": [shell("rm a.txt; echo here > b.txt"), call("glob", pattern="*.txt"), call("read", path="a.txt"),
                  call("read", path=f"{project}/a.txt"), {"text": "done"}],
    }  # fmt: skip
    _, events = await seen(project, agents, profiles=[CODER])
    results = [body.text for body in bodies(events, ToolResult, run=1)]
    assert results[1] == "b.txt"
    assert "No such file" in results[2]
    assert results[3] == LINES


SETUP = 'workspace_setup: "echo ready > ready.o && echo prepared; test ! -e a.fail"\n'


async def test_the_setup_command_runs_in_each_copy_before_its_run(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{".gitignore": "*.o\n", "retinue.yaml": SETUP})
    result, events = await seen(
        project, {"main": [shell("cat ready.o"), {"text": "done"}]}, kind="worktree", config=project / "retinue.yaml"
    )
    [setup, cat] = bodies(events, ToolCall)
    assert (setup.name, setup.host, setup.timeout_seconds) == ("workspace_setup", True, 600)
    assert [body.text for body in bodies(events, ToolResult)] == ["prepared\n", "ready\n"]
    assert cat.name == "shell" and result.tool_count == 1 and changes(result) == {}
    shared, events = await seen(project, {"main": [{"text": "done"}]}, config=project / "retinue.yaml")
    assert not bodies(events, ToolCall) and shared.workspace == str(project)


async def test_a_setup_that_fails_fails_the_run(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{"a.fail": "", "retinue.yaml": SETUP})
    result, events = await seen(project, {"main": [{"text": "never"}]}, kind="copy", config=project / "retinue.yaml")
    assert result.status == "failed" and result.total_turns == 0
    assert str(result.error_details).startswith("workspace_setup failed, so the run did not begin: `echo ready")
    assert str(result.error_details).endswith(": prepared [exit code 1]")
    assert [body.success for body in bodies(events, ToolResult)] == [False]


async def test_many_copies_of_one_project_are_kept_once(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    (project / "big").write_bytes(os.urandom(2_000_000))
    agents = {
        "main": [spawn(*({"task": f"t{n}", "subagent_id": f"c{n}", "subagent_type": "coder"} for n in range(6))),
                 {"text": "done"}],
        **{f"c{n}": [shell(f"echo {n} > file{n}"), {"text": "done"}] for n in range(6)},
    }  # fmt: skip
    result, _ = await seen(project, agents, profiles=[CODER])
    assert [changes(child) for child in result.children] == [{f"file{n}": "added"} for n in range(6)]
    store = project / ".retinue/runs" / result.tree / "workspaces.git"
    size = sum(os.lstat(os.path.join(above, name)).st_size for above, _, names in os.walk(store) for name in names)
    assert size < 4 * 2_000_000
    model = scripted({"main": [{"text": "x"}]})
    async with retinue.open(project=project, mode="yes") as r:  # in memory, so all of it is gone afterwards
        kept = await r.run(Profile("main", model=model, workspace="copy"), "go")
    assert kept.status == "done" and not Path(kept.workspace).exists()


def test_a_workspace_that_is_there_is_used_and_a_half_made_one_is_made_anew(tmp_path: Path) -> None:
    """A resumed run finds either of them."""
    project = repository(tmp_path / "p")
    own = project / ".retinue/runs/t/0"
    workspace = Workspace("worktree", "t", 0, str(own), str(own / "workspace"), str(project), str(project))
    (own / "workspace/half").mkdir(parents=True)
    Workspaces().prepare(workspace, threading.Event())
    assert sorted(os.listdir(own / "workspace")) == [".git", "a.txt"]
    (own / "workspace/work").write_text("done so far")
    Workspaces().prepare(workspace, threading.Event())
    assert (own / "workspace/work").read_text() == "done so far"
    fact, changed = record_changes(workspace)
    assert (fact.count, changed) == (1, {"work"})


def test_making_one_can_be_stopped(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    own = project / ".retinue/runs/t/0"
    workspace = Workspace("copy", "t", 0, str(own), str(own / "workspace"), str(project), str(project))
    stop = threading.Event()
    stop.set()
    with pytest.raises(RetinueError, match="stopped"):
        Workspaces().prepare(workspace, stop)
    assert not (own / "workspace").exists()


def test_what_a_run_gets_when_nobody_says() -> None:
    """In a sandbox nobody works in the project itself."""
    state = StateFolder(None, project=Path("/nonexistent"))
    kinds = [
        default_workspace(state, sandboxed=sandboxed, primary=primary)
        for sandboxed in (False, True)
        for primary in (True, False)
    ]
    assert kinds == ["shared", "scratch", "copy", "scratch"]
    state.in_repository = True
    for primary in (True, False):
        assert default_workspace(state, sandboxed=True, primary=primary) == "worktree"
    assert default_workspace(state, sandboxed=False, primary=True) == "shared"


def test_a_closed_folder_on_the_path_does_not_hide_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    monkeypatch.setenv("PATH", f"{closed}:{os.environ['PATH']}")
    find_git.cache_clear()
    assert Path(find_git()).name == "git"


# Our own folders inside the project


@pytest.mark.finding("R5")
@pytest.mark.parametrize("kind", ["copy", "worktree"])
async def test_a_state_folder_of_any_name_is_not_copied_into_its_own_workspaces(tmp_path: Path, kind: str) -> None:
    project = repository(tmp_path / "p")
    for state in ("first", "first", "second"):  # the second one has another state folder beside it
        model = scripted({"main": [shell("echo x > x"), {"text": "done"}]})
        async with retinue.open(project / state, mode="yes") as r:
            result = await (await r.spawn(Profile("main", model=model, workspace=kind), "go")).result()
        made = workspace(result)
        found = [str(path.relative_to(made)) for path in made.rglob("*") if ".git" not in path.parts]
        assert sorted(name for name in found if not name.startswith(("first", "second"))) == ["a.txt", "x"]
        assert not any("/" in name for name in found) and changes(result) == {"x": "added"}


@pytest.mark.finding("R5")
async def test_temporary_folders_inside_the_project_are_not_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project = repository(tmp_path / "p")
    (project / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(project / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    for _ in range(2):
        result = await work(project, "echo x > x", kind="copy")
        assert sorted(path.name for path in workspace(result).rglob("*")) == ["a.txt", "tmp", "x"]
    assert list((project / "tmp").iterdir()) == []


@pytest.mark.finding("R5")
def test_what_a_killed_process_left_is_removed_and_what_is_used_is_not(tmp_path: Path) -> None:
    start = "import os, sys; from retinue.files.scratch import make_scratch_folder; made = make_scratch_folder()"
    held = f"{start}; (made.__enter__() / 'file').touch(); print('ready', flush=True); sys.stdin.read()"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    living, dying = (
        subprocess.Popen([sys.executable, "-c", held], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(2)
    )
    try:
        for process in (living, dying):
            assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        dying.kill()
        dying.wait()
        for folder in tmp_path.iterdir():
            os.utime(folder, (0, 0))
        sweep_scratch_folders(tmp_path)
        assert len(list(tmp_path.iterdir())) == 1 and len(list(tmp_path.rglob("file"))) == 1
    finally:
        for process in (living, dying):
            process.kill()
            process.communicate()
    sweep_scratch_folders(tmp_path)
    assert list(tmp_path.iterdir()) == []


KILLED_WHILE_REMOVING = """
import os, signal, sys
from retinue.files.scratch import make_scratch_folder

with make_scratch_folder() as made:
    (made / "folder").mkdir()
    (made / "folder/file").touch()
    left = [int(sys.argv[1])]

    def kill(event, args):
        if event in ("os.remove", "os.rmdir"):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
"""


@pytest.mark.finding("R5")
def test_what_a_process_left_that_was_killed_while_it_removed_it_is_removed(tmp_path: Path) -> None:
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    for nth in range(1, 6):  # the file, its folder, the folder of files, the lock, the whole
        done = subprocess.run([sys.executable, "-c", KILLED_WHILE_REMOVING, str(nth)], env=env, check=False)
        assert done.returncode == -signal.SIGKILL
        [folder] = tmp_path.iterdir()
        os.utime(folder, (0, 0))
        sweep_scratch_folders(tmp_path)
        assert list(tmp_path.iterdir()) == [], nth


@needs_bubblewrap
@pytest.mark.finding("R6")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's runs are another user in their sandbox")
@pytest.mark.parametrize("kind", ["worktree", "copy", "shared"])
async def test_a_project_that_is_closed_to_others_works_or_is_said(tmp_path: Path, kind: str) -> None:
    project = repository(tmp_path / "p")
    project.chmod(0o700)
    result = await work(project, "cat a.txt", kind=kind, runtime="isolated")
    if kind == "shared":
        assert result.status == "failed" and "may not read" in str(result.error_details)
    else:
        assert result.status == "done" and result.tool_logs[0].success
