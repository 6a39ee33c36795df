"""The validator of peers' reports about runs. Every claim of a peer is untrusted.

Run ids must have been announced. A run ends once, and nothing follows its ending. `FIELDS` lists the fields that a peer
may set: names become short and printable, numbers can be added up, and texts fit an event. Every other field gets its
default, so paths, rules, and run numbers of the peer's tree never get into ours. Turn numbers increase. Duplicates
count once, missing reports leave a gap, and a flood ends in a gap. Pure: knows no tree and does no I/O.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeVar

import msgspec

from retinue.core.events import (
    INTERRUPTED,
    UNKNOWN_AFTER_CRASH,
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Gap,
    Inbox,
    Message,
    RunEnded,
    RunStarted,
    Thinking,
    ToolCall,
    ToolResult,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    UsageReported,
    Warned,
)
from retinue.core.limits import EVENT_BYTES
from retinue.core.messages import ASKER, FOREIGN, NOTHING_TO_RUN, NOTICE, QUESTION, REMINDER, TASK, USERS_OWN
from retinue.core.results import ENDING_CODES, STATUSES, ending_texts
from retinue.core.sendable import INVALID, find_problem
from retinue.remote.port import STARTED, RemoteDelta, RemoteSpawned, Report

DELTA_KINDS = ("text", "thinking", "output")
NAMELESS = "subagent"  # the agent name of a run that its peer does not name
NAME_CHARACTERS = 64
ID_CHARACTERS = 200
MOST_SPENT = 10**12
MOST_TURNS = 10**6
MOST_SANDBOX_PARTS = 32
# The values of fields that have only certain values. The first one takes the place of any other value.
REPLIES_TO = ("", TASK, "user", ASKER)
TIERS = ("confirm", "observe", NOTHING_TO_RUN, USERS_OWN, QUESTION, FOREIGN)
OUTCOMES = ("", UNKNOWN_AFTER_CRASH, INTERRUPTED)
SOURCES = (NOTICE, ASKER, REMINDER)  # only our user is the user
_NO_VALUES: dict[str, Any] = {"args": {}, "structured": None}

Code = Literal["unknown", "ended", "parent_ended", "too_deep"]


class Rejected(Exception):
    """Raised for a report that the peer may not make. `code` is the reason: the run was never announced (`unknown`),
    the run has ended (`ended`), a new run is below an ended run (`parent_ended`), or a new run is nested too deeply
    (`too_deep`)."""

    def __init__(self, code: Code, run: str) -> None:
        super().__init__(f"{code}: {run}")
        self.code: Code = code
        self.run = run


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Limits on the reports that a validator accepts from its peer."""

    runs: int = 1000
    reports: int = 200_000
    mib: int = 256
    depth: int = 32


@dataclass(slots=True, eq=False)
class _PeerRun:
    """The state of one run of the peer. `depth` is its depth in our tree."""

    depth: int
    seq: int = 0
    turn: int = 0
    has_started: bool = False
    ended: bool = False
    is_cut: bool = False


