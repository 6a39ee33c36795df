"""Notices: one line that tells a user which agent calls which tool or subagent, and that the call is over.

The exact texts that A2A supervisors show, and the parser for agents that send nothing else. Pure. Only a whole text of
one of these forms is a notice; any other text, with an emoji or without, is somebody's words. What a model writes
between the brackets of a plan is shown to the user, and is no part of its answer.
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
    """The start or the end of a call: `agent` calls `target`, a tool or (`is_agent`) another agent. A parsed notice
    may name no agent."""

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
    """Return a name with each of its words capitalized; underscores stay. Characters that a name cannot have, such as
    those of markup or of a terminal, become `-`."""
    kept = "".join(c if c.isalnum() or c in "_-./ " else "-" for c in name[:NAME_CHARACTERS])
    return _WORD.sub(lambda word: word[0][0].upper() + word[0][1:], kept.strip())


def parse_notice(text: str) -> Notice | None:
    """Return the notice that a text is, as a whole; None for any other text."""
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
    """Return a text without what stands between the brackets of plans."""
    if PLAN_OPENS not in text:
        return text
    return "".join(piece for is_plan, piece in split_plans(text, is_plan=False) if not is_plan).strip()


def split_plans(text: str, *, is_plan: bool) -> Iterator[tuple[bool, str]]:
    """Yield a text in pieces that are part of a plan, brackets included, or not."""
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
