"""A project put together: where it is, and what its files say in the end."""

from __future__ import annotations

from pathlib import Path

import pytest

from retinue.config.project import MARKS, find_project, load_project
from retinue.core.errors import ConfigError
from retinue.core.limits import Limits
from retinue.core.profiles import Profile
from tests.config.conftest import Write


def by_name(profiles: tuple[Profile, ...]) -> dict[str, Profile]:
    return {profile.name: profile for profile in profiles}


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_project(folder)
    return str(caught.value).removeprefix(f"{folder}/")


@pytest.mark.parametrize("mark", MARKS)
def test_the_nearest_marked_folder_upward_is_the_project(tmp_path: Path, mark: str) -> None:
    deep = tmp_path / "outer" / "inner" / "deep"
    deep.mkdir(parents=True)
    (tmp_path / "outer" / ".git").mkdir()
    (tmp_path / "outer" / "inner" / mark).touch()
    assert find_project(deep) == tmp_path / "outer" / "inner"
    assert find_project(tmp_path / "outer") == tmp_path / "outer"


def test_dots_and_links_in_the_start_are_resolved_first(tmp_path: Path) -> None:
    (tmp_path / "a" / ".agent").mkdir(parents=True)
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "b" / "link").symlink_to(tmp_path / "a")
    assert find_project(tmp_path / "b" / "c" / ".." / "link") == tmp_path / "a"
    assert find_project(tmp_path / "a" / "..") == tmp_path


def test_without_a_mark_it_is_where_one_stands(tmp_path: Path) -> None:
    assert find_project(tmp_path) == tmp_path


def test_an_empty_project_has_the_defaults(tmp_path: Path) -> None:
    project = load_project(tmp_path)
    assert project.folder == tmp_path
    assert [profile.name for profile in project.profiles] == ["evaluator", "explorer", "researcher", "critic"]
    assert len(project.all_profiles) == 6
    assert list(project.skills) == ["report-writing"]
    assert project.warnings == ()


def test_retinue_yaml_says_what_a_profile_may_do(tmp_path: Path, write: Write) -> None:
    settings = "profiles:\n  Explorer: {model: m, tools: [read], limits: {turns: 3}, workspace: shared, leaf: true}\n"
    write("retinue.yaml", settings + "  novelty: {model: m}\n")
    project = load_project(tmp_path)
    explorer = by_name(project.profiles)["explorer"]
    assert (explorer.model, explorer.tools, explorer.limits) == ("m", ("read",), Limits(turns=3))
    assert (explorer.workspace, explorer.leaf, explorer.source) == ("shared", True, "built in")
    assert explorer.instructions.startswith("You are an explorer.")
    assert "novelty" not in by_name(project.profiles)
    assert by_name(project.all_profiles)["novelty"].model == "m"


def test_retinue_yaml_defines_a_profile_that_no_file_has(tmp_path: Path, write: Write) -> None:
    text = (
        "profiles:\n  poet: {description: Writes verse., instructions: Rhyme., skills: [report-writing], tools: []}\n"
    )
    write("retinue.yaml", text)
    poet = by_name(load_project(tmp_path).profiles)["poet"]
    assert (poet.description, poet.instructions, poet.skills, poet.tools) == (
        "Writes verse.",
        "Rhyme.",
        ("report-writing",),
        (),
    )
    assert poet.source == "retinue.yaml"


@pytest.mark.parametrize("key", ["description: x", "instructions: x", "skills: [report-writing]"])
def test_who_a_known_profile_is_belongs_in_its_file(tmp_path: Path, write: Write, key: str) -> None:
    write("retinue.yaml", f"profiles:\n  explorer:\n    {key}\n")
    name = key.split(":", maxsplit=1)[0]
    message = refusal(tmp_path)
    assert message.startswith(f"retinue.yaml:3: key 'profiles.explorer.{name}': belongs in a SUBAGENT.md of your own")
    assert ".agent/subagent_types/explorer/" in message
    write(".agent/subagent_types/e/SUBAGENT.md", "---\nname: Explorer\ndescription: d\n---\n")
    assert ".agent/subagent_types/e/SUBAGENT.md; retinue.yaml says what 'Explorer' may do" in refusal(tmp_path)


def test_a_new_profile_needs_a_description(tmp_path: Path, write: Write) -> None:
    write("retinue.yaml", "model: m\nprofiles:\n  poet: {leaf: true}\n")
    expected = (
        "retinue.yaml:3: key 'profiles.poet': no SUBAGENT.md has this name; to define it here give it a 'description'"
    )
    assert refusal(tmp_path) == expected


@pytest.mark.requirement("MASS-32")
def test_the_list_of_types_comes_from_retinue_yaml(tmp_path: Path, write: Write) -> None:
    write(
        "retinue.yaml",
        "orchestrator: {coordination: {subagent_types: [novelty, poet, nobody]}}\nprofiles: {poet: {description: d}}\n",
    )
    project = load_project(tmp_path)
    assert [profile.name for profile in project.profiles] == ["novelty", "poet"]
    assert len(project.warnings) == 1 and project.warnings[0].startswith("unknown subagent type 'nobody'")
    write("retinue.yaml", "orchestrator: {coordination: {subagent_types: []}}\n")
    assert load_project(tmp_path).profiles == ()


def test_an_unknown_skill_fails_fast_and_is_named_with_its_line(tmp_path: Path, write: Write) -> None:
    path = write(".agent/subagent_types/e/SUBAGENT.md", "---\nname: e\ndescription: d\nskills: [deploy]\n---\n")
    expected = ".agent/subagent_types/e/SUBAGENT.md:4: key 'skills': unknown skill 'deploy'; available: report-writing"
    assert refusal(tmp_path) == expected
    write(".agent/skills/deploy/SKILL.md", "---\nname: deploy\ndescription: d\n---\n")
    assert "e" in by_name(load_project(tmp_path).profiles)
    path.unlink()
    write("retinue.yaml", "profiles:\n  poet:\n    description: d\n    skills: [verse]\n")
    assert refusal(tmp_path).startswith(
        "retinue.yaml:4: key 'profiles.poet.skills': unknown skill 'verse'; available: deploy, report-writing"
    )


def test_another_config_file_is_read_instead(tmp_path: Path, write: Write) -> None:
    write("retinue.yaml", "model: one\n")
    other = write("other.yaml", "model: two\n")
    assert load_project(tmp_path).settings.model == "one"
    assert load_project(tmp_path, config=other).settings.model == "two"
    with pytest.raises(ConfigError, match=r"none\.yaml: no such file"):
        load_project(tmp_path, config=tmp_path / "none.yaml")


def test_a_retinue_yaml_that_leads_nowhere_is_not_passed_over(tmp_path: Path) -> None:
    (tmp_path / "retinue.yaml").symlink_to(tmp_path / "gone")
    assert refusal(tmp_path) == "retinue.yaml: no such file"
