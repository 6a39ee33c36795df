"""A project as its files describe it: folder, settings, profiles and skills. Starts nothing and writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from retinue.config.definitions import BUILT_IN
from retinue.config.files import exists, read_text
from retinue.config.located import Node
from retinue.config.location import suggest
from retinue.config.ownership import check_owner
from retinue.config.profiles import LocatedProfile, choose_active, find_profiles, warn_of_unknown_types
from retinue.config.sandbox import warn_of_missing_paths
from retinue.config.schema import Given, Loosening
from retinue.config.settings import PROFILE, Settings, list_members, load_settings, parse_settings, restrict
from retinue.config.skills import Skill, find_skill, find_skills
from retinue.config.trust import read_answer
from retinue.core.errors import ConfigError
from retinue.core.limits import Limits
from retinue.core.profiles import SPAWN_TOOLS, Profile
from retinue.core.team_members import ALL_TYPES, ROUND_EVALUATOR, UNTYPED
from retinue.files.reserved import GIT_FOLDER, STATE_FOLDER

SETTINGS_FILE = "retinue.yaml"
OWNED_MARKS = (SETTINGS_FILE, ".agent")  # `files.state_owner` checks the state folder
MARKS = (*OWNED_MARKS, STATE_FOLDER, GIT_FOLDER)
UNTRUSTED = "{file} is not trusted, so this part of it is ignored: {what}; `retinue trust` shows and allows it"
FEW = 3
_WHO_IT_IS = ("description", "instructions", "skills")


@dataclass(frozen=True)
class Project:
    """A project. `profiles` are the active profiles, `all_profiles` all that can be named; both include the settings
    of retinue.yaml.

    `ignored` are settings of retinue.yaml that need the user's trust and do not have it. `other_warnings` are about
    everything else.
    """

    folder: Path
    settings: Settings
    profiles: tuple[Profile, ...]
    all_profiles: tuple[Profile, ...]
    skills: Mapping[str, Skill]
    other_warnings: tuple[str, ...] = ()
    ignored: tuple[Loosening, ...] = ()

    @property
    def state(self) -> Path:
        return self.folder / STATE_FOLDER

    @property
    def trust_warning(self) -> str:
        """Return the warning about ignored settings, or an empty text."""
        if not self.ignored:
            return ""
        more = f" and {len(self.ignored) - FEW} more" if len(self.ignored) > FEW else ""
        what = f"{', '.join(map(str, self.ignored[:FEW]))}{more}"
        return UNTRUSTED.format(file=self.settings.file, what=what)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return all warnings."""
        return (self.trust_warning, *self.other_warnings) if self.ignored else self.other_warnings


def find_project(start: Path) -> Path:
    """Return the nearest folder, from `start` upward, with a file or folder of MARKS; `start` if there is none.

    Raises ConfigError if a mark of this folder belongs to another user or others may write it.
    """
    folder = find_project_folder(start)
    for mark in OWNED_MARKS:
        check_owner(folder / mark, project=folder)
    check_owner(folder / GIT_FOLDER, project=folder, modes=False)  # the modes of .git are left to git
    return folder


def find_project_folder(start: Path) -> Path:
    """Return the folder of `find_project`, without the check of its owner."""
    here = Path(os.path.realpath(start))
    for folder in (here, *here.parents):
        if any(os.path.lexists(folder / mark) for mark in MARKS):
            return folder
    return here


def load_project(start: Path, *, config: Path | None = None) -> Project:
    """Read the project around `start`. If `config` is given, it replaces retinue.yaml and is trusted."""
    folder = find_project(start)
    settings, ignored = (load_settings(config), ()) if config is not None else load_own_settings(folder)
    skills = find_skills(folder)
    merged = merge_profiles(find_profiles(folder), settings)
    for definition in merged:
        _check_skills(definition, skills)
    everyone = [definition.profile for definition in merged]
    active, warnings = choose_active(everyone, settings.coordination.subagent_types)
    _check_members(settings, active, everyone)
    warnings = [*warnings, *_warn_of_teams(settings, everyone), *warn_of_missing_paths(settings.expose_paths)]
    return Project(
        folder=folder,
        settings=settings,
        profiles=tuple(active),
        all_profiles=tuple(everyone),
        skills=skills,
        other_warnings=tuple(warnings),
        ignored=ignored,
    )


