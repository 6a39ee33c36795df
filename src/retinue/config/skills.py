"""Skills: folders with a SKILL.md that an agent reads when needed. This module finds and lists them; it ignores their
bodies.

The file format is public (agent skills), so unknown keys are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from retinue.config.definitions import find_definitions
from retinue.config.located import Node
from retinue.config.location import show_text, suggest
from retinue.config.yaml import parse_frontmatter
from retinue.core.errors import ConfigError
from retinue.core.profiles import check_name

BUILT_IN_FOLDER = Path(__file__).parent / "built_in_skills"
PROJECT_FOLDER = Path(".agent", "skills")
FILE_NAME = "SKILL.md"


@dataclass(frozen=True)
class Skill:
    """A skill as a system prompt lists it. `path` is the absolute path of its SKILL.md."""

    name: str
    description: str
    path: Path


def find_skills(project: Path | None) -> dict[str, Skill]:
    """Return all skills by name. A project's skill replaces a built-in one of the same name, ignoring case."""
    found = find_definitions(BUILT_IN_FOLDER, PROJECT_FOLDER, FILE_NAME, project=project, parse=_parse_skill)
    return {skill.name: skill for skill in found}


def render_skill_prompt(profile_skills: Sequence[str], skills: Mapping[str, Skill]) -> str:
    """Return the part of a system prompt that lists these skills, or an empty text without skills. Raises for an
    unknown skill."""
    if not profile_skills:
        return ""
    chosen = [find_skill(name, skills) for name in dict.fromkeys(profile_skills)]
    lines = [f"- {skill.name}: {' '.join(skill.description.split())} (read {skill.path})" for skill in chosen]
    return "\n".join(["# Skills", "Read a skill's file before you do what it is for.", *lines])


def find_skill(name: str, skills: Mapping[str, Skill]) -> Skill:
    """Return the skill of this name, ignoring case. Raises ConfigError with a list of all skills."""
    for skill in skills.values():
        if skill.name.casefold() == name.casefold():
            return skill
    there = ", ".join(sorted(skills)) or "none"
    raise ConfigError(f"unknown skill '{show_text(name, 80)}'; available: {there}{suggest(name, skills)}")


def _parse_skill(text: str, file: str, source: str) -> tuple[Node, Skill]:
    keys, _ = parse_frontmatter(text, file)
    name = keys.require("name")
    checked = name.parse(partial(check_name, what="skill name"))
    return name, Skill(checked, keys.require("description").word(), Path(file).absolute())
