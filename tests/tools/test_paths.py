"""Tests of the paths that a run's tools may touch, and of a path that is swapped after the check."""

import asyncio
import os
import socket
import threading
from pathlib import Path

import pytest

from retinue.concurrency import run_in_thread
from retinue.core.errors import ToolError
from retinue.core.messages import Call
from retinue.tools.arguments import read_argument, reveal_text
from retinue.tools.paths import (
    OutsideRoots,
    find_visible_path,
    open_allowed_file,
    replace_allowed_file,
    resolve_readable,
    resolve_writable,
)
from tests.tools.folders import RealFolders, make_folders


@pytest.fixture
def folders(tmp_path: Path) -> RealFolders:
    parent = tmp_path / "parent"
    parent.mkdir()
    (parent / "notes.txt").write_text("parent")
    return make_folders(tmp_path, parent)


def read(folders: RealFolders, raw: str) -> bytes:
    with open_allowed_file(resolve_readable(folders, raw), folders.roots, tool="read") as file:
        return file.read()


def write(folders: RealFolders, raw: str, data: bytes) -> None:
    replace_allowed_file(resolve_writable(folders, raw), data, folders, tool="write")


def test_a_relative_path_is_taken_from_the_workspace(folders: RealFolders) -> None:
    write(folders, "a/b/c.txt", b"deep")
    assert read(folders, "a/b/c.txt") == b"deep"
    assert read(folders, str(folders.workspace / "a" / "x" / ".." / "b" / "c.txt")) == b"deep"
    assert os.listdir(folders.workspace / "a" / "b") == ["c.txt"]


@pytest.mark.requirement("MASS-19", "MASS-22")
def test_a_parents_folder_is_read_and_not_written(folders: RealFolders, tmp_path: Path) -> None:
    notes = str(tmp_path / "parent" / "notes.txt")
    assert read(folders, notes) == b"parent"
    with pytest.raises(ToolError, match=r"outside this run's workspace; it may be read, not written"):
        resolve_writable(folders, notes)


@pytest.mark.requirement("MASS-21")
def test_a_context_path_may_be_one_file_and_is_read_only(tmp_path: Path) -> None:
    given, other = tmp_path / "given.txt", tmp_path / "other.txt"
    given.write_text("context")
    other.write_text("private")
    folders = make_folders(tmp_path, given)
    assert read(folders, str(given)) == b"context"
    with pytest.raises(ToolError, match="not written"):
        resolve_writable(folders, str(given))
    with pytest.raises(ToolError, match="outside this run's folders"):
        resolve_readable(folders, str(other))


@pytest.mark.requirement("MASS-22")
@pytest.mark.parametrize("raw", ["/etc/passwd", "../secret", "a/../../secret", "out/secret", "link", "~/../../secret"])
def test_a_path_that_leads_out_is_refused(folders: RealFolders, tmp_path: Path, raw: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (folders.workspace / "out").symlink_to(tmp_path)
    (folders.workspace / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(ToolError, match=r"^read: .* is outside this run's folders$"):
        resolve_readable(folders, raw)
    with pytest.raises(ToolError, match=r"^write: .* is outside this run's workspace$"):
        resolve_writable(folders, raw)


def test_a_folder_whose_name_only_starts_like_the_workspace_is_outside(folders: RealFolders, tmp_path: Path) -> None:
    (tmp_path / "workspace-2").mkdir()
    with pytest.raises(ToolError, match="outside"):
        resolve_readable(folders, "../workspace-2")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("a\0b", "NUL"),
        ("n" * 300, "too long"),
        ("é" * 200, "too long"),
        ("d/" * 3000, "too long"),
        ("\ud800", "not a valid path"),
    ],
)
def test_a_path_that_is_none_is_refused_in_one_short_line(folders: RealFolders, raw: str, words: str) -> None:
    for check in (resolve_readable, resolve_writable, find_visible_path):
        with pytest.raises(ToolError, match=words) as caught:
            check(folders, raw)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


