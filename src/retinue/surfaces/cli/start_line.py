"""The start line: shown before the slow imports of a command, and removed by the first other output."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

COMMANDS = ("talk", "run", "resume", "continue", "demo")  # the commands with a live view
NOT_LIVE = ("--plain", "--detach", "--help", "-h")
TEXT = "◐ starting"
_ERASE = b"\r\x1b[K"
_is_shown = False


def show_start_line(command: str | None, arguments: Sequence[str]) -> None:
    """Show the start line if `command` will show a live view on this terminal."""
    global _is_shown  # noqa: PLW0603 - there is one terminal
    if command not in COMMANDS or any(word in NOT_LIVE for word in arguments):
        return
    try:
        if os.environ.get("TERM", "dumb") in ("", "dumb") or not (sys.stdin.isatty() and sys.stderr.isatty()):
            return
        text = TEXT if os.environ.get("NO_COLOR") else f"\x1b[2m{TEXT}\x1b[0m"
        os.write(sys.stderr.fileno(), text.encode(sys.stderr.encoding, "replace"))
    except (OSError, ValueError, AttributeError):  # closed, or not a file
        return
    _is_shown = True


def clear_start_line() -> None:
    """Remove the start line before other output."""
    global _is_shown  # noqa: PLW0603
    if _is_shown:
        _is_shown = False
        os.write(2, _ERASE)
