"""One tree: its runs, its slots, its order. Writing an event gives it its place, folds it and appends it."""

from __future__ import annotations

import os
import random
from collections.abc import Awaitable, Callable

from retinue.core.events import Body, Event, RunSpawned
from retinue.core.ports import Clock, Log
from retinue.log.runs import FOLDS, Runs
from retinue.supervisor.nodes import Node
from retinue.supervisor.slots import Slots

_DIGITS = "0123456789abcdefghjkmnpqrstvwxyz"  # without letters that look like digits
_PAIRS = [first + second for first in _DIGITS for second in _DIGITS]
_random = random.Random()  # not the module's own, which a program may seed
os.register_at_fork(after_in_child=_random.seed)


def new_tree_id() -> str:
    """Return twelve random characters: unique across processes and machines without asking any, and different from the
    first one on, since people type only the beginning."""
    bits = _random.getrandbits(60)
    high = bits >> 30
    return (
        _PAIRS[bits & 1023] + _PAIRS[bits >> 10 & 1023] + _PAIRS[bits >> 20 & 1023]
        + _PAIRS[high & 1023] + _PAIRS[high >> 10 & 1023] + _PAIRS[high >> 20 & 1023]
    )  # fmt: skip


class Tree:
    """The unit of limits, cancelling and order."""

    __slots__ = (
        "_append", "_now", "id", "labels", "log", "nodes", "root", "runs", "seq", "slots", "trace_id", "traceparent",
    )  # fmt: skip

    def __init__(
        self, log: Log, clock: Clock, concurrent: int | None, trace: Callable[[], str] | None, name: str = ""
    ) -> None:
        """Of that name if it has one already."""
        self.id = name or new_tree_id()
        self.traceparent = "" if trace is None else trace()
        self.trace_id = self.traceparent[3:35] or random.getrandbits(128).to_bytes(16, "big").hex()
        self.nodes: list[Node] = []
        self.runs = Runs(self.id)
        self.slots = Slots(concurrent)
        self.labels: dict[str, int] = {}
        self.log = log
        self._append = log.appender(self.id)
        self.root: Node | None = None  # with which the tree ends: its primary, or one that goes on in a finished tree
        self._now = clock.wall
        self.seq = 0

    def open(self, node: Node, body: RunSpawned) -> Awaitable[None] | None:
        """Writes a run's first event, before which there is nothing to say of it."""
        self.seq += 1
        ref = node.ref
        event = Event(self.seq, self.id, ref.run, ref.path, ref.agent, self._now(), body)
        node.view = self.runs.spawn(event, body)
        return self._append(event, True)

    def write(self, node: Node, body: Body, wait: bool = False, /) -> Awaitable[None] | None:
        """The only other way into the log. Nothing is written of a run after its ending."""
        view = node.view
        if view.ended is not None:
            return None
        self.seq = seq = self.seq + 1
        if node.stall is not None:
            node.stall.record_activity()
            view.last_seq = seq
        ref, now, append = node.ref, self._now, self._append  # a call of an attribute would look for a method first
        event = Event(seq, self.id, ref.run, ref.path, ref.agent, now(), body)
        fold = FOLDS[type(body)]  # as `Runs.apply` does, for a run already at hand
        if fold is not None:
            fold(view, event, body)
        return append(event, wait)

    def unique_label(self, wanted: str) -> str:
        """The label, or `label-2` and so on when the tree has it already."""
        label = wanted
        while label in self.labels:
            self.labels[wanted] += 1
            label = f"{wanted}-{self.labels[wanted]}"
        self.labels[label] = 1
        return label

    def let_go(self) -> None:
        """The tree has ended: unties its circles, so that its memory is free now and not when the collector comes."""
        for node in self.nodes:
            node.let_go()

    @property
    def ended(self) -> bool:
        return bool(self.nodes) and self.nodes[0].ended
