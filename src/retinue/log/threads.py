"""The folds of events that continue, resume and replay runs.

One fold turns the events of a run into the thread its model saw. Another turns the events of an interrupted tree into
the state that resuming needs: the threads of its runs, their open calls with the answers to approvals, and the time
they have worked. A third makes the records that a replay compares (`core/records.py`). Everything is pure, except that
long texts are read from files; the supervisor acts on the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct, structs

from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.errors import LogDamaged, LogError
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Event,
    Gap,
    Inbox,
    Message,
    RunEnded,
    RunRemote,
    RunResumed,
    RunSpawned,
    RunStarted,
    RunWaiting,
    Thinking,
    ToolCall,
    ToolResult,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    Unknown,
    UsageReported,
)
from retinue.core.messages import (
    INTERRUPTED_TURN,
    NOTICE,
    AssistantTurn,
    Call,
    ProviderToolCall,
    Reply,
    Thought,
    ToolTurn,
    Turn,
    UserTurn,
)
from retinue.core.plans import SETUP, RunHistory
from retinue.core.ports import LogReader, Outcome
from retinue.core.records import CallRecord, RunRecord, Step, TurnRecord
from retinue.files.content import read_small_file

MAX_TEXT_BYTES = 1024**3
BROKEN_OFF = (
    "The run was ended before this call had a result, so nobody knows whether it took effect. "
    "Look at how things are before you make it again."
)
NOT_RUN = "The run was ended before this call was allowed: it was not run."
STANDING = ("run", "tool")
Histories = Mapping[str, Sequence[Event]]  # events by tree
NEVER_ENDED = "it never ended"
RESUMED = "it was resumed in a later process"
NO_REPLY = "its model gave no answer, and the conversation continued"
_ENDED_FROM_OUTSIDE = {
    "cancelled": "it was cancelled",
    "timed_out": "it timed out",
    "disconnected": "it was cut off",
}


def extend_reply(reply: Reply, body: Body | Unknown, *, strict: bool = True) -> Reply:
    """Return the reply with the part that an event adds: a thought, text, a call, or the result of a call at the
    provider.

    A text that was cut in the log is read from its file. If the file is missing, raise LogError if `strict`, else use
    the cut text.
    """
    match body:
        case Thinking():
            text = _read_whole_text(body.text, body.file, strict=strict)
            thought = Thought(
                text=text,
                type=body.type,
                signature=body.signature,
                id=body.block_id,
                origin=body.origin,
                layout=body.layout,
            )
            return structs.replace(reply, thoughts=(*reply.thoughts, thought))
        case Message(host=False):
            return structs.replace(reply, text=_read_whole_text(body.text, body.file, strict=strict))
        case ToolCall(tier="provider"):
            return structs.replace(
                reply, natives=(*reply.natives, ProviderToolCall(body.call_id, body.name, body.args, ""))
            )
        case ToolCall(host=False):
            return structs.replace(reply, calls=(*reply.calls, Call(body.call_id, body.name, body.args)))
        case ToolResult() if reply.natives:
            result = {"result": body.text, "success": body.success, "content": body.content, "origin": body.origin}
            natives = tuple(
                structs.replace(native, **result) if native.id == body.call_id else native for native in reply.natives
            )
            return structs.replace(reply, natives=natives)
    return reply


def _read_whole_text(text: str, file: str, *, strict: bool) -> str:
    try:
        return read_small_file(file, MAX_TEXT_BYTES).decode("utf-8", "replace") if file else text
    except OSError as error:
        if not strict:
            return text
        raise LogError(f"the thread has a text that is in {file}: {error.strerror or error}") from None


class Thread:
    """The thread of one run: its complete turns, and the known part of the current turn.

    If a crash interrupted a turn and it was started again, only the second start counts. Tool results are in the order
    of their calls. If the run ended within a turn, that turn is part of the thread once its calls are written, because
    they may have run. `waiting` are messages for the next turn. A conversation `waits` from its `run.waiting` event to
    its next turn; `uncounted` is the number of turns up to that event.
    """

    def __init__(self, before: Sequence[Turn] = (), *, strict: bool = True) -> None:
        self._strict = strict
        self.turn = 0
        self.ended = False
        self.waiting: list[UserTurn] = []
        self.waits = False
        self.uncounted = 0
        self._over = False
        self._turns: list[Turn] = list(before)
        self._begin_turn()

    def _begin_turn(self) -> None:
        self._reply = Reply()
        self._final = False
        self._results: dict[str, ToolTurn] = {}
        self._withheld: set[str] = set()  # calls that must not run yet or at all; used if the run ends within the turn

    def apply(self, body: Body | Unknown) -> None:
        self._reply = extend_reply(self._reply, body, strict=self._strict)
        match body:
            case RunSpawned(task=task):
                self._turns.append(UserTurn(task))
            case Inbox(text=text, source=source):
                self.waiting.append(UserTurn(text, source))
            case TurnStarted(turn=turn):
                self._turns = self.turns()
                self.waiting.clear()
                self.turn, self.ended, self.waits = turn, False, False
                self._begin_turn()
            case RunWaiting(after=after):
                self._wait_for_message(is_interrupted=after == "interrupted")
            case Message(host=False, final=final):
                self._final = final
            case ToolCall(tier="none") | ApprovalAsked():
                self._withheld.add(body.call_id)
            case ApprovalDecided(allowed=True):
                self._withheld.discard(body.call_id)
            case ToolResult():
                self._results[body.call_id] = ToolTurn(body.call_id, body.name, body.text, body.success)
            case TurnEnded():
                self.ended = True
            case RunEnded():
                self._over = True

    def _wait_for_message(self, *, is_interrupted: bool) -> None:
        """Close the turn, even an interrupted one: the log has the model's text, and every call has a result. Messages
        that arrived meanwhile belong to the next turn."""
        if self.ended or self._reply.text or self._reply.calls:
            self._turns += self._close_turn(self._results)
        if is_interrupted:
            self._turns.append(UserTurn(INTERRUPTED_TURN, NOTICE))
        self.waits, self.uncounted, self.ended = True, self.turn, False
        self._begin_turn()

    def _close_turn(self, results: Mapping[str, ToolTurn]) -> list[Turn]:
        reply = self._reply
        said = AssistantTurn(reply.text, reply.calls, reply.thoughts, reply.natives)
        return [said, *(results[call.id] for call in reply.calls if call.id in results)]

    def turns(self) -> list[Turn]:
        """Return all complete turns and the messages after them, in the order the model saw them."""
        reply, results = self._reply, dict(self._results)
        broken_off = self._over and not self.ended and bool(reply.calls or self._final)
        if not (self.ended or broken_off):
            return [*self._turns, *self.waiting]
        for call in reply.calls if broken_off else ():
            text = NOT_RUN if call.id in self._withheld else BROKEN_OFF
            results.setdefault(call.id, ToolTurn(call.id, call.name, text, False))
        return [*self._turns, *self._close_turn(results), *self.waiting]

    def past(self, seconds: float) -> RunHistory:
        """Return the state from which the run resumes. The reply of the current turn is included only if it is final
        or one of its calls is written: before that, none of its tools has run."""
        calls = self._reply.calls
        if not (self.ended or self._final or calls):
            turn = max(self.turn, 1)
            return RunHistory(tuple(self._turns), turn, seconds=seconds, waits=self.waits, uncounted=self.uncounted)
        results = [self._results[call.id] for call in calls if call.id in self._results]
        outcomes = {result.call_id: Outcome(result.text, result.success) for result in results}
        return RunHistory(
            thread=tuple(self._turns),
            turn=self.turn,
            reply=self._reply,
            outcomes=outcomes,
            ended=self.ended,
            seconds=seconds,
            uncounted=self.uncounted,
        )


def fold_thread(events: Iterable[Event], run: int, *, before: Sequence[Turn] = ()) -> list[Turn]:
    """Fold the events of one run into its turns, in the order the model saw them, after the turns `before`."""
    found = Thread(before)
    for event in events:
        if event.run == run:
            found.apply(event.body)
    return found.turns()


async def read_histories(log: LogReader, tree: str) -> Histories:
    """Read the events of a tree and of all trees that its runs continue, directly or indirectly. Raises LogDamaged if
    any event cannot be read, because a run must not continue from an incomplete history."""
    found: dict[str, list[Event]] = {}
    wanted = [tree]
    while wanted:
        name = wanted.pop()
        if name not in found and (events := await log.read(name)):
            if any(isinstance(event.body, Gap) and event.body.code == "damaged" for event in events):
                raise LogDamaged(
                    f"{name} cannot be resumed or continued: some of its events are damaged "
                    f"(`retinue tail {name}` shows which)"
                )
            found[name] = events
            wanted += [e.body.origin for e in events if isinstance(e.body, RunSpawned) and e.body.origin]
    return found


def list_continued(histories: Histories, tree: str, spawned: RunSpawned) -> list[tuple[str, int]]:
    """Return the runs that a run continues, directly or indirectly, as (tree, number), newest first. Raises LogError
    if a run of this chain is missing."""
    chain: list[tuple[str, int]] = []
    while spawned.continues is not None:
        tree, run = spawned.origin or tree, spawned.continues
        found = [e.body for e in histories.get(tree, ()) if e.run == run and isinstance(e.body, RunSpawned)]
        if not found or (tree, run) in chain:
            raise LogError(f"the thread begins with that of {tree}/{run}, which is not in the log any more")
        chain.append((tree, run))
        spawned = found[0]
    return chain


def fold_earlier_turns(histories: Histories, tree: str, spawned: RunSpawned) -> list[Turn]:
    """Return the turns a run had before its own task: the threads of all runs it continues."""
    turns: list[Turn] = []
    for origin, run in reversed(list_continued(histories, tree, spawned)):
        turns = fold_thread(histories[origin], run, before=turns)
    return turns


class OpenCall(Struct):
    """A tool call without a result. `asked`: a person was asked. `decision`: the answer, given for the tool with this
    `seal`. `started`: the answer has taken effect, so the tool may have run."""

    call_id: str
    name: str
    tier: str
    host: bool
    asked: bool = False
    started: bool = False
    decision: Decision | None = None
    seal: str = ""

    def decide(self, answer: ApprovalDecided) -> None:
        """Take the answer of a person. Arguments that an earlier answer changed stay changed: the call was asked about
        again with those."""
        earlier = self.decision.args if isinstance(self.decision, Allow) else None
        args = earlier if answer.args is None else answer.args
        self.decision = Allow(args=args) if answer.allowed else Deny(answer.reason)
        self.seal = answer.seal

    def may_have_run(self) -> bool:
        """Return True if the call may have run. A call that needed approval cannot have run before the answer took
        effect; a denied call has not run at all."""
        if self.tier == "none" or isinstance(self.decision, Deny):
            return False
        return self.started or not self.asked


class InterruptedRun(Struct, eq=False):
    """One run as its process left it. `tools` maps call ids to tool names; `told` are the children of whose ending the
    run was notified."""

    thread: Thread
    started: bool = False
    seconds: float = 0.0
    set_up: bool = False
    open: dict[str, OpenCall] = {}
    tools: dict[str, str] = {}
    told: set[int] = set()

    def apply(self, event: Event) -> None:
        body = event.body
        self.thread.apply(body)
        match body:
            case RunStarted():
                self.started = True
            case RunResumed():
                for call in self.open.values():  # open questions are asked again under a new id
                    call.asked = call.asked and call.decision is not None
            case ToolCall(call_id=call_id, name=name):
                self.open[call_id] = OpenCall(call_id, name, body.tier, body.host)
                self.tools[call_id] = name
            case ToolResult(call_id=call_id):
                if call_id in self.open:
                    call = self.open.pop(call_id)
                    self.set_up = self.set_up or (call.host and call.name == SETUP and body.success)
            case ApprovalAsked(call_id=call_id) if call_id in self.open:
                self.open[call_id].asked = True
            case ApprovalDecided(call_id=call_id) if call_id in self.open:
                self.open[call_id].decide(body)
            case ToolStarted(call_id=call_id) if call_id in self.open:
                self.open[call_id].started = True
            case Inbox(about=int() as about):
                self.told.add(about)
            case _:
                pass


def fold_interrupted_runs(
    events: Iterable[Event], *, before: Mapping[int, Sequence[Turn]]
) -> dict[int, InterruptedRun]:
    """Fold the events of a tree into its runs, by number. `before` has the earlier turns of runs that continue
    others."""
    runs: dict[int, InterruptedRun] = {}
    clocks = _Clocks()
    for event in events:
        clocks.apply(event)
        if isinstance(event.body, RunSpawned):
            runs[event.run] = InterruptedRun(Thread(before.get(event.run, ())))
        if event.run in runs:
            runs[event.run].apply(event)
    for run, seconds in clocks.measure_seconds().items():
        runs[run].seconds = seconds
    return runs


def find_standing_answers(events: Iterable[Event]) -> Iterable[tuple[int, ApprovalDecided]]:
    """Yield the approvals that hold for more than one call: for a tool in a run, or in the whole tree. Approvals in
    runs of a peer are about tools of the peer, and may be its own claims: they hold in the process that asked, and a
    resumed run asks again."""
    remote: set[int] = set()
    for event in events:
        body = event.body
        if isinstance(body, RunRemote) or (isinstance(body, RunSpawned) and body.remote_id):
            remote.add(event.run)
        if not isinstance(body, ApprovalDecided) or body.rule or event.run in remote:
            continue
        if body.allowed and body.scope in STANDING:
            yield event.run, body


_NEXT_MESSAGE = "the next message"


class _Clock(Struct, eq=False):
    """The working time of a run. The clock stops while a question of the run or of a run below it is open. Waiting for
    the next message of a conversation counts as a question. A question without a digest in a remote run (`is_remote`)
    was not asked here: that a person was asked about it is only the peer's claim, which stops no clock."""

    parent: _Clock | None
    used: float = 0.0
    since: float | None = None
    started: bool = False
    is_remote: bool = False
    questions: set[str] = set()

    def stop(self, at: float) -> None:
        if self.since is not None:
            self.used += max(0.0, at - self.since)
            self.since = None

    def ask(self, question: str, at: float) -> None:
        """Stop for a question, here and in all runs above."""
        self.stop(at)
        self.questions.add(question)
        if self.parent is not None:
            self.parent.ask(question, at)

    def answer(self, question: str, at: float) -> None:
        """Close a question, here and in all runs above. A clock runs again when no question is left."""
        if question in self.questions:
            self.questions.remove(question)
            self.since = self.since if self.questions else at
            if self.parent is not None:
                self.parent.answer(question, at)