def test_what_is_not_a_file_is_refused_and_nothing_blocks(folders: RealFolders) -> None:
    os.mkfifo(folders.workspace / "pipe")
    (folders.workspace / "folder").mkdir()
    (folders.workspace / "null").symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        here = os.open(folders.workspace, os.O_RDONLY)
        server.bind(f"/proc/self/fd/{here}/sock")
        os.close(here)
        for name in ("pipe", "folder", "sock"):
            with pytest.raises(ToolError, match=name):
                read(folders, name)
            with pytest.raises(ToolError, match="not a file"):
                write(folders, name, b"x")
    with pytest.raises(ToolError, match="a device, not a file"):
        open_allowed_file(Path("/dev/null"), [Path("/dev")], tool="read")


def test_a_missing_file_and_a_loop_of_symlinks_say_so(folders: RealFolders) -> None:
    (folders.workspace / "loop").symlink_to("loop")
    with pytest.raises(ToolError, match="No such file"):
        read(folders, "missing.txt")
    with pytest.raises(ToolError, match="loop"):
        read(folders, "loop")


def test_a_file_swapped_for_a_symlink_after_the_check_is_not_followed(folders: RealFolders, tmp_path: Path) -> None:
    target = folders.workspace / "a.txt"
    target.write_text("mine")
    (tmp_path / "secret").write_text("secret")
    path = resolve_readable(folders, "a.txt")
    target.unlink()
    target.symlink_to(tmp_path / "secret")
    with pytest.raises(ToolError):
        open_allowed_file(path, folders.roots, tool="read")
    with pytest.raises(ToolError, match="a symlink"):
        replace_allowed_file(path, b"x", folders, tool="write")
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_folder_swapped_for_a_symlink_after_the_check_is_not_followed(folders: RealFolders, tmp_path: Path) -> None:
    inner, outer = folders.workspace / "d", tmp_path / "outer"
    for folder in (inner, outer):
        folder.mkdir()
        (folder / "a.txt").write_text(folder.name)
    path = resolve_writable(folders, "d/a.txt")
    inner.rename(folders.workspace / "moved")
    inner.symlink_to(outer)
    with pytest.raises(ToolError):
        open_allowed_file(path, folders.roots, tool="read")
    with pytest.raises(ToolError):
        replace_allowed_file(path, b"x", folders, tool="write")
    with pytest.raises(ToolError):
        replace_allowed_file(path.parent / "new" / "b.txt", b"x", folders, tool="write")
    assert sorted(os.listdir(outer)) == ["a.txt"]
    assert (outer / "a.txt").read_text() == "outer"


def test_a_symlink_that_stays_inside_is_followed_and_kept(folders: RealFolders) -> None:
    (folders.workspace / "real.txt").write_text("old")
    (folders.workspace / "link.txt").symlink_to("real.txt")
    write(folders, "link.txt", b"new")
    assert (folders.workspace / "link.txt").is_symlink()
    assert read(folders, "real.txt") == b"new"


def test_a_replaced_file_keeps_its_mode_and_a_hard_link_its_content(folders: RealFolders, tmp_path: Path) -> None:
    outside = tmp_path / "outside.sh"
    outside.write_text("old")
    outside.chmod(0o750)
    os.link(outside, folders.workspace / "run.sh")
    write(folders, "run.sh", b"new")
    assert outside.read_text() == "old"
    assert (folders.workspace / "run.sh").stat().st_mode & 0o7777 == 0o750
    assert os.listdir(folders.workspace) == ["run.sh"]


def test_a_write_that_fails_leaves_nothing_behind(folders: RealFolders) -> None:
    (folders.workspace / "file").write_text("x")
    for raw in (".", "file/inside.txt"):
        with pytest.raises(ToolError):
            write(folders, raw, b"y")
    assert os.listdir(folders.workspace) == ["file"]


def test_opening_leaves_no_descriptor_behind(folders: RealFolders) -> None:
    write(folders, "a/b.txt", b"x")
    os.mkfifo(folders.workspace / "a" / "pipe")
    before = len(os.listdir("/proc/self/fd"))
    for raw in ("a/b.txt", "a/pipe", "a", "a/none", "none/x"):
        try:
            read(folders, raw)
            write(folders, raw, b"y")
        except ToolError:
            pass
    assert len(os.listdir("/proc/self/fd")) <= before