class ReportValidator:
    """A validator for the reports of one peer. `who` names the peer in the texts of gaps."""

    def __init__(self, who: str, bounds: Bounds | None = None) -> None:
        self._who = who
        self._bounds = bounds or Bounds()
        self._runs: dict[str, _PeerRun] = {}
        self._spawns = 0
        self._reports = 0
        self._bytes = 0

    def announce(self, run: str, *, depth: int) -> None:
        """Allow reports about `run` and runs below it. `run` was started by us, has made a call to the peer, or comes
        from the log."""
        self._runs.setdefault(run, _PeerRun(depth))

    def end(self, run: str) -> None:
        """Reject all further reports about a run."""
        self._runs.setdefault(run, _PeerRun(0)).ended = True

    def check(self, report: Report) -> list[Report]:
        """Return the reports to adopt in place of `report`, in order. Duplicates and reports beyond the bounds give an
        empty list; missing reports add a gap. Raises Rejected if the peer may not make the report at all."""
        if isinstance(report.body, RemoteSpawned):
            return self._check_spawned(report, report.body)
        known = self._runs.get(report.run)
        if known is None:
            raise Rejected("unknown", report.run)
        if known.ended:
            raise Rejected("ended", report.run)
        if isinstance(report.body, RemoteDelta):
            return [report] if self._is_sound_delta(report.body, known) else []
        if report.seq is not None and report.seq <= known.seq:
            return []
        found: list[Body] = self._find_gap(report, known)
        if self._is_within_bounds(report) or isinstance(report.body, RunEnded):
            for body in (report.spent, report.body):
                found += [] if body is None else self._check_body(report.run, body, known)
        else:
            found += self._cut_off(known)
        if report.size > EVENT_BYTES:
            found = [_remove_values(body) for body in found]
        return [msgspec.structs.replace(report, body=body) for body in found]

    def _find_gap(self, report: Report, known: _PeerRun) -> list[Body]:
        """Return the gap before a numbered report, if reports are missing."""
        if report.seq is None:
            return []
        missing, known.seq = report.seq - known.seq - 1, report.seq
        return [Gap(missing, f"{self._who} did not report them")] if missing > 0 else []

    def _is_within_bounds(self, report: Report) -> bool:
        self._reports += 1
        self._bytes += report.size
        return self._reports <= self._bounds.reports and self._bytes <= self._bounds.mib * 1024 * 1024

    def _cut_off(self, known: _PeerRun) -> list[Gap]:
        """Return the gap for a run whose reports are beyond the bounds from now on, unless it has one."""
        if known.is_cut:
            return []
        known.is_cut = True
        most = f"{self._bounds.reports} events or {self._bounds.mib} MiB"
        return [Gap(1, f"{self._who} reports more than {most}; the rest is not shown")]

    def _is_sound_delta(self, delta: RemoteDelta, known: _PeerRun) -> bool:
        """Return True if a delta can be shown. It must belong to the run's current turn, or to the next turn, whose
        event is still on its way. Deltas are not written, so only their bytes count."""
        self._bytes += len(delta.text)
        is_timely = delta.kind == "output" or known.turn <= delta.turn <= known.turn + 1
        is_placed = delta.kind in DELTA_KINDS and 0 <= delta.offset <= EVENT_BYTES
        return is_timely and is_placed and self._bytes <= self._bounds.mib * 1024 * 1024

    def _check_spawned(self, report: Report, body: RemoteSpawned) -> list[Report]:
        parent = self._runs.get(body.parent)
        if parent is None:
            raise Rejected("unknown", report.run)
        if report.run in self._runs:
            return []
        if parent.ended:
            raise Rejected("parent_ended", report.run)
        if parent.depth >= self._bounds.depth:
            raise Rejected("too_deep", report.run)
        self._spawns += 1
        if not self._is_within_bounds(report):
            return [Report(body.parent, gap) for gap in self._cut_off(parent)]
        if self._spawns > self._bounds.runs:
            if self._spawns != self._bounds.runs + 1:
                return []
            reason = f"{self._who} reports more than {self._bounds.runs} runs; the rest is not shown"
            return [Report(body.parent, Gap(1, reason))]
        known = self._runs[report.run] = _PeerRun(parent.depth + 1)
        spawned = msgspec.structs.replace(report, body=clean_body(body))
        return [spawned, *(Report(report.run, gap) for gap in self._find_gap(report, known))]

    def _check_body(self, run: str, body: Body, known: _PeerRun) -> list[Body]:
        match body:
            case RunStarted():
                if known.has_started:
                    return []
                known.has_started = True
            case TurnStarted(turn=turn):
                if not max(known.turn, 1) <= turn <= MOST_TURNS:  # a run that was resumed begins its turn again
                    return [Gap(1, f"{self._who} counts its turns backwards")]
                known.turn = turn
            case UsageReported() if not _can_be_added(body):
                return [Gap(1, f"{self._who} reports an impossible model call")]
            case Warned(code="empty_result") if run == STARTED:
                return []  # the supervisor adds this warning itself to a run that it ends
            case RunEnded():
                known.ended = True
                return [_repair_ending(clean_body(body))]
            case _ if type(body) not in FIELDS:
                return []
        return [clean_body(body)]


def clean_name(text: str) -> str:
    """Return a short name that is safe in paths and headers: letters, digits, `-`, `_` and `.`."""
    kept = "".join(c if c.isalnum() or c in "-_." else "-" for c in text.strip()[:NAME_CHARACTERS])
    return kept.strip("-.")


def clean_label(text: str) -> str:
    """Return a peer's label as one printable line."""
    return " ".join("".join(c if c.isprintable() else " " for c in text[:ID_CHARACTERS]).split())


def cut_text(text: str) -> str:
    """Return the text if it fits an event, else its beginning and a mark with the number of missing bytes."""
    if len(text) * 4 <= EVENT_BYTES or len(data := text.encode("utf-8", "replace")) <= EVENT_BYTES:
        return text
    kept = data[: EVENT_BYTES - 1024]
    return f"{kept.decode('utf-8', 'ignore')}\n[... {len(data) - len(kept)} more bytes were cut]"


def _keep(value: Any) -> Any:
    return value


def _cut_id(value: str) -> str:
    return value[:ID_CHARACTERS]


def _cut_optional_text(value: str | None) -> str | None:
    return None if value is None else cut_text(value)


