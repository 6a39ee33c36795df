"""The folds of a tree's events for a live screen: the work in progress, and the permanent lines above it.

`Activity` is the present: running work, open questions, totals and remaining budget. It folds events and deltas,
contains one `Runs`, and adds state of live runs that is in no event: when a wait began, and the tail of the streamed
text.

`Entries` gives the permanent lines, one compact entry per call. It builds on `Blocks`, which decides which replies to
show and which to hold back. A call gets its entry when its result arrives, with its diff or the tail of its output.
Texts of models and tools are not escaped.

`ProgressLines` is for a client that shows a single line. `describe_team` is one line about a team: its progress, or its
outcome.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal
from functools import partial
from typing import Any, Literal

import msgspec

from retinue.core.approvals import Approval
from retinue.core.events import (
    INTERRUPTED,
    AnswerGiven,
    ApprovalAsked,
    ApprovalDecided,
    Delta,
    Event,
    Inbox,
    MemberLost,
    Message,
    RoundAnswered,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunStarted,
    TeamDecided,
    Thinking,
    ToolCall,
    ToolResult,
    TurnStarted,
    VoteCast,
)
from retinue.core.messages import ASKER, NOTICE, USER_WORDS
from retinue.core.results import FINAL_ANSWER
from retinue.core.teams import TEAM_TOOL_NAMES, TeamState
from retinue.log.blocks import Block, Blocks, Span, format_count, make_call_spans, make_team_spans
from retinue.log.questions import Questions
from retinue.log.runs import NO_RUNS, NOTHING, RunCounts, Runs, RunView
from retinue.log.summaries import describe_call, shorten_text, summarize_result

SPOKEN_CHARACTERS = 4000
SLOW_MS = 1000
TASK_CHARACTERS = 60
ANSWER_CHARACTERS = 72
ELSEWHERE = "  asked and answered at the peer"
Style = Literal["markdown", "diff", "output", "faint"]
_FILE_TOOLS = ("edit", "write")
_OUTPUT_TOOLS = ("shell", "bash", "execute_python", "execute_go_code")
_PLAIN_ANSWERS = ("user", "")
Kind = Literal["model", "thinking", "text", "call", "team"]


class Work(msgspec.Struct, frozen=True):
    """A piece of work in progress: a model that is awaited or streaming, a tool call, or a team. `text` is the tail of
    the text or output so far; for a team, its progress. `since` is the start time. `label` is None for the primary.
    `is_member` marks the work of a team member, listed below the team."""

    run: int
    agent: str
    label: str | None
    kind: Kind
    since: float
    text: str = ""
    call: ToolCall | None = None
    is_member: bool = False


class Totals(msgspec.Struct, frozen=True):
    """The agents, tokens, cost and time of a tree, and the rest of its budget (None: no limit)."""

    agents: RunCounts = NO_RUNS
    tokens: int = 0
    cost: Decimal = NOTHING
    unpriced: int = 0
    seconds: float = 0.0
    tokens_left: int | None = None
    cost_left: Decimal | None = None
    seconds_left: float | None = None


class _LiveRun(msgspec.Struct):
    """The live state of a run that has not ended: the start of the current wait for the model, the streamed text
    (`spoken`) and its turn, and the start times and newest output of open calls."""

    since: float
    kind: Kind = "model"
    spoken: str = ""
    turn: int = 0
    outputs: dict[str, str] = {}
    began: dict[str, float] = {}


class Activity:
    """The present state of a tree, folded from all its events and the deltas between them."""

    def __init__(self, tree: str) -> None:
        self.runs = Runs(tree)
        self._questions = Questions()
        self._live: dict[int, _LiveRun] = {}

    @property
    def questions(self) -> Mapping[str, Approval]:
        """Return the open approvals by id, in the order they were asked."""
        return self._questions.open

    def apply(self, item: Event | Delta) -> None:
        """Fold one event or delta."""
        if isinstance(item, Delta):
            self._apply_delta(item)
            return
        self.runs.apply(item)
        present = self._live.get(item.run)
        if present is None:
            if isinstance(item.body, RunSpawned | RunResumed):
                self._live[item.run] = _LiveRun(item.at)
            return
        self._apply_event(item, present)

    def _apply_event(self, event: Event, present: _LiveRun) -> None:
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
            case ApprovalDecided(approval_id=approval_id, call_id=call_id):
                if approval_id in self.questions:
                    present.began[call_id] = event.at  # the wait for a person does not count as time of the call
            case RunEnded():
                del self._live[event.run]
        self._questions.apply(event)

    def _end_speech(self, number: int, present: _LiveRun, *, before: int | None = None) -> None:
        """Clear the streamed text of run `number`, because an event now holds the text or a new turn began.

        Only text of turns below `before` is cleared; by default, of all turns up to the newest in the log. A delta is
        shown at once and can arrive before the event that starts its turn, so text of later turns stays.
        """
        if before is None:
            before = self.runs.runs[number].turns + 1
        if present.turn < before:
            present.kind, present.spoken = "model", ""

    def _apply_delta(self, delta: Delta) -> None:
        present = self._live.get(delta.run)
        if present is None:
            return
        if delta.kind == "output":
            call_id = delta.call_id or next(reversed(present.began), "")  # a peer may leave out the call id
            before = present.outputs.get(call_id, "")
            present.outputs[call_id] = (before + delta.text)[-SPOKEN_CHARACTERS:]
        elif delta.kind in ("text", "thinking"):
            kind: Kind = "text" if delta.kind == "text" else "thinking"
            begins = kind == "text" and delta.offset == 0  # first text, or a new attempt after a failed one
            spoken = present.spoken if present.kind == kind and not begins else ""
            present.kind, present.spoken = kind, (spoken + delta.text)[-SPOKEN_CHARACTERS:]
            present.turn = delta.turn

    def list_work(self) -> list[Work]:
        """Return the work in progress: the primary first, members below their team. Calls that wait for other runs or
        for a person are left out."""
        asked = {(question.run, question.call_id) for question in self.questions.values()}
        works: list[Work] = []
        listed: set[int] = set()
        for number, present in self._live.items():
            run = self.runs.runs.get(number)
            if run is None or number in listed:
                continue
            works += self._list_work_of(run, present, asked)
            for member in run.members:
                listed.add(member.number)
                if member.number in self._live:
                    own = self._list_work_of(member, self._live[member.number], asked)
                    works += [msgspec.structs.replace(work, is_member=True) for work in own]
        return works

    def _list_work_of(self, run: RunView, present: _LiveRun, asked: set[tuple[int, str]]) -> list[Work]:
        if run.started_at is None:
            return []
        number = run.number
        begin = partial(Work, run=number, agent=run.agent, label=run.label if number else None)
        if run.members:
            return [begin(kind="team", since=run.started_at, text=describe_team(run))]
        works = [
            begin(
                kind="call",
                since=present.began.get(call.call_id, present.since),
                text=present.outputs.get(call.call_id, ""),
                call=call,
            )
            for call in run.calls
            if not call.waits and (number, call.call_id) not in asked
        ]
        has_model = run.turns > 0 or bool(run.spawned.model)  # a client's run 0 or a remote run may have no model
        if not run.calls and not run.waits and has_model:
            works.append(begin(kind=present.kind, since=present.since, text=present.spoken))
        return works

    def measure_totals(self, now: float) -> Totals:
        """Return the totals of the tree at the wall-clock time `now`."""
        every = self.runs.runs.values()
        if not every:
            return Totals()
        root = self.runs.runs[min(self.runs.runs)]
        tokens, cost = self.runs.usage().total_tokens, sum((run.cost for run in every), NOTHING)
        seconds = root.measure_seconds(now)
        most, most_cost, time_limit = root.spawned.max_tokens, root.spawned.max_cost, root.spawned.timeout_seconds
        return Totals(
            agents=self.runs.counts(),
            tokens=tokens,
            cost=cost,
            unpriced=sum(run.unpriced for run in every),
            seconds=seconds,
            tokens_left=None if most is None else max(0, most - tokens),
            cost_left=None if most_cost is None else max(NOTHING, most_cost - cost),
            seconds_left=None if time_limit is None else max(0.0, time_limit - seconds),
        )


class ProgressLines:
    """The fold of a tree's events into one line about each run (`by_run`) and about the tree (`latest`), for a client
    that waits for its subagents. The run of the client itself has no line and is not counted."""

    def __init__(self, tree: str) -> None:
        self._runs = Runs(tree)
        self.by_run: dict[int, str] = {}
        self.latest = ""

    def apply(self, event: Event) -> None:
        """Fold one event."""
        self._runs.apply(event)
        run = self._runs.runs.get(event.run)
        if run is not None and run.spawned.client:
            return
        match event.body:
            case RunSpawned(task=task):
                text = task[:TASK_CHARACTERS]
            case ToolCall(name=name, args=args):
                text = "".join(part for _, part in make_call_spans(name, args))
            case AnswerGiven() | VoteCast() | MemberLost() | TeamDecided():
                text = "".join(part for _, part in make_team_spans(event.body))
            case RunEnded(status=status):
                text = f"ended: {status}"
            case _:
                return
        self.latest = self.by_run[event.run] = text if run is None else f"[{run.label}] {text}"

    def count_runs(self) -> tuple[int, int]:
        """Return the numbers of running and of ended runs."""
        views = [view for view in self._runs.runs.values() if not view.spawned.client]
        ended = sum(view.ended is not None for view in views)
        return len(views) - ended, ended


# Permanent entries


class Entry(msgspec.Struct, frozen=True):
    """A permanent entry on the screen: a line of `spans`, and a `body` below the line in a `style`. `kind` is the
    event's kind. `is_brief`: a quiet screen shows the line too. `is_detail`: only a screen that shows everything
    does."""

    kind: str
    spans: tuple[Span, ...]
    body: str = ""
    style: Style = "markdown"
    is_brief: bool = False
    run: int = 0
    is_detail: bool = False


class Entries:
    """The fold of events, in log order, into entries. Holds state of open calls only."""

    def __init__(self) -> None:
        self._blocks = Blocks(tells_unfetched=False)  # each answer is shown below the line of its run
        self._previews: dict[tuple[int, str], str] = {}
        self._denied: set[tuple[int, str]] = set()

    def apply(self, event: Event) -> Entry | None:
        """Return the entry of an event, or None if there is nothing to show."""
        block = self._blocks.apply(event)
        key = event.run, getattr(event.body, "call_id", "")
        match event.body:
            case ToolCall():
                return None
            case ApprovalAsked(preview=preview, digest=digest):
                self._previews[key] = preview
                if digest or block is None:  # else nobody here can answer, so no question is pinned
                    return None
                spans = (*block.spans, ("faint", ELSEWHERE))
                return Entry(kind=event.kind, spans=spans, is_brief=True, run=event.run)
            case ApprovalDecided() as decided:
                return self._tell_decision(event, decided, block)
            case ToolResult() as result:
                preview = self._previews.pop(key, "")
                if key in self._denied:  # the line of the decision already shows it
                    self._denied.discard(key)
                    return None
                return None if block is None else _tell_result(event, result, block, preview)
            case RunEnded() as ended:
                return self._tell_ending(event, ended, block)
        return None if block is None else _tell_words(event, block)

    def _tell_decision(self, event: Event, decided: ApprovalDecided, block: Block | None) -> Entry | None:
        """Return a line for a decision that says more than a plain yes. The entry of the call covers a plain yes."""
        key = event.run, decided.call_id
        if decided.args is not None:
            self._previews.pop(key, None)  # the preview shows the arguments before the edit
        plain = decided.allowed and decided.scope == "call" and decided.args is None and decided.by in _PLAIN_ANSWERS
        if block is None or plain:
            return None
        if not decided.allowed:
            self._denied.add(key)
        return Entry(kind=event.kind, spans=block.spans, is_brief=True, run=event.run)

    def _tell_ending(self, event: Event, ended: RunEnded, block: Block | None) -> Entry | None:
        if block is None:
            return None
        if event.run == 0:
            return Entry(kind=event.kind, spans=(), body=block.body)
        body = ended.final_response if ended.status == "done" else block.body
        if block.is_detail:  # a member: the team shows its answer
            return Entry(kind=event.kind, spans=block.spans, run=event.run, is_detail=True)
        return Entry(kind=event.kind, spans=block.spans, body=body, is_brief=True, run=event.run)


def _tell_words(event: Event, block: Block) -> Entry:
    """Return the entry of a thought, a message, inbox text, a warning, or the start of a run."""
    who: tuple[Span, ...] = (("label", f"[{block.label}] "),) if event.run else ()
    if isinstance(event.body, AnswerGiven | RoundAnswered) and block.body:
        words = shorten_text(" ".join(block.body.split()), ANSWER_CHARACTERS, ANSWER_CHARACTERS - 3)
        spans = (*block.spans, ("faint", f": {words}"))
        return Entry(kind=event.kind, spans=spans, body=block.body, is_brief=True, run=event.run)
    if block.line:
        is_brief = bool(block.brief) or event.kind in ("warning", "gap")
        return Entry(kind=event.kind, spans=block.spans, is_brief=is_brief, run=event.run)
    if event.kind == "thinking":
        return Entry(kind=event.kind, spans=who, body=block.body, style="faint", run=event.run)
    if isinstance(event.body, Inbox):
        kind = event.kind if event.body.source in USER_WORDS or event.body.source == ASKER else NOTICE
        return Entry(kind=kind, spans=(("mark", "› "), *who), body=block.body, style="faint", run=event.run)
    return Entry(kind=event.kind, spans=who, body=block.body, run=event.run)


def _tell_result(event: Event, result: ToolResult, block: Block, preview: str) -> Entry | None:
    """Return the entry of a finished call, or None for a successful call that waited for other runs: they have entries
    of their own."""
    call = block.call
    args: dict[str, Any] = {} if call is None else call.args
    if result.name == FINAL_ANSWER or (call is not None and call.waits and result.success):
        return None
    who: tuple[Span, ...] = (("label", f"[{block.label}] "),) if event.run else ()
    mark: Span = ("good", "✓ ") if result.success else ("bad", "✗ ")
    is_interrupted = result.outcome == INTERRUPTED
    said = INTERRUPTED if is_interrupted else summarize_result(result.name, result.text, result.success, spoken=True)
    is_slow = result.duration_ms >= SLOW_MS and not preview  # a call with an approval mostly waited for the person
    took = f" ({result.duration_ms / 1000:.1f}s)" if is_slow else ""
    outcome: tuple[Span, ...] = (("faint" if result.success else "bad", f" → {said}"), ("faint", took))
    body, style = _tell_action(result, args, preview)
    spans = (mark, *who, *make_call_spans(result.name, args), *outcome)
    return Entry(kind=event.kind, spans=spans, body=body, style=style, is_brief=True, run=event.run)


def _tell_action(result: ToolResult, args: dict[str, Any], preview: str) -> tuple[str, Style]:
    """Return the body of a call's entry and its style: the change of a file, the command with its output, or an error.
    An interrupted call has no body: the person who interrupted it knows."""
    if result.outcome == INTERRUPTED or result.name in TEAM_TOOL_NAMES:  # their result repeats all answers of the team
        return "", "output"
    if not result.success and result.name not in _OUTPUT_TOOLS:
        return (result.text if "\n" in result.text.strip() else ""), "output"
    if result.name in _FILE_TOOLS:
        return preview or _draw_change(args), "diff"
    if result.name not in _OUTPUT_TOOLS:
        return "", "output"
    command = args.get("command", args.get("code"))
    shown = describe_call(result.name, args)
    long = isinstance(command, str) and command != shown
    text = result.text if "\n" in result.text.strip() or not result.success else ""
    return (f"$ {command}\n{text}" if long else text), "output"


def _draw_change(args: dict[str, Any]) -> str:
    """Return the change that a file tool makes, as removed and added lines."""
    old, new = args.get("old_string"), args.get("new_string", args.get("content"))
    lines = [f"- {line}" for line in old.split("\n")] if isinstance(old, str) and old else []
    added = [f"+ {line}" for line in new.rstrip("\n").split("\n")] if isinstance(new, str) and new else []
    return "\n".join([*lines, *added])


def describe_team(team: RunView) -> str:
    """Describe the progress or outcome of a team, such as `team of 3: 2 answered, 1 at work`."""
    size = f"team of {len(team.members)}"
    state = team.team or TeamState()
    lost = [f"{len(state.lost)} lost"] if state.lost else []
    decided = state.decided
    if decided is not None:
        return f"{size}: {', '.join([*_describe_decision(decided, is_over=team.ended is not None), *lost])}"
    if team.ended is not None:
        return f"{size}: {', '.join([format_count(len(state.all_answers), 'answer'), *lost])}"
    active = [member.agent for member in team.members if member.agent not in state.lost]
    answered = [agent for agent in active if agent in state.answers]
    if len(answered) < len(active):
        done = [f"{len(answered)} answered", f"{len(active) - len(answered)} at work"]
    else:
        voted = [agent for agent in active if agent in state.votes]
        done = ["all answered", f"{len(voted)} voted", f"{len(active) - len(voted)} at work"]
    return f"{size}: {', '.join([*done, *lost])}"


def _describe_decision(decided: TeamDecided, *, is_over: bool) -> list[str]:
    if decided.strategy == "synthesize":
        return [f"{decided.member} {'made' if is_over else 'makes'} one answer of all"]
    if is_over:
        return [f"decided for {decided.winner}", decided.reason]
    presents = [] if decided.presenter is None else [f"{decided.member} presents"]
    return [f"decided for {decided.winner}", *presents]
