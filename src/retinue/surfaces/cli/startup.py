"""Startup of a supervisor from command line options, for every command that runs agents.

Asks whether to trust the project's retinue.yaml, merges files, options and environment into the parts of a supervisor,
prints warnings, and checks the model and the sandbox before any model is called. `foreground.py` then runs one tree;
`watch`, `mcp serve` and `a2a serve` run many.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import UNSET

from retinue.build.parts import MAIN, Parts
from retinue.build.project import load_project_parts
from retinue.build.sandboxes import build_sandbox_image, find_container_engine, needs_new_image, probe_runtime
from retinue.config import trust
from retinue.config.files import exists, read_text
from retinue.config.location import suggest
from retinue.config.models import explain_missing_model
from retinue.config.project import SETTINGS_FILE, Project, find_project, load_project
from retinue.core.errors import ConfigError, NotFound
from retinue.core.limits import Limits
from retinue.core.profiles import DEFAULT_RUNTIME, Profile, RuntimeName
from retinue.surfaces.cli import output, prompts
from retinue.surfaces.cli.options import DETACHED_WAIT_SECONDS, parse_context_paths, parse_limits, parse_model
from retinue.surfaces.cli.start_line import clear_start_line
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.header import Header
from retinue.surfaces.printer.printer import Level, Printer
from retinue.surfaces.printer.terminal import can_draw

NO_SANDBOX: RuntimeName = "inherited"
CONTAINER: RuntimeName = "container"
HINT = "; or run without a sandbox, with your own authority: --runtime inherited"
CONTAINER_CHOICE = "  c  run it in a container of {engine}, in this project from now on (written to {file})\n"
CHOICES = """\
  o  run it without a sandbox, with your own authority, this once
  i  the same in this project from now on (written to {file})
  q  quit
"""
BUILDING_IMAGE = "building the image from this machine's own files; nothing is downloaded"
DELEGATED = "inside a container: subagents are requested from the host through {outbox} (delegated)"


@dataclass(frozen=True)
class StartUp:
    """The parts and the project from which a command starts a supervisor.

    `limits` and `model` are the options of the command. `asks` is True if a user at this terminal can be asked."""

    parts: Parts
    project: Project
    limits: Limits
    model: str | None
    asks: bool

    @property
    def settings_file(self) -> Path:
        return self.project.settings.file or self.project.folder / SETTINGS_FILE


def prepare(
    args: argparse.Namespace,
    *,
    folder: Path | None = None,
    limits: Limits | None = None,
    interactive: bool = True,
    traced: bool = True,
) -> StartUp:
    """Load the project around `folder` (default: the current folder), and merge the options into it.

    `folder` comes from --project. `limits` replaces the limits in the options. `interactive` is False for a command
    that reads its task from stdin, and for a server. `traced` puts new trees into the trace of the environment."""
    if interactive and args.config is None and not args.yes:
        _ask_trust()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--project: there is no folder {folder}")
    detached = getattr(args, "detach", False)
    wait = args.wait_approvals
    model, limits = parse_model(args), parse_limits(args) if limits is None else limits
    parts, project = load_project_parts(
        folder or Path.cwd(),
        config=args.config,
        model=model,
        mode="yes" if args.yes else None,
        limits=limits,
        wait_approvals=DETACHED_WAIT_SECONDS if wait is None and detached else wait,
        traced=traced,
        runtime=args.runtime,
        default_runtime=DEFAULT_RUNTIME,
        outbox=args.delegation_directory,
        context_paths=parse_context_paths(args),
    )
    output.check_folder(project.folder)
    for warning in project.warnings:
        output.print_warning(warning)
    asks = interactive and not detached and prompts.at_terminal()
    return StartUp(parts=parts, project=project, limits=limits, model=model, asks=asks)


def prepare_primary(args: argparse.Namespace, *, interactive: bool = True) -> tuple[StartUp, Profile]:
    """Prepare the start of a new primary and return its profile, from the options of `add_primary_options`. Checks that
    its model is known and that its sandbox works."""
    start = prepare(args, interactive=interactive)
    profile = choose_profile(start.project, args.profile)
    if args.workspace is not None:
        profile = replace(profile, workspace=args.workspace)
    require_model(start, [profile])
    return check_sandbox(start, profile), profile


def _ask_trust() -> None:
    """Ask whether the project's retinue.yaml may loosen permissions, once for each text of the file."""
    file = find_project(Path.cwd()) / SETTINGS_FILE
    if not exists(file) or not prompts.at_terminal():
        return
    text = read_text(file)
    loose = trust.list_loosenings(file, text)
    if loose and trust.read_answer(file, text) is None:
        load_project(file.parent, config=file)  # raises ConfigError for a file that has an error, before the question
        print(prompts.format_loosenings(file, loose), file=sys.stderr)
        yes = prompts.ask_yes_no(prompts.TRUST_QUESTION, default=False)
        with nullcontext() if yes else suppress(ConfigError):  # if a no cannot be stored, the next run asks again
            trust.keep_answer(file, text, trusted=yes)


