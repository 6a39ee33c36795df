"""`retinue watch`: run on the host the subagents that agents in containers request through a shared folder."""

from __future__ import annotations

import argparse
import asyncio
import os
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from retinue.build.parts import MAIN, Parts, adapt_to_watcher, find_profile
from retinue.build.servers import serve_control
from retinue.build.supervisor import open_control
from retinue.concurrency import TaskOwner, run_until_first
from retinue.control.delegation_request import Hosting
from retinue.control.outbox_watcher import OutboxWatcher
from retinue.core.events import Delta
from retinue.core.messages import RunRef
from retinue.protocol.inherited_limits import read_process_limits
from retinue.surfaces.cli.live import ServerScreen, kill_trees
from retinue.surfaces.cli.options import add_level_options, add_options, parse_seconds
from retinue.surfaces.cli.prompts import at_terminal
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.cli.startup import check_sandbox, make_printer, prepare, require_model
from retinue.surfaces.printer.approver import TerminalApprover
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
    add_level_options(parser)
    parser.add_argument(
        "--wait-approvals",
        metavar="SECONDS",
        type=parse_seconds,
        help="without a terminal: how long a question waits for `retinue approve`",
    )
    add_options(parser)


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
    asyncio.run(_Host(args, start.parts, make_printer(args)).serve())
    return 0


class _Host:
    """The watcher of an outbox, with its Control, control server and screen."""

    def __init__(self, args: argparse.Namespace, parts: Parts, printer: Printer) -> None:
        terminal = at_terminal()
        self._args = args
        self._parts = replace(parts, approver=TerminalApprover(printer)) if terminal else parts
        self._screen = ServerScreen(printer, in_thread=not terminal)
        self._printing = TaskOwner()

    async def serve(self) -> None:
        parts, args, say, stop = self._parts, self._args, self._screen.say, asyncio.Event()
        control = self._control = open_control(parts)
        async with AsyncExitStack() as servers:
            servers.push_async_callback(self._end)
            assert parts.state is not None
            hosting = Hosting(
                outbox=args.outbox,
                roots=args.allow_root,
                project=parts.project,
                state=parts.state,
                find=lambda name: find_profile(parts, name),
                limits=parts.limits,
                timeouts=parts.timeouts,
                say=say,
                begun=self._show,
                caller=read_process_limits(os.environ),
            )
            watcher = OutboxWatcher(control, hosting)
            if not args.no_control:
                await serve_control(servers, control, parts, say)
            with Signals() as signals:
                signals.aim(stop.set, lambda: kill_trees(control), say)
                say(f"watching {args.outbox} ({parts.runtime}); Ctrl-C stops")
                try:
                    await run_until_first([watcher.watch(), stop.wait()])
                finally:
                    await watcher.close()

    async def _end(self) -> None:
        await self._control.close()
        await self._printing.wait(1)
        self._screen.thread.close()

    def _show(self, ref: RunRef, text: str) -> None:
        self._screen.begin_tree(ref.tree, f"{ref.label}: {ref.agent} runs as {ref.tree}: {text[:200]}")
        self._printing.start(self._print(ref.tree, ref.label))

    async def _print(self, tree: str, label: str) -> None:
        async for event in self._control.watch(tree):
            if not isinstance(event, Delta):
                await self._screen.thread.enqueue(self._screen.print_event, event, label)
        await self._screen.thread.drain()