def load_own_settings(folder: Path) -> tuple[Settings, tuple[Loosening, ...]]:
    """Return the settings of the project's retinue.yaml that are in force, and the untrusted ones that are ignored."""
    file = folder / SETTINGS_FILE
    if not exists(file):
        return Settings(), ()
    text = read_text(file)
    settings = parse_settings(text, file)
    narrow, loose = restrict(settings)
    return (settings, ()) if not loose or read_answer(file, text) else (narrow, tuple(loose))


def merge_profiles(found: Iterable[LocatedProfile], settings: Settings) -> list[LocatedProfile]:
    """Merge the profiles of files and of retinue.yaml by name. A file defines the role of an agent, retinue.yaml its
    rights."""
    by_name = {definition.profile.name.casefold(): definition for definition in found}
    for agent in settings.a2a_agents:
        place = settings.document.locate("a2a_agents", agent.name).place
        if agent.name.casefold() in by_name:
            raise place.error(f"'{agent.name}' is the name of an agent of this project: choose another")
        by_name[agent.name.casefold()] = LocatedProfile(agent, place)
    for name, given in settings.profiles.items():
        known = by_name.get(name.casefold())
        node = settings.document.locate("profiles", name)
        by_name[name.casefold()] = (
            _define_profile(name, given, node) if known is None else _extend_profile(known, given, node)
        )
    return [by_name[key] for key in sorted(by_name)]


def _extend_profile(definition: LocatedProfile, given: Given, node: Node) -> LocatedProfile:
    profile = definition.profile
    home = profile.source
    if home == BUILT_IN:
        home = f"a SUBAGENT.md of your own in .agent/subagent_types/{profile.name}/"
    for key in _WHO_IT_IS:
        if key in given:
            raise node.locate(key).error(f"belongs in {home}; retinue.yaml says what '{profile.name}' may do")
    return replace(definition, profile=_apply_settings(profile, given))


def _define_profile(name: str, given: Given, node: Node) -> LocatedProfile:
    if "description" not in given:
        raise node.error("no SUBAGENT.md has this name; to define it here give it a 'description'")
    profile = _apply_settings(Profile(name, source=Path(node.place.file).name), given)
    return LocatedProfile(profile, node.locate("skills").place)


def _apply_settings(profile: Profile, given: Given) -> Profile:
    """Return the profile with the fields that retinue.yaml gives it."""
    values = PROFILE.make(given)
    limits = values.get("limits", Limits()).override(profile.limits)
    return replace(profile, **{**values, "limits": limits})


def _check_members(settings: Settings, active: Sequence[Profile], everyone: Sequence[Profile]) -> None:
    """Check that the members of teams use active profiles."""
    usable, known = ({profile.name.casefold() for profile in group} for group in (active, everyone))
    there = sorted(profile.name for profile in active)
    for keys, members in list_members(settings):
        for index, member in enumerate(members):
            name, node = member.profile, settings.document.locate(*keys, index)
            if name is None or name.casefold() in usable:
                continue
            if name.casefold() in known:
                raise node.error(f"the profile '{name}' is not active: add it to 'subagent_types'")
            raise node.error(f"unknown profile '{name}'; available: {', '.join(there)}{suggest(name, there)}")


def _warn_of_teams(settings: Settings, everyone: Sequence[Profile]) -> Iterator[str]:
    """Yield a warning for each type that cannot use the shared pool, and for spawn tools while subagents are
    disabled."""
    teams = settings.coordination.subagent_orchestrator
    named = [name for name in teams.shared_child_team_types if name not in (ALL_TYPES, ROUND_EVALUATOR, UNTYPED)]
    yield from warn_of_unknown_types(named, everyone, key="shared_child_team_types")
    if named and teams.enabled and not teams.agents:
        yield "shared_child_team_types has no effect: there is no shared pool, subagent_orchestrator.agents"
    if settings.coordination.enable_subagents:
        return
    for name, given in settings.profiles.items():
        tools = [tool for tool in given.get("tools", ()) if tool in SPAWN_TOOLS or tool.startswith("subagent_")]
        if tools:
            yield f"profiles.{name}.tools: {', '.join(tools)} are not available: enable_subagents is false"


def _check_skills(definition: LocatedProfile, skills: Mapping[str, Skill]) -> None:
    for name in definition.profile.skills:
        try:
            find_skill(name, skills)
        except ConfigError as error:
            raise definition.skills.error(str(error)) from None
