"""How whatever stopped a run becomes its one ending. Fails closed: what is not understood is an error, never done."""

from __future__ import annotations

import msgspec

from retinue.core.errors import Disconnected, Failed, Limited, RetinueError, StreamCut, Unconfirmed
from retinue.core.events import RunEnded
from retinue.core.results import STATUSES, Ending, ending_texts, stalled_texts, unconfirmed_texts
from retinue.supervisor.nodes import Node

REFUSED = "refused"


def ending_of(node: Node, error: BaseException) -> Ending:
    """The ending of a run whose work raised."""
    primary = node.parent is None
    match error:
        case Limited():
            text, details = ending_texts("limited", name=node.name, primary=primary, detail=str(error))
            return Ending("limited", text, details)
        case Unconfirmed():
            return Ending("failed", *unconfirmed_texts(name=node.name, primary=primary))
        case StreamCut():
            return Ending("disconnected", *ending_texts("disconnected", name=node.name, primary=primary))
        case Disconnected():
            text, details = ending_texts("disconnected", name=node.name, primary=primary)
            return Ending("disconnected", text, f"{details}: {error}")
        case RetinueError() | Failed():
            return Ending("failed", str(error), str(error))
        case _:
            text = f"{node.name} panicked: {type(error).__name__}: {error}"
            return Ending("failed", text, text)


def stopped(node: Node) -> Ending:
    """The ending of a run that was told to stop, or whose task ended without anybody telling it to."""
    status = node.stopping or "disconnected"
    if node.failure:
        return Ending("failed", node.failure, node.failure)
    stall = node.stall
    if status == "timed_out" and stall is not None and stall.expired and stall.seconds is not None:
        return Ending(status, *stalled_texts(name=node.name, primary=node.parent is None, seconds=2 * stall.seconds))
    detail = "" if node.seconds is None else f"{round(node.seconds * 1000, 3):.3f}".rstrip("0").rstrip(".")
    return Ending(status, *ending_texts(status, name=node.name, primary=node.parent is None, detail=detail))


def body_of(node: Node, ending: Ending, *, duration_ms: int) -> RunEnded:
    """What is written. Text of a run that did not finish is kept beside the words of its ending."""
    partial = ""
    if ending.status != "done":
        primary = node.parent is None
        if ending.status not in STATUSES:
            text, details = ending_texts("failed", name=node.name, primary=primary)
            ending = Ending("failed", text, details)
        if ending.status == REFUSED:
            text = ending.text or ending_texts("refused", name=node.name, primary=primary)[0]
            ending = Ending("refused", text, text)
        partial = node.partial or node.view.last_message
    text, file = node.folders.fit_event_text(ending.text)
    body = RunEnded(ending.status, text, duration_ms, ending.error, partial, ending.structured, file)
    changes = node.folders.changes
    if changes is None:
        return body
    return msgspec.structs.replace(body, changed_files=changes.files, changed_count=changes.count)
