"""`retinue replay TREE`: run a recorded tree again without models and tools, and show where it differs."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from retinue.build.logs import open_log
from retinue.build.parts import MAIN, Parts
from retinue.build.project import load_project_parts
from retinue.build.supervisor import make_replay
from retinue.core.errors import ConfigError, NotFound
from retinue.core.profiles import Profile
from retinue.core.records import Difference, ReplayableTree, RunRecord, compare_runs
from retinue.core.results import Result
from retinue.log.blocks import format_count
from retinue.log.threads import fold_records
from retinue.surfaces.cli import output
from retinue.surfaces.cli.live import Display, run_and_show
from retinue.surfaces.cli.options import TREE_HELP, add_level_options
from retinue.surfaces.cli.startup import choose_profile, make_printer
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.printer import Printer

EXIT_DIFFERS = 1


def configure_replay(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="TREE", nargs="?", help=TREE_HELP)
    parser.add_argument("--json", action="store_true", help="print the result of the comparison as one JSON object")
    parser.add_argument(
        "--from-disk",
        action="store_true",
        help="use the instructions, skills and tools of the project's files as they are now",
    )
    parser.add_argument("--config", metavar="FILE", type=Path, help="with --from-disk: the retinue.yaml to use")
    add_level_options(parser, has_live_view=False)


def execute_replay(args: argparse.Namespace) -> int:
    """Run a recorded tree again, without models and tools, and show what differs.

    Models, tools and people answer as the log says they did; this version of Retinue does the rest again. It compares
    what each run asks its model (system prompt, messages, tools), which tools it calls, and how it ends. It does not
    compare times, nor the order in which runs took turns. A run that was cancelled, timed out, was resumed or never
    ended is played up to the end of its record, and the output says where that is. Runs at remote agents (A2A, or
    delegated to the host) are not compared, because their models are not here; the output names them.

    stdout is the recorded answer (or the comparison, with --json); everything else goes to stderr.

    exit codes: 0 no difference, 1 it differs, 2 usage

    examples:
      retinue replay                    the newest tree
      retinue replay 7jw4p2xk9mtb --quiet
      retinue replay --from-disk        with the profiles and skills as they are on disk now
      retinue replay 7jw4 --json | jq .differences
    """
    project, found = asyncio.run(output.look_up(args.name))
    recorded = fold_records(asyncio.run(project.log.read(found.tree)))
    if 0 not in recorded:
        raise ConfigError(f"the record of {found.tree} does not begin with its primary")
    parts, first = _load_project(args, recorded[0]) if args.from_disk else (None, None)
    replay = make_replay(recorded, parts, first)
    printer = make_printer(args)
    result, again = asyncio.run(_run_replay(replay, printer))
    remote = [record for record in recorded.values() if record.is_remote]
    played = {run: record for run, record in recorded.items() if not record.is_remote}
    compared = (replay.differences.get(run) or compare_runs(record, again.get(run)) for run, record in played.items())
    differences = [difference for difference in compared if difference is not None]
    ends = [record for record in played.values() if record.cut]
    events = sum(record.events for record in played.values())
    runs = len(played)
    for note in replay.notes:
        output.print_warning(note)
    for record in remote:
        print(f"not compared: {safe.escape_line(record.path)} ran at a remote agent", file=sys.stderr)
    for record in ends:
        where = f"in turn {len(record.turns)}" if record.turns else "at its beginning"
        print(f"the record of {safe.escape_line(record.path)} ends {where}: {record.cut}", file=sys.stderr)
    for line in _format_differences(differences, color=printer.color):
        print(line, file=sys.stderr)
    count = len({difference.run for difference in differences})
    came = f"{count} of them differ{'s' if count == 1 else ''}" if count else "no difference"
    print(f"replayed: {format_count(runs, 'run')}, {events} events, {came}", file=sys.stderr)
    if args.json:
        output.print_json(
            {
                "tree": found.tree,
                "same": not differences,
                "runs": runs,
                "events": events,
                "differences": [asdict(difference) for difference in differences],
                "remote": [{"run": record.number, "path": record.path} for record in remote],
                "ends": [{"run": r.number, "path": r.path, "turn": len(r.turns), "why": r.cut} for r in ends],
            }
        )
    elif result.status == "done" and result.final_response:
        output.print_text(result.final_response)
    return EXIT_DIFFERS if differences else 0


def _load_project(args: argparse.Namespace, primary: RunRecord) -> tuple[Parts, Profile | None]:
    parts, project = load_project_parts(Path.cwd(), config=args.config)
    try:
        return parts, choose_profile(project, None if primary.agent == MAIN.name else primary.agent)
    except NotFound:
        return parts, None


async def _run_replay(replay: ReplayableTree, printer: Printer) -> tuple[Result[Any], dict[int, RunRecord]]:
    """Run the replay, and return its result and the records of its runs."""
    log = open_log(None)
    shown = await run_and_show(
        Parts(Path.cwd()),
        lambda control: control.spawn(*replay.primary),
        Display(printer=printer),
        make=lambda parts: replay.open_control(log, parts.project),
    )
    return shown.result, fold_records(await log.read(shown.result.tree))


def _format_differences(differences: Sequence[Difference], *, color: bool) -> Iterator[str]:
    for difference in differences:
        where = f", turn {difference.turn}" if difference.turn else ""
        yield f"{safe.escape_line(difference.path)}{where}: the {difference.what} differs from the record"
        yield colors.paint_diff("\n".join(safe.escape_line(line) for line in difference.lines), color=color)
