"""The validator alone: what it makes of reports beyond its bounds."""

from __future__ import annotations

from decimal import Decimal
from math import inf, nan
from typing import Any

import msgspec
import pytest

from retinue.core.events import (
    KINDS,
    Body,
    Gap,
    Inbox,
    Message,
    RunEnded,
    RunRemote,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
    UsageReported,
)
from retinue.core.sendable import INVALID, find_problem
from retinue.core.usage import Usage
from retinue.protocol.peer_events import REPORTED
from retinue.remote.port import STARTED, RemoteSpawned, Report
from retinue.remote.validator import FIELDS, Bounds, ReportValidator
from tests.remote.contract import INSTEAD, MAY_SET, expect_fields, make_hostile

DEEP: dict[str, Any] = {}
for _ in range(900):
    DEEP = {"deep": DEEP}


def check_one(body: Body) -> list[Body]:
    validator = ReportValidator("the peer")
    validator.announce(STARTED, depth=0)
    return [report.body for report in validator.check(Report(STARTED, body))]  # type: ignore[misc]


@pytest.mark.requirement("P16", "P34")
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_every_field_that_a_peer_may_not_set_is_dropped(kind: type[Body]) -> None:
    """For every kind of event and every field: a new field is dropped until somebody adds it to `MAY_SET` too."""
    if kind not in MAY_SET:
        assert kind not in FIELDS  # as a whole
        return
    [arrived] = check_one(make_hostile(kind))
    assert msgspec.structs.asdict(arrived) == expect_fields(make_hostile(kind))


def test_what_a_peer_may_report_is_one_decision() -> None:
    assert set(FIELDS) == {*REPORTED, RemoteSpawned} == {*MAY_SET, RemoteSpawned}
    for kind, names in MAY_SET.items():
        instead = {name for of, name in INSTEAD if of is kind}
        assert set(FIELDS[kind]) == {*names.split(), *instead}


@pytest.mark.parametrize(
    ("said", "arrives"),
    [
        (Inbox("x", source="user"), Inbox("x", source="notice")),  # only our user is the user
        (Inbox("x", source="asker"), Inbox("x", source="asker")),
        (Message("x", replies_to="agent:1"), Message("x")),  # a number of the peer's tree
        (Message("x", replies_to="user"), Message("x", replies_to="user")),
        (ToolCall("c", "n", {}, tier="provider"), ToolCall("c", "n", {})),
        (ToolCall("c", "n", {}, tier="none"), ToolCall("c", "n", {}, tier="none")),
        (ToolCall("c", "n", {}, timeout_seconds=nan), ToolCall("c", "n", {})),
        (ToolCall("c", "n", {}, timeout_seconds=inf), ToolCall("c", "n", {})),
        (ToolCall("c", "n", {}, timeout_seconds=-1), ToolCall("c", "n", {})),
        (ToolResult("c", "n", "x", duration_ms=10**30), ToolResult("c", "n", "x", duration_ms=10**12)),
        (ToolResult("c", "n", "x", duration_ms=-1), ToolResult("c", "n", "x")),
        (ToolCall("c", "n", DEEP), ToolCall("c", "n", {INVALID: find_problem(DEEP)})),
        (RunEnded("done", "x", 0, structured=DEEP), RunEnded("done", "x", 0)),
        (TurnEnded(10**30), TurnEnded(10**6)),
        (Gap(-(10**30), "x"), Gap(0, "x")),
        (UsageReported("m", Usage(1, 1), Decimal("0." + "1" * 10_000)),
         UsageReported("m", Usage(1, 1), Decimal("0." + "1" * 28))),
    ],
)  # fmt: skip
def test_values_that_our_folds_would_believe_are_replaced(said: Body, arrives: Body) -> None:
    assert check_one(said) == [arrives]


def test_a_kind_that_no_peer_may_report_is_dropped() -> None:
    assert check_one(RunRemote("scripted", "evil")) == []


def test_a_long_id_of_the_run_above_stays_whole() -> None:
    validator = ReportValidator("the peer")
    validator.announce("long" * 100, depth=0)
    [spawned] = validator.check(Report("below", RemoteSpawned(parent="long" * 100, agent="x")))
    assert spawned.body == RemoteSpawned(parent="long" * 100, agent="x")


@pytest.mark.parametrize("bounds", [Bounds(reports=1), Bounds(mib=0)])
def test_a_new_run_beyond_the_bounds_leaves_one_gap_above_it(bounds: Bounds) -> None:
    validator = ReportValidator("the peer", bounds)
    validator.announce(STARTED, depth=0)
    if bounds.reports == 1:
        assert len(validator.check(Report(STARTED, Message("in time")))) == 1
    [left] = validator.check(Report("late", RemoteSpawned(parent=STARTED, agent="x"), size=10))
    assert left.run == STARTED and isinstance(left.body, Gap)
    assert left.body.reason.endswith("the rest is not shown")
    assert validator.check(Report("later", RemoteSpawned(parent=STARTED, agent="x"), size=10)) == []
    assert validator.check(Report(STARTED, Message("too late"), size=10)) == []


def test_a_run_that_its_peer_resumed_begins_its_turn_again() -> None:
    validator = ReportValidator("the peer")
    validator.announce(STARTED, depth=0)
    for turn in (1, 2, 2, 3):
        assert [report.body for report in validator.check(Report(STARTED, TurnStarted(turn)))] == [TurnStarted(turn)]


@pytest.mark.parametrize("turns", [(0,), (2, 1), (1, 10**9)])
def test_turns_that_go_back_or_cannot_be_leave_a_gap(turns: tuple[int, ...]) -> None:
    validator = ReportValidator("the peer")
    validator.announce(STARTED, depth=0)
    *_, last = [validator.check(Report(STARTED, TurnStarted(turn))) for turn in turns]
    assert [report.body for report in last] == [Gap(1, "the peer counts its turns backwards")]
