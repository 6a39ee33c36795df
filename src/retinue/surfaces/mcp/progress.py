"""Progress of a client's trees for waiting calls: the latest event on one line, and the numbered questions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from retinue.concurrency import TaskOwner
from retinue.core.approvals import Approval
from retinue.core.control import MCP_CLIENT
from retinue.core.events import (
    AnswerGiven,
    ApprovalAsked,
    Delta,
    Event,
    MemberLost,
    RunEnded,
    RunSpawned,
    TeamDecided,
    ToolCall,
    VoteCast,
)
from retinue.log.blocks import make_call_spans, make_team_spans
from retinue.log.runs import Runs
from retinue.surfaces.mcp.backend import Backend
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import format_question

LINE_CHARACTERS = 200
_TASK_CHARACTERS = 60


class ChangeSignal:
    """A signal that wakes all waiting tasks on each change. `next` is a future that completes at the next change. It
    is shared by all waiting tasks, so never cancel it."""

    def __init__(self) -> None:
        self.next: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def notify(self) -> None:
        self.next.set_result(None)
        self.next = asyncio.get_running_loop().create_future()


class TreeProgress:
    """A watcher that follows one tree from its first event until the tree has ended or `close` is called. Then it
    calls `on_end`."""

    def __init__(self, backend: Backend, tree: str, changes: ChangeSignal, on_end: Callable[[], object]) -> None:
        self._backend, self._tree = backend, tree
        self._runs = Runs(tree)
        self._question_numbers: dict[str, int] = {}
        self.last_lines: dict[int, str] = {}  # by run
        self.latest_line = ""
        self._changes = changes
        self._tasks = TaskOwner(on_error=lambda _: None)  # a tree that cannot be followed has no progress
        self._tasks.start(self._follow()).add_done_callback(lambda _: on_end())

    async def _follow(self) -> None:
        async with aclosing(self._backend.control.watch(self._tree)) as events:
            async for event in events:
                if not isinstance(event, Delta):
                    self._apply(event)
                    self._changes.notify()

    def _apply(self, event: Event) -> None:
        self._runs.apply(event)
        body = event.body
        if isinstance(body, ApprovalAsked):
            self._question_numbers[body.approval_id] = len(self._question_numbers) + 1
        if event.agent == MCP_CLIENT:
            return
        run = self._runs.runs.get(event.run)
        label = f"[{run.label}] " if run is not None else ""
        match body:
            case RunSpawned():
                text = body.task[:_TASK_CHARACTERS]
            case ToolCall():
                text = "".join(part for _, part in make_call_spans(body.name, body.args))
            case AnswerGiven() | VoteCast() | MemberLost() | TeamDecided():
                text = "".join(part for _, part in make_team_spans(body))
            case RunEnded():
                text = f"ended: {body.status}"
            case _:
                return
        self.latest_line = self.last_lines[event.run] = safe.escape_line(f"{label}{text}")[:LINE_CHARACTERS]

    def count_runs(self) -> tuple[int, int]:
        """Return the numbers of running and of ended subagents, without the client's own run."""
        views = [view for view in self._runs.runs.values() if view.agent != MCP_CLIENT]
        ended = sum(view.ended is not None for view in views)
        return len(views) - ended, ended

    def describe_question(self, asked: Approval) -> dict[str, str]:
        """Return an open question and the command that answers it."""
        number = self._question_numbers.get(asked.id, asked.id)
        return {
            "question": format_question(asked)[:LINE_CHARACTERS],
            "answer": self._backend.make_command(f"approve {number}"),
        }

    async def close(self) -> None:
        await self._tasks.close(None)
