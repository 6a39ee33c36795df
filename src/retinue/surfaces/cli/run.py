"""`retinue run TASK`: one primary agent, seen live on stderr, its answer on stdout."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from retinue import build
from retinue.config.files import read_text
from retinue.config.location import meant
from retinue.config.models import no_model
from retinue.core.errors import ConfigError, NotFound
from retinue.core.limits import EVENT_BYTES, Limits
from retinue.core.profiles import WORKSPACES, Profile, Task
from retinue.core.results import Result, unconfirmed_texts
from retinue.supervisor.run import Run
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.cli import detach, trust
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import sandbox_check as walls
from retinue.surfaces.cli.live import Shown, drive
from retinue.surfaces.cli.options import AWAY_SECONDS, add_live_options, add_options, limits_of, model_of
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.printer import Level, Printer
from retinue.surfaces.printer.summary import format_summary

EPILOG = """\
stdout is the answer and nothing else; everything that happens goes to stderr, live. Tools that change something ask
at the terminal, or from another one (`retinue approvals`); without a terminal they are refused, unless
--wait-approvals says how long to wait for that other terminal, or --yes that nothing asks.
Ctrl-C cancels the run and everything below it; a second one kills it.

exit codes: 0 done, 1 failed, refused, limited or disconnected, 2 usage, 124 timed out, 130 cancelled

examples:
  retinue run "find the riskiest file" --model scripted:script.yaml
  retinue run @task.md --profile explorer --max-turns 20
  git diff | retinue run - --yes --timeout 600
  retinue run "fix the tests" --detach        then: retinue tail -f, retinue approvals, retinue send
  retinue run "audit src/" --json --quiet | jq .usage"""
EXIT_CODES = {"done": 0, "timed_out": 124, "cancelled": 130}
FAILED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run an agent on a task, with all the subagents it makes, and print its answer."
    parser.epilog = EPILOG
    parser.add_argument("task", metavar="TASK", help="what to do; - reads it from stdin, @FILE from a file")
    parser.add_argument("--profile", metavar="NAME", help="which agent does it (see `retinue profiles --all`)")
    parser.add_argument(
        "--workspace",
        choices=WORKSPACES,
        help="where it works: shared (the project itself), copy or worktree (until `retinue apply`), scratch (empty)",
    )
    add_live_options(parser)
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    task = read_task(args.task)
    limits = limits_of(args)
    parts, project = project_parts(args, limits)
    screen.checked(project.folder)
    profile = choose(project, args.profile)
    if args.workspace is not None:
        profile = replace(profile, workspace=args.workspace)
    if parts.model is None and profile.model is None:
        where = project.settings.file or project.folder / "retinue.yaml"
        raise ConfigError(no_model(where))
    for warning in project.warnings:
        screen.warn(warning)
    if parts.runtime == "delegated" and not (args.runtime or project.settings.coordination.subagent_runtime_mode):
        screen.complain(f"inside a container: subagents are asked of the host through {parts.outbox} (delegated)")
    terminal = not args.detach and args.task != "-" and sys.stdin.isatty() and sys.stderr.isatty()
    parts = walls.checked(parts, profile, terminal=terminal)
    wish = Task(task, model=model_of(args))
    begin = partial(Supervisor.spawn, profile=profile, task=wish, limits=limits)
    return see(args, parts, begin, stdin=args.task == "-", profile=profile)


def see(
    args: argparse.Namespace,
    parts: build.Parts,
    begin: Callable[[Supervisor], Run],
    *,
    stdin: bool = False,
    after: int = 0,
    profile: Profile | None = None,
) -> int:
    """Runs what `begin` begins on this terminal, or away from it. `stdin` says that it is not a person's."""
    if args.detach and args.no_control and not args.yes:
        raise ConfigError("--detach with --no-control can never ask anything: add --yes, or leave --no-control out")
    away = detach.leave() if args.detach else None
    if isinstance(away, int):
        return away
    printer = printer_of(args, color=False if away else None)
    driving = drive(
        parts,
        begin,
        printer=printer,
        terminal=away is None and not stdin and sys.stdin.isatty() and sys.stderr.isatty(),
        control=not args.no_control,
        after=after,
        announce=None if away is None else away.announce,
        profile=profile,
    )
    shown = asyncio.run(driving)
    return finish(shown, printer, as_json=args.json)


