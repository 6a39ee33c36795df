"""Replacing a file in one step, and files that only their owner can read."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from retinue.core.errors import RetinueError
from retinue.files.atomic import create_folder, is_temporary_name, move_folder, open_replacement, replace_file
from retinue.files.opening import RefusedFile, open_folder
from retinue.files.private import make_private_folder, open_private_file, write_private_file
from retinue.files.trees import measure_folder, remove_tree
from tests.gates import SECONDS


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o277])
def test_a_replaced_file_has_the_mode_that_was_asked_for_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        replace_file(tmp_path / "private", b"x")
        replace_file(tmp_path / "public", b"x", mode=0o644, sync=True)
    assert (mode_of(tmp_path / "private"), mode_of(tmp_path / "public")) == (0o600, 0o644)


def test_no_mode_keeps_that_of_the_old_file_and_leaves_a_new_one_to_the_umask(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    (tmp_path / "old").chmod(0o751)
    with umask(0o027):
        replace_file(tmp_path / "old", b"new", mode=None)
        replace_file(tmp_path / "new", b"new", mode=None)
    assert (mode_of(tmp_path / "old"), mode_of(tmp_path / "new")) == (0o751, 0o640)


def test_a_second_name_keeps_the_old_content_and_a_link_is_replaced_not_followed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "second").hardlink_to(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "second")
    replace_file(tmp_path / "file", b"new")
    replace_file(tmp_path / "link", b"new")
    assert (tmp_path / "second").read_text() == "old" and not (tmp_path / "link").is_symlink()
    with pytest.raises(RefusedFile, match="folder"):
        replace_file(tmp_path, b"new", mode=None)


def test_names_are_relative_to_an_open_folder(tmp_path: Path) -> None:
    fd = open_folder(tmp_path)
    replace_file("name", b"x", dir_fd=fd, sync=True)
    os.close(fd)
    assert (tmp_path / "name").read_bytes() == b"x"


def test_an_error_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    with pytest.raises(KeyError), open_replacement(tmp_path / "file") as fd:
        os.write(fd, b"half")
        raise KeyError
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            replace_file(tmp_path / "file", b"x" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


def test_a_process_killed_between_writing_and_renaming_leaves_the_old_content(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    code = (
        "import os, signal, sys\n"
        "from retinue.files.atomic import open_replacement\n"
        "with open_replacement(sys.argv[1], before_rename=lambda: os.kill(os.getpid(), signal.SIGKILL)) as fd:\n"
        "    os.write(fd, b'new')\n"
    )
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path / "file")], check=False)
    assert died.returncode == -signal.SIGKILL
    assert (tmp_path / "file").read_text() == "old"
    assert [is_temporary_name(path.name) for path in tmp_path.iterdir() if path.name != "file"] == [True]


def test_a_reader_never_sees_a_part(tmp_path: Path) -> None:
    file = tmp_path / "file"
    replace_file(file, b"a" * 100_000)
    code = (
        "import itertools, sys\n"
        "from retinue.files.atomic import replace_file\n"
        "for letter in itertools.cycle((b'a', b'b')):\n"
        "    replace_file(sys.argv[1], letter * 100_000)\n"
    )
    writing = subprocess.Popen([sys.executable, "-c", code, str(file)])
    try:
        seen: set[bytes] = set()
        deadline = time.monotonic() + SECONDS
        while len(seen) < 2 and time.monotonic() < deadline:
            data = file.read_bytes()
            assert data in (b"a" * 100_000, b"b" * 100_000)
            seen.add(data[:1])
    finally:
        writing.kill()
        writing.wait()
    assert seen == {b"a", b"b"}
    assert file.read_bytes() in (b"a" * 100_000, b"b" * 100_000)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_private_folders_and_files_are_ours_alone_whatever_the_umask(tmp_path: Path, mask: int) -> None:
    with umask(mask):
        made = make_private_folder(tmp_path / "a/b")
        write_private_file(made / "file", b"one")
        write_private_file(made / "file", b" two", append=True)
    assert [mode_of(path) for path in (tmp_path / "a", made, made / "file")] == [0o700, 0o700, 0o600]
    assert (made / "file").read_bytes() == b"one two"
    write_private_file(made / "file", b"three")
    assert (made / "file").read_bytes() == b"three"
    with pytest.raises(FileExistsError):
        open_private_file(made / "file", exclusive=True)


@pytest.mark.finding("R6")
def test_a_folder_that_no_file_system_can_hold_is_an_error(tmp_path: Path) -> None:
    """/proc says that what is to be made there is missing."""
    with pytest.raises(RetinueError, match="cannot make /proc/retinue/a: No such file or directory"):
        make_private_folder("/proc/retinue/a")


def test_a_private_file_is_not_written_through_a_link_and_a_folder_not_made_over_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "link").symlink_to("file")
    with pytest.raises(OSError, match="Too many levels"):
        write_private_file(tmp_path / "link", b"new")
    with pytest.raises(RetinueError, match=r"cannot make .*file: File exists"):
        make_private_folder(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder").chmod(0o755)  # whatever the umask
    make_private_folder(tmp_path / "folder")
    assert (tmp_path / "file").read_text() == "old" and mode_of(tmp_path / "folder") == 0o755


def test_a_tree_is_measured_and_removed_without_following_links(tmp_path: Path) -> None:
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "away").mkdir()
    (tmp_path / "away/large").write_bytes(b"x" * 1_000_000)
    (tmp_path / "tree/deep/file").write_bytes(b"x" * 10_000)
    (tmp_path / "tree/link").symlink_to(tmp_path / "away")
    os.mkfifo(tmp_path / "tree/fifo")
    assert 10_000 <= measure_folder(tmp_path / "tree") < 100_000
    assert remove_tree(tmp_path / "tree") and (tmp_path / "away/large").exists()
    assert measure_folder(tmp_path / "tree") == 0


def test_a_folder_appears_with_all_its_content_or_not_at_all(tmp_path: Path) -> None:
    target, left = tmp_path / "folder", tmp_path / ".folder.new"
    left.mkdir()
    (left / "old").touch()  # of a process that was killed

    def fill(folder: Path) -> bool:
        assert not target.exists() and mode_of(folder) == 0o700
        (folder / "new").touch()
        return True

    def fill_half(folder: Path) -> bool:
        fill(folder)
        raise RetinueError("full")

    with umask(0o277):
        with pytest.raises(RetinueError, match="full"):
            create_folder(target, fill_half)
        create_folder(target, lambda folder: fill(folder) and False)
        assert list(tmp_path.iterdir()) == []
        create_folder(target, fill)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert [path.name for path in target.iterdir()] == ["new"]
    target.joinpath("new").unlink()
    create_folder(target, lambda folder: (folder / "newer").touch() is None)  # an empty folder may be there
    assert [path.name for path in target.iterdir()] == ["newer"]
    target.joinpath("newer").unlink()
    victim = tmp_path / "victim"
    victim.mkdir()
    left.symlink_to(victim)
    with pytest.raises(FileExistsError):  # a planted link is not followed
        create_folder(target, fill)
    assert list(victim.iterdir()) == []


def test_a_folder_is_moved_once_and_replaces_no_files(tmp_path: Path) -> None:
    start, target = tmp_path / "start", tmp_path / "run" / "workspace"
    for folder, name in ((start, "a"), (target, "b")):
        folder.mkdir(parents=True)
        (folder / name).touch()
    with pytest.raises(OSError, match="not empty"):
        move_folder(start, target)
    assert ([*start.iterdir()], [*target.iterdir()]) == ([start / "a"], [target / "b"])
    (target / "b").unlink()
    for _ in range(2):  # the second call finds the folder moved by an interrupted first one
        move_folder(start, target)
        assert [*target.iterdir()] == [target / "a"] and not start.exists()
    remove_tree(target)
    with pytest.raises(FileNotFoundError):
        move_folder(start, target)
