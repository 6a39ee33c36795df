"""The page for people who write a subagent server: its program reports, its setting loads, its lists are complete."""

import re
from pathlib import Path
from typing import get_args

import pytest

from retinue.config.project import load_project
from retinue.core.events import RunEnded
from retinue.protocol import inherited_limits, reports
from tests.docs.test_docs import ROOT, snippets
from tests.remote.collector.kit import open_collector, runs_of
from tests.remote.collector.test_adopted import printed

PAGE = ROOT / "docs" / "collector.md"


@pytest.mark.requirement("CPE-59")
async def test_the_program_of_the_page_reports(tmp_path: Path) -> None:
    [program] = snippets(PAGE, "python")
    file = tmp_path / "server.py"
    file.write_text(program + "\nimport sys\nprint(review('review the change', sys.argv[1]))\n")
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        process = await server.start(str(file), run_id)
        said, complaint = await process.communicate()
        assert (said, complaint) == (b"src/pool.py takes the lock twice.\n", b"")
        events = await h.until("run.ended")
        run = runs_of(events)[run_id]
        assert [body.status for body in (event.body for event in events) if isinstance(body, RunEnded)] == ["done"]
        shown = printed([event for event in events if event.run == run]).replace(run_id, "review-5d1f09ab")
        page = re.findall(r"^```\n(○.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)[0]
        assert shown.startswith(page)


async def test_without_an_address_the_program_runs_as_well(tmp_path: Path) -> None:
    [program] = snippets(PAGE, "python")
    found: dict[str, object] = {}
    exec(program, found)
    assert found["review"]("prompt", "r1").startswith("src/pool.py")  # type: ignore[operator]


def test_the_setting_of_the_page_loads(tmp_path: Path) -> None:
    [config] = snippets(PAGE, "yaml")
    (tmp_path / "retinue.yaml").write_text(config)
    assert (
        load_project(tmp_path, config=tmp_path / "retinue.yaml").settings.coordination.subagent_reports == "best_effort"
    )


def test_the_page_has_every_field_and_variable() -> None:
    text = PAGE.read_text()
    names = [
        *reports.Reported.__struct_encode_fields__,
        *get_args(reports.Type),
        reports.ADDRESS,
        reports.CPE_ADDRESS,
    ]
    names += [
        *(name for pair in inherited_limits.KEYS.values() for name in pair),
        inherited_limits.TRACE,
        inherited_limits.PARENT_KEY,
    ]
    assert [name for name in names if name not in text] == []
