"""`retinue send` and `retinue cancel`: commands for a run at work in any process of the project."""

from __future__ import annotations

import argparse
import asyncio

from retinue.core.control import ONLY_WATCHED
from retinue.core.errors import ControlUnreachable
from retinue.core.events import Event, RunEnded
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader, Receipt
from retinue.log.listing import load_listing
from retinue.log.reading import wait_for_event, wait_until_read
from retinue.protocol.subagent_tools import READ_SECONDS
from retinue.surfaces.cli import control_clients, output
from retinue.surfaces.cli.options import NAMED_RUN_HELP, parse_seconds
from retinue.surfaces.cli.run import read_task

END_SECONDS = 30.0


def configure_send(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help=NAMED_RUN_HELP)
    parser.add_argument("text", metavar="TEXT", help="the message; - reads it from stdin, @FILE from a file")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=parse_seconds,
        default=READ_SECONDS,
        help=f"how long to wait until the run reads it (default: {READ_SECONDS:g})",
    )
    parser.add_argument("--json", action="store_true", help="print the receipt as one JSON object")


def execute_send(args: argparse.Namespace) -> int:
    """Send a message to a run while it works.

    The run reads it at its next turn, as a message of the user. The receipt is one of
      delivered at turn N   the run has read it
      queued                the run reads it at its next turn
      too late              the run has ended, or ended before another turn (exit code 1)
      only watched here     the run is in an MCP server and takes no messages (exit code 1)

    examples:
      retinue send last "leave the tests alone"
      retinue send /main/explorer-1 @notes.md --wait 60
      git diff | retinue send 7jw4 -
    """
    text = read_task(args.text)
    found, receipt = asyncio.run(_send(args.name, text, args.wait))
    is_lost = receipt.state in ("too_late", "elsewhere")
    if args.json:
        why = {"why": receipt.why} if receipt.why else {}
        about = {"tree": found.tree, "run": found.run, "state": receipt.state, "turn": receipt.turn}
        output.print_json(about | why)
    elif is_lost:
        output.print_error(receipt.describe())
    else:
        print(receipt.describe())
    return int(is_lost)


async def _send(name: str, text: str, wait: float) -> tuple[RunRef, Receipt]:
    project, found = await output.look_up(name, live=True)
    reason = await _explain_remote(project.log, found)
    if reason:
        return found, Receipt("elsewhere", why=reason)
    client = await control_clients.connect_to_run(project, found)
    if client is None:
        status = await control_clients.find_status(project.log, found)
        return found, Receipt("too_late", why=f"the run has ended: {status}")
    with control_clients.report_silence(f"the process of {found.name}"):
        given = await client.send(found.tree, found.run, text)
    return found, await wait_until_read(project.log, found.tree, found.run, given, seconds=wait)


async def _explain_remote(log: LogReader, found: RunRef) -> str:
    """Explain why a message cannot reach a remote run, and which run to send it to. Empty for other runs."""
    tree = await load_listing(log, found.tree)
    view = tree.runs.runs[found.run]
    if not view.spawned.server or view.ended is not None or not tree.live:
        return ""
    where = await control_clients.suggest_reporting_run(log, view, "; `retinue send {run} TEXT` does")
    return ONLY_WATCHED.format(who=found.name, where=f"in the MCP server '{view.spawned.server}'") + where


def configure_cancel(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN", help=NAMED_RUN_HELP)


def execute_cancel(args: argparse.Namespace) -> int:
    """Cancel a run and everything below it, in whichever process it runs.

    Other runs of the tree continue; cancelling the primary cancels the whole tree. The command returns when the run has
    ended. The exit code is 1 if there was nothing to cancel.

    examples:
      retinue cancel 7jw4                 the whole tree
      retinue cancel /main/explorer-1     one run, and those it made
    """
    return asyncio.run(_cancel(args.name))


async def _cancel(name: str) -> int:
    project, found = await output.look_up(name, live=True)
    client = await control_clients.connect_to_run(project, found)
    taken = False
    if client is not None:
        try:
            with control_clients.report_silence(f"the process of {found.name}"):
                taken = await client.cancel(found.tree, found.run)
        except ControlUnreachable:
            if await control_clients.find_status(project.log, found) is None:
                raise
    if not taken and client is not None and await control_clients.find_status(project.log, found) is None:
        print(f"{found.name} is stopping already")

    def is_ending(event: Event) -> bool:
        return event.run == found.run and isinstance(event.body, RunEnded)

    await wait_for_event(project.log, found.tree, is_ending, seconds=END_SECONDS)
    status = await control_clients.find_status(project.log, found)
    if status is None:
        output.print_error(f"{found.name} was told to stop, and has not ended yet")
        return 1
    if not taken:
        output.print_error(f"{found.name} had ended already: {status}")
        return 1
    print(f"{found.name} {status}")
    return 0
