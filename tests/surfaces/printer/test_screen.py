"""The screen on a real terminal: what lasts stays, the bottom is drawn again, and the terminal is given back."""

import asyncio
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from retinue.log.blocks import Span
from retinue.surfaces.printer.colors import cut_line
from retinue.surfaces.printer.screen import wrap_spans
from retinue.surfaces.printer.terminal import Terminal, can_draw
from tests.surfaces.cli.shell import environment, until
from tests.surfaces.tmux import Tmux

PROGRAM = [sys.executable, str(Path(__file__).with_name("screen_program.py"))]
FRAME = 6000  # bytes; a terminal hands over 4096 of them while nobody reads
SHELL = ["bash", "--norc", "--noprofile", "-i"]


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[list[Tmux]]:
    opened: list[Tmux] = []
    yield opened
    for terminal in opened:
        terminal.close()


def open_program(terminals: list[Tmux], folder: Path, *, columns: int = 80, rows: int = 24) -> Tmux:
    terminal = Tmux(folder, PROGRAM, env=environment(TERM="tmux-256color"), columns=columns, rows=rows)
    terminals.append(terminal)
    terminal.read_until("the last line")
    return terminal


@pytest.mark.parametrize(("columns", "rows"), [(80, 24), (200, 50), (40, 12)])
def test_the_bottom_fits_and_lasting_lines_stay(terminals: list[Tmux], tmp_path: Path, columns: int, rows: int) -> None:
    terminal = open_program(terminals, tmp_path, columns=columns, rows=rows)
    terminal.type("300")
    terminal.press("Enter")
    screen = terminal.read_until(
        lambda screen: "lasting 299" in screen and screen.split("\n")[-1].startswith("the last line")
    ).split("\n")
    assert [line for line in screen if line.startswith(">")] == [">"]
    assert screen[-3].startswith(f"{columns}x{rows} \\x1b[31m日本") and screen[-3].endswith("…")
    assert screen[-1].startswith("the last line xxx") and screen[-1].endswith("…")
    history = terminal.history
    for number in range(300):
        assert history.count(f"lasting {number} ") == 1
    assert history.count("the last line") == 1
    terminal.type("quit")
    terminal.press("Enter")
    assert terminal.wait_for_end() == 0
    assert "the last line" not in terminal.history


def test_a_resized_terminal_keeps_one_bottom(terminals: list[Tmux], tmp_path: Path) -> None:
    terminal = open_program(terminals, tmp_path)
    terminal.type("5")
    terminal.press("Enter")
    terminal.type("being written")
    terminal.read_until("> being written")
    for columns, rows in ((40, 24), (120, 30), (33, 10), (80, 24)):
        terminal.resize(columns, rows)
        size = f"{columns}x{rows} "
        screen = terminal.read_until(lambda screen, size=size: size in screen and "the last line" in screen)
        assert screen.count("the last line") == 1, screen
        assert screen.count("> being written") == 1, screen
    assert all(terminal.history.count(f"lasting {number} ") == 1 for number in range(5))
    assert terminal.history.count("the last line") == 1


def test_stopping_gives_the_terminal_to_the_shell_and_back(terminals: list[Tmux], tmp_path: Path) -> None:
    env = environment(TERM="tmux-256color", PS1="shell> ")
    terminal = Tmux(tmp_path, SHELL, env=env)
    terminals.append(terminal)
    terminal.read_until("shell>")
    terminal.type(" ".join(PROGRAM))
    terminal.press("Enter")
    terminal.read_until("the last line")
    terminal.type("half a line")
    terminal.read_until("> half a line")
    terminal.press("C-z")
    screen = terminal.read_until("Stopped")
    assert "the last line" not in screen
    terminal.type("stty -a | grep -c -- '-icanon\\|-echo '; bg")
    terminal.press("Enter")
    terminal.read_until(lambda text: "\n0\n" in text and "bg" in text)
    terminal.type("fg")
    terminal.press("Enter")
    screen = terminal.read_until("the last line")
    assert "> half a line" in screen
    terminal.press("C-u")
    terminal.type("fail")
    terminal.press("Enter")
    screen = terminal.read_until("RuntimeError: as asked")
    assert "the last line" not in screen
    terminal.type("stty -a | grep -c -- '-icanon\\|-echo '; echo end")
    terminal.press("Enter")
    terminal.read_until("0\nend")


def test_ctrl_backslash_ends_it_and_restores_the_terminal(terminals: list[Tmux], tmp_path: Path) -> None:
    terminal = open_program(terminals, tmp_path)
    os.kill(terminal.pid, signal.SIGQUIT)
    until(lambda: terminal.exit_code is not None)
    assert "the last line" not in terminal.text


def test_pasted_text_is_one_text_and_submits_nothing(terminals: list[Tmux], tmp_path: Path) -> None:
    terminal = open_program(terminals, tmp_path)
    terminal.paste("one\ntwo\nquit\n")
    terminal.read_until("  quit\n")
    terminal.type("end")
    terminal.press("Enter")
    terminal.read_until("lasting 0 'one\\ntwo\\nquit\\nend'")
    terminal.press("Up", "Up", "Up", "Up", "Up")
    terminal.read_until("> second")
    terminal.press("Down")
    terminal.read_until("> one\n  two")


async def test_ctrl_c_loses_nothing_that_is_on_its_way_to_the_screen() -> None:
    person, program = os.openpty()
    terminal = Terminal(input_fd=program, output_fd=program)
    terminal.open()
    terminal.write("x" * FRAME)
    os.write(person, b"\x03")
    writing = asyncio.create_task(asyncio.to_thread(terminal.write, "end"))
    seen = b""
    while b"end" not in seen:
        seen += await asyncio.to_thread(os.read, person, 65536)
    await writing
    terminal.close()
    os.close(person)
    os.close(program)
    assert seen.count(b"x") == FRAME


def test_a_line_is_cut_by_its_width_and_escaped() -> None:
    assert cut_line((("label", "[日本語] "), ("plain", "abc")), 10) == [("label", "[日本語] "), ("plain", "…")]
    assert cut_line((("plain", "a\x1b[2Jb"),), 80) == [("plain", "a\\x1b[2Jb")]
    assert cut_line((("plain", "x" * 10_000_000),), 5) == [("plain", "xxxx…")]


def test_no_screen_is_drawn_where_none_can_be() -> None:
    assert not can_draw(environment={"TERM": "dumb"})
    read, write = os.pipe()
    assert not can_draw(read, write, {"TERM": "xterm"})
    os.close(read)
    os.close(write)


def test_a_lasting_line_is_broken_between_words() -> None:
    spans: list[Span] = [
        ("mark", "✓ "),
        ("label", "[fix the check]"),
        ("plain", " shell(make test)"),
        ("faint", " → OK"),
    ]
    lines = ["".join(text for _, text in line) for line in wrap_spans(spans, 24)]
    assert lines == ["✓ [fix the check]", "  shell(make test) → OK"]
    assert ["".join(text for _, text in line) for line in wrap_spans(spans, 80)] == [
        "✓ [fix the check] shell(make test) → OK"
    ]
    long = [("plain", "x" * 50 + " y\x1b")]
    assert ["".join(text for _, text in line) for line in wrap_spans(long, 20)] == ["x" * 50, "  y\\x1b"]