class _Clocks:
    """The clocks of the runs of a tree, across all processes that ran it. They stop between a crash and the
    resumption. Runs that are resumed together write their `run.resumed` events in a row."""

    def __init__(self) -> None:
        self._runs: dict[int, _Clock] = {}
        self._last = 0.0
        self._resuming = False

    def apply(self, event: Event) -> None:
        body, at = event.body, event.at
        if isinstance(body, RunSpawned):
            above = None if body.parent is None else self._runs.get(body.parent)
            self._runs[event.run] = _Clock(above, is_remote=bool(body.remote_id))
        clock = self._runs.get(event.run)
        if clock is not None:
            self._apply_to_clock(clock, body, at)
        self._resuming = isinstance(body, RunResumed)
        self._last = at

    def _apply_to_clock(self, clock: _Clock, body: Body | Unknown, at: float) -> None:
        match body:
            case RunRemote() if not clock.is_remote:
                clock.is_remote = clock.started = True  # asked of the peer, whatever the peer says about its start
                clock.since = at
            case RunStarted() if not clock.is_remote:
                clock.started, clock.since = True, at
            case ApprovalAsked(approval_id=question, digest=digest) if digest or not clock.is_remote:
                clock.ask(question, at)
            case ApprovalDecided(approval_id=question):
                clock.answer(question, at)
            case RunWaiting():
                clock.ask(_NEXT_MESSAGE, at)
            case TurnStarted():
                clock.answer(_NEXT_MESSAGE, at)
            case RunEnded():
                for question in tuple(clock.questions):
                    clock.answer(question, at)
                clock.stop(at)
            case RunResumed():
                if not self._resuming:
                    self._stop_all()
                clock.since = at if clock.started and not clock.questions else None

    def _stop_all(self) -> None:
        """Stop all clocks at the time of the last event, when the process was last known to be alive."""
        for clock in self._runs.values():
            clock.stop(self._last)
            clock.questions &= {_NEXT_MESSAGE}

    def measure_seconds(self) -> dict[int, float]:
        """Return the working seconds of each run until the newest event of the tree."""
        self._stop_all()
        return {run: clock.used for run, clock in self._runs.items()}


