"""The host of an MCP server: one backend, and the tool calls of all its sessions.

`retinue mcp serve` creates the host, and `close` tears it down. Importing this module is slow, so the server loads it
while sending the first answers.
"""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from retinue.build.parts import Parts
from retinue.concurrency import TaskOwner
from retinue.core.approvals import Allow, Approval, Decision, Deny
from retinue.core.control import Control
from retinue.core.errors import RetinueError
from retinue.core.ports import AttachedApprover
from retinue.core.profiles import Profile
from retinue.log.blocks import format_question_body
from retinue.protocol import inherited_limits
from retinue.protocol.inherited_limits import ASKER_KEY
from retinue.protocol.subagent_tools import PREFIX, Reply
from retinue.surfaces.mcp import catalog
from retinue.surfaces.mcp.backend import Backend
from retinue.surfaces.mcp.messages import ErrorCode, RpcError
from retinue.surfaces.mcp.server import ELICIT, Channel, Exchange, Session
from retinue.surfaces.mcp.texts import make_error_result, make_result
from retinue.surfaces.mcp.tool_handlers import (
    ToolHandlers,
    describe_profile_tool,
    make_early_answer,
    run_profile,
)
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import format_question

ANSWERED_BY = "mcp client"
SURFACE = "mcp"
WAIT_APPROVALS = 600.0
PROGRESS_SECONDS = 4.0
SETTLE_SECONDS = 0.5
GATHER_SECONDS = 0.05
WITHOUT_PROGRESS_SECONDS = 50.0
MAX_ROUNDS = 8
MAX_SUSPENDED = 256
SHOWN_CHARACTERS = 4000
CHOICES: dict[str, tuple[str, Decision]] = {
    "yes": ("Yes, this once", Allow()),
    "run": ("Yes, and this tool for the rest of this subagent", Allow("run")),
    "tree": ("Yes, and this tool for all subagents of this session", Allow("tool")),
    "no": ("No", Deny("the user said no")),
}


class RunningCall:
    """A call in progress. `content` is its tool and arguments. `make_early_reply` makes the reply for a client that
    does not wait until the end. `open_questions` are the unanswered questions that the client was told to ask."""

    def __init__(
        self,
        content: tuple[str, Reply],
        work: Coroutine[Any, Any, Reply],
        make_early_reply: Callable[[], Awaitable[Reply]],
    ) -> None:
        self.content = content
        owner = TaskOwner(on_error=lambda _: None)  # the task that awaits the call gets the exception
        self.task = owner.start(work)
        self.make_early_reply = make_early_reply
        self.open_questions: set[str] = set()
        self.rounds = 0


class InputRequired(Exception):
    """Raised when a call can continue only after the client's user was asked. `result` holds the questions."""

    def __init__(self, result: dict[str, Any]) -> None:
        super().__init__("the user has to be asked")
        self.result = result


