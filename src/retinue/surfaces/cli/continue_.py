"""`retinue continue RUN TEXT`: a new run that starts with the conversation of one that has ended, and a new message."""

from __future__ import annotations

import argparse
import asyncio

from retinue.build.stored import open_stored_control
from retinue.core.control import RAN_ELSEWHERE, ResumeOverrides
from retinue.core.errors import ConfigError
from retinue.core.messages import RunRef
from retinue.log.listing import Listing, load_listing
from retinue.log.lookup import find_reported_run
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.foreground import run_tree
from retinue.surfaces.cli.options import add_live_options, add_options
from retinue.surfaces.cli.resume_command import keep_runtime, make_overrides, run_in_tree
from retinue.surfaces.cli.run import read_task
from retinue.surfaces.cli.show import RUN_HELP
from retinue.surfaces.cli.startup import prepare

EPILOG = """\
The new run knows the whole conversation of the old one. A primary continues in a new tree, whose origin is the old one;
a subagent continues in its own tree, beside the old run. A subagent_id then names the newest of them.
A run that worked in a copy starts with a new copy: `retinue apply` applies the changes of the old one first.
To talk to a run at work use `retinue send`; for an interrupted tree use `retinue resume`.

exit codes: as `retinue run`

examples:
  retinue continue 7jw4p2xk9mtb "now write the tests too"
  retinue continue /main/explorer-1 @question.md
  retinue continue 7jw4 - --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Continue a run that has ended, with a new message, and print the answer."
    parser.epilog = EPILOG
    parser.add_argument("name", metavar="RUN", help=RUN_HELP.partition("; without it")[0])
    parser.add_argument("text", metavar="TEXT", help="what to do now; - reads it from stdin, @FILE from a file")
    add_live_options(parser)
    add_options(parser)


def run_command(args: argparse.Namespace) -> int:
    text = read_task(args.text)
    start = prepare(args, interactive=args.text != "-")
    project, tree, found = asyncio.run(_find_ended(args.name))
    copy = open_stored_control(project.state).find_copy(tree.tree, found.run)
    if copy is not None and copy.has_unapplied:
        screen.print_warning(
            f"{found.name} changed files that were not applied: the new run begins without them "
            f"(`retinue apply {found.name}`)"
        )
    overrides = make_overrides(args, start)
    start = keep_runtime(args, start, tree)
    if found.run == 0:
        return run_tree(args, start, lambda control: control.continue_run(tree.tree, 0, text, overrides))
    return run_in_tree(
        args,
        start,
        project,
        tree,
        lambda control: control.continue_run(tree.tree, found.run, text, overrides),
        lambda client, unattended: client.continue_run(
            tree.tree, found.run, text, ResumeOverrides(model=start.model, unattended=unattended)
        ),
    )


async def _find_ended(name: str) -> tuple[screen.ProjectLog, Listing, RunRef]:
    """Find the run of that name, which must have ended, here."""
    project, found = await screen.look_up(name)
    tree = await load_listing(project.log, found.tree)
    old = tree.runs.runs[found.run]
    if old.spawned.server:
        home = await find_reported_run(project.log, old.agent, old.spawned.subagent_id)
        where = "" if home is None else f"; `retinue continue {home.name} TEXT` does"
        raise ConfigError(RAN_ELSEWHERE.format(who=found.name, server=old.spawned.server) + where)
    if not tree.live and not tree.ended:
        raise ConfigError(f"{tree.tree} was interrupted: `retinue resume {tree.tree}` resumes it")
    if old.ended is None:
        raise ConfigError(f"{found.name} is at work: `retinue send {found.name} TEXT` tells it something")
    return project, tree, found
