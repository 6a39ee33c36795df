"""One tree: its runs, its slots, the order of its events and the messages to its runs. Also the registry of the live
trees of this process.

Writing an event means to number it, fold it into the tree's view and append it to the log. If secrets are known, every
event is redacted first, so that log, results, screens and files are clean alike. A run whose event the log refuses,
because this process may no longer write, is stopped: every run of the tree at its next event.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from retinue.core import events, secrets
from retinue.core.errors import ConfigError, LogLost
from retinue.core.events import Body, Event, Inbox, RunSpawned
from retinue.core.messages import NOTICE, UserTurn
from retinue.core.ports import Clock, Log, Receipt
from retinue.core.sendable import repair_text
from retinue.core.traces import NO_ORIGIN, FindOrigin, TraceOrigin
from retinue.log.runs import FOLDS, Runs
from retinue.supervisor.run import Run
from retinue.supervisor.slots import Slots

_DIGITS = b"0123456789abcdefghjkmnpqrstvwxyz"  # without letters that look like digits
_DIGIT_OF_BYTE = _DIGITS * 8
_RANDOM = random.Random()  # not the generator of `random` itself, which a program may seed
os.register_at_fork(after_in_child=_RANDOM.seed)
W = TypeVar("W", bound=Log)
B = TypeVar("B", bound=Body)
USER = "user"
MAX_MESSAGE = 256 * 1024
NOT_AT_WORK = Receipt("too_late", why="no such run is at work here")


def new_tree_id() -> str:
    """Return twelve random characters, unique across processes and machines without coordination. Ids differ from the
    first character on, because people type only the beginning."""
    return _RANDOM.randbytes(12).translate(_DIGIT_OF_BYTE).decode()


def new_span_id() -> str:
    """Return the id of a run's span, as traces write it."""
    return _RANDOM.randbytes(8).hex()