def test_arguments_are_taken_by_name_and_type() -> None:
    call = Call("c", "read", {"path": 3, "file_path": "x", "limit": True, "timeout": 5, "none": None, "flag": 1})
    assert read_argument(call, "nothing", str, alias="file_path") == "x"
    assert read_argument(call, "timeout", float) == 5
    assert read_argument(call, "none", int, 7) == 7
    for name, kind, words in (
        ("path", str, "read: 'path' must be a string, got int"),
        ("limit", int, "read: 'limit' must be a whole number, got bool"),
        ("flag", bool, "read: 'flag' must be true or false, got int"),
        ("absent", str, "read: missing 'absent'"),
        ("none", str, "read: missing 'none'"),
    ):
        with pytest.raises(ToolError) as caught:
            read_argument(call, name, kind)
        assert str(caught.value) == words


def test_what_hides_is_spelled_out_for_a_person() -> None:
    assert reveal_text("a\tb\nc") == "a\tb\nc"
    assert reveal_text("rm \x1b[2K\r\u202e") == "rm \\x1b[2K\\r\\u202e"


async def test_cancelled_work_is_told_to_stop_and_waited_for() -> None:
    started, ended = threading.Event(), threading.Event()

    def work(stop: threading.Event) -> None:
        started.set()
        stop.wait(30)
        ended.set()

    task = asyncio.create_task(run_in_thread(work))
    await asyncio.to_thread(started.wait, 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


def test_a_relative_path_is_found_in_the_other_roots(tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "a.txt").write_text("the parent's")
    folders = make_folders(tmp_path, project)
    assert resolve_readable(folders, "a.txt") == project / "a.txt"
    (folders.workspace / "a.txt").write_text("its own")
    assert resolve_readable(folders, "a.txt") == folders.workspace / "a.txt"
    with pytest.raises(ToolError, match="outside this run's folders"):
        resolve_readable(folders, "../project/../secret")


def test_files_outside_do_not_change_where_a_path_is_found(tmp_path: Path) -> None:
    other, notes = tmp_path / "deep" / "project", tmp_path / "deep" / "notes"
    other.mkdir(parents=True)
    notes.write_text("given")
    folders = make_folders(tmp_path, other, notes)
    assert resolve_readable(folders, "../notes") == find_visible_path(folders, "../notes") == notes
    (tmp_path / "notes").write_text("outside")
    assert resolve_readable(folders, "../notes") == find_visible_path(folders, "../notes") == notes


@pytest.mark.requirement("MASS-21")
def test_a_host_tool_finds_files_and_folders_in_the_roots(folders: RealFolders, tmp_path: Path) -> None:
    parent, home = tmp_path / "parent", folders.workspace
    (home / "src").mkdir()
    (home / "src" / "a.py").write_text("x")
    (tmp_path / "again").symlink_to(tmp_path)
    known = RealFolders(tmp_path / "again" / "workspace", (parent / "notes.txt",), folders.spills)
    for raw in ("src/a.py", "src/x/../a.py", str(home / "src" / "a.py"), f"{tmp_path}/again/workspace/src/a.py"):
        assert find_visible_path(known, raw) == home / "src" / "a.py"
    assert find_visible_path(folders, ".") == home and find_visible_path(folders, "notes.txt") == parent / "notes.txt"
    assert find_visible_path(known, str(parent / "notes.txt")) == parent / "notes.txt"
    for raw in ("nope", "src/nope/a", "src/a.py/x", str(home / "nope"), str(parent / "nope")):
        assert find_visible_path(folders, raw) is None


@pytest.mark.requirement("MASS-21", "MASS-22")
def test_a_host_tool_says_nothing_about_files_outside(folders: RealFolders, tmp_path: Path) -> None:
    """Files, folders and links outside change no answer, not even by a `..` behind them."""
    names = ("file", "folder", "folder/file", "link")
    raws = [name for each in names for name in (f"{tmp_path}/{each}", f"../{each}", f"../{each}/../workspace/../x")]
    raws += [f"{tmp_path}/link/../workspace/a.py", f"{tmp_path}/.retinue/x", str(folders.workspace / ".retinue")]

    def ask(raw: str) -> str:
        try:
            return str(find_visible_path(folders, raw))
        except OutsideRoots as error:
            return str(error)

    before = [ask(raw) for raw in raws]
    assert before.pop(-3) == ask(raws.pop(-3)) == "None"  # the missing file of the workspace
    assert all(text.endswith("outside this run's folders") for text in before)
    (tmp_path / "folder" / "deep" / "er").mkdir(parents=True)
    (tmp_path / "folder" / "deep" / "workspace").mkdir()
    (tmp_path / "link").symlink_to("folder/deep/er")
    (folders.workspace / ".retinue").mkdir()
    for name in ("file", "folder/file", "folder/deep/workspace/a.py"):
        (tmp_path / name).touch()
    assert [ask(raw) for raw in raws] == before


@pytest.mark.requirement("MASS-22")
@pytest.mark.parametrize("target", ["{}/secret", "{}/missing", "{}", "/proc/self/cwd", "real", "loop"])
def test_a_host_tool_follows_no_link(folders: RealFolders, tmp_path: Path, target: str) -> None:
    (tmp_path / "secret").write_text("secret")
    (folders.workspace / "real").mkdir()
    (folders.workspace / "loop").symlink_to(target.format(tmp_path))
    for raw in ("loop", "loop/secret", f"{folders.workspace}/loop/x"):
        with pytest.raises(ToolError, match=r"leads over a symlink: name what it points to$"):
            find_visible_path(folders, raw)


def test_our_own_state_in_a_project_is_not_readable(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / ".retinue" / "control").mkdir(parents=True)
    (project / ".retinue" / "control" / "1.json").write_text("token")
    folders = make_folders(tmp_path, project)
    for path in (".retinue/control/1.json", str(project / ".retinue" / "control" / "1.json")):
        with pytest.raises(ToolError, match="outside this run's folders"):
            resolve_readable(folders, path)


GIT_NAMES = [".git", ".GIT", ".Git", "git~1", "GIT~1", ".git ", ".git.", ".git::$INDEX", ".g\u200cit", ".ｇit"]


@pytest.mark.finding("X3")
@pytest.mark.parametrize("name", GIT_NAMES)
@pytest.mark.parametrize("place", ["{}", "{}/config", "vendor/lib/{}/hooks/pre-commit"])
def test_no_file_is_written_inside_git_in_any_spelling(folders: RealFolders, name: str, place: str) -> None:
    with pytest.raises(ToolError, match="is inside a git folder; no file tool writes there"):
        write(folders, place.format(name), b"[core]\n\tfsmonitor = harm\n")
    assert list(folders.workspace.iterdir()) == []


@pytest.mark.finding("X3")
@pytest.mark.parametrize("name", ["link/config", "link2", "meta/config", "meta/hooks/pre-commit", "tree/config"])
def test_a_git_folder_under_another_name_is_not_written(folders: RealFolders, name: str) -> None:
    """A link, the folder of `git init --separate-git-dir`, and that of a linked worktree."""
    home = folders.workspace
    for path in (".git", "meta/objects", "meta/refs", "tree"):
        (home / path).mkdir(parents=True)
    for path in (".git/config", "meta/HEAD", "tree/HEAD", "tree/commondir"):
        (home / path).write_text("as it was")
    (home / "link").symlink_to(".git")
    (home / "link2").symlink_to("meta/config")
    with pytest.raises(ToolError, match="is inside a git folder"):
        write(folders, name, b"harm")
    assert (home / ".git/config").read_text() == "as it was" and not (home / "meta/config").exists()


@pytest.mark.finding("X3")
@pytest.mark.parametrize("last", ["HEAD", "objects/x", "refs/x"])
def test_files_do_not_add_up_to_a_bare_repository(folders: RealFolders, last: str) -> None:
    """Git reads the settings of a folder that looks like a bare repository as soon as the user works in it."""
    for name in {"config", "HEAD", "objects/x", "refs/x"} - {last}:
        write(folders, f"sub/{name}", b"x")
    with pytest.raises(ToolError, match="is inside a git folder"):
        write(folders, f"sub/{last}", b"x")


def test_files_that_git_only_reads_are_written(folders: RealFolders) -> None:
    for name in (".gitignore", ".github/workflows/ci.yml", "git/HEAD", "HEAD", ".gitattributes", "a.git"):
        write(folders, name, b"x")
        assert (folders.workspace / name).read_bytes() == b"x"