class ClientSession:
    """The calls and questions of one client.

    While a call runs, the client gets progress. A client that does not wait until the end gets an early reply, at the
    latest after `reply_within` seconds. A call is suspended while the user is asked, and resumed when the client
    repeats the call. With `waits_elsewhere`, a question without an answer from the client's user stays open for other
    terminals."""

    def __init__(
        self, backend: Backend, session: Session, about: str, *, reply_within: float | None, waits_elsewhere: bool
    ) -> None:
        self._backend, self._session = backend, session
        self._reply_within, self._waits_elsewhere = reply_within, waits_elsewhere
        self.handlers = ToolHandlers(backend, about)
        session.follow_subagents(self.handlers.has_running_subagents)
        self._suspended: dict[str, RunningCall] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._unanswered: set[str] = set()  # questions sent to the client that came back without an answer
        self._tasks = TaskOwner()
        self._tasks.start(self._ask_questions())

    async def leave(self) -> None:
        self._tasks.cancel()
        await self.handlers.leave()

    @property
    def is_attended(self) -> bool:
        """Return True if the user can be asked now: by a request of ours, by the result of an open call, or because
        the client was told to ask for a running call and has not come back yet."""
        if any(call.open_questions and not call.task.done() for call in self._suspended.values()):
            return True
        if self._session.client is not None:
            return self._session.client.can_be_asked
        return any(exchange.client.can_be_asked for exchange in self._session.exchanges.values())

    async def _ask_questions(self) -> None:
        """Send pending questions to a client with a handshake, and withdraw questions that are no longer pending."""
        while True:
            change = self.handlers.changes.next
            pending = {asked.id: asked for asked in await self.handlers.list_pending()}
            for call in self._suspended.values():
                call.open_questions &= pending.keys()
            for name in [name for name in self._asking if name not in pending]:
                self._asking.pop(name).cancel()
            client, channel = self._session.client, self._session.find_channel()
            if client is not None and client.can_be_asked and channel is not None:
                for name in [name for name in pending if name not in self._asking]:
                    self._asking[name] = self._tasks.start(self._ask(channel, pending[name]))
            await asyncio.shield(change)

    async def _ask(self, channel: Channel, asked: Approval) -> None:
        form = make_form(asked, modern=False, run_ids=await self.handlers.list_run_ids(asked))
        await self._handle_answer(asked, await self._session.ask(channel, form))

    async def _handle_answer(self, asked: Approval, said: Any) -> None:
        """Answer the question, or leave it to `retinue approve` if the client's user gave no answer."""
        decision = read_decision(said)
        if decision is None and self._waits_elsewhere:
            self._unanswered.add(asked.id)
            self.handlers.changes.notify()
        else:
            decision = decision or Deny("the user did not allow it")
            await self._backend.control.answer(asked.id, decision, by=ANSWERED_BY, digest=asked.digest, surface=SURFACE)

    async def run(self, exchange: Exchange, call: RunningCall) -> Reply:
        """Return the reply to a call. If the client cancels the call, cancel it together with the runs it made. If the
        client only timed out, let the call continue."""
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
        """Wait until the call is done, sending progress every few seconds. Return False if the time for a reply is
        over."""
        clock = asyncio.get_running_loop().time
        seconds = self._reply_within
        if seconds is None:  # most clients abandon a call after a minute without progress
            seconds = WITHOUT_PROGRESS_SECONDS if exchange.progress_token is None else math.inf
        sent_at, sent, end = clock(), "", clock() + seconds
        while True:
            changed = self.handlers.changes.next  # taken first, so that no later change is missed
            if exchange.client.modern:
                await self._suspend_for_input(exchange, call)
            line = "" if exchange.progress_token is None else await self.handlers.describe_progress()
            due = sent_at + (PROGRESS_SECONDS if line == sent else SETTLE_SECONDS)
            if clock() >= due:
                exchange.send_progress(line or "at work")
                sent_at, sent = clock(), line
                due = sent_at + PROGRESS_SECONDS
            either: set[asyncio.Future[Any]] = {call.task, changed}
            wait = max(0.0, min(due, end) - clock())
            await asyncio.wait(either, timeout=wait, return_when=asyncio.FIRST_COMPLETED)
            if not call.task.done() and changed.done():  # changes come in bursts: handle a burst once
                await asyncio.wait({call.task}, timeout=GATHER_SECONDS)
            if call.task.done():
                return True
            if clock() >= end:
                return False

    async def _suspend_for_input(self, exchange: Exchange, call: RunningCall) -> None:
        """If a question is open, suspend the running call and raise InputRequired, whose result goes to the client."""
        if not exchange.client.can_be_asked or call.rounds >= MAX_ROUNDS:
            return
        pending = [asked for asked in await self.handlers.list_pending() if asked.id not in self._unanswered]
        if pending:
            state = secrets.token_urlsafe(24)
            call.rounds += 1
            call.open_questions = {asked.id for asked in pending}
            self._suspended[state] = call
            if len(self._suspended) > MAX_SUSPENDED:
                del self._suspended[next(iter(self._suspended))]
            forms = {
                asked.id: make_form(asked, modern=True, run_ids=await self.handlers.list_run_ids(asked))
                for asked in pending
            }
            raise InputRequired(make_input_required(forms, state))

    async def resume_call(self, exchange: Exchange, content: tuple[str, Reply]) -> RunningCall | None:
        """Return the suspended call that this exchange resumes, after passing on its user's answers. Return None for a
        new call."""
        params = exchange.request.params
        state, answers = params.get("requestState"), params.get("inputResponses")
        if state is None:
            return None
        call = self._suspended.pop(state, None) if isinstance(state, str) else None
        if call is None or call.content != content:
            text = "requestState is not that of a call that waits for input, or not of this one"
            raise RpcError(ErrorCode.INVALID_PARAMS, text)
        shown = {asked.id: asked for asked in await self.handlers.list_pending()}
        for name, said in answers.items() if isinstance(answers, dict) else ():
            if name in shown:
                await self._handle_answer(shown[name], said)
        return call


