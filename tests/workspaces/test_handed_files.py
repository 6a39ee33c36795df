"""Tests of files copied into the workspace of a run and out of it, past links planted from the sandbox."""

from __future__ import annotations

from pathlib import Path

import pytest

from retinue.core.errors import RetinueError
from retinue.workspaces.handed_files import put_files, read_files
from retinue.workspaces.run_folders import RunFolders


@pytest.fixture
def folders(tmp_path: Path) -> RunFolders:
    return RunFolders(str(tmp_path / "0"), str(tmp_path / "0" / "workspace"), (), "scratch")


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "given" / "data.csv"
    path.parent.mkdir()
    path.write_text("given")
    return str(path)


@pytest.mark.parametrize("is_resumed", [False, True])
@pytest.mark.parametrize("target", ["secret", "nowhere"])
def test_a_planted_link_is_replaced_by_the_file_of_the_task(
    tmp_path: Path, folders: RunFolders, file: str, target: str, is_resumed: bool
) -> None:
    (tmp_path / "secret").write_text("secret")
    planted = folders.workspace / "data.csv"
    planted.symlink_to(tmp_path / target)
    put_files(folders, [file], is_resumed=is_resumed)
    assert not planted.is_symlink() and planted.read_text() == "given"
    assert (tmp_path / "secret").read_text() == "secret" and not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(("is_resumed", "left"), [(False, "given"), (True, "changed by the run")])
def test_a_resumed_run_keeps_the_file_as_it_is(folders: RunFolders, file: str, is_resumed: bool, left: str) -> None:
    (folders.workspace / "data.csv").write_text("changed by the run")
    put_files(folders, [file], is_resumed=is_resumed)
    assert (folders.workspace / "data.csv").read_text() == left


def test_files_go_into_a_project_that_is_named_by_a_link(tmp_path: Path, file: str) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "project").symlink_to("real")
    put_files(RunFolders(str(tmp_path / "0"), str(tmp_path / "project"), ()), [file], is_resumed=False)
    assert (tmp_path / "real" / "data.csv").read_text() == "given"


def test_a_file_that_cannot_be_copied_is_named(folders: RunFolders, file: str) -> None:
    (folders.workspace / "data.csv").mkdir()
    with pytest.raises(RetinueError, match=r"the file data\.csv of the task could not be copied"):
        put_files(folders, [file], is_resumed=False)


def test_a_link_is_not_read(tmp_path: Path, folders: RunFolders) -> None:
    (tmp_path / "secret").write_text("secret")
    (folders.workspace / "link").symlink_to(tmp_path / "secret")
    (folders.workspace / "plain").write_text("plain")
    handed = read_files(folders, ["plain", "link", "missing"], 100)
    assert handed.found == {"plain": b"plain"} and list(handed.refused) == ["link"]
