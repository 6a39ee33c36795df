"""`retinue doctor`: check that everything this project needs is there; change nothing. `checkup` has the checks."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from retinue.build.sandboxes import build_image
from retinue.config.project import find_project_folder, load_project
from retinue.config.settings import settings_schema
from retinue.core.errors import ConfigError, RetinueError
from retinue.surfaces.cli import checkup
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.checkup import Check, Look
from retinue.surfaces.printer import safe

EPILOG = """\
ok: as it should be; warn: works, with a caveat; fail: runs will not work. Exit code 1 when something fails.
Keys are looked for and never shown. No model is called; MCP servers of a trusted retinue.yaml are started and ended.

examples:
  retinue doctor
  retinue doctor --json | jq '.[] | select(.state != "ok")'
  retinue doctor --escape                     tries to break out of the sandboxes; exit code 1 if something does
  retinue doctor --schema > schema.json       then, on top of retinue.yaml, for help in your editor:
                                              # yaml-language-server: $schema=schema.json"""
SECTIONS: dict[str, Callable[[Look], Iterator[Check]]] = {
    "system": checkup.check_system,
    "sandboxes": checkup.check_sandboxes,
    "files": checkup.check_files,
    "tools": checkup.check_tools,
    "models": checkup.check_models,
    "servers": checkup.check_servers,
    "telemetry": checkup.check_telemetry,
    "control": checkup.check_control,
    "logs": checkup.check_logs,
    "authority": checkup.check_authority,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check that everything retinue needs here is there, and say what to do about the rest."
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="one JSON array with an object for each check")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--schema", action="store_true", help="print the JSON schema of retinue.yaml, and check nothing")
    what.add_argument("--escape", action="store_true", help="try to break out of each sandbox that works here")
    what.add_argument(
        "--build-image", action="store_true", help="build the image of runtime container from this machine's own files"
    )


def run_command(args: argparse.Namespace) -> int:
    if args.schema and args.json:
        raise ConfigError("argument --json: not allowed with argument --schema, which is JSON")
    if args.schema:
        screen.print_json(settings_schema(), indent=2)
        return 0
    if args.escape:
        from retinue.surfaces.cli import escape

        return escape.run_attempts(as_json=args.json)
    if args.build_image:
        print(build_image())
        return 0
    checks = list(_run_checks(_load_look(find_project_folder(Path.cwd()))))
    if args.json:
        screen.print_json([_to_json(section, check) for section, check in checks])
    else:
        for _, check in checks:
            print(f"{check.state:<5} {check.name:<9} {safe.escape_line(check.text)}")
            if check.do:
                print(f"{'':<15} -> {safe.escape_line(check.do)}")
    return int(any(check.state == "fail" for _, check in checks))


def _load_look(folder: Path) -> Look:
    try:
        return Look(folder, load_project(folder))
    except RetinueError as error:
        return Look(folder, None, str(error))


def _run_checks(look: Look) -> Iterator[tuple[str, Check]]:
    for section, find in SECTIONS.items():
        for check in find(look):
            yield section, check


def _to_json(section: str, check: Check) -> dict[str, Any]:
    about = {"section": section, "name": check.name, "state": check.state, "text": check.text}
    return about | ({"do": check.do} if check.do else {})
