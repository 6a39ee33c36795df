"""Whole blocks in one write, levels, cuts with a mark, and a reader that goes away."""

import asyncio
import io
import os
import re
import struct
import termios
from fcntl import ioctl
from pathlib import Path

import pytest

import retinue
from retinue import Profile, tool
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Delta,
    Message,
    Thinking,
    ToolCall,
    ToolResult,
    TurnStarted,
    Warned,
)
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.colors import wants_color
from retinue.surfaces.printer.printer import COLUMNS, Level, Printer, truncate_lines
from retinue.testing import allow_all, scripted
from tests.surfaces.printer.facts import ANNA, MAIN, Facts, Recorder

LONG = "\n".join(f"line {n}" for n in range(1, 201))


def shown(level: Level, *, color: bool = False) -> Recorder:
    """A call with a long result, a question and an ending, by a child."""
    stream, facts = Recorder(), Facts()
    printer = Printer(stream, level=level, color=color)
    for event in (
        facts.spawn(MAIN, "main"),
        facts.spawn(ANNA, "first"),
        facts(ANNA, Thinking("hm")),
        facts(ANNA, ToolCall("c1", "read", {"path": "a.txt"}, tier="observe")),
        facts(ANNA, ToolResult("c1", "read", LONG)),
        facts(ANNA, ToolCall("c2", "edit", {"path": "a.txt"})),
        facts(ANNA, ApprovalAsked("a1", "c2", "edit", {"path": "a.txt"}, "first", "-old\n+new")),
        facts(ANNA, ApprovalDecided("a1", "c2", False, "no")),
        facts(ANNA, ToolResult("c2", "edit", "The user denied this call: no", success=False)),
        facts(ANNA, Message("SECRET FINAL", final=True)),
        facts.end(ANNA),
    ):
        printer.show_event(event)
    return stream


@pytest.mark.requirement("CPE-17")
def test_levels() -> None:
    normal, verbose, quiet = shown("normal").text, shown("verbose").text, shown("quiet").text
    assert "line 40\n[... 160 more lines, 1381 bytes; --verbose shows all]\n" in normal
    assert "line 41" not in normal
    assert LONG in verbose
    assert "[..." not in verbose
    assert quiet.splitlines() == [
        "anna read(a.txt) -> 200 lines",
        "",
        "◐ [first] edit(a.txt)",
        "│ -old",
        "│ +new",
        "",
        "✗ denied [first] edit(a.txt): no",
        "anna edit(a.txt) -> The user denied this call: no",
        "● anna [first] done (0 turns, 2 tools, 0 tokens, 0.4s)",
    ]
    for text in (normal, verbose, quiet):
        assert "SECRET FINAL" not in text


@pytest.mark.requirement("CPE-44")
def test_every_write_is_one_whole_block() -> None:
    for write in shown("normal").writes:
        lines = write.strip("\n").split("\n")
        starts = [line for line in lines if line.startswith(("####", "○", "●", "◐", "✗"))]
        assert len(starts) == 1
        assert lines[0] == starts[0]
        assert write.endswith("\n")


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="only Linux has pipes of packets")
@pytest.mark.requirement("CPE-44")
def test_a_real_pipe_gets_each_block_whole() -> None:
    """A pipe of packets keeps every write of the system apart, so what is read is what was written at once."""
    reading, writing = os.pipe2(os.O_DIRECT)
    facts = Facts()
    with open(reading, "rb", buffering=0) as source:
        with open(writing, "w", encoding="utf-8") as target:
            printer = Printer(target, color=False)
            printer.show_event(facts(MAIN, ToolResult("c1", "read", LONG)))
            printer.show_event(facts(ANNA, Thinking("größer")))
        first, second = source.read(65536), source.read(65536)
    assert first.decode().startswith('#### Tool "read" result:\nline 1\n')
    assert first.decode().endswith("--verbose shows all]\n\n")
    assert second.decode() == "#### anna thought trace\ngrößer\n\n"


