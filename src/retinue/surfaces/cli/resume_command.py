"""What `resume` and `continue` share: going on in the file the tree is in, here or in the process that writes it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from retinue import build
from retinue.control.client import DoorClient
from retinue.core.errors import ConfigError, LogHeld
from retinue.core.events import RunEnded
from retinue.core.limits import Limits
from retinue.core.profiles import RUNTIMES
from retinue.core.records import plain
from retinue.log.listing import Listing
from retinue.log.reading import decode_stored, follow_lines
from retinue.log.runs import Runs
from retinue.protocol.control import Begun
from retinue.supervisor import client_run as clients
from retinue.supervisor.nodes import Node
from retinue.supervisor.resume import Given
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.cli import control_clients as doors
from retinue.surfaces.cli.live import Shown
from retinue.surfaces.cli.options import limits_of, model_of
from retinue.surfaces.cli.output import ProjectLog
from retinue.surfaces.cli.run import finish, printer_of, see

Through = Callable[[DoorClient, bool], Awaitable[Begun]]


def given(args: argparse.Namespace, project: Any) -> Given:
    profiles = (build.MAIN, clients.GONE, *project.all_profiles)
    return Given(profiles, limits_of(args), model_of(args), args.runtime)


def where(args: argparse.Namespace, parts: build.Parts, project: Any, tree: Listing) -> build.Parts:
    """New runs of a tree live where its primary did, unless something else is said: inside a container, on the host."""
    if args.runtime is not None or project.settings.subagent_runtime_mode is not None or parts.runtime == "delegated":
        return parts
    kept = plain(tree.runs.runs[0].spawned.profile).get("runtime")
    return replace(parts, runtime=kept) if kept in RUNTIMES else parts


def in_tree(
    args: argparse.Namespace,
    parts: build.Parts,
    project: ProjectLog,
    found: Listing,
    begin: Callable[[Supervisor], Awaitable[Node]],
    through: Through,
) -> int:
    """Goes on with a tree here if no other process has the right to write it, else through the door of the one that
    has."""
    try:
        return see(args, parts, begin, after=found.last_seq)
    except LogHeld as held:
        unasked = (parts.mode or parts.rules.mode) == "yes"
        return asyncio.run(_elsewhere(args, project, found, held.pid, lambda door: through(door, unasked)))


async def _elsewhere(
    args: argparse.Namespace,
    project: ProjectLog,
    found: Listing,
    pid: int,
    through: Callable[[DoorClient], Awaitable[Begun]],
) -> int:
    door = doors.find_door(project, pid)
    if door is None:
        raise ConfigError(f"the log of {found.tree} is being written by process {pid}, which has no door: try later")
    if limits_of(args) != Limits():
        raise ConfigError(
            f"process {pid} writes the log of {found.tree} and goes on with it: it takes no limits from here"
        )
    begun = await through(door)
    if args.detach:
        print(begun.tree)
        return 0
    printer = printer_of(args)
    printer.note(
        f"{begun.tree} goes on in process {pid}, which writes its log: it asks, or does not, as that process does"
    )
    runs = Runs(found.tree)
    async with aclosing(follow_lines(project.log, found.tree)) as lines:
        async for stored in lines:
            event = decode_stored(stored.line, project.log)
            runs.apply(event)
            (printer.show if event.seq > found.last_seq else printer.recall)(event)
            if event.run == begun.run and isinstance(event.body, RunEnded):
                break
    view = runs.runs.get(begun.run)
    if view is None or view.ended is None:
        raise ConfigError(f"process {pid} is gone too: retinue resume {found.tree}")
    return finish(Shown(view.result(found.tree), runs), printer, as_json=args.json)
