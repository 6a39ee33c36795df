"""`retinue init`: write a retinue.yaml and a first agent, based on keys, git and toolchains found here."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from retinue.build.sandboxes import find_exposed_paths
from retinue.config import trust
from retinue.config.files import exists
from retinue.config.models import PROVIDERS, VARIABLE, Provider, find_install_command
from retinue.config.profiles import FILE_NAME, PROJECT_FOLDER
from retinue.config.project import SETTINGS_FILE, load_project
from retinue.config.template import render_settings, render_subagent
from retinue.config.toolchains import Toolchain, find_toolchains
from retinue.core.errors import ConfigError
from retinue.core.profiles import check_name
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import prompts
from retinue.surfaces.printer import safe

REVIEWER = "reviewer"
NO_GIT = "not in a git repository: runs work in a copy of the folder"


@dataclass(frozen=True)
class Plan:
    """The files to write. `notes` say what was found and chosen, a line each."""

    folder: Path
    profile: str
    model: str | None
    tests: tuple[str, ...]
    allowed: bool
    exposed: tuple[str, ...]
    notes: tuple[str, ...]


def configure_init(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", nargs="?", type=Path, help="where, if not in the project's root")
    parser.add_argument("--model", metavar="MODEL", help="the model to write down")
    parser.add_argument("--profile", metavar="NAME", default=REVIEWER, help=f"the agent's name ({REVIEWER})")
    parser.add_argument("--yes", action="store_true", help="ask nothing and take what fits")


def execute_init(args: argparse.Namespace) -> int:
    """Write a retinue.yaml and a first agent for this project.

    Looks at the keys in the environment (never at their values), at git, at how the project is tested and where the
    tools for that are installed, and writes
      retinue.yaml                                   every setting, most of them off, each with its meaning
      .agent/subagent_types/reviewer/SUBAGENT.md     a first agent, to change or to copy
    in the root of the git repository, else in the current folder. Overwrites nothing. What it wrote is trusted.

    examples:
      retinue init
      retinue init --yes --model openai:gpt-6.1-terra
      retinue init --profile scout services/api
    """
    folder = screen.check_folder(_choose_folder(args.folder))
    name = check_name(args.profile)
    settings, agent = folder / SETTINGS_FILE, folder / PROJECT_FOLDER / name / FILE_NAME
    for file in (settings, agent):
        if exists(file):
            raise ConfigError(f"{file} is there already, and nothing is overwritten: change it, or move it away")
    plan = _make_plan(folder, name, args.model, asks=not args.yes and prompts.at_terminal())
    text = render_settings(model=plan.model, profile=name, tests=plan.tests, allowed=plan.allowed, exposed=plan.exposed)
    _write_files({agent: render_subagent(name, plan.tests), settings: text})
    for note in plan.notes:
        print(safe.escape_line(note))
    print(f"wrote    {safe.escape_line(str(settings))}\nwrote    {safe.escape_line(str(agent))}")
    try:
        trust.keep_answer(settings, text)
    except ConfigError as error:
        screen.print_warning(f"{error}; `retinue run` will ask whether to trust {settings.name}")
    for warning in load_project(folder).warnings:
        screen.print_warning(warning)
    _print_next_steps(plan)
    return 0


def _choose_folder(given: Path | None) -> Path:
    """Return the folder that was named, else the root of the git repository (not the home folder), else this one."""
    if given is not None:
        if not given.is_dir():
            raise ConfigError(f"{given} is not a folder")
        return given.resolve()
    here = Path.cwd().resolve()
    root = _find_git_root(here)
    home = os.path.realpath(os.path.expanduser("~"))  # noqa: PTH111 - Path.expanduser raises without a home
    return here if root is None or str(root) == home else root


def _find_git_root(folder: Path) -> Path | None:
    return next((one for one in (folder, *folder.parents) if os.path.lexists(one / ".git")), None)


def _make_plan(folder: Path, profile: str, model: str | None, *, asks: bool) -> Plan:
    git = "in a git repository: runs work in a worktree of it" if _find_git_root(folder) else NO_GIT
    notes = [f"folder   {folder} ({git})"]
    model, why = _choose_model(asks=asks) if model is None else (model, "as you said")
    if model is not None and not all(model.partition(":")):
        raise ConfigError(f"'{model}' is no model: write PROVIDER:NAME or scripted:FILE")
    notes.append(f"model    {model or 'none'} ({why})")
    command = find_install_command(model) if model and not model.startswith("scripted:") else ""
    if command:
        notes.append(f"         it needs a package that is not installed: {command}")
    found = find_toolchains(folder)
    tests = tuple(one.test for one in found if one.installed)
    allowed = bool(tests) and (not asks or _ask_tests(tests))
    notes += [_describe_tests(one, allowed=allowed) for one in found] or [
        "tests    no command found that tests this project"
    ]
    programs = [program for one in found if one.installed for program in one.programs]
    exposed = tuple(find_exposed_paths(programs, folder, os.environ))
    if exposed and asks and not _ask_exposed(exposed):
        exposed = ()
    notes += [f"shown    {path} can be read in the sandbox (expose_paths)" for path in exposed]
    return Plan(folder, profile, model, tests, allowed, exposed, tuple(notes))


def _choose_model(*, asks: bool) -> tuple[str | None, str]:
    """Return the model to write down, and why."""
    named = os.environ.get(VARIABLE, "").strip()
    with_key = [provider for provider in PROVIDERS if provider.has_key(os.environ)]
    ready = [provider for provider in with_key if provider.installed()] or with_key
    if named:
        default, why = named, f"{VARIABLE} names it"
    elif ready:
        default, why = ready[0].default, _explain_provider(ready[0], with_key)
    else:
        default, why = "", f"no key is set: set {' or '.join(one.key for one in PROVIDERS)}, or give --model"
    if not asks:
        return default or None, why
    answer = prompts.ask(f"Which model? PROVIDER:NAME or scripted:FILE [{safe.escape_line(default) or 'none for now'}]")
    if answer is None:
        raise ConfigError("nobody answered, so nothing was written; --yes asks nothing")
    return (answer, "as you said") if answer and answer != default else (default or None, why)


def _explain_provider(provider: Provider, with_key: list[Provider]) -> str:
    others = [one.key for one in with_key if one is not provider]
    return f"{provider.key} is set" + (f", as is {', '.join(others)}; --model chooses another" if others else "")


def _ask_tests(tests: tuple[str, ...]) -> bool:
    commands = " and ".join(f"`{test}`" for test in tests)
    return prompts.ask_yes_no(f"May agents run {commands} without asking you?", default=True)


def _ask_exposed(paths: tuple[str, ...]) -> bool:
    shown = "".join(f"\n  {safe.escape_line(path)}" for path in paths)
    print(f"Sandboxed runs see only the system and their own folder. The tools they need are in:{shown}",
          file=sys.stderr)  # fmt: skip
    return prompts.ask_yes_no("May they read that?", default=True)


def _describe_tests(one: Toolchain, *, allowed: bool) -> str:
    if not one.installed:
        return f"tests    `{one.test}` ({one.mark}) is not allowed: {one.test.split()[0]} is not on your PATH"
    return f"tests    `{one.test}` ({one.mark}) " + ("may run without asking" if allowed else "asks first")


def _write_files(texts: dict[Path, str]) -> None:
    """Write all of them or none; no existing file is touched."""
    made: list[Path] = []
    try:
        for file, text in texts.items():
            missing = [folder for folder in file.parents if not folder.exists()]
            for folder in reversed(missing):
                folder.mkdir()
                made.append(folder)
            with file.open("xb") as new:
                made.append(file)
                new.write(text.encode())
    except OSError as error:
        for path in reversed(made):
            with suppress(OSError):
                path.rmdir() if path.is_dir() else path.unlink()
        raise ConfigError(f"cannot write {error.filename or file}: {error.strerror or error}") from None


def _print_next_steps(plan: Plan) -> None:
    command = screen.find_command()
    where = "" if plan.folder == Path.cwd().resolve() else f"cd {safe.escape_line(shlex.quote(str(plan.folder)))} && "
    model = "" if plan.model else " --model MODEL"
    task = "review this folder" if not plan.tests else "run the tests and review what fails"
    print(f'\nNext: {where}{command} run "{task}" --profile {plan.profile}{model}')
    print(f"Then: {command} doctor, to see what works here")
