"""`retinue approve ID`: says yes to a question of another process."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from retinue.core.approvals import Allow, Decision
from retinue.core.errors import ConfigError
from retinue.core.ports import LogReader
from retinue.surfaces.cli import control_clients, prompts, questions
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.approvals import asked, describe_outcome
from retinue.surfaces.cli.questions import Waiting
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import Printer

EPILOG = """\
Without an option the answer is for this call alone, exactly as it was asked. The first answer is taken, wherever it is
given; exit code 1 when somebody was faster.

examples:
  retinue approvals
  retinue approve 2
  retinue approve 2 --run
  retinue approve 2 --pending
  retinue approve 2 --set name=Ann --set age=41      with other arguments, or a server's form filled in
  retinue approve toje555k2w/3/41"""
NOTHING: Mapping[str, Any] = MappingProxyType({})
SCOPES = {
    "run": "and to this tool for the rest of that run",
    "tool": "and to this tool in the whole tree",
    "project": "and always in this project: writes the rule that `retinue approvals --json` shows into retinue.yaml",
    "pending": "and to everything else that run asks now; at a terminal it is shown first",
}
NO_RULE = "no rule says just {what}: answer without --project, or with --run or --tool"
KEPT_SECONDS = 5.0
ID_HELP = "the question's number or id, as `retinue approvals` lists them, or a unique beginning of its id"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say yes to a question that waits, whatever process asks it."
    parser.epilog = EPILOG
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    scope = parser.add_mutually_exclusive_group()
    scope.set_defaults(scope="call")
    for name, words in SCOPES.items():
        scope.add_argument(f"--{name}", dest="scope", action="store_const", const=name, help=words)
    parser.add_argument(
        "--set",
        dest="changes",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=_change,
        help="change an argument, or fill in a field; a value that is JSON is taken as such, any other as text",
    )


def run(args: argparse.Namespace) -> int:
    if args.changes and args.scope in ("pending", "project"):
        raise ConfigError(f"--set is about one call: give it without --{args.scope}")
    if args.scope == "pending":
        return asyncio.run(answer_all(args.id, Allow()))
    return asyncio.run(answer(args.id, Allow(scope=args.scope), dict(args.changes)))


def _change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return name, value


async def answer(name: str, decision: Decision, changes: Mapping[str, Any] = NOTHING) -> int:
    """Gives the answer and says what became of it. `changes` are arguments that are not to be as they were asked."""
    project = screen.open_project_log()
    chosen = questions.choose(await questions.waiting(project), name)
    about = chosen.approval
    if changes:
        decision = msgspec.structs.replace(decision, args={**about.args, **changes})
    if isinstance(decision, Allow) and decision.scope == "project" and not about.rule:
        raise ConfigError(NO_RULE.format(what=asked(about)))
    return await _give(project.log, chosen, decision)


async def answer_all(name: str, decision: Decision) -> int:
    """The same answer to all that the run of a question asks now, each bound to what it is. A person who says yes sees
    them first."""
    project = screen.open_project_log()
    found = await questions.waiting(project)
    one = questions.choose(found, name).approval
    meant = [each for each in found if (each.approval.tree, each.approval.run) == (one.tree, one.run)]
    if isinstance(decision, Allow) and prompts.at_terminal():
        printer = Printer(sys.stderr)
        for each in meant:
            printer.show_question(each.approval)
        if not prompts.ask_yes_no(f"yes to {'this' if len(meant) == 1 else f'these {len(meant)}'}?", default=False):
            raise ConfigError("nothing was answered")
    return max([await _give(project.log, each, decision) for each in meant])


async def _give(log: LogReader, chosen: Waiting, decision: Decision) -> int:
    about = chosen.approval
    outcome = await chosen.client.answer(about.id, decision, by=control_clients.who(), digest=chosen.digest)
    if outcome != "taken":
        what = await describe_outcome(log, about)
        screen.print_error(f"somebody else was first: {asked(about)} of {about.tree}/{about.run} {what}")
        return 1
    word = "approved" if isinstance(decision, Allow) else "denied"
    print(f"{word} {asked(about)} of {about.tree}/{about.run}")
    if isinstance(decision, Allow) and decision.scope == "project":
        decided = await questions.wait_for_decision(log, about, seconds=KEPT_SECONDS)
        if decided is None or decided.scope != "project":
            screen.print_warning(f"the answer holds for this call only: the rule {about.rule} could not be written")
        else:
            print(f"allowed in this project from now on, by the rule in retinue.yaml: {safe.escape_line(about.rule)}")
    return 0
