"""Text that a model is saying now, on the last line of a terminal, until the whole of it is printed as a block."""

from __future__ import annotations

from retinue.core.events import Delta, Event, Inbox
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import Printer

KEPT = 1000


class Speech:
    """Shows the end of what the run that spoke last says, or thinks. Needs a terminal that can clear a line."""

    def __init__(self, printer: Printer) -> None:
        self._printer = printer
        self._said: dict[int, tuple[str, str]] = {}

    def hear(self, delta: Delta) -> None:
        kind, before = self._said.get(delta.run, (delta.kind, ""))
        said = ((before if kind == delta.kind else "") + delta.text)[-KEPT:]
        self._said[delta.run] = delta.kind, said
        width = self._printer.columns - 1
        line = safe.escape_line(f"{delta.agent}: {' '.join(said.split())}")
        head = len(safe.escape_line(delta.agent)) + 2
        if len(line) > width:
            line = line[:head] + "…" + line[-max(1, width - head - 1) :]
        self._printer.show_status(line[:width])

    def over(self, event: Event) -> None:
        """The run has said it: its events tell the whole."""
        if not isinstance(event.body, Inbox) and self._said.pop(event.run, None) is not None:
            self._printer.clear_status()
