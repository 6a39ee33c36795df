"""Script files of the scripted model, from YAML and from Python values."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import retinue.config.scripts as module
from retinue.config.scripts import load_script, parse_script
from retinue.core.errors import ConfigError
from retinue.core.scripts import Script, ScriptedCall, ScriptedReply, ScriptedUsage

WHOLE = """\
strict: true
agents:
  main:
    - text: I will look.
      thinking: hm
      tools:
        - {name: grep, args: {pattern: TODO, deep: [1, {a: null}]}}
        - name: list_agents
      usage: {input_tokens: 10, output_tokens: 5}
      delay: 0.5
      chunks: 3
    - found {{last_result}}
  /main/worker-1:
    - refuse: no
    - {error: overloaded, status: 529, delay: 1, thinking: hm, usage: {input_tokens: 1}}
    - crash: boom
    - {cut: half a, chunks: 2}
    - hang: true
  "*": []
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "script.yaml"
    path.write_text(text)
    return path


def refusal(folder: Path, text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_script(write(folder, text))
    return str(caught.value).removeprefix(f"{folder}/")


def test_everything_a_script_can_say(tmp_path: Path) -> None:
    calls = (ScriptedCall("grep", {"pattern": "TODO", "deep": [1, {"a": None}]}), ScriptedCall("list_agents"))
    assert load_script(write(tmp_path, WHOLE)) == Script(
        {
            "main": (
                ScriptedReply("I will look.", "hm", calls, ScriptedUsage(10, 5), 0.5, 3),
                ScriptedReply("found {{last_result}}"),
            ),
            "/main/worker-1": (
                ScriptedReply(refuse="no"),
                ScriptedReply(error="overloaded", status=529, delay=1.0, thinking="hm", usage=ScriptedUsage(1, 0)),
                ScriptedReply(crash="boom"),
                ScriptedReply(cut="half a", chunks=2),
                ScriptedReply(hang=True),
            ),
            "*": (),
        },
        strict=True,
    )


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (
            "{refuse: a, crash: b}",
            "': a reply has at most one fault, this one has refuse, crash",
        ),
        ("{hang: true, text: x}", ".text': cannot be combined with the fault 'hang'"),
        ("{text: '', crash: b}", ".text': cannot be combined with the fault 'crash'"),
        ("{cut: a, tools: []}", ".tools': cannot be combined with the fault 'cut'"),
        ("{crash: a, status: 500}", ".status': cannot be combined with the fault 'crash'"),
        ("{refuse: a, chunks: 2}", ".chunks': cannot be combined with the fault 'refuse'"),
        ("{status: 500}", ".status': only goes with 'error'"),
        ("{error: a, status: 5}", ".status': must be 100 or more, got 5"),
        ("{refuse: }", ".refuse': expected a value, got nothing"),
        ("{chunks: 0}", ".chunks': must be 1 or more, got 0"),
        ("{delay: -1}", ".delay': must be 0 or more, got -1"),
        ("{txt: a}", ".txt': unknown key; allowed here: "),
        ("{tools: {}}", ".tools': expected a list of tool calls, got a mapping"),
        ("{tools: [grep]}", ".tools[0]': expected a tool call {name, args}, got a text"),
        ("{tools: [{}]}", ".tools[0]': the key 'name' is missing"),
        ("{tools: [{name: ''}]}", ".tools[0].name': expected a text, got an empty one"),
        (
            "{tools: [{name: a, args: [1]}]}",
            ".tools[0].args': expected a mapping of arguments",
        ),
        (
            "{tools: [{name: a, arg: {}}]}",
            ".tools[0].arg': unknown key; allowed here: args, name",
        ),
        ("{usage: {input: 1}}", ".usage.input': unknown key"),
        ("{usage: {input_tokens: -1}}", ".usage.input_tokens': must be 0 or more"),
        ("3", "': expected a reply (a mapping or a text), got a number"),
    ],
)
def test_a_wrong_reply_is_named_with_its_line(tmp_path: Path, reply: str, expected: str) -> None:
    assert refusal(tmp_path, f"agents:\n  main:\n    - fine\n    - {reply}\n").startswith(
        f"script.yaml:4: key 'agents.main[1]{expected}"
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "script.yaml:1: expected a mapping with the key 'agents', got nothing"),
        ("strict: true", "script.yaml:1: the key 'agents' is missing"),
        ("agents: []", "script.yaml:1: key 'agents': expected a mapping of agents to lists of replies, got a list"),
        ("agents: {main: done}", "script.yaml:1: key 'agents.main': expected a list of replies, got a text"),
        ("agents:\n  '': []", "script.yaml:2: key 'agents.': the name of an agent is empty"),
        ("agents: {}\nstrict: 1", "script.yaml:2: key 'strict': expected true or false, got a number"),
        (
            "agents: {}\nstrickt: true",
            "script.yaml:2: key 'strickt': unknown key; allowed here: agents, strict; did you mean 'strict'?",
        ),
    ],
)
def test_a_wrong_file_is_named_with_its_line(tmp_path: Path, text: str, expected: str) -> None:
    assert refusal(tmp_path, text) == expected


