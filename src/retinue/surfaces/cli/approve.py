"""`retinue approve ID`: say yes to a question of another process."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import msgspec

from retinue.core.approvals import Allow
from retinue.core.errors import ConfigError
from retinue.surfaces.cli.questions import ID_HELP, answer_all_of_run, answer_question

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
SCOPES = {
    "run": "and to this tool for the rest of that run",
    "tool": "and to this tool in the whole tree",
    "project": "and always in this project: writes the rule that `retinue approvals --json` shows into retinue.yaml",
    "pending": "and to everything else that run asks now; at a terminal it is shown first",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        type=_parse_change,
        help="change an argument, or fill in a field; a value that is JSON is taken as such, any other as text",
    )


def run_command(args: argparse.Namespace) -> int:
    if args.changes and args.scope in ("pending", "project"):
        raise ConfigError(f"--set is about one call: give it without --{args.scope}")
    if args.scope == "pending":
        return asyncio.run(answer_all_of_run(args.id, Allow()))
    return asyncio.run(answer_question(args.id, Allow(scope=args.scope), dict(args.changes)))


def _parse_change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return name, value