def test_a_reader_that_is_gone_means_silence(capfd: pytest.CaptureFixture[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    facts = Facts()
    target = os.fdopen(writing, "w", encoding="utf-8")
    printer = Printer(target, color=False)
    printer.show_event(facts(MAIN, Thinking("nobody hears this")))
    printer.show_event(facts(MAIN, Thinking("nor this")))
    target.close()
    printer.show_event(facts(MAIN, Thinking("nor this, to a closed file")))
    Printer(target, color=False).show_note("made with a closed file")
    assert capfd.readouterr() == ("", "")


async def test_a_full_pipe_that_does_not_block_gets_everything() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    text = "x" * 1_000_000
    with open(writing, "w", encoding="utf-8") as target, open(reading, "rb") as source:
        reader = asyncio.create_task(asyncio.to_thread(source.read, len(text)))
        await asyncio.to_thread(Printer(target, level="verbose", color=False).show_text, text)
        assert len(await reader) == len(text)


def test_a_terminal_that_lacks_a_character_gets_its_name() -> None:
    raw = io.BytesIO()
    printer = Printer(io.TextIOWrapper(raw, encoding="ascii", errors="backslashreplace"), color=False)
    printer.show_event(Facts()(MAIN, Warned("größer")))
    assert raw.getvalue() == b"\\u26a0 gr\\xf6\\xdfer\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("short", "short"),
        ("1\n2\n3", "1\n2\n3"),
        ("1\n2\n3\n4", "1\n2\n3\n[... 1 more line, 2 bytes; --verbose shows all]"),
        ("1\n2\n3\n4\n5", "1\n2\n3\n[... 2 more lines, 4 bytes; --verbose shows all]"),
        ("x" * 25, "x" * 20 + "\n[... 5 bytes; --verbose shows all]"),
        ("ü" * 25, "ü" * 20 + "\n[... 10 bytes; --verbose shows all]"),
        ("x" * 20 + "\nyy\nzz", "x" * 20 + "\n[... 2 more lines, 6 bytes; --verbose shows all]"),
    ],
)
def test_a_cut_says_what_is_missing(text: str, expected: str) -> None:
    assert truncate_lines(text, lines=3, size=20) == expected


def test_colors_change_nothing_but_the_colors() -> None:
    plain, painted = shown("normal").text, shown("normal", color=True).text
    assert re.sub(r"\x1b\[\d+m", "", painted) == plain
    assert "\x1b[36m[first]" in painted
    assert "\x1b[35mread\x1b[0m" in painted
    assert "│ \x1b[31m-old\x1b[0m\n│ \x1b[32m+new\x1b[0m" in painted


class Terminal(Recorder):
    def isatty(self) -> bool:
        return True


def test_when_there_is_color() -> None:
    assert wants_color(Terminal(), {"TERM": "xterm"})
    assert not wants_color(Recorder(), {"TERM": "xterm"})
    assert not wants_color(Terminal(), {"TERM": "dumb"})
    assert not wants_color(Terminal(), {"NO_COLOR": "1", "FORCE_COLOR": "1"})
    assert wants_color(Recorder(), {"FORCE_COLOR": "1"})


@pytest.mark.requirement("CPE-1", "CPE-2", "CPE-3", "CPE-6", "CPE-46", "CODEY-2")
async def test_what_a_grandchild_does_is_printed_while_it_does_it() -> None:
    started, go_on = asyncio.Event(), asyncio.Event()

    @tool(tier="observe")
    async def hold() -> str:
        """Waits until it is let go."""
        started.set()
        await go_on.wait()
        return "held"

    model = scripted(
        {
            "main": [{"tools": [{"name": "subagent_middle", "args": {"task": "go down"}}]}, {"text": "all done"}],
            "middle": [{"tools": [{"name": "subagent_leaf", "args": {"task": "hold"}}]}, {"text": "MIDDLE'S END"}],
            "leaf": [
                {"thinking": "first a look", "tools": [{"name": "glob", "args": {"pattern": "*.nothing"}}]},
                {"tools": [{"name": "hold"}]},
                {"text": "LEAF'S END"},
            ],
        }
    )
    leaf = Profile("leaf", tools=["glob", hold])
    middle = Profile("middle", tools=["glob", leaf])
    stream = Recorder()
    printer = Printer(stream, color=False)

    async with retinue.open(approver=allow_all) as r:
        run = await r.spawn(Profile("main", model=model, tools=["glob", middle]), "go")

        async def follow() -> list[str]:
            kinds = []
            async for event in run.events():
                printer.show_event(event)
                kinds.append(f"{event.agent} {event.kind}")
                if event.kind == "tool.call" and event.agent == "leaf":
                    printed.set()
                    printed_calls.append(event.seq)
            return kinds

        printed, printed_calls = asyncio.Event(), list[int]()
        following = asyncio.create_task(follow())
        await started.wait()
        while len(printed_calls) < 2:
            printed.clear()
            await printed.wait()
        assert await run.state() == "waiting_children"
        live = [line for line in stream.text.splitlines() if line.startswith("#### leaf")]
        assert live == [
            "#### leaf thought trace",
            "#### leaf [tool call]",
            '#### leaf Tool "glob" result:',
            "#### leaf [tool call]",
        ]
        go_on.set()
        await following
        assert (await run.result()).final_response == "all done"
    text = stream.text
    assert '#### leaf Tool "hold" result:\nheld\n' in text
    assert text.count("LEAF'S END") == text.count("MIDDLE'S END") == 1
    assert '#### middle Tool "subagent_leaf" result:\nLEAF\'S END\n' in text
    assert '#### Tool "subagent_middle" result:\nMIDDLE\'S END\n' in text
    assert "all done" not in text


