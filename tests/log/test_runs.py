"""The fold of a tree's events into its runs."""

import pytest

from retinue.core.events import ToolCall, ToolResult
from retinue.log.runs import Runs
from tests.log.kit import make_event, make_spawned


@pytest.mark.finding("R1")
def test_another_tool_call_does_not_copy_those_before_it() -> None:
    runs = Runs.of("t1", [make_spawned()])
    view = runs.runs[0]
    logs = view.tool_logs
    for number in range(100):
        runs.apply(make_event(2 * number + 2, ToolCall(f"c{number}", "look", {})))
        runs.apply(make_event(2 * number + 3, ToolResult(f"c{number}", "look", "seen")))
    assert view.tool_logs is logs
    assert [log.name for log in logs] == ["look"] * 100
