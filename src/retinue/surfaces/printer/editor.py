"""A call's arguments in the person's own editor, and back. The screen is the editor's while it runs."""

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

from retinue.log.styled_text import pretty

LEAVE_SECONDS = 1.0


def chosen() -> list[str]:
    """The editor the person has chosen, as words; none when they have not."""
    try:
        return shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "")
    except ValueError:
        return []


def parsed(text: str) -> dict[str, Any] | str:
    """The arguments a text says, or what is wrong with it."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        return f"that is not JSON: {error}"
    return value if isinstance(value, dict) else "arguments are a JSON object: {...}"


async def edit(command: list[str], args: dict[str, Any], *, fd: int) -> dict[str, Any] | str:
    """The arguments as the editor left them, or what went wrong. `fd` is the terminal."""
    handle, name = tempfile.mkstemp(prefix="retinue-", suffix=".json")
    file = Path(name)
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="replace") as out:
            out.write(pretty(args) + "\n")
        with _as_it_was(fd):
            process = await asyncio.create_subprocess_exec(*command, name, stdin=fd, stdout=fd, stderr=fd)
            try:
                code = await process.wait()
            finally:
                await _end(process)
        if code != 0:
            return f"{command[0]} ended with exit code {code}"
        return parsed(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeError) as error:
        return f"cannot edit: {error}"
    finally:
        with suppress(OSError):
            file.unlink()


async def _end(process: asyncio.subprocess.Process) -> None:
    """The question is no longer open: an editor that is asked to go leaves the screen as it found it."""
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
def _as_it_was(fd: int) -> Iterator[None]:
    """Whatever becomes of the editor, lines can be typed at the terminal afterwards."""
    try:
        modes = termios.tcgetattr(fd)
    except termios.error:  # no terminal
        yield
        return
    try:
        yield
    finally:
        with suppress(termios.error):
            termios.tcsetattr(fd, termios.TCSADRAIN, modes)
