"""Teams and rounds in retinue.yaml: members, wrong combinations with file and line, warnings, trust."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from retinue.config.project import load_project
from retinue.config.settings import Settings, load_settings, restrict
from retinue.core.errors import ConfigError
from retinue.core.rounds import Criterion, Rounds
from retinue.core.team_members import TeamSettings
from retinue.core.teams import Member
from tests.config.conftest import Write

TEAM = """\
subagent_agents: [{model: "a:one"}]
orchestrator:
  coordination:
    subagent_orchestrator:
      enabled: true
      agents:
        - {id: careful, backend: {type: anthropic, model: big}}
        - {model: "openai:small", profile: critic}
      final_answer_strategy: winner_reuse
      max_new_answers: 2
profiles:
  explorer: {subagent_agents: [{model: "b:two"}, {model: "b:three"}]}
"""
ROUNDS = """\
orchestrator:
  voting_sensitivity: checklist_gated
  coordination:
    enable_subagents: true
    subagent_types: [Round_Evaluator, explorer]
    subagent_orchestrator: {enabled: true}
    round_evaluator_before_checklist: true
    orchestrator_managed_round_evaluator: true
    round_evaluator_refine: true
    round_evaluator_transformation_pressure: aggressive
    checklist_criteria_inline: [{text: It runs., category: must}, {text: It is short., category: could}]
