"""Profiles from SUBAGENT.md files. SUBAGENT.md defines the role of an agent, retinue.yaml its rights (`settings.py`).

Built-in profiles are next to this file, those of a project in `.agent/subagent_types/*/`. A project's profile replaces
a built-in profile of the same name. `choose_active` selects the profiles that a parent may use.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from retinue.config.definitions import BUILT_IN, find_definitions
from retinue.config.located import Node
from retinue.config.location import SourceLocation, show_text, suggest
from retinue.config.yaml import parse_frontmatter
from retinue.core.profiles import Profile, check_name

BUILT_IN_FOLDER = Path(__file__).parent / "subagent_types"
PROJECT_FOLDER = Path(".agent", "subagent_types")
FILE_NAME = "SUBAGENT.md"
DEFAULT_TYPES = ("evaluator", "explorer", "researcher", "critic")

_WANTS = {"researcher": ("web_fetch", "web_search")}
_MAY_DO = (
    "belongs in retinue.yaml under 'profiles: NAME:'; SUBAGENT.md has only name, description, skills, expected_input"
)
_HINTS = dict.fromkeys(("model", "tools", "limits", "runtime", "network", "workspace", "leaf"), _MAY_DO) | {
    "instructions": "the instructions are the text below the closing '---'",
    "default_background": "is not supported; the agent that spawns the subagent decides whether to wait for it",
    "default_refine": "is not supported; the agent that spawns the subagent decides how it runs",
    "mcp_servers": "is not supported; tools belong in retinue.yaml under 'profiles: NAME:'",
}


@dataclass(frozen=True)
class LocatedProfile:
    """A profile, with the place of its skills for error messages."""

    profile: Profile
    skills: SourceLocation


def find_profiles(project: Path | None) -> list[LocatedProfile]:
    """Return all profiles, sorted by name."""
    return find_definitions(BUILT_IN_FOLDER, PROJECT_FOLDER, FILE_NAME, project=project, parse=parse_definition)


def choose_active(profiles: Sequence[Profile], names: Sequence[str] | None) -> tuple[list[Profile], list[str]]:
    """Return the profiles a parent may use, and warnings.

    Without `names`: the four default types, then every profile that the project defines. With `names`: those, in that
    order; an unknown name gives a warning. `round_evaluator` and `novelty` are active only if named or overridden.
    """
    by_name = {profile.name.casefold(): profile for profile in profiles}
    if names is None:
        own = [profile.name.casefold() for profile in profiles if profile.source != BUILT_IN]
        wanted = [name for name in DEFAULT_TYPES if name in by_name] + own
        return [by_name[name] for name in dict.fromkeys(wanted)], []
    chosen = {name.casefold(): by_name.get(name.casefold()) for name in names}
    return [profile for profile in chosen.values() if profile is not None], warn_of_unknown_types(
        names, profiles, key="subagent_types"
    )


def warn_of_unknown_types(names: Iterable[str], profiles: Iterable[Profile], *, key: str) -> list[str]:
    """Return a warning for each name in the setting `key` that no profile has."""
    there = sorted((profile.name for profile in profiles), key=str.casefold)
    known = {name.casefold() for name in there}
    return [
        f"unknown subagent type '{show_text(name, 80)}' in {key}; available: {', '.join(there)}{suggest(name, there)}"
        for name in dict.fromkeys(names)
        if name.casefold() not in known
    ]


def parse_definition(text: str, file: str, source: str) -> tuple[Node, LocatedProfile]:
    """Return the name and the profile in a text in the format of SUBAGENT.md. `source` tells people where the profile
    comes from."""
    keys, body = parse_frontmatter(text, file)
    keys.check_keys(("name", "description", "skills", "expected_input"), _HINTS)
    name = keys.require("name")
    skills, expected = keys.get("skills"), keys.get("expected_input")
    if expected is not None and isinstance(expected.value, str):  # a text alone is a list of one
        expected = Node(expected.place, (expected,))
    profile = Profile(
        name.parse(check_name),
        instructions=body,
        description=keys.require("description").word(),
        skills=() if skills is None else skills.texts(),
        expected_input=() if expected is None else expected.texts(),
        source=source,
        wants=_WANTS.get(name.text(), ()) if source == BUILT_IN else (),
    )
    return name, LocatedProfile(profile, (skills or name).place)
