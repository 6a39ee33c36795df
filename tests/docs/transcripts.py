"""The console blocks of a page, run on a real terminal and compared with the page.

A block holds commands (`$ retinue ps`) and what the terminal showed after each. A line `...` stands for any number of
lines. Ids, times and repeated spaces are not compared. `RETINUE_UPDATE_DOCS=1` writes what was seen into the page,
except where the page leaves lines out.
"""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fcntl import ioctl
from pathlib import Path

SECONDS = 120.0  # only ends what hangs
COLUMNS = 200
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_TREE = re.compile(r"\b[0-9a-hjkmnp-tv-z]{12}\b")
_NAMED = re.compile(r"^retinue (?:continue|send|cancel|tail -f) ([a-z0-9]{4,12})\b")
_BOTTOM = re.compile(rb"\x1b\[\?7l(.*?)\x1b\[\?7h", re.DOTALL)
_MOVES = re.compile(rb"\xe2\x97\x90 starting\r\x1b\[K|\x1b\[[?0-9;]*[A-Za-z]")
_CHANGING = (
    (_TREE, "TREE"),
    (re.compile(r" \(\d+\.\ds\)$", re.MULTILINE), ""),  # of a call that took long
    (re.compile(r"^[◐◓◑◒] (?=main )", re.MULTILINE), "◐ "),
    (re.compile(r"\bjust now\b|\b\d+ \w+ ago\b"), "AGE"),
    (re.compile(r"\b\d+(\.\d+)? ?(ms|s|min|m|h)\b( ?\d+ ?(s|min|m)\b)?"), "N s"),
    (re.compile(r"\b[0-9a-f]{7,40}\.\.[0-9a-f]{7,40}\b"), "BLOBS"),
    (re.compile(r"\bpts/\d+\b"), "TERMINAL"),
    (re.compile(r"[ \t]+"), " "),
)


@dataclass(frozen=True)
class Reply:
    """Keys that a person types when the terminal shows a text. Without keys the command is killed, as by a crash."""

    after: str
    keys: str | None


@dataclass(frozen=True)
class Step:
    """A command of a page with its output, and where in the page that stands."""

    command: str
    output: str
    start: int
    end: int


def read_steps(page: str) -> Iterator[Step]:
    """Yield the commands of the console blocks in order."""
    for block in _BLOCK.finditer(page):
        at = start = block.start(1)
        command = ""
        for line in block[1].splitlines(keepends=True):
            if line.startswith("$ "):
                if command:
                    yield Step(command, page[start + len(command) + 3 : at], start, at)
                command, start = line[2:].rstrip("\n"), at
            at += len(line)
        yield Step(command, page[start + len(command) + 3 : at], start, at)


def find_difference(shown: str, seen: str) -> str:
    """Return what the page shows and the terminal did not; '' if they agree."""
    wanted, lines = _normalise(shown), _normalise(seen)
    at = 0
    skips = False
    for line in wanted:
        if line.strip() == "...":
            skips = True
            continue
        while skips and at < len(lines) and lines[at] != line:
            at += 1
        if at == len(lines) or lines[at] != line:
            return f"the page has {line!r}, the terminal showed:\n{seen}"
        at += 1
        skips = False
    return "" if skips or at == len(lines) else f"the page ends before {lines[at]!r}:\n{seen}"


def _normalise(text: str) -> list[str]:
    for pattern, put in _CHANGING:
        text = pattern.sub(put, text)
    return [line.rstrip() for line in text.strip().splitlines() if line.strip()]


def run_page(
    page: Path, session: TerminalSession, replies: Mapping[str, Sequence[Reply]], *, update: bool = False
) -> None:
    """Run every command of the page, with the replies whose key is in it.

    Raise AssertionError if an output differs from the page, or write it there. The id of a tree in a command stands
    for the tree that was shown last."""
    text, latest, seen = page.read_text(), "", []
    for step in read_steps(text):
        named = _NAMED.search(step.command)
        command = step.command.replace(named[1], latest[: len(named[1])], 1) if named else step.command
        typed = next((given for key, given in replies.items() if key in command), ())
        output = session.run(command, typed)
        latest = next(reversed(_TREE.findall(output)), latest)
        difference = find_difference(step.output, output)
        assert update or not difference, f"{page.name}: `{command}`: {difference}"
        if update and "\n...\n" not in f"\n{step.output}":
            seen.append((step, f"$ {command}\n{_trim(output)}\n"))
    for step, block in reversed(seen):
        text = text[: step.start] + block + text[step.end :]
    if seen:
        page.write_text(text)


def _flatten(data: bytes, answered: Sequence[int]) -> bytes:
    """Return what lasts on the screen, and the bottom of the live view as it was when a person typed."""
    pieces, start = [], 0
    for bottom in _BOTTOM.finditer(data):
        pieces.append(data[start : bottom.start()])
        if any(bottom.start() <= at < bottom.end() for at in answered):
            pieces.append(b"\n" + bottom[1].strip() + b"\n\n")
        start = bottom.end()
    return _MOVES.sub(b"", b"".join([*pieces, data[start:]]))


def _trim(output: str) -> str:
    return "\n".join(line.rstrip() for line in output.strip("\n").splitlines())


class TerminalSession:
    """Runs commands one after the other in a folder, each on a terminal of its own."""

    def __init__(self, folder: Path, environment: Mapping[str, str], hidden: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = {**environment, "COLUMNS": str(COLUMNS), "TERM": "xterm", "NO_COLOR": "1"}
        self._hidden = hidden

    def run(self, command: str, replies: Sequence[Reply] = ()) -> str:
        """Return everything on the screen after the command, typed lines included."""
        master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
        process = subprocess.Popen(
            ["setsid", "--ctty", "--wait", "bash", "-c", command],
            cwd=self.folder, env=self._environment, stdin=slave, stdout=slave, stderr=slave,
        )  # fmt: skip
        os.close(slave)
        waiting, data, read = list(replies), b"", 0
        answered: list[int] = []
        until = time.monotonic() + SECONDS
        while True:
            if not select.select([master], [], [], max(0.0, until - time.monotonic()))[0]:
                os.killpg(os.tcgetpgrp(master), signal.SIGKILL)
                raise AssertionError(f"`{command}` waits for ever:\n{data.decode()}")
            try:
                chunk = os.read(master, 65536)
            except OSError:  # the last process that had the terminal is gone
                chunk = b""
            if not chunk:
                break
            data += chunk
            while waiting and (found := data.find(waiting[0].after.encode(), read)) >= 0:
                reply = waiting.pop(0)
                read = found + len(reply.after.encode())
                answered.append(found)
                if reply.keys is not None:
                    os.write(master, reply.keys.encode())
                else:
                    os.killpg(os.tcgetpgrp(master), signal.SIGKILL)
        process.wait()
        os.close(master)
        assert not waiting, f"`{command}` never showed {waiting[0].after!r}:\n{data.decode()}"
        text = _flatten(data, answered).decode().replace("\r\n", "\n").replace("\r", "")
        for real, put in self._hidden.items():
            text = text.replace(real, put)
        return text
