"""`retinue deny ID REASON`: say no to a question of another process, and tell the model why."""

from __future__ import annotations

import argparse
import asyncio
import os

from retinue.core.approvals import Deny
from retinue.surfaces.cli.questions import ID_HELP, answer_all_of_run, answer_question

EPILOG = """\
The run goes on; its model reads the reason. The first answer is taken, wherever it is given; exit code 1 when somebody
was faster.

examples:
  retinue deny 2
  retinue deny 2 "use the copy in build/ instead"
  retinue deny 2 "you are going the wrong way" --pending"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say no to a question that waits, whatever process asks it."
    parser.epilog = EPILOG
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    parser.add_argument("reason", metavar="REASON", nargs="?", default="", help="what the model reads")
    parser.add_argument("--pending", action="store_true", help="and to everything else that run asks now")


def run_command(args: argparse.Namespace) -> int:
    give = answer_all_of_run if args.pending else answer_question
    return asyncio.run(give(args.id, Deny(os.fsencode(args.reason).decode("utf-8", "replace"))))
