"""Keys from bytes, and the line that they edit."""

import pytest

from retinue.surfaces.printer.input_line import InputLine
from retinue.surfaces.printer.keys import Key, KeyParser, Paste


def name_keys(data: bytes) -> list[str]:
    return [key.name if isinstance(key, Key) else repr(key.text) for key in KeyParser().parse(data)]


@pytest.mark.parametrize(
    ("data", "names"),
    [
        (b"yN?", ["y", "N", "?"]),
        (b"\r\n\t\x7f\x08", ["enter", "ctrl-j", "tab", "backspace", "backspace"]),
        (b"\x01\x15", ["ctrl-a", "ctrl-u"]),
        (b"\x1b[A\x1bOB\x1b[1;5D\x1b[3~", ["up", "down", "word-left", "delete"]),
        (b"\x1b\r\x1bb", ["ctrl-j", "word-left"]),
        ("ü日".encode(), ["ü", "日"]),
        (b"\x1b[200~y\rn\x1b[201~z", ["'y\\nn'", "z"]),
        (b"\x1b[<0;1;1M\x1b[?1;2cy", ["y"]),
        (b"\x1bq", ["escape", "q"]),
        (b"\xffy", ["\ufffd", "y"]),
    ],
)
def test_bytes_become_keys(data: bytes, names: list[str]) -> None:
    assert name_keys(data) == names
    pieces = KeyParser()
    assert [key for byte in data for key in pieces.parse(bytes([byte]))] == KeyParser().parse(data)


def test_escape_alone_is_a_key_when_nothing_follows() -> None:
    parser = KeyParser()
    assert parser.parse(b"\x1b") == []
    assert parser.is_unfinished
    assert parser.flush() == [Key("escape")]
    assert not parser.is_unfinished


def test_a_paste_of_any_size_is_bounded_and_ends() -> None:
    parser = KeyParser()
    parser.parse(b"\x1b[200~")
    for _ in range(100):
        assert parser.parse(b"y" * 100_000) == []
    [paste] = parser.parse(b"\x1b[201~")
    assert isinstance(paste, Paste) and len(paste.text) <= 4 * 1024 * 1024 + 100_010
    assert parser.parse(b"n") == [Key("n", "n")]


def write_line(line: InputLine, *names: str) -> str | None:
    text = None
    for name in names:
        text = line.press_key(Key(name, name if len(name) == 1 else ""))
    return text


def test_a_line_is_edited() -> None:
    line = InputLine()
    write_line(line, *"hello world", "word-left", "X", "ctrl-a", "delete", "end", "backspace", "left", "!")
    assert (line.text, line.cursor) == ("ello Xwor!l", 10)
    write_line(line, "ctrl-w", "ctrl-k")
    assert line.text == "ello "
    write_line(line, "ctrl-u", *"one", "ctrl-j", *"two", "up", "home", "1")
    assert line.text == "1one\ntwo"
    assert write_line(line, "enter") == "1one\ntwo"
    assert line.text == ""


def test_history_keeps_the_draft() -> None:
    line = InputLine(["one", "two"])
    write_line(line, *"draft", "up", "up", "up")
    assert line.text == "one"
    write_line(line, "down", "down", "down")
    assert line.text == "draft"
    write_line(line, "enter", "up")
    assert line.text == "draft"


def test_the_rows_of_a_long_text_are_those_around_the_cursor() -> None:
    line = InputLine()
    line.press_key(Paste("\n".join(f"line {number}" for number in range(100))))
    rows, (row, column) = line.layout_lines(40)
    assert rows[-1] == "  line 99" and len(rows) == 6
    assert (row, column) == (5, 9)
    line.replace_text("日" * 30 + "\x1b[2J")
    rows, (row, column) = line.layout_lines(20)
    assert rows[0] == "> " + "日" * 8
    assert rows[-2:] == ["  " + "日" * 6 + "\\x1b[", "  2J"]
    assert max(2 + 2 * len(text.strip("> ")) for text in rows[:3]) <= 20
