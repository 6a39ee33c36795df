"""The fold of a tree's events into the blocks that a screen shows, with their exact headers.

Texts of models and tools stay unchanged: the screen does the escaping, cutting and colouring. The final answer of a
run is not a block: the primary's answer goes to the caller, a child's answer is its parent's tool result. Events of
unknown kinds give no block.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any, Literal

import msgspec
from msgspec import structs

from retinue.core.approvals import Approval
from retinue.core.events import (
    AnswerGiven,
    AnswersShown,
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Gap,
    Inbox,
    MemberLost,
    Message,
    RoundAnswered,
    RoundEvaluated,
    RoundVoted,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunWaiting,
    TeamDecided,
    Thinking,
    ToolCall,
    ToolResult,
    TurnStarted,
    UsageReported,
    VoteCast,
    Warned,
)
from retinue.core.messages import ASKER, REMINDER, USER_WORDS
from retinue.core.results import FINAL_ANSWER
from retinue.core.rounds import Rounds
from retinue.core.rules import CODE_MODE
from retinue.core.teams import is_team_call
from retinue.log.summaries import describe_call, shorten_text, summarize_result
from retinue.protocol.subagent_tools import CONTINUE
from retinue.protocol.subagents import OPERATION

CODE_MODES = (CODE_MODE, "execute_go_code")  # our tool, and the tool of CPE processes that report to us
_WHOLE_REPLIES = (OPERATION, CONTINUE)  # their results include the replies of an unfinished run
TASK_CHARACTERS = 80
REASON_CHARACTERS = 200
ERROR_CHARACTERS = 300
Role = Literal["plain", "mark", "name", "label", "tool", "good", "bad", "warn", "faint"]
Span = tuple[Role, str]


class Block(msgspec.Struct, frozen=True):
    """One block on a screen. `spans` are the pieces of the header, each with its role; a `line` is a block with only a
    header.

    `brief` describes a finished call in one line, `call` is that call, and `label` is the label of the run.
    `is_detail` marks a block whose facts other blocks show too.
    """

    kind: str
    spans: tuple[Span, ...]
    body: str = ""
    label: str = ""
    line: bool = False
    brief: tuple[Span, ...] = ()
    call: ToolCall | None = None
    is_detail: bool = False

    @property
    def header(self) -> str:
        return "".join(text for _, text in self.spans)


class _Seen(msgspec.Struct, eq=False):
    """The state of a run that has not ended. `held` are replies that the final answer will contain, so they are not
    shown yet. `told` are earlier replies to the same message of the user, already shown. `shown` is the newest text
    with tool calls. `unfetched` are the answers of background children, by run number, until a tool result returns
    them. `reply_has_words`: the result of the parent's call contains the run's replies even if the run fails."""

    label: str = ""
    depth: int | None = None
    rounds: Rounds | None = None
    parent: int | None = None
    is_background: bool = False
    team: _Seen | None = None
    is_team: bool = False
    reply_has_words: bool = False
    held: list[str] = []
    told: list[str] = []
    shown: str = ""
    superseded: bool = False
    has_user_words: bool = False
    unfetched: dict[int, str] = {}
    calls: dict[str, ToolCall] = {}
    asked: dict[str, ApprovalAsked] = {}
    turns: int = 0
    tools: int = 0
    tokens: int = 0

    @property
    def has_team_events(self) -> bool:
        """Return True if events report the answers and votes of the run, because it is in a team or works in rounds. A
        replay has no such events."""
        return self.team is not None or self.rounds is not None

    def list_unshown(self, ended: RunEnded) -> list[str]:
        """Return the replies of an ended run that neither its answer nor a block contains: replies besides a typed
        answer, replies before an ending other than `done`, and a reply that was cut off."""
        if ended.status == "done":
            return self.held if ended.structured is not None else []
        if self.rounds is not None or self.is_team:  # their partial answer was already shown
            return self.held
        replies = "\n\n".join([*self.told, *self.held])
        rest = ended.partial.removeprefix(replies).removeprefix("\n\n" if replies else "")
        return [*self.held, rest] if rest not in ("", self.shown) else self.held


class Blocks:
    """The fold of events, in log order, into blocks. Holds state of live runs only.

    With `tells_unfetched`, the last block of a run includes the answers of its background children that nobody
    fetched. This is for screens that do not show every answer anyway.
    """

    def __init__(self, *, tells_unfetched: bool = True) -> None:
        self._tells_unfetched = tells_unfetched
        self._runs: dict[tuple[str, int], _Seen] = {}
        self._alive: defaultdict[tuple[str, str], set[int]] = defaultdict(set)

    def apply(self, event: Event) -> Block | None:
        """Return the block of an event, or None if there is nothing to show."""
        key = event.tree, event.run
        seen = self._runs.get(key)
        if seen is None:
            seen = self._runs[key] = self._start_run(event)
            self._alive[event.tree, event.agent].add(event.run)
        block = self._apply_body(event, seen)
        if isinstance(event.body, RunEnded):
            if seen.team is not None:  # a team has no turns or tokens of its own
                seen.team.turns += seen.turns
                seen.team.tools += seen.tools
                seen.team.tokens += seen.tokens
            del self._runs[key]
            self._alive[event.tree, event.agent].discard(event.run)
        return block

    def _start_run(self, event: Event) -> _Seen:
        """Return the state of a new run. A child at the depth of its parent is a member of a team."""
        if not isinstance(event.body, RunSpawned):
            return _Seen()
        spawned = event.body
        seen = _Seen(
            label=spawned.label,
            depth=spawned.depth,
            rounds=spawned.rounds,
            parent=spawned.parent,
            is_background=spawned.background,
        )
        parent = None if spawned.parent is None else self._runs.get((event.tree, spawned.parent))
        if parent is not None:
            call = parent.calls.get(spawned.call_id)
            seen.reply_has_words = call is not None and call.name in _WHOLE_REPLIES
            if parent.depth == spawned.depth:
                seen.team, parent.is_team = parent, True
        return seen

    def _apply_body(self, event: Event, seen: _Seen) -> Block | None:
        match event.body:
            case UsageReported(usage=usage):
                seen.tokens += usage.total_tokens
            case TurnStarted() | Message() | Inbox() | Thinking():
                return self._make_words_block(event, seen)
            case ToolCall() as call:
                return self._make_call_block(event, seen, call)
            case ToolResult() as result:
                return self._make_result_block(event, seen, result)
            case ApprovalAsked() as asked:
                seen.asked[asked.approval_id] = asked
                spans, body = make_question_spans(asked.label, asked.tool, asked.args), format_question_body(asked)
                return _make_block(event, seen, spans, body)
            case ApprovalDecided() as decided:
                return _make_decision_block(event, seen, decided)
            case Warned(text=text):
                return _make_warning_block(event, seen, *self._name_run(event, seen), ("plain", text))
            case Gap(count=count, reason=reason):
                text = f"1 event is missing: {reason}" if count == 1 else f"{count} events are missing: {reason}"
                return _make_warning_block(event, seen, ("plain", text))
            case AnswerGiven() | VoteCast() | AnswersShown() | MemberLost() | TeamDecided():
                return self._make_team_block(event, seen, event.body)
            case RunWaiting() as waiting:
                return self._make_waiting_block(event, seen, waiting)
            case RunEnded() as ended:
                return self._make_ending_block(event, seen, ended)
            case RunSpawned() | RunResumed() if event.run != 0:
                return _make_state_block(event, seen)
        return self._make_round_block(event, seen, event.body) if isinstance(event.body, RoundFact) else None

    def _make_words_block(self, event: Event, seen: _Seen) -> Block | None:
        """Return the block of a thought, a message or inbox text. A reply without tool calls is held, because the
        final answer will contain it unless newer words of the user supersede it."""
        match event.body:
            case TurnStarted(turn=turn):
                seen.turns = turn
                return self._make_superseded_block(event, seen)
            case Thinking(text=text) if text:  # a redacted thought has no text
                return self._make_titled_block(event, seen, "thought trace", text)
            case Message(text=text, final=False):
                seen.shown = text
                return self._make_titled_block(event, seen, "message", text)
            case Message(text=text, host=False) if text:
                seen.held.append(text)
            case Inbox(text=text, source=source):
                seen.has_user_words |= source in USER_WORDS
                seen.superseded |= seen.has_user_words or source == REMINDER
                title = "inbox of the side that asked" if source == ASKER else "inbox"
                return self._make_titled_block(event, seen, title, text)
        return None

    def _make_superseded_block(self, event: Event, seen: _Seen) -> Block | None:
        """Return a block of the held replies if the run has read newer words, because its final answer will not
        contain them."""
        held, superseded = seen.held, seen.superseded
        seen.superseded = False
        if seen.has_user_words:  # only words of the user start a new answer
            seen.told, seen.has_user_words = [], False
        elif superseded:
            seen.told = [*seen.told, *held]
        if not (held and superseded):
            return None
        seen.held = []
        return self._make_titled_block(event, seen, "message", "\n\n".join(held))

    def _make_team_block(self, event: Event, seen: _Seen, fact: TeamFact) -> Block | None:
        """Return the block of a team event. An answer that the member gave as text is shown only here."""
        who: tuple[Span, ...] = (("label", f"[{seen.label}] "),) if event.run else ()
        told = make_team_spans(fact)
        if not told:
            return None
        mark: Span = ("bad", "⚠ ") if isinstance(fact, MemberLost) else ("mark", "◇ ")
        spans = (mark, *who, *told)
        if not isinstance(fact, AnswerGiven):
            return _make_block(event, seen, spans, line=True, brief=spans)
        member = self._runs.get((event.tree, fact.member_run))
        if member is not None:
            member.told, member.held = [*member.told, *member.held], []
        return _make_block(event, seen, spans, fact.text, brief=spans)

    def _make_round_block(self, event: Event, seen: _Seen, fact: RoundFact) -> Block:
        """Return the block of a round event. The last possible answer has no body here: it is shown as the final
        answer of the run."""
        spans: tuple[Span, ...] = (("mark", "◇ "), *make_round_spans(fact))
        if not isinstance(fact, RoundAnswered):
            return _make_block(event, seen, spans, line=True, brief=spans)
        seen.held = []
        is_last = seen.rounds is not None and fact.round == seen.rounds.answers
        return _make_block(event, seen, spans, "" if is_last else fact.text, line=is_last, brief=spans)

    def _make_waiting_block(self, event: Event, seen: _Seen, waiting: RunWaiting) -> Block | None:
        """Return the block of an answer in a conversation, with the reason if the turn ended without one."""
        held, seen.held, seen.superseded = seen.held, [], False
        seen.told = [*seen.told, *held]
        why = "" if waiting.after == "answered" else waiting.after + (f": {waiting.text}" if waiting.text else "")
        if not held:
            return _make_warning_block(event, seen, ("plain", why)) if why else None
        body = "\n\n".join([*held, f"[{why}]"] if why else held)
        return self._make_titled_block(event, seen, "message", body)

    def _make_ending_block(self, event: Event, seen: _Seen, ended: RunEnded) -> Block | None:
        """Return the block of a run's ending, with the texts that no other block shows: replies missing in the answer,
        and answers of background children that nobody fetched."""
        parts = seen.list_unshown(ended)
        parent = None if seen.parent is None else self._runs.get((event.tree, seen.parent))
        if self._tells_unfetched and ended.status != "done" and (seen.is_background or seen.reply_has_words):
            words, parts = "\n\n".join(parts), []  # the parent's tool result contains them
            answer = f"said before it ended {ended.status}:\n{words}" if words else ""
        else:
            answer = f"answered:\n{ended.final_response}" if ended.final_response else ""
        if parent is not None and seen.is_background and answer:
            parent.unfetched[event.run] = f"{event.agent} [{seen.label}] {answer}"
        if self._tells_unfetched:
            parts = [*parts, *seen.unfetched.values()]
        body = "\n\n".join(parts)
        if event.run != 0:
            block = _make_state_block(event, seen)
            return structs.replace(block, body=body, line=False) if body else block
        return self._make_titled_block(event, seen, "message", body) if body else None

    def _name_run(self, event: Event, seen: _Seen) -> tuple[Span, ...]:
        """Return the agent's name as spans, with the label if another run of this agent is alive; nothing for the
        primary."""
        if event.run == 0:
            return ()
        others = self._alive[event.tree, event.agent] - {event.run, 0}
        label: tuple[Span, ...] = (("label", f"[{seen.label}] "),) if others and seen.label else ()
        return (("name", f"{event.agent} "), *label)

    def _make_titled_block(self, event: Event, seen: _Seen, title: str, body: str) -> Block:
        return _make_block(event, seen, (("mark", "#### "), *self._name_run(event, seen), ("plain", title)), body)

    def _make_call_block(self, event: Event, seen: _Seen, call: ToolCall) -> Block | None:
        seen.tools += 1
        seen.calls[call.call_id] = call
        if call.name == FINAL_ANSWER or (seen.has_team_events and is_team_call(call)):
            return None
        timeout = "" if call.timeout_seconds is None else f" (timeout: {format_seconds(call.timeout_seconds)})"
        code = call.args.get("code")
        if call.name in CODE_MODES and isinstance(code, str):  # show a program as the model wrote it
            args = code
        else:
            args = reformat_json(call.raw) if call.raw else format_json(call.args)
        return self._make_titled_block(event, seen, f"[tool call]{timeout}", f"{call.name}\n{args}")

    def _make_result_block(self, event: Event, seen: _Seen, result: ToolResult) -> Block | None:
        call = seen.calls.pop(result.call_id, None)
        for number in result.gives:
            for (tree, _), other in self._runs.items():
                if tree == event.tree:
                    other.unfetched.pop(number, None)
        is_told = call is not None and seen.has_team_events and is_team_call(call)
        if result.name == FINAL_ANSWER or (result.success and is_told):
            return None
        args = {} if call is None else call.args
        title: tuple[Span, ...] = (("plain", 'Tool "'), ("tool", result.name), ("plain", '" result:'))
        if result.name in CODE_MODES:
            title = (("plain", "Code execution output:"),)
        summary = summarize_result(result.name, result.text, result.success, spoken=True)
        said: Span = ("plain" if result.success else "bad", summary)
        who = self._name_run(event, seen)
        brief = (*who, *make_call_spans(result.name, args), ("plain", " -> "), said)
        return _make_block(
            event, seen, (("mark", "#### "), *who, *title), reformat_json(result.text), brief=brief, call=call
        )


def _make_block(event: Event, seen: _Seen, spans: tuple[Span, ...], body: str = "", **more: Any) -> Block:
    return Block(event.kind, spans, body, seen.label, **more)


def _make_warning_block(event: Event, seen: _Seen, *spans: Span) -> Block:
    return _make_block(event, seen, (("bad", "⚠ "), *spans), line=True)


def _make_decision_block(event: Event, seen: _Seen, decided: ApprovalDecided) -> Block | None:
    asked, call = seen.asked.pop(decided.approval_id, None), seen.calls.get(decided.call_id)
    if asked is None and decided.allowed and decided.rule:
        return None  # a rule allowed the call: nothing to show
    if call is not None and decided.args is not None:
        call = seen.calls[decided.call_id] = structs.replace(call, args=decided.args)
    args = decided.args or (asked.args if asked is not None else {} if call is None else call.args)
    label = seen.label if event.run and asked is None else None if asked is None else asked.label
    tool = decided.tool if asked is None else asked.tool
    about = (("plain", " "), *make_question_spans(label, tool, args)[1:]) if tool else ()
    if decided.by not in ("", "user"):
        where = f" ({decided.surface})" if decided.surface else ""
        about = (*about, ("faint", f" by {decided.by}{where}"))
    if decided.allowed:
        reach = "" if decided.rule else _REACH.get(decided.scope, "")  # `by` already names the rule
        how = reach + (", with edited arguments" if decided.args is not None else "")
        spans = (("good", "✓ approved"), *about, ("plain", how))
        return _make_block(event, seen, spans, line=True)
    reason: Span = ("plain", f": {decided.reason}" if decided.reason else "")
    return _make_block(event, seen, (("bad", "✗ denied"), *about, reason), line=True)


_REACH = {
    "run": ", and in this run",
    "tool": ", and in this tree",
    "project": ", and always in this project",
    "pending": ", with all that it asked",
}


def _make_state_block(event: Event, seen: _Seen) -> Block:
    who: tuple[Span, ...] = (("name", event.agent), ("plain", " "), ("label", f"[{seen.label}]"), ("plain", " "))
    match event.body:
        case RunSpawned(task=task, queued=queued):
            first = next((line.strip() for line in task.splitlines() if line.strip()), "")
            what = "spawned (queued)" if queued else "spawned"
            if first not in ("", seen.label) and seen.team is None:  # the team already shows the task
                what += f": {shorten_text(first, TASK_CHARACTERS, TASK_CHARACTERS - 3)}"
            return _make_block(event, seen, (("mark", "○ "), *who, ("plain", what)), line=True)
        case RunEnded(status=status, error_details=error, duration_ms=took):
            used = (seen.turns, "turn"), (seen.tools, "tool"), (seen.tokens, "token")
            counts = ", ".join(format_count(number, what) for number, what in used)
            good = status == "done"
            state: Span = ("good" if good else "bad", status)
            stats: Span = ("faint", f" ({counts}, {took / 1000:.1f}s)")
            why = "" if good or not error else ": " + shorten_text(" ".join(error.split()), ERROR_CHARACTERS, 297)
            return _make_block(
                event,
                seen,
                (("mark", "● "), *who, state, stats, ("plain", why)),
                line=True,
                is_detail=good and seen.team is not None,
            )
    return _make_block(event, seen, (("mark", "○ "), *who, ("plain", "resumed")), line=True)


# Texts that other modules use too

TeamFact = AnswerGiven | VoteCast | AnswersShown | MemberLost | TeamDecided


def make_team_spans(fact: TeamFact) -> tuple[Span, ...]:
    """Return one line about a team event, such as `agent1 votes for agent2.1: it is right`; no spans for an event that
    is not worth showing."""
    match fact:
        case AnswerGiven(member=agent, label=label):
            is_first = label.endswith(".1")
            told = f" answers ({label})" if is_first else f" answers anew ({label}), which reopens the vote"
            return ("name", agent), ("plain", told)
        case VoteCast(member=agent, choice=choice, reason=reason):
            told = f" votes for {choice}" if choice else " abstains"
            return ("name", agent), ("plain", told), ("faint", _shorten_reason(reason))
        case AnswersShown(member=agent, missed=missed) if missed:
            return ("name", agent), ("plain", " has not voted and is reminded")
        case MemberLost(member=agent, status=status):
            return ("name", agent), ("plain", f" ended {status}: the team continues without it")
        case TeamDecided(strategy="synthesize", member=agent, reason=reason):
            return ("good", "decided"), ("plain", f": {agent} makes one answer of all ({reason})")
        case TeamDecided(winner=winner, member=agent, reason=reason, presenter=presenter):
            why = f", {reason}" if reason else ""
            then = f"; {agent} presents" if presenter is not None else ""
            return ("good", "decided"), ("plain", f": {winner}{why}{then}")
    return ()


def _shorten_reason(reason: str) -> str:
    words = " ".join(reason.split())
    return f": {shorten_text(words, REASON_CHARACTERS, REASON_CHARACTERS - 3)}" if words else ""


RoundFact = RoundAnswered | RoundEvaluated | RoundVoted


def make_round_spans(fact: RoundFact) -> tuple[Span, ...]:
    """Return one line about the rounds of a run, such as `round 2 begins with the plan of its evaluator: 3 tasks`."""
    match fact:
        case RoundAnswered(round=number, label=label):
            return ("plain", f"round {number} ends with the answer "), ("name", label)
        case RoundEvaluated(round=number):
            return ("plain", f"round {number} begins with "), ("name", describe_basis(fact))
        case RoundVoted(choice=choice, reason=reason):
            return ("good", "decided"), ("plain", f": {choice}"), ("faint", _shorten_reason(reason))


def describe_basis(fact: RoundEvaluated) -> str:
    """Return a phrase for the input that a round starts from."""
    match fact.basis:
        case "tasks":
            tasks = (fact.tasks or {}).get("tasks")
            return f"the plan of its evaluator: {format_count(len(tasks) if isinstance(tasks, list) else 0, 'task')}"
        case "packet":
            return "the packet of its evaluator"
        case "checklist":
            return "a checklist of its own"


def make_question_spans(label: str | None, tool: str, args: dict[str, Any]) -> tuple[Span, ...]:
    """Return the header of a question, such as `◐ [label] edit(src/lib.rs)`. `label` is None for the primary."""
    who: tuple[Span, ...] = () if label is None else (("label", f"[{label}] "),)
    return (("mark", "◐ "), *who, *make_call_spans(tool, args))


def describe_asker(question: Approval, *, names_run: bool = False) -> str:
    """Return who asks a question and its number, to show beside its header.

    With `names_run`, also return the run, for a screen that shows the questions of several trees."""
    asker = f"{question.agent} · question {question.number}"
    return f"{asker} of {question.tree}/{question.run}" if names_run else asker


def format_question_body(question: Approval | ApprovalAsked) -> str:
    """Return the text to show to a person who answers: the preview, or the arguments if there is no preview."""
    return question.preview or (format_json(question.args) if question.args else "")


def format_json(value: Any) -> str:
    """Format a value as JSON for people, indented by two spaces. Values that JSON does not support become their
    `str`."""
    try:
        return json.dumps(value, indent=2, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):
        return "(nested too deeply to show)"


def reformat_json(text: str) -> str:
    """Indent a JSON object or array by two spaces; return any other text unchanged."""
    if not text.lstrip().startswith(("{", "[")):
        return text
    try:
        return msgspec.json.format(text, indent=2)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def format_seconds(value: float) -> str:
    """Format seconds as `10s` or `2.5s`."""
    return f"{value:.3f}".rstrip("0").rstrip(".") + "s" if value < 1e9 else f"{value:g}s"


def make_call_spans(tool: str, args: dict[str, Any]) -> tuple[Span, ...]:
    return ("tool", tool), ("plain", f"({describe_call(tool, args) or _describe_args(args)})")


def _describe_args(args: dict[str, Any]) -> str:
    """Describe a call of an unlisted tool by its first argument that is a text or a list."""
    for name, value in args.items():
        if isinstance(value, str):
            return shorten_text(value, 60, 57)
        if isinstance(value, list):
            return format_count(len(value), "task") if name == "tasks" else f"{len(value)} {name}"
    return ""


def format_count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"
