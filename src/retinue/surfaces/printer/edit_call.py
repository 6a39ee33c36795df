"""Editing the arguments of a call in the user's editor, which has the terminal while it runs."""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from retinue.log.blocks import format_json

LEAVE_SECONDS = 1.0
UNCHANGED = "nothing was changed: the question waits as before"


def find_editor() -> list[str]:
    """Return the command in $VISUAL or $EDITOR, split into words, or an empty list if neither is set."""
    try:
        return shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    except ValueError:
        return []


def parse_args(text: str) -> dict[str, Any] | str:
    """Return the arguments parsed from JSON `text`, or an error message."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return f"that is not JSON: {error}"
    return value if isinstance(value, dict) else "arguments are a JSON object: {...}"


async def edit_in_editor(command: list[str], args: dict[str, Any], *, fd: int) -> dict[str, Any] | str:
    """Open `args` as JSON in the editor and return the edited arguments, or an error message. `fd` is the terminal."""
    handle, name = tempfile.mkstemp(prefix="retinue-", suffix=".json")
    file = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as out:
            out.write(format_json(args) + "\n")
        with _restore_modes(fd):
            process = await asyncio.create_subprocess_exec(*command, name, stdin=fd, stdout=fd, stderr=fd)
            try:
                code = await process.wait()
            finally:
                await _end_editor(process)
        if code != 0:
            return f"{command[0]} ended with exit code {code}"
        return parse_args(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        return f"cannot edit: {error}"
    finally:
        with suppress(OSError):
            file.unlink()


async def _end_editor(process: asyncio.subprocess.Process) -> None:
    """End the editor when the question is no longer open. SIGTERM comes first, so that the editor can restore the
    screen. `processes.group` cannot end it: a program in a session of its own could not use the terminal."""
    with suppress(ProcessLookupError):
        if process.returncode is None:
            process.terminate()
            with suppress(TimeoutError):
                async with asyncio.timeout(LEAVE_SECONDS):
                    await process.wait()
        if process.returncode is None:
            process.kill()
    await process.wait()


@contextmanager
def _restore_modes(fd: int) -> Iterator[None]:
    """Restore the terminal's modes after the block, in case the editor changed them."""
    try:
        modes = termios.tcgetattr(fd)
    except termios.error:  # not a terminal
        yield
        return
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, modes)
