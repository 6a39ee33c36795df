"""The validator alone: what it makes of reports beyond its bounds."""

from __future__ import annotations

import pytest

from retinue.core.events import Gap, Message
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
