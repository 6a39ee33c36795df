"""Trees of folders that are deeper than any recursion, any path and any number of open files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from retinue.files.trees import give_folder, measure_folder, remove_tree, remove_whole_tree, walk_tree

DEPTH = 3000
SIZE = 64 * 1024


@pytest.fixture
def deep(tmp_path: Path) -> Iterator[Path]:
    """3,000 folders in each other, with a file at the bottom."""
    top = tmp_path / "top"
    top.mkdir()
    fd = os.open(top, os.O_RDONLY)
    for _ in range(DEPTH):
        os.mkdir("d", dir_fd=fd)
        inner = os.open("d", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = inner
    file = os.open("file", os.O_CREAT | os.O_WRONLY, dir_fd=fd)
    os.write(file, os.urandom(SIZE))
    os.close(file)
    os.close(fd)
    yield top
    remove_tree(top)


@pytest.mark.finding("X8")
def test_a_deep_tree_is_measured_given_away_and_removed(deep: Path) -> None:
    assert measure_folder(deep) >= SIZE
    give_folder(str(deep), -1, os.getgid())
    assert sum(visit.leaving for visit in walk_tree(deep)) == DEPTH + 1
    remove_whole_tree(deep)
    assert not deep.exists()


def test_a_walk_sees_each_folder_twice_and_follows_no_link(tmp_path: Path) -> None:
    for name in ("top/a/b", "top/c", "outside"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "outside/secret").touch()
    (tmp_path / "top/link").symlink_to(tmp_path / "outside")
    (tmp_path / "top/a/file").touch()
    visits = (visit for visit in walk_tree(tmp_path / "top") if not visit.finished)
    seen = [("/".join(visit.steps), sorted(visit.others), visit.leaving) for visit in visits]
    assert {path: others for path, others, leaving in seen if not leaving} == {
        "": ["link"], "a": ["file"], "a/b": [], "c": [],
    }  # fmt: skip
    assert sorted(path for path, _, leaving in seen if leaving) == ["", "a", "a/b", "c"] and seen[-1][0] == ""
    assert seen.index(("a/b", [], True)) < seen.index(("a", [], True))
    remove_whole_tree(tmp_path / "top")
    assert (tmp_path / "outside/secret").exists() and not (tmp_path / "top").exists()


def test_a_folder_that_is_moved_away_meanwhile_ends_the_walk(tmp_path: Path) -> None:
    (tmp_path / "top/a/b").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/kept").touch()
    with pytest.raises(OSError, match="was moved while it was looked at"):
        for visit in walk_tree(tmp_path / "top"):
            if visit.steps == ["a", "b"] and not visit.leaving:
                shutil.move(tmp_path / "top/a/b", tmp_path / "elsewhere/b")
    assert (tmp_path / "elsewhere/kept").exists()


def test_what_cannot_be_removed_is_an_error_and_the_rest_is_gone(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        remove_whole_tree(tmp_path / "nothing")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        remove_whole_tree(tmp_path / "file")
    assert not remove_tree(tmp_path / "file") and remove_tree(tmp_path / "nothing")
