"""Many subagents in several processes that report at once: nothing lost, nothing torn, in order."""

import statistics
from pathlib import Path

import pytest

from tests.remote.collector.flood import flood
from tests.soak.conftest import Note


@pytest.mark.soak
async def test_reports_of_a_crowd(tmp_path: Path, note: Note) -> None:
    events = 150
    found = await flood(tmp_path, processes=4, subagents=200, events=events, per_second=1000)
    assert len(found.delays) == found.posted == 200 * events
    assert len(found.printed) == 200
    assert all(numbers == list(range(events)) for numbers in found.printed.values())
    note(events=found.posted, median_ms=1000 * statistics.median(found.delays), p99_ms=1000 * found.at(0.99))
