"""An editable input line with history, several lines and pasted text. It knows keys, but not the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from retinue.surfaces.printer import safe
from retinue.surfaces.printer.keys import ENTER, NEWLINE, Key, Paste

FOLDED_LINES = 6  # of a longer text, the lines around the cursor are shown
Position = tuple[int, int]


class InputLine:
    """Text that the user edits. `history` holds earlier texts, newest last; the up and down keys browse it."""

    def __init__(self, history: Sequence[str] = ()) -> None:
        self.text = ""
        self.cursor = 0
        self._history = list(history)
        self._place = len(self._history)  # index into the history; its length means the current draft
        self._draft = ""

    def press_key(self, key: Key | Paste) -> str | None:
        """Edit the text. When Enter submits it, return the whole text and start a new one."""
        if isinstance(key, Paste):
            self._insert(key.text)
        elif key.name == ENTER:
            return self._submit()
        elif key.name == NEWLINE:
            self._insert("\n")
        elif key.text:
            self._insert(key.text)
        else:
            self._edit(key.name)
        return None

    def add_history(self, text: str) -> None:
        """Add a text to the history that was not submitted on this line."""
        self._history.append(text)
        self._place = len(self._history)

    def replace_text(self, text: str) -> None:
        """Replace the text and put the cursor at its end."""
        self.text, self.cursor = text, len(text)

    def layout_lines(self, width: int, *, prompt: str = "> ", limit: int = FOLDED_LINES) -> tuple[list[str], Position]:
        """Return at most `limit` escaped rows of the text after its prompt, and the cursor's row and column among
        them."""
        indent = safe.measure_width(prompt)
        room = max(4, width - indent - 1)
        rows, at = _wrap_rows(self.text, self.cursor, room)
        start = max(0, min(at[0] - limit // 2, len(rows) - limit))
        shown = rows[start : start + limit]
        lines = [(prompt if number == 0 else " " * indent) + row for number, row in enumerate(shown)]
        return lines, (at[0] - start, indent + at[1])

    def _insert(self, text: str) -> None:
        self.text = self.text[: self.cursor] + text + self.text[self.cursor :]
        self.cursor += len(text)

    def _submit(self) -> str:
        text = self.text
        if text.strip() and self._history[-1:] != [text]:
            self._history.append(text)
        self.replace_text("")
        self._place, self._draft = len(self._history), ""
        return text

    def _edit(self, name: str) -> None:
        before, after = self.text[: self.cursor], self.text[self.cursor :]
        match name:
            case "left" | "ctrl-b":
                self.cursor = max(0, self.cursor - 1)
            case "right" | "ctrl-f":
                self.cursor = min(len(self.text), self.cursor + 1)
            case "home" | "ctrl-a":
                self.cursor = before.rfind("\n") + 1
            case "end" | "ctrl-e":
                self.cursor += len(after.partition("\n")[0])
            case "word-left":
                self.cursor = _find_word_start(before)
            case "word-right":
                self.cursor = len(self.text) - len(after.lstrip().partition(" ")[2])
            case "up" | "ctrl-p":
                self._move_up()
            case "down" | "ctrl-n":
                self._move_down()
            case _:
                self._delete(name, before, after)

    def _delete(self, name: str, before: str, after: str) -> None:
        """Delete the text that the key `name` removes before or after the cursor."""
        match name:
            case "backspace":
                before = before[:-1]
            case "delete" | "ctrl-d":
                after = after[1:]
            case "ctrl-w":
                before = before[: _find_word_start(before)]
            case "ctrl-u":
                before = before[: before.rfind("\n") + 1]
            case "ctrl-k":
                after = after[len(after.partition("\n")[0]) :]
        self.text, self.cursor = before + after, len(before)

    def _move_up(self) -> None:
        before = self.text[: self.cursor]
        if "\n" in before:
            above, _, line = before.rpartition("\n")
            start = above.rfind("\n") + 1
            self.cursor = start + min(len(line), len(above) - start)
        elif self._place > 0:
            self._go_to(self._place - 1)

    def _move_down(self) -> None:
        after = self.text[self.cursor :]
        if "\n" in after:
            column = self.cursor - (self.text.rfind("\n", 0, self.cursor) + 1)
            start = self.cursor + after.index("\n") + 1
            self.cursor = start + min(column, len(self.text[start:].partition("\n")[0]))
        elif self._place < len(self._history):
            self._go_to(self._place + 1)

    def _go_to(self, place: int) -> None:
        if self._place == len(self._history):
            self._draft = self.text
        self._place = place
        self.replace_text(self._draft if place == len(self._history) else self._history[place])


def _find_word_start(text: str) -> int:
    return text.rstrip().rfind(" ") + 1


def _wrap_rows(text: str, cursor: int, room: int) -> tuple[list[str], Position]:
    """Return `text` in rows of at most `room` columns, and the cursor position."""
    rows: list[str] = []
    row, used, at = "", 0, (0, 0)
    for place, char in enumerate(f"{text}\n"):
        if place == cursor:
            at = len(rows), used
        if char == "\n":
            rows.append(row)
            row, used = "", 0
            continue
        shown = safe.escape_line(char)
        columns = safe.measure_width(shown)
        if used + columns > room:
            rows.append(row)
            row, used = "", 0
            if place == cursor:
                at = len(rows), 0
        row, used = row + shown, used + columns
    return rows, at
