"""`retinue watch`: on the host, runs what agents in containers ask for through a shared folder."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path

from retinue import build
from retinue.config.models import no_model
from retinue.control.delegation_request import Hosting
from retinue.control.outbox_watcher import Watcher
from retinue.control.server import ControlServer
from retinue.core.errors import ConfigError, RetinueError
from retinue.core.events import Delta, Event
from retinue.core.messages import RunRef
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import sandbox_check as walls
from retinue.surfaces.cli.options import add_options, limits_of, model_of, seconds
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.approver import TerminalApprover
from retinue.surfaces.printer.printer import Level, Printer

EPILOG = """\
A retinue inside a container asks for subagents by writing into DIR; this command runs each behind a wall of this
machine (isolated, unless --runtime says otherwise), with the profiles, models, keys, budgets and rules of this project
and no others. A run gets copies of the folders it was asked to work on, which must lie below an --allow-root; what it
changed is copied back. Questions are asked here, or answered with `retinue approve`. Ctrl-C cancels what runs, answers
it, and stops; a second one kills. What was not yet taken waits for the next watcher.

examples:
  retinue watch --outbox /srv/box/outbox --allow-root /srv/box/work
  retinue watch --outbox ../box/outbox --allow-root ../box/work --wait-approvals 600 --max-cost 5"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Run what agents in containers ask for through a shared folder, behind a wall of this machine."
    parser.epilog = EPILOG
    parser.add_argument(
        "--outbox", metavar="DIR", type=Path, required=True, help="the folder shared with the container"
    )
    parser.add_argument(
        "--allow-root",
        metavar="PATH",
        type=Path,
        action="append",
        required=True,
        help="a folder whose files may be handed to runs; may be given more than once",
    )
    how_much = parser.add_mutually_exclusive_group()
    how_much.add_argument("--verbose", action="store_true", help="show texts and results whole, not cut")
    how_much.add_argument("--quiet", action="store_true", help="show one line for each tool call")
    parser.add_argument("--no-control", action="store_true", help="no send, cancel or answers from other terminals")
    parser.add_argument(
        "--wait-approvals", metavar="SECONDS", type=seconds, help="without a terminal, wait so long for answers"
    )
    add_options(parser)


def run(args: argparse.Namespace) -> int:
    limits = limits_of(args)
    parts, project = build.load_project_parts(
        Path.cwd(),
        config=args.config,
        model=model_of(args),
        mode="yes" if args.yes else None,
        limits=limits,
        wait_approvals=args.wait_approvals,
        runtime=args.runtime,
    )
    screen.checked(project.folder)
    if args.runtime is None and project.settings.coordination.subagent_runtime_mode is None:
        parts = replace(parts, runtime="isolated")
    parts = build.adapt_to_watcher(parts)
    if parts.model is None and all(profile.model is None for profile in parts.profiles):
        raise ConfigError(no_model(project.settings.file or project.folder / "retinue.yaml"))
    for warning in project.warnings:
        screen.warn(warning)
    parts = walls.checked(parts, build.MAIN, terminal=False)
    level: Level = "verbose" if args.verbose else "quiet" if args.quiet else "normal"
    asyncio.run(_Host(args, parts, Printer(sys.stderr, level=level)).serve())
    return 0


class _Host:
    """The supervisor, its control server, its screen and the watcher, from the first look to the last answer."""

    def __init__(self, args: argparse.Namespace, parts: build.Parts, printer: Printer) -> None:
        terminal = sys.stdin.isatty() and sys.stderr.isatty()
        self._args, self._printer = args, printer
        self._parts = replace(parts, approver=TerminalApprover(printer)) if terminal else parts
        self._thread = None if terminal else ThreadPoolExecutor(1, "retinue-screen")
        self._screens: set[asyncio.Task[None]] = set()
        self._shown = ""
        self._stop = asyncio.Event()

    async def serve(self) -> None:
        parts, args = self._parts, self._args
        supervisor = self._supervisor = build.make_supervisor(parts)
        async with AsyncExitStack() as servers:
            servers.push_async_callback(self._end)
            assert parts.state is not None
            hosting = Hosting(
                outbox=args.outbox,
                roots=args.allow_root,
                project=parts.project,
                state=parts.state,
                find=lambda name: build.find_profile(parts, name),
                limits=parts.limits,
                timeouts=parts.timeouts,
                say=self._say,
                begun=self._show,
            )
            watcher = Watcher(supervisor, hosting)
            if not args.no_control:
                try:
                    await servers.enter_async_context(
                        ControlServer(supervisor.control, parts.state, unattended=supervisor.is_unattended)
                    )
                except RetinueError as error:
                    self._say(f"warning: no control server for other terminals: {error}")
            with Signals(_All(supervisor, self._stop.set)) as signals:
                signals.aim("", self._say)
                self._say(f"watching {args.outbox} ({parts.runtime}); Ctrl-C stops")
                watching = asyncio.create_task(watcher.watch())
                stop = asyncio.create_task(self._stop.wait())
                await asyncio.wait({watching, stop}, return_when=asyncio.FIRST_COMPLETED)
                stop.cancel()
                watching.cancel()
                try:
                    with suppress(asyncio.CancelledError):
                        await watching
                finally:
                    await watcher.close()

    async def _end(self) -> None:
        await self._supervisor.close()
        if self._screens:
            await asyncio.wait(self._screens, timeout=1)
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _say(self, text: str) -> None:
        if self._thread is None:
            self._printer.show_note(safe.escape_line(text))
        else:
            self._thread.submit(self._printer.show_note, safe.escape_line(text))

    def _show(self, ref: RunRef, text: str) -> None:
        self._say(f"{ref.label}: {ref.agent} runs as {ref.tree}: {text[:200]}")
        self._shown = ref.tree
        task = asyncio.create_task(self._print(ref.tree, ref.label))
        self._screens.add(task)
        task.add_done_callback(self._screens.discard)

    async def _print(self, tree: str, label: str) -> None:
        async for event in self._supervisor.watch(tree):
            if isinstance(event, Delta):
                continue
            if self._thread is None:
                self._put(event, label)
            else:
                await asyncio.get_running_loop().run_in_executor(self._thread, self._put, event, label)

    def _put(self, event: Event, label: str) -> None:
        """Several run at once: where another's turn begins, its label stands above."""
        if self._printer.show_event(event, below="" if self._shown == event.tree else f"-- {safe.escape_line(label)}"):
            self._shown = event.tree


class _All:
    """All trees of a supervisor as one thing to stop."""

    def __init__(self, supervisor: Supervisor, stop: Callable[[], None]) -> None:
        self._supervisor, self._stop = supervisor, stop

    async def cancel(self, tree: str, run: int = 0, /) -> bool:
        self._stop()
        return True

    def kill(self, tree: str) -> None:
        for each in list(self._supervisor.trees):
            self._supervisor.kill(each)