def _cut_parts(value: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(part[:ID_CHARACTERS] for part in value[:MOST_SANDBOX_PARTS])


def _choose(value: str, known: Sequence[str]) -> str:
    """Return the value if `known` has the value, else the first of `known`."""
    return value if value in known else known[0]


def _limit_number(value: int) -> int:
    return max(0, min(value, MOST_SPENT))


def _check_seconds(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) and value > 0 else None


def _round_cost(value: Decimal | None) -> Decimal | None:
    return None if value is None else +value  # to 28 digits


def _check_args(value: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return arguments that can be stored and copied. In place of others, return why they cannot."""
    why = find_problem(value)
    return {INVALID: why} if why else value


def _check_value(value: Any) -> Any:
    return None if find_problem(value) else value


Field = Callable[[Any], Any]
FIELDS: Mapping[type[Body] | type[RemoteSpawned], Mapping[str, Field]] = {
    RemoteSpawned: {
        "parent": _keep,  # a run that was announced
        "agent": lambda value: clean_name(value) or NAMELESS,
        "task": cut_text,
        "label": clean_label,
        "subagent_id": clean_label,
        "model": _cut_id,
        "call_id": _cut_id,
        "is_at_work": _keep,
    },
    RunStarted: {"sandbox": _cut_parts},
    TurnStarted: {"turn": _keep},  # checked against the turn before
    Thinking: {"text": cut_text, "type": _cut_id},
    Message: {"text": cut_text, "final": _keep, "host": _keep, "replies_to": lambda value: _choose(value, REPLIES_TO)},
    ToolCall: {
        "call_id": _cut_id,
        "name": _cut_id,
        "args": _check_args,
        "tier": lambda value: _choose(value, TIERS),
        "display_name": _cut_id,
        "waits": _keep,
        "timeout_seconds": _check_seconds,
        "host": _keep,
        "within": _cut_id,
        "raw": cut_text,
    },
    ToolStarted: {"call_id": _cut_id},
    ToolResult: {
        "call_id": _cut_id,
        "name": _cut_id,
        "text": cut_text,
        "success": _keep,
        "duration_ms": _limit_number,
        "outcome": lambda value: _choose(value, OUTCOMES),
        "sandbox": _cut_parts,
    },
    # The id becomes one of ours, and the label that of the run. Rules and digests are made here, if we ask the person.
    ApprovalAsked: {
        "approval_id": _cut_id,
        "call_id": _cut_id,
        "tool": _cut_id,
        "args": _check_args,
        "preview": cut_text,
    },
    # An answer given at the peer is about this call there, whoever gave it and whatever else was said with it.
    ApprovalDecided: {
        "approval_id": _cut_id,
        "call_id": _cut_id,
        "allowed": _keep,
        "reason": cut_text,
        "tool": _cut_id,
        "args": _check_args,
    },
    Inbox: {"text": cut_text, "source": lambda value: _choose(value, SOURCES)},
    UsageReported: {"model": _cut_id, "usage": _keep, "cost": _round_cost, "estimated": _keep},  # can be added up
    TurnEnded: {"turn": lambda value: min(_limit_number(value), MOST_TURNS)},
    Warned: {"text": cut_text, "code": _cut_id},
    Gap: {"count": _limit_number, "reason": cut_text},
    RunEnded: {
        "status": _keep,  # repaired afterwards, like the code
        "final_response": cut_text,
        "duration_ms": lambda value: 0,  # measured here
        "error_details": _cut_optional_text,
        "partial": cut_text,
        "structured": _check_value,
        "code": _keep,
    },
}
"""The fields that a peer may set in a report, each with the function that makes the value fit for our log. A field that
is not listed gets its default. A body that is not listed is dropped."""

B = TypeVar("B", bound=Body | RemoteSpawned)


def clean_body(body: B) -> B:
    """Return the body with only the fields of `FIELDS`."""
    fields = FIELDS[type(body)]  # type: ignore[index] # a body of one of these types
    return type(body)(**{name: clean(getattr(body, name)) for name, clean in fields.items()})


def _remove_values(body: Body) -> Body:
    """Return the body without its structured values. The texts are already cut, so only these values can be too
    large."""
    changes = {name: value for name, value in _NO_VALUES.items() if getattr(body, name, None)}
    return msgspec.structs.replace(body, **changes) if changes else body


def _repair_ending(body: RunEnded) -> RunEnded:
    """Return the ending with a valid status and code. An ending without text gets the usual text of its status."""
    status: Any = body.status if body.status in STATUSES else "failed"
    text, error = body.final_response, body.error_details
    if status == "done":
        error = None
    else:
        usual = ending_texts(status, name="", primary=False)[0]
        text = text or usual
        error = error or text
    code = body.code if status != "done" and body.code in ENDING_CODES else ""
    return msgspec.structs.replace(body, status=status, final_response=text, error_details=error, code=code)


def _can_be_added(body: UsageReported) -> bool:
    """Return True if the usage and cost are numbers that can be added up."""
    numbers = [number for number in msgspec.structs.astuple(body.usage) if number is not None]
    cost = body.cost
    return all(0 <= number <= MOST_SPENT for number in numbers) and (
        cost is None or (cost.is_finite() and 0 <= cost <= MOST_SPENT and cost.adjusted() > -20)
    )
