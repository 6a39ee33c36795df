"""The fold of a tree's events and deltas into its present: what is at work, what is awaited, what was asked, what is
spent and left.

A live screen shows this below the lines that last. Holds one `Runs`, and of runs that have not ended what no event
tells: when a wait began, and the end of what is being said. Text is left as models and tools gave it.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Literal

import msgspec

from retinue.core.approvals import Approval
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Delta,
    Event,
    Inbox,
    Message,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunStarted,
    Thinking,
    ToolCall,
    ToolResult,
    TurnStarted,
)
from retinue.log.runs import NOTHING, Runs, RunView

SPOKEN_CHARACTERS = 4000
Kind = Literal["model", "thinking", "text", "call"]


class Work(msgspec.Struct, frozen=True):
    """Something that goes on now: a model that is awaited or speaks, or a call. `text` is the end of what it has said
    or printed so far, `since` when it began. `label` is None for the primary."""

    run: int
    agent: str
    label: str | None
    kind: Kind
    since: float
    text: str = ""
    call: ToolCall | None = None


class Totals(msgspec.Struct, frozen=True):
    """Agents, tokens, cost and time of a tree, and what is left of its budget (None: no limit)."""

    primary: int = 0
    running: int = 0
    finished: int = 0
    tokens: int = 0
    cost: Decimal = NOTHING
    unpriced: int = 0
    seconds: float = 0.0
    tokens_left: int | None = None
    cost_left: Decimal | None = None
    seconds_left: float | None = None


class _Present:
    """The present of a run that has not ended: since when its model is awaited, what it says and in which turn, when
    its calls began."""

    __slots__ = ("began", "kind", "outputs", "since", "spoken", "turn")

    def __init__(self, at: float) -> None:
        self.since = at
        self.kind: Kind = "model"
        self.spoken, self.turn = "", 0
        self.outputs: dict[str, str] = {}  # the newest output of its calls
        self.began: dict[str, float] = {}


class Activity:
    """Takes the events of a tree from its first, and the deltas between them. `questions` are those that wait, in the
    order they were asked."""

    def __init__(self, tree: str) -> None:
        self.runs = Runs(tree)
        self.questions: dict[str, Approval] = {}
        self._asked = 0
        self._live: dict[int, _Present] = {}

    def apply(self, item: Event | Delta) -> None:
        """Fold one event or delta."""
        if isinstance(item, Delta):
            self._apply_delta(item)
            return
        self.runs.apply(item)
        present = self._live.get(item.run)
        if present is None:
            if isinstance(item.body, RunSpawned | RunResumed):
                self._live[item.run] = _Present(item.at)
            return
        self._apply_event(item, present)

    def _apply_event(self, event: Event, present: _Present) -> None:
        match event.body:
            case RunStarted():
                present.since = event.at
            case TurnStarted(turn=turn):
                present.since = event.at
                self._end_speech(event.run, present, before=turn)
            case Thinking() | Message() | Inbox():
                self._end_speech(event.run, present)
            case ToolCall(call_id=call_id):
                present.began[call_id] = event.at
                self._end_speech(event.run, present)
            case ToolResult(call_id=call_id):
                present.began.pop(call_id, None)
                present.outputs.pop(call_id, None)
                present.since = event.at
            case ApprovalAsked() as asked:
                self._asked += 1
                self.questions[asked.approval_id] = restore_approval(event, asked, self._asked)
            case ApprovalDecided(approval_id=approval_id, call_id=call_id):
                if self.questions.pop(approval_id, None) is not None:
                    present.began[call_id] = event.at  # what a person takes is no time of the call
            case RunResumed() | RunEnded():
                self._drop_questions(event.run)
                if isinstance(event.body, RunEnded):
                    del self._live[event.run]

    def _end_speech(self, number: int, present: _Present, *, before: int | None = None) -> None:
        """Forget what a run was saying, because an event has it, or a turn began: that of the turns `before`, or up to
        the one that the log has reached. A delta is shown at once, and may come before the event of its turn."""
        if before is None:
            before = self.runs.runs[number].turns + 1
        if present.turn < before:
            present.kind, present.spoken = "model", ""

    def _apply_delta(self, delta: Delta) -> None:
        present = self._live.get(delta.run)
        if present is None:
            return
        if delta.kind == "output":
            call_id = delta.call_id or next(reversed(present.began), "")  # a peer does not say which
            before = present.outputs.get(call_id, "")
            present.outputs[call_id] = (before + delta.text)[-SPOKEN_CHARACTERS:]
        elif delta.kind in ("text", "thinking"):
            kind: Kind = "text" if delta.kind == "text" else "thinking"
            begins = kind == "text" and delta.offset == 0  # or begins again after a failed attempt
            spoken = present.spoken if present.kind == kind and not begins else ""
            present.kind, present.spoken = kind, (spoken + delta.text)[-SPOKEN_CHARACTERS:]
            present.turn = delta.turn

    def _drop_questions(self, run: int) -> None:
        for approval_id in [each.id for each in self.questions.values() if each.run == run]:
            del self.questions[approval_id]

    def list_work(self) -> list[Work]:
        """Return what goes on now, the primary first. Calls that wait for other runs or for a person are no work."""
        asked = {(question.run, question.call_id) for question in self.questions.values()}
        return [work for number, present in self._live.items() for work in self._list_work_of(number, present, asked)]

    def _list_work_of(self, number: int, present: _Present, asked: set[tuple[int, str]]) -> list[Work]:
        run = self.runs.runs.get(number)
        if run is None or run.started_at is None:
            return []
        label = run.label if number else None
        open_calls = [call for call in run.calls if not call.waits and (number, call.call_id) not in asked]
        works = [
            Work(
                run=number,
                agent=run.agent,
                label=label,
                kind="call",
                since=present.began.get(call.call_id, present.since),
                text=present.outputs.get(call.call_id, ""),
                call=call,
            )
            for call in open_calls
        ]
        if not run.calls and not run.waits and _has_model(run):
            since, text = present.since, present.spoken
            works.append(Work(run=number, agent=run.agent, label=label, kind=present.kind, since=since, text=text))
        return works

    def measure_totals(self, now: float) -> Totals:
        """Return the totals at this time of the wall clock."""
        every, primary = self.runs.runs.values(), self.runs.primary
        counts = self.runs.counts()
        tokens, cost = self.runs.usage().total_tokens, sum((run.cost for run in every), NOTHING)
        first = min(self.runs.runs, default=0) if primary is None else 0
        root = self.runs.runs.get(first)
        seconds = 0.0 if root is None else root.measure_seconds(now)
        spawned = None if root is None else root.spawned
        most, most_cost = (None, None) if spawned is None else (spawned.max_tokens, spawned.max_cost)
        time_limit = None if spawned is None else spawned.timeout_seconds
        return Totals(
            primary=counts[0],
            running=counts[1],
            finished=counts[2],
            tokens=tokens,
            cost=cost,
            unpriced=sum(run.unpriced for run in every),
            seconds=seconds,
            tokens_left=None if most is None else max(0, most - tokens),
            cost_left=None if most_cost is None else max(NOTHING, most_cost - cost),
            seconds_left=None if time_limit is None else max(0.0, time_limit - seconds),
        )


def _has_model(run: RunView) -> bool:
    """Return whether a model is awaited by the run: not by one that stands for a client or lives elsewhere."""
    return run.turns > 0 or bool(run.spawned.model)


def restore_approval(event: Event, asked: ApprovalAsked, number: int = 0) -> Approval:
    """Return a question of the log as surfaces show it."""
    return Approval(
        id=asked.approval_id,
        tree=event.tree,
        run=event.run,
        path=event.path,
        agent=event.agent,
        tool=asked.tool,
        args=asked.args,
        call_id=asked.call_id,
        label=asked.label,
        preview=asked.preview,
        rule=asked.rule,
        digest=asked.digest,
        number=number,
    )
