"""`spawn_subagents` with a type that is a team, inside a tree: one result in the shape of seed 004, with `refine` or
without."""

import json
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Event
from retinue.core.events import AnswersShown, TeamDecided, ToolResult, VoteCast
from tests.supervisor.tree.kit import bodies, call, main, spawn

RESULT = {
    "subagent_id", "status", "success", "answer", "workspace", "execution_time_seconds", "error", "token_usage",
    "log_path", "warning", "timeout_seconds", "team",
}  # fmt: skip


def member(number: int, *, choice: str) -> list[dict[str, Any]]:
    usage = {"input_tokens": 10, "output_tokens": number}
    return [
        {**call("new_answer", content=f"answer {number}"), "usage": usage},
        {**call("vote", agent_id=choice, reason="better"), "usage": usage},
        {"text": f"presented by {number}", "usage": usage},
    ]


async def run_tree(folder: Path, *, strategy: str = "", refine: bool = False) -> tuple[dict[str, Any], list[Event]]:
    """Run a primary that spawns a critic, which is a team of two by retinue.yaml; return the reply and the events."""
    pool = "[{model: 'scripted:a.yaml'}, {id: second, model: 'scripted:b.yaml'}]"
    wanted = f", final_answer_strategy: {strategy}" if strategy else ""
    (folder / "retinue.yaml").write_text(
        f"orchestrator: {{coordination: {{subagent_orchestrator: {{enabled: true, agents: {pool}, "
        f"shared_child_team_types: [critic]{wanted}}}}}}}\n"
    )
    one, two = member(1, choice="agent2"), member(2, choice="agent2")
    if not refine and not strategy:  # nobody votes, and the first member presents
        one, two = [one[0], one[2]], two[:1]
    for name, agents in (("a", {"agent1": one}), ("b", {"agent2": two})):
        (folder / f"{name}.yaml").write_text(json.dumps({"strict": True, "agents": agents}))
    options: dict[str, Any] = {"refine": True} if refine else {}
    lead = main({"main": [spawn({"task": "look", "subagent_type": "critic"}, **options), {"text": "end"}]})
    async with retinue.open(mode="yes", project=folder, config=folder / "retinue.yaml", path=folder / ".retinue") as r:
        run = await r.spawn(lead, "go")
        events = [event async for event in run.events()]
    return json.loads(bodies(events, ToolResult, run=0)[0].text), events


@pytest.mark.requirement("MASS-41", "MASS-42", "MASS-48", "MASS-53")
async def test_a_quick_team_synthesizes_without_a_vote(tmp_path: Path) -> None:
    reply, events = await run_tree(tmp_path)
    assert (reply["success"], reply["mode"], set(reply["results"][0])) == (True, "blocking", RESULT)
    assert reply["summary"] == {"total": 1, "completed": 1, "failed": 0, "timeout": 0, "cancelled": 0}
    [result] = reply["results"]
    assert (result["status"], result["answer"]) == ("completed", "presented by 1")
    assert result["token_usage"] == {"input_tokens": 30, "output_tokens": 4}
    status = json.loads(Path(result["log_path"]).read_text())
    assert (status["usage"]["output_tokens"], status["workspace"]) == (4, result["workspace"])
    assert Path(result["workspace"]).is_dir()
    assert bodies(events, VoteCast) == bodies(events, AnswersShown) == []
    assert [decided.strategy for decided in bodies(events, TeamDecided)] == ["synthesize"]
    one, two = result["team"]["members"]
    assert (one["agent"], one["answers"], two["answers"], two["vote"]) == ("agent1", ["agent1.1"], ["agent2.1"], "")


@pytest.mark.requirement("MASS-41")
async def test_an_explicit_strategy_wins(tmp_path: Path) -> None:
    reply, events = await run_tree(tmp_path, strategy="winner_reuse")
    assert reply["results"][0]["answer"] == "answer 2"
    assert (len(bodies(events, VoteCast)), bodies(events, TeamDecided)[0].presenter) == (2, None)


@pytest.mark.requirement("MASS-48", "MASS-53")
async def test_refine_goes_on_until_all_have_voted(tmp_path: Path) -> None:
    reply, events = await run_tree(tmp_path, refine=True)
    [result] = reply["results"]
    assert (result["answer"], set(result)) == ("presented by 2", RESULT)
    team = result["team"]
    assert (team["strategy"], team["winner"], team["votes"]) == (
        "winner_present",
        "agent2.1",
        {"agent1.1": 0, "agent2.1": 2},
    )
    assert [each["vote"] for each in team["members"]] == ["agent2.1", "agent2.1"]
    assert len(bodies(events, VoteCast)) == 2