class Tree:
    """The unit of limits, cancellation and event order. `root` is the run that the tree ends with: its primary, or a
    new run that continues an ended run in a finished tree."""

    __slots__ = (
        "_labels", "_now", "id", "log", "root", "runs", "seq", "slots", "trace_id", "trace_origin", "view",
    )  # fmt: skip

    def __init__(
        self,
        log: Log,
        clock: Clock,
        *,
        concurrent: int | None = None,
        trace: FindOrigin | None = None,
        restored: Runs | None = None,
        seq: int = 0,
    ) -> None:
        """Make a new tree, or rebuild the tree of an earlier process from the view `restored`, which ends with the
        event `seq`."""
        self.id = new_tree_id() if restored is None else restored.tree
        self.trace_origin = NO_ORIGIN if trace is None else trace()
        self.trace_id = self.trace_origin.traceparent[3:35] or _RANDOM.randbytes(16).hex()
        self.runs: list[Run] = []
        self.view = Runs(self.id) if restored is None else restored
        self.slots = Slots(concurrent)
        self.log: Log = log
        self.root: Run | None = None
        self.seq = seq
        self._labels: dict[str, int] = {}
        self._now = clock.wall
        if restored is not None:
            first = restored.runs[0].spawned
            self.trace_id, self.trace_origin = first.trace_id, TraceOrigin(first.traceparent, first.baggage)
            self._labels = {view.label: 1 for view in restored.runs.values()}

    def add_run(self, run: Run) -> None:
        """Add a run to the tree and to the children of its parent."""
        self.runs.append(run)
        if run.parent is not None:
            run.parent.add_child(run)

    def find_run(self, number: int) -> Run | None:
        return self.runs[number] if 0 <= number < len(self.runs) else None

    def wrap_log(self, wrap: Callable[[Log], W]) -> W:
        """Wrap the tree's log, so that the wrapper sees every event from now on. Return the wrapper."""
        self.log = wrapped = wrap(self.log)
        return wrapped

    def open(self, run: Run, body: RunSpawned) -> Awaitable[None] | None:
        """Write the first event of a run."""
        if secrets.known:
            body = redact(body)
        self.seq += 1
        ref = run.ref
        # Positional here and in `write`: keywords take 0.5 % of the instructions of a run (`bench counts`).
        event = Event(self.seq, self.id, ref.run, ref.path, ref.agent, self._now(), body)
        run.attach_view(self.view.spawn(event, body))
        try:
            return self.log.append(event, True)
        except LogLost as lost:
            return _stop_unlogged(run, lost, wait=True)

    def write(self, run: Run, body: Body, wait: bool = False, /) -> Awaitable[None] | None:
        """Write an event of a run. Does nothing after the ending of the run. With `wait`, the returned awaitable, if
        any, is done when the event is in the log."""
        view = run.view
        if view.ended is not None:
            return None
        if secrets.known:
            body = redact(body)
        self.seq = seq = self.seq + 1
        if run.stall_timer is not None:
            run.stall_timer.record_activity()
            view.record_event(seq)  # only the state `stalled` asks for the newest event of a live run
        ref, now = run.ref, self._now  # a local name: `self._now()` would look for a method first
        event = Event(seq, self.id, ref.run, ref.path, ref.agent, now(), body)  # type: ignore[arg-type] # one of KINDS
        apply_body = FOLDS[type(body)]  # as in `RunView.apply`: the call alone is 4 % of a run (`bench counts`)
        if apply_body is not None:
            apply_body(view, body, event)
        try:
            return self.log.append(event, wait)
        except LogLost as lost:
            return _stop_unlogged(run, lost, wait=wait)

    async def send_message(self, number: int, text: str, *, source: str = USER, message_id: str = "") -> Receipt:
        """Send a message to a run. Write the message and put it in the inbox in one step, so that the log has it
        before the run can read it. For a remote run, the message goes to the peer, and is written when the peer
        confirms it."""
        run = self.find_run(number)
        if run is None:
            return NOT_AT_WORK
        if run.ended:
            return Receipt("too_late", why=f"the run has ended: {run.view.status}")
        if run.is_stopping:
            return Receipt("too_late", why="the run is stopping")
        if run.relay is not None:
            return await run.relay(text, message_id)
        if run.plan.team is not None:
            return await self._send_to_members(run, text, source=source, message_id=message_id)
        text = repair_text(text)
        written = self.write(run, Inbox(text, source=source, message_id=message_id), True)
        seq = self.seq
        run.post_message(UserTurn(text, source))
        if written is not None:
            await written
        return Receipt("queued", seq)

    async def _send_to_members(self, team: Run, text: str, *, source: str, message_id: str) -> Receipt:
        """Send a message to all members of a team that are at work. Return one receipt for all."""
        receipts = {
            member.ref.run: await self.send_message(member.ref.run, text, source=source, message_id=message_id)
            for member in team.children
            if not member.is_stopping
        }
        queued = {number: receipt.seq for number, receipt in receipts.items() if receipt.state == "queued"}
        if not queued:
            return Receipt("too_late", why="no member of the team is at work")
        return Receipt("queued", min(queued.values()), readers=tuple(queued))

    def notify_parent(self, child: Run) -> None:
        """Tell the parent of a background child that the child has ended."""
        parent, number, status = child.parent, child.ref.run, child.view.status
        assert parent is not None
        label = child.ref.label
        text = f"agent:{number} [{label}] has ended: {status}. get_agent with agent_id {number} gives its result."
        self.write(parent, Inbox(text, source=NOTICE, about=number))
        parent.post_message(UserTurn(text, NOTICE))

    def unique_label(self, wanted: str) -> str:
        """Return the label `wanted`, or `wanted-2` and so on if the tree has it already."""
        label = wanted
        while label in self._labels:
            self._labels[wanted] += 1
            label = f"{wanted}-{self._labels[wanted]}"
        self._labels[label] = 1
        return label

    def next_approval_id(self, run: Run) -> str:
        """Return a new approval id, made of the number of the next event. No text of a model or a peer goes into the
        id."""
        return f"{self.id}/{run.ref.run}/{self.seq + 1}"

    def kill(self) -> None:
        """Stop all runs at once, without waiting for their cleanup."""
        for run in self.runs:
            run.kill()

    def release(self) -> None:
        """Cut the reference cycles of an ended tree, so that its memory is freed without a garbage collection."""
        for run in self.runs:
            run.release()


