"""The host's end of a link to another process: its frames become calls on the run's Link, which writes, asks and pays.

Nothing a worker says is believed. It names turns and calls in the order a loop has them, and what does not fit ends
the run; the thread, the arguments and the answer are the host's own. What it says a program wants called (`_make`) is
asked about like any call of the run. So a worker that was taken over can do no more than its run may, and what the log
says the model saw is what it saw.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine
from typing import Any

import msgspec

from retinue.agent.loop import ANSWER, REMINDER, inline
from retinue.agent.setups import called
from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.errors import Disconnected, Limited, RetinueError, ToolError
from retinue.core.events import Inbox, ToolCall, ToolResult, TurnEnded, TurnStarted, Warned
from retinue.core.limits import INLINE_BYTES
from retinue.core.messages import AssistantTurn, Call, Reply, ToolSpec, ToolTurn, Turn, UserTurn, last_text
from retinue.core.plans import SETUP, Job, Past
from retinue.core.ports import Folders, Link, Outcome
from retinue.core.results import Ending
from retinue.core.rules import CODE_MODE
from retinue.protocol import link as wire
from retinue.protocol.link import LinkError
from retinue.sandbox.programs import Programs

COMMANDS = ("shell", CODE_MODE)
FACTS = 100_000
WARNINGS = 1000
TEXT = 64 * 1024
PREVIEW = 64 * 1024
TOO_LARGE = "The arguments of this {name} call are larger than the link to its run carries. It was not run."


class _Open:
    """A call of the model that has no result yet. `state` only moves on: new, asking, denied or allowed, running."""

    __slots__ = ("call", "problem", "state")

    def __init__(self, call: Call) -> None:
        self.call = call
        self.problem: str | None = None
        self.state = "new"


class NearEnd:
    """Drives one run from here. `walled` are the tools the worker runs itself, `folders` what those of the host see.

    What it answers goes to `send`; `take` and `closed` are called with what comes from it. It is
    `greeted` once it has said hello, and `silent` when it has nothing more to say."""

    def __init__(
        self,
        job: Job,
        link: Link,
        *,
        walled: Collection[str],
        folders: Folders,
        is_output: Callable[[str], bool],
    ) -> None:
        self._job, self._link = job, link
        self.send: Callable[[wire.Frame], None] = lambda _: None
        self.hint: Callable[[str], str] = lambda _: ""  # what to put behind the words of a command that failed
        self.hello: Callable[[], None] = lambda: None  # called when the worker is there
        self._walled, self._folders, self._is_output = walled, folders, is_output
        self._thread: list[Turn] = list(job.thread)
        self._turn = self._asked = self._facts = self._warnings = 0
        self._asking = False
        self._reply: Reply | None = None
        self._open: dict[str, _Open] = {}
        self._results: dict[str, ToolTurn] = {}
        self._programs = Programs(link, lambda call, outcome: inline(outcome, call, folders))
        self._answer: Outcome | None = None
        self._given: dict[str, Call] = {}  # answers of a run that goes on: it has them checked once more
        self._setup = "done" if job.setup is None else "due"
        self._tasks: set[asyncio.Task[None]] = set()
        self._over: asyncio.Future[Ending] = asyncio.get_running_loop().create_future()
        self.greeted = False
        self.silent = asyncio.Event()
        if job.past is not None:
            self._take_up(job.past)

    def _take_up(self, past: Past) -> None:
        """As if this end had seen the turn in which the run stopped."""
        reply = past.reply
        self._turn = self._asked = past.turn if reply is not None else past.turn - 1
        if reply is None:
            return
        self._reply = reply
        self._thread.append(AssistantTurn(reply.text, reply.calls, reply.thoughts, reply.natives))
        for call in reply.calls:
            known = past.outcomes.get(call.id)
            if known is None:
                self._open[call.id] = _Open(call)
                continue
            self._results[call.id] = ToolTurn(call.id, call.name, known.text, known.success)
            if call.name == ANSWER and known.success:
                self._given[call.id] = call
        self._gather()

    def stopped(self) -> wire.Stopped | None:
        """What the worker needs to know of a run that goes on."""
        past = self._job.past
        if past is None:
            return None
        calls = None if past.reply is None else tuple(self._told(call) for call in past.reply.calls)
        known = {name: outcome.success for name, outcome in past.outcomes.items()}
        reminded = any(isinstance(turn, UserTurn) and turn.text == REMINDER for turn in past.thread)
        return wire.Stopped(past.turn, calls, known, past.ended, reminded)

    async def ending(self) -> Ending:
        """The ending of the run, or what ended it as an exception; then nothing of it is at work here any more."""
        try:
            return await self._over
        finally:
            self._over.cancel()
            self._programs.drop()
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks)

    def fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    def give_up(self) -> None:
        """It has had time enough to say hello."""
        if not self.greeted:
            self.fail(RetinueError("the worker behind the wall did not start in time"))

    def closed(self, error: LinkError | None) -> None:
        self.silent.set()
        self.fail(error or Disconnected("its process ended"))

    def take(self, frame: wire.Up) -> None:
        if isinstance(frame, wire.End):
            self.silent.set()
        if self._over.done():
            return
        try:
            if not self.greeted and not isinstance(frame, wire.Hello):
                raise LinkError("it did not say which version it speaks")
            _must(self._setup == "done" or isinstance(frame, _BEFORE_SETUP), "work in a workspace that is not ready")
            _TAKERS[type(frame)](self, frame)
        except (LinkError, Limited) as error:
            self.fail(error)

    def _hello(self, frame: wire.Hello) -> None:
        if self.greeted or frame.version != wire.VERSION:
            raise LinkError(f"it speaks version {frame.version} of the link, and we version {wire.VERSION}")
        self.greeted = True
        self.hello()

    # What a run says about itself

    def _fact(self, frame: wire.Fact) -> None:
        self._facts += 1
        _must(self._facts <= FACTS, f"more than {FACTS} facts about itself")
        _must(not self._asking, "a fact in the middle of a model call")
        body = frame.body
        match body:
            case ToolCall() | ToolResult():
                self._prepare(body)
                return
            case TurnStarted():
                _must(self._setup == "done", "a turn in a workspace that is not ready")
                _must(body.turn == self._turn + 1 and not self._open, f"turn {body.turn} out of order")
                limit = self._job.max_turns
                if limit is not None and body.turn > limit:
                    raise Limited(f"limit of {limit} turns reached")
                self._turn = body.turn
                self._thread += self._link.inbox()
            case TurnEnded():
                _must(body.turn == self._turn == self._asked and not self._open, f"turn {body.turn} ends out of order")
            case Inbox():
                _must(body.source == "notice" and body.about is None, "words that are not its own")
                body = Inbox(body.text[:TEXT])
                self._thread.append(UserTurn(body.text, "notice"))
            case Warned():
                self._warnings += 1
                _must(self._warnings <= WARNINGS, f"more than {WARNINGS} warnings")
                body = Warned(body.text[:TEXT])
        self._link.emit(body)

    def _prepare(self, body: ToolCall | ToolResult) -> None:
        """The user's own command for a new workspace: that it began, and what came of it."""
        setup = self._job.setup
        if isinstance(body, ToolCall):
            _must(setup is not None and self._setup == "due", "a call that nobody made")
            assert setup is not None
            self._setup = "running"
            self._link.emit(called(setup))
            return
        _must(self._setup == "running", "a result of a call that nobody made")
        self._check_result(body.text, body.file)
        self._setup = "done" if body.success else "failed"
        took = max(0, min(body.duration_ms or 0, 10**10))
        self._link.emit(ToolResult(SETUP, SETUP, body.text, body.success, took, body.file))

    # What it asks for

    def _ask(self, frame: wire.Ask) -> None:
        _must(self._turn == self._asked + 1 and not self._asking, "a model call out of order")
        self._asking = True
        self._serve(self._complete(frame.id))

    async def _complete(self, number: int) -> wire.Frame:
        job, thread = self._job, self._thread
        reply = await self._link.complete(self._turn, job.system, thread, job.plan.specs)
        self._asking, self._asked, self._reply = False, self._turn, reply
        if not reply.refused:
            thread.append(AssistantTurn(reply.text, reply.calls, reply.thoughts, reply.natives))
            self._open = {call.id: _Open(call) for call in reply.calls}
        return wire.Replied(number, tuple(self._told(call) for call in reply.calls), reply.refused)

    def _told(self, call: Call) -> Call:
        """The call as the worker needs it: without the arguments of what it does not run."""
        if call.name not in self._walled or call.id not in self._open:
            return Call(call.id, call.name, {}, call.problem)
        if _size(call.args) > wire.FRAME_BYTES // 2:
            problem = TOO_LARGE.format(name=call.name)
            self._open[call.id].problem = problem
            return Call(call.id, call.name, {}, problem)
        return call

    def _begin(self, frame: wire.Begin) -> None:
        waiting = self._called(frame.call, "new")
        waiting.state = "asking"
        self._serve(self._decide(frame, waiting))

    async def _decide(self, frame: wire.Begin, waiting: _Open) -> wire.Frame:
        call = waiting.call
        tool = self._job.plan.by_name.get(call.name)
        preview, works = frame.preview[:PREVIEW], frame.works and not call.problem and not waiting.problem
        if tool is None or not works:
            works = False
        elif call.name not in self._walled or call.name in COMMANDS:  # a command is shown as the host knows it
            try:
                preview = tool.preview(call, self._folders)
            except ToolError as error:
                works, waiting.problem = False, str(error)
        spec = tool.spec if tool is not None and works else ToolSpec(call.name, "", {}, tier="none")
        decision: Decision = await self._link.begin(call, spec, preview if works else "")
        waiting.state = "denied" if isinstance(decision, Deny) else "allowed"
        if isinstance(decision, Allow) and decision.args is not None:
            waiting.call = Call(call.id, call.name, decision.args)
        if waiting.problem is not None and frame.works:
            waiting.state, decision = "allowed", Allow()  # nothing will run: it hears why when it asks for it
        return wire.Decided(frame.id, decision)

    def _lend(self, frame: wire.Lend) -> None:
        given = self._given.pop(frame.call, None)
        waiting = self._called(frame.call, "allowed") if given is None else _Open(given)
        _must(waiting.call.name not in self._walled, f"asked the host to run '{waiting.call.name}'")
        waiting.state = "running"
        self._serve(self._run(frame.id, waiting))

    async def _run(self, number: int, waiting: _Open) -> wire.Frame:
        call = waiting.call
        try:
            if waiting.problem is not None:
                raise ToolError(waiting.problem)
            outcome = await self._job.plan.by_name[call.name](call, self._folders, self._link)
        except ToolError as error:
            return wire.Lent(number, str(error)[:INLINE_BYTES], False, error=True)
        if len(outcome.text) * 4 > INLINE_BYTES:
            outcome = inline(outcome, call, self._folders)
        if call.name == ANSWER and outcome.success:
            self._answer = outcome
        return wire.Lent(number, outcome.text, outcome.success, outcome.file)

    def _finish(self, frame: wire.Finish) -> None:
        waiting = self._open.get(frame.call)
        _must(waiting is not None and waiting.state not in ("new", "asking"), "a result of a call that has not begun")
        assert waiting is not None
        self._check_result(frame.text, frame.file)
        self._programs.close(frame.call)
        call, text = self._open.pop(frame.call).call, frame.text
        if not frame.success and call.name in COMMANDS and (note := self.hint(text)):
            text = f"{text}\n{note}"
        self._results[call.id] = ToolTurn(call.id, call.name, text, frame.success)
        outcome = Outcome(text, frame.success, file=frame.file)
        self._link.finish(call, outcome, max(0, min(frame.duration_ms, 10**10)))
        if self._job.past is not None and call.name == ANSWER and frame.success:
            self._given[call.id] = call
        self._gather()

    def _make(self, frame: wire.Make) -> None:
        call = self._called(frame.call, "allowed").call
        _must(call.name == CODE_MODE and CODE_MODE in self._walled, f"a call within {call.name!r}")
        self._serve(self._programs.make(call, frame, self.send))

    def _check_result(self, text: str, file: str) -> None:
        _must(not file or self._is_output(file), "a result in a file that is not its own")
        _must(len(text) <= 2 * INLINE_BYTES, "a result that is too long")

    def _gather(self) -> None:
        """Puts the results of a turn into the thread when all are there."""
        if not self._open and self._reply is not None:
            self._thread += [self._results.pop(each.id) for each in self._reply.calls]

    def _idle(self, frame: wire.Idle) -> None:
        _must(self._turn == self._asked and not self._open, "waits for children in the middle of a turn")
        self._serve(self._children(frame.id))

    async def _children(self, number: int) -> wire.Frame:
        return wire.News(number, await self._link.children_done())

    # How it ends

    def _end(self, frame: wire.End) -> None:
        if not self._over.done():
            self._over.set_result(self._ending(frame))

    def _ending(self, frame: wire.End) -> Ending:
        reply, text = self._reply, frame.text[:TEXT]
        match frame.status:
            case "limited":
                limit = self._job.max_turns
                _must(limit is not None and self._turn >= limit, "reached a limit that it has not")
                raise Limited(f"limit of {limit} turns reached")
            case "failed":
                return Ending("failed", text, error=text)
            case "crashed":
                text = f"{self._job.ref.agent} panicked: {text}"
                return Ending("failed", text, error=text)
        _must(reply is not None and not self._open and self._asked == self._turn, "ended before its turn was over")
        assert reply is not None
        if frame.status == "refused":
            _must(reply.refused, "refused what its model did not")
            return Ending("refused", reply.text)
        if self._answer is not None:
            data = self._answer.data
            return Ending("done", msgspec.json.encode(data).decode(), structured=data)
        _must(not (reply.calls or reply.refused or ANSWER in self._job.plan.by_name), "is done without an answer")
        return Ending("done", last_text(self._thread) or "")

    def _called(self, name: str, state: str) -> _Open:
        waiting = self._open.get(name)
        _must(waiting is not None and waiting.state == state, f"a call out of order: {name[:80]!r}")
        assert waiting is not None
        return waiting

    def _serve(self, work: Coroutine[Any, Any, wire.Frame]) -> None:
        task = asyncio.create_task(self._served(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _served(self, work: Coroutine[Any, Any, wire.Frame]) -> None:
        try:
            self.send(await work)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the run ends by it, as it would in this process
            self.fail(error)


def _must(fits: bool, what: str) -> None:
    if not fits:
        raise LinkError(f"the worker did not keep to the link: {what}")


def _size(value: Any) -> int:
    try:
        return len(msgspec.json.encode(value, enc_hook=str))
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):
        return len(repr(value))


_BEFORE_SETUP = (wire.Hello, wire.Fact, wire.End)
_TAKERS: dict[type[Any], Callable[[NearEnd, Any], None]] = {
    wire.Hello: NearEnd._hello,
    wire.Fact: NearEnd._fact,
    wire.Ask: NearEnd._ask,
    wire.Begin: NearEnd._begin,
    wire.Lend: NearEnd._lend,
    wire.Finish: NearEnd._finish,
    wire.Make: NearEnd._make,
    wire.Idle: NearEnd._idle,
    wire.End: NearEnd._end,
}
