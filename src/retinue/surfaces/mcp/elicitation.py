"""Questions of runs, put to the client's user. The desk's rules hold: the first answer is taken, wherever it is given.

A client with a handshake is asked by a request of ours; one of 2026-07-28 by the answer to its own call, which it then
makes again with what its user said. What is shown is our own rendering; a client's answer counts only for exactly that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from retinue.concurrency import TaskOwner
from retinue.core.approvals import Allow as Yes
from retinue.core.approvals import Approval, Decision, Deny
from retinue.log.styled_text import question_body
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.mcp.progress import question_line
from retinue.surfaces.mcp.server import ELICIT, Session
from retinue.surfaces.printer import safe

BY = "mcp client"
SHOWN = 4000
ANSWERS: dict[str, tuple[str, Decision]] = {
    "yes": ("Yes, this once", Yes()),
    "run": ("Yes, and this tool for the rest of this subagent", Yes("run")),
    "tree": ("Yes, and this tool for all subagents of this session", Yes("tool")),
    "no": ("No", Deny("the user said no")),
}


def form(asked: Approval, *, modern: bool) -> dict[str, Any]:
    """The question as an elicitation shows it. How a choice is written changed between the revisions."""
    who = f"Subagent '{safe.escape_line(asked.label or asked.agent)}' ({asked.tree}/{asked.run}) wants to run:"
    body = safe.escape_text(question_body(asked))
    if len(body) > SHOWN:
        body = f"{body[:SHOWN]}\n[... {len(body) - SHOWN} more characters: retinue approvals --watch shows all ...]"
    titles = [title for title, _ in ANSWERS.values()]
    choices: dict[str, Any] = {"enum": list(ANSWERS), "enumNames": titles}
    if modern:
        choices = {"oneOf": [{"const": name, "title": title} for name, title in zip(ANSWERS, titles, strict=True)]}
    fields = {
        "answer": {"type": "string", "title": "Allow it?", **choices},
        "reason": {"type": "string", "title": "If not, why? The subagent reads this"},
    }
    return {
        "mode": "form",
        "message": f"{who} {question_line(asked)}\n\n{body}".rstrip(),
        "requestedSchema": {"type": "object", "properties": fields, "required": ["answer"]},
    }


def decision(said: Any) -> Decision:
    """What an answer means. Fails closed: only a clear yes is one."""
    if not isinstance(said, dict) or said.get("action") != "accept":
        return Deny("the user did not allow it")
    content = said.get("content")
    fields = content if isinstance(content, dict) else {}
    answer, reason = fields.get("answer"), fields.get("reason")
    found = ANSWERS.get(answer) if isinstance(answer, str) else None
    if found is None:
        return Deny("the answer was neither yes nor no")
    if isinstance(found[1], Deny) and isinstance(reason, str) and reason.strip():
        return Deny(reason.strip()[:1000])
    return found[1]


class Attendant:
    """Stands for the users of clients that can be asked: the supervisor's approver. It answers nothing itself, but
    keeps a question open while it can be put to somebody, for `seconds` at most."""

    by = BY

    def __init__(self, attends: Callable[[str], bool], seconds: float) -> None:
        self.attends, self._seconds = attends, seconds

    async def __call__(self, question: Approval) -> Decision:
        await asyncio.sleep(self._seconds)
        return Deny(f"nobody answered within {self._seconds:g} s")


def can_be_asked(session: Session) -> bool:
    """Whether its user can be asked now: by a request, or by the answer to a call that is open."""
    if session.client is not None:
        return session.client.can_be_asked
    return any(exchange.client.can_be_asked for exchange in session.open.values())


class Asker:
    """Asks the user of one client with a handshake, question by question, while there is a way to it."""

    def __init__(self, supervisor: Supervisor, session: Session) -> None:
        self._supervisor, self._session = supervisor, session
        self._tasks = TaskOwner()
        self._asking: dict[str, asyncio.Task[None]] = {}

    def look(self, waiting: list[Approval]) -> None:
        """Puts what waits to the user, and takes back what no longer does."""
        session = self._session
        pending = {asked.id: asked for asked in waiting}
        for name in [name for name in self._asking if name not in pending]:
            self._asking.pop(name).cancel()
        if session.client is None or not session.client.can_be_asked or session.way() is None:
            return
        for name, asked in pending.items():
            if name not in self._asking:
                self._asking[name] = self._tasks.start(self._ask(asked))

    async def _ask(self, asked: Approval) -> None:
        channel = self._session.way()
        if channel is not None:
            said = await self._session.ask(channel, form(asked, modern=False))
            self._supervisor.answer(asked.id, decision(said), by=BY, digest=asked.digest)

    def close(self) -> None:
        self._tasks.cancel()


def input_required(pending: list[Approval], state: str) -> dict[str, Any]:
    """The interim answer of 2026-07-28: what has to be asked before the call can go on."""
    requests = {asked.id: {"method": ELICIT, "params": form(asked, modern=True)} for asked in pending}
    return {"resultType": "input_required", "inputRequests": requests, "requestState": state}
