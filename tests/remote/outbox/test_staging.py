"""Copies of folders that are not trusted: how much of them, and what never."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from retinue.workspaces.copy_in import DEEPEST, Copier, Outside, Roots


def copied(source: Path, to: Path, copier: Copier) -> None:
    fd = os.open(source, os.O_RDONLY)
    try:
        copier.take(fd, to, what="workspace")
    finally:
        os.close(fd)


@pytest.mark.parametrize(
    ("copier", "said"), [(Copier(most_bytes=10), "too large"), (Copier(most_files=3), "too many files")]
)
def test_a_copy_has_an_end(tmp_path: Path, copier: Copier, said: str) -> None:
    (tmp_path / "a").mkdir()
    for number in range(4):
        (tmp_path / "a" / str(number)).write_text("three")
    with pytest.raises(Outside, match=said):
        copied(tmp_path / "a", tmp_path / "b", copier)


def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with (tmp_path / "a" / "holes").open("wb") as file:
        file.truncate(1 << 36)
    with pytest.raises(Outside, match="too large"):
        copied(tmp_path / "a", tmp_path / "b", Copier())
    assert sum(path.stat().st_blocks for path in (tmp_path / "b").iterdir()) == 0


def test_folders_without_end_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").joinpath(*["d"] * (DEEPEST + 2)).mkdir(parents=True)
    with pytest.raises(Outside, match="nested deeper"):
        copied(tmp_path / "a", tmp_path / "b", Copier())


def test_what_only_we_should_have_is_not_copied_at_any_depth(tmp_path: Path) -> None:
    for inside in ("a/.git", "a/sub/.git", "a/sub/.retinue"):
        (tmp_path / inside).mkdir(parents=True)
        (tmp_path / inside / "config").write_text("x")
    (tmp_path / "a" / "sub" / "f").write_text("x")
    copied(tmp_path / "a", tmp_path / "b", Copier())
    assert sorted(str(path.relative_to(tmp_path / "b")) for path in (tmp_path / "b").rglob("*")) == ["sub", "sub/f"]


def test_a_run_of_the_asking_side_may_name_its_own_workspace(tmp_path: Path) -> None:
    own = tmp_path / "shared" / ".retinue" / "runs" / "t1" / "2" / "workspace"
    own.mkdir(parents=True)
    roots = Roots([tmp_path / "shared"], ours=[tmp_path / "host"])
    with roots.opened(str(own), what="workspace") as fd:
        assert os.path.samestat(os.fstat(fd), own.stat())
    with pytest.raises(Outside, match="no workspace"), roots.opened(str(own.parent), what="workspace"):
        raise AssertionError
    roots.close()
