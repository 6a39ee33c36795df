"""glob and grep on real folders."""

import asyncio
import os
import threading
from pathlib import Path

import pytest

from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES
from retinue.tools import search
from retinue.tools.search import Glob, Grep
from tests.tools.folders import RealFolders, make_folders, use


@pytest.fixture
def folders(tmp_path: Path) -> RealFolders:
    folders = make_folders(tmp_path)
    for name in (
        "a.py",
        "b.txt",
        ".hidden.py",
        "src/c.py",
        "src/deep/er/d.py",
        ".git/e.py",
        ".retinue/f.py",
        "src/.git/g.py",
    ):
        path = folders.workspace / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"import {path.stem}\nNeedle in {name}\n")
    return folders


@pytest.mark.parametrize(
    ("pattern", "files"),
    [
        ("*.py", [".hidden.py", "a.py"]),
        ("**/*.py", [".hidden.py", "a.py", "src/c.py", "src/deep/er/d.py"]),
        ("src/**", ["src/c.py", "src/deep/er/d.py"]),
        ("src/**/**/d.py", ["src/deep/er/d.py"]),
        ("./src/*", ["src/c.py"]),
        ("**/er/*", ["src/deep/er/d.py"]),
        ("[ab].*", ["a.py", "b.txt"]),
        ("?.txt", ["b.txt"]),
        ("none*", []),
    ],
)
async def test_glob_lists_the_files_that_fit(folders: RealFolders, pattern: str, files: list[str]) -> None:
    outcome = await use(Glob(), folders, pattern=pattern)
    assert outcome.text.splitlines() == files


async def test_glob_is_relative_to_the_folder_it_searches(folders: RealFolders) -> None:
    assert (await use(Glob(), folders, pattern="**/*.py", path="src")).text == "c.py\ndeep/er/d.py"


@pytest.mark.parametrize("pattern", ["", "/etc/*", "../*", "a/../../*"])
async def test_glob_refuses_a_pattern_that_leads_out(folders: RealFolders, pattern: str) -> None:
    with pytest.raises(ToolError, match=r"^glob: .* must be a pattern below the folder"):
        await use(Glob(), folders, pattern=pattern)


async def test_a_folder_outside_is_not_searched(folders: RealFolders, tmp_path: Path) -> None:
    outer = tmp_path / "outer"
    outer.mkdir()
    (outer / "secret.py").write_text("Needle\n")
    (folders.workspace / "out").symlink_to(outer)
    (folders.workspace / "loop").symlink_to(folders.workspace)
    (folders.workspace / "linked.py").symlink_to(outer / "secret.py")
    assert "secret" not in (await use(Glob(), folders, pattern="**")).text
    assert "loop" not in (await use(Glob(), folders, pattern="**")).text
    assert "linked" not in (await use(Grep(), folders, pattern="Needle")).text
    for tool in (Glob(), Grep()):
        with pytest.raises(ToolError, match=rf"^{tool.spec.name}: 'out' is outside this run's folders"):
            await use(tool, folders, pattern="x", path="out")


async def test_many_stars_cost_no_more_than_one(folders: RealFolders) -> None:
    deep = folders.workspace.joinpath(*["a"] * 60)
    deep.mkdir(parents=True)
    (deep / "end.txt").touch()
    pattern = "**/a/" * 20 + "none"
    assert (await asyncio.wait_for(use(Glob(), folders, pattern=pattern), 150)).text == ""


async def test_glob_stops_at_its_limit_and_says_so(folders: RealFolders) -> None:
    many = folders.workspace / "many"
    many.mkdir()
    for number in range(search.MAX_FILES + 5):
        (many / f"{number:05}").touch()
    lines = (await use(Glob(), folders, pattern="many/*")).text.splitlines()
    assert lines[:2] == ["many/00000", "many/00001"]
    assert lines[-1] == "[... more than 1000 files; narrow the pattern ...]"
    assert len(lines) == search.MAX_FILES + 1


async def test_names_that_are_no_text_stay_on_one_line(folders: RealFolders) -> None:
    (folders.workspace / "odd").mkdir()
    (folders.workspace / "odd" / "new\nline").touch()
    Path(os.fsdecode(os.fsencode(folders.workspace / "odd") + b"/\xff")).touch()
    text = (await use(Glob(), folders, pattern="odd/*")).text
    assert text.encode().decode().splitlines() == ["odd/new\ufffdline", "odd/\ufffd"]


