"""The index works for any log, also for one that does not number its commits."""

from retinue.core.ports import StoredRun
from retinue.log.tree_index import TreeIndex, TreeRow, summarize_runs
from tests.log.kit import make_ended, make_event, make_spawned


class Rows:
    """The stored rows of trees and runs."""

    def __init__(self) -> None:
        self.trees: dict[str, TreeRow] = {}
        self.runs: dict[tuple[str, int], StoredRun] = {}

    def make_index(self) -> TreeIndex:
        """Return the index of a new writer."""
        return TreeIndex(self.trees.get, lambda tree, run: self.runs.get((tree, run)))

    def store(self, index: TreeIndex) -> None:
        changes = index.list_changes()
        self.trees |= {row.tree: row for row in changes.trees}
        self.runs |= {(run.first.tree, run.first.run): run for run in changes.tallied}
        index.settle()


def test_a_log_without_numbers_of_batches_keeps_its_rows_through_every_writer() -> None:
    rows = Rows()
    events = [make_spawned(), make_event(2), make_event(3), make_ended(4)]
    for event in events:
        index = rows.make_index()
        index.apply([event])
        assert index.list_changes().places == []
        rows.store(index)
    assert (rows.trees["t1"].last_seq, rows.trees["t1"].ended) == (4, True)
    assert list(rows.runs.values()) == summarize_runs(events)
