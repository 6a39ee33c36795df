"""`retinue approvals`: the questions that wait for an answer, in every process of the project."""

from __future__ import annotations

import argparse
import asyncio
import sys

from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import questions
from retinue.surfaces.cli.questions import Waiting
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import Printer

EPILOG = """\
A question's number is its place among all that its tree has asked. When two trees have one of the same number, give
its id. The first answer is taken, wherever it is given.

examples:
  retinue approvals                 what is waiting now
  retinue approvals --watch         and what comes, each as it would be asked at the terminal
  retinue approve 2
  retinue deny 3 "not in this folder"
  retinue approvals --json | jq -r '.[].id'"""
HEADS = ("NO", "RUN", "AGENT", "QUESTION", "ID")
POLL_SECONDS = 0.3
QUESTION_WIDTH = 60


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "List the questions that wait for an answer, whatever process asks them."
    parser.epilog = EPILOG
    parser.add_argument("--watch", action="store_true", help="go on with what comes, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="one JSON array; with --watch one object a line")


def run_command(args: argparse.Namespace) -> int:
    project = screen.open_project_log()
    if args.watch:
        asyncio.run(_watch(project, as_json=args.json))
        return 0
    found = asyncio.run(questions.find_waiting(project))
    if args.json:
        screen.print_json([each.to_json() for each in found])
    elif not found:
        print("Nothing waits for an answer.")
    else:
        print("\n".join(screen.format_table(HEADS, [_make_row(each) for each in found], right=frozenset({"NO"}))))
    return 0


def _make_row(each: Waiting) -> tuple[str, ...]:
    about = each.approval
    question = screen.shorten_to_width(questions.format_question(about), QUESTION_WIDTH)
    return (
        str(each.number),
        f"{about.tree}/{about.run}",
        safe.escape_line(about.agent),
        question,
        safe.escape_line(about.id),
    )


async def _watch(project: screen.ProjectLog, *, as_json: bool) -> None:
    printer = Printer(sys.stdout)
    seen: dict[str, Waiting] = {}
    while True:
        now = {each.approval.id: each for each in await questions.find_waiting(project)}
        for each in [each for name, each in now.items() if name not in seen]:
            if as_json:
                screen.print_json(each.to_json())
                sys.stdout.flush()
            else:
                printer.show_question(each.approval)
                number, name = each.number, f"{each.approval.tree}/{each.approval.run}"
                printer.show_note(f"{number}  {name}: retinue approve {number} · retinue deny {number} REASON")
        for each in [each for name, each in seen.items() if name not in now and not as_json]:
            printer.show_note(f"{each.number}  {await questions.describe_outcome(project.log, each.approval)}")
        seen = now
        if printer.is_closed:
            raise BrokenPipeError
        await asyncio.sleep(POLL_SECONDS)
