"""The events that several services of a run write."""

from __future__ import annotations

from copy import deepcopy
from types import NoneType
from typing import Any

from retinue.core.events import Message, ToolResult
from retinue.core.limits import EVENT_BYTES
from retinue.core.ports import Outcome
from retinue.supervisor.tree import Run

_PLAIN = (str, int, float, bool, NoneType)


def write_message(run: Run, text: str, *, is_final: bool) -> None:
    """Write a text of the model. A text too long for an event is cut, and kept whole in a file."""
    file = ""
    if len(text) * 4 > EVENT_BYTES:
        text, file = run.folders.fit_event_text(text)
    run.write(Message(text, is_final, file, replies_to=run.view.replying_to if is_final else ""))


def write_lost_result(run: Run, call_id: str, name: str, text: str, *, code: str) -> Outcome:
    """Write the result of a call that was cut off, and return the outcome for the model."""
    run.write(ToolResult(call_id, name, text, success=False, outcome=code))
    return Outcome(text, success=False)


def copy_args(args: dict[str, Any]) -> dict[str, Any]:
    """Return a copy that nobody else can change. The arguments shown and logged must stay the ones asked about."""
    for value in args.values():
        if type(value) not in _PLAIN:
            return deepcopy(args)
    return args.copy()
