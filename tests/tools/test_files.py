"""read, write and edit on real files, and the cutting they share with the other tools."""

import asyncio
import os
import re
import resource
import tracemalloc
from pathlib import Path

import pytest

from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES
from retinue.tools.files import Edit, FileTool, Read, Write
from retinue.tools.search import Glob, Grep
from retinue.tools.truncate import HeadAndTail, truncate_text
from tests.tools.folders import RealFolders, make_folders, preview, use


@pytest.fixture
def folders(tmp_path: Path) -> RealFolders:
    return make_folders(tmp_path)


async def test_read_gives_the_plain_text(folders: RealFolders) -> None:
    (folders.workspace / "a.txt").write_bytes("één\r\ntwo\nthree".encode())
    (folders.workspace / "empty").touch()
    assert (await use(Read(), folders, path="a.txt")).text == "één\r\ntwo\nthree"
    assert (await use(Read(), folders, file_path="a.txt")).text == "één\r\ntwo\nthree"
    assert (await use(Read(), folders, path="empty")).text == ""


@pytest.mark.parametrize(
    ("offset", "limit", "text"),
    [(1, 1, "1\n"), (2, 2, "2\n3\n"), (4, None, "4\n5"), (5, 9, "5"), (None, 2, "1\n2\n"), (1, 5, "1\n2\n3\n4\n5")],
)
async def test_read_gives_some_lines(folders: RealFolders, offset: int | None, limit: int | None, text: str) -> None:
    (folders.workspace / "a.txt").write_text("1\n2\n3\n4\n5")
    assert (await use(Read(), folders, path="a.txt", offset=offset, limit=limit)).text == text


@pytest.mark.parametrize(("text", "lines"), [("1\n2\n", 2), ("1\n2", 2), ("", 0)])
async def test_read_past_the_end_says_how_many_lines_there_are(folders: RealFolders, text: str, lines: int) -> None:
    (folders.workspace / "a.txt").write_text(text)
    with pytest.raises(ToolError, match=rf"offset 3 is past the end of .*a.txt' \({lines} lines\)"):
        await use(Read(), folders, path="a.txt", offset=3)


async def test_read_finds_lines_beyond_the_first_chunk(folders: RealFolders) -> None:
    (folders.workspace / "a.txt").write_text("".join(f"line {number}\n" for number in range(1, 50_001)))
    outcome = await use(Read(), folders, path="a.txt", offset=40_000, limit=2)
    assert outcome.text == "line 40000\nline 40001\n"


@pytest.mark.parametrize("args", [{}, {"path": 1}, {"path": "a", "offset": 0}, {"path": "a", "limit": "3"}])
async def test_read_names_the_argument_that_is_wrong(folders: RealFolders, args: dict[str, object]) -> None:
    with pytest.raises(ToolError, match=r"^read: .*'(path|offset|limit)'"):
        await use(Read(), folders, **args)


async def test_read_refuses_binary_with_its_size(folders: RealFolders) -> None:
    (folders.workspace / "a.bin").write_bytes(b"\x7fELF\0" + bytes(100))
    (folders.workspace / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(ToolError, match=r"is binary \(105 bytes\)"):
        await use(Read(), folders, path="a.bin")
    assert (await use(Read(), folders, path="latin.txt")).text == "caf\ufffd"


async def test_read_of_a_fifo_does_not_block(folders: RealFolders) -> None:
    os.mkfifo(folders.workspace / "pipe")
    with pytest.raises(ToolError, match="is a FIFO, not a file"):
        await asyncio.wait_for(use(Read(), folders, path="pipe"), 100)


async def test_read_of_a_large_file_is_cut_and_never_held_whole(folders: RealFolders) -> None:
    path = folders.workspace / "large.txt"
    with path.open("wb") as file:
        for _ in range(100):
            file.write(b"x" * 1024 * 1024)
    tracemalloc.start()
    try:
        outcome = await use(Read(), folders, path="large.txt")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * 1024 * 1024
    assert len(outcome.text.encode()) <= INLINE_BYTES
    assert f"bytes cut; whole text in {path} ...]" in outcome.text
    assert outcome.file == str(path)


async def test_write_makes_folders_and_says_how_much(folders: RealFolders) -> None:
    outcome = await use(Write(), folders, path="a/b.txt", content="né\n")
    assert outcome.text == "wrote a/b.txt (4 bytes)"
    assert (folders.workspace / "a" / "b.txt").read_bytes() == "né\n".encode()


@pytest.mark.requirement("MASS-22")
async def test_write_and_edit_stay_in_the_workspace(folders: RealFolders, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("old")
    with pytest.raises(ToolError, match=r"^write: '../a.txt' is outside this run's workspace"):
        await use(Write(), folders, path="../a.txt", content="new")
    with pytest.raises(ToolError, match=r"^edit: '../a.txt' is outside this run's workspace"):
        await use(Edit(), folders, path="../a.txt", old_string="old", new_string="new")
    assert (tmp_path / "a.txt").read_text() == "old"


async def test_write_refuses_what_is_no_text(folders: RealFolders) -> None:
    with pytest.raises(ToolError, match="'content' has characters"):
        await use(Write(), folders, path="a.txt", content="\ud800")
    assert os.listdir(folders.workspace) == []


async def test_edit_changes_what_it_names_and_nothing_else(folders: RealFolders) -> None:
    path = folders.workspace / "a.txt"
    path.write_bytes(b"one\r\n\xff two\r\n")
    outcome = await use(Edit(), folders, path="a.txt", old_string="two", new_string="2")
    assert outcome.text == "edited a.txt"
    assert path.read_bytes() == b"one\r\n\xff 2\r\n"


async def test_edit_replaces_all_when_asked(folders: RealFolders) -> None:
    (folders.workspace / "a.txt").write_text("x y x")
    await use(Edit(), folders, path="a.txt", old_string="x", new_string="z", replace_all=True)
    assert (folders.workspace / "a.txt").read_text() == "z y z"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("b", "c", "occurs 3 times in 'a.txt'"),
        ("aa", "c", "occurs 2 times"),
        ("zz", "c", "was not found in 'a.txt'$"),
        ("b\nb", "c", r"was not found in 'a.txt'; the file's lines end in \\r\\n"),
        ("", "c", "'old_string' is empty"),
        ("b", "b", "are the same"),
    ],
)
async def test_edit_says_why_it_does_not_apply(folders: RealFolders, old: str, new: str, words: str) -> None:
    (folders.workspace / "a.txt").write_bytes(b"aaa b\r\nb\r\nb")
    args = {"path": "a.txt", "old_string": old, "new_string": new}
    with pytest.raises(ToolError, match=words) as caught:
        await use(Edit(), folders, **args)
    with pytest.raises(ToolError, match=re.escape(str(caught.value))):
        preview(Edit(), folders, **args)  # so that nobody is asked about it
    assert (folders.workspace / "a.txt").read_bytes() == b"aaa b\r\nb\r\nb"


