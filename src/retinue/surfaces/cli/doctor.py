"""`retinue doctor`: is everything there that retinue needs? Changes nothing."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from retinue import build
from retinue.config.models import PROVIDERS, default_model, install_command
from retinue.config.project import SETTINGS_FILE, Project, find_project, load_project
from retinue.core.errors import RetinueError
from retinue.log.archive import Archive
from retinue.supervisor.clock import SystemClock
from retinue.surfaces.cli import screen
from retinue.surfaces.cli.main import version
from retinue.surfaces.printer import safe

EPILOG = """\
ok: as it should be; warn: works, but you should know; fail: runs will not work. Exit code 1 when something fails.

examples:
  retinue doctor
  retinue doctor --json | jq '.[] | select(.state != "ok")'"""
OLDEST_PYTHON = (3, 11)
AUTHORITY = (
    "runs of runtime `inherited` work as you: a shell command that you allow can do whatever you can, "
    "also answer questions and change files outside the project. Read what you allow; --yes allows everything"
)


@dataclass(frozen=True)
class Check:
    """One thing that was looked at."""

    name: str
    state: Literal["ok", "warn", "fail"]
    text: str


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check that everything retinue needs is there."
    parser.epilog = EPILOG
    parser.add_argument("--json", action="store_true", help="one JSON array with an object for each check")


def run(args: argparse.Namespace) -> int:
    checks = list(_checks(find_project(Path.cwd())))
    if args.json:
        screen.print_json([asdict(check) for check in checks])
    else:
        for check in checks:
            print(f"{check.state:<5} {check.name:<9} {safe.line(check.text)}")
    return int(any(check.state == "fail" for check in checks))


def _checks(folder: Path) -> Iterator[Check]:
    new_enough = sys.version_info >= OLDEST_PYTHON
    yield Check("python", "ok" if new_enough else "fail", f"{platform.python_version()} at {sys.executable}")
    yield Check("retinue", "ok", f"{version()} at {Path(build.__file__).parent}")
    yield _sqlite()
    yield _git()
    yield _walls(folder)
    marked = (folder / SETTINGS_FILE).exists()
    yield Check("project", "ok", f"{folder}" + ("" if marked else f" (no {SETTINGS_FILE}: defaults)"))
    yield _state(folder / ".retinue")
    yield from _logs(folder / ".retinue")
    yield from _providers()
    yield from _configuration(folder)
    yield Check("authority", "warn", AUTHORITY)


def _sqlite() -> Check:
    try:
        import apsw
    except ImportError as error:
        return Check("sqlite", "fail", f"apsw cannot be loaded: {error}; pip install apsw")
    return Check("sqlite", "ok", f"{apsw.sqlite_lib_version()} in apsw {apsw.apsw_version()}")


def _git() -> Check:
    found = shutil.which("git")
    if found is None:
        return Check("git", "warn", "not found; runs work, but there is no history to go back to")
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("git", "warn", f"{found} does not work: {error}")
    return Check("git", "ok", f"{said.strip()} at {found}")


def _walls(folder: Path) -> Check:
    """Whether runs of runtime `isolated` can be had here: a wall is built and looked at from inside."""
    try:
        started = build.placement(build.Parts(folder)).runtime("isolated").started
    except RetinueError as error:
        return Check("walls", "warn", f"runtime `isolated` is not possible here: {error}")
    return Check("walls", "ok", f"runtime `isolated` stands: {', '.join(started.walls if started else ())}")


def _state(state: Path) -> Check:
    """Asks the file system and makes nothing: the folder appears with the first run."""
    there = next(folder for folder in (state, *state.parents) if os.path.lexists(folder))
    if not there.is_dir():
        return Check("state", "fail", f"{there} is not a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        return Check("state", "fail", f"{there} cannot be written")
    return Check("state", "ok", f"{state} " + ("can be written" if there == state else "will be made by the first run"))


def _logs(state: Path) -> Iterator[Check]:
    archive = Archive(state)
    try:
        count = len(archive.trees())
    except RetinueError as error:
        yield Check("logs", "fail", str(error))
        return
    for problem in archive.problems:
        yield Check("logs", "fail", problem)
    if count and not archive.problems:
        yield Check("logs", "ok", f"{count} tree{'' if count == 1 else 's'}")


def _configuration(folder: Path) -> Iterator[Check]:
    try:
        project = load_project(folder)
    except RetinueError as error:
        yield Check("profiles", "fail", str(error))
        return
    for warning in project.warnings:
        yield Check("profiles", "warn", warning)
    names = ", ".join(profile.name for profile in project.profiles) or "none"
    yield Check("profiles", "ok", f"{names} ({len(project.all_profiles)} in all)")
    yield _model(project)


def _providers() -> Iterator[Check]:
    """Which real models can be asked from here. A key is looked for, never shown."""
    for provider in PROVIDERS:
        key = f"{provider.key} is {'set' if provider.has_key(os.environ) else 'not set'}"
        install = "" if provider.installed() else f"; not installed: {install_command(provider.default)}"
        yield Check("provider", "ok", f"{provider.name}: {key}{install}")


def _model(project: Project) -> Check:
    model = project.settings.model or default_model(os.environ)
    if model is None:
        return Check("model", "ok", "scripted:FILE is available; none is set, so `retinue run` needs --model")
    try:
        build.ModelSource(project.folder, SystemClock())(model)
    except RetinueError as error:
        return Check("model", "fail", str(error))
    return Check("model", "ok", model)
