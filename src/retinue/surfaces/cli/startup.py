"""Starting a supervisor from a command line: the one way of run, resume, continue, watch and mcp serve.

Turns parsed options into the parts of a supervisor: asks whether the project's retinue.yaml is trusted, merges files,
options and environment, warns, and checks the model and the sandbox before any model is called. `foreground.py` then
runs one tree; watch and mcp serve run many.
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
from retinue.build.sandboxes import build_image, find_container_engine, make_placement
from retinue.config import trust
from retinue.config.files import exists, read_text
from retinue.config.limits import make_limits
from retinue.config.location import suggest
from retinue.config.models import explain_missing_model
from retinue.config.project import SETTINGS_FILE, Project, find_project
from retinue.config.settings import parse_settings, restrict
from retinue.core.errors import ConfigError, NotFound
from retinue.core.limits import Limits
from retinue.core.profiles import Profile, RuntimeName
from retinue.surfaces.cli import output, prompts
from retinue.surfaces.cli.options import DETACHED_WAIT_SECONDS, parse_context_paths, parse_model
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
    """The parts and project that a command starts a supervisor from. `limits` and `model` are those of its options;
    `asks` says that a person at this terminal can be asked."""

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
    """Read the project around a folder (the current one), which --project may name, and merge the options into it.

    `limits` replace those of the options. `interactive` is False for a command whose stdin is not a person's, and for
    one that serves others; `traced` puts new trees into the trace of the environment."""
    if interactive and args.config is None and not args.yes:
        _ask_trust()
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"--project: there is no folder {folder}")
    detached = getattr(args, "detach", False)
    wait = args.wait_approvals
    model, limits = parse_model(args), make_limits(vars(args).__getitem__) if limits is None else limits
    parts, project = load_project_parts(
        folder or Path.cwd(),
        config=args.config,
        model=model,
        mode="yes" if args.yes else None,
        limits=limits,
        wait_approvals=DETACHED_WAIT_SECONDS if wait is None and detached else wait,
        traced=traced,
        runtime=args.runtime,
        default_runtime="isolated",
        outbox=args.delegation_directory,
        context_paths=parse_context_paths(args),
    )
    output.check_folder(project.folder)
    for warning in project.warnings:
        output.print_warning(warning)
    asks = interactive and not detached and prompts.at_terminal()
    return StartUp(parts=parts, project=project, limits=limits, model=model, asks=asks)


def _ask_trust() -> None:
    """Ask at the terminal, once for each text of the project's retinue.yaml, whether what it loosens may hold."""
    file = find_project(Path.cwd()) / SETTINGS_FILE
    if not exists(file) or not prompts.at_terminal():
        return
    text = read_text(file)
    loose = [str(each) for each in restrict(parse_settings(text, file))[1]]
    if loose and trust.read_answer(file, text) is None:
        yes = prompts.ask_trust(file, loose)
        with nullcontext() if yes else suppress(ConfigError):  # a no that cannot be kept is asked for again
            trust.keep_answer(file, text, trusted=yes)


def require_model(start: StartUp, profiles: Sequence[Profile]) -> None:
    """Raise ConfigError if neither the project nor one of the profiles names a model."""
    if start.parts.model is None and all(profile.model is None and profile.has_model for profile in profiles):
        raise ConfigError(explain_missing_model(start.settings_file))


def choose_profile(project: Project, name: str | None) -> Profile:
    """Return the profile of that name, active or not; without a name the primary of `retinue run`."""
    if name is None:
        return MAIN
    for profile in project.all_profiles:
        if profile.name.casefold() == name.casefold():
            return profile
    there = [profile.name for profile in project.all_profiles]
    raise NotFound(f"unknown profile '{name}'; available: {', '.join(there)}{suggest(name, there)}")


def make_printer(args: argparse.Namespace, *, color: bool | None = None) -> Printer:
    """Return the printer of live events, as detailed as the options say."""
    clear_start_line()
    return Printer(sys.stderr, level=choose_level(args), color=color)


def choose_level(args: argparse.Namespace) -> Level:
    return "verbose" if args.verbose else "quiet" if args.quiet else "normal"


def make_header(start: StartUp, profile: Profile) -> Header:
    """Return the header of a run of this profile, which asks a model of ours, before it has started."""
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
    """Return whether a command shows the live view: at a terminal that can, unless plain blocks are wanted."""
    return not args.plain and not getattr(args, "detach", False) and can_draw()


def check_sandbox(start: StartUp, profile: Profile) -> StartUp:
    """Check that the sandbox a run asks for can be built. At a terminal the user may choose another, or none."""
    wanted = profile.runtime or start.parts.runtime
    try:
        make_placement(start.parts).runtime(wanted)
    except ConfigError as error:
        text = f"runtime '{wanted}' is not possible here: {error}"
        if not start.asks or profile.runtime is not None:
            raise ConfigError(text + HINT) from None
        output.print_warning(text)
        return replace(start, parts=_ask_runtime(start.parts, None if wanted == CONTAINER else find_container_engine()))
    return start


def _ask_runtime(parts: Parts, engine: str | None) -> Parts:
    """Ask which runtime to use instead. A choice for this project is written to its file once it works."""
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
    """Check that containers work, and build the default image if that is missing; raises ConfigError."""
    try:
        make_placement(parts).runtime(CONTAINER)
    except ConfigError:
        if parts.image is not None:
            raise
        output.print_error(BUILDING_IMAGE)
        build_image()
        make_placement(parts).runtime(CONTAINER)


def _write_runtime(parts: Parts, file: Path) -> None:
    from retinue.config.edit import set_runtime  # loads ruamel.yaml

    before, after = set_runtime(file, parts.runtime)
    if parts.keeps_trust:
        trust.carry_answer(file, before, after)
