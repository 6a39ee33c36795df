"""Shared by `resume` and `continue`: run in a tree that exists, here or in the process that writes its log file."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from retinue import build
from retinue.control.address_files import find_address
from retinue.control.client import ControlClient
from retinue.core.control import ResumeOverrides, RunHandle
from retinue.core.errors import ConfigError
from retinue.core.events import RunEnded, decode_raw
from retinue.core.limits import Limits
from retinue.core.profiles import RUNTIMES
from retinue.log.archive import Archive, event_of
from retinue.log.listing import Listing
from retinue.log.locks import HeldElsewhere, holder
from retinue.log.runs import Runs
from retinue.supervisor import client_run as clients
from retinue.surfaces.cli import control_clients
from retinue.surfaces.cli.foreground import print_answer, run_tree
from retinue.surfaces.cli.live import Begin, Shown
from retinue.surfaces.cli.startup import StartUp, make_printer

Through = Callable[[ControlClient, bool], Awaitable[RunHandle]]


def make_overrides(args: argparse.Namespace, start: StartUp) -> ResumeOverrides:
    """Return what the command line changes in a tree that exists."""
    profiles = (build.MAIN, clients.GONE, *start.project.all_profiles)
    return ResumeOverrides(profiles=profiles, limits=start.limits, model=start.model, runtime=args.runtime)


def keep_runtime(args: argparse.Namespace, start: StartUp, tree: Listing) -> StartUp:
    """Give new runs the runtime of the tree's primary, unless an option, a setting or a container says otherwise."""
    setting = start.project.settings.coordination.subagent_runtime_mode
    if args.runtime is not None or setting is not None or start.parts.runtime == "delegated":
        return start
    runtime = decode_raw(tree.runs.runs[0].spawned.profile).get("runtime")
    return replace(start, parts=replace(start.parts, runtime=runtime)) if runtime in RUNTIMES else start


def run_in_tree(
    args: argparse.Namespace,
    start: StartUp,
    archive: Archive,
    found: Listing,
    begin: Begin,
    through: Through,
) -> int:
    """Run in a tree here if no process writes its file, else through the control server of that process."""
    here = replace(start, parts=replace(start.parts, log_file=found.stored.file))
    try:
        return run_tree(args, here, begin, after=found.last_seq)
    except HeldElsewhere:
        unattended = (start.parts.mode or start.parts.rules.mode) == "yes"
        has_limits = start.limits != Limits()
        running = _run_elsewhere(args, archive, found, lambda client: through(client, unattended), limits=has_limits)
        return asyncio.run(running)


async def _run_elsewhere(
    args: argparse.Namespace,
    archive: Archive,
    found: Listing,
    through: Callable[[ControlClient], Awaitable[RunHandle]],
    *,
    limits: bool,
) -> int:
    """Start the run in the process that writes the tree's log, and show it here. That process takes no limits."""
    pid = (holder(found.stored.file) or (0, 0))[0]
    address = find_address(control_clients.control_folder(archive), pid)
    if address is None:
        raise ConfigError(
            f"the log of {found.tree} is being written by process {pid}, which has no control server: try later"
        )
    if limits:
        raise ConfigError(f"process {pid} writes the log of {found.tree} and runs it: it takes no limits from here")
    begun = await through(ControlClient(address))
    if args.detach:
        print(begun.tree)
        return 0
    printer = make_printer(args)
    printer.show_note(f"{begun.tree} runs in process {pid}, which writes its log; that process decides what asks")
    runs = Runs(found.tree)
    async with aclosing(archive.follow(found.stored)) as lines:
        async for line in lines:
            event = event_of(line, found.stored.file)
            runs.apply(event)
            (printer.show_event if event.seq > found.last_seq else printer.recall_event)(event)
            if event.run == begun.number and isinstance(event.body, RunEnded):
                break
    view = runs.runs.get(begun.number)
    if view is None or view.ended is None:
        raise ConfigError(f"process {pid} is gone too: retinue resume {found.tree}")
    return print_answer(Shown(view.result(found.tree), runs), printer, as_json=args.json)
