"""Shared by `resume` and `continue`: run in a tree that exists, here or in the process that may write it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from retinue.build.parts import MAIN
from retinue.control.client import ControlClient
from retinue.core.control import ResumeOverrides, RunHandle
from retinue.core.errors import ConfigError, LogHeld
from retinue.core.events import RunEnded, decode_raw
from retinue.core.limits import Limits
from retinue.core.profiles import RUNTIMES
from retinue.log.listing import Listing
from retinue.log.reading import decode_stored, follow_lines
from retinue.log.runs import Runs
from retinue.surfaces.cli import control_clients
from retinue.surfaces.cli.foreground import print_answer, run_tree
from retinue.surfaces.cli.live import Begin, Shown
from retinue.surfaces.cli.output import ProjectLog, print_warning
from retinue.surfaces.cli.startup import StartUp, make_printer

STRICTER = "{tree} ran with runtime '{runtime}'; it goes on with '{current}' (--runtime {runtime} keeps it as it was)"
Through = Callable[[ControlClient, bool], Awaitable[RunHandle]]


def make_overrides(args: argparse.Namespace, start: StartUp) -> ResumeOverrides:
    """Return what the command line changes in a tree that exists."""
    profiles = (MAIN, *start.project.all_profiles)
    return ResumeOverrides(profiles=profiles, limits=start.limits, model=start.model, runtime=args.runtime)


def keep_runtime(args: argparse.Namespace, start: StartUp, tree: Listing) -> StartUp:
    """Give new runs the runtime of the tree's primary if that is stricter than the settings of now. A laxer one has to
    be asked for again, because a log must not loosen what the settings say."""
    runtime, current = decode_raw(tree.runs.runs[0].spawned.profile).get("runtime"), start.parts.runtime
    if args.runtime is not None or current == "delegated" or runtime not in RUNTIMES or runtime == current:
        return start
    if RUNTIMES.index(runtime) > RUNTIMES.index(current):
        return replace(start, parts=replace(start.parts, runtime=runtime))
    print_warning(STRICTER.format(tree=tree.tree, runtime=runtime, current=current))
    return start


def run_in_tree(
    args: argparse.Namespace,
    start: StartUp,
    project: ProjectLog,
    found: Listing,
    begin: Begin,
    through: Through,
) -> int:
    """Run in a tree here, or through the control server of the process that has the right to write it."""
    try:
        return run_tree(args, start, begin, after=found.last_seq)
    except LogHeld as held:
        unattended = (start.parts.mode or start.parts.rules.mode) == "yes"
        client = _find_holder(project, found.tree, held.pid, limits=start.limits)
        return asyncio.run(_run_elsewhere(args, project, found, held.pid, through(client, unattended)))


def _find_holder(project: ProjectLog, tree: str, pid: int, *, limits: Limits) -> ControlClient:
    """Return a client of the process that writes the tree's log. That process takes no limits."""
    client = control_clients.find_client(project, pid)
    if client is None:
        raise ConfigError(
            f"the log of {tree} is being written by process {pid}, which has no control server: try later"
        )
    if limits != Limits():
        raise ConfigError(f"process {pid} writes the log of {tree} and runs it: it takes no limits from here")
    return client


async def _run_elsewhere(
    args: argparse.Namespace,
    project: ProjectLog,
    found: Listing,
    pid: int,
    starting: Awaitable[RunHandle],
) -> int:
    """Start the run in the process that writes the tree's log, and show it here."""
    begun = await starting
    if args.detach:
        print(begun.tree)
        return 0
    printer = make_printer(args)
    printer.show_note(f"{begun.tree} runs in process {pid}, which writes its log; that process decides what asks")
    runs = Runs(found.tree)
    async with aclosing(follow_lines(project.log, found.tree)) as lines:
        async for stored in lines:
            event = decode_stored(stored.line, project.log)
            runs.apply(event)
            (printer.show_event if event.seq > found.last_seq else printer.recall_event)(event)
            if event.run == begun.number and isinstance(event.body, RunEnded):
                break
    view = runs.runs.get(begun.number)
    if view is None or view.ended is None:
        raise ConfigError(f"process {pid} is gone too: retinue resume {found.tree}")
    return print_answer(Shown(view.result(found.tree), runs), printer, as_json=args.json)
