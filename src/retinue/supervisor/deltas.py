"""The live output of a run: pieces of replies and of tool output, for current watchers. Deltas are never stored."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import msgspec

from retinue.core.events import Delta, Warned
from retinue.core.ports import Log
from retinue.supervisor.run import Run
from retinue.supervisor.tree import Tree


class ReplyDeltas(msgspec.Struct, eq=False, gc=False):
    """The callback for the deltas of one model call. It shows each delta with its offset in the reply. `texts` holds
    the pieces of text."""

    tree: Tree
    run: Run
    turn: int
    offset: int = 0
    texts: list[str] = []

    def __call__(self, kind: str, text: str) -> None:
        _show_delta(self.tree, self.run, kind, text, self.turn, self.offset)
        if kind == "text":
            self.offset += len(text)
            self.texts.append(text)
        elif kind == "retry":
            self.offset = 0
            self.texts.clear()


class LocalCallServices(msgspec.Struct, eq=False, gc=False):
    """The services of a run for its running calls of local tools. Implements LocalCalls."""

    tree: Tree
    run: Run

    def claim_call_id(self, wanted: str) -> str:
        return self.run.claim_call_id(wanted)

    def show_output(self, call_id: str, text: str) -> None:
        if text:
            _show_delta(self.tree, self.run, "output", text, call_id=call_id)

    def on_question(self, listener: Callable[[bool], None]) -> Callable[[], None]:
        self.run.add_question_listener(listener)
        return partial(self.run.remove_question_listener, listener)


def _show_delta(
    tree: Tree, run: Run, kind: str, text: str, turn: int = 0, offset: int = 0, *, call_id: str = ""
) -> None:
    """Show a piece of a reply, with its offset in the reply, or a piece of a call's output."""
    ref = run.ref
    if run.ending:
        return
    run.record_activity()
    if kind == "retry":
        tree.write(run, Warned(text, code="retry"))
        return
    delta = Delta(ref.tree, ref.run, ref.path, ref.agent, text, kind, turn=turn, offset=offset, call_id=call_id)
    if run.first_write is None:
        tree.log.show(delta)
    else:  # in order, and not before `run.spawned` is written
        run.first_write.add_done_callback(partial(_show_when_written, tree.log, delta))


def _show_when_written(log: Log, delta: Delta, written: asyncio.Future[None]) -> None:
    if not written.cancelled() and written.exception() is None:
        log.show(delta)