def printer_of(args: argparse.Namespace, *, color: bool | None = None) -> Printer:
    level: Level = "verbose" if args.verbose else "quiet" if args.quiet else "normal"
    return Printer(sys.stderr, level=level, color=color)


def project_parts(args: argparse.Namespace, limits: Limits) -> tuple[build.Parts, Any]:
    """What the project's files say, and the options over them. Asks first whether the files are trusted, where that
    matters and somebody can be asked."""
    if args.config is None and not args.yes and getattr(args, "task", None) != "-":
        trust.settle()
    mode = "yes" if args.yes else None
    wait = args.wait_approvals
    if wait is None and args.detach:
        wait = AWAY_SECONDS
    return build.load_project_parts(
        Path.cwd(),
        config=args.config,
        model=model_of(args),
        mode=mode,
        limits=limits,
        wait_approvals=wait,
        traced=True,
        runtime=args.runtime,
        default_runtime="isolated",
        outbox=args.delegation_directory,
    )


def choose(project: Any, name: str | None) -> Profile:
    """The profile of that name, active or not; without one the primary of `retinue run`."""
    if name is None:
        return build.MAIN
    for profile in project.all_profiles:
        if profile.name.casefold() == name.casefold():
            found: Profile = profile
            return found
    there = [profile.name for profile in project.all_profiles]
    raise NotFound(f"unknown profile '{name}'; there is {', '.join(there)}{meant(name, there)}")


def read_task(text: str) -> str:
    """The task itself, from stdin for `-`, or from a file for `@FILE` (`@@` begins a task with @)."""
    if text == "-":
        data = sys.stdin.buffer.read(EVENT_BYTES + 1)
        try:
            task = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ConfigError("the task on stdin is not UTF-8 text") from None
    elif text.startswith("@") and not text.startswith("@@"):
        task = read_text(Path(text[1:]).expanduser())
    else:
        task = os.fsencode(text).decode("utf-8", "replace")
        task = task[1:] if task.startswith("@@") else task
    if not task.strip():
        raise ConfigError("the task is empty: say what to do, or give - or @FILE")
    if len(task.encode()) > EVENT_BYTES // 2:
        raise ConfigError(
            f"the task is larger than {EVENT_BYTES // 2 // 1024 // 1024} MiB: put it in a file that the agent can read"
        )
    return task.rstrip("\n")


def finish(shown: Shown, printer: Printer, *, as_json: bool) -> int:
    """The last words on stderr, the answer on stdout, the exit code."""
    result = shown.result
    code = EXIT_CODES.get(result.status, FAILED)
    if not shown.stuck:
        if printer.level != "quiet":
            view = shown.runs.runs.get(result.run)
            if shown.log_error is None and view is not None and view.ended is not None:  # else some is not known
                printer.show_text(format_summary(shown.runs, color=printer.color))
            more = f"more: retinue show {result.tree} · retinue tail {result.tree}"
            printer.show_text(colors.paint_faint(more, color=printer.color))
        for name, count in _changed(result):
            files = f"{count} file{'' if count == 1 else 's'}"
            printer.show_note(f"{files} changed, not taken over: retinue diff {name} · retinue apply {name}")
        if result.status != "done":
            screen.complain(f"{result.status}: {result.error_details or result.final_response}{_hint(result)}")
        if shown.log_error is not None:
            screen.complain(shown.log_error)
            code = code or FAILED
    if as_json:
        screen.print_json(result.to_json())
    elif result.status == "done" and result.final_response:
        print(safe.escape_text(result.final_response) if sys.stdout.isatty() else result.final_response)
    sys.stdout.flush()
    if shown.stuck:  # a thread still waits for the screen; waiting for the thread would be waiting for ever
        os._exit(code)
    return code


def _changed(result: Result[Any]) -> Iterator[tuple[str, int]]:
    """The runs whose changes can be taken over, with how many files each changed. What is below one that worked in a
    copy itself was its business."""
    if result.changed_count:
        yield f"{result.tree}/{result.run}", result.changed_count
        return
    for child in result.children:
        yield from _changed(child)


def _hint(result: Result[Any]) -> str:
    unconfirmed = unconfirmed_texts(name=result.name, primary=True)
    return (
        "; --yes runs tools without asking, --wait-approvals waits for `retinue approve`"
        if result.error_details == unconfirmed[1]
        else ""
    )
