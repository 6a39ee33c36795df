"""Copies of folders that are not trusted, and what a run changed in them on its way back."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from retinue.files.opening import file_id, open_folder
from retinue.workspaces import walk
from retinue.workspaces.delegated import AllowedRoots, DelegatedWorkspace, RefusedPath, remove_temporary_files


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    fd = open_folder(folder)
    try:
        yield fd
    finally:
        os.close(fd)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def listed(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class Both:
    """A folder of theirs and the copy of it that a run works in."""

    def __init__(self, folder: Path, files: dict[str, str], *, never: set[tuple[int, int]] | None = None) -> None:
        self.theirs = folder / "theirs"
        self.theirs.mkdir(exist_ok=True)
        for name, text in files.items():
            write(self.theirs, name, text)
        (folder / "stage").mkdir()
        self.copies = DelegatedWorkspace(folder / "stage", never=never or set(), max_bytes=1000, max_files=20)
        with opened(self.theirs) as fd:
            self.copies.copy_workspace(fd)
        self.ours = self.copies.path.rename(folder / "ours")

    def back(self) -> str:
        """Bring the changes back and return the report."""
        with opened(self.theirs) as target:
            return "; ".join(self.copies.bring_back(self.ours, target))

    def there(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.theirs)): path.read_text() if path.is_file() else "folder"
            for path in sorted(self.theirs.rglob("*"))
        }


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(tmp_path, {"a": "a", "b": "b", "d/e": "e", "d/f": "f", "g/h": "h"})


@pytest.mark.parametrize("made", [None, "empty", "other"])
def test_a_workspace_that_never_got_the_copy_brings_nothing_back(both: Both, made: str | None) -> None:
    before = both.there()
    both.ours.rename(both.copies.path)
    if made:
        both.ours.mkdir()
    if made == "other":
        write(both.ours, "a", "mine")
    assert both.back() == "nothing was brought back, as the run never had the files of its workspace"
    assert both.there() == before


def test_a_workspace_that_is_gone_brings_nothing_back(both: Both) -> None:
    before = both.there()
    shutil.rmtree(both.ours)
    assert "nothing was brought back" in both.back() and both.there() == before


def test_a_workspace_is_removed_once_its_changes_are_back(both: Both) -> None:
    write(both.ours, "a", "changed")
    assert both.back() == "" and both.there()["a"] == "changed"
    assert not both.ours.exists()


@pytest.mark.parametrize(("limits", "said"), [((10, 100), "too large"), ((1000, 3), "too many files")])
def test_a_copy_has_an_end(tmp_path: Path, limits: tuple[int, int], said: str) -> None:
    for number in range(4):
        write(tmp_path / "a", str(number), "three")
    (tmp_path / "stage").mkdir()
    copies = DelegatedWorkspace(tmp_path / "stage", never=(), max_bytes=limits[0], max_files=limits[1])
    with pytest.raises(RefusedPath, match=f"workspace .*{said}"), opened(tmp_path / "a") as fd:
        copies.copy_workspace(fd)


def test_all_copies_of_a_request_share_one_budget(tmp_path: Path) -> None:
    write(tmp_path, "a/file", "x" * 60)
    write(tmp_path, "notes", "x" * 60)
    (tmp_path / "stage").mkdir()
    copies = DelegatedWorkspace(tmp_path / "stage", never=(), max_bytes=100)
    with opened(tmp_path / "a") as fd:
        copies.copy_workspace(fd)
    fd = os.open(tmp_path / "notes", os.O_RDONLY)
    with pytest.raises(RefusedPath, match=r"context_paths\[0\] is too large"):
        copies.copy_context(fd, "0-notes", what="context_paths[0]")
    os.close(fd)


def test_a_file_of_holes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "stage").mkdir()
    with (tmp_path / "a" / "holes").open("wb") as file:
        file.truncate(1 << 36)
    copies = DelegatedWorkspace(tmp_path / "stage", never=())
    with pytest.raises(RefusedPath, match="too large"), opened(tmp_path / "a") as fd:
        copies.copy_workspace(fd)
    assert sum(path.stat().st_blocks for path in copies.path.iterdir()) == 0


def test_folders_without_end_are_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(walk, "DEEPEST", 3)
    deep = "/".join(["d"] * 6)
    both = Both(tmp_path, {f"{deep}/file": "x"})
    assert listed(both.ours) == ["d", "d/d", "d/d/d", "d/d/d/d"]
    assert "nested too deeply" in both.back() and (both.theirs / deep / "file").read_text() == "x"


def test_what_only_we_should_have_and_links_are_not_copied_at_any_depth(tmp_path: Path) -> None:
    for inside in ("theirs/.git", "theirs/sub/.git", "theirs/sub/.retinue"):
        write(tmp_path, f"{inside}/config", "x")
    (tmp_path / "theirs/sub/link").symlink_to("/etc/passwd")
    os.mkfifo(tmp_path / "theirs/fifo")
    both = Both(tmp_path, {"sub/f": "x"})
    assert listed(both.ours) == ["sub", "sub/f"]


def test_context_is_a_folder_or_a_file_that_every_user_may_read(tmp_path: Path) -> None:
    write(tmp_path, "a/sub/f", "x")
    (tmp_path / "stage").mkdir(mode=0o700)
    copies = DelegatedWorkspace(tmp_path / "stage", never=())
    before = os.umask(0o077)
    try:
        with opened(tmp_path / "a") as fd:
            folder = copies.copy_context(fd, "0-a", what="it")
        fd = os.open(tmp_path / "a/sub/f", os.O_RDONLY)
        file = copies.copy_context(fd, "1-f", what="it")
        os.close(fd)
    finally:
        os.umask(before)
    assert (folder / "sub/f").read_text() == file.read_text() == "x"
    read = (folder.parent, folder, folder / "sub", file)
    assert [path.stat().st_mode & 0o777 for path in read] == [0o755, 0o755, 0o755, 0o644]


@pytest.mark.finding("X3")
@pytest.mark.parametrize("name", [".git", ".GIT", ".git.", "git~1"])
def test_the_asking_side_cannot_name_a_git_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / name / "hooks").mkdir(parents=True)
    roots = AllowedRoots([tmp_path], ours=[])
    try:
        with (
            pytest.raises(RefusedPath, match=r"is inside a \.git folder"),
            roots.open_path(f"{tmp_path}/{name}/hooks", what="workspace"),
        ):
            pass
    finally:
        roots.close()


def test_a_run_of_the_asking_side_may_name_its_own_workspace(tmp_path: Path) -> None:
    own = tmp_path / "shared" / ".retinue" / "runs" / "t1" / "2" / "workspace"
    own.mkdir(parents=True)
    roots = AllowedRoots([tmp_path / "shared"], ours=[tmp_path / "host"])
    with roots.open_path(str(own), what="workspace") as fd:
        assert os.path.samestat(os.fstat(fd), own.stat())
    with pytest.raises(RefusedPath, match="cannot be a workspace"), roots.open_path(str(own.parent), what="workspace"):
        raise AssertionError
    roots.close()


def test_what_only_others_have_changed_stays_as_they_left_it(both: Both) -> None:
    write(both.theirs, "a", "theirs")
    (both.theirs / "d" / "e").unlink()
    shutil.rmtree(both.theirs / "g")
    write(both.theirs, "new", "theirs")
    write(both.ours, "b", "ours")
    assert both.back() == ""
    assert both.there() == {"a": "theirs", "b": "ours", "d": "folder", "d/f": "f", "new": "theirs"}


def test_what_both_have_changed_is_as_the_run_left_it_and_told(both: Both) -> None:
    write(both.theirs, "a", "theirs")
    write(both.ours, "a", "ours")
    shutil.rmtree(both.theirs / "g")
    write(both.ours, "g/h", "ours")
    write(both.theirs, "new", "theirs")
    write(both.ours, "new", "ours")
    write(both.ours, "d/e", "ours")
    told = both.back()
    assert told.endswith("by somebody else meanwhile, and now as this run left them: a, g/h, new")
    assert both.there() | {"b": "b", "d/f": "f"} == both.there()
    assert [both.there()[name] for name in ("a", "d/e", "g/h", "new")] == ["ours"] * 4


def test_what_both_have_changed_alike_is_no_conflict(both: Both) -> None:
    for folder in (both.theirs, both.ours):
        write(folder, "a", "same")
    assert both.back() == "" and both.there()["a"] == "same"


def test_what_the_run_has_removed_and_others_have_changed_is_removed_and_told(both: Both) -> None:
    write(both.theirs, "a", "theirs")
    shutil.rmtree(both.ours / "d")
    (both.ours / "a").unlink()
    write(both.theirs, "d/new", "theirs")
    assert both.back() == "removed by this run, although somebody else had changed them meanwhile: a"
    assert both.there() == {"b": "b", "d": "folder", "d/new": "theirs", "g": "folder", "g/h": "h"}


def test_a_file_that_became_a_folder_and_the_other_way_round(both: Both) -> None:
    (both.ours / "a").unlink()
    write(both.ours, "a/inner", "x")
    shutil.rmtree(both.ours / "d")
    write(both.ours, "d", "x")
    (both.ours / "empty").mkdir()
    (both.ours / "b").chmod(0o755)
    assert both.back() == ""
    assert both.there() == {
        "a": "folder", "a/inner": "x", "b": "b", "d": "x", "empty": "folder", "g": "folder", "g/h": "h"
    }  # fmt: skip
    assert (both.theirs / "b").stat().st_mode & 0o777 == 0o755


def test_what_stands_in_the_way_is_left_and_told(both: Both, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (both.theirs / "new").symlink_to(tmp_path / "secret")
    write(both.ours, "new/x", "ours")
    (both.theirs / "other").mkdir()
    write(both.ours, "other", "ours")
    (both.ours / "a").unlink()
    (both.ours / "a").symlink_to("/etc/passwd")
    (both.theirs / "b").unlink()
    (both.theirs / "b").symlink_to("/etc/passwd")
    (both.ours / "b").unlink()
    told = both.back()
    assert "something else stands there or it cannot be read or written: b, new, new/x, other" in told
    assert "not brought back: a (a link)" in told
    assert list((tmp_path / "secret").iterdir()) == [] and both.there()["a"] == "a"
    assert (both.theirs / "b").is_symlink()


@pytest.mark.finding("X3")
def test_a_git_folder_does_not_come_back_under_any_name(both: Both) -> None:
    for name in (".git/config", ".GIT/config", "g/.git./hooks/post-checkout"):
        write(both.ours, name, "harm")
    for name in ("bare/HEAD", "bare/config", "bare/objects/x", "bare/refs/heads/x"):
        write(both.ours, name, "harm")
    write(both.ours, "good", "good")
    told = both.back()
    assert "as git would read its settings there: bare/HEAD, bare/config, bare/objects/x, bare/refs/heads/x" in told
    assert "harm" not in both.there().values() and both.there()["good"] == "good"
    assert not (both.theirs / "bare").exists()


@pytest.mark.parametrize("many", [True, False])
def test_when_it_is_too_much_nothing_is_done(both: Both, many: bool) -> None:
    before = both.there()
    (both.ours / "a").unlink()
    for number in range(21 if many else 2):
        write(both.ours, f"n/{number}", "x" if many else "x" * 600)
    with pytest.raises(RefusedPath, match="what the run has written"):
        both.back()
    assert both.there() == before


def test_what_is_half_written_by_us_is_never_copied_and_can_be_removed(tmp_path: Path) -> None:
    half = ".retinue-0123456789abcdef"
    both = Both(tmp_path, {"a": "a", half: "half", f"d/{half}": "half", f".git/{half}": "theirs"})
    assert listed(both.ours) == ["a", "d"]
    write(both.ours, half, "ours")
    assert both.back() == "" and both.there()[half] == "half"
    with opened(both.theirs) as fd:
        remove_temporary_files(fd)
    assert sorted(both.there()) == [".git", f".git/{half}", "a", "d"]


def test_the_outbox_itself_is_shown_to_no_run_and_written_by_none(tmp_path: Path) -> None:
    write(tmp_path, "theirs/box/response_a.json", "real")
    with opened(tmp_path / "theirs" / "box") as box:
        roots = AllowedRoots([tmp_path / "theirs"], ours=[], never=[box])
        for path in ("box", "box/inner"):
            place = f"{tmp_path}/theirs/{path}"
            with pytest.raises(RefusedPath, match="is the outbox"), roots.open_path(place, what="it"):
                raise AssertionError
        itself = AllowedRoots([tmp_path / "theirs" / "box"], ours=[], never=[box])
        for place in (f"{tmp_path}/theirs/box", f"{tmp_path}/theirs/box/response_a.json"):
            with pytest.raises(RefusedPath, match="is the outbox"), itself.open_path(place, what="it", file=True):
                raise AssertionError
        itself.close()
        both = Both(tmp_path, {"f": "f"}, never={file_id(box)})
        assert listed(both.ours) == ["f"]
        write(both.ours, "box/response_a.json", "forged")
        assert "not brought back" in both.back()
        assert both.there()["box/response_a.json"] == "real"
        roots.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_root_brings_back_belongs_to_the_owner_of_the_folder(both: Both) -> None:
    os.chown(both.theirs, 4321, 4321)
    write(both.ours, "new/file", "x")
    assert both.back() == ""
    assert [(both.theirs / path).stat().st_uid for path in ("new", "new/file")] == [4321, 4321]
