"""`retinue send RUN TEXT`: words of the user for a run at work, and a receipt that says when it has read them."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

from retinue.core.control import ONLY_WATCHED
from retinue.core.events import Event, RunEnded, TurnStarted
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader
from retinue.log.listing import load_listing
from retinue.log.lookup import find_reported_run
from retinue.log.reading import wait_for_event
from retinue.surfaces.cli import control_clients
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.options import parse_seconds
from retinue.surfaces.cli.run import read_task
from retinue.surfaces.cli.show import RUN_HELP

EPILOG = """\
The run reads it at its next turn, as words of the user. The receipt is one of
  delivered at turn N   the run has read it
  queued                it is written, and is read at the next turn; the run is in the middle of one
  too late              the run has ended, or ended before it had another turn (exit code 1)
  only watched here     the run lives in an MCP server, which reports it (exit code 1)

examples:
  retinue send toje555k2w "leave the tests alone"
  retinue send /main/explorer-1 @notes.md --wait 60
  git diff | retinue send toje -"""
WAIT_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Tell a run something while it works; it reads it at its next turn."
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="RUN", help=RUN_HELP.partition("; without it")[0])
    parser.add_argument("text", metavar="TEXT", help="what to say; - reads it from stdin, @FILE from a file")
    parser.add_argument(
        "--wait",
        metavar="SECONDS",
        type=parse_seconds,
        default=WAIT_SECONDS,
        help="how long to wait for it to be read (5)",
    )
    parser.add_argument("--json", action="store_true", help="the receipt as one JSON object")


def run_command(args: argparse.Namespace) -> int:
    text = read_task(args.text)
    receipt = asyncio.run(_send(args.name, text, args.wait))
    if args.json:
        screen.print_json(receipt)
    elif receipt["state"] == "too_late":
        screen.print_error(f"too late: {receipt['why']}")
    elif receipt["state"] == "elsewhere":
        screen.print_error(receipt["why"])
    elif receipt["state"] == "delivered":
        print(f"delivered at turn {receipt['turn']}")
    else:
        print("queued: the run reads it at its next turn")
    return int(receipt["state"] in ("too_late", "elsewhere"))


async def _send(name: str, text: str, wait: float) -> dict[str, Any]:
    project, found = await screen.look_up(name, live=True)
    receipt: dict[str, Any] = {"tree": found.tree, "run": found.run, "state": "too_late", "turn": None}
    far = await _explain_remote(project.log, found)
    if far:
        return receipt | {"state": "elsewhere", "why": far}
    client = await control_clients.reach(project, found)
    if client is None:
        ended = await control_clients.find_ending(project.log, found)
        return receipt | {"why": f"the run has ended: {ended.status if ended else 'unknown'}"}
    given = await client.send(found.tree, found.run, text)
    if given.state == "too_late":
        return receipt | {"why": given.why}

    def is_news(event: Event) -> bool:
        return event.run == found.run and isinstance(event.body, TurnStarted | RunEnded)

    event = await wait_for_event(project.log, found.tree, is_news, after=given.seq, seconds=wait)
    if event is not None and isinstance(event.body, TurnStarted):
        return receipt | {"state": "delivered", "turn": event.body.turn}
    if event is not None:
        return receipt | {"why": "the run ended before it read it"}
    return receipt | {"state": "queued"}


async def _explain_remote(log: LogReader, found: RunRef) -> str:
    """Say why words do not reach a remote run, and where they would, if that is known; empty for other runs."""
    tree = await load_listing(log, found.tree)
    view = tree.runs.runs[found.run]
    if not view.spawned.server or view.ended is not None or not tree.live:
        return ""
    home = await find_reported_run(log, view.agent, view.spawned.subagent_id)
    where = "" if home is None else f"; `retinue send {home.name} TEXT` does"
    return ONLY_WATCHED.format(who=found.name, where=f"in the MCP server '{view.spawned.server}'") + where
