"""A screen in two parts: lasting lines, which scroll away like the output of any command, and a bottom area below them
that is redrawn in place.

The screen collects changes and draws them about 20 times a second. A thread makes one write per frame, so neither many
changes nor a slow terminal block the event loop. The bottom is composed only when a frame is drawn. It is never wider
or higher than the terminal, and the screen escapes every text in it.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from retinue.concurrency import TaskOwner
from retinue.log.blocks import Span
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.terminal import Terminal

FRAME_SECONDS = 0.05
ANIMATION_SECONDS = 0.1
AWAY_SECONDS = 0.2
SETTLE_SECONDS = 0.1
EDITOR_SECONDS = 3.0  # for an editor that is still open when the screen closes
Line = Sequence[Span]
_HIDE, _SHOW = "\x1b[?25l", "\x1b[?25h"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
_ERASE_LINE, _ERASE_BELOW = "\r\x1b[K", "\x1b[J"
WRAPPED_INDENT = "  "
_WORDS = re.compile(r"[^ ]* +|[^ ]+")


class BottomArea(msgspec.Struct, frozen=True):
    """The lines of the bottom area, as spans of unescaped text with their roles. `cursor` is the row and column where
    the user types. The screen passes `mark` to `on_drawn` once the bottom is completely on the terminal. An `animated`
    bottom is redrawn soon even without a change."""

    lines: Sequence[Line] = ()
    cursor: tuple[int, int] | None = None
    mark: object = None
    animated: bool = False


class Screen:
    """A screen on a terminal that it owns. `tasks` holds work that the user started with a key, such as an editor; the
    work ends with the screen."""

    def __init__(self, terminal: Terminal, *, color: bool) -> None:
        self.terminal = terminal
        self.color = color
        self.tasks = TaskOwner()
        self.compose: Callable[[int, int], BottomArea] = lambda columns, rows: BottomArea()
        self._on_drawn: Callable[[object], object] = lambda mark: None
        self._lasting: list[str] = []
        self._drawn = _Drawn()
        self._shown: object = None  # the size and the bottom of the last frame
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._is_due = False
        self._is_urgent = False
        self._is_open = False
        self._thread = ThreadPoolExecutor(1, "retinue-screen")
        terminal.report_changes(on_resize=self._settle, on_away=self._erase_now, on_return=self.request_redraw)

    def draw_bottom(
        self, compose: Callable[[int, int], BottomArea], on_drawn: Callable[[object], object] = lambda mark: None
    ) -> None:
        """Draw the bottom that `compose` returns for a number of columns and rows, from the next frame on.

        Call `on_drawn` with the mark of each bottom that is on the terminal."""
        self.compose, self._on_drawn = compose, on_drawn

    def open(self) -> None:
        """Take the terminal and start drawing."""
        self.terminal.open()
        self._is_open = True
        self._draw()

    @property
    def is_stuck(self) -> bool:
        """Return True if a write has not returned. The terminal of a closed screen then takes no more text."""
        return self._writing is not None and not self._writing.done()

    async def close(self, seconds: float = 1.0) -> bool:
        """End the tasks, draw the remaining lasting text without the bottom, and give the terminal back.

        Return False if the terminal did not take the output within `seconds`. The thread that is still writing then
        ends only with the process. A second call only returns the answer."""
        await self.tasks.close(EDITOR_SECONDS)
        if not self._is_open:
            return not self.is_stuck
        self._is_open = False
        self._cancel_timer()
        try:
            await self._wait_written(seconds)
            if not self.is_stuck and not self.terminal.is_away:
                self._start_write(self._make_frame(BottomArea()), None)
                await self._wait_written(seconds)
        finally:
            self.terminal.close()
            self._thread.shutdown(wait=False)
        return not self.is_stuck

    def print_text(self, text: str) -> None:
        """Print lasting text and a newline. The caller has escaped `text`, which may contain colours."""
        self._lasting.append(text)
        self.request_redraw()

    def request_redraw(self, *, at_once: bool = False) -> None:
        """Redraw soon, because something has changed. With `at_once`, do not wait to collect other changes."""
        if self._writing is not None:
            self._is_due = True
            self._is_urgent |= at_once
            return
        if at_once:
            self._cancel_timer()
        if self._is_open and self._timer is None:
            wait = 0.0 if at_once else FRAME_SECONDS
            self._timer = asyncio.get_running_loop().call_later(wait, self._draw)

    def call_later(self, seconds: float, work: Callable[[], object]) -> None:
        """Call `work` after `seconds`, unless the screen is closed by then."""

        def call() -> None:
            if self._is_open:
                work()

        asyncio.get_running_loop().call_later(seconds, call)

    def _settle(self) -> None:
        """Draw once the size has been stable for `SETTLE_SECONDS`. While the user drags a window, the terminal reports
        each step late."""
        self._cancel_timer()
        self._shown = None
        if self._is_open:
            self._timer = asyncio.get_running_loop().call_later(SETTLE_SECONDS, self._draw)

    def _draw(self) -> None:
        self._cancel_timer()
        if self.terminal.is_away or self._writing is not None:
            self._is_due = True
            return
        size = self.terminal.size
        bottom = self.compose(*size)
        if self._shown == (size, bottom) and not self._lasting:
            self._wait_animation(bottom)
            return
        self._shown = size, bottom
        self._start_write(self._make_frame(bottom), bottom)

    def _make_frame(self, bottom: BottomArea) -> str:
        columns, rows = self.terminal.size
        lasting, self._lasting = "".join(f"{text}\n" for text in self._lasting), []
        erase = self._drawn.erase(columns)
        lines = list(bottom.lines)[-max(1, rows - 1) :]
        cut = len(bottom.lines) - len(lines)
        texts = [colors.cut_line(line, columns) for line in lines]
        painted = "\n".join(colors.paint_header(spans, color=self.color, bold=False) for spans in texts)
        widths = [sum(safe.measure_width(text) for _, text in spans) for spans in texts]
        at = None if bottom.cursor is None else (max(0, bottom.cursor[0] - cut), min(bottom.cursor[1], columns - 1))
        self._drawn = _Drawn(widths, at)
        return f"{_HIDE}{erase}{lasting}{_NO_WRAP}{painted}{_WRAP}{self._drawn.move_cursor()}"

    def _start_write(self, frame: str, bottom: BottomArea | None) -> None:
        loop = asyncio.get_running_loop()
        self._is_due = self._is_urgent = False
        writing = self._writing = loop.run_in_executor(self._thread, self.terminal.write, frame)
        writing.add_done_callback(lambda _: self._end_write(writing, bottom))

    def _end_write(self, writing: asyncio.Future[None], bottom: BottomArea | None) -> None:
        if self._writing is writing:
            self._writing = None
        if bottom is not None and bottom.mark is not None:
            self._on_drawn(bottom.mark)
        if not self._is_open:
            return
        if self._is_due or self._lasting:
            self.request_redraw(at_once=self._is_urgent)
        elif bottom is not None:
            self._wait_animation(bottom)

    def _wait_animation(self, bottom: BottomArea) -> None:
        if bottom.animated and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ANIMATION_SECONDS, self._draw)

    async def _wait_written(self, seconds: float) -> None:
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=seconds)

    def _erase_now(self) -> None:
        """Erase the bottom before another program gets the terminal. Wait at most `AWAY_SECONDS` for a write in
        progress."""
        self._cancel_timer()
        erase = self._thread.submit(self.terminal.write, self._drawn.erase(self.terminal.size[0]))
        self._drawn, self._shown = _Drawn(), None
        try:
            erase.result(AWAY_SECONDS)
        except TimeoutError:
            return

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class _Drawn:
    """The bottom as it is on the terminal: the width of each line, and the cursor position.

    Without an input position, the cursor is hidden at the start of the bottom. It stays there when a narrower terminal
    wraps the lines, even if we learn of the resize late."""

    def __init__(self, widths: Sequence[int] = (), cursor: tuple[int, int] | None = None) -> None:
        self._widths = list(widths)
        self._cursor = cursor

    def move_cursor(self) -> str:
        """Return the escape sequence that moves the cursor from the end of the last line to its position."""
        row, column = self._cursor or (0, 0)
        up = len(self._widths) - 1 - row
        move = (f"\x1b[{up}A" if up > 0 else "") + "\r" + (f"\x1b[{column}C" if column else "")
        return move if self._cursor is None else move + _SHOW

    def erase(self, columns: int) -> str:
        """Return the escape sequence that erases the bottom. The terminal may have wrapped the lines above the cursor
        since.

        The first line and the lines below are erased separately. A single sequence from the first column of the first
        row would make tmux keep the erased text in its history."""
        row, column = self._cursor or (0, 0)
        up = sum(max(1, -(-width // columns)) for width in self._widths[:row]) + column // columns
        below = f"\x1b[B{_ERASE_BELOW}\x1b[A" if len(self._widths) > 1 else ""
        return (f"\x1b[{up}A" if up else "") + _ERASE_LINE + below


def wrap_spans(spans: Iterable[Span], width: int) -> list[list[Span]]:
    """Return the spans of a line, escaped and wrapped between words to `width`. Lines after the first are indented.
    The terminal wraps words longer than a line."""
    lines: list[list[Span]] = [[]]
    used = 0
    for role, text in spans:
        for word in _WORDS.findall(safe.escape_line(text)):
            columns = safe.measure_width(word.rstrip())
            if used > len(WRAPPED_INDENT) and used + columns > width:
                before, last = lines[-1].pop()
                lines[-1].append((before, last.rstrip()))
                lines.append([("plain", WRAPPED_INDENT)])
                used = len(WRAPPED_INDENT)
            lines[-1].append((role, word))
            used += safe.measure_width(word)
    return lines
