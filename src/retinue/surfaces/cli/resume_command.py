"""What `resume` and `continue` share: going on in the file the tree is in, here or in the process that writes it."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

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
from retinue.supervisor.run import Run
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.cli import control_clients
from retinue.surfaces.cli.live import Shown
from retinue.surfaces.cli.options import limits_of, model_of
from retinue.surfaces.cli.run import finish, printer_of, see

Through = Callable[[ControlClient, bool], Awaitable[RunHandle]]


def given(args: argparse.Namespace, project: Any) -> ResumeOverrides:
    profiles = (build.MAIN, clients.GONE, *project.all_profiles)
    return ResumeOverrides(profiles=profiles, limits=limits_of(args), model=model_of(args), runtime=args.runtime)


def where(args: argparse.Namespace, parts: build.Parts, project: Any, tree: Listing) -> build.Parts:
    """New runs of a tree live where its primary did, unless something else is said: inside a container, on the host."""
    if (
        args.runtime is not None
        or project.settings.coordination.subagent_runtime_mode is not None
        or parts.runtime == "delegated"
    ):
        return parts
    kept = decode_raw(tree.runs.runs[0].spawned.profile).get("runtime")
    return replace(parts, runtime=kept) if kept in RUNTIMES else parts


def in_tree(
    args: argparse.Namespace,
    parts: build.Parts,
    archive: Archive,
    found: Listing,
    begin: Callable[[Supervisor], Run],
    through: Through,
) -> int:
    """Goes on with a tree here if nobody writes its file, else through the control server of the process that does."""
    try:
        return see(args, replace(parts, log_file=found.stored.file), begin, after=found.last_seq)
    except HeldElsewhere:
        unasked = (parts.mode or parts.rules.mode) == "yes"
        return asyncio.run(_elsewhere(args, archive, found, lambda client: through(client, unasked)))


async def _elsewhere(
    args: argparse.Namespace,
    archive: Archive,
    found: Listing,
    through: Callable[[ControlClient], Awaitable[RunHandle]],
) -> int:
    pid = (holder(found.stored.file) or (0, 0))[0]
    address = find_address(control_clients.control_folder(archive), pid)
    if address is None:
        raise ConfigError(
            f"the log of {found.tree} is being written by process {pid}, which has no control server: try later"
        )
    if limits_of(args) != Limits():
        raise ConfigError(
            f"process {pid} writes the log of {found.tree} and goes on with it: it takes no limits from here"
        )
    begun = await through(ControlClient(address))
    if args.detach:
        print(begun.tree)
        return 0
    printer = printer_of(args)
    printer.show_note(
        f"{begun.tree} goes on in process {pid}, which writes its log: it asks, or does not, as that process does"
    )
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
    return finish(Shown(view.result(found.tree), runs), printer, as_json=args.json)
