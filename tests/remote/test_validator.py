"""The validator alone: what it makes of reports beyond its bounds."""

from __future__ import annotations

import pytest

from retinue.core.events import Gap, Message, TurnStarted
from retinue.remote.port import STARTED, RemoteSpawned, Report
from retinue.remote.validator import Bounds, ReportValidator


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
