"""Notices: one-line texts about which agent calls which tool or subagent, and when the call is over.

This module has the exact texts of A2A supervisors, and a parser for agents that send nothing else. Pure. A text is a
notice only if the whole text has one of these forms. Any other text, with or without an emoji, is an ordinary message.
The plans that a model writes in brackets are shown to the user, but are not part of the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec

STARTS, DONE, FAILED = "🔧", "✅", "❌"
PLAN_OPENS, PLAN_CLOSES = "⟦", "⟧"
NAME_CHARACTERS = 128
_NAME = rf"(?:\*\*)?(?P<target>[\w.\-/]{{1,{NAME_CHARACTERS}}})(?:\*\*)?"
_AGENT = r"(?:(?:\*\*)?(?P<agent>[\w][\w .\-]{0,63})(?:\*\*)?: )?"
_FORMS = (
    (re.compile(rf"{STARTS} {_AGENT}Calling tool: {_NAME}"), False, True),
    (re.compile(rf"(?P<mark>{DONE}|{FAILED}) {_AGENT}Tool {_NAME} (?P<how>completed|failed)"), False, False),
    (re.compile(rf"{STARTS} {_AGENT}Calling {_NAME}\.\.\."), True, True),
    (re.compile(rf"(?P<mark>{DONE}|{FAILED}) {_AGENT}{_NAME} (?P<how>completed|failed)"), True, False),
)
_WORD = re.compile(r"[^\W\d_]+")


class Notice(msgspec.Struct, frozen=True, gc=False):
    """The start or the end of a call: `agent` calls `target`, a tool or (`is_agent`) another agent. In a parsed notice
    `agent` may be empty."""

    agent: str
    target: str
    is_agent: bool = False
    is_start: bool = True
    success: bool = True

    @property
    def text(self) -> str:
        """The line that a user reads."""
        agent, target = format_name(self.agent), format_name(self.target)
        if self.is_start:
            return (
                f"{STARTS} {agent}: Calling {target}..."
                if self.is_agent
                else f"{STARTS} {agent}: Calling tool: {target}"
            )
        what = target if self.is_agent else f"Tool {target}"
        return f"{DONE} {agent}: {what} completed" if self.success else f"{FAILED} {agent}: {what} failed"


def format_name(name: str) -> str:
    """Return a name with each word capitalized; underscores stay. Characters that a name cannot have, such as those of
    markup or of terminal escapes, become `-`."""
    kept = "".join(c if c.isalnum() or c in "_-./ " else "-" for c in name[:NAME_CHARACTERS])
    return _WORD.sub(lambda word: word[0][0].upper() + word[0][1:], kept.strip())


def parse_notice(text: str) -> Notice | None:
    """Return the notice in `text`, or None if the text as a whole is not a notice."""
    line = text.strip()
    for form, is_agent, is_start in _FORMS:
        found = form.fullmatch(line)
        if found is None:
            continue
        parts = found.groupdict()
        success = parts.get("how") != "failed"
        if not is_start and (parts["mark"] == DONE) != success:
            return None
        return Notice(parts["agent"] or "", parts["target"], is_agent=is_agent, is_start=is_start, success=success)
    return None


def remove_plans(text: str) -> str:
    """Return a text without its plans and their brackets."""
    if PLAN_OPENS not in text:
        return text
    return "".join(piece for is_plan, piece in split_plans(text, is_plan=False) if not is_plan).strip()


def split_plans(text: str, *, is_plan: bool) -> Iterator[tuple[bool, str]]:
    """Yield the pieces of a text, each with a flag that says whether the piece is part of a plan, brackets included.

    `is_plan` says whether the text begins within a plan."""
    while text:
        mark = PLAN_CLOSES if is_plan else PLAN_OPENS
        at = text.find(mark)
        if at < 0:
            yield is_plan, text
            return
        end = at + len(mark) if is_plan else at
        if end:
            yield is_plan, text[:end]
        text, is_plan = text[end:], not is_plan
