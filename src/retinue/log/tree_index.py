"""The index of a log: one row per tree and per run, with all data for lists and lookups.

The index folds written events into rows, so lists seldom read events. It knows no files: the log stores the rows, as
`schema` does. The same fold can rebuild them from the events alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct, field, structs

from retinue.core.events import Event, RunEnded, RunResumed, RunSpawned
from retinue.core.ports import StoredRun, StoredTree
from retinue.log.runs import RunView, make_view


class TreeRow(Struct, eq=False, gc=False):
    """The state of a tree. `root` is the run whose ending ends the tree: the primary, or a run that continues the tree
    after the primary ended. `gone_at` is the time of the newest event other than `run.resumed`, `last_batch` the batch
    of the newest event, in a log that numbers its batches."""

    tree: str
    spawned_at: float
    origin: str = ""
    reported: str = ""
    last_seq: int = 0
    last_at: float = 0.0
    gone_at: float = 0.0
    root: int = 0
    ended: bool = False
    last_batch: int = 0

    @classmethod
    def begin(cls, first: Event) -> TreeRow:
        """Return a new row for the tree that starts with event `first`. The event is not applied yet."""
        body = first.body
        origin, reported = (body.origin, body.reported) if isinstance(body, RunSpawned) else ("", "")
        return cls(first.tree, first.at, origin, reported)

    def apply(self, event: Event) -> None:
        kind = type(event.body)
        self.last_seq, self.last_at = event.seq, event.at
        if kind is not RunResumed:
            self.gone_at = event.at
        if kind is RunEnded:
            if event.run == self.root:
                self.ended = True
        elif kind is RunSpawned and self.ended:
            self.root, self.ended = event.run, False

    def describe(self, writer: str | None, pid: int | None) -> StoredTree:
        """Return the tree as a `StoredTree`."""
        return StoredTree(
            tree=self.tree,
            spawned_at=self.spawned_at,
            last_seq=self.last_seq,
            last_at=self.last_at,
            ended=self.ended,
            writer=writer,
            pid=pid,
            origin=self.origin,
            reported=self.reported,
        )


class IndexChanges(Struct):
    """The rows to write after some batches. `places` says where each tree starts in a batch (tree, number of its first
    event there, batch). `spawned` are the new runs; `tallied` are all runs with a changed tally, including new
    ones."""

    places: list[tuple[str, int, int]] = []
    trees: list[TreeRow] = []
    spawned: list[StoredRun] = []
    tallied: list[StoredRun] = []


class _Tree(Struct, eq=False):
    """A tree during writing: its row, its live runs, and the numbers of new and of changed runs."""

    row: TreeRow
    runs: dict[int, tuple[Event, RunView]] = field(default_factory=dict)
    spawned: dict[int, None] = field(default_factory=dict)
    changed: dict[int, None] = field(default_factory=dict)


LoadTree = Callable[[str], TreeRow | None]
LoadRun = Callable[[str, int], StoredRun | None]


class TreeIndex:
    """The rows of the trees of one writer. Once the changes are stored, only trees and runs without an ending stay in
    memory. `load_tree` and `load_run` load the stored rows of a continued tree; by default there are none."""

    def __init__(self, load_tree: LoadTree = lambda _: None, load_run: LoadRun = lambda _tree, _run: None) -> None:
        self._load_tree, self._load_run = load_tree, load_run
        self._trees: dict[str, _Tree] = {}
        self._changed: dict[str, None] = {}
        self._places: list[tuple[str, int, int]] = []

    def apply(self, events: Iterable[Event], batch: int = 0) -> None:
        """Fold the events of a batch. Events that the index already contains are skipped. `batch` is the number of the
        batch, higher than those before; a log that does not number its commits has none, and gets no `places`."""
        for event in events:
            tree = self._trees.get(event.tree)
            if tree is None:
                tree = self._trees[event.tree] = _Tree(self._load_tree(event.tree) or TreeRow.begin(event))
            if event.seq <= tree.row.last_seq:
                continue
            self._changed[event.tree] = None
            if tree.row.last_batch != batch:
                tree.row.last_batch = batch
                self._places.append((event.tree, event.seq, batch))
            known = tree.runs.get(event.run) or self._find_run(tree, event)
            if known is not None:
                view = known[1]
                if type(event.body) is RunResumed:
                    view.add_absence(event.at - tree.row.gone_at)
                view.apply(event)
                tree.changed[event.run] = None
            tree.row.apply(event)

    def list_changes(self) -> IndexChanges:
        """Return the rows that have changed since the last `settle`."""
        changes = IndexChanges(places=self._places)
        for name in self._changed:
            tree = self._trees[name]
            changes.trees.append(tree.row)
            for number in tree.changed:
                first, view = tree.runs[number]
                stored = StoredRun(first=first, tally=view.make_tally())
                changes.tallied.append(stored)
                if number in tree.spawned:
                    changes.spawned.append(stored)
        return changes

    def settle(self) -> None:
        """Forget the changes, now stored, and drop the trees and runs that have ended."""
        for name in self._changed:
            tree = self._trees[name]
            for number in tree.changed:
                if tree.runs[number][1].ended is not None:
                    del tree.runs[number]
            tree.changed.clear()
            tree.spawned.clear()
            if tree.row.ended:
                del self._trees[name]
        self._changed.clear()
        self._places = []

    def _find_run(self, tree: _Tree, event: Event) -> tuple[Event, RunView] | None:
        """Return the run of an event that is not in memory: a new run, or a stored one. Return None for an unknown
        run, whose events change nothing."""
        if isinstance(event.body, RunSpawned):
            body = structs.replace(event.body, profile={}, tools=[])  # no list shows these fields
            first = structs.replace(event, body=body)
            known = (
                first,
                RunView(
                    number=event.run,
                    path=event.path,
                    agent=event.agent,
                    spawned_at=event.at,
                    spawned=body,
                    keeps_texts=False,
                ),
            )
            tree.spawned[event.run] = None
        else:
            stored = self._load_run(event.tree, event.run)
            if stored is None:
                return None
            known = stored.first, make_view(stored, keeps_texts=False)
        tree.runs[event.run] = known
        return known


def summarize_runs(events: Sequence[Event]) -> list[StoredRun]:
    """Return the runs of a tree as the index has them, computed from its events."""
    index = TreeIndex()
    index.apply(events)
    changes = index.list_changes()
    is_reported = any(row.reported for row in changes.trees)
    return [structs.replace(run, is_reported=is_reported) for run in changes.tallied]


def list_names(run: StoredRun) -> list[str]:
    """Return the names by which a person can look up a run."""
    ref = run.ref
    names = (ref.path, ref.label, ref.subagent_id, ref.tree if ref.run == 0 else "")
    return [name for name in dict.fromkeys(names) if name]
