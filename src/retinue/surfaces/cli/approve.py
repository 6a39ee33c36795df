"""`retinue approve ID`: says yes to a question of another process."""

from __future__ import annotations

import argparse
import asyncio

from retinue.core.approvals import Allow, Decision
from retinue.surfaces.cli import doors, questions, screen
from retinue.surfaces.cli.approvals import asked, what_came

EPILOG = """\
The answer is for this call alone, exactly as it was asked. The first answer is taken, wherever it is given; exit code
1 when somebody was faster.

examples:
  retinue approvals
  retinue approve 2
  retinue approve toje555k2w/3/call_7"""
ID_HELP = "the question's number or id, as `retinue approvals` lists them, or a unique beginning of its id"


def configure(parser: argparse.ArgumentParser) -> None:
    parser.description = "Say yes to a question that waits, whatever process asks it."
    parser.epilog = EPILOG
    parser.add_argument("id", metavar="ID", help=ID_HELP)


def run(args: argparse.Namespace) -> int:
    return asyncio.run(answer(args.id, Allow()))


async def answer(name: str, decision: Decision) -> int:
    """Gives the answer and says what became of it."""
    archive = screen.open_archive()
    chosen = questions.choose(await questions.waiting(archive), name)
    about = chosen.approval
    outcome = await chosen.door.answer(about.id, decision, by=doors.who(), digest=chosen.digest)
    if outcome == "taken":
        word = "approved" if isinstance(decision, Allow) else "denied"
        print(f"{word} {asked(about)} of {about.tree}/{about.run}")
        return 0
    screen.complain(f"somebody else was first: {asked(about)} of {about.tree}/{about.run} {what_came(archive, chosen)}")
    return 1
