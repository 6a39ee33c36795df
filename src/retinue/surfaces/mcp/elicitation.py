"""Approval questions of runs, put to the client's user. The first answer counts, wherever it is given.

A client with a handshake is asked by a request of ours. A client of 2026-07-28 is asked by the answer to its own call,
which it then makes again with what its user said. An answer counts only for exactly the question that was shown.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from retinue.core.approvals import Allow, Approval, Decision, Deny
from retinue.log.blocks import format_question_body
from retinue.surfaces.mcp.backend import ANSWERED_BY
from retinue.surfaces.mcp.progress import question_line
from retinue.surfaces.mcp.server import ELICIT
from retinue.surfaces.printer import safe

SHOWN_CHARACTERS = 4000
REASON_CHARACTERS = 1000
CHOICES: dict[str, tuple[str, Decision]] = {
    "yes": ("Yes, this once", Allow()),
    "run": ("Yes, and this tool for the rest of this subagent", Allow("run")),
    "tree": ("Yes, and this tool for all subagents of this session", Allow("tool")),
    "no": ("No", Deny("the user said no")),
}


def make_form(asked: Approval, *, modern: bool) -> dict[str, Any]:
    """Make the parameters of an elicitation. The revisions differ in how a choice is written."""
    who = f"Subagent '{safe.escape_line(asked.label or asked.agent)}' ({asked.tree}/{asked.run}) wants to run:"
    body = safe.escape_text(format_question_body(asked))
    if len(body) > SHOWN_CHARACTERS:
        more = len(body) - SHOWN_CHARACTERS
        body = f"{body[:SHOWN_CHARACTERS]}\n[... {more} more characters: retinue approvals --watch shows all ...]"
    titles = [title for title, _ in CHOICES.values()]
    choices: dict[str, Any] = {"enum": list(CHOICES), "enumNames": titles}
    if modern:
        choices = {"oneOf": [{"const": name, "title": title} for name, title in zip(CHOICES, titles, strict=True)]}
    fields = {
        "answer": {"type": "string", "title": "Allow it?", **choices},
        "reason": {"type": "string", "title": "If not, why? The subagent reads this"},
    }
    return {
        "mode": "form",
        "message": f"{who} {question_line(asked)}\n\n{body}".rstrip(),
        "requestedSchema": {"type": "object", "properties": fields, "required": ["answer"]},
    }


def read_decision(said: Any) -> Decision:
    """Read the answer of a client's user. Fails closed: only a clear yes is one."""
    if not isinstance(said, dict) or said.get("action") != "accept":
        return Deny("the user did not allow it")
    content = said.get("content")
    fields = content if isinstance(content, dict) else {}
    answer, reason = fields.get("answer"), fields.get("reason")
    choice = CHOICES.get(answer) if isinstance(answer, str) else None
    if choice is None:
        return Deny("the answer was neither yes nor no")
    if isinstance(choice[1], Deny) and isinstance(reason, str) and reason.strip():
        return Deny(reason.strip()[:REASON_CHARACTERS])
    return choice[1]


def make_input_required(pending: list[Approval], state: str) -> dict[str, Any]:
    """Make the interim result of 2026-07-28, which says what has to be asked before the call can go on."""
    requests = {asked.id: {"method": ELICIT, "params": make_form(asked, modern=True)} for asked in pending}
    return {"resultType": "input_required", "inputRequests": requests, "requestState": state}


class ClientApprover:
    """The supervisor's approver for the users of clients. It answers nothing itself: it keeps a question open for
    `seconds` at most, while somebody `attends` to its tree."""

    by = ANSWERED_BY

    def __init__(self, attends: Callable[[str], bool], seconds: float) -> None:
        self.attends, self._seconds = attends, seconds

    async def __call__(self, question: Approval) -> Decision:
        await asyncio.sleep(self._seconds)
        return Deny(f"nobody answered within {self._seconds:g} s")
