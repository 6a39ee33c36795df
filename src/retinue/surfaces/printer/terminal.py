"""The user's terminal while a screen is drawn on it: modes, size, keys and job control.

Keys arrive one at a time and without echo. Ctrl-C, Ctrl-Z and Ctrl-\\ remain signals. The caller that opens a terminal
closes it. The original modes are restored on close, on an error, while the process is stopped, and while another
program uses the terminal. This module draws nothing; see `screen.py`.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import select
import signal
import termios
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from fcntl import ioctl
from typing import Any

from retinue.files.content import read_available, write_all
from retinue.surfaces.printer.keys import Key, KeyParser, Paste

ESCAPE_SECONDS = 0.05  # a terminal sends the rest of an escape sequence faster than a person types
FOREGROUND_SECONDS = 0.25
LEAVE_SECONDS = 1.0
COLUMNS, ROWS = 80, 24
ENTER_SEQUENCE = "\x1b[?2004h"  # bracketed paste: pasted text arrives between two markers
LEAVE_SEQUENCE = "\x1b[?2004l\x1b[?25h\x1b[?7h"
_READ_BYTES = 65536


def can_draw(input_fd: int = 0, output_fd: int = 2, environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if a screen can be drawn: both descriptors are terminals, this process is in the foreground, and
    `TERM` names a terminal that can move its cursor."""
    if environment.get("TERM", "dumb") in ("", "dumb"):
        return False
    try:
        return os.isatty(input_fd) and os.isatty(output_fd) and _is_foreground(input_fd)
    except OSError:
        return False