class Host:
    """The host of all sessions of one server process. Its Control is opened with `parts`, and given to it by `attach`.

    `profiles` are the profiles that a continued run may have had. `command` is the command line by which the user
    calls Retinue. If `profile` is given, it is served as the only tool instead of the nine. A question waits
    `wait_approvals` seconds for an answer (0: not at all). Each call is answered within `reply_within` seconds."""

    def __init__(
        self,
        parts: Parts,
        profiles: Sequence[Profile],
        *,
        command: str,
        profile: Profile | None,
        wait_approvals: float,
        reply_within: float | None,
    ) -> None:
        waiting = partial(deny_after, wait_approvals or WAIT_APPROVALS)
        approver = AttachedApprover(waiting, by="expiry", attends=self.attends)
        self.parts = replace(parts, approver=approver, wait_approvals=wait_approvals, is_mcp_server=True)
        self._profile, self._profiles, self._command = profile, profiles, command
        self._reply_within, self._waits_elsewhere = reply_within, wait_approvals > 0
        self._sessions: dict[Session, ClientSession] = {}

    def attach(self, control: Control) -> None:
        self.backend = Backend(control, self.parts, self._profiles, self._command)

    def attends(self, tree: str) -> bool:
        """Return True if the user of the client that owns `tree` can be asked."""
        return any(each.is_attended for each in self._sessions.values() if tree in each.handlers.progress)

    def list_tools(self) -> list[dict[str, Any]]:
        if self._profile is not None:
            return [describe_profile_tool(self._profile)]
        return catalog.list_tools(self.parts.profiles, self.parts.timeouts)

    async def call_tool(self, exchange: Exchange, name: str, args: dict[str, Any]) -> dict[str, Any]:
        """Answer a tool call.

        If another run makes the call, the remaining limits of that run bound all runs made for the call. They are
        reported to the collector of the calling run. The run of a profile is reported under the id that the caller
        gave."""
        session, profile = exchange.session, self._profile
        if session not in self._sessions:
            about = f"{exchange.client.name or 'an MCP client'} ({session.about})"
            self._sessions[session] = ClientSession(
                self.backend,
                session,
                about,
                reply_within=self._reply_within,
                waits_elsewhere=self._waits_elsewhere,
            )
        client = self._sessions[session]
        run_id = args.get("runId") if profile is not None else ""
        caller = msgspec.structs.replace(
            inherited_limits.from_meta(exchange.request.meta), run_id=run_id.strip() if isinstance(run_id, str) else ""
        )
        with self.backend.control.serve_caller(caller):
            call = await client.resume_call(exchange, (name, args)) or self._start_call(client, name, args)
        client.handlers.changes.notify()  # the client may be askable again
        try:
            reply = await client.run(exchange, call)
        except InputRequired as required:
            return required.result
        except RetinueError as error:
            if profile is not None:
                return make_error_result(str(error))
            operation = (catalog.resolve_name(name) or name).removeprefix(PREFIX)
            reply = {"success": False, "operation": operation, "error": str(error)}
        return reply if profile is not None else make_result(reply)

    def _start_call(self, client: ClientSession, name: str, args: dict[str, Any]) -> RunningCall:
        """Start a new call. Raises RpcError if there is no such tool."""
        handlers, profile = client.handlers, self._profile
        call_id = handlers.make_call_id()
        if profile is None:
            tool = catalog.resolve_name(name)
            if tool is not None:
                work = handlers.answer(tool, call_id, args)
                return RunningCall((name, args), work, partial(handlers.answer_early, tool, call_id))
        elif name == profile.name:
            work = run_profile(handlers, self.backend, profile, call_id, args)
            return RunningCall((name, args), work, partial(make_early_answer, handlers, call_id))
        raise RpcError(ErrorCode.INVALID_PARAMS, f"Unknown tool: {name[:100]}")

    async def end_session(self, session: Session) -> None:
        client = self._sessions.pop(session, None)
        if client is not None:
            await client.leave()

    async def close(self) -> None:
        for session in list(self._sessions):
            await self.end_session(session)


