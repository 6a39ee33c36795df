"""The shared reference folder: what a run left, under its label, for its siblings to read."""

import os
from pathlib import Path

import pytest

from retinue import Profile
from retinue.core.events import ToolResult, Warned
from retinue.workspaces import recording
from retinue.workspaces.recording import publish_snapshot
from retinue.workspaces.run_folders import RunFolders
from tests.supervisor.tree.kit import bodies, call, spawn
from tests.workspaces.kit import hashed, repository, seen, shell


@pytest.mark.requirement("MASS-20")
async def test_siblings_read_what_an_ended_run_left(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    agents = {
        "main": [
            spawn({"task": "write", "subagent_id": "writer"}, {"task": "idle", "subagent_id": "idle"}),
            spawn(
                {"task": "read", "subagent_id": "reader"},
                {"task": "apart", "subagent_id": "apart", "include_temp_workspace": False},
            ),
            {"text": "done"},
        ],
        "writer": [call("write", path="notes/found.md", content="the finding"), {"text": "done"}],
        "idle": [{"text": "done"}],
        "reader": [
            call("read", path="writer/notes/found.md"),
            call("write", path="../../snapshots/writer/notes/found.md", content="forged"),
            {"text": "done"},
        ],
        "apart": [call("read", path="writer/notes/found.md"), {"text": "done"}],
    }
    result, events = await seen(project, agents)
    read, write = bodies(events, ToolResult, run=3)
    assert read.text == "the finding"
    assert not write.success and "outside this run's workspace" in write.text
    assert not bodies(events, ToolResult, run=4)[0].success
    folder = project / ".retinue/runs" / result.tree / "snapshots"
    assert os.listdir(folder) == ["writer"]
    assert (folder / "writer/notes/found.md").read_text() == "the finding"


async def test_of_a_copy_there_is_what_it_changed(tmp_path: Path) -> None:
    project = repository(tmp_path / "p", **{".gitignore": "*.o\n"})
    coder = Profile("coder", "You code.", workspace="worktree")
    agents = {
        "main": [call("subagent_coder", task="a/../b"), {"text": "done"}],
        "coder": [shell("echo 1 >> a.txt; mkdir d; echo 2 > d/new; echo 3 > x.o"), {"text": "done"}],
    }
    result, _ = await seen(project, agents, profiles=[coder])
    folder = project / ".retinue/runs" / result.tree / "snapshots"
    assert sorted(hashed(folder)) == ["a_.._b-1", "a_.._b-1/a.txt", "a_.._b-1/d", "a_.._b-1/d/new"]


async def test_siblings_whose_labels_are_no_file_names_have_a_snapshot_each(tmp_path: Path) -> None:
    project = repository(tmp_path / "p")
    both = [{"task": "write", "subagent_id": name} for name in ("修复", "测试")]
    agents = {
        "main": [spawn(*both), {"text": "done"}],
        "修复": [call("write", path="fix", content="1"), {"text": "done"}],
        "测试": [call("write", path="test", content="2"), {"text": "done"}],
    }
    result, events = await seen(project, agents)
    folder = project / ".retinue/runs" / result.tree / "snapshots"
    assert sorted(hashed(folder)) == ["__-1", "__-1/fix", "__-2", "__-2/test"]
    assert not bodies(events, Warned)


def test_nothing_is_followed_and_nothing_appears_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, outside = tmp_path / "w", tmp_path / "outside"
    workspace.mkdir()
    outside.write_text("secret")
    (workspace / "link").symlink_to(outside)
    os.link(outside, workspace / "hard")
    os.mkfifo(workspace / "fifo")
    (workspace / "file").write_text("x")
    shared = tmp_path / "snapshots"
    folders = RunFolders(str(tmp_path), str(workspace), (), snapshots=str(shared))
    assert publish_snapshot(folders, "..", 1) == ""
    assert sorted(os.listdir(shared / "run-1")) == ["file", "link"] and (shared / "run-1/link").is_symlink()
    for run in (6, 7):
        assert publish_snapshot(folders, "run", run) == ""
    assert sorted(os.listdir(shared)) == ["run", "run-1", "run-7"]
    monkeypatch.setattr(recording, "SNAPSHOT_BYTES", 10)
    (workspace / "zlarge").write_text("x" * 20)
    told = publish_snapshot(folders, "third", 8)
    assert told == "no snapshot of the workspace for other runs: it is larger than 0 MiB"
    assert sorted(os.listdir(shared)) == ["run", "run-1", "run-7"]


async def test_a_snapshot_that_cannot_be_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "SNAPSHOT_BYTES", 3)
    agents = {
        "main": [spawn({"task": "w", "subagent_id": "w"}), {"text": "done"}],
        "w": [call("write", path="f", content="long"), {"text": "done"}],
    }
    result, events = await seen(tmp_path, agents)
    assert [body.code for body in bodies(events, Warned)] == ["workspace"]
    assert result.children[0].status == "done"
