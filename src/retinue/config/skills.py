"""Skills: folders with a SKILL.md that an agent reads when needed. This module finds and lists them; it ignores their
bodies.

The file format is public (agent skills), so unknown keys are ignored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from retinue.config.location import show_text, suggest
from retinue.config.ownership import read_definitions
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
    found = _read_folder(BUILT_IN_FOLDER, None)
    if project is not None:
        found |= _read_folder(project / PROJECT_FOLDER, project)
    return {found[key].name: found[key] for key in sorted(found)}


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


def _read_folder(folder: Path, project: Path | None) -> dict[str, Skill]:
    found: dict[str, Skill] = {}
    for path, text in read_definitions(folder, FILE_NAME, project):
        keys, _ = parse_frontmatter(text, str(path))
        name = keys.require("name")
        skill = Skill(
            name.parse(partial(check_name, what="skill name")), keys.require("description").word(), path.absolute()
        )
        other = found.setdefault(skill.name.casefold(), skill)
        if other is not skill:
            raise name.error(f"'{skill.name}' is also the name in {other.path}")
    return found
