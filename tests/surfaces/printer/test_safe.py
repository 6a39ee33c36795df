"""Nothing that moves a cursor, hides or turns letters around ever comes out of the printer."""

import re
import sys
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.core.approvals import Approval
from retinue.core.events import ApprovalAsked, ApprovalDecided, Inbox, Message, Thinking, ToolCall, ToolResult, Warned
from retinue.log.runs import Runs
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import Level, Printer
from retinue.surfaces.printer.totals import format_summary
from tests.surfaces.printer.facts import Facts, Recorder

HOSTILE = ["\x1b[2J", "\x1b]0;title\x07", "\r", "\b", "\x9b31m", "\u202eevil", "\u2066", "\u200f", "\u061c", "\u200b"]
HOSTILE += ["\ufeff", "\ud800", "\u2028", "\U000e0041", "[bold red]", "a\tb", "line\nline", "#### main [tool call]"]
texts = st.lists(st.sampled_from(HOSTILE) | st.text(st.characters(), max_size=8), max_size=6).map("".join)
OUR_COLORS = re.compile(r"\x1b\[[0-9]+m")


def unseen(text: str) -> list[str]:
    """Return the characters that must never reach a terminal, by Unicode's own categories."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp") and c not in "\n\t"]


def test_every_unseen_character_of_unicode_is_spelled_out() -> None:
    everything = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not unseen(safe.escape_text(everything))
    assert not unseen(safe.escape_line(everything))
    assert not set(safe.escape_line(everything)) & {"\n", "\t", "\r"}


@pytest.mark.parametrize(
    ("given_text", "expected"),
    [
        ("\x1b[31m", "\\x1b[31m"),
        ("\u202eabc", "\\u202eabc"),
        ("\U000e0041", "\\U000e0041"),
        ("\ud800", "\\ud800"),
        ("a\r\nb", "a\\r\nb"),
        ("größer 価格 🦀 \t|", "größer 価格 🦀 \t|"),
    ],
)
def test_it_stays_readable(given_text: str, expected: str) -> None:
    assert safe.escape_text(given_text) == expected
    assert safe.escape_line(given_text) == expected.replace("\n", "\\n").replace("\t", "\\t")


@given(hostile=texts, level=st.sampled_from(["quiet", "normal", "verbose"]), color=st.booleans())
def test_no_hostile_text_gets_through_the_printer(hostile: str, level: Level, color: bool) -> None:
    stream, facts = Recorder(), Facts()
    printer = Printer(stream, level=level, color=color)
    who = (1, f"/main/{hostile}-1", hostile)
    args = {"command": hostile, hostile: [hostile]}
    events = [
        facts.spawn((0, "/main", "main"), "main"),
        facts.spawn(who, hostile, task=hostile),
        facts.spawn((2, "/main/x-2", hostile), hostile, queued=True),
    ]
    bodies = [Thinking(hostile), Message(hostile), Inbox(hostile), Warned(hostile), ToolCall("c", hostile, args)]
    bodies += [ApprovalAsked("a", "c", hostile, args, hostile, hostile), ApprovalDecided("a", "c", False, hostile)]
    bodies += [
        ToolCall("s", "shell", args),
        ToolResult("s", "shell", hostile, False),
        ToolResult("c", hostile, hostile),
    ]
    events += [*(facts(who, body) for body in bodies), facts.end(who, hostile, hostile)]
    for event in events:
        printer.show_event(event)
    printer.show_question(Approval("q", "t", 1, "/main/q-1", hostile, hostile, args, "c", hostile, hostile))
    printer.show_note(hostile)
    runs = Runs.of("t1", events)
    printer.show_text(format_summary(runs, color=color))
    shown = OUR_COLORS.sub("", stream.text) if color else stream.text
    assert not unseen(shown)
    assert "\x1b" not in shown
