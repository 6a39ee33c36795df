"""The Control of the process that runs a tree. Commands go to its control server, effects are read from the log."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from retinue.build.logs import open_stored_control
from retinue.build.servers import connect_to_server
from retinue.control.address_files import find_address
from retinue.core.control import Control
from retinue.core.errors import ConfigError
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader, name_process
from retinue.log.listing import Listing
from retinue.log.lookup import find_reported_run
from retinue.log.runs import RunView
from retinue.surfaces.cli.output import ProjectLog
from retinue.surfaces.printer import colors, safe

SILENT_SECONDS = 2.0
NO_ANSWER_YET = "{who} does not answer yet ..."


async def connect_to_tree(project: ProjectLog, tree: str) -> Control | None:
    """Return the Control of the process that runs `tree`, or None if there is no process or no control server."""
    writer = (await project.log.read_status(tree)).writer
    address = None if writer is None else find_address(project.state, writer)
    return None if address is None else connect_to_server(address)


async def open_runs_control(project: ProjectLog, tree: Listing, runs: Sequence[int]) -> Control:
    """Return the Control of the process that runs `tree`, or a Control of the stored trees if all these runs have
    ended, or if there is no process or no control server. A process may be stopped, so it is asked only if needed."""
    ended = {number for number, view in tree.runs.runs.items() if view.ended is not None}
    control = None if ended.issuperset(runs) else await connect_to_tree(project, tree.tree)
    return open_stored_control(project.state) if control is None else control


async def connect_to_run(project: ProjectLog, found: RunRef) -> Control | None:
    """Return the Control of the process that runs `found`, or None if that run has ended.

    Raises ConfigError if the process is gone or has no control server."""
    if await find_status(project.log, found) is not None:
        return None
    stored = await project.log.read_status(found.tree)
    if stored.writer is None:
        raise ConfigError(f"{found.name} was interrupted, its process is gone: retinue resume {found.tree}")
    address = find_address(project.state, stored.writer)
    if address is None:
        who = name_process(stored.pid)
        raise ConfigError(f"{who} runs {found.name} and has no control server: it was started with --no-control")
    return connect_to_server(address)


@contextmanager
def report_silence(who: str, *, seconds: float = SILENT_SECONDS) -> Iterator[None]:
    """Print a faint line if the block, which waits for a reply of `who`, takes long."""

    def report() -> None:
        text = safe.escape_line(NO_ANSWER_YET.format(who=who))
        print(colors.paint_faint(text, color=colors.wants_color(sys.stderr)), file=sys.stderr, flush=True)

    timer = asyncio.get_running_loop().call_later(seconds, report)
    try:
        yield
    finally:
        timer.cancel()


async def suggest_reporting_run(log: LogReader, view: RunView, hint: str) -> str:
    """Return `hint` with the name of the run in an MCP server of ours that reported this run, or an empty text if it is
    not known here."""
    found = await find_reported_run(log, view.agent, view.spawned.subagent_id) if view.spawned.server else None
    return "" if found is None else hint.format(run=found.name)


async def find_status(log: LogReader, found: RunRef) -> str | None:
    """Return the status of a run that has ended, or None."""
    runs = await log.read_runs([found.tree])
    return next((run.tally.status for run in runs if run.first.run == found.run), None)


def describe_user() -> str:
    """Return a name for the user of this process, which the log records as the giver of an answer."""
    for fd in (0, 1, 2):
        try:
            return f"user at {os.ttyname(fd).removeprefix('/dev/')}"
        except OSError:
            continue
    return f"user in process {os.getpid()}"
