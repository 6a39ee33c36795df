"""The printer of blocks. It writes each block in one write, so blocks of parallel runs never mix.

It prints events and the surface's own lines, and knows no supervisor. The stream belongs to the surface.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, Literal

import msgspec

from retinue.core.approvals import Approval
from retinue.core.errors import OutputFailed
from retinue.core.events import Delta, Event, Inbox, TurnStarted
from retinue.core.rules import explain_missing_rule
from retinue.files.content import write_all
from retinue.log.blocks import Block, Blocks, Span, describe_asker, format_question_body, make_question_spans
from retinue.surfaces.printer import colors, safe

Level = Literal["quiet", "normal", "verbose"]
SHOWN_LINES = 40
SHOWN_CHARACTERS = 4096
ASKED_LINES = 400
QUOTED = "│ "
WHOLE_QUESTION = "v or `retinue approvals N` shows all"
ASKED_CHARACTERS = 64 * 1024
COLUMNS = 80
AHEAD = 64
SPOKEN_CHARACTERS = 1000
_QUIET_KINDS = frozenset({"approval.asked", "approval.decided", "run.ended", "warning", "gap"})


class Printer:
    """A printer of events, questions and notes."""

    def __init__(self, stream: colors.Stream, *, level: Level = "normal", color: bool | None = None) -> None:
        self.level: Level = level
        self.color = colors.wants_color(stream) if color is None else color
        self._wraps = colors.is_terminal(stream)
        self.shows_deltas = self.color and self._wraps and level != "quiet"
        self._on_asked: Callable[[str], None] | None = None
        self._output = _Output(stream)
        self._blocks = Blocks()
        self._prompt = ""
        self._spoken: dict[int, Delta] = {}  # by run: the end of the text it is producing
        self._has_status = False  # the last line shows a status
        self._is_loose = False  # no blank line follows the last printed text
        self.last_tree = ""  # the tree of the last printed block or question

    def report_questions(self, on_asked: Callable[[str], None]) -> None:
        """Call `on_asked` with the id of each question at the question's place among the blocks, instead of printing
        it. For an approver that shows questions itself."""
        self._on_asked = on_asked

    def check_output(self) -> None:
        """Raise BrokenPipeError if the reader is gone, or OutputFailed if the output cannot be written."""
        if self._output.failure is not None:
            raise OutputFailed(self._output.failure)
        if self._output.is_closed:
            raise BrokenPipeError

    def show_event(self, event: Event, *, below: str = "") -> bool:
        """Print an event, below the note `below` if given. Return False if the event prints nothing."""
        block = self.recall_event(event)
        if block is None:
            return False
        if block.kind == "approval.asked" and self._on_asked is not None:
            self._on_asked(getattr(event.body, "approval_id", ""))
            return False
        brief = self.level == "quiet" and block.kind not in _QUIET_KINDS
        if (brief and not block.brief) or (block.is_detail and self.level == "quiet"):
            return False
        if below:
            self.show_note(below)
        self.last_tree = event.tree
        if brief or block.line:
            spans = block.brief if brief else block.spans
            self._put(colors.paint_header(spans, color=self.color, bold=False), loose=True)
        else:
            self._put_block(block.spans, self._format_body(block))
        return True

    def recall_event(self, event: Event) -> Block | None:
        """Record an event without printing it, and return its block."""
        spoken, body = self._spoken.get(event.run), event.body
        is_first = isinstance(body, TurnStarted) and spoken is not None and spoken.turn == body.turn
        if spoken is not None and not is_first and not isinstance(body, Inbox):
            del self._spoken[event.run]
            self.clear_status()  # the event holds the complete text
        return self._blocks.apply(event)

    def show_delta(self, delta: Delta) -> None:
        """Show the end of a run's current text or thinking on the last line, until an event brings the complete
        text."""
        before = self._spoken.get(delta.run)
        spoken = ("" if before is None or before.kind != delta.kind else before.text) + delta.text
        spoken = spoken[-SPOKEN_CHARACTERS:]
        self._spoken[delta.run] = msgspec.structs.replace(delta, text=spoken)
        head, text = safe.escape_line(f"{delta.agent}: "), safe.escape_line(" ".join(spoken.split()))
        width = self._output.columns - 1
        text = safe.cut_to_width(text, max(2, width - safe.measure_width(head)), keeps_end=True)
        self.show_status(safe.cut_to_width(head + text, width))

    def show_question(self, question: Approval, *, whole: bool = False, asker: bool = False) -> None:
        """Print a question as a block: the call, its run and its preview. With `whole`, do not truncate the preview.
        With `asker`, name the agent, the question and the run too, because no block before it does."""
        self.last_tree = question.tree
        spans = make_question_spans(question.label, question.tool, question.args)
        if asker:
            spans = (*spans, ("faint", f"  {describe_asker(question, names_run=True)}"))
        self._put_block(spans, self._format_preview(format_question_body(question), whole=whole))

    def show_note(self, text: str, *, tree: str = "") -> None:
        """Print a note of the surface itself on separate lines. `tree` is the tree that the note introduces, if any."""
        self.last_tree = tree or self.last_tree
        self._put(colors.paint_faint(safe.escape_text(text), color=self.color), loose=True)

    def show_text(self, text: str) -> None:
        """Print text that the surface has escaped and laid out, with a blank line around it."""
        self._put(text.rstrip("\n"), loose=False)

    def note_foreign_output(self) -> None:
        """Put a blank line before the next block, because the surface has written to the terminal directly."""
        self._is_loose = True

    def show_prompt(self, text: str) -> None:
        """Print a prompt and leave the cursor after it. The printer prints it again below any later output."""
        self.clear_status()
        self._prompt = text
        self._output.write(text)

    def end_prompt(self, *, answered: bool) -> None:
        """Forget the prompt. If it was not answered, end its line first."""
        if self._prompt and not answered:
            self._output.write("\n")
        self._prompt = ""

    def show_status(self, text: str) -> None:
        """Show `text` on the last line until something else is printed. Does nothing while a prompt is shown."""
        if not self._prompt:
            self._output.write(colors.CLEAR_LINE + colors.paint_faint(safe.escape_line(text), color=self.color))
            self._has_status = True

    def clear_status(self) -> None:
        """Remove the status from the last line."""
        if self._has_status:
            self._has_status = False
            self._output.write(colors.CLEAR_LINE)

    def hold_output(self) -> AbstractContextManager[None]:
        """Return a context manager that holds output back while another program has the terminal."""
        return self._output.hold()

    def _put_block(self, spans: Iterable[Span], body: str) -> None:
        header = colors.paint_header(spans, color=self.color)
        self._put(f"{header}\n{body}" if body else header, loose=False)

    def _put(self, text: str, *, loose: bool) -> None:
        before = "\n" if self._is_loose and not loose else ""
        self._is_loose = loose
        piece = before + text + ("\n" if loose else "\n\n")
        self.clear_status()
        if self._prompt:
            piece = (colors.CLEAR_LINE if self.color else "\n") + piece + self._prompt
        self._output.write(piece)

    def _format_body(self, block: Block) -> str:
        if block.kind == "approval.asked":
            return self._format_preview(block.body)
        shown = block.body.rstrip("\n")
        if self.level == "normal":
            shown = truncate_lines(shown, lines=SHOWN_LINES, size=SHOWN_CHARACTERS)
        shown = safe.escape_text(shown)
        if block.kind == "tool.call" and self.color:
            name, _, rest = shown.partition("\n")
            return f"{colors.paint_header((('tool', name),), color=True)}\n{rest}"
        return colors.paint_faint(shown, color=self.color) if block.kind == "thinking" else shown

    def _format_preview(self, preview: str, *, whole: bool = False) -> str:
        """Return the preview of a question. It is complete at every level unless too long to read; then a mark says
        so.

        Each line starts with a mark of ours, so that no command or file can imitate a question."""
        shown = preview.rstrip("\n")
        if not shown:
            return ""
        if self.level != "verbose" and not whole:
            shown = truncate_lines(shown, lines=ASKED_LINES, size=ASKED_CHARACTERS, how=WHOLE_QUESTION)
        width = self._output.columns - len(QUOTED) if self._wraps else 0
        pieces = [piece for line in safe.escape_text(shown).split("\n") for piece in safe.wrap_line(line, width)]
        return "\n".join(f"{QUOTED}{colors.paint_diff(piece, color=self.color)}" for piece in pieces)


class PrintThread:
    """A thread that prints, in order, to a stream that may block. At most `AHEAD` work items are queued. Without
    `in_thread`, work is done immediately, as a screen with questions needs."""

    def __init__(self, *, in_thread: bool = True) -> None:
        self._thread = ThreadPoolExecutor(1, "retinue-printer") if in_thread else None
        self._last: Future[Any] | None = None
        self._enqueued = 0
        self._closed = False

    def submit(self, work: Callable[..., object], *args: object) -> None:
        """Queue `work` without waiting. Does nothing once the thread is closed."""
        if self._thread is None:
            work(*args)
        elif not self._closed:
            self._last = self._thread.submit(work, *args)

    async def enqueue(self, work: Callable[..., object], *args: object) -> None:
        """Queue `work`. Every `AHEAD` items, wait until the queue is empty, so that the thread never falls far
        behind."""
        self.submit(work, *args)
        self._enqueued += 1
        if self._enqueued % AHEAD == 0:
            await self.drain()

    async def drain(self) -> None:
        """Wait until all queued work is done."""
        if self._last is not None:
            await asyncio.shield(asyncio.wrap_future(self._last))

    def close(self) -> None:
        """Accept no more work. Does not wait: a write that is still blocked ends with the process."""
        self._closed = True
        if self._thread is not None:
            self._thread.shutdown(wait=False)


def format_question(asked: Approval) -> str:
    """Return a question as one escaped line: `[label] edit(src/lib.rs)`."""
    spans = make_question_spans(asked.label, asked.tool, asked.args)[1:]
    return safe.escape_line("".join(text for _, text in spans))


def describe_rule(question: Approval) -> str:
    """Return the rule that would always allow a call in this project, or the reason why there is none, as text."""
    if question.rule:
        rules = ", ".join(question.rule.splitlines())
        return f"writes to retinue.yaml, to allow it from now on: {rules}"
    why = explain_missing_rule(question.tool, question.args)
    return f"no rule would allow only this call, because {why}: answer y, u or t"


def truncate_lines(text: str, *, lines: int, size: int, how: str = "--verbose shows all") -> str:
    """Return the beginning of a long text and a mark with the missing amount and `how` to see the rest."""
    parts = text[: size + 1].split("\n", lines)
    kept = "\n".join(parts[:lines])[:size]
    if len(kept) == len(text):
        return text
    rest = text[len(kept) :]
    more = rest.count("\n")
    missing = f"{more} more line{'' if more == 1 else 's'}, " if more else ""
    return f"{kept}\n[... {missing}{len(rest.encode('utf-8', 'surrogatepass'))} bytes; {how}]"


class _Output:
    """The stream of a printer. Each `write` is a single system write where the system accepts it whole.

    After the reader is gone, writes do nothing. After another error they do nothing either, and `failure` holds the
    reason."""

    def __init__(self, stream: colors.Stream) -> None:
        self._stream = stream
        self._fd: int | None = None  # None if the stream is not a file
        with suppress(AttributeError, OSError, ValueError):
            self._fd = int(stream.fileno())  # type: ignore[attr-defined]
        self._encoding = getattr(stream, "encoding", None) or "utf-8"
        self.is_closed = False
        self.failure: OSError | None = None
        self._held: list[str] | None = None

    @property
    def columns(self) -> int:
        """Return the width of the terminal, or a usual width if there is no terminal."""
        try:
            return os.get_terminal_size(-1 if self._fd is None else self._fd).columns or COLUMNS
        except OSError:
            return COLUMNS

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Hold output back until the end of the block, because another program has the terminal."""
        held = self._held = []
        try:
            yield
        finally:
            self._held = None
            self.write("".join(held))

    def write(self, text: str) -> None:
        if self.is_closed or not text:
            return
        if self._held is not None:
            self._held.append(text)
            return
        try:
            self._stream.flush()
            if self._fd is None:
                self._stream.write(text)
                self._stream.flush()
            else:
                write_all(self._fd, text.encode(self._encoding, "backslashreplace"))
        except (BrokenPipeError, ValueError):  # the reader is gone, or the stream was closed
            self.is_closed = True
        except OSError as error:
            self.is_closed = True
            self.failure = error
