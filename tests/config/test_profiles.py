"""SUBAGENT.md: schema, discovery, override and activation."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.config.definitions import BUILT_IN
from retinue.config.profiles import BUILT_IN_FOLDER, choose_active, find_profiles, parse_definition
from retinue.core.errors import ConfigError
from retinue.core.profiles import Profile
from tests.config.conftest import Write

TYPES = ".agent/subagent_types"
TEMPLATE = BUILT_IN_FOLDER / "_template" / "SUBAGENT_TEMPLATE.md"


def subagent(name: str, more: str = "", body: str = "Do it.") -> str:
    return f"---\nname: {name}\ndescription: It does it.\n{more}---\n{body}\n"


def list_profiles(project: Path | None) -> list[Profile]:
    return [definition.profile for definition in find_profiles(project)]


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_definition(text, "S.md", "here")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def names(profiles: list[Profile]) -> list[str]:
    return [profile.name for profile in profiles]


@pytest.mark.requirement("MASS-30")
def test_the_built_in_profiles_are_there_and_say_who_they_are() -> None:
    profiles = list_profiles(None)
    assert names(profiles) == ["critic", "evaluator", "explorer", "novelty", "researcher", "round_evaluator"]
    for profile in profiles:
        assert profile.source == BUILT_IN
        assert profile.description and profile.expected_input
        assert len(profile.instructions.splitlines()) >= 20
        assert not profile.leaf


@pytest.mark.requirement("MASS-30")
@pytest.mark.requirement("MASS-31", "MASS-33")
def test_by_default_four_are_active_and_the_others_wait_to_be_named() -> None:
    active, warnings = choose_active(list_profiles(None), None)
    assert names(active) == ["evaluator", "explorer", "researcher", "critic"]
    assert warnings == []
    assert names(choose_active(list_profiles(None), ["novelty", "round_evaluator"])[0]) == [
        "novelty",
        "round_evaluator",
    ]


def test_by_default_what_the_project_defines_is_active_too(tmp_path: Path, write: Write) -> None:
    write(f"{TYPES}/zed/SUBAGENT.md", subagent("zed"))
    write(f"{TYPES}/builder/SUBAGENT.md", subagent("builder"))
    write(f"{TYPES}/explorer/SUBAGENT.md", subagent("Explorer"))
    active, _ = choose_active(list_profiles(tmp_path), None)
    assert names(active) == ["evaluator", "Explorer", "researcher", "critic", "builder", "zed"]


@pytest.mark.requirement("MASS-32")
def test_a_list_filters_an_unknown_name_warns_and_an_empty_list_disables_all() -> None:
    active, warnings = choose_active(list_profiles(None), ["Critic", "explorr", "EXPLORER", "critic"])
    assert names(active) == ["critic", "explorer"]
    there = "critic, evaluator, explorer, novelty, researcher, round_evaluator"
    assert warnings == [
        f"unknown subagent type 'explorr' in subagent_types; available: {there}; did you mean 'explorer'?"
    ]
    assert choose_active(list_profiles(None), []) == ([], [])


@pytest.mark.requirement("MASS-43")
def test_a_projects_profile_wins_in_any_case_and_templates_are_left_out(tmp_path: Path, write: Write) -> None:
    write(f"{TYPES}/mine/SUBAGENT.md", subagent("EXPLORER", body="My own."))
    write(f"{TYPES}/_template/SUBAGENT.md", subagent("template"))
    write(f"{TYPES}/.hidden/SUBAGENT.md", subagent("hidden"))
    write(f"{TYPES}/notes.md", "not a folder")
    (tmp_path / TYPES / "empty").mkdir()
    profiles = list_profiles(tmp_path)
    assert names(profiles) == ["critic", "evaluator", "EXPLORER", "novelty", "researcher", "round_evaluator"]
    explorer = profiles[2]
    assert (explorer.instructions, explorer.source) == ("My own.", f"{TYPES}/mine/SUBAGENT.md")


@pytest.mark.requirement("MASS-43")
def test_the_template_is_a_good_profile_that_is_never_discovered() -> None:
    profile = parse_definition(TEMPLATE.read_text(), str(TEMPLATE), "template")[1].profile
    assert profile.name not in names(list_profiles(None))


def test_two_profiles_of_a_project_with_one_name_are_an_error(tmp_path: Path, write: Write) -> None:
    write(f"{TYPES}/a/SUBAGENT.md", subagent("same"))
    write(f"{TYPES}/b/SUBAGENT.md", subagent("SAME"))
    with pytest.raises(ConfigError, match=r"b/SUBAGENT.md:2: key 'name': 'SAME' is also the name in .*a/SUBAGENT.md"):
        list_profiles(tmp_path)


@pytest.mark.requirement("MASS-44")
def test_the_four_keys() -> None:
    text = subagent(
        "helper", "skills: [report-writing]\nexpected_input: [a file, a question]\n", "Line one.\n\n---\nLine two."
    )
    profile = parse_definition(text, "S.md", "here")[1].profile
    assert (profile.name, profile.description, profile.source) == ("helper", "It does it.", "here")
    assert (profile.skills, profile.expected_input) == (("report-writing",), ("a file", "a question"))
    assert profile.instructions == "Line one.\n\n---\nLine two."
    short = parse_definition(subagent("helper", "skills:\nexpected_input: a file\n"), "S.md", "here")[1].profile
    assert (short.skills, short.expected_input) == ((), ("a file",))


@pytest.mark.requirement("MASS-44")
@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("default_background: true", "is not supported; the agent that spawns the subagent decides"),
        ("default_refine: true", "is not supported; the agent that spawns the subagent decides"),
        ("mcp_servers: []", "is not supported; tools belong in retinue.yaml"),
        ("model: gpt", "belongs in retinue.yaml under 'profiles: NAME:'"),
        ("tools: [read]", "belongs in retinue.yaml under 'profiles: NAME:'"),
        ("instructions: x", "the instructions are the text below the closing '---'"),
        ("skill: [a]", "unknown key; allowed here: description, expected_input, name, skills; did you mean 'skills'?"),
    ],
)
def test_any_other_key_is_rejected_with_file_line_and_key(key: str, words: str) -> None:
    assert refusal(subagent("x", f"{key}\n")).startswith(f"S.md:4: key '{key.split(':', maxsplit=1)[0]}': {words}")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "S.md:1: the first line must be '---'"),
        ("name: x\n", "S.md:1: the first line must be '---'"),
        ("---\nname: x\n", "S.md:1: the frontmatter that begins here has no closing '---' line"),
        ("---\n---\nbody", "S.md:1: the key 'name' is missing"),
        ("---\n- a\n---\n", "S.md:2: expected 'key: value' lines, got a list"),
        ("---\nname: x\n---\n", "S.md:1: the key 'description' is missing"),
        ("---\nname: x\ndescription: ' '\n---\n", "S.md:3: key 'description': expected a text, got an empty one"),
        ("---\nname: 3\ndescription: d\n---\n", "S.md:2: key 'name': expected a text, got a number"),
        ("---\ndescription: d\nname: ../x\n---\n", "S.md:3: key 'name': profile name '../x' must be 1 to 64"),
        (f"---\ndescription: d\nname: {'x' * 300}\n---\n", "S.md:3: key 'name': profile name 'xxx"),
        ("---\ndescription: d\nname: \u0430\u0435\n---\n", "S.md:3: key 'name': profile name "),
        (
            "---\nname: x\ndescription: d\nskills: a\n---\n",
            "S.md:4: key 'skills': expected a list of texts, got a text",
        ),
        (
            "---\nname: x\ndescription: d\nexpected_input: 3\n---\n",
            "S.md:4: key 'expected_input': expected a list of texts",
        ),
        ("---\nname: x\nname: y\n---\n", "S.md:3: key 'name': appears twice, first on line 2"),
        ("---\nname: x\ndescription: a: b\n---\n", "S.md:3: is not valid YAML"),
        ("---\nname: !!python/name:os.system x\n---\n", "S.md:2: key 'name': tags are not allowed"),
    ],
)
def test_bad_frontmatter_is_named_with_its_line(text: str, expected: str) -> None:
    assert refusal(text).startswith(expected)


def test_only_regular_files_are_read(tmp_path: Path, write: Write) -> None:
    secret = write("elsewhere.md", subagent("secret"))
    folder = tmp_path / TYPES / "odd"
    folder.mkdir(parents=True)
    path = folder / "SUBAGENT.md"

    path.symlink_to(secret)
    with pytest.raises(ConfigError, match=r"SUBAGENT\.md: is a symbolic link; only regular files are read here"):
        list_profiles(tmp_path)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ConfigError, match=r"SUBAGENT\.md: is not a regular file"):
        list_profiles(tmp_path)
    path.unlink()
    path.mkdir()
    with pytest.raises(ConfigError, match=r"SUBAGENT\.md: is a folder, not a file"):
        list_profiles(tmp_path)


def test_windows_line_ends_and_a_bom(tmp_path: Path) -> None:
    path = tmp_path / TYPES / "x" / "SUBAGENT.md"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\xef\xbb\xbf" + subagent("x").replace("\n", "\r\n").encode())
    assert next(p for p in list_profiles(tmp_path) if p.name == "x").instructions == "Do it."


@settings(deadline=None)
@given(st.text() | st.text().map(lambda text: f"---\n{text}\n---\nbody"))
def test_any_text_is_a_profile_or_a_config_error(text: str) -> None:
    try:
        parse_definition(text, "S.md", "here")
    except ConfigError as error:
        assert "\n" not in str(error)
