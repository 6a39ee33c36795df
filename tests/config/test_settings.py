"""retinue.yaml: every key, and what is said of wrong ones."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from msgspec import UNSET

import retinue.config.settings as module
from retinue.agent.plans import SPAWNING, WEB
from retinue.config.coordination import CRITERION, TEAMS, CoordinationSettings
from retinue.config.settings import SETTINGS, Settings, load_settings
from retinue.core.errors import ConfigError
from retinue.core.limits import LIMIT_KEYS, Limits
from retinue.core.profiles import LOCAL_TOOLS, SPAWN_TOOLS, WEB_TOOLS
from retinue.core.rounds import Rounds
from retinue.surfaces.cli import a2a, mcp
from retinue.surfaces.cli.demo import configure_demo
from retinue.surfaces.cli.options import add_options
from retinue.surfaces.cli.replay import configure_replay
from retinue.surfaces.cli.resume import configure_continue, configure_resume
from retinue.surfaces.cli.run import configure_run
from retinue.surfaces.cli.watch import configure_watch
from retinue.tools.local import LOCAL
from tests.config.conftest import Write


def refusal(write: Write, text: str) -> str:
    path = write("retinue.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load_settings(path)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{path.parent}/")


def test_without_a_file_or_with_an_empty_one_the_defaults_hold(write: Write) -> None:
    assert load_settings(None) == Settings()
    path = write("retinue.yaml", "# later\n")
    assert load_settings(path) == Settings(file=path)
    timeouts = Settings().coordination
    assert (timeouts.subagent_default_timeout, timeouts.subagent_min_timeout, timeouts.subagent_max_timeout) == (
        1800,
        60,
        14400,
    )


def test_a_declared_default_is_the_value_in_force() -> None:
    """The trust rules, the schema and the documentation read the declaration; runs get the value."""
    in_force = TEAMS.make({})
    same = {"max_new_answers": "max_new_answers_per_agent"}
    assert {key: each.default for key, each in TEAMS.settings.items()} == {
        key: getattr(in_force, same.get(key, key)) for key in TEAMS.settings
    }
    assert CRITERION.settings["category"].default == CRITERION.make({"text": "It works."}).category
    assert CoordinationSettings().make_rounds() == Rounds()


def test_the_example_in_the_modules_docstring_is_read_as_it_says(write: Write) -> None:
    example = (module.__doc__ or "").split("\n\n", 1)[1]
    path = write("retinue.yaml", textwrap.dedent(example))
    settings = load_settings(path)
    assert settings.model == "scripted:script.yaml"
    assert settings.limits == Limits(
        turns=100, seconds=600, depth=3, concurrent=8, tokens=2_000_000, cost=Decimal(5), stall=300
    )
    assert settings.retention_days == 30
    assert settings.coordination.subagent_types == ("explorer", "round_evaluator")
    explorer, poet = settings.profiles["explorer"], settings.profiles["poet"]
    assert (explorer["model"], explorer["tools"]) == ("scripted:script.yaml", ("read", "grep", "glob"))
    assert Limits(**explorer["limits"]) == Limits(
        turns=30, seconds=900, depth=0, tokens=200_000, cost=Decimal("0.5"), stall=120
    )
    assert (explorer["runtime"], explorer["workspace"], explorer["leaf"]) == ("inherited", "scratch", True)
    assert poet == {
        "description": "Writes verse.",
        "instructions": "You write verse.",
        "skills": ("report-writing",),
    }


def test_null_means_unlimited_or_the_default(write: Write) -> None:
    text = "model:\nmax_concurrent: null\nmax_turns: null\ntimeout: null\n"
    text += "orchestrator: {coordination: {subagent_types: null}}\nprofiles: {explorer: }\n"
    settings = load_settings(write("retinue.yaml", text))
    assert settings.limits == Limits(turns=None, seconds=None, concurrent=None)
    assert (settings.model, settings.coordination.subagent_types) == (None, None)
    assert settings.profiles["explorer"] == {}


@pytest.mark.requirement("MASS-32")
def test_an_empty_list_of_types_is_kept_apart_from_none(write: Write) -> None:
    path = write("retinue.yaml", "orchestrator: {coordination: {subagent_types: []}}")
    assert load_settings(path).coordination.subagent_types == ()


def test_a_default_timeout_outside_the_bounds_stands(write: Write) -> None:
    path = write("retinue.yaml", "orchestrator: {coordination: {subagent_default_timeout: 5}}")
    assert load_settings(path).coordination.subagent_default_timeout == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a", "1: expected 'key: value' lines, got a list"),
        (
            "modle: x",
            "1: key 'modle': unknown key; allowed here: a2a_agents, approval_timeout, approvals, container_flags,",
        ),
        ("model: ''", "1: key 'model': expected a text, got an empty one"),
        ("max_depth: null", "1: key 'max_depth': expected a whole number, got nothing"),
        ("max_depth: -1", "1: key 'max_depth': must be 0 or more, got -1"),
        ("max_turns: 1.5", "1: key 'max_turns': expected a whole number, got 1.5"),
        ("timeout: soon", "1: key 'timeout': expected a number, got a text"),
        (
            "orchestrator: {voting: 1}",
            "1: key 'orchestrator.voting': unknown key; allowed here: coordination, voting_sensitivity",
        ),
        (
            "orchestrator:\n  coordination:\n    subagent_type: []",
            "3: key 'orchestrator.coordination.subagent_type': ",
        ),
        (
            "orchestrator:\n  coordination:\n    subagent_min_timeout: 20\n    subagent_max_timeout: 10",
            "4: key 'orchestrator.coordination.subagent_max_timeout': subagent_min_timeout (20) is more than",
        ),
        (
            "orchestrator:\n  coordination:\n    subagent_min_timeout: 20000",
            "3: key 'orchestrator.coordination.subagent_min_timeout': subagent_min_timeout (20000) is more than",
        ),
        (
            "profiles:\n  a:\n    runtime: isolatd",
            "3: key 'profiles.a.runtime': unknown value 'isolatd'; available: inherited",
        ),
        (
            "profiles:\n  a:\n    workspace: share",
            "3: key 'profiles.a.workspace': unknown value 'share'; available: scratch, shared",
        ),
        (
            "profiles:\n  a:\n    limits: {turn: 1}",
            "3: key 'profiles.a.limits.turn': unknown key; allowed here: cost, depth,",
        ),
        (
            "profiles:\n  a:\n    limits: {concurrent: 1}",
            "3: key 'profiles.a.limits.concurrent': is a limit of the whole",
        ),
        ("max_tokens: -1", "1: key 'max_tokens': must be 0 or more, got -1"),
        ("max_cost: -0.1", "1: key 'max_cost': must be 0 or more, got -0.1"),
        ("max_cost: .nan", "1: key 'max_cost': '.nan' is not a number"),
        ("stall: -1", "1: key 'stall': must be 0 or more, got -1"),
        ("profiles:\n  a:\n    limits: {cost: much}", "3: key 'profiles.a.limits.cost': expected a number, got a text"),
        ("profiles:\n  a:\n    leaf: yes", "3: key 'profiles.a.leaf': expected true or false, got a text"),
        ("profiles:\n  a:\n    tools: read", "3: key 'profiles.a.tools': expected a list of tools, got a text"),
        (
            "profiles:\n  a:\n    tools:\n    - reed",
            "4: key 'profiles.a.tools[0]': there is no tool 'reed'; available: read",
        ),
        ("profiles:\n  ../a: {}", "2: key 'profiles.../a': profile name '../a' must be"),
        ("profiles:\n  a: {}\n  A: {}", "3: key 'profiles.A': is the same name as 'a' on line 2"),
        (
            "mcp_servers:\n  b: {command: [b]}\n  B: {command: [b]}",
            "3: key 'mcp_servers.B': is the same name as 'b' on line 2",
        ),
        (
            "a2a_agents:\n  c: {url: 'http://localhost/'}\n  C: {url: 'http://localhost/'}",
            "3: key 'a2a_agents.C': is the same name as 'c' on line 2",
        ),
    ],
)
def test_wrong_settings_are_named_with_their_line(write: Write, text: str, expected: str) -> None:
    assert refusal(write, text).startswith(f"retinue.yaml:{expected}")


def test_a_file_that_was_named_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"retinue\.yaml: no such file"):
        load_settings(tmp_path / "retinue.yaml")


@hypothesis_settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary())
def test_any_bytes_are_settings_or_a_config_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(data)
    try:
        load_settings(path)
    except ConfigError as error:
        assert "\n" not in str(error)


def test_the_names_of_tools_in_the_file_are_those_there_are() -> None:
    assert (tuple(LOCAL), tuple(WEB), tuple(SPAWNING)) == (LOCAL_TOOLS, WEB_TOOLS, SPAWN_TOOLS)


def test_each_limit_is_an_option_too_whose_help_says_the_declared_default() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser)
    options = {action.dest: action for action in parser._actions}
    for key in LIMIT_KEYS.values():
        default = SETTINGS.settings[key.name].default
        shown = "no limit" if default is None else str(default)
        assert f"(default: {shown}" in (options[key.name].help or ""), key
        assert options[key.name].default is UNSET
    assert Settings().limits == Limits()


def read_option_help(configure: Callable[[argparse.ArgumentParser], None]) -> dict[str, str]:
    """Read the help of each option of a command."""
    parser = argparse.ArgumentParser()
    configure(parser)
    return {action.dest: action.help or "" for action in parser._actions}


def test_commands_that_go_on_with_a_tree_say_that_its_limits_stay() -> None:
    for configure in (configure_resume, configure_continue):
        found = read_option_help(configure)
        assert all(found[key.name].endswith("(default: as before)") for key in LIMIT_KEYS.values())


def test_the_help_of_a_timeout_names_the_runs_that_it_bounds() -> None:
    serve_mcp, serve_a2a = mcp._configure_serve, a2a._configure_serve
    commands = {configure_run: "the primary", serve_mcp: "each subagent", serve_a2a: "each task"}
    for configure, timed in {**commands, configure_watch: "each requested run"}.items():
        assert read_option_help(configure)["timeout"].startswith(f"seconds that {timed} may take (default: ")
    assert read_option_help(serve_mcp)["timeout"].endswith("(default: 1800)")


def test_a_command_without_a_live_view_does_not_offer_to_leave_it_out() -> None:
    offering = [configure_run, configure_resume, configure_demo]
    others = [configure_watch, configure_replay, a2a._configure_serve]
    assert ["plain" in read_option_help(each) for each in offering + others] == [True] * 3 + [False] * 3
