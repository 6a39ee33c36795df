"""Tests of the one-line summaries of tool calls, as tables of arguments and results."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.log.summaries import describe_call, summarize_result

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"


@pytest.mark.requirement("SDK-48")
@pytest.mark.parametrize(
    ("name", "args", "about"),
    [
        ("read", {"file_path": "a.py"}, "a.py"),
        ("read", {"path": "b.py"}, "b.py"),
        ("read", {"file_path": "a.py", "path": "b.py"}, "a.py"),
        ("write", {"path": "b.py", "content": "x"}, "b.py"),
        ("edit", {"file_path": "c.py"}, "c.py"),
        ("glob", {"pattern": "**/*.rs"}, "**/*.rs"),
        ("grep", {"pattern": "fn main", "path": "src"}, "fn main"),
        ("web_search", {"query": "weather"}, "weather"),
        ("read", {}, ""),
        ("read", {"path": 7}, ""),
        ("grep", {"path": "src"}, ""),
        ("web_search", {"query": None}, ""),
        ("echo", {"path": "a.py", "pattern": "x", "command": "ls", "query": "q"}, ""),
        ("", {"path": "a.py"}, ""),
        ("read", {"path": "p" * 500}, "p" * 500),
    ],
)
def test_what_a_call_is_about(name: str, args: dict[str, Any], about: str) -> None:
    assert describe_call(name, args) == about


@pytest.mark.requirement("SDK-49")
@pytest.mark.parametrize("name", ["bash", "shell"])
@pytest.mark.parametrize(
    ("command", "about"),
    [
        ("", ""),
        ("ls", "ls"),
        ("x" * 60, "x" * 60),
        ("x" * 61, "x" * 57 + "..."),
        ("\u00e9" * 60, "\u00e9" * 60),
        ("\u00e9" * 61, "\u00e9" * 57 + "..."),
        ("\U0001f600" * 61, "\U0001f600" * 57 + "..."),
        (7, ""),
    ],
)
def test_a_command_is_cut(name: str, command: object, about: str) -> None:
    assert describe_call(name, {"command": command}) == about


@pytest.mark.requirement("SDK-50")
@pytest.mark.parametrize("name", ["read", "write", "edit", "bash", "shell", "glob", "grep", "echo"])
@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", "Error"),
        ("boom", "boom"),
        ("boom\nat line 3\n", "boom"),
        ("boom\r\nat line 3", "boom"),
        ("\nsecond", ""),
        ("e" * 50, "e" * 50),
        ("e" * 51, "e" * 47 + "..."),
        ("\u6f22" * 51 + "\nrest", "\u6f22" * 47 + "..."),
    ],
)
def test_a_failed_call_is_its_first_line(name: str, text: str, line: str) -> None:
    assert summarize_result(name, text, success=False) == line


@pytest.mark.requirement("SDK-51")
@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("read", "", "0 lines"),
        ("read", "one", "1 lines"),
        ("read", "one\ntwo\n", "2 lines"),
        ("read", "one\r\ntwo\r\n\r\n", "3 lines"),
        ("read", "form\x0cfeed\u2028and\x85others\x1care\rtext", "1 lines"),
        ("write", "wrote 7 bytes\nof it", "wrote file"),
        ("write", "", "wrote file"),
        ("edit", "anything", "edited"),
        ("glob", "a\nb\nc", "3 files"),
        ("glob", "", "0 files"),
        ("grep", "a:1\n\nb:2", "3 matches"),
    ],
)
def test_files_and_searches(name: str, text: str, line: str) -> None:
    assert summarize_result(name, text, success=True) == line


@pytest.mark.requirement("SDK-52")
@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("bash", "", "done"),
        ("bash", "ok", "ok"),
        ("bash", "ok\n", "ok"),
        ("bash", "\n", ""),
        ("bash", "a\nb", "2 lines"),
        ("bash", "x" * 50, "x" * 50),
        ("bash", "x" * 51, "x" * 47 + "..."),
        ("shell", FAMILY * 20, (FAMILY * 20)[:47] + "..."),
        ("shell", "a\n\n\n", "3 lines"),
        ("echo", "", "done"),
        ("echo", "hello", "1 lines"),
        ("echo", "a\nb\n", "2 lines"),
    ],
)
def test_shells_and_others(name: str, text: str, line: str) -> None:
    assert summarize_result(name, text, success=True) == line


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("read", "one", "1 line"), ("glob", "a", "1 file"), ("grep", "a:1:x", "1 match"), ("echo", "x", "1 line"),
        ("read", "a\nb", "2 lines"), ("grep", "", "0 matches"), ("shell", "1 lines", "1 lines"),
    ],
)  # fmt: skip
def test_a_person_reads_one_as_one(name: str, text: str, line: str) -> None:
    assert summarize_result(name, text, success=True, spoken=True) == line


@pytest.mark.requirement("SDK-49", "SDK-50", "SDK-52")
@given(st.text(st.characters(exclude_categories=("Cs",))), st.booleans())
def test_whatever_the_text_a_line_stays_short_and_whole(text: str, success: bool) -> None:
    about, line = describe_call("bash", {"command": text}), summarize_result("bash", text, success)
    assert len(about) <= 60
    assert len(line) <= 50
    assert "\n" not in line
    for short in (about, line):
        assert short.encode().decode() == short
    assert about == text or (about.endswith("...") and text.startswith(about[:-3]) and len(about) == 60)