async def test_edits_of_one_file_at_the_same_time_are_all_kept(folders: RealFolders) -> None:
    names = [f"<{number}>" for number in range(30)]
    (folders.workspace / "a.txt").write_text("\n".join(names))
    edits = [use(Edit(), folders, path="a.txt", old_string=name, new_string=f"done{name[1:-1]}") for name in names]
    await asyncio.gather(*edits)
    assert (folders.workspace / "a.txt").read_text().split() == [f"done{number}" for number in range(30)]


def test_the_preview_of_an_edit_is_a_unified_diff(folders: RealFolders) -> None:
    (folders.workspace / "a.txt").write_text("1\n2\n3\n4\n5\n6\n")
    shown = preview(Edit(), folders, path="a.txt", old_string="5", new_string="five")
    assert shown == "@@ -2,5 +2,5 @@\n 2\n 3\n 4\n-5\n+five\n 6"


def test_the_preview_of_a_write_is_a_unified_diff(folders: RealFolders) -> None:
    (folders.workspace / "a.txt").write_text("same\nold")
    shown = preview(Write(), folders, path="a.txt", content="same\nnew\x1b[2K\n")
    assert shown == "@@ -1,2 +1,2 @@\n same\n-old\n\\ No newline at end of file\n+new\\x1b[2K"
    assert preview(Write(), folders, path="b.txt", content="x\n") == "@@ -0,0 +1 @@\n+x"
    assert preview(Write(), folders, path="a.txt", content="same\nold") == "(no change)"
    assert os.listdir(folders.workspace) == ["a.txt"]


@pytest.mark.finding("X4")
def test_a_preview_is_whole(folders: RealFolders) -> None:
    lines = preview(Write(), folders, path="a.txt", content="new\n" * 1000 + "x" * 9000 + "evil").splitlines()
    assert lines[1:1001] == ["+new"] * 1000 and lines[1001] == "+" + "x" * 9000 + "evil"
    huge = preview(Write(), folders, path="a.txt", content="x\n" * 2_000_000)
    assert huge.startswith("replaces 0 lines (0 bytes) by 2000000 lines (4000000 bytes):\n+x\n")
    assert huge.endswith(" characters more; the arguments of the call have all of it]") and len(huge) < 1_000_000
    (folders.workspace / "b.txt").write_text("line\n" * 10_000 + "unique\n")
    assert preview(Edit(), folders, path="b.txt", old_string="unique", new_string="u") == (
        "-unique\n\\ No newline at end of file\n+u\n\\ No newline at end of file"
    )


def test_nobody_is_asked_about_a_call_that_cannot_work(folders: RealFolders) -> None:
    for tool in (Write(), Edit()):
        for args in ({}, {"path": 3}, {"path": "../x", "content": "c", "old_string": "a", "new_string": "b"}):
            with pytest.raises(ToolError):
                preview(tool, folders, **args)


