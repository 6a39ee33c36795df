"""The pager: long text is shown in the user's pager on a terminal, and printed on any other output.

The caller has escaped the text: its only escape codes are the colours of Retinue.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from retinue.surfaces.printer.safe import measure_width

DEFAULT_PAGER = "less -FRX"
# For a $PAGER without options: show colours, leave the text on the screen, and quit if it fits on one screen.
PAGER_SETTINGS = {"LESS": "FRX", "LV": "-c"}
_COLOR = re.compile(r"\x1b\[[0-9;]*m")


def print_long(text: str) -> None:
    """Print `text`. If it is longer than the terminal, show it in $PAGER (default: `less -FRX`)."""
    command = _choose_pager() if _is_too_long(text) else []
    if not command or not _show_in_pager(command, text):
        print(text)


def _choose_pager() -> list[str]:
    """Return the command of the pager as words, or an empty list if the user wants no pager."""
    try:
        words = shlex.split(os.environ.get("PAGER", DEFAULT_PAGER))
    except ValueError:
        return []
    return [] if words == ["cat"] or os.environ.get("TERM", "dumb") == "dumb" else words


def _is_too_long(text: str) -> bool:
    """Return True if stdout is a terminal that cannot show `text` and the line of the next prompt."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):  # no terminal
        return False
    if not columns or not rows:  # the terminal does not know its size
        return False
    lines = (measure_width(_COLOR.sub("", line)) for line in text.split("\n"))
    return sum(max(1, -(-width // columns)) for width in lines) >= rows


def _show_in_pager(command: list[str], text: str) -> bool:
    """Show `text` until the user leaves the pager. Return False if the pager cannot be started."""
    sys.stdout.flush()
    with _ignore_interrupts():
        try:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**PAGER_SETTINGS, **os.environ})
        except OSError:
            return False
        process.communicate(f"{text}\n".encode(sys.stdout.encoding, "backslashreplace"))
    return True


@contextmanager
def _ignore_interrupts() -> Iterator[None]:
    """Leave Ctrl-C to the pager. The handler is a function, because the pager would inherit SIG_IGN."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
