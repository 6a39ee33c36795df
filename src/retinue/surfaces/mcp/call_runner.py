"""The life of a client's tool call: waited for with progress, answered early if its client will not wait to the end, or
suspended while its user is asked, and resumed when the client makes it again."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

from retinue.concurrency import TaskOwner
from retinue.surfaces.mcp.backend import Backend
from retinue.surfaces.mcp.elicitation import make_input_required, read_decision
from retinue.surfaces.mcp.messages import INVALID_PARAMS, RpcError
from retinue.surfaces.mcp.server import Exchange
from retinue.surfaces.mcp.tool_handlers import Reply, ToolHandlers

PROGRESS_SECONDS = 4.0
SETTLE_SECONDS = 0.5
GATHER_SECONDS = 0.05
WITHOUT_PROGRESS_SECONDS = 50.0
MAX_ROUNDS = 8
MAX_SUSPENDED = 256


class RunningCall:
    """One call at work. `content` are its tool and arguments; `make_early_reply` makes the reply for a client that does
    not wait to the end."""

    def __init__(
        self,
        content: tuple[str, Reply],
        work: Coroutine[Any, Any, Reply],
        make_early_reply: Callable[[], Awaitable[Reply]],
    ) -> None:
        self.content = content
        owner = TaskOwner(on_error=lambda _: None)  # whoever waits for the call gets the exception
        self.task = owner.start(work)
        self.make_early_reply = make_early_reply
        self.rounds = 0


class InputRequired(Exception):
    """The call can go on only when the client's user was asked; `result` says what."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("the user has to be asked")
        self.result = result


class CallRunner:
    """The calls of one client. Each is answered within `reply_within` seconds, if that is given."""

    def __init__(self, backend: Backend, handlers: ToolHandlers, reply_within: float | None) -> None:
        self._backend, self._handlers, self._reply_within = backend, handlers, reply_within
        self._suspended: dict[str, RunningCall] = {}

    async def run(self, exchange: Exchange, call: RunningCall) -> Reply:
        """Return the reply. A call that its client cancels is cancelled with what it made; one that only timed out
        there goes on."""
        try:
            is_done = await self._wait_with_progress(exchange, call)
        except asyncio.CancelledError:
            if not exchange.timed_out:
                call.task.cancel()
                with suppress(asyncio.CancelledError):
                    await asyncio.shield(asyncio.wait({call.task}, timeout=SETTLE_SECONDS))
            raise
        return call.task.result() if is_done else await call.make_early_reply()

    async def _wait_with_progress(self, exchange: Exchange, call: RunningCall) -> bool:
        """Wait until the call is done; False if the time for a reply is over. Sends progress every few seconds."""
        clock = asyncio.get_running_loop().time
        sent_at, sent, end = clock(), "", self._reply_time(exchange)
        while True:
            changed = self._handlers.changes.next_change()  # first, so that nothing from now on is missed
            if exchange.client.modern:
                await self._suspend_for_input(exchange, call)
            line = await self._handlers.describe_progress()
            due = sent_at + (PROGRESS_SECONDS if line == sent else SETTLE_SECONDS)
            if clock() >= due:
                exchange.send_progress(line or "at work")
                sent_at, sent = clock(), line
                due = sent_at + PROGRESS_SECONDS
            either: set[asyncio.Future[Any]] = {call.task, changed}
            wait = max(0.0, min(due, end) - clock())
            await asyncio.wait(either, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if not call.task.done() and changed.done():  # many changes may come at once: look at them once
                await asyncio.wait({call.task}, timeout=GATHER_SECONDS)
            if call.task.done():
                return True
            if clock() >= end:
                return False

    def _reply_time(self, exchange: Exchange) -> float:
        """Return when a reply must be there: most clients give up a call after a minute without progress."""
        seconds = self._reply_within
        if seconds is None:
            seconds = float("inf") if exchange.wants_progress else WITHOUT_PROGRESS_SECONDS
        return asyncio.get_running_loop().time() + seconds

    async def _suspend_for_input(self, exchange: Exchange, call: RunningCall) -> None:
        """If a question is open, leave the call at work and raise InputRequired, which the client is answered with."""
        if not exchange.client.can_be_asked or call.rounds >= MAX_ROUNDS:
            return
        pending = await self._handlers.list_pending()
        if pending:
            state = secrets.token_urlsafe(24)
            call.rounds += 1
            self._suspended[state] = call
            if len(self._suspended) > MAX_SUSPENDED:
                del self._suspended[next(iter(self._suspended))]
            raise InputRequired(make_input_required(pending, state))

    @property
    def has_suspended(self) -> bool:
        """True when a client was told to ask its user for a call that is still at work, and has not come back yet."""
        return any(not call.task.done() for call in self._suspended.values())

    async def resume_call(self, exchange: Exchange, content: tuple[str, Reply]) -> RunningCall | None:
        """Return the suspended call that this one goes on with, its user's answers given. None for a new call."""
        params = exchange.request.params
        state, answers = params.get("requestState"), params.get("inputResponses")
        if state is None:
            return None
        call = self._suspended.pop(state, None) if isinstance(state, str) else None
        if call is None or call.content != content:
            text = "requestState is not that of a call that waits for input, or not of this one"
            raise RpcError(INVALID_PARAMS, text)
        shown = {asked.id: asked for asked in await self._handlers.list_pending()}
        for name, said in answers.items() if isinstance(answers, dict) else ():
            if name in shown:
                await self._backend.answer(shown[name], read_decision(said))
        return call
