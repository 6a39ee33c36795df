"""`retinue watch`: run on the host the subagents that agents in containers request through a shared folder."""

from __future__ import annotations

import argparse
import asyncio
import os
from dataclasses import replace
from pathlib import Path

from retinue.build.parts import MAIN, Parts, adapt_to_watcher, find_profile
from retinue.concurrency import run_until_first
from retinue.control.delegation_request import WatcherSettings
from retinue.control.outbox_watcher import OutboxWatcher
from retinue.core.limits import SPAWNED_SECONDS
from retinue.core.messages import RunRef
from retinue.protocol.inherited_limits import read_process_limits
from retinue.surfaces.cli.options import add_level_options, add_options, parse_seconds
from retinue.surfaces.cli.prompts import at_terminal
from retinue.surfaces.cli.server_process import LOOK, open_server_process
from retinue.surfaces.cli.startup import check_sandbox, make_printer, prepare, require_model
from retinue.surfaces.printer.approver import attach_terminal
from retinue.surfaces.printer.printer import Printer


def configure_watch(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--outbox", metavar="DIR", type=Path, required=True, help="the folder shared with the container"
    )
    parser.add_argument(
        "--allow-root",
        metavar="PATH",
        type=Path,
        action="append",
        required=True,
        help="a folder whose files runs may get copies of; can be given several times",
    )
    add_level_options(parser, has_live_view=False)
    parser.add_argument(
        "--wait-approvals",
        metavar="SECONDS",
        type=parse_seconds,
        help="without a terminal: how long a question waits for `retinue approve`",
    )
    add_options(parser, timed="each requested run", timeout=SPAWNED_SECONDS)


def execute_watch(args: argparse.Namespace) -> int:
    """Run the subagents that agents in containers request, in sandboxes of this machine.

    Retinue inside a container requests subagents by writing files into DIR. This command runs each of them in a sandbox
    of this machine (isolated, unless you give --runtime), with the profiles, models, keys, budgets and rules of this
    project only. A run gets copies of the folders that the request names, which must be below an --allow-root; its
    changes are copied back. Questions are asked here, or answered with `retinue approve`. Ctrl-C cancels the runs,
    answers their requests and stops; a second Ctrl-C kills. Requests that were not taken wait for the next watcher.

    examples:
      retinue watch --outbox /srv/box/outbox --allow-root /srv/box/work
      retinue watch --outbox ../box/outbox --allow-root ../box/work --wait-approvals 600 --max-cost 5
    """
    start = prepare(args, interactive=False, traced=False)
    start = replace(start, parts=adapt_to_watcher(start.parts))
    require_model(start, start.parts.profiles)
    start = check_sandbox(start, MAIN)
    asyncio.run(_watch_outbox(args, start.parts, make_printer(args)))
    return 0


async def _watch_outbox(args: argparse.Namespace, parts: Parts, printer: Printer) -> None:
    """Run the subagents that are requested through the outbox, until Ctrl-C."""
    terminal = at_terminal()
    if terminal:
        parts = replace(parts, approver=attach_terminal(printer, names_runs=True))
    assert parts.state is not None
    process = open_server_process(parts, printer, serves=not args.no_control, in_thread=not terminal)
    async with process as (control, screen, stop):

        def show_run(ref: RunRef, text: str) -> None:
            line = f"{ref.label}: {ref.agent} runs as {ref.tree}: {text[:200]}"
            screen.show_tree(control, ref.tree, label=ref.label, line=line, tells_end=False)

        def show_answer(tree: str, line: str) -> None:
            screen.say_after(tree, f"{line}; {LOOK.format(tree=tree)}")

        hosting = WatcherSettings(
            outbox=args.outbox,
            roots=args.allow_root,
            project=parts.project,
            state=parts.state,
            find=lambda name: find_profile(parts, name),
            limits=parts.limits,
            timeouts=parts.timeouts,
            say=screen.say,
            begun=show_run,
            answered=show_answer,
            caller=read_process_limits(os.environ),
        )
        watcher = OutboxWatcher(control, hosting)
        screen.say(f"watching {args.outbox} ({parts.runtime}); Ctrl-C stops")
        try:
            await run_until_first([watcher.watch(), stop.wait()])
        finally:
            await watcher.close()