def require_model(start: StartUp, profiles: Sequence[Profile]) -> None:
    """Raise ConfigError if neither the project nor one of the profiles names a model."""
    if start.parts.model is None and all(profile.model is None and profile.has_model for profile in profiles):
        raise ConfigError(explain_missing_model(start.settings_file))


def choose_profile(project: Project, name: str | None) -> Profile:
    """Return the profile `name`, active or not. Without a name, return the default primary of `retinue run`."""
    if name is None:
        return MAIN
    for profile in project.all_profiles:
        if profile.name.casefold() == name.casefold():
            return profile
    there = [profile.name for profile in project.all_profiles]
    raise NotFound(f"unknown profile '{name}'; available: {', '.join(there)}{suggest(name, there)}")


def make_printer(args: argparse.Namespace, *, color: bool | None = None) -> Printer:
    """Return the printer of live events, with the level of detail that the options set."""
    clear_start_line()
    return Printer(sys.stderr, level=choose_level(args), color=color)


def choose_level(args: argparse.Namespace) -> Level:
    return "verbose" if args.verbose else "quiet" if args.quiet else "normal"


def make_header(start: StartUp, profile: Profile) -> Header:
    """Return the header that the live view shows before the run of `profile` has started."""
    parts = start.parts
    model = start.model or profile.model or parts.model
    whole = start.limits.override(parts.limits)
    spent = profile.limits.narrow(whole)
    seconds = start.limits.override(profile.limits.override(whole)).seconds
    return Header(
        model=model if isinstance(model, str) else profile.name,
        runtime=profile.runtime or parts.runtime,
        workspace=profile.workspace,
        tokens=None if spent.tokens is UNSET else spent.tokens,
        cost=None if spent.cost is UNSET else spent.cost,
        seconds=None if seconds is UNSET else seconds,
    )


def wants_live_view(args: argparse.Namespace) -> bool:
    """Return True if the terminal can draw the live view, and neither --plain nor --detach is given."""
    return not args.plain and not getattr(args, "detach", False) and can_draw()


def check_sandbox(start: StartUp, profile: Profile) -> StartUp:
    """Check that the runtime of `profile` works here, and return `start`.

    If the runtime does not work, ask the user at a terminal for another, or raise ConfigError."""
    wanted = profile.runtime or start.parts.runtime
    try:
        probe_runtime(start.parts, wanted)
    except ConfigError as error:
        text = f"runtime '{wanted}' is not possible here: {error}"
        if not start.asks or profile.runtime is not None:
            raise ConfigError(text + HINT) from None
        output.print_warning(text)
        return replace(start, parts=_ask_runtime(start.parts, None if wanted == CONTAINER else find_container_engine()))
    return start


def _ask_runtime(parts: Parts, engine: str | None) -> Parts:
    """Ask which runtime to use instead. Write a choice for the project to its file, once that runtime works."""
    file = parts.rules_file or parts.project / SETTINGS_FILE
    offered = "" if engine is None else CONTAINER_CHOICE.format(engine=engine, file=safe.escape_line(str(file)))
    print(offered + CHOICES.format(file=safe.escape_line(str(file))), end="", file=sys.stderr)
    answer = (prompts.ask("Which? [q]") or "q").lower()
    if answer == "c" and engine is not None:
        contained = replace(parts, runtime=CONTAINER)
        _make_container_ready(contained)
        _write_runtime(contained, file)
        return contained
    if answer not in ("o", "i"):
        raise ConfigError("nothing was run")
    bare = replace(parts, runtime=NO_SANDBOX)
    if answer == "i":
        _write_runtime(bare, file)
    return bare


def _make_container_ready(parts: Parts) -> None:
    """Check that containers work, and build the default image if only that is missing. Raises ConfigError."""
    try:
        probe_runtime(parts, CONTAINER)
    except ConfigError as error:
        if parts.image is not None or not needs_new_image(error):
            raise
        output.print_error(BUILDING_IMAGE)
        build_sandbox_image()
        probe_runtime(parts, CONTAINER)


def _write_runtime(parts: Parts, file: Path) -> None:
    from retinue.config.edit import set_runtime  # imports ruamel.yaml

    before, after = set_runtime(file, parts.runtime)
    if parts.keeps_trust:
        trust.carry_answer(file, before, after)