# Records for a replay


def fold_records(events: Iterable[Event]) -> dict[int, RunRecord]:
    """Return the records of one tree's runs by number, in the order the runs were spawned.

    Runs reported by an MCP server are left out: a replay uses only the result of their call. A run at a peer is marked
    as remote, with all runs below.
    """
    folds: dict[int, _RunFold] = {}
    for event in events:
        body = event.body
        if isinstance(body, RunSpawned):
            if body.server:
                continue
            record = RunRecord(number=event.run, path=event.path, agent=event.agent, spawned=body, events=1)
            folds[event.run] = _RunFold(record)
            if body.remote_id:
                record.mark_remote()
            if body.parent is not None and body.parent in folds:
                folds[body.parent].add_child(record)
        elif event.run in folds:
            if isinstance(body, RunRemote):
                folds[event.run].record.mark_remote()
            folds[event.run].apply(body)
    for fold in folds.values():
        fold.finish()
    return {number: fold.record for number, fold in folds.items()}


class _RunFold:
    """The record of one run while its events arrive. `_inbox` are the messages since the last turn; `_open_calls` are
    calls without a result."""

    def __init__(self, record: RunRecord) -> None:
        self.record = record
        self._inbox: list[Inbox] = []
        self._thread = Thread(strict=False)
        self._thread.apply(record.spawned)
        self._open_calls: dict[str, CallRecord] = {}

    def apply(self, body: Body | Unknown) -> None:
        record = self.record
        if record.cut or record.ended is not None:
            return
        if isinstance(body, RunResumed):
            record.cut_off(RESUMED)
            return
        record.count_event()
        self._thread.apply(body)
        match body:
            case TurnStarted():
                thread = tuple(self._thread.turns())
                record.turns.append(TurnRecord(number=body.turn, inbox=self._inbox, thread=thread))
                self._inbox = []
            case Inbox():
                self._inbox.append(body)
            case RunWaiting(after="interrupted"):  # the loop adds the same notice
                self._inbox.insert(0, Inbox(INTERRUPTED_TURN, source=NOTICE))
            case RunWaiting(after="failed" | "refused"):
                record.cut_off(NO_REPLY)
            case Message() if body.host:
                self._find_steps().append(body)
            case ToolCall() if body.host:
                self._add_host_call(body)
            case ApprovalAsked() | ApprovalDecided() | ToolResult() if body.call_id in self._open_calls:
                self._apply_to_call(self._open_calls[body.call_id], body)
            case RunEnded():
                record.end(body)
            case _:
                if record.turns:
                    self._apply_to_turn(record.turns[-1], body)

    def add_child(self, child: RunRecord) -> None:
        """Add a child run to the steps of its call. A run that continues another was started by a person and has no
        call."""
        if child.spawned.continues is None:
            call = self._open_calls.get(child.spawned.call_id)
            (self._find_steps() if call is None else call.steps).append(child)
        self.record.children.append(child)

    def finish(self) -> None:
        """Complete the record after the last event."""
        record, ended = self.record, self.record.ended
        if not record.cut:
            record.cut_off(NEVER_ENDED if ended is None else _ENDED_FROM_OUTSIDE.get(ended.status, ""))
        if not record.turns or record.turns[-1].whole:
            return
        last = record.turns[-1]
        if ended is not None and ended.status == "refused":
            thoughts = () if last.reply is None else last.reply.thoughts
            last.set_reply(Reply(ended.final_response, thoughts=thoughts, usage=last.usage, refused=True))
        elif last.reply is not None and not last.calls and record.cut:
            last.set_reply(None)  # its calls were never written

    def _find_steps(self, within: str = "") -> list[Step]:
        """Return the list of steps for an action of a host function: the steps of call `within`, else of the model's
        newest open call, else of the run."""
        if within in self._open_calls:
            return self._open_calls[within].steps
        calls = [call for call in self._open_calls.values() if not call.body.host]
        return calls[-1].steps if calls else self.record.steps

    def _add_host_call(self, body: ToolCall) -> None:
        if body.name != SETUP:  # setup only changes the workspace, which a replay does not
            call = self._open_calls[body.call_id] = CallRecord(body)
            self._find_steps(body.within).append(call)

    def _apply_to_call(self, call: CallRecord, body: ApprovalAsked | ApprovalDecided | ToolResult) -> None:
        call.apply(body)
        if isinstance(body, ToolResult):
            del self._open_calls[body.call_id]
            if call.body.tier == "none":
                self._add_problem(body)

    def _add_problem(self, body: ToolResult) -> None:
        """Add the result of a call that could not run to the reply as its `problem`, so that a replay refuses the call
        again."""
        turn = self.record.turns[-1]
        if turn.reply is not None:
            calls = (
                structs.replace(call, problem=body.text) if call.id == body.call_id else call
                for call in turn.reply.calls
            )
            turn.set_reply(structs.replace(turn.reply, calls=tuple(calls)))

    def _apply_to_turn(self, turn: TurnRecord, body: Body | Unknown) -> None:
        """Add an event of the model's turn: usage, thought, message, call or result."""
        match body:
            case UsageReported():
                turn.add_usage(body.usage)
            case TurnEnded():
                turn.end()
            case Thinking() | Message() | ToolCall() | ToolResult():
                turn.set_reply(extend_reply(turn.reply or Reply(), body, strict=False))
        if isinstance(body, ToolCall) and body.tier != "provider":
            turn.calls[body.call_id] = self._open_calls[body.call_id] = CallRecord(body)