"""


def refuse(write: Write, text: str) -> str:
    """Return the error of a project with this file, without its folder."""
    path = write("retinue.yaml", textwrap.dedent(text))
    with pytest.raises(ConfigError) as caught:
        load_project(path.parent, config=path)
    return str(caught.value).removeprefix(f"{path.parent}/")


def team(line: str, *, enabled: str = "true") -> str:
    return f"orchestrator:\n  coordination:\n    subagent_orchestrator:\n      enabled: {enabled}\n      {line}\n"


def test_without_keys_teams_and_rounds_are_off_and_subagents_on() -> None:
    settings = Settings()
    assert settings.coordination.enable_subagents
    assert settings.coordination.subagent_orchestrator == TeamSettings()
    assert settings.coordination.rounds is None
    assert not TeamSettings().enabled
    assert TeamSettings().max_new_answers_per_agent == 3


def test_members_of_the_pool_of_the_primary_and_of_a_profile(write: Write, tmp_path: Path) -> None:
    project = load_project(tmp_path, config=write("retinue.yaml", TEAM))
    assert project.warnings == ()
    assert project.settings.coordination.subagent_orchestrator == TeamSettings(
        enabled=True,
        agents=(
            Member(id="careful", model="anthropic:big"),
            Member(id="agent2", model="openai:small", profile="critic"),
        ),
        final_answer_strategy="winner_reuse",
        max_new_answers_per_agent=2,
    )
    explorer = next(profile for profile in project.profiles if profile.name == "explorer")
    assert explorer.subagent_agents == (Member(id="agent1", model="b:two"), Member(id="agent2", model="b:three"))


def test_the_keys_of_rounds_are_read(write: Write) -> None:
    settings = load_settings(write("retinue.yaml", ROUNDS))
    assert settings.coordination.rounds == Rounds(
        refine=True,
        pressure="aggressive",
        criteria=(Criterion(text="It runs."), Criterion(text="It is short.", category="could")),
    )


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("agents: [{id: x}]", "5: key '{}.agents[0]': give it a 'model', or a 'backend' with type and model"),
        ("agents: [{model: m, backend: {type: a, model: b}}]", "5: key '{}.agents[0]': give it a 'model', or a "),
        ("agents: [{backend: {type: a}}]", "5: key '{}.agents[0].backend': the key 'model' is missing"),
        ("agents: [{backend: {type: 'a:b', model: c}}]", "5: key '{}.agents[0].backend.type': expected the name of a"),
        ("agents: [{model: m, colour: red}]", "5: key '{}.agents[0].colour': unknown key; allowed here: backend, id,"),
        ("agents: [{model: m}, {id: AGENT1, model: m}]", "5: key '{}.agents[1]': the id 'AGENT1' is the same name as"),
        (f"agents: [{', '.join(['{model: m}'] * 11)}]", "5: key '{}.agents': has 11 members; the maximum is 10"),
        ("agents: [{model: m, profile: critc}]", "5: key '{}.agents[0]': unknown profile 'critc'; available: critic, "),
        ("agents: [{model: m, profile: novelty}]", "5: key '{}.agents[0]': the profile 'novelty' is not active: add "),
        ("final_answer_strategy: best", "5: key '{}.final_answer_strategy': unknown value 'best'; available: synth"),
        ("max_new_answers: 0", "5: key '{}.max_new_answers': must be 1 or more, got 0"),
        (
            "max_new_answers: 2\n      max_new_answers_per_agent: 2",
            "5: key '{}.max_new_answers': is the same as 'max_new_answers_per_agent': give only one",
        ),
    ],
)
def test_what_is_wrong_with_a_team_is_said_with_its_line(write: Write, line: str, expected: str) -> None:
    message = refuse(write, team(line))
    assert message.startswith("retinue.yaml:" + expected.format("orchestrator.coordination.subagent_orchestrator"))


@pytest.mark.parametrize(
    "line",
    [
        "agents: [{model: m}]",
        "shared_child_team_types: ['*']",
        "inherit_spawning_agent_backend: true",
        "final_answer_strategy: synthesize",
        "max_new_answers_per_agent: 3",
        "max_new_answers: 3",
    ],
)
def test_a_key_of_a_team_that_is_off_is_no_silent_nothing(write: Write, line: str) -> None:
    key = f"orchestrator.coordination.subagent_orchestrator.{line.partition(':')[0]}"
    why = "has no effect while 'orchestrator.coordination.subagent_orchestrator.enabled' is false: set it to true, or"
    for enabled in ("false", "null"):
        assert refuse(write, team(line, enabled=enabled)).startswith(f"retinue.yaml:5: key '{key}': {why}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("model: m\nsubagent_agents: [{model: m}]", "2: key 'subagent_agents': has no effect while 'orchestrator"),
        (
            "profiles:\n  critic:\n    subagent_agents: [{model: m}]",
            "3: key 'profiles.critic.subagent_agents': has no effect while 'orchestrator.coordination.subagent_orch",
        ),
        (
            "profiles:\n  critic:\n    leaf: true\n    subagent_agents: [{model: m}]\n" + team("max_new_answers: 2"),
            "4: key 'profiles.critic.subagent_agents': has no effect with 'leaf: true'",
        ),
        (
            "orchestrator:\n  coordination:\n    enable_subagents: false\n    subagent_orchestrator: {enabled: true}",
            "3: key 'orchestrator.coordination.enable_subagents': must be true for teams: set it, or set 'subagent_or",
        ),
    ],
)
def test_members_without_teams_and_teams_without_subagents_are_refused(write: Write, text: str, expected: str) -> None:
    assert refuse(write, text).startswith(f"retinue.yaml:{expected}")


@pytest.mark.requirement("MASS-33", "MASS-40")
@pytest.mark.parametrize(
    ("given", "instead", "needed"),
    [
        ("  voting_sensitivity: checklist_gated", "", "'orchestrator.voting_sensitivity: checklist_gated'"),
        ("enable_subagents: true", "enable_subagents: false", "'enable_subagents: true'"),
        ("{enabled: true}", "{enabled: false}", "'subagent_orchestrator.enabled: true'"),
        ("[Round_Evaluator, explorer]", "[explorer]", "'round_evaluator' in 'subagent_types'"),
        ("[Round_Evaluator, explorer]", "null", "'round_evaluator' in 'subagent_types'"),
        (
            "managed_round_evaluator: true",
            "managed_round_evaluator: false",
            "'orchestrator_managed_round_evaluator: true'",
        ),
    ],
)
def test_rounds_without_a_setting_they_need_are_one_error(write: Write, given: str, instead: str, needed: str) -> None:
    key = "orchestrator.coordination.round_evaluator_before_checklist"
    why = f"rounds need {needed}: set this too, or leave 'round_evaluator_before_checklist' out"
    assert refuse(write, ROUNDS.replace(given, instead)) == f"retinue.yaml:7: key '{key}': {why}"


@pytest.mark.requirement("MASS-40")
def test_all_that_rounds_lack_is_said_at_once(write: Write) -> None:
    message = refuse(write, "orchestrator: {coordination: {round_evaluator_before_checklist: true}}")
    assert message.startswith(
        "retinue.yaml:1: key 'orchestrator.coordination.round_evaluator_before_checklist': rounds "
    )
    for needed in (
        "voting_sensitivity: checklist_gated",
        "subagent_orchestrator.enabled",
        "in 'subagent_types'",
        "managed",
    ):
        assert needed in message
    assert "enable_subagents" not in message  # true unless set


@pytest.mark.finding("U9")
def test_what_needs_trust_is_named_once(write: Write) -> None:
    path = write("retinue.yaml", team('agents: [{model: "a:x"}, {model: "b:y"}, {model: "a:x"}]'))
    key = "orchestrator.coordination.subagent_orchestrator"
    assert [str(each) for each in restrict(load_settings(path))[1]] == [
        f"{key}.enabled: true",
        f"{key}.agents: a:x (2 members)",
        f"{key}.agents: b:y",
    ]
    path = write("retinue.yaml", "approvals: {allow: [shell(make), shell(make)]}")
    assert [str(each) for each in restrict(load_settings(path))[1]] == ["approvals.allow: shell(make)"]


@pytest.mark.requirement("MASS-40")
def test_there_is_exactly_one_parent_agent(write: Write) -> None:
    message = refuse(write, "model: m\nagents: [{id: a}, {id: b}]\n")
    assert message.startswith(
        "retinue.yaml:2: key 'agents': there is exactly one parent agent: give its model as 'model'"
    )


@pytest.mark.requirement("MASS-40")
@pytest.mark.parametrize("key", ["orchestrator_managed_round_evaluator", "round_evaluator_refine"])
def test_a_key_of_rounds_without_rounds_is_refused(write: Write, key: str) -> None:
    message = refuse(write, f"orchestrator:\n  coordination:\n    {key}: true\n")
    assert message.startswith(
        f"retinue.yaml:3: key 'orchestrator.coordination.{key}': has no effect without 'round_eva"
    )


@pytest.mark.requirement("MASS-40")
def test_another_voting_sensitivity_is_refused(write: Write) -> None:
    message = refuse(write, ROUNDS.replace("checklist_gated", "balanced"))
    assert message.startswith(
        "retinue.yaml:2: key 'orchestrator.voting_sensitivity': unknown value 'balanced'; available"
    )


@pytest.mark.requirement("MASS-24")
def test_unknown_types_and_a_list_without_a_pool_are_warnings(write: Write, tmp_path: Path) -> None:
    types = "agents: [{model: m}]\n      shared_child_team_types: [Round_Evaluator, subagent, explorr]"
    [warning] = load_project(tmp_path, config=write("retinue.yaml", team(types))).warnings
    assert warning.startswith("unknown subagent type 'explorr' in shared_child_team_types; available: critic, ")
    assert warning.endswith("did you mean 'explorer'?")
    alone = team("shared_child_team_types: [explorer]")
    [warning] = load_project(tmp_path, config=write("retinue.yaml", alone)).warnings
    assert warning == "shared_child_team_types has no effect: there is no shared pool, subagent_orchestrator.agents"


def test_spawn_tools_that_nobody_can_have_are_a_warning(write: Write, tmp_path: Path) -> None:
    text = "orchestrator: {coordination: {enable_subagents: false}}\nprofiles: {critic: {tools: [read, spawn_agent]}}\n"
    [warning] = load_project(tmp_path, config=write("retinue.yaml", text)).warnings
    assert warning == "profiles.critic.tools: spawn_agent are not available: enable_subagents is false"


@pytest.mark.parametrize("text", [TEAM, ROUNDS])
def test_teams_and_rounds_of_a_file_that_is_not_trusted_are_off(write: Write, tmp_path: Path, text: str) -> None:
    path = write("retinue.yaml", text)
    narrow, loosened = restrict(load_settings(path))
    coordination = "orchestrator.coordination"
    expected = {
        TEAM: [
            "subagent_agents: a:one",
            f"{coordination}.subagent_orchestrator.enabled: true",
            f"{coordination}.subagent_orchestrator.agents: anthropic:big",
            f"{coordination}.subagent_orchestrator.agents: openai:small",
            "profiles.explorer.subagent_agents: b:two",
            "profiles.explorer.subagent_agents: b:three",
        ],
        ROUNDS: [
            f"{coordination}.subagent_orchestrator.enabled: true",
            f"{coordination}.round_evaluator_before_checklist: true",
        ],
    }
    assert list(map(str, loosened)) == expected[text]
    assert not narrow.coordination.subagent_orchestrator.enabled
    assert narrow.coordination.rounds is None
    project = load_project(tmp_path)  # nobody trusts it
    assert list(map(str, project.ignored)) == expected[text]
    assert not any(profile.subagent_agents for profile in project.all_profiles)


def test_more_answers_than_the_default_and_the_flag_off_need_trust_as_they_should(write: Write) -> None:
    settings = load_settings(write("retinue.yaml", team("max_new_answers_per_agent: 9")))
    narrow, loosened = restrict(settings)
    assert [str(each).rpartition(".")[2] for each in loosened] == ["enabled: true", "max_new_answers_per_agent: 9"]
    assert narrow.coordination.subagent_orchestrator == TeamSettings()
    off = load_settings(write("retinue.yaml", "orchestrator: {coordination: {enable_subagents: false}}"))
    assert restrict(off) == (off, [])
