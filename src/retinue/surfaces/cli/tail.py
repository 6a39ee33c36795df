"""`retinue tail TREE`: the events of a tree, from the log and then as they happen in whatever process runs it."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing

from retinue.control.channel import ControlUnreachable
from retinue.core.errors import NotFound
from retinue.core.events import Delta, RunEnded
from retinue.log.archive import Archive, Stored, event_of
from retinue.protocol.control import decode_item
from retinue.surfaces.cli import control_clients
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.live_line import Speech
from retinue.surfaces.cli.show import RUN_HELP
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.printer import Printer

EPILOG = """\
Events of a tree are numbered from 1 without a gap; --after resumes behind a number you have seen.
With -f it ends when the tree does, or when the process that ran it is gone; on a terminal the last line shows what is
being said this moment.

examples:
  retinue tail                            the latest tree, as blocks
  retinue tail -f toje555k2w              and what happens from now on
  retinue tail --json --after 120         one event a line, exactly as stored
  retinue tail --json | jq -r .kind | sort | uniq -c"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Print the events of a tree: as blocks, or as JSON lines."
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="TREE", nargs="?", help=f"a tree, or a run in it: {RUN_HELP}")
    parser.add_argument("-f", "--follow", action="store_true", help="go on with what happens, until the tree has ended")
    parser.add_argument("--after", metavar="SEQ", type=_place, default=0, help="only events after this number")
    parser.add_argument("--all", action="store_true", help="also among trees that another process shows")
    parser.add_argument("--json", action="store_true", help="one event a line, exactly as stored")
    parser.add_argument("--deltas", action="store_true", help='with -f --json: pieces of text too, as {"delta": ...}')
    parser.add_argument("--verbose", action="store_true", help="texts and results whole, not cut")


def run(args: argparse.Namespace) -> int:
    archive, found = screen.look_up(args.name, everything=args.all)
    asyncio.run(_print(archive, found.stored, args))
    return 0


async def _print(archive: Archive, stored: Stored, args: argparse.Namespace) -> None:
    printer = Printer(sys.stdout, level="verbose" if args.verbose else "normal")
    speech = Speech(printer) if printer.terminal and not args.json else None
    async for line in _lines(archive, stored, args, deltas=args.deltas or speech is not None):
        item = None if args.json else decode_item(line)
        if isinstance(item, Delta):
            if speech is not None:
                speech.hear(item)
        elif args.json:
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()
        else:
            event = event_of(line, stored.file)
            if speech is not None:
                speech.over(event)
            printer.show_event(event)
            if event.run == 0 and isinstance(event.body, RunEnded):
                _end(printer, event.agent, event.body)
            if printer.is_closed:
                raise BrokenPipeError
    if speech is not None:
        printer.clear_status()
    if args.follow and not archive.has_ended(stored):
        screen.warn(f"the process that ran {stored.tree} is gone; go on: retinue resume {stored.tree}")


def _end(printer: Printer, agent: str, ended: RunEnded) -> None:
    """How the primary ended: its answer went to whoever started it, who may be nobody by now."""
    head, text = f"● {safe.escape_line(agent)} {ended.status}", ended.final_response
    if ended.status == "done":
        printer.show_text(f"{colors.paint_faint(head, color=printer.color)}\n{safe.escape_text(text)}")
    else:
        printer.show_note(f"{head}: {safe.escape_line(ended.error_details or text)}")


async def _lines(archive: Archive, stored: Stored, args: argparse.Namespace, *, deltas: bool) -> AsyncIterator[bytes]:
    after = args.after
    if not args.follow:
        for line in archive.lines(stored, after=after):
            yield line
        return
    client = control_clients.find_client(archive, stored)
    if client is not None:
        try:
            async with aclosing(client.watch_lines(stored.tree, after=after, deltas=deltas)) as lines:
                async for line in lines:
                    item = decode_item(line)
                    after = after if isinstance(item, Delta) else item.seq
                    yield line
        except (ControlUnreachable, NotFound):
            pass  # the file has what the server did not send
    async for line in archive.follow(stored, after=after):
        yield line


def _place(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"must be the number of an event, 0 or more, got {text!r}")
    return int(text)