class Terminal:
    """A terminal that reports keys and changes. Belongs to one event loop."""

    def __init__(self, *, input_fd: int = 0, output_fd: int = 2) -> None:
        self.output_fd = output_fd
        self.is_away = True
        self._on_key: Callable[[Key | Paste], object] = lambda _: None
        self._on_resize: Callable[[], object] = lambda: None
        self._on_away: Callable[[], object] = lambda: None
        self._on_return: Callable[[], object] = lambda: None
        self._on_closed: Callable[[], object] = lambda: None
        self._input_fd = input_fd
        self._modes: list[Any] | None = None
        self._is_lent = False
        self._parser = KeyParser()
        self._early_bytes = 0
        self._escape: asyncio.TimerHandle | None = None
        self._returning: asyncio.TimerHandle | None = None
        self._signals: dict[int, Callable[[], object]] = {
            signal.SIGWINCH: self._resize,
            signal.SIGTSTP: self._suspend,
            signal.SIGCONT: self._return,
            signal.SIGQUIT: self._quit,
        }

    def report_keys(
        self, on_key: Callable[[Key | Paste], object], *, on_closed: Callable[[], object] = lambda: None
    ) -> None:
        """Call `on_key` for every key and paste from now on, and `on_closed` when no more keys can arrive."""
        self._on_key, self._on_closed = on_key, on_closed

    def report_changes(
        self, *, on_resize: Callable[[], object], on_away: Callable[[], object], on_return: Callable[[], object]
    ) -> None:
        """Call `on_resize` when the size may have changed, `on_away` before another program gets the terminal, and
        `on_return` after the terminal is back."""
        self._on_resize, self._on_away, self._on_return = on_resize, on_away, on_return

    @property
    def size(self) -> tuple[int, int]:
        """Return the number of columns and rows."""
        try:
            columns, rows = os.get_terminal_size(self.output_fd)
        except OSError:
            return COLUMNS, ROWS
        return columns or COLUMNS, rows or ROWS

    def open(self) -> None:
        """Take the terminal and start reading keys."""
        loop = asyncio.get_running_loop()
        self._modes = termios.tcgetattr(self._input_fd)
        atexit.register(self.restore)
        for number, react in self._signals.items():
            loop.add_signal_handler(number, react)
        self._enter()

    def close(self) -> None:
        """Stop reading keys and restore the terminal."""
        loop = asyncio.get_running_loop()
        self.restore()
        self._cancel_return()
        self._modes = None
        for number in self._signals:
            loop.remove_signal_handler(number)
        atexit.unregister(self.restore)

    def restore(self) -> None:
        """Restore the original modes. Also works without a running event loop, as in an `atexit` handler."""
        if self.is_away:
            return
        self.is_away = True
        with suppress(RuntimeError, ValueError, OSError):  # the event loop is gone
            asyncio.get_running_loop().remove_reader(self._input_fd)
        if self._takes_output():
            self.write(LEAVE_SEQUENCE)
        with suppress(termios.error):
            termios.tcsetattr(self._input_fd, termios.TCSANOW, self._modes or [])

    @contextmanager
    def lend(self) -> Iterator[int]:
        """Lend the terminal to another program, such as an editor, and yield its descriptor."""
        self._leave()
        self._is_lent = True
        try:
            yield self._input_fd
        finally:
            self._is_lent = False
            self._return()

    def discard_typed(self) -> None:
        """Drop all keys typed so far."""
        self._early_bytes = 0
        while not self.is_away and select.select([self._input_fd], [], [], 0)[0]:
            try:
                data = os.read(self._input_fd, _READ_BYTES)
            except OSError:
                return
            if not data:
                return
            self._parser.parse(data)

    def write(self, text: str) -> None:
        """Write `text` to the terminal immediately. Ignores the error if the terminal is gone."""
        with suppress(OSError):
            write_all(self.output_fd, text.encode("utf-8", "backslashreplace"))

    def _takes_output(self) -> bool:
        """Return True if the terminal takes output within `LEAVE_SECONDS`. A write to one that is stopped would never
        return."""
        waiting = select.poll()
        waiting.register(self.output_fd, select.POLLOUT)
        return bool(waiting.poll(LEAVE_SECONDS * 1000))

    def _enter(self) -> None:
        if self._modes is None or not _is_foreground(self._input_fd):
            return
        modes = list(self._modes)
        modes[0] &= ~(termios.ICRNL | termios.IXON)  # tell Enter from Ctrl-J; no flow control by Ctrl-S
        modes[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        modes[3] |= termios.NOFLSH  # Ctrl-C must not discard the rest of a frame that is on its way
        modes[6] = [*modes[6]]
        modes[6][termios.VMIN], modes[6][termios.VTIME] = 1, 0
        try:
            termios.tcsetattr(self._input_fd, termios.TCSANOW, modes)
            asyncio.get_running_loop().add_reader(self._input_fd, self._read)
        except (termios.error, OSError, ValueError):
            self._on_closed()
            return
        self.is_away = False
        self._early_bytes = _count_waiting(self._input_fd)
        self.write(ENTER_SEQUENCE)

    def _leave(self) -> None:
        if not self.is_away:
            self._on_away()
            self.restore()

    def _return(self) -> None:
        """Take the terminal back once the process is in the foreground. A shell's `fg` sends no signal to a job that
        was running in the background, so this method polls."""
        self._cancel_return()
        if self._modes is None or self._is_lent or not self.is_away:
            return
        self._enter()
        if self.is_away:
            self._returning = asyncio.get_running_loop().call_later(FOREGROUND_SECONDS, self._return)
        else:
            self._on_return()

    def _cancel_return(self) -> None:
        if self._returning is not None:
            self._returning.cancel()
            self._returning = None

    def _suspend(self) -> None:
        """Stop the process as Ctrl-Z does, after restoring the modes for the shell."""
        self._leave()
        os.kill(os.getpid(), signal.SIGSTOP)

    def _resize(self) -> None:
        self._on_resize()

    def _quit(self) -> None:
        self._leave()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGQUIT)
        os.kill(os.getpid(), signal.SIGQUIT)

    def _read(self) -> None:
        data = read_available(self._input_fd, _READ_BYTES)
        if data is None:
            return
        if not data:
            asyncio.get_running_loop().remove_reader(self._input_fd)
            self._on_closed()
            return
        if self._early_bytes:  # typed before open(), when the terminal still turned Enter into a line feed
            early, self._early_bytes = self._early_bytes, max(0, self._early_bytes - len(data))
            data = data[:early].replace(b"\n", b"\r") + data[early:]
        if self._escape is not None:
            self._escape.cancel()
            self._escape = None
        self._pass_on(self._parser.parse(data))
        if self._parser.is_unfinished:
            self._escape = asyncio.get_running_loop().call_later(ESCAPE_SECONDS, self._end_escape)

    def _end_escape(self) -> None:
        self._escape = None
        self._pass_on(self._parser.flush())

    def _pass_on(self, keys: list[Key | Paste]) -> None:
        for key in keys:
            self._on_key(key)


def _count_waiting(fd: int) -> int:
    """Return the number of bytes that can be read from `fd`."""
    waiting = array("i", [0])
    try:
        ioctl(fd, termios.FIONREAD, waiting)
    except OSError:
        return 0
    return waiting[0]


def _is_foreground(fd: int) -> bool:
    """Return True if this process may read the terminal and set its modes."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # not our controlling terminal, so job control does not stop us
        return os.isatty(fd)
