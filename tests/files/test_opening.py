"""Opening below a folder: links, FIFOs and swapped folders lead nowhere."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from retinue.files.content import read_small_file, read_up_to, write_all
from retinue.files.opening import RefusedFile, file_id, open_folder, open_parent, open_regular_file
from tests.gates import SECONDS

SECRET = b"secret"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a file two folders down, beside a folder that must never be reached."""
    (tmp_path / "root/a/b").mkdir(parents=True)
    (tmp_path / "root/a/b/file").write_bytes(b"ours")
    (tmp_path / "away/b").mkdir(parents=True)
    (tmp_path / "away/b/file").write_bytes(SECRET)
    return tmp_path / "root"


def read_below(root: Path, path: str) -> bytes:
    with open_parent(root, path) as (folder, name):
        return read_small_file(name, 100, dir_fd=folder)


def test_a_file_is_opened_below_its_root(root: Path) -> None:
    assert read_below(root, "a/b/file") == b"ours"
    fd = open_folder(root)
    with open_parent(fd, ["a", "b", "file"]) as (folder, name):
        assert os.path.samestat(os.stat(name, dir_fd=folder), (root / "a/b/file").stat())
    os.close(fd)


def test_a_link_on_the_way_or_at_the_end_is_not_followed(root: Path) -> None:
    (root / "link").symlink_to(root.parent / "away")
    (root / "a/direct").symlink_to(root.parent / "away/b/file")
    with pytest.raises(NotADirectoryError):
        read_below(root, "link/b/file")
    with pytest.raises(RefusedFile) as refused:
        read_below(root, "a/direct")
    assert refused.value.reason == "link"
    with pytest.raises(OSError, match=r"Not a directory|Too many levels"):
        open_folder(root / "link")


def test_the_root_itself_is_trusted_and_may_be_a_link(root: Path, tmp_path: Path) -> None:
    (tmp_path / "other").symlink_to(root)
    assert read_below(tmp_path / "other", "a/b/file") == b"ours"


@contextmanager
def swapping(folder: Path, away: Path) -> Iterator[None]:
    """Somebody who exchanges a folder and a link to another folder all the time."""
    stop, moved = threading.Event(), folder.with_name("moved")

    def swap() -> None:
        while not stop.is_set():
            with suppress(OSError):
                folder.rename(moved)
                folder.symlink_to(away)
                folder.unlink()
                moved.rename(folder)

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_folder_that_is_swapped_for_a_link_never_leads_out(root: Path) -> None:
    seen: set[bytes | str] = set()
    with swapping(root / "a", root.parent / "away"):
        deadline = time.monotonic() + SECONDS
        while not {b"ours", "NotADirectoryError"} <= seen and time.monotonic() < deadline:
            try:
                seen.add(read_below(root, "a/b/file"))
            except OSError as error:
                seen.add(type(error).__name__)
    assert {b"ours", "NotADirectoryError"} <= seen and SECRET not in seen


def test_only_regular_files_are_opened_and_nothing_blocks(root: Path) -> None:
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(root / "socket"))
        for name, reason in (("fifo", "fifo"), ("socket", "socket"), ("a", "folder")):
            with pytest.raises(RefusedFile) as refused:
                open_regular_file(root / name)
            assert refused.value.reason == reason
    with pytest.raises(RefusedFile, match="a device"):
        open_regular_file(Path(os.devnull))
    with pytest.raises(FileNotFoundError):
        open_regular_file(root / "nothing")


def test_owner_mode_and_second_names_can_be_refused(root: Path) -> None:
    file = root / "a/b/file"
    file.chmod(0o644)
    os.close(open_regular_file(file, owners=(os.geteuid(),), forbidden_mode=0o022, one_name=True))
    with pytest.raises(RefusedFile, match="another user"):
        open_regular_file(file, owners=(os.geteuid() + 1,))
    with pytest.raises(RefusedFile, match="by others"):
        open_regular_file(file, forbidden_mode=0o077)
    (root / "second").hardlink_to(file)
    with pytest.raises(RefusedFile, match="hard link"):
        open_regular_file(file, one_name=True)


def test_a_link_is_followed_where_that_is_asked_for(root: Path) -> None:
    (root / "link").symlink_to("a/b/file")
    assert read_small_file(root / "link", 10, follow=True) == b"ours"


def test_missing_folders_are_made_only_where_that_is_asked_for(root: Path) -> None:
    with pytest.raises(FileNotFoundError), open_parent(root, "new/er/file"):
        raise AssertionError
    with open_parent(root, "new/er/file", create=True) as (folder, name):
        os.close(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=folder))
    assert (root / "new/er/file").is_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_folders_that_root_makes_belong_to_the_owner_of_the_folder_above(root: Path) -> None:
    os.chown(root, 4321, 4321)
    with open_parent(root, "new/file", create=True, inherit_owner=True):
        assert ((root / "new").stat().st_uid, (root / "new").stat().st_gid) == (4321, 4321)


def test_a_folder_that_is_never_to_be_used_is_refused_by_what_it_is(root: Path) -> None:
    fd = open_folder(root / "a")
    never = {file_id(fd)}
    os.close(fd)
    (root / "a").rename(root / "renamed")
    with pytest.raises(PermissionError), open_parent(root, "renamed/b/file", never=never):
        raise AssertionError


@pytest.mark.parametrize(("size", "limit", "fits"), [(10, 10, True), (11, 10, False), (1 << 40, 10, False)])
def test_a_small_file_has_a_limit_and_a_file_of_holes_is_not_read(
    tmp_path: Path, size: int, limit: int, *, fits: bool
) -> None:
    with (tmp_path / "file").open("wb") as file:
        file.truncate(size)
    if fits:
        assert read_small_file(tmp_path / "file", limit) == b"\0" * size
        return
    with pytest.raises(RefusedFile) as refused:
        read_small_file(tmp_path / "file", limit)
    assert refused.value.reason == "too_large"


def test_a_file_that_shows_no_size_is_still_bounded() -> None:
    """Files of /proc have size 0 and content; so has a file that grows while it is read."""
    fd = os.open("/proc/self/status", os.O_RDONLY)
    try:
        with pytest.raises(RefusedFile):
            read_up_to(fd, 10)
    finally:
        os.close(fd)


def test_all_is_written_through_a_pipe_that_takes_little_at_a_time() -> None:
    reading, writing = os.pipe()
    got = bytearray()

    def drain() -> None:
        while piece := os.read(reading, 1000):
            got.extend(piece)

    thread = threading.Thread(target=drain)
    thread.start()
    write_all(writing, b"x" * 300_000)
    os.close(writing)
    thread.join()
    os.close(reading)
    assert len(got) == 300_000
