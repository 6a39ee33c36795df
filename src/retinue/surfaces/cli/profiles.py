"""`retinue profiles`: the agents of the project with their source and purpose, and the members of teams."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from retinue.config.models import find_default_model
from retinue.config.project import Project, load_project
from retinue.core.profiles import Profile
from retinue.core.team_members import UNTYPED, MemberChoice, TeamSettings, resolve_members
from retinue.core.teams import Member, choose_strategy
from retinue.surfaces.cli import output
from retinue.surfaces.printer import safe

FIELDS = (
    "source", "description", "expected_input", "skills", "model", "tools", "runtime", "workspace", "leaf",
)  # fmt: skip
HEADS = ("NAME", "ACTIVE", "SOURCE", "DESCRIPTION")
FLEXIBLE = {"DESCRIPTION": 24}
EXPENDABLE = ("SOURCE", "ACTIVE")
TEAM_HEADS = ("TYPE", "SPAWNED BY", "MEMBERS", "STRATEGY", "STEP")
MEMBERS_WIDTH = 20
PRIMARY, CLIENT, BOTH = "primary", "MCP client", "both"
OWN_MODEL = "its own model"  # of a primary whose model only the command line names
TEAMS_OFF = (
    "No subagent is a team. `subagent_orchestrator: {enabled: true}`, under `orchestrator: coordination:` in "
    "retinue.yaml, turns teams on."
)


def configure_profiles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also list profiles that are not active")
    parser.add_argument(
        "--teams", action="store_true", help="list the members that each type of subagent gets, and why"
    )
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="use this file instead of the project's retinue.yaml"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array with an object for each profile")


def execute_profiles(args: argparse.Namespace) -> int:
    """List the agents that can be spawned by name in this project.

    Models can spawn the active profiles by name. Use any other one with `retinue run --profile NAME`, or activate it
    in `subagent_types` under `orchestrator: coordination:` in retinue.yaml. To add your own, write
    .agent/subagent_types/NAME/SUBAGENT.md, or `profiles:` in retinue.yaml.

    With --teams it shows what `subagent_orchestrator` in retinue.yaml makes of each profile: the members of a subagent
    that the primary spawns, and of one that an MCP client spawns. One member is an ordinary run, several are a team.

    examples:
      retinue profiles
      retinue profiles --all
      retinue profiles --teams
      retinue profiles --json | jq -r '.[].name'
    """
    project = load_project(Path.cwd(), config=args.config)
    for warning in project.warnings:
        output.print_warning(warning)
    active = {profile.name for profile in project.profiles}
    chosen = project.all_profiles if args.all else project.profiles
    if args.teams:
        return _print_teams(project, [*chosen, Profile(UNTYPED)], as_json=args.json)
    if args.json:
        output.print_json([_to_json(profile, active=profile.name in active) for profile in chosen])
        return 0
    if not chosen:
        print("No profile is active, because of `subagent_types` in retinue.yaml. `retinue profiles --all` lists all.")
        return 0
    rows = [
        (
            profile.name,
            "yes" if profile.name in active else "no",
            safe.escape_line(profile.source),
            safe.escape_line(profile.description),
        )
        for profile in chosen
    ]
    print("\n".join(output.format_table(HEADS, rows, flexible=FLEXIBLE, expendable=EXPENDABLE)))
    return 0


def _to_json(profile: Profile, *, active: bool) -> dict[str, Any]:
    fields = {name: getattr(profile, name) for name in FIELDS}
    return {"name": profile.name, "active": active, **fields, "limits": msgspec.to_builtins(profile.limits)}


def _print_teams(project: Project, profiles: Sequence[Profile], *, as_json: bool) -> int:
    """Print the members that subagents of these profiles get."""
    teams = project.settings.coordination.subagent_orchestrator
    local = project.settings.subagent_agents
    primary = project.settings.model or find_default_model(os.environ)
    rows = [
        _Row(profile, spawner, _resolve(teams, profile, local, primary, spawner=spawner), teams)
        for profile in (profiles if teams.enabled else ())
        if profile.has_model
        for spawner in (PRIMARY, CLIENT)
    ]
    if as_json:
        output.print_json([row.to_json() for row in rows])
    elif not rows:
        print(TEAMS_OFF)
    else:
        _print_team_table(rows)
    return 0


def _print_team_table(rows: Sequence[_Row]) -> None:
    """Print a line for each member, and an explanation of the steps below the table."""
    cells: list[tuple[str, ...]] = []
    for first, second in zip(rows[::2], rows[1::2], strict=True):
        is_same = first.resolution == second.resolution
        cells += replace(first, spawner=BOTH).to_cells() if is_same else [*first.to_cells(), *second.to_cells()]
    flexible, expendable = {"MEMBERS": MEMBERS_WIDTH}, ("STRATEGY",)
    right = frozenset({"STEP"})
    print("\n".join(output.format_table(TEAM_HEADS, cells, right=right, flexible=flexible, expendable=expendable)))
    reasons = {(row.resolution.step, row.resolution.reason): None for row in rows}
    print()
    for step, reason in sorted(reasons):
        print(f"step {step}: {reason}")


def _resolve(
    teams: TeamSettings, profile: Profile, local: Sequence[Member], primary: str | None, *, spawner: str
) -> MemberChoice:
    """Return the members of a subagent. A model in its profile replaces an inherited one."""
    is_client = spawner == CLIENT
    primary = primary or (None if is_client else OWN_MODEL)
    found = resolve_members(
        teams,
        profile.name,
        local_members=() if is_client else local,
        spawner_model=None if is_client else primary,
        primary_model=primary,
    )
    if found.is_inherited and isinstance(profile.model, str):
        own = (Member(id="agent1", model=profile.model),)
        return replace(found, members=own, reason="the model that the profile itself has")
    return found


@dataclass(frozen=True)
class _Row:
    """The members that subagents of one profile get from one spawner."""

    profile: Profile
    spawner: str
    resolution: MemberChoice
    teams: TeamSettings

    def to_cells(self) -> list[tuple[str, ...]]:
        """Return a row of cells for each member. Only the first row has the values that all members share."""
        members = [safe.escape_line(_describe_member(member)) for member in self.resolution.members] or ["no model"]
        first = (self.profile.name, self.spawner, members[0], self.choose_strategy() or "-", str(self.resolution.step))
        return [first, *(("", "", member, "", "") for member in members[1:])]

    def to_json(self) -> dict[str, Any]:
        return {
            "type": self.profile.name,
            "spawned_by": self.spawner,
            "members": [
                {"id": each.id, "model": each.model, "profile": each.profile} for each in self.resolution.members
            ],
            "strategy": self.choose_strategy(),
            "step": self.resolution.step,
            "reason": self.resolution.reason,
        }

    def choose_strategy(self) -> str | None:
        """Return the strategy of a team without refinement, or None for a single member."""
        if len(self.resolution.members) < 2:
            return None
        return choose_strategy(self.teams.final_answer_strategy, refine=False)


def _describe_member(member: Member) -> str:
    name = "" if re.fullmatch(r"agent\d+", member.id) else f"{member.id}="
    return f"{name}{member.model}" + ("" if member.profile is None else f" ({member.profile})")