async def test_grep_gives_path_line_and_text(folders: RealFolders) -> None:
    outcome = await use(Grep(), folders, pattern=r"^Needle in \S+$", glob="*.py")
    assert outcome.text.splitlines() == [
        ".hidden.py:2:Needle in .hidden.py",
        "a.py:2:Needle in a.py",
        "src/c.py:2:Needle in src/c.py",
        "src/deep/er/d.py:2:Needle in src/deep/er/d.py",
    ]


async def test_grep_takes_a_folder_a_file_a_glob_and_ignores_case(folders: RealFolders) -> None:
    assert (await use(Grep(), folders, pattern="needle")).text == ""
    assert (await use(Grep(), folders, pattern="needle", path="a.py", ignore_case=True)).text.startswith("a.py:2:")
    assert (await use(Grep(), folders, pattern="Needle", path="src", glob="deep/**/*.py")).text == (
        "src/deep/er/d.py:2:Needle in src/deep/er/d.py"
    )


async def test_grep_skips_what_is_binary_large_or_no_file(folders: RealFolders) -> None:
    (folders.workspace / "b.bin").write_bytes(b"Needle\0")
    (folders.workspace / "large").write_bytes(b"Needle\n" + bytes(search.GREP_BYTES))
    os.mkfifo(folders.workspace / "pipe")
    text = (await use(Grep(), folders, pattern="Needle$|b.txt")).text
    assert text == "b.txt:2:Needle in b.txt"
    with pytest.raises(ToolError, match="a FIFO"):
        await use(Grep(), folders, pattern="x", path="pipe")
    with pytest.raises(ToolError, match="No such file"):
        await use(Grep(), folders, pattern="x", path="missing")


async def test_grep_bounds_its_lines_and_matches(folders: RealFolders) -> None:
    (folders.workspace / "wide").write_text("w" * 20_000 + "END\n")
    assert (await use(Grep(), folders, pattern="w", path="wide")).text == f"wide:1:{'w' * 300} [...]"
    assert (await use(Grep(), folders, pattern="END", path="wide")).text == ""
    (folders.workspace / "many").write_text("match\r\n" * 1000)
    lines = (await use(Grep(), folders, pattern="match$", path="many")).text.splitlines()
    assert lines[-2:] == ["many:500:match", "[... more than 500 matches; narrow the search ...]"]
    (folders.workspace / "both").write_text(f"{'x' * 299}\n" * 400)
    outcome = await use(Grep(), folders, pattern="x", path="both")
    assert len(outcome.text.encode()) <= INLINE_BYTES
    assert len(Path(outcome.file).read_text().splitlines()) == 400


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{2000}"])
async def test_a_bad_regex_is_told(folders: RealFolders, pattern: str) -> None:
    with pytest.raises(ToolError, match=r"^grep: bad regex"):
        await use(Grep(), folders, pattern=pattern)


async def test_a_cancelled_search_stops(folders: RealFolders) -> None:
    for tool in (Glob(), Grep()):
        task = asyncio.create_task(use(tool, folders, pattern="x"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


def test_a_walk_stops_between_two_files(folders: RealFolders) -> None:
    stop = threading.Event()
    files = search._walk_files(folders.workspace, folders, stop, "grep")
    assert next(files) == (".hidden.py",)
    stop.set()
    assert list(files) == []


async def test_a_regex_that_would_take_forever_does_not(folders: RealFolders) -> None:
    (folders.workspace / "trap.txt").write_text("a" * 5000 + "b\n")
    outcome = await use(Grep(), folders, pattern="(a+)+$", path="trap.txt")
    assert outcome.text == ""


async def test_without_a_path_all_that_may_be_read_is_searched(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "src").mkdir(parents=True)
    (project / "src" / "a.py").write_text("needle\n")
    folders = make_folders(tmp_path, project)
    (folders.workspace / "own.py").write_text("needle too\n")
    assert (await use(Grep(), folders, pattern="needle")).text == "own.py:1:needle too\nsrc/a.py:1:needle"
    assert (await use(Glob(), folders, pattern="**/*.py")).text == "own.py\nsrc/a.py"
