"""Questions of a command itself, answered with a line at the terminal. The printer asks the questions of agents."""

from __future__ import annotations

import sys
import termios
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from retinue.core.errors import ConfigError
from retinue.surfaces.printer import safe

TRUST_QUESTION = "Trust it, until it changes?"


def at_terminal() -> bool:
    """Return True if a user can be asked, because both stdin and stderr are a terminal."""
    return sys.stdin.isatty() and sys.stderr.isatty()


def ask(question: str) -> str | None:
    """Print `question` and return the typed line, stripped, or None at the end of the input.

    Discards everything typed before the question was shown."""
    sys.stdout.flush()
    with suppress(termios.error, OSError, ValueError):
        termios.tcflush(sys.stdin.fileno(), termios.TCIFLUSH)
    try:
        print(question, end=" ", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
    except KeyboardInterrupt:
        print(file=sys.stderr)  # so that the shell's prompt begins on a new line
        raise
    if not line:
        print(file=sys.stderr)
        return None
    return line.strip()


def ask_yes_no(question: str, *, default: bool) -> bool:
    """Ask until the answer is yes or no. An empty line is the `default`, the end of the input is a no."""
    while True:
        line = ask(f"{question} {'[Y/n]' if default else '[y/N]'}")
        match None if line is None else line.casefold():
            case None | "n" | "no":
                return False
            case "y" | "yes":
                return True
            case "":
                return default


def confirm(question: str, shown: str, *, yes: bool, no_terminal: str) -> bool:
    """Print `shown`, which is escaped, and ask whether something may be changed. `yes` answers without asking.

    Raises ConfigError with the text `no_terminal` if there is no user to ask."""
    if yes:
        return True
    if not at_terminal():
        raise ConfigError(no_terminal)
    print(shown, file=sys.stderr)
    if ask_yes_no(question, default=False):
        return True
    print("Nothing was changed.", file=sys.stderr)
    return False


def format_loosenings(file: Path, loose: Sequence[str]) -> str:
    """Return the settings of the file that loosen permissions as escaped text."""
    lines = [
        f"{safe.escape_line(str(file))} loosens what agents may do here:",
        *(f"  {safe.escape_line(line)}" for line in loose),
    ]
    return "\n".join([*lines, "Without your trust this part is ignored."])
