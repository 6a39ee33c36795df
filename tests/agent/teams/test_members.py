"""Members of subagents in real trees: one member is an ordinary run on its model, and a task may not overrule it."""

import json
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Event
from retinue.core.control import ClientOptions
from retinue.core.events import RunEnded, RunSpawned, TeamDecided, ToolResult
from tests.supervisor.tree.kit import bodies, call, main, spawn

KID = "agents:\n  '*': [{text: did it}]\n"
OPEN = "orchestrator: {{coordination: {{{subagents}}}}}\n{rest}"


def configure(folder: Path, *, rest: str = "", **coordination: str) -> Path:
    keys = ", ".join(f"{key}: {value}" for key, value in coordination.items())
    config = folder / "retinue.yaml"
    config.write_text(OPEN.format(subagents=keys, rest=rest))
    return config


async def run_tree(folder: Path, *tasks: dict[str, Any], rest: str = "", **coordination: str) -> list[Event]:
    """Run a tree whose primary spawns these tasks at once, with these keys in retinue.yaml."""
    for name in ("one", "two"):
        (folder / f"{name}.yaml").write_text(KID)
    config = configure(folder, rest=rest, **coordination)
    async with retinue.open(mode="yes", project=folder, config=config) as r:
        run = await r.spawn(main({"main": [spawn(*tasks), {"text": "end"}], "*": [{"text": "inherited"}]}), "go")
        return [event async for event in run.events()]


def spawned(events: list[Event]) -> list[str]:
    return [body.model for body in bodies(events, RunSpawned)[1:]]


def error(events: list[Event]) -> str:
    reply = json.loads(bodies(events, ToolResult, run=0)[0].text)
    assert not reply["success"]
    return str(reply["error"])


@pytest.mark.requirement("MASS-25", "MASS-26", "MASS-27")
async def test_one_member_of_the_pool_or_of_the_primary_is_an_ordinary_run_on_its_model(tmp_path: Path) -> None:
    teams = "{enabled: true, agents: [{model: 'scripted:one.yaml'}], shared_child_team_types: [explorer]}"
    kids = [{"task": "x", "subagent_type": name} for name in ("explorer", "critic")]
    local = "subagent_agents: [{model: 'scripted:two.yaml'}]\n"
    events = await run_tree(tmp_path, *kids, subagent_orchestrator=teams, rest=local)
    assert spawned(events) == ["scripted:one.yaml", "scripted:two.yaml"]
    results = json.loads(bodies(events, ToolResult, run=0)[0].text)["results"]
    assert [result["answer"] for result in results] == ["did it", "did it"]


@pytest.mark.requirement("MASS-26")
async def test_a_profiles_own_model_wins_over_an_inherited_one(tmp_path: Path) -> None:
    kids = [{"task": "x", "subagent_type": name} for name in ("explorer", "critic")]
    rest = "profiles: {critic: {model: 'scripted:two.yaml'}}\n"
    events = await run_tree(tmp_path, *kids, subagent_orchestrator="{enabled: true}", rest=rest)
    assert spawned(events) == ["ScriptedModel", "scripted:two.yaml"]


async def test_a_member_may_run_another_profile(tmp_path: Path) -> None:
    teams = "{enabled: true}"
    local = "subagent_agents: [{model: 'scripted:one.yaml', profile: critic}]\n"
    events = await run_tree(
        tmp_path, {"task": "x", "subagent_type": "explorer"}, subagent_orchestrator=teams, rest=local
    )
    profile = json.loads(bytes(bodies(events, RunSpawned)[1].profile))
    assert profile["name"] == "explorer"
    assert profile["instructions"].startswith("You are a critic")


ANSWER = """\
agents:
  agent1: [{tools: [{name: new_answer, args: {content: one}}]}, {tools: [{name: vote, args: VOTE}]}, {text: presented}]
  agent2: [{tools: [{name: new_answer, args: {content: two}}]}, {tools: [{name: vote, args: VOTE}]}, {text: presented}]
""".replace("VOTE", "{agent_id: agent2.1, reason: better}")


@pytest.mark.requirement("MASS-24", "MASS-27")
@pytest.mark.parametrize("spawner", ["primary", "client"])
async def test_several_members_of_the_file_are_a_team_with_its_strategy(tmp_path: Path, spawner: str) -> None:
    (tmp_path / "one.yaml").write_text(ANSWER)
    (tmp_path / "two.yaml").write_text(ANSWER)
    pool = "[{id: fast, model: 'scripted:one.yaml'}, {model: 'scripted:two.yaml', profile: critic}]"
    teams = f"{{enabled: true, shared_child_team_types: ['*'], agents: {pool}, final_answer_strategy: winner_reuse}}"
    config = configure(tmp_path, subagent_orchestrator=teams)
    async with retinue.open(mode="yes", project=tmp_path, config=config, model="scripted:main.yaml") as r:
        if spawner == "primary":
            lead = main({"main": [spawn({"task": "x", "subagent_type": "EXPLORER"}), {"text": "end"}]})
            run = await r.spawn(lead, "go")
            events = [event async for event in run.events()]
        else:
            async with await r.control.open_client(ClientOptions(name="client", task="asks")) as client:
                run = await client.spawn("explorer", retinue.Task("x"))
                events = [event async for event in run.events()]
    made = {event.run: event.body for event in events if isinstance(event.body, RunSpawned) and event.run > 0}
    assert [body.model for body in made.values()] == ["", "scripted:one.yaml", "scripted:two.yaml"]
    assert [body.parent for body in made.values()] == [0, 1, 1]
    assert json.loads(bytes(made[3].profile))["instructions"].startswith("You are a critic")
    [decided] = bodies(events, TeamDecided)
    assert (decided.winner, decided.strategy, decided.votes) == (
        "agent2.1",
        "winner_reuse",
        {"agent1.1": 0, "agent2.1": 2},
    )
    [team_end] = bodies(events, RunEnded, run=1)
    assert (team_end.status, team_end.final_response) == ("done", "two")