@pytest.mark.requirement("CPE-18", "CPE-19")
@pytest.mark.parametrize("level", ["quiet", "normal", "verbose"])
async def test_a_final_answer_appears_once_as_the_parent_s_tool_result(level: Level) -> None:
    schema = {"type": "object", "properties": {"file": {"type": "string"}}, "required": ["file"]}
    child = Profile("auditor", output=schema, tools=[])
    model = scripted(
        {
            "main": [{"tools": [{"name": "subagent_auditor", "args": {"task": "audit"}}]}, {"text": "thanks"}],
            "auditor": [{"tools": [{"name": "final_answer", "args": {"file": "riskiest.py"}}]}],
        }
    )
    stream = Recorder()
    printer = Printer(stream, level=level, color=False)
    async with retinue.open(approver=allow_all) as r:
        run = await r.spawn(Profile("main", model=model, tools=[child]), "go")
        async for event in run.events():
            printer.show_event(event)
    assert "final_answer" not in stream.text
    assert stream.text.count("riskiest.py") == (0 if level == "quiet" else 1)
    if level != "quiet":
        assert '#### Tool "subagent_auditor" result:\n{\n  "file": "riskiest.py"\n}\n' in stream.text


def test_a_line_of_prose_is_broken_between_words() -> None:
    def wrap(line: str, width: int) -> list[str]:
        return list(safe.wrap_line(line, width, at_words=True))

    assert wrap("aaaa bbbb cccc", 9) == ["aaaa bbbb", "cccc"]
    assert wrap("aaaa bbbb", 4) == ["aaaa", "bbbb"]
    assert wrap("a verylongword and 日本語", 8) == ["a", "verylong", "word and", "日本語"]
    assert wrap("", 8) == [""]


@pytest.mark.finding("U9")
def test_a_line_of_ours_is_broken_between_words_on_a_terminal_only(tmp_path: Path) -> None:
    master, slave = os.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with os.fdopen(slave, "w") as terminal, (tmp_path / "file").open("w") as file:
        line = "retinue: no model is set: give --model"
        assert safe.fold_line(line, terminal, indent="  ") == "retinue: no model is\n  set: give --model"
        assert safe.fold_line("short enough", terminal, indent="  ") == "short enough"
        assert safe.fold_line(line, file) == line
    os.close(master)


def test_words_that_come_before_the_event_of_their_turn_stay_on_the_last_line() -> None:
    stream, facts = Recorder(), Facts()
    printer = Printer(stream, color=False)
    printer.show_event(facts.spawn(MAIN, "main"))
    printer.show_delta(Delta("t1", 0, "/main", "main", "The first ", turn=1))
    printer.show_event(facts(MAIN, TurnStarted(1)))
    printer.show_delta(Delta("t1", 0, "/main", "main", "words", turn=1, offset=10))
    assert stream.writes[-1].endswith("main: The first words")
    printer.show_event(facts(MAIN, TurnStarted(2)))
    printer.show_delta(Delta("t1", 0, "/main", "main", "Others", turn=2))
    assert stream.writes[-1].endswith("main: Others")


def test_the_text_of_a_run_keeps_to_its_line_also_in_wide_letters() -> None:
    """A line that the terminal wraps is not erased whole when the next text comes."""
    terminal = Recorder()
    Printer(terminal, color=True).show_delta(Delta("t1", 0, "/main", "main", "字" * 60 + "尾", turn=1))
    line = re.sub(r"\x1b\[[0-9;]*[mK]|\r", "", terminal.text)
    assert line.startswith("main: …字") and line.endswith("字尾")
    assert COLUMNS - 2 <= safe.measure_width(line) < COLUMNS