# Questions of runs, sent to the client's user. The first answer counts, from whichever surface, and only for the exact
# question that was shown. A client with a handshake gets a request of ours. A client of 2026-07-28 gets the questions
# as the result of its own call, and repeats the call with the user's answers.


def make_form(asked: Approval, *, modern: bool, run_ids: Sequence[str] = ()) -> dict[str, Any]:
    """Return the parameters of an elicitation. The revisions write a choice differently. `run_ids` identify the asking
    run to a client that has the run in its own tree."""
    who = f"Subagent '{safe.escape_line(asked.label or asked.agent)}' ({asked.tree}/{asked.run}) wants to run:"
    body = safe.escape_text(format_question_body(asked))
    is_cut = len(body) > SHOWN_CHARACTERS
    if is_cut:
        more = len(body) - SHOWN_CHARACTERS
        body = f"{body[:SHOWN_CHARACTERS]}\n[... {more} more characters: retinue approvals --watch shows all ...]"
    titles = [title for title, _ in CHOICES.values()]
    choices: dict[str, Any] = {"enum": list(CHOICES), "enumNames": titles}
    if modern:
        choices = {"oneOf": [{"const": name, "title": title} for name, title in zip(CHOICES, titles, strict=True)]}
    # One field only, with the usual answer preselected: the user presses one key, or two in Claude Code 2.1, which
    # starts on the first field even if it is not required. Not every client lets the user leave an optional text field
    # empty. If the question is cut, the default is "no", so that a single key cannot allow it.
    default = "no" if is_cut else "yes"
    fields = {"answer": {"type": "string", "title": "Allow it?", **choices, "default": default}}
    return {
        "mode": "form",
        "message": f"{who} {format_question(asked)}\n\n{body}".rstrip(),
        "requestedSchema": {"type": "object", "properties": fields, "required": ["answer"]},
        **({"_meta": {ASKER_KEY: list(run_ids)}} if run_ids else {}),
    }


def read_decision(said: Any) -> Decision | None:
    """Return the decision of a client's user. Fails closed: only a clear yes allows. Return None if the user gave no
    answer: headless clients cancel forms that nobody has seen."""
    action = said.get("action") if isinstance(said, dict) else None
    if action not in ("accept", "decline"):
        return None
    if action == "decline":
        return Deny("the user did not allow it")
    content = said.get("content")
    answer = content.get("answer") if isinstance(content, dict) else None
    choice = CHOICES.get(answer) if isinstance(answer, str) else None
    return Deny("the answer was neither yes nor no") if choice is None else choice[1]


def make_input_required(forms: dict[str, dict[str, Any]], state: str) -> dict[str, Any]:
    """Return the interim result of 2026-07-28, which lists the questions to ask before the call can continue."""
    requests = {name: {"method": ELICIT, "params": form} for name, form in forms.items()}
    return {"resultType": "input_required", "inputRequests": requests, "requestState": state}


async def deny_after(seconds: float, question: Approval) -> Decision:
    """Deny a question if the users of clients have not answered it within `seconds`."""
    await asyncio.sleep(seconds)
    return Deny(f"nobody answered within {seconds:g} s")