def test_the_example_in_the_modules_docstring_is_a_script(tmp_path: Path) -> None:
    example = textwrap.dedent((module.__doc__ or "").split("\n\n", 1)[1])
    script = load_script(write(tmp_path, example))
    assert script.agents["main"][1] == ScriptedReply("found it")
    assert script.agents["worker"] == (ScriptedReply(error="overloaded", status=529),)


def test_hang_false_is_no_fault(tmp_path: Path) -> None:
    assert load_script(write(tmp_path, "agents: {a: [{hang: false, text: x}, {hang: false, cut: y}]}")) == Script(
        {"a": (ScriptedReply("x"), ScriptedReply(cut="y"))}
    )


def test_python_values_make_the_same_script() -> None:
    values = {"agents": {"main": ["hello", {"tools": [{"name": "grep", "args": {"a": (1, 2)}}]}]}, "strict": True}
    assert parse_script(values) == Script(
        {"main": (ScriptedReply("hello"), ScriptedReply(tools=(ScriptedCall("grep", {"a": [1, 2]}),)))}, strict=True
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"agents": {"main": [{"text": 1}]}}, "script: agents.main[0].text: expected a text, got a number"),
        ({"agents": {"main": [{"refuse": "a", "cut": "b"}]}}, "script: agents.main[0]: a reply has at most one fault"),
        (
            {"agents": {"main": [{"tools": [{"name": "a", "args": {"x": {1}}}]}]}},
            "script: agents.main[0].tools[0].args.x: expected",
        ),
        (
            {"agents": {"main": [{"delay": float("inf")}]}},
            "script: agents.main[0].delay: expected a number, got one that is not",
        ),
        ({"agents": {3: []}}, "script: agents: keys must be texts, got int"),
        ([], "script: expected a mapping with the key 'agents', got a list"),
    ],
)
def test_wrong_python_values_are_named(values: Any, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_script(values)
    assert str(caught.value).startswith(expected)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary() | st.text(alphabet="agents: {}[]-\n'\"*&!|>#texrorchunks01.", max_size=80).map(str.encode))
def test_any_bytes_are_a_script_or_a_config_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "any.yaml"
    path.write_bytes(data)
    try:
        load_script(path)
    except ConfigError as error:
        assert "\n" not in str(error)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(("text", "tools", "name", "args", "error", "hang")), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None)
@given(st.dictionaries(st.text(max_size=5), st.lists(JSON, max_size=3), max_size=3))
def test_any_values_are_a_script_or_a_config_error(agents: dict[str, Any]) -> None:
    try:
        parse_script({"agents": agents})
    except ConfigError as error:
        assert str(error).startswith("script: ")
        assert "\n" not in str(error)
