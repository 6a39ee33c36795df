"""The six open questions of seed 002, as we decided them, in one place; the details are held elsewhere."""

from pathlib import Path

import pytest

import retinue
from retinue import Allow, Limits, Profile
from retinue.config.project import load_project
from retinue.core.events import RunSpawned, ToolResult
from tests.docs.test_docs import ROOT, snippets
from tests.supervisor.approvals.test_pending import WAIT, Pages, pages, waiting
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree


@pytest.mark.requirement("CODEY-40")
async def test_timeouts_are_1800_seconds_and_what_a_model_asks_for_is_clamped() -> None:
    tasks = [{"task": "a"}, {"task": "b", "timeout_seconds": 1}, {"task": "c", "timeout_seconds": 999_999}]
    script = {"main": [spawn(*tasks), {"text": "x"}], "subagent": [{"text": "y"}]}
    _, events = await tree(script)
    seconds = [spawned.timeout_seconds for spawned in bodies(events, RunSpawned)]
    assert seconds == [None, 1800, 60, 14400]


@pytest.mark.requirement("CODEY-40")
async def test_cancelling_a_parent_ends_all_below_it_and_their_questions() -> None:
    made = Pages()
    kid = Profile("kid", tools=[made.tool])
    script = {"main": [call("subagent_kid", task="k"), {"text": "x"}], "kid": [pages("anna"), {"text": "y"}]}
    async with retinue.open(wait_approvals=WAIT, allow=["subagent_*"]) as r:
        run = await r.spawn(main(script, tools=[kid]), "go")
        [question] = await waiting(r, 1)
        assert await run.cancel()
        result = await run.result()
        assert r.control.approvals.answer(question.id, Allow(), by="user") == "stale"
    assert (result.status, result.children[0].status, made.made) == ("cancelled", "cancelled", [])


@pytest.mark.requirement("CODEY-40")
async def test_limits_nesting_and_the_size_of_results_are_bounded() -> None:
    kid = Profile("kid")
    down = {"main": [call("subagent_kid", task="k"), {"text": "{{last_result}}"}]}
    deeper = [call("subagent_kid", task="deeper"), {"text": "{{last_result}}"}]
    result, events = await tree({**down, "kid": deeper}, profiles=[kid])
    assert "Subagent depth limit exceeded (3/3)" in result.final_response
    assert len(bodies(events, RunSpawned)) == 4
    result, _ = await tree({**down, "kid": [{"text": "y"}]}, profiles=[kid], limits=Limits(concurrent=0))
    assert "maximum concurrent subagent limit reached" in result.final_response
    _, events = await tree({**down, "kid": [{"text": "y" * 200_000}]}, profiles=[kid])
    [answer] = bodies(events, ToolResult, run=0)
    assert len(answer.text.encode()) <= 50 * 1024 + 200 and Path(answer.file).name


def test_the_rules_on_the_page_load(tmp_path: Path) -> None:
    (tmp_path / "retinue.yaml").write_text("".join(snippets(ROOT / "docs/approvals.md", "yaml")))
    project = load_project(tmp_path, config=tmp_path / "retinue.yaml")
    assert project.settings.notify_command == ("notify-send", "Retinue", "A question waits")
    assert project.settings.approvals.mode == "ask" and len(project.settings.approvals.allow) == 3
    explorer = next(profile for profile in project.all_profiles if profile.name == "explorer")
    assert explorer.approvals is not None and [str(rule) for rule in explorer.approvals.deny] == [
        "shell",
        "write",
        "edit",
    ]