def _stop_unlogged(run: Run, lost: LogLost, *, wait: bool) -> Awaitable[None] | None:
    """Stop a run whose event was refused. The awaitable raises `lost`, but not at once: a run that awaits it is
    cancelled first, like any run that is stopped, and can clean up."""
    run.stop("cancelled", failure=str(lost))
    if not wait:
        return None
    loop = asyncio.get_running_loop()
    refused: asyncio.Future[None] = loop.create_future()
    loop.call_soon(_fail_quietly, refused, lost)
    return refused


def _fail_quietly(waiter: asyncio.Future[None], error: LogLost) -> None:
    """Fail a waiter, unless it was cancelled. Nobody need await it."""
    if not waiter.done():
        waiter.set_exception(error)
        waiter.exception()


# The fields of each kind of event that hold text of users, models, tools or peers. Other kinds hold none. A profile
# and its tools are redacted when the plan is made, once for all its runs.
_TEXT_FIELDS: dict[type[Body], tuple[str, ...]] = {
    events.RunSpawned: ("label", "task", "subagent_id", "task_context", "context_paths"),
    events.Thinking: ("text",),
    events.Message: ("text",),
    events.ToolCall: ("args", "raw", "name", "display_name", "call_id"),
    events.ToolResult: ("text", "content", "name", "call_id"),
    events.ApprovalAsked: ("args", "preview", "label", "rule", "tool", "call_id"),
    events.ApprovalDecided: ("reason", "by", "rule", "args", "tool", "call_id"),
    events.Inbox: ("text",),
    events.ProgressReported: ("nickname", "tool_name", "tool_context"),
    events.AnswerGiven: ("text", "call_id"),
    events.AnswersShown: ("missed",),
    events.VoteCast: ("reason", "call_id"),
    events.MemberLost: ("reason",),
    events.RoundAnswered: ("text", "call_id"),
    events.RoundEvaluated: ("packet", "tasks", "problems"),
    events.ChecklistAccepted: ("call_id",),
    events.ImprovementsProposed: ("improvements", "call_id"),
    events.RoundVoted: ("reason", "call_id"),
    events.Warned: ("text",),
    events.RunWaiting: ("text",),
    events.RunEnded: ("final_response", "error_details", "partial", "structured", "changed_files"),
}


def redact(body: B) -> B:
    """Return `body`, or a copy without secrets if it contains any."""
    names = _TEXT_FIELDS.get(type(body))
    if names is None:
        return body
    changes = None
    for name in names:
        value = getattr(body, name)
        if value:
            cleaned = secrets.clean_text(value) if type(value) is str else secrets.clean_value(value)
            if cleaned is not value:
                changes = {**(changes or {}), name: cleaned}
    return body if changes is None else msgspec.structs.replace(body, **changes)


def check_message(text: str) -> str:
    """Return the text of a message as the log can keep it. Raises ConfigError if the text is empty or too long."""
    message = text.encode("utf-8", "replace").decode()
    if not message.strip():
        raise ConfigError("there is nothing to send: the text is empty")
    if len(message.encode()) > MAX_MESSAGE:
        kib = MAX_MESSAGE // 1024
        raise ConfigError(f"the text is larger than {kib} KiB: put it in a file that the agent can read")
    return message


class TreeRegistry(dict[str, Tree]):
    """The live trees of this process, by id, and their log."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log

    def add(self, tree: Tree, root: Run) -> None:
        """Add a tree that ends when its `root` ends."""
        tree.root = root
        self[tree.id] = tree

    def find_run(self, tree: str, number: int) -> Run | None:
        """Return a run of a live tree, or None."""
        found = self.get(tree)
        return None if found is None else found.find_run(number)
