"""Prints blocks as they happen. One block is one write, so blocks of parallel runs never mix.

Gets events, or lines of its owner; knows no supervisor. Made by a surface with a stream, which stays the surface's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from retinue.core.approvals import Approval
from retinue.core.events import Event
from retinue.log.blocks import Block, Blocks
from retinue.log.styled_text import question_body, question_spans
from retinue.surfaces.printer import colors as paint
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.output import Output

Level = Literal["quiet", "normal", "verbose"]
SHOWN_LINES = 40
SHOWN_CHARACTERS = 4096
ASKED_LINES = 400
ASKED_CHARACTERS = 64 * 1024
_QUIET_KINDS = frozenset({"approval.asked", "approval.decided", "run.ended", "warning", "gap"})


class Printer:
    """`on_asked` is set by one who shows questions itself: it is told of each in its place among the blocks."""

    def __init__(self, stream: paint.Stream, *, level: Level = "normal", color: bool | None = None) -> None:
        self.level: Level = level
        self.color = paint.wants_color(stream) if color is None else color
        self.terminal = self.color and paint.is_terminal(stream)
        self.on_asked: Callable[[str], None] | None = None
        self._output = Output(stream)
        self._blocks = Blocks()
        self._prompt = ""
        self._said = False  # what is being said stands on the last line
        self._loose = False  # the last thing printed was a line without space after it

    @property
    def gone(self) -> bool:
        """Whether nobody reads any more, so that printing on is pointless."""
        return self._output.gone

    @property
    def columns(self) -> int:
        return self._output.columns

    def show(self, event: Event, *, below: str = "") -> bool:
        """Prints what there is to see of an event, below such a note; False when there is nothing."""
        block = self._blocks.apply(event)
        if block is None:
            return False
        if block.kind == "approval.asked" and self.on_asked is not None:
            self.on_asked(getattr(event.body, "approval_id", ""))
            return False
        brief = self.level == "quiet" and block.kind not in _QUIET_KINDS
        if brief and not block.brief:
            return False
        if below:
            self.note(below)
        if brief:
            self._put(paint.header(block.brief, color=self.color, bold=False), loose=True)
        elif block.line:
            self._put(paint.header(block.spans, color=self.color, bold=False), loose=True)
        else:
            self._put(_joined(paint.header(block.spans, color=self.color), self._body(block)), loose=False)
        return True

    def recall(self, event: Event) -> None:
        """Knows of an event that was shown before, without a word."""
        self._blocks.apply(event)

    def question(self, question: Approval) -> None:
        """A question as its own block: what, by whom, and what it would change."""
        header = paint.header(question_spans(question.label, question.tool, question.args), color=self.color)
        self._put(_joined(header, self._asked(question_body(question))), loose=False)

    def note(self, text: str) -> None:
        """Words of the surface itself, on a line (or some) of their own."""
        self._put(paint.faint(safe.text(text), color=self.color), loose=True)

    def plain(self, text: str) -> None:
        """Text the surface has made safe and laid out, with space around it."""
        self._put(text.rstrip("\n"), loose=False)

    def space(self) -> None:
        """A blank line, unless there is one: somebody else is about to write to the terminal."""
        self.hush()
        if self._loose:
            self._output.write("\n")
        self._loose = False

    def apart(self) -> None:
        """Somebody else has written to the terminal: what comes next gets space before it."""
        self._loose = True

    def prompt(self, text: str) -> None:
        """Leaves the cursor behind these words; they come again below whatever is printed meanwhile."""
        self.hush()
        self._prompt = text
        self._output.write(text)

    def end_prompt(self, *, answered: bool) -> None:
        """The prompt is over. Without an answer the cursor still stands behind it."""
        if self._prompt and not answered:
            self._output.write("\n")
        self._prompt = ""

    def say(self, text: str) -> None:
        """Words for the last line of a terminal, instead of those before; whatever is printed takes their place.
        While somebody is asked, the line is theirs."""
        if not self._prompt:
            self._output.write(paint.CLEAR_LINE + paint.faint(safe.line(text), color=self.color))
            self._said = True

    def hush(self) -> None:
        """Takes the words of `say` away."""
        if self._said:
            self._said = False
            self._output.write(paint.CLEAR_LINE)

    @contextmanager
    def held(self) -> Iterator[None]:
        """The terminal is somebody else's; what happens meanwhile is printed afterwards."""
        self._output.hold()
        try:
            yield
        finally:
            self._output.release()

    def _put(self, text: str, *, loose: bool) -> None:
        before = "\n" if self._loose and not loose else ""
        self._loose = loose
        piece = before + text + ("\n" if loose else "\n\n")
        self.hush()
        if self._prompt:
            piece = (paint.CLEAR_LINE if self.color else "\n") + piece + self._prompt
        self._output.write(piece)

    def _body(self, block: Block) -> str:
        if block.kind == "approval.asked":
            return self._asked(block.body)
        shown = block.body.rstrip("\n")
        if self.level == "normal":
            shown = cut(shown, lines=SHOWN_LINES, size=SHOWN_CHARACTERS)
        shown = safe.text(shown)
        if block.kind == "tool.call" and self.color:
            name, _, rest = shown.partition("\n")
            return f"{paint.header((('tool', name),), color=True)}\n{rest}"
        return paint.faint(shown, color=self.color) if block.kind == "thinking" else shown

    def _asked(self, preview: str) -> str:
        """Whole at every level, unless it is so long that nobody could read it; then that is said."""
        shown = preview.rstrip("\n")
        if self.level != "verbose":
            shown = cut(shown, lines=ASKED_LINES, size=ASKED_CHARACTERS)
        return paint.diff(safe.text(shown), color=self.color)


def cut(text: str, *, lines: int, size: int) -> str:
    """The beginning of a long text and a mark that says how much is missing."""
    parts = text[: size + 1].split("\n", lines)
    kept = "\n".join(parts[:lines])[:size]
    if len(kept) == len(text):
        return text
    rest = text[len(kept) :]
    more = rest.count("\n")
    missing = f"{more} more line{'' if more == 1 else 's'}, " if more else ""
    return f"{kept}\n[... {missing}{len(rest.encode('utf-8', 'surrogatepass'))} bytes; --verbose shows all]"


def _joined(header: str, body: str) -> str:
    return f"{header}\n{body}" if body else header
