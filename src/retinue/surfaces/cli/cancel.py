"""`retinue cancel RUN`: stops a run and everything below it, in whatever process it runs."""

from __future__ import annotations

import argparse
import asyncio

from retinue.control.channel import ControlUnreachable
from retinue.core.events import Event, RunEnded
from retinue.log.archive import Archive
from retinue.log.lookup import Found
from retinue.surfaces.cli import control_clients
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.show import RUN_HELP

EPILOG = """\
Siblings of the run go on; cancelling the primary cancels its whole tree. Waits until the run has ended.
Exit code 1 when there was nothing to stop.

examples:
  retinue cancel toje555k2w           the whole tree
  retinue cancel /main/explorer-1     one run, and those it made"""
WAIT_SECONDS = 30.0


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Stop a run and everything below it, whatever process runs it."
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="RUN", help=RUN_HELP.partition("; without it")[0])


def run(args: argparse.Namespace) -> int:
    archive, found = screen.look_up(args.name, live=True)
    return asyncio.run(_cancel(archive, found))


async def _cancel(archive: Archive, found: Found) -> int:
    client = control_clients.reach(archive, found)
    taken = False
    if client is not None:
        try:
            taken = await client.cancel(found.stored.tree, found.run)
        except ControlUnreachable:
            if control_clients.ending(archive, found) is None:
                raise
    if not taken and client is not None and control_clients.ending(archive, found) is None:
        print(f"{found.name} is stopping already")
    is_ending = _Ending(found.run)
    event = await control_clients.wait_for(archive, found.stored, is_ending, seconds=WAIT_SECONDS)
    status = event.body.status if event is not None and isinstance(event.body, RunEnded) else None
    if status is None:
        screen.complain(f"{found.name} was told to stop, and has not ended yet")
        return 1
    if not taken:
        screen.complain(f"{found.name} had ended already: {status}")
        return 1
    print(f"{found.name} {status}")
    return 0


class _Ending:
    def __init__(self, run: int) -> None:
        self._run = run

    def __call__(self, event: Event) -> bool:
        return event.run == self._run and isinstance(event.body, RunEnded)
