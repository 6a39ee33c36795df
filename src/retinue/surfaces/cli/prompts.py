"""A question of a command itself, answered with a line at the terminal. (What agents ask is the printer's.)"""

from __future__ import annotations

import sys
import termios
from contextlib import suppress


def at_terminal() -> bool:
    """Whether somebody can be asked: they see stderr and type on stdin."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> str | None:
    """The line typed behind the question, without spaces around it; None at the end of the input. What was typed
    before the question was shown is no answer to it."""
    sys.stdout.flush()
    with suppress(termios.error, OSError, ValueError):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    print(question, end=" ", file=sys.stderr, flush=True)
    line = sys.stdin.readline()
    if not line:
        print(file=sys.stderr)
        return None
    return line.strip()


def agreed(question: str, *, default: bool) -> bool:
    """A yes or no; whatever is neither is asked again, and the end of the input is a no."""
    while True:
        line = ask(f"{question} {'[Y/n]' if default else '[y/N]'}")
        match None if line is None else line.casefold():
            case None | "n" | "no":
                return False
            case "y" | "yes":
                return True
            case "":
                return default
