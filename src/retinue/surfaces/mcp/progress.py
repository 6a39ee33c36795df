"""What happens in a client's tree, for calls that wait: the last of it on a line, and the questions, numbered."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from retinue.concurrency import TaskOwner
from retinue.core.approvals import Approval
from retinue.core.events import ApprovalAsked, Delta, Event, RunEnded, RunSpawned, ToolCall
from retinue.log.runs import Runs
from retinue.log.styled_text import call_spans, question_spans
from retinue.supervisor.client_run import NAME
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.mcp.registry import Words
from retinue.surfaces.printer import safe

LINE = 200


class Bell:
    """Rings when something has happened that somebody may wait for."""

    def __init__(self) -> None:
        self._waiting: list[asyncio.Future[None]] = []

    def ring(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def rung(self) -> asyncio.Future[None]:
        """Done when it rings next."""
        self._waiting = [future for future in self._waiting if not future.done()]
        future = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        return future


class News:
    """Follows one tree from its first event until it has ended, which `over` is told, or until it is closed."""

    def __init__(self, supervisor: Supervisor, tree: str, words: Words, bell: Bell, over: Callable[[], object]) -> None:
        self._supervisor, self._tree, self._words = supervisor, tree, words
        self._runs = Runs(tree)
        self._numbers: dict[str, int] = {}
        self._last: dict[int, str] = {}
        self._latest = ""
        self._bell = bell
        self._tasks = TaskOwner(on_error=lambda _: None)  # a tree that cannot be followed any more has no news
        self._tasks.start(self._follow()).add_done_callback(lambda _: over())

    async def _follow(self) -> None:
        async with aclosing(self._supervisor.watch(self._tree)) as events:
            async for event in events:
                if not isinstance(event, Delta):
                    self._take(event)
                    self._bell.ring()

    def _take(self, event: Event) -> None:
        self._runs.apply(event)
        body = event.body
        if isinstance(body, ApprovalAsked):
            self._numbers[body.approval_id] = len(self._numbers) + 1
        if event.agent == NAME:
            return
        run = self._runs.runs.get(event.run)
        who = f"[{run.label}] " if run is not None else ""
        match body:
            case RunSpawned():
                said = f"{body.task[:60]}"
            case ToolCall():
                said = "".join(text for _, text in call_spans(body.name, body.args))
            case RunEnded():
                said = f"ended: {body.status}"
            case _:
                return
        self._latest = self._last[event.run] = safe.escape_line(f"{who}{said}")[:LINE]

    def doing(self, run: int) -> str:
        return self._last.get(run, "")

    @property
    def latest(self) -> str:
        return self._latest

    def counts(self) -> tuple[int, int]:
        """Subagents that run, and that have ended; the client's own run is none."""
        views = [view for view in self._runs.runs.values() if view.agent != NAME]
        ended = sum(view.ended is not None for view in views)
        return len(views) - ended, ended

    def question(self, asked: Approval) -> dict[str, str]:
        """What waits for the user's answer, with the command that gives it."""
        answer = self._words.approve(self._numbers.get(asked.id, asked.id))
        return {"question": question_line(asked), "answer": answer}

    async def close(self) -> None:
        await self._tasks.close(None)


def question_line(asked: Approval) -> str:
    """The question on a line: `[label] edit(src/lib.rs)`."""
    return safe.escape_line("".join(text for _, text in question_spans(asked.label, asked.tool, asked.args)[1:]))[:LINE]
