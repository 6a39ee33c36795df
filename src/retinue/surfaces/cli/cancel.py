"""`retinue cancel RUN`: stops a run and everything below it, in whatever process it runs."""

from __future__ import annotations

import argparse
import asyncio

from retinue.control.client import ControlUnreachable
from retinue.core.events import Event, RunEnded
from retinue.log.reading import wait_for_event
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Stop a run and everything below it, whatever process runs it."
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="RUN", help=RUN_HELP.partition("; without it")[0])


def run_command(args: argparse.Namespace) -> int:
    return asyncio.run(_cancel(args.name))


async def _cancel(name: str) -> int:
    project, found = await screen.look_up(name, live=True)
    client = await control_clients.reach(project, found)
    taken = False
    if client is not None:
        try:
            taken = await client.cancel(found.tree, found.run)
        except ControlUnreachable:
            if await control_clients.find_ending(project.log, found) is None:
                raise
    if not taken and client is not None and await control_clients.find_ending(project.log, found) is None:
        print(f"{found.name} is stopping already")
    event = await wait_for_event(project.log, found.tree, _Ending(found.run), seconds=WAIT_SECONDS)
    status = event.body.status if event is not None and isinstance(event.body, RunEnded) else None
    if status is None:
        screen.print_error(f"{found.name} was told to stop, and has not ended yet")
        return 1
    if not taken:
        screen.print_error(f"{found.name} had ended already: {status}")
        return 1
    print(f"{found.name} {status}")
    return 0


class _Ending:
    def __init__(self, run: int) -> None:
        self._run = run

    def __call__(self, event: Event) -> bool:
        return event.run == self._run and isinstance(event.body, RunEnded)
