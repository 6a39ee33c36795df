"""`retinue tail TREE`: the events of a tree from the log, then live from the process that runs the tree."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import aclosing

from retinue.build.servers import watch_server_lines
from retinue.control.address_files import find_address
from retinue.core.errors import ControlUnreachable, NotFound
from retinue.core.events import Delta, RunEnded, RunSpawned
from retinue.core.ports import LogReader
from retinue.log.reading import decode_line, follow_lines, iterate_lines
from retinue.protocol.control import decode_item, is_delta
from retinue.surfaces.cli import output
from retinue.surfaces.cli.live_screen import pace_items
from retinue.surfaces.cli.options import TREE_HELP, parse_whole
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.live_view import LiveView
from retinue.surfaces.printer.printer import Level, Printer
from retinue.surfaces.printer.screen import Screen
from retinue.surfaces.printer.terminal import Terminal, can_draw
from retinue.surfaces.printer.totals import format_totals


def configure_tail(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="TREE", nargs="?", help=TREE_HELP)
    parser.add_argument("-f", "--follow", action="store_true", help="follow new events until the tree has ended")
    parser.add_argument(
        "--after", metavar="SEQ", type=parse_whole, default=0, help="print only events after this number"
    )
    parser.add_argument(
        "--all", action="store_true", help="also look in trees that another process shows as its subagents"
    )
    parser.add_argument("--json", action="store_true", help="print one event per line, exactly as stored")
    parser.add_argument(
        "--deltas", action="store_true", help='with -f --json: also print pieces of text, as {"delta": ...}'
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show long texts and results in full, with -f also what agents think"
    )
    parser.add_argument("--plain", action="store_true", help="with -f: print blocks instead of the live view")


def execute_tail(args: argparse.Namespace) -> int:
    """Print the events of a tree, as blocks or as JSON lines.

    Events of a tree are numbered from 1 without gaps; --after N continues after the last one you have seen. With -f
    the command ends when the tree has ended or its process is gone; on a terminal it shows the live view of
    `retinue run`, without answering or cancelling.

    examples:
      retinue tail                            the newest tree, as blocks
      retinue tail -f 7jw4                    follow a tree until it ends
      retinue tail --json --after 120         one event per line, exactly as stored
      retinue tail --json | jq -r .kind | sort | uniq -c
    """
    asyncio.run(_print_tree(args))
    return 0


async def _print_tree(args: argparse.Namespace) -> None:
    project, found = await output.look_up(args.name, everything=args.all)
    printer = Printer(sys.stdout, level="verbose" if args.verbose else "normal")
    if args.follow and not args.json and not args.plain and can_draw(output_fd=sys.stdout.fileno()):
        await _follow_live(project, found.tree, after=args.after, level=printer.level)
        return
    deltas = args.deltas if args.json else printer.shows_deltas
    talks = not args.json and await _is_conversation(project.log, found.tree)
    async for line in _read_lines(project, found.tree, after=args.after, follow=args.follow, deltas=deltas):
        if args.json:
            sys.stdout.buffer.write(line + b"\n")
            sys.stdout.buffer.flush()
            continue
        item = decode_item(line) if is_delta(line) else decode_line(line, project.log.location)
        if isinstance(item, Delta):
            printer.show_delta(item)
            continue
        printer.show_event(item)
        if item.run == 0 and isinstance(item.body, RunEnded):
            _print_ending(printer, item.agent, item.body, is_shown=talks)
        printer.check_output()
    printer.clear_status()
    if args.follow:
        await _warn_interrupted(project, found.tree)


async def _is_conversation(log: LogReader, tree: str) -> bool:
    first = await log.read(tree, limit=1)
    return any(isinstance(event.body, RunSpawned) and event.body.conversation for event in first)


async def _warn_interrupted(project: output.ProjectLog, tree: str) -> None:
    if not (await project.log.read_status(tree)).ended:
        output.print_warning(f"the process that ran {tree} is gone; to continue: retinue resume {tree}")


async def _follow_live(project: output.ProjectLog, tree: str, *, after: int, level: Level) -> None:
    """Show the live view of a tree of another process until the tree has ended."""
    live = Screen(Terminal(output_fd=sys.stdout.fileno()), color=colors.wants_color(sys.stdout))
    view = LiveView(live, tree, level=level, after=after)
    live.open()
    try:
        # The view needs the earlier events, too, for its state.
        async for line in pace_items(_read_lines(project, tree, after=0, follow=True, deltas=True)):
            view.apply(decode_item(line) if is_delta(line) else decode_line(line, project.log.location))
        primary = view.activity.runs.primary
        if primary is not None and primary.ended is not None:
            ended = primary.ended
            if ended.status != "done":
                view.show_note(f"{ended.status}: {ended.error_details or ended.final_response}")
            elif not primary.spawned.conversation:
                view.show_markdown(ended.final_response)
            view.show_note(format_totals(view.activity.runs, time.time()))
    finally:
        if not await live.close():
            output.exit_stuck()
    await _warn_interrupted(project, tree)


def _print_ending(printer: Printer, agent: str, ended: RunEnded, *, is_shown: bool) -> None:
    """Print the status of the ended primary, and its answer unless `is_shown`.

    Only the process that started the tree printed the answer. The last answer of a conversation is shown already."""
    head, text = f"● {safe.escape_line(agent)} {ended.status}", ended.final_response
    if ended.status == "done" and is_shown:
        printer.show_text(colors.paint_faint(head, color=printer.color))
    elif ended.status == "done":
        printer.show_text(f"{colors.paint_faint(head, color=printer.color)}\n{safe.escape_text(text)}")
    else:
        printer.show_note(f"{head}: {safe.escape_line(ended.error_details or text)}")


async def _read_lines(
    project: output.ProjectLog, tree: str, *, after: int, follow: bool, deltas: bool
) -> AsyncIterator[bytes]:
    if not follow:
        async for stored in iterate_lines(project.log, tree, after=after):
            yield stored.line
        return
    writer = (await project.log.read_status(tree)).writer
    address = None if writer is None else find_address(project.state, writer)
    if address is not None:
        try:
            async with aclosing(watch_server_lines(address, tree, after=after, deltas=deltas)) as lines:
                async for line in lines:
                    item = decode_item(line)
                    after = after if isinstance(item, Delta) else item.seq
                    yield line
        except (ControlUnreachable, NotFound):
            pass  # the log has the events that the control server did not send
    async for stored in follow_lines(project.log, tree, after=after):
        yield stored.line
