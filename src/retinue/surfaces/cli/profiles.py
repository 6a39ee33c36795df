"""`retinue profiles`: which agents there are, where each comes from and what it is for."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import msgspec

from retinue.config.project import load_project
from retinue.core.profiles import Profile
from retinue.surfaces.cli import output as screen
from retinue.surfaces.printer import safe

FIELDS = (
    "source", "description", "expected_input", "skills", "model", "tools", "runtime", "workspace", "leaf",
)  # fmt: skip
HEADS = ("NAME", "ACTIVE", "SOURCE", "DESCRIPTION")


def configure_profiles(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="also list profiles that are not active")
    parser.add_argument(
        "--config", metavar="FILE", type=Path, help="use this file instead of the project's retinue.yaml"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array with an object for each profile")


def execute_profiles(args: argparse.Namespace) -> int:
    """List the agents that can be spawned by name in this project.

    Models can spawn the active profiles by name. Use any other one with `retinue run --profile NAME`, or activate it
    in `subagent_types` under `orchestrator: coordination:` in retinue.yaml. To add your own, write
    .agent/subagent_types/NAME/SUBAGENT.md, or `profiles:` in retinue.yaml.

    examples:
      retinue profiles
      retinue profiles --all
      retinue profiles --json | jq -r '.[].name'
    """
    project = load_project(Path.cwd(), config=args.config)
    for warning in project.warnings:
        screen.print_warning(warning)
    active = {profile.name for profile in project.profiles}
    chosen = project.all_profiles if args.all else project.profiles
    if args.json:
        screen.print_json([_to_json(profile, active=profile.name in active) for profile in chosen])
        return 0
    if not chosen:
        print("No profile is active, because of `subagent_types: []`. `retinue profiles --all` lists all profiles.")
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
    print("\n".join(screen.format_table(HEADS, rows)))
    return 0


def _to_json(profile: Profile, *, active: bool) -> dict[str, Any]:
    fields = {name: getattr(profile, name) for name in FIELDS}
    return {"name": profile.name, "active": active, **fields, "limits": msgspec.to_builtins(profile.limits)}
