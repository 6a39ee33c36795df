"""The live view of a tree: lasting entries, and below them the current work, the pinned questions and the status bar.

It joins the views of the log (`Activity`, `Entries`) with a `Screen`. Apart from the user's input, its state comes
from the log alone. It answers and cancels through callbacks, so it works on any `Control`; without callbacks it is
read only. `retinue run`, `retinue tail -f` and the conversation show the same view.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import msgspec

from retinue.core.approvals import Approval, Decision
from retinue.core.events import AnswerGiven, Delta, Event, RoundAnswered, RunEnded, RunSpawned, RunStarted
from retinue.core.messages import NOTICE
from retinue.log.activity import Activity, Entries, Entry, Work
from retinue.log.blocks import Role, Span, make_call_spans
from retinue.log.receipts import MessageReceipt, Receipts
from retinue.log.summaries import shorten_text
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.header import Header, read_header
from retinue.surfaces.printer.input_line import InputLine, Position
from retinue.surfaces.printer.keys import ENTER, Key, Paste
from retinue.surfaces.printer.markdown import render_markdown
from retinue.surfaces.printer.printer import Level, truncate_lines
from retinue.surfaces.printer.question_panel import QuestionPanel
from retinue.surfaces.printer.screen import BottomArea, Line, Screen, wrap_spans
from retinue.surfaces.printer.totals import format_elapsed, format_status

SPINNER = "◐◓◑◒"
SPINNER_SECONDS = 0.25
MOST_WORK = 8
SPOKEN_LINES = 6
OUTPUT_LINES = 3
HOLD_SECONDS = 0.2  # longest pause between two keys of a typed word
CUT_LINES = {"markdown": 12, "diff": 40, "output": 8, "faint": 3}
CUT_CHARACTERS = 2000
DEEP_CHARACTERS = 90  # of an answer, if the run's parent is not the primary
SAID_LINES = 60  # of the primary's messages
SAID_CHARACTERS = 16_000
RENDERED_AT_ONCE = 50
CHILD_OUTPUT_LINES = 4
_SEEN_LIVE = frozenset({"thinking", "run.spawned", NOTICE})
WHOLE = "`retinue show {tree}/{run}` shows all"
INDENT = "  "
WORDS = ("message", "turn.started", "run.waiting", "run.ended", "thinking", "inbox", NOTICE)
CANCEL_KEYS = 9
_VERBS = {"model": "waits for the model", "thinking": "thinks", "text": "writes"}
RECEIPT_CHARACTERS = 60


class LiveView:
    """The view of one tree.

    Events with a sequence number up to `after` update the view but print no lines. `answer` and `cancel` send the
    user's decisions; without `answer` the view is read only. With `submit`, an input line appears above the status
    bar, and `submit` gets every text entered there."""

    def __init__(
        self, screen: Screen, tree: str = "", *, level: Level = "normal", after: int = 0,
        answer: Callable[[Approval, Decision], object] | None = None,
        cancel: Callable[[int], object] = lambda run: None,
        submit: Callable[[str], object] | None = None,
    ) -> None:  # fmt: skip
        self.activity = Activity(tree)
        self.input = InputLine()
        self._header: Header | None = None  # until the run has started
        self._printed_header: Header | None = None
        self._has_opened = False  # the first message of a conversation is printed
        self._is_starting = True
        self._hint = ""  # text of the surface above the status bar
        self._screen = screen
        self._level = level
        self._after = after
        self._cancel = cancel
        self._submit = submit
        self._entries = Entries()
        self._receipts = Receipts()
        self.panel = QuestionPanel(screen, answer)
        self._cancel_choices: list[tuple[int, str]] | None = None
        self._held_key: Key | None = None
        self._on_interrupt_closed: Callable[[], object] = lambda: None
        self._began = time.time()
        self._has_space = True  # the last lasting line is blank, or there is none
        self._rendered = 0
        screen.draw_bottom(
            self._compose, lambda mark: self.panel.arm_later(mark, is_typing=lambda: bool(self.input.text))
        )
        screen.terminal.report_keys(self.press_key)

    # Events and notes

    def apply(self, item: Event | Delta) -> None:
        """Show an event or a delta."""
        self.activity.apply(item)
        if isinstance(item, Event):
            if isinstance(item.body, RunSpawned | RunStarted | RunEnded) and item.run == 0:
                self._print_opening(item)
            entry = self._entries.apply(item)
            if entry is not None and item.seq > self._after:
                self._print_entry(entry)
            for receipt in self._receipts.apply(item):
                if item.seq > self._after:
                    self._print_receipt(receipt)
            before = self.panel.current
            self.panel.show_questions(self.activity.questions)
            if self.panel.current is not None and self.panel.current is not before:
                self._screen.request_redraw(at_once=True)
        self._screen.request_redraw()

    def show_tree(self, tree: str) -> None:
        """Show `tree` from its first event on."""
        self.activity, self._entries, self._receipts = Activity(tree), Entries(), Receipts()
        self._screen.request_redraw()

    def show_header(self, header: Header) -> None:
        """Show `header` until the run has started."""
        self._header = header

    def show_starting(self, *, is_starting: bool) -> None:
        """Show that a run is being started, until it has started. A new view shows it."""
        self._is_starting = is_starting

    def show_hint(self, text: str) -> None:
        """Show a text of the surface above the status bar, or none if `text` is empty."""
        self._hint = text
        self._screen.request_redraw()

    def show_note(self, text: str) -> None:
        """Print a note of the surface itself, wrapped between words."""
        columns, _ = self._screen.terminal.size
        lines = [
            piece
            for line in safe.escape_text(text).split("\n")
            for piece in safe.wrap_line(line, columns, at_words=True)
        ]
        self._print(colors.paint_faint("\n".join(lines), color=self._screen.color), spaced=False)

    def show_text(self, text: str) -> None:
        """Print text that the surface has escaped and laid out, with a blank line around it."""
        self._print(text.rstrip("\n"), spaced=True)

    def show_markdown(self, text: str) -> None:
        """Print Markdown from a model, with a blank line around it."""
        self._print(self._render(text), spaced=True)

    def ask_cancel(self, on_closed: Callable[[], object] = lambda: None) -> None:
        """Ask the user which run to cancel. `on_closed` is called when the user has chosen or dismissed the
        question."""
        live = [run for run in self.activity.runs.runs.values() if run.ended is None and run.number]
        self._cancel_choices = [(run.number, run.label) for run in live[:CANCEL_KEYS]]
        self._on_interrupt_closed = on_closed
        self._screen.request_redraw()

    def end_cancel(self) -> None:
        """Remove the question which run to cancel."""
        self._cancel_choices = None
        self._screen.request_redraw()

    # Keys

    @property
    def takes_escape(self) -> bool:
        """Return True while Escape closes a part of the view."""
        return self._cancel_choices is not None or self.panel.takes_escape

    def press_key(self, key: Key | Paste) -> None:
        """Pass a key to the active part: the cancel question, the question panel or the input line."""
        if self._cancel_choices is not None:
            self._press_cancel(key)
        elif self.panel.current is not None and self.panel.is_armed and not self.input.text:
            if self._submit is not None and not self.panel.takes_text:
                self._press_beside_input(key)
            else:
                self.panel.press_key(key)
        else:
            self._write_input(key)
        self._screen.request_redraw()

    def _write_input(self, key: Key | Paste) -> None:
        if self._submit is None:
            return
        text = self.input.press_key(key)
        if text is not None and text.strip():
            self._submit(text)

    def _press_beside_input(self, key: Key | Paste) -> None:
        """Handle a key that either answers the question or starts a message or a command. A letter answers only if no
        other character follows within `HOLD_SECONDS`, because a message may start with `y`."""
        held, self._held_key = self._held_key, None
        if isinstance(key, Paste) or key.name == "/" or (held is not None and key.text):
            if held is not None:
                self._write_input(held)
            self._write_input(key)
        elif key.text.strip():  # a space turns a page and never starts a message
            self._held_key = key
            self._screen.call_later(HOLD_SECONDS, lambda: self._press_held(key))
        else:
            if held is not None:
                self.panel.press_key(held)
            if held is None or key.name != ENTER:
                self.panel.press_key(key)

    def _press_held(self, key: Key) -> None:
        """Pass a held key to the panel if no other key followed. A question that arrived meanwhile is not armed and
        ignores it."""
        if self._held_key is key:
            self._held_key = None
            self.panel.press_key(key)
            self._screen.request_redraw()

    def _press_cancel(self, key: Key | Paste) -> None:
        chosen: int | None = None
        choices = self._cancel_choices or []
        if isinstance(key, Key) and key.name == "a":
            chosen = 0
        elif isinstance(key, Key) and key.name.isascii() and key.name.isdigit() and 0 < int(key.name) <= len(choices):
            chosen = choices[int(key.name) - 1][0]
        elif not (isinstance(key, Key) and key.name in ("escape", "n", "enter", "q")):
            return
        self.end_cancel()
        self._on_interrupt_closed()
        if chosen is not None:
            self._cancel(chosen)

    def reopen_question(self, question: Approval) -> None:
        """Show a question again after its answer could not be sent."""
        self.panel.reopen_question(question.id)
        self.panel.show_questions(self.activity.questions)

    # Lasting lines

    def _print_opening(self, event: Event) -> None:
        """Print the header once it is complete, and again if the run started in a different runtime than requested.
        Below the header, print the first message of a conversation, which no other event has."""
        run = self.activity.runs.runs.get(0)
        if run is None:
            return
        header = read_header(run, event.tree, runtime=None if self._header is None else self._header.runtime)
        if header is not None and header != self._printed_header:
            self._header, self._printed_header = None, header
            if event.seq > self._after:
                for line in header.layout_lines(self._screen.terminal.size[0]):
                    self._print_spans(line)
        if run.spawned.conversation and not self._has_opened and (header is not None or run.ended is not None):
            self._has_opened = True
            if not self._after:
                self.show_note(f"› {run.spawned.task}")

    def _print_entry(self, entry: Entry) -> None:
        if self._level == "quiet":
            if entry.is_brief:
                self._print_spans(entry.spans)
            return
        if (entry.is_detail or entry.kind in _SEEN_LIVE) and self._level != "verbose":
            return  # the user saw it live, or another entry covers it
        body = self._format_body(entry)
        header = self._paint_lines(entry.spans)
        words = entry.kind in WORDS and entry.style != "diff"
        is_line = entry.kind == "run.ended" and bool(entry.spans)  # the spans hold more than the speaker
        if words and not is_line:
            indented = INDENT if entry.run else ""
            text = f"{header}{_indent(body, indented).lstrip(' ')}" if header else body
            self._print(text, spaced=not entry.run and entry.kind != "thinking")
            return
        if body:
            header = f"{header}\n{_indent(body, INDENT)}"
        self._print(header, spaced=False)

    def _print_receipt(self, receipt: MessageReceipt) -> None:
        """Print the state of a message sent to a running run. A queued message is already visible, so its text is left
        out."""
        words = " ".join(receipt.text.split())
        about = f" · {shorten_text(words, RECEIPT_CHARACTERS, RECEIPT_CHARACTERS - 3)}"
        role: Role = "bad" if receipt.state == "too_late" else "faint"
        if receipt.state == "queued":
            self._print_spans(((role, INDENT + receipt.describe()),))
        else:
            self._print_spans((("mark", "› "), (role, receipt.describe() + about)))

    def _format_body(self, entry: Entry) -> str:
        text = entry.body.strip("\n")
        if not text or (entry.kind in (AnswerGiven.kind, RoundAnswered.kind) and self._level != "verbose"):
            return ""
        if self._level != "verbose":
            run = self.activity.runs.runs.get(entry.run)
            if entry.kind == "run.ended" and run is not None and run.spawned.depth > 1:
                one_line = " ".join(text.split())  # the parent reports it in more detail
                text = shorten_text(one_line, DEEP_CHARACTERS, DEEP_CHARACTERS - 3)
            lines = SAID_LINES if entry.run == 0 and entry.style == "markdown" else CUT_LINES[entry.style]
            if entry.style == "output" and entry.run:
                lines = CHILD_OUTPUT_LINES
            how = WHOLE.format(tree=self.activity.runs.tree, run=entry.run)
            if entry.style == "output":
                text = _keep_end(text, lines)
            elif entry.style == "diff":
                text = _trim_diff(text)
            size = SAID_CHARACTERS if lines == SAID_LINES else CUT_CHARACTERS
            text = truncate_lines(text, lines=lines, size=size, how=how)
        color = self._screen.color
        match entry.style:
            case "markdown":
                return self._render(text, narrower=len(INDENT) if entry.run else 0)
            case "diff":
                return colors.paint_diff(safe.escape_text(text).expandtabs(), color=color)
            case _:
                return colors.paint_faint(safe.escape_text(text).expandtabs(), color=color)

    def _render(self, text: str, *, narrower: int = 0) -> str:
        """Render Markdown. If many texts arrive within one frame, return the rest as escaped text: nobody can read so
        fast."""
        self._rendered += 1
        if self._rendered > RENDERED_AT_ONCE:
            return safe.escape_text(text)
        return render_markdown(text, width=self._screen.terminal.size[0] - narrower, color=self._screen.color)

    def _print_spans(self, spans: Sequence[Span]) -> None:
        self._print(self._paint_lines(spans), spaced=False)

    def _paint_lines(self, spans: Sequence[Span]) -> str:
        """Return the spans of a line, coloured and wrapped between words to the width of the terminal."""
        lines = wrap_spans(spans, self._screen.terminal.size[0])
        return "\n".join(colors.paint_header(line, color=self._screen.color, bold=False) for line in lines)

    def _print(self, text: str, *, spaced: bool) -> None:
        if spaced and not self._has_space:
            text = f"\n{text}"
        self._has_space = spaced
        self._screen.print_text(f"{text}\n" if spaced else text)

    # The bottom

    def _compose(self, columns: int, rows: int) -> BottomArea:
        now = time.time()
        self._rendered = 0
        status = self._layout_status(columns, now)
        typed, cursor = self._layout_input(columns, max(1, rows // 3))
        left = max(3, rows - len(status) - len(typed) - 2)
        if self._cancel_choices is None:
            question, at = self.panel.layout_lines(columns, left)
        else:
            question, at = _layout_cancel((label for _, label in self._cancel_choices), left), None
        room = rows - 2 - len(status) - len(typed) - len(question)
        header = self._layout_header(columns)[: max(0, room - 1)]
        work = [*header, *self._layout_work(columns, min(room - len(header), rows // 2 if question else rows), now)]
        lines: list[Line] = [*work, *question, *typed, *status]
        place: Position | None = None
        if at is not None:
            place = len(work) + at[0], at[1]
        elif cursor is not None:
            place = len(work) + len(question) + cursor[0], cursor[1]
        if len(lines) < rows - 1 and not self._has_space:
            lines = [(), *lines]
            place = None if place is None else (place[0] + 1, place[1])
        current = self.panel.current
        mark = None if current is None or self._cancel_choices is not None else current.id
        return BottomArea(lines=lines, cursor=place, mark=mark, animated=True)

    def _layout_input(self, columns: int, limit: int) -> tuple[list[Line], Position | None]:
        if self._submit is None:
            return [], None
        rows, cursor = self.input.layout_lines(columns, limit=limit)
        is_in_front = self.panel.current is None or bool(self.input.text)
        return [(("plain", row),) for row in rows], cursor if is_in_front else None

    def _layout_header(self, columns: int) -> Sequence[Line]:
        """Return the header of a run that has not started yet. Afterwards it is among the lasting lines."""
        if self._header is None:
            return []
        return msgspec.structs.replace(self._header, tree=self.activity.runs.tree).layout_lines(columns)

    def _layout_work(self, columns: int, room: int, now: float) -> list[Line]:
        if room <= 0:
            return []
        frame = SPINNER[int(now / SPINNER_SECONDS) % len(SPINNER)]
        works = self.activity.list_work()
        if not self.activity.runs.runs and not self._is_starting:
            return []
        if not self.activity.runs.runs:
            return [(("mark", f"{frame} "), ("faint", f"starting {format_elapsed(now - self._began)}"))]
        shown = works[: min(MOST_WORK, room - (len(works) > min(MOST_WORK, room)))]
        spare = room - len(shown) - 1
        lines: list[Line] = []
        for work in shown:
            below = _layout_text(work, columns, max(0, min(spare, SPOKEN_LINES if work.run == 0 else OUTPUT_LINES)))
            spare -= len(below)
            lines.extend((_layout_head(work, frame, now, columns), *below))
        if len(works) > len(shown):
            lines.append((("faint", f"  … and {len(works) - len(shown)} more at work"),))
        return lines

    def _layout_status(self, columns: int, now: float) -> list[Line]:
        lines: list[Line] = (
            [(("faint", piece),) for piece in safe.wrap_line(self._hint, columns, at_words=True)] if self._hint else []
        )
        status = format_status(self.activity.measure_totals(now), width=columns)
        return [*lines, (("faint", status),)] if self.activity.runs.runs else lines


def _layout_cancel(labels: Iterable[str], rows: int) -> list[Line]:
    """Return the question which run to cancel, with a number for each run."""
    choices: list[Line] = [
        (("mark", f"  [{place}] "), ("label", f"[{label}]")) for place, label in enumerate(labels, 1)
    ]
    return [
        (("bad", "Cancel what? "), ("mark", "[a]ll"), ("plain", ", Esc cancels nothing; Ctrl-C again cancels all")),
        *choices[: max(0, rows - 1)],
    ]


def _layout_head(work: Work, frame: str, now: float, columns: int) -> Line:
    """Return the first line of a work item. A long call is cut, so that the elapsed time stays visible."""
    who: tuple[Span, ...] = () if work.label is None else (("label", f"[{work.label}] "),)
    took: Span = ("faint", f" {format_elapsed(now - work.since)}")
    what: tuple[Span, ...]
    if work.kind == "team":
        what = (("plain", work.text),)
    elif work.call is None:
        what = (("plain", f"{work.agent} {_VERBS[work.kind]}"),)
    else:
        what = make_call_spans(work.call.name, work.call.args)
    mark = f"{INDENT if work.is_member else ''}{frame} "
    head = colors.cut_line((("mark", mark), *who, *what), max(20, columns - len(took[1])))
    return (*head, took)


def _layout_text(work: Work, columns: int, lines: int) -> list[Line]:
    """Return the end of a work item's text or output. A mark on each line shows that the text is foreign."""
    if not lines or not work.text.strip() or work.kind == "team":
        return []
    if work.run and work.call is None:
        lines = 1  # only the last line of a subagent's text
    text = safe.escape_text(work.text).replace("\r", "\n")
    pieces: list[str] = []
    for line in reversed(text.rstrip().split("\n")[-lines:]):
        pieces = [*safe.wrap_line(line, columns - len(INDENT) - 2, at_words=work.call is None), *pieces]
        if len(pieces) >= lines:
            break
    return [(("faint", f"{INDENT}│ {piece}"),) for piece in pieces[-lines:]]


def _indent(text: str, indent: str) -> str:
    return "\n".join(f"{indent}{line}" if line else line for line in text.split("\n"))


def _trim_diff(text: str) -> str:
    """Return the changed lines of a diff, each with the line before it. The question, if there was one, showed the
    whole diff."""
    lines = text.split("\n")
    changed = {place for place, line in enumerate(lines) if line[:1] in ("-", "+")}
    shown = {place + step for place in changed for step in (-1, 0)}
    return "\n".join(line for place, line in enumerate(lines) if place in shown and not line.startswith(("@@", "[")))


def _keep_end(text: str, lines: int) -> str:
    """Return the last lines of an output, with a mark that counts the earlier lines. A command line at the start
    stays."""
    first, _, rest = text.partition("\n")
    command = f"{first}\n" if first.startswith("$ ") else ""
    every = (rest if command else text).split("\n")
    if len(every) <= lines - bool(command):
        return text
    kept = "\n".join(every[-(lines - 1 - bool(command)) :]).lstrip("\n").split("\n")
    return f"{command}[... {len(every) - len(kept)} earlier lines]\n" + "\n".join(kept)
