"""The JSON schema of retinue.yaml and the loader are one table: they say the same of every document."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from retinue.config.schema import Section, Setting
from retinue.config.settings import APPROVALS, PROFILE, SETTINGS, parse_settings, settings_schema
from retinue.config.yaml import parse_yaml
from retinue.core.errors import ConfigError

VALIDATOR = jsonschema.Draft7Validator(settings_schema())
RULE_TEXTS = ["read", " mcp__* ", "shell(git *)", "my_shell(ls)", "deploy(a=b)", "deploy(a=)", "edit(())"]
NO_RULES = ["", "shell()", "shell( )", "deploy(x)", "deploy()", "shell(", "a b", "x\n(y=1)", "édit", "read)"]
SCALARS: list[Any] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    7,
    0.5,
    -0.5,
    2**40,
    "",
    " ",
    "x",
    "ask",
    "yes",
    "sandboxed",
    "strict",
]
SCALARS += ["none", "full", "none\n", "a.com", "inherited", "scratch", "shared", "isolated?", *RULE_TEXTS, *NO_RULES]
LISTS = st.lists(st.sampled_from(SCALARS), max_size=3)
LEAVES = st.sampled_from(SCALARS) | LISTS | st.sampled_from([[], {}, [[]], {"a": 1}])
NAMES = st.sampled_from(["explorer", "poet", "a-b_2", "x" * 64] * 3 + ["-a", "a b", "", "a\n", "x" * 65, "é"])


def mappings(section: Section) -> st.SearchStrategy[dict[str, Any]]:
    """Mappings with some of its keys, each with a good or a bad value, now and then with a key it has not."""
    good = st.fixed_dictionaries({}, optional={name: values(key) for name, key in section.settings.items()})
    odd = st.builds(lambda found, name: {**found, name: 1}, good, st.sampled_from(["x", "mode", ""]))
    return mostly(good, odd)


def values(key: Setting) -> st.SearchStrategy[Any]:
    """Mostly what could stand there."""
    fits = mappings(key.kind) if isinstance(key.kind, Section) else LEAVES
    example = st.just(parse_yaml(key.shown_example, "example").to_plain()) if key.shown_example else fits
    return mostly(mostly(example, fits), LEAVES)


def mostly(usual: st.SearchStrategy[Any], odd: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.integers(0, 19).flatmap(lambda number: odd if number == 7 else usual)


DOCUMENTS = st.builds(
    lambda found, profiles: {**found, "profiles": profiles} if profiles is not None else found,
    mappings(SETTINGS),
    st.none() | mostly(st.dictionaries(NAMES, mappings(PROFILE), max_size=2), LEAVES),
)


COMPARISONS = (  # what a JSON schema cannot say: one value compared with another
    "is more than subagent_max_timeout",
    "is the same name as",
    "has no effect",
    "rounds need",
    "is the same as 'max_new_answers_per_agent'",
    "must be true for teams",
)


def loads(document: Any) -> bool:
    return loads_text(json.dumps(document))  # JSON is YAML


def loads_text(text: str) -> bool:
    try:
        parse_settings(text, Path("retinue.yaml"))
    except ConfigError as error:
        return any(words in str(error) for words in COMPARISONS)
    return True


@given(DOCUMENTS)
@hypothesis_settings(max_examples=500, deadline=None)
@example(None)
@example([])
@example("text")
@example({"approvals": {"mode": "sandboxed"}})
@example({"profiles": {"a": {"limits": {"concurrent": 1}}}})
@example({"network": "full", "profiles": {"explorer": {"network": "none"}}})
@example({"network": {"allow": ["a.com"]}, "profiles": {"explorer": {"network": ["a.com"]}}})
@example({"network": {"allow": "full"}})
@example({"network": ["a.com", "None"]})
@example({"network": {"allow": [" full "]}})
@example({"subagent_agents": [{"model": "a:b", "backend": None}]})
@example({"subagent_agents": [{"model": None, "backend": {"type": "a", "model": "b"}, "id": "x", "profile": "critic"}]})
@example({"subagent_agents": [{"model": "a:b", "backend": {"type": "a", "model": "b"}}]})
@example({"subagent_agents": [{}]})
@example({"subagent_agents": [{"backend": {"type": "a"}}]})
@example({"subagent_agents": [{"backend": {"type": "a", "model": None}}]})
@example({"subagent_agents": [{"backend": {"type": "a:b", "model": "b"}}]})
@example({"subagent_agents": [{"model": "a:b", "id": "a b"}]})
@example({"subagent_agents": [{"model": "a:b", "colour": "red"}]})
@example({"subagent_agents": [{"model": "a:b"}] * 10})
@example({"subagent_agents": [{"model": "a:b"}] * 11})
@example(
    {"orchestrator": {"coordination": {"checklist_criteria_inline": [{"text": "t"}, {"text": "u", "category": None}]}}}
)
@example({"orchestrator": {"coordination": {"checklist_criteria_inline": [{"category": "must"}]}}})
@example({"orchestrator": {"coordination": {"checklist_criteria_inline": [{"text": None}]}}})
@example({"orchestrator": {"coordination": {"checklist_criteria_inline": [{"text": "t", "category": "may"}]}}})
def test_loader_and_schema_agree(document: Any) -> None:
    assert loads(document) == VALIDATOR.is_valid(document)


@pytest.mark.parametrize("text", [*RULE_TEXTS, *NO_RULES])
@pytest.mark.parametrize("key", ["allow", "deny"])
def test_they_agree_on_rules(text: str, key: str) -> None:
    document = {"approvals": {key: [text]}}
    assert loads(document) == VALIDATOR.is_valid(document) == (text in RULE_TEXTS)


@given(st.text(alphabet="ab_*?.-()= \n[]shel", max_size=12))
@hypothesis_settings(max_examples=400, deadline=None)
def test_they_agree_on_whatever_is_written_for_a_rule(text: str) -> None:
    document = {"approvals": {"ask": [text]}}
    valid = VALIDATOR.is_valid(document)
    if loads(document):
        assert valid
    elif valid:
        assert "[" in text  # only a range that is none is beyond the schema


def test_each_key_is_explained_and_its_example_is_right() -> None:
    jsonschema.Draft7Validator.check_schema(settings_schema())

    def look(section: Section, around: str) -> None:
        for name, key in section.settings.items():
            assert key.help and key.kind.make_schema()["type"], name
            if key.shown_example:
                assert loads_text(around.replace("HERE", f"{{{name}: {key.shown_example}}}")), name
            elif isinstance(key.kind, Section):
                look(key.kind, around.replace("HERE", f"{{{name}: HERE}}"))

    look(SETTINGS, "HERE")
    look(APPROVALS, "approvals: HERE")
    look(PROFILE, "profiles: {poet: HERE}")
    properties = settings_schema()["properties"]
    assert properties["max_cost"]["description"].startswith("US dollars that a whole tree may spend")
    assert properties["profiles"]["additionalProperties"]["title"].startswith("Rights and limits of one agent")
