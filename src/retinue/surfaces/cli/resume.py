"""`retinue resume [TREE]`: resume a tree whose process is gone, shown live like any run."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from retinue.core.control import ResumeOverrides
from retinue.core.errors import ConfigError, NotFound
from retinue.core.ports import LogReader
from retinue.log.listing import Listing, load_listing
from retinue.log.lookup import find_run
from retinue.protocol.outbox import asked_id, request_name
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.options import add_live_options, add_options
from retinue.surfaces.cli.resume_command import keep_runtime, make_overrides, run_in_tree
from retinue.surfaces.cli.startup import prepare

EPILOG = """\
Every run without an ending continues where its events stop: running children come back at any depth, spending is kept,
open questions are asked again, and answers that were given take effect. A tool that was running when the
process died is not repeated unless that does no harm: its outcome is `unknown_after_crash`, and the model is told.
Without TREE the latest interrupted one. The limits and the model are those of the tree, unless given here.

exit codes: as `retinue run`

examples:
  retinue resume
  retinue resume 7jw4p2xk9mtb --yes
  retinue resume 7jw4 --model anthropic:NAME --json"""

ERRAND = (
    "{tree} was asked for through an outbox, and its request {request} is answered `disconnected` because its watcher "
    "was killed: what it does from here on stays in {workspace}"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Resume a tree whose process is gone, and print its answer."
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="TREE", nargs="?", help="a tree, or the beginning of its name")
    add_live_options(parser)
    add_options(parser)


def run_command(args: argparse.Namespace) -> int:
    start = prepare(args)
    project = screen.open_project_log()
    found = asyncio.run(find_interrupted(project.log, args.name))
    _tell_of_errand(start.project.folder / ".retinue", found)
    return run_in_tree(
        args,
        keep_runtime(args, start, found),
        project,
        found,
        lambda control: control.resume(found.tree, make_overrides(args, start)),
        lambda client, unattended: client.resume(found.tree, ResumeOverrides(model=start.model, unattended=unattended)),
    )


def _tell_of_errand(state: Path, found: Listing) -> None:
    """Nobody waits for a run that a watcher, killed since, had taken out of an outbox: it is answered without it."""
    spawned = found.runs.runs[0].spawned
    request = asked_id(request_name(spawned.subagent_id))
    if request is not None and any((state / "outbox").glob(f"*/{request}")):
        screen.print_warning(ERRAND.format(tree=found.tree, request=request, workspace=spawned.workspace))


async def find_interrupted(log: LogReader, name: str | None) -> Listing:
    """Find the tree of that name, which must have no ending and no process; without a name the latest such tree."""
    if name is None:
        for stored in await log.list_trees(screen.print_warning):
            if stored.writer is None and not (await log.read_status(stored.tree)).ended:
                return await load_listing(log, stored.tree)
        raise NotFound("no tree here is interrupted; `retinue ps --all` lists what there is")
    found = await load_listing(log, (await find_run(log, name, screen.print_warning)).tree)
    if found.ended:
        primary = found.runs.runs[0]
        raise ConfigError(
            f"{found.tree} has ended: {primary.status}; `retinue continue {found.tree} TEXT` continues it"
        )
    if found.live:
        raise ConfigError(
            f"{found.tree} is not interrupted: process {found.pid} runs it (`retinue tail -f {found.tree}`)"
        )
    return found
