"""A call at work: waited for, told of, handed over when its client will not wait to the end, and taken up again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from retinue.concurrency import TaskOwner
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.mcp.elicitation import BY, decision, input_required
from retinue.surfaces.mcp.messages import INVALID_PARAMS, Problem
from retinue.surfaces.mcp.server import Exchange
from retinue.surfaces.mcp.tool_handlers import Calls, Reply

SAY_SECONDS = 4.0
SETTLE_SECONDS = 0.5
LOOK_SECONDS = 0.05
UNTOLD_SECONDS = 50.0
MOST_ROUNDS = 8
MOST_SUSPENDED = 256


class Job:
    """One call. `instead` is the reply when its client does not wait to the end."""

    def __init__(
        self, about: tuple[str, Reply], work: Coroutine[Any, Any, Reply], instead: Callable[[], Reply]
    ) -> None:
        self.about = about
        owner = TaskOwner(on_error=lambda _: None)  # whoever attends to the call gets the exception
        self.task = owner.start(work)
        self.instead = instead
        self.rounds = 0


class Asked(Exception):
    """The call can go on only when the client's user was asked; `result` says what."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("the user has to be asked")
        self.result = result


class Jobs:
    """The calls of one client."""

    def __init__(self, supervisor: Supervisor, calls: Calls, reply_within: float | None) -> None:
        self._supervisor, self._calls, self._reply_within = supervisor, calls, reply_within
        self._suspended: dict[str, Job] = {}

    async def run(self, exchange: Exchange, job: Job) -> Reply:
        """The reply. Cancelled by the client, what the call made is cancelled too; timed out there, it goes on."""
        try:
            done = await self._attend(exchange, job)
        except asyncio.CancelledError:
            if not exchange.timed_out:
                job.task.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(asyncio.wait({job.task}, timeout=SETTLE_SECONDS))
            raise
        return job.task.result() if done else job.instead()

    async def _attend(self, exchange: Exchange, job: Job) -> bool:
        """Until it is done; False when the time for an answer is up. Says how it goes at least every few seconds."""
        clock = asyncio.get_running_loop().time
        told, said, end = clock(), "", self._end(exchange)
        while True:
            changed = self._calls.bell.rung()  # first: what happens from now on is not missed
            if exchange.client.modern:
                self._suspend(exchange, job)
            line = self._calls.line()
            due = told + (SAY_SECONDS if line == said else SETTLE_SECONDS)
            if clock() >= due:
                exchange.progress(line or "at work")
                told, said = clock(), line
                due = told + SAY_SECONDS
            either: set[asyncio.Future[Any]] = {job.task, changed}
            wait = max(0.0, min(due, end) - clock())
            await asyncio.wait(either, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if not job.task.done() and changed.done():  # much may happen at once: look at it once
                await asyncio.wait({job.task}, timeout=LOOK_SECONDS)
            if job.task.done():
                return True
            if clock() >= end:
                return False

    def _end(self, exchange: Exchange) -> float:
        """When an answer must be there: most clients end a call after a minute in which they hear nothing."""
        seconds = self._reply_within
        if seconds is None:
            seconds = float("inf") if exchange.wants_progress else UNTOLD_SECONDS
        return asyncio.get_running_loop().time() + seconds

    def _suspend(self, exchange: Exchange, job: Job) -> None:
        """Where the user has to be asked by the answer: leaves the call at work, to be taken up when it comes again."""
        if not exchange.client.can_be_asked or job.rounds >= MOST_ROUNDS:
            return
        pending = self._calls.pending()
        if pending:
            state = secrets.token_urlsafe(24)
            job.rounds += 1
            self._suspended[state] = job
            if len(self._suspended) > MOST_SUSPENDED:
                del self._suspended[next(iter(self._suspended))]
            raise Asked(input_required(pending, state))

    @property
    def suspended(self) -> bool:
        """Whether a client was told to ask its user, and has not come back yet, for a call that is still at work."""
        return any(not job.task.done() for job in self._suspended.values())

    def taken_up(self, exchange: Exchange, about: tuple[str, Reply]) -> Job | None:
        """The call that this one goes on with, its user's answers given; None for a new one."""
        state, answers = exchange.request.params.get("requestState"), exchange.request.params.get("inputResponses")
        if state is None:
            return None
        job = self._suspended.pop(state, None) if isinstance(state, str) else None
        if job is None or job.about != about:
            raise Problem(INVALID_PARAMS, "requestState is not that of a call that waits for input, or not of this one")
        shown = {asked.id: asked for asked in self._calls.pending()}
        for name, said in answers.items() if isinstance(answers, dict) else ():
            if name in shown:
                self._supervisor.answer(name, decision(said), by=BY, digest=shown[name].digest)
        return job
