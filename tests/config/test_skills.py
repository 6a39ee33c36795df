"""Skills: finding them, overriding them, and what a system prompt says of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from retinue.config.skills import find_skills, render_skill_prompt
from retinue.core.errors import ConfigError
from tests.config.conftest import Write


def skill(name: str, description: str = "How to do it.") -> str:
    return f"---\nname: {name}\ndescription: {description}\nlicense: MIT\nmetadata: {{version: 1}}\n---\nBody.\n"


def test_the_built_in_skill_is_listed_with_its_path() -> None:
    skills = find_skills(None)
    assert list(skills) == ["report-writing"]
    found = skills["report-writing"]
    assert found.path.is_absolute() and found.path.is_file()
    assert f"- report-writing: {found.description} (read {found.path})" in render_skill_prompt(
        ["Report-Writing"], skills
    )


def test_a_projects_skill_wins_in_any_case_and_other_keys_are_left_alone(tmp_path: Path, write: Write) -> None:
    mine = write(".agent/skills/rw/SKILL.md", skill("Report-Writing", ">\n  Ours,\n  folded."))
    write(".agent/skills/deploy/SKILL.md", skill("deploy"))
    write(".agent/skills/_template/SKILL.md", "rubbish")
    skills = find_skills(tmp_path)
    assert list(skills) == ["deploy", "Report-Writing"]
    assert f"- Report-Writing: Ours, folded. (read {mine})" in render_skill_prompt(["report-writing"], skills)


def test_no_skills_no_prompt() -> None:
    assert render_skill_prompt([], {}) == ""


def test_an_unknown_skill_lists_those_there_are() -> None:
    with pytest.raises(ConfigError) as caught:
        render_skill_prompt(["report-writin"], find_skills(None))
    expected = "unknown skill 'report-writin'; available: report-writing; did you mean 'report-writing'?"
    assert str(caught.value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("body", "SKILL.md:1: the first line must be '---'"),
        ("---\nname: x\n---\n", "SKILL.md:1: the key 'description' is missing"),
        (skill("a b"), "SKILL.md:2: key 'name': skill name 'a b' must be"),
    ],
)
def test_a_bad_skill_is_named_with_its_line(tmp_path: Path, write: Write, text: str, expected: str) -> None:
    write(".agent/skills/x/SKILL.md", text)
    with pytest.raises(ConfigError) as caught:
        find_skills(tmp_path)
    assert str(caught.value).startswith(f"{tmp_path}/.agent/skills/x/{expected}")


def test_two_skills_of_a_project_with_one_name_are_an_error(tmp_path: Path, write: Write) -> None:
    write(".agent/skills/a/SKILL.md", skill("same"))
    write(".agent/skills/b/SKILL.md", skill("Same"))
    with pytest.raises(ConfigError, match=r"b/SKILL.md:2: key 'name': 'Same' is also the name in .*a/SKILL.md"):
        find_skills(tmp_path)
