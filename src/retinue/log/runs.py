"""The fold of a tree's events into its runs: their names, states, tool calls, usage and results.

The supervisor keeps one fold per live tree; `ps`, `show` and every screen compute the same fold from the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from decimal import Decimal
from typing import Any

from msgspec import Struct, structs

from retinue.core.events import (
    KINDS,
    AnswerGiven,
    AnswersShown,
    ApprovalAsked,
    ApprovalDecided,
    Body,
    ChecklistAccepted,
    Event,
    Gap,
    ImprovementsProposed,
    Inbox,
    MemberLost,
    Message,
    ModelChanged,
    ProgressReported,
    RoundAnswered,
    RoundEvaluated,
    RoundVoted,
    RunEnded,
    RunRemote,
    RunResumed,
    RunSpawned,
    RunStarted,
    RunWaiting,
    TeamDecided,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
    Unknown,
    UsageReported,
    VoteCast,
    Warned,
    decode_raw,
)
from retinue.core.messages import REMINDER, TASK, USER_WORDS
from retinue.core.ports import RunSummary, RunTally, StoredRun
from retinue.core.results import (
    STATUSES,
    Contribution,
    Result,
    RoundReport,
    TeamReport,
    ToolLog,
    UserReply,
    ending_texts,
)
from retinue.core.round_state import RoundState
from retinue.core.teams import TeamState
from retinue.core.usage import NO_USAGE, Usage
from retinue.log.summaries import describe_call, summarize_result

NOTHING = Decimal(0)


class RunView(Struct, eq=False, gc=False):
    """One run, folded from its events.

    `started` is its newest `run.started`, which says in which sandbox it was to work. `sandbox` names the protections
    of the sandbox that a call has reported. `unpriced` counts the tokens of calls without a known price. `away` are the
    seconds in which no process had the run or it waited for a message; `waiting_since` is the start of the current
    wait. `stored_state` is the state of a run restored from the index, whose calls and questions are not loaded.
    Without `keeps_texts` the view keeps no messages, warnings or tool logs: a tally needs none of them, and a run can
    be long.
    """

    number: int
    path: str
    agent: str
    spawned_at: float
    spawned: RunSpawned
    started_at: float | None = None
    started: RunStarted | None = None
    sandbox: tuple[str, ...] = ()
    remote: RunRemote | None = None
    ended_at: float | None = None
    ended: RunEnded | None = None
    turns: int = 0
    completed_turns: int = 0
    tool_count: int = 0
    tool_logs: list[ToolLog] = []
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
    replies: tuple[UserReply, ...] = ()
    replying_to: str = TASK  # the source of the message that the next reply answers
    _is_reply: bool = False  # the last message is a reply
    _unread: tuple[str, ...] = ()
    _answer_start: int = 0  # index of the first reply since the user's last message
    away: float = 0.0
    waiting_since: float | None = None
    stored_state: str = ""
    team: TeamState | None = None
    rounds: RoundState | None = None
    keeps_texts: bool = True
    _result: Result[Any] | None = None
    _names: tuple[str, str] | None = None  # of this run and the primary, in reports of progress

    @property
    def label(self) -> str:
        return self.spawned.label

    @property
    def status(self) -> str | None:
        return None if self.ended is None else self.ended.status

    @property
    def state(self) -> str:
        """The live state, or the status of an ended run."""
        state = self._own_state
        stalls = self.stalled_seq and state in ("running", "waiting_children")
        return "stalled" if stalls and all(run.last_seq <= self.stalled_seq for run in self.walk()) else state

    @property
    def _own_state(self) -> str:
        if self.ended is not None:
            return self.ended.status
        if self.stored_state:
            return self.stored_state
        if self.started_at is None:
            return "queued" if self.spawned.queued else "starting"
        if self.waits:
            return "waiting"
        if self.approvals:
            return "waiting_approval"
        if self.calls and all(call.waits for call in self.calls):
            return "waiting_children"
        return "running"

    def record_event(self, seq: int) -> None:
        """Remember the number of the newest event of the run."""
        self.last_seq = seq

    def apply(self, event: Event) -> None:
        self.last_seq = event.seq
        if self.stored_state:
            self.stored_state = ""
        body = event.body
        apply_body = FOLDS[type(body)]
        if apply_body is not None and self.ended is None:
            apply_body(self, body, event)

    @property
    def waits(self) -> bool:
        """Return True if this is a conversation that waits for the next message."""
        return self.waiting_since is not None

    def _apply_standing(self, body: Body, event: Event) -> None:
        """Fold an event about where and how the run executes: start, wait, resumption, remote reference or model."""
        match body:
            case RunStarted():
                if self.started_at is None:
                    self.started_at = event.at
                self.started, self.sandbox = body, ()  # a resumed run can start in another sandbox
            case RunWaiting():
                self.waiting_since = event.at
                self.calls, self.approvals = (), ()
            case RunResumed():
                self.approvals = ()  # open questions are asked again
            case RunRemote():
                self.remote = body
            case ModelChanged():
                self.spawned = structs.replace(self.spawned, model=body.model)

    def _apply_turn(self, started: TurnStarted, event: Event) -> None:
        self.turns = started.turn
        if self.waiting_since is not None:
            self.away, self.waiting_since = self.measure_idle(event.at), None
        if self._unread:
            said = [source for source in self._unread if source in USER_WORDS]
            self.replying_to = (said or self._unread)[-1]
            if said:
                self._answer_start = len(self.replies)
            self._unread = ()

    def _apply_inbox(self, inbox: Inbox, event: Event) -> None:
        if inbox.source == REMINDER:
            if self.rounds is not None:
                self.rounds.count_reminder()
        else:
            self._unread += (inbox.source if inbox.about is None else f"agent:{inbox.about}",)

    def _apply_turn_end(self, ended: TurnEnded, event: Event) -> None:
        self.completed_turns = ended.turn

    def _apply_message(self, message: Message, event: Event) -> None:
        if not self.keeps_texts:
            return
        if message.text and not (message.host and self.spawned.model):  # only a callable speaks by host messages
            self.last_message, self._is_reply = message.text, message.final
            if message.final:
                self.replies += (UserReply(message.text, message.replies_to or self.replying_to),)

    def join_unfinished(self, partial: str) -> str:
        """Return the text of a run that does not finish: its replies since the user's last message, then `partial`, or
        its newest message if `partial` is empty. For rounds, return the newest answer; for a team, the leading
        answer."""
        if self.rounds is not None and self.rounds.answers:
            return self.rounds.answers[-1].text
        if self.team is not None and self.team.answers:
            return self.team.find_leader([member.agent for member in self.members]).text
        texts = [reply.text for reply in self.replies[self._answer_start :]]
        last = partial or ("" if self._is_reply else self.last_message)
        return "\n\n".join([*texts, last] if last else texts)

    def _apply_usage(self, reported: UsageReported, event: Event) -> None:
        self.usage = reported.usage if self.usage is NO_USAGE else self.usage + reported.usage
        if reported.cost is None:
            usage = reported.usage
            self.unpriced += usage.input_tokens + usage.output_tokens
        else:
            self.cost += reported.cost

    def _apply_call(self, call: ToolCall, event: Event) -> None:
        if call.within or not call.host:
            self.tool_count += 1
        self.calls += (call,)

    def _apply_result(self, result: ToolResult, event: Event) -> None:
        if result.sandbox:
            self.sandbox = result.sandbox
        call = self._take_call(result.call_id)
        if not self.keeps_texts:
            return
        about, shown = "", result.name
        if call is not None:
            if call.host and not call.within:
                return
            about, shown = describe_call(call.name, call.args), call.display_name or shown
        line = summarize_result(result.name, result.text, result.success)
        # Positional: keywords take 0.05 % of the instructions of a run (`bench counts`), which has none to spare.
        self.tool_logs.append(ToolLog(result.name, shown, about, line, result.success, result.duration_ms))

    def _take_call(self, call_id: str) -> ToolCall | None:
        """Remove the open call with this id and return it."""
        for call in self.calls:
            if call.call_id == call_id:
                self.calls = () if len(self.calls) == 1 else tuple([each for each in self.calls if each is not call])
                return call
        return None

    def _apply_question(self, asked: ApprovalAsked, event: Event) -> None:
        self.approvals += (asked,)

    def _apply_decision(self, decided: ApprovalDecided, event: Event) -> None:
        self.approvals = tuple([asked for asked in self.approvals if asked.approval_id != decided.approval_id])
        if decided.args is not None:  # the call runs with the edited arguments
            self.calls = tuple(
                structs.replace(call, args=decided.args) if call.call_id == decided.call_id else call
                for call in self.calls
            )

    def _apply_warning(self, warned: Warned, event: Event) -> None:
        if warned.code == "stalled":
            self.stalled_seq = event.seq
        if self.keeps_texts:
            self.warnings += (warned.text,)
        if self.rounds is not None:
            self.rounds.apply(warned)
        if self.team is not None:
            self.team.apply(warned)

    def _apply_team(self, body: Body, event: Event) -> None:
        if self.keeps_texts:
            self.team = self.team or TeamState()
            self.team.apply(body)

    def _apply_rounds(self, body: Body, event: Event) -> None:
        if self.keeps_texts:
            self.rounds = self.rounds or RoundState()
            self.rounds.apply(body)

    def _apply_gap(self, gap: Gap, event: Event) -> None:
        if gap.code == "damaged" and self.keeps_texts:
            missing = "1 event of this tree is" if gap.count == 1 else f"{gap.count} events of this tree are"
            self.warnings += (f"{missing} missing: {gap.reason}",)

    def _apply_ending(self, ended: RunEnded, event: Event) -> None:
        self.ended, self.ended_at = ended, event.at
        self.waiting_since = None
        self.calls, self.approvals = (), ()

    def describe_progress(
        self, tree: str, tool: str, about: str, success: bool | None, nickname: str | None, max_turns: int | None
    ) -> ProgressReported:
        """Return the progress of a subagent at the start of one of its tool calls, or at the end if `success` is
        given."""
        spawned, usage = self.spawned, self.usage
        if self._names is None:
            self._names = f"{tree}/{self.number}", f"{tree}/0"
        own, primary = self._names
        return ProgressReported(  # positional: this many keywords take twice as long
            spawned.subagent_id,
            self.agent,
            nickname,
            own,
            primary,
            None,
            max_turns,
            self.completed_turns,
            spawned.model or None,
            tool,
            about,
            success is not None,
            success is True,
            self.tool_count,
            usage.input_tokens + usage.output_tokens,
        )

    def make_tally(self) -> RunTally:
        """Return the part of the run that lists show in addition to its first event."""
        ended = self.ended
        return RunTally(
            state=self._own_state,
            last_seq=self.last_seq,
            started_at=self.started_at,
            ended_at=self.ended_at,
            status=None if ended is None else ended.status,
            duration_ms=0 if ended is None else ended.duration_ms,
            changed_count=0 if ended is None else ended.changed_count,
            turns=self.turns,
            tool_count=self.tool_count,
            usage=self.usage,
            cost=self.cost,
            unpriced=self.unpriced,
            stalled_seq=self.stalled_seq,
            away=self.away,
            waiting_since=self.waiting_since,
        )

    def add_absence(self, seconds: float) -> None:
        """Add the time without a process before the run was resumed. For a run that waits for a message, that time is
        already part of the wait."""
        if not self.waits:
            self.away += max(0.0, seconds)

    def measure_seconds(self, now: float) -> float:
        """Return how long the run took, or has taken until `now`. A queued run has taken 0 seconds."""
        if self.ended is not None:
            return self.ended.duration_ms / 1000
        return 0.0 if self.started_at is None else max(0.0, now - self.started_at - self.measure_idle(now))

    def measure_idle(self, now: float) -> float:
        """Return the seconds until `now` in which no process had the run or it waited for a message."""
        return self.away + (0.0 if self.waiting_since is None else max(0.0, now - self.waiting_since))

    @property
    def members(self) -> tuple[RunView, ...]:
        """The members of a team. A team adds no depth, so its members have its own depth."""
        depth = self.spawned.depth
        return tuple([child for child in self.children if child.spawned.depth == depth])

    @property
    def level(self) -> int:
        """The number of runs above this run. In and below a team, the depth is lower."""
        return self.path.count("/") - 1

    def walk(self) -> Iterable[RunView]:
        """Yield this run and all runs below it, parents before children."""
        yield self
        for child in self.children:
            yield from child.walk()

    def result(self, tree: str) -> Result[Any]:
        """Return the result of an ended run, with the results of its children. The result is cached, because no event
        changes an ended run."""
        if self.ended is None:
            raise ValueError(f"run {self.path} has not ended")
        if self._result is None:
            self._result = self.make_result(tree, self.ended)
        return self._result

    def make_result(self, tree: str, ended: RunEnded) -> Result[Any]:
        """Return the result of the run with the given ending."""
        if ended.status not in STATUSES:
            text, details = ending_texts("failed", name=self.agent, primary=False)
            ended = structs.replace(ended, status="failed", final_response=text, error_details=details)
        started, spawned, made = self.started, self.spawned, ended
        if self.team is not None:
            presented = self.find_presented()
            spawned = structs.replace(spawned, workspace=presented.spawned.workspace)
            made = presented.ended or ended
        return Result(  # positional: this many keywords take seven times as long
            self.agent,
            ended.final_response,
            self.turns,
            self.tool_count,
            tuple(self.tool_logs),
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
            made.changed_files,
            made.changed_count,
            "inherited" if started is None else started.runtime,
            self.sandbox,
            ended.code,
            tuple([child.result(tree) for child in self.children if child.ended is not None]) if self.children else (),
            self.replies,
            None if self.team is None else self.report_team(),
            () if self.rounds is None else self.report_rounds(),
        )

    def find_presented(self) -> RunView:
        """Return the run whose work is delivered: the presenter of a team, otherwise this run."""
        decided = None if self.team is None else self.team.decided
        found = [child for child in self.children if decided is not None and child.number == decided.member_run]
        return found[0] if found else self

    def report_team(self) -> TeamReport:
        """Return the contributions of the members so far, and the decision if there is one."""
        team = self.team or TeamState()
        contributions = tuple(child._describe_contribution(team) for child in self.children)
        if team.decided is None:
            return TeamReport(strategy="", winner="", reason="", presented=None, contributions=contributions)
        by = team.decided
        return TeamReport(
            strategy=by.strategy,
            winner=by.winner,
            reason=by.reason,
            presented=by.member_run,
            contributions=contributions,
            votes=by.votes,
        )

    def report_rounds(self) -> tuple[RoundReport, ...]:
        """Return the rounds so far, each with its input and its answer."""
        rounds = self.rounds or RoundState()
        chosen = None if rounds.voted is None else rounds.voted.choice
        reports = []
        for number in range(1, max(len(rounds.answers), *rounds.evaluated, 0) + 1):
            report = RoundReport(round=number)
            if opened := rounds.evaluated.get(number):
                basis, run = opened.basis, opened.evaluator_run
                report = structs.replace(
                    report, basis=basis, evaluator_run=run, packet=opened.packet, tasks=opened.tasks
                )
            for given in rounds.answers[number - 1 : number]:
                is_chosen = given.label == chosen
                report = structs.replace(
                    report, label=given.label, answer=given.text, snapshot=given.snapshot, chosen=is_chosen
                )
            reports.append(report)
        return tuple(reports)

    def _describe_contribution(self, team: TeamState) -> Contribution:
        vote = team.votes.get(self.agent)
        return Contribution(
            agent=self.agent,
            run=self.number,
            model=self.spawned.model,
            status=self.state,
            answers={given.label: given.text for given in team.all_answers if given.member == self.agent},
            vote="" if vote is None else vote.choice,
            reason="" if vote is None else vote.reason,
            usage=self.usage,
            cost=None if self.unpriced else self.cost,
            id=str(decode_raw(self.spawned.profile).get("nickname") or ""),
        )


# Event kinds without a fold change nothing.
FOLDS: dict[type, Callable[[RunView, Any, Event], None] | None] = {
    **dict.fromkeys((*KINDS.values(), Unknown)),
    **dict.fromkeys((RunStarted, RunRemote, RunResumed, RunWaiting, ModelChanged), RunView._apply_standing),
    TurnStarted: RunView._apply_turn,
    TurnEnded: RunView._apply_turn_end,
    Message: RunView._apply_message,
    Inbox: RunView._apply_inbox,
    UsageReported: RunView._apply_usage,
    ToolCall: RunView._apply_call,
    ToolResult: RunView._apply_result,
    ApprovalAsked: RunView._apply_question,
    ApprovalDecided: RunView._apply_decision,
    Gap: RunView._apply_gap,
    Warned: RunView._apply_warning,
    RunEnded: RunView._apply_ending,
    **dict.fromkeys((AnswerGiven, AnswersShown, VoteCast, MemberLost, TeamDecided), RunView._apply_team),
    **dict.fromkeys(
        (RoundAnswered, RoundEvaluated, ChecklistAccepted, ImprovementsProposed, RoundVoted), RunView._apply_rounds
    ),
}


def make_view(stored: StoredRun, *, keeps_texts: bool = True) -> RunView:
    """Return the view of a stored run, without calls, children and texts."""
    event, body, tally = stored.first, stored.first.body, stored.tally
    assert isinstance(body, RunSpawned)
    ended = None
    if tally.status is not None:
        ended = RunEnded(tally.status, "", tally.duration_ms, changed_count=tally.changed_count)
    return RunView(
        number=event.run,
        path=event.path,
        agent=event.agent,
        spawned_at=event.at,
        spawned=body,
        started_at=tally.started_at,
        ended_at=tally.ended_at,
        ended=ended,
        turns=tally.turns,
        tool_count=tally.tool_count,
        usage=tally.usage,
        cost=tally.cost,
        unpriced=tally.unpriced,
        last_seq=tally.last_seq,
        stalled_seq=tally.stalled_seq,
        away=tally.away,
        waiting_since=tally.waiting_since,
        stored_state=tally.state,
        keeps_texts=keeps_texts,
    )


class RunCounts(Struct, frozen=True, gc=False):
    """The numbers of runs in a tree: its primary, and by state the runs below it."""

    primary: int = 0
    running: int = 0
    queued: int = 0
    finished: int = 0

    def describe(self) -> str:
        """Return the counts as text: `Agents: 1 primary, 2 running, 1 finished`. Queued runs are named if there are
        any."""
        queued = f"{self.queued} queued, " if self.queued else ""
        return f"Agents: {self.primary} primary, {self.running} running, {queued}{self.finished} finished"


NO_RUNS = RunCounts()


class Runs(Struct, eq=False, gc=False):
    """All runs of one tree. Events before a run is spawned or after it has ended change nothing. `gone_at` is the time
    of the newest event other than `run.resumed`; runs resumed together write these events in a row."""

    tree: str
    runs: dict[int, RunView] = {}
    gone_at: float = 0.0

    @classmethod
    def of(cls, tree: str, events: Iterable[Event]) -> Runs:
        runs = cls(tree)
        for event in events:
            runs.apply(event)
        return runs

    def restore(self, stored: StoredRun) -> None:
        """Add a stored run without its texts, unless events have already added it. Parents come before their
        children."""
        if stored.first.run not in self.runs:
            self._add(make_view(stored))

    @property
    def primary(self) -> RunView | None:
        return self.runs.get(0)

    def apply(self, event: Event) -> RunView | None:
        """Fold one event and return its run."""
        run = self.runs.get(event.run)
        if type(event.body) is not RunResumed:
            self.gone_at = event.at
        elif run is not None:
            run.add_absence(event.at - self.gone_at)
        if run is not None:
            run.apply(event)
        elif isinstance(event.body, RunSpawned):
            run = self.spawn(event, event.body)
        return run

    def spawn(self, event: Event, body: RunSpawned) -> RunView:
        """Add a new run with its first event."""
        # Positional: keywords take 0.03 % of the instructions of a run (`bench counts`), which has none to spare.
        return self._add(RunView(event.run, event.path, event.agent, event.at, body, last_seq=event.seq))

    def _add(self, run: RunView) -> RunView:
        self.runs[run.number] = run
        parent = None if run.spawned.parent is None else self.runs.get(run.spawned.parent)
        if parent is not None:
            parent.children += (run,)
        return run

    def counts(self) -> RunCounts:
        """Return the numbers of runs that the status bar shows."""
        spawned = [run for run in self.runs.values() if run.number != 0]
        finished = sum(run.ended is not None for run in spawned)
        queued = sum(run.state == "queued" for run in spawned)
        running = len(spawned) - finished - queued
        return RunCounts(primary=int(0 in self.runs), running=running, queued=queued, finished=finished)

    def usage(self) -> Usage:
        return sum((run.usage for run in self.runs.values()), NO_USAGE)

    def list_branches(self) -> list[tuple[str, RunView]]:
        """Return the lines of a tree drawing: each run with the branch characters before it, parents before
        children."""
        lines: list[tuple[str, RunView]] = []

        def draw(run: RunView, branch: str, below: str) -> None:
            lines.append((branch, run))
            for child in run.children:
                is_last = child is run.children[-1]
                draw(child, below + ("└─ " if is_last else "├─ "), below + ("   " if is_last else "│  "))

        for run in self.runs.values():
            if run.spawned.parent not in self.runs:
                draw(run, "", "")
        return lines


def describe_view(view: RunView, tree: str) -> RunSummary:
    """Return one run as a `RunSummary` of a list."""
    spawned = view.spawned
    return RunSummary(
        run=view.number,
        parent=spawned.parent,
        path=view.path,
        label=view.label,
        agent=view.agent,
        subagent_id=spawned.subagent_id,
        state=view.state,
        status=view.status,
        task=spawned.task,
        workspace=view.find_presented().spawned.workspace,
        created_at=view.spawned_at,
        result=view.result(tree) if view.ended is not None else None,
        call_id=spawned.call_id,
        timeout_seconds=spawned.timeout_seconds,
        started_at=view.started_at,
        turns=view.turns,
        tool_count=view.tool_count,
        last_message=view.last_message,
    )