@pytest.mark.parametrize("limit", [0, 10, 200, 201, 202, 203, 1000])
@pytest.mark.parametrize("unit", ["x", "é", "€", "𝄞", "a€𝄞"])
def test_cut_keeps_both_ends_on_whole_characters(tmp_path: Path, limit: int, unit: str) -> None:
    text = unit * 3000
    short, file = truncate_text(text, limit, spill=lambda: tmp_path / "whole.txt")
    head, _, rest = short.partition("\n[... ")
    missing, _, tail = rest.partition(" ...]\n")
    assert text.startswith(head)
    assert text.endswith(tail)
    cut_bytes = int(missing.split()[0])
    assert cut_bytes + len(head.encode()) + len(tail.encode()) == len(text.encode())
    assert limit < 200 or len(short.encode()) <= limit
    assert Path(file).read_text() == text
    assert Path(file).stat().st_mode & 0o777 == 0o600


def test_text_that_fits_is_left_alone(tmp_path: Path) -> None:
    assert truncate_text("é" * 50, 100, spill=lambda: tmp_path / "none") == ("é" * 50, "")
    assert os.listdir(tmp_path) == []


def test_broken_utf8_counts_as_what_the_model_sees(tmp_path: Path) -> None:
    ends = HeadAndTail(1000, spill=lambda: tmp_path / "whole.txt")
    for _ in range(90):
        ends.feed(b"\xff" * 10)
    text, _ = ends.close()
    assert len(text.encode()) <= 1000
    assert "bytes cut" in text


def test_a_character_split_between_two_pieces_is_one(tmp_path: Path) -> None:
    ends = HeadAndTail(spill=lambda: tmp_path / "none")
    for byte in "a€𝄞".encode():
        ends.feed(bytes([byte]))
    assert ends.close() == ("a€𝄞", "")


def test_a_spill_that_is_full_or_cannot_be_made_is_said(tmp_path: Path) -> None:
    capped = HeadAndTail(300, spill=lambda: tmp_path / "capped", cap=500)
    capped.feed(b"x" * 2000)
    assert f"only the first 500 bytes in {tmp_path / 'capped'}: the limit" in capped.close()[0]
    assert (tmp_path / "capped").stat().st_size == 500
    broken = HeadAndTail(300, spill=lambda: tmp_path / "no" / "folder")
    broken.feed(b"x" * 2000)
    assert "not kept: No such file or directory" in broken.close()[0]
    full = HeadAndTail(300, spill=lambda: tmp_path / "full")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, before[1]))  # Python ignores the signal that comes with it
    try:
        full.feed(b"x" * 2000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"only the first 700 bytes in {tmp_path / 'full'}: File too large" in full.close()[0]


@pytest.mark.finding("X4")
@pytest.mark.parametrize("tool", [Read(), Write(), Edit()], ids=lambda tool: tool.spec.name)
async def test_a_call_with_two_paths_is_refused_since_a_question_would_show_one(
    folders: RealFolders, tool: FileTool
) -> None:
    args = {"path": "evil.txt", "file_path": "a.txt", "content": "x", "old_string": "a", "new_string": "b"}
    with pytest.raises(ToolError, match="'path' and 'file_path' are the same: give only one"):
        preview(tool, folders, **args)
    with pytest.raises(ToolError, match="'path' and 'file_path' are the same: give only one"):
        await use(tool, folders, **args)


@pytest.mark.finding("X4")
def test_a_question_about_a_search_shows_where_it_looks(folders: RealFolders) -> None:
    shown = preview(Grep(), folders, pattern="KEY", path="/etc", glob="*.conf", ignore_case=True)
    assert shown == 'KEY\npath: "/etc"\nglob: "*.conf"\nignore_case: true'
    assert preview(Glob(), folders, pattern="*", path="sub\u202e") == '*\npath: "sub\\u202e"'
    assert preview(Read(), folders, path="a.txt", offset=5) == "a.txt\noffset: 5"


@pytest.mark.finding("X4")
def test_a_preview_spells_out_letters_that_are_blank(folders: RealFolders) -> None:
    shown = preview(Write(), folders, path="new.txt", content="a\u3164\U000e0041\u00adb\n")
    assert shown == "@@ -0,0 +1 @@\n+a\\u3164\\U000e0041\\xadb"


@pytest.mark.finding("X8")
def test_an_edit_that_would_fill_the_memory_is_refused(folders: RealFolders) -> None:
    (folders.workspace / "a.txt").write_text("a" * 100_000)
    args = {"path": "a.txt", "old_string": "a", "new_string": "b" * 1_000_000, "replace_all": True}
    with pytest.raises(ToolError, match="would be over 16777216 bytes"):
        preview(Edit(), folders, **args)


@pytest.mark.finding("X4")
def test_a_question_about_a_link_names_the_file_that_is_written(folders: RealFolders) -> None:
    (folders.workspace / "ci.yml").write_text("a\n")
    (folders.workspace / "README").symlink_to("ci.yml")
    note = f"over a link, to {folders.workspace}/ci.yml:\n"
    assert preview(Write(), folders, path="README", content="b\n") == f"{note}@@ -1 +1 @@\n-a\n+b"
    assert preview(Edit(), folders, path="./README", old_string="a", new_string="b") == f"{note}@@ -1 +1 @@\n-a\n+b"
    assert preview(Write(), folders, path="x/../ci.yml", content="b\n") == "@@ -1 +1 @@\n-a\n+b"
