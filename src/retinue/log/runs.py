"""The fold of a tree's events into its runs: their names, states, tool calls, usage and results.

The supervisor keeps one of these while a tree lives; `ps`, `show` and every screen make the same from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from msgspec import Struct, structs

from retinue.core.events import (
    KINDS,
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Event,
    Message,
    RunEnded,
    RunRemote,
    RunResumed,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    TurnStarted,
    Unknown,
    UsageReported,
    Warned,
)
from retinue.core.ports import Row
from retinue.core.results import STATUSES, Result, ToolLog, ending_texts
from retinue.core.usage import NO_USAGE, Usage
from retinue.log.summaries import describe_call, summarize_result

NOTHING = Decimal(0)


class RunView(Struct, eq=False):
    """One run as its events tell it. `unpriced` are the tokens of calls whose price is not known."""

    number: int
    path: str
    agent: str
    spawned_at: float
    spawned: RunSpawned
    started_at: float | None = None
    place: RunStarted | None = None
    remote: RunRemote | None = None
    ended_at: float | None = None
    ended: RunEnded | None = None
    turns: int = 0
    tool_count: int = 0
    tool_logs: tuple[ToolLog, ...] = ()
    usage: Usage = NO_USAGE
    cost: Decimal = NOTHING
    unpriced: int = 0
    last_seq: int = 0
    stalled_seq: int = 0
    last_message: str = ""
    calls: tuple[ToolCall, ...] = ()
    approvals: tuple[ApprovalAsked, ...] = ()
    children: tuple[RunView, ...] = ()
    warnings: tuple[str, ...] = ()
    _result: Result[Any] | None = None

    @property
    def label(self) -> str:
        return self.spawned.label

    @property
    def status(self) -> str | None:
        return None if self.ended is None else self.ended.status

    @property
    def state(self) -> str:
        """The live state, or the status of an ended run."""
        if self.ended is not None:
            return self.ended.status
        if self.started_at is None:
            return "queued" if self.spawned.queued else "starting"
        if self.approvals:
            return "waiting_approval"
        if self.stalled_seq and all(run.last_seq <= self.stalled_seq for run in self.walk()):
            return "stalled"
        if self.calls and all(call.waits for call in self.calls):
            return "waiting_children"
        return "running"

    def apply(self, event: Event) -> None:
        self.last_seq = event.seq
        fold = FOLDS[type(event.body)]
        if fold is not None and self.ended is None:
            fold(self, event, event.body)

    def walk(self) -> Iterable[RunView]:
        """Yield this run and all below it, parents before children."""
        yield self
        for child in self.children:
            yield from child.walk()

    def result(self, tree: str) -> Result[Any]:
        """Return the result of an ended run, with those of its children. Made once: nothing follows an ending."""
        if self._result is None:
            self._result = self._make_result(tree)
        return self._result

    def _make_result(self, tree: str) -> Result[Any]:
        ended = self.ended
        if ended is None:
            raise ValueError(f"run {self.path} has not ended")
        if ended.status not in STATUSES:
            text, details = ending_texts("failed", name=self.agent, primary=False)
            ended = structs.replace(ended, status="failed", final_response=text, error_details=details)
        place, spawned = self.place, self.spawned
        return Result(  # by position: so many names would take seven times as long
            self.agent,
            ended.final_response,
            self.turns,
            self.tool_count,
            self.tool_logs,
            self.usage,
            None if self.unpriced else self.cost,
            ended.status == "done",
            ended.duration_ms,
            ended.error_details,
            ended.status,  # type: ignore[arg-type]
            tree,
            self.number,
            self.path,
            spawned.label,
            spawned.subagent_id,
            spawned.workspace,
            ended.structured,
            ended.partial,
            "; ".join(self.warnings) if self.warnings else None,
            ended.changed_files,
            ended.changed_count,
            "inherited" if place is None else place.runtime,
            () if place is None else place.sandbox,
            ended.code,
            tuple([child.result(tree) for child in self.children if child.ended is not None]),
        )


def _apply_started(run: RunView, event: Event, body: RunStarted) -> None:
    if run.started_at is None:
        run.started_at = event.at
    run.place = body  # of one that goes on, where it does that


def _apply_remote(run: RunView, _: Event, body: RunRemote) -> None:
    run.remote = body


def _apply_resumed(run: RunView, _: Event, __: RunResumed) -> None:
    run.approvals = ()  # what is still a question is asked again


def _apply_turn(run: RunView, _: Event, body: TurnStarted) -> None:
    run.turns = body.turn


def _apply_message(run: RunView, _: Event, body: Message) -> None:
    if body.text and not (body.host and run.spawned.model):  # a callable has no other words than its own
        run.last_message = body.text


def _apply_call(run: RunView, _: Event, body: ToolCall) -> None:
    run.tool_count += not body.host or bool(body.within)
    run.calls += (body,)


def _apply_tool_result(run: RunView, _: Event, body: ToolResult) -> None:
    if body.sandbox and run.place is not None:  # what really stood, where that was seen
        run.place = structs.replace(run.place, sandbox=body.sandbox)
    call = _take_call(run, body.call_id)
    about, shown = "", body.name
    if call is not None:
        if call.host and not call.within:
            return
        about, shown = describe_call(call.name, call.args), call.display_name or shown
    line = summarize_result(body.name, body.text, body.success)
    run.tool_logs += (ToolLog(body.name, shown, about, line, body.success, body.duration_ms),)


def _take_call(run: RunView, call_id: str) -> ToolCall | None:
    """Remove the call of that id from the open ones and return it."""
    for call in run.calls:
        if call.call_id == call_id:
            run.calls = () if len(run.calls) == 1 else tuple([other for other in run.calls if other is not call])
            return call
    return None


def _apply_asked(run: RunView, _: Event, body: ApprovalAsked) -> None:
    run.approvals += (body,)


def _apply_decided(run: RunView, _: Event, body: ApprovalDecided) -> None:
    if run.approvals:
        run.approvals = tuple(asked for asked in run.approvals if asked.approval_id != body.approval_id)
    if body.args is not None:  # what runs is the call as it was edited
        args = body.args
        run.calls = tuple(
            structs.replace(call, args=args) if call.call_id == body.call_id else call for call in run.calls
        )


def _apply_usage(run: RunView, _: Event, body: UsageReported) -> None:
    usage = body.usage
    run.usage = usage if run.usage is NO_USAGE else run.usage + usage
    if body.cost is None:
        run.unpriced += usage.input_tokens + usage.output_tokens
    else:
        run.cost += body.cost


def _apply_warning(run: RunView, event: Event, body: Warned) -> None:
    if body.code == "stalled":
        run.stalled_seq = event.seq
    run.warnings += (body.text,)


def _apply_ended(run: RunView, event: Event, body: RunEnded) -> None:
    run.ended = body
    run.ended_at = event.at
    run.calls = ()
    run.approvals = ()


FOLDS: dict[type[Body | Unknown], Callable[[RunView, Event, Any], None] | None] = {
    **dict.fromkeys((*KINDS.values(), Unknown)),
    RunStarted: _apply_started,
    RunRemote: _apply_remote,
    RunResumed: _apply_resumed,
    TurnStarted: _apply_turn,
    Message: _apply_message,
    ToolCall: _apply_call,
    ToolResult: _apply_tool_result,
    ApprovalAsked: _apply_asked,
    ApprovalDecided: _apply_decided,
    UsageReported: _apply_usage,
    Warned: _apply_warning,
    RunEnded: _apply_ended,
}


class Runs(Struct, eq=False):
    """All runs of one tree. An event of a run nobody has spawned yet, or after its ending, changes nothing."""

    tree: str
    runs: dict[int, RunView] = {}

    @classmethod
    def of(cls, tree: str, events: Iterable[Event]) -> Runs:
        runs = cls(tree)
        for event in events:
            runs.apply(event)
        return runs

    @property
    def primary(self) -> RunView | None:
        return self.runs.get(0)

    def apply(self, event: Event) -> RunView | None:
        """Fold one event; return its run."""
        run = self.runs.get(event.run)
        if run is not None:
            run.apply(event)
        elif isinstance(event.body, RunSpawned):
            run = self.spawn(event, event.body)
        return run

    def spawn(self, event: Event, body: RunSpawned) -> RunView:
        """Add a new run, with its first event."""
        run = self.runs[event.run] = RunView(event.run, event.path, event.agent, event.at, body)
        run.last_seq = event.seq
        parent = None if body.parent is None else self.runs.get(body.parent)
        if parent is not None:
            parent.children += (run,)
        return run

    def queue_position(self, number: int) -> int:
        """Return 1 for the run that gets the next free slot, 0 for one that does not wait."""
        queued = [run.number for run in self.runs.values() if run.state == "queued"]
        return queued.index(number) + 1 if number in queued else 0

    def counts(self) -> tuple[int, int, int]:
        """Primary, running and finished runs, as the status bar says them."""
        spawned = [run for run in self.runs.values() if run.number != 0]
        finished = sum(run.ended is not None for run in spawned)
        return int(0 in self.runs), len(spawned) - finished, finished

    def usage(self) -> Usage:
        return sum((run.usage for run in self.runs.values()), NO_USAGE)


def describe_view(view: RunView, tree: str) -> Row:
    """Return one run of a view as a row of a list."""
    spawned = view.spawned
    return Row(
        run=view.number,
        parent=spawned.parent,
        path=view.path,
        label=view.label,
        agent=view.agent,
        subagent_id=spawned.subagent_id,
        state=view.state,
        status=view.status,
        task=spawned.task,
        workspace=spawned.workspace,
        created_at=view.spawned_at,
        result=view.result(tree) if view.ended is not None else None,
        call_id=spawned.call_id,
        timeout_seconds=spawned.timeout_seconds,
        started_at=view.started_at,
        turns=view.turns,
        tool_count=view.tool_count,
        last_message=view.last_message,
    )