@pytest.mark.requirement("MASS-24")
async def test_a_child_with_an_output_type_is_the_first_member_of_its_pool_alone(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("agents:\n  counter: [{tools: [{name: final_answer, args: {answer: 3}}]}]\n")
    pool = "[{model: 'scripted:one.yaml', profile: critic}, {model: 'scripted:two.yaml'}]"
    teams = f"{{enabled: true, shared_child_team_types: ['*'], agents: {pool}}}"
    config = configure(tmp_path, subagent_orchestrator=teams)
    counter = retinue.Profile("counter", "You count.", output=int)
    async with retinue.open(mode="yes", project=tmp_path, config=config) as r:
        lead = main({"main": [call("subagent_counter", task="count"), {"text": "{{last_result}}"}]}, tools=[counter])
        result = await r.run(lead, "go")
    assert result.final_response == "3", result.tool_logs
    [child] = result.children
    assert (child.structured, child.children) == (3, ())


@pytest.mark.requirement("MASS-26")
async def test_what_a_client_spawns_takes_the_pool_because_a_client_has_no_model(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text(KID)
    teams = "{enabled: true, agents: [{model: 'scripted:one.yaml'}]}"
    config = configure(tmp_path, subagent_orchestrator=teams, rest="subagent_agents: [{model: 'scripted:two.yaml'}]\n")
    async with (
        retinue.open(mode="yes", project=tmp_path, config=config, model="scripted:main.yaml") as r,
        await r.control.open_client(ClientOptions(name="client", task="asks")) as client,
    ):
        run = await client.spawn("explorer", retinue.Task("x"))
        events = [event async for event in run.events()]
    assert bodies(events, RunSpawned, run=1)[0].model == "scripted:one.yaml"


async def test_members_of_a_profile_made_in_python_need_teams_that_are_on() -> None:
    lead = retinue.Profile(
        "lead", model="scripted:main.yaml", subagent_agents=[retinue.Member(model="scripted:one.yaml")]
    )
    async with retinue.open(mode="yes") as r:
        with pytest.raises(retinue.ConfigError, match="'lead' has subagent_agents, and subagent_orchestrator in"):
            await r.spawn(lead, "go")
    with pytest.raises(retinue.ConfigError, match="has 11 subagent_agents; the maximum is 10"):
        retinue.Profile("lead", subagent_agents=[retinue.Member(model="a:b")] * 11)


@pytest.mark.requirement("MASS-29")
async def test_with_the_inherit_flag_spawn_subagents_rejects_a_model(tmp_path: Path) -> None:
    task = {"task": "x", "subagent_type": "explorer", "model": "scripted:one.yaml"}
    flag = "{enabled: true, inherit_spawning_agent_backend: true}"
    events = await run_tree(tmp_path, task, subagent_orchestrator=flag)
    assert spawned(events) == []
    assert error(events).startswith("Cannot set 'model' for subagent 'explorer': every subagent inherits its model, ")


async def test_a_continued_run_stays_the_one_run_that_it_was(tmp_path: Path) -> None:
    """The settings of now name two members and forbid models in tasks; what is continued has a model already."""
    teams = "{enabled: true, agents: [{model: 'scripted:one.yaml'}], shared_child_team_types: ['*']}"
    (tmp_path / "main.yaml").write_text(
        "agents:\n  main: [{tools: [{name: subagent_explorer, args: {task: x}}]}, end]\n"
    )
    options: dict[str, Any] = {"mode": "yes", "project": tmp_path, "path": tmp_path / ".retinue"}
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text("agents:\n  '*': [{text: first}]\n")
    config = configure(tmp_path, subagent_orchestrator=teams)
    lead = retinue.Profile("main", model="scripted:main.yaml")
    async with retinue.open(config=config, **options) as r:
        tree = (await r.run(lead, "go")).tree
    more = "{enabled: true, inherit_spawning_agent_backend: true, shared_child_team_types: ['*'], agents: "
    configure(tmp_path, subagent_orchestrator=more + "[{model: 'scripted:two.yaml'}, {model: 'scripted:two.yaml'}]}")
    async with retinue.open(config=config, **options) as r:
        run = await r.continue_run(f"{tree}/1", "go on", profiles=[lead])
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert (result.status, result.final_response) == ("done", "first")
    assert bodies(events, RunSpawned)[-1].model == "scripted:one.yaml"


async def test_without_subagents_no_run_has_a_tool_to_spawn_with(tmp_path: Path) -> None:
    events = await run_tree(tmp_path, {"task": "x"}, enable_subagents="false")
    [primary] = bodies(events, RunSpawned)
    tools = {tool["name"] for tool in json.loads(bytes(primary.tools))}
    assert "read" in tools
    assert not [name for name in tools if "agent" in name or name.startswith("custom_tool__")]
    assert not bodies(events, ToolResult, run=0)[0].success
