"""Files of delegated runs, for programs and people who read files. Like a screen, they are a view of the log.

- `live_logs/events.ndjson` grows with each event.
- `full_logs/status.json` is kept current.
- `full_logs/transcript.md` and `full_logs/events.ndjson` exist when the run has ended.
- `metrics_summary.json` belongs to the tree. It is written whenever a run of the tree ends, so it is complete when the
  primary has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import LogError, LogLost, RetinueError
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    RunEnded,
    RunStarted,
    TurnEnded,
    encode_events,
)
from retinue.core.ports import Log
from retinue.files.atomic import replace_file
from retinue.files.private import make_private_folder, write_private_file
from retinue.log.accounts import Bill, sum_subtree_bill
from retinue.log.forwarding_log import ForwardingLog
from retinue.log.runs import Runs, RunView
from retinue.log.transcripts import format_transcript
from retinue.supervisor.tree import Tree
from retinue.workspaces.run_folders import StateFolder

WAIT_SECONDS = 5.0
LINGER_SECONDS = 0.05  # a quick run ends in this time, so its files are written once
LATE_SECONDS = 0.01  # an event loop that is later than this is busy
LONGEST_LINGER_SECONDS = 1.0
RETRY_SECONDS = 1.0
TREES_AT_ONCE = 64
THREADS = 2  # making a file is mostly waiting for the disk
_LOG = logging.getLogger(__name__)
_STATUS_KINDS = (RunStarted, TurnEnded, ApprovalAsked, ApprovalDecided, RunEnded)


class _RunFile(msgspec.Struct, eq=False, gc=False):
    """The files of one run. `events` holds the events in the files until the run has ended; None means that there are
    no files yet."""

    events: list[Event] | None = None
    is_begun: bool = False
    is_ended: bool = False


class _TreeFiles(ForwardingLog):
    """The files of one tree. Wraps the tree's log and collects `pending` events, which are not in the files yet.
    `over` means that no more events come, `failed` that the files could not be written."""

    def __init__(self, runs: Runs, on_change: Callable[[_TreeFiles], None], log: Log) -> None:
        super().__init__(log)
        self.runs = runs
        self.kept: dict[int, _RunFile] = {}
        self.pending: list[Event] = []
        self.is_written = False  # a thread writes its files now
        self.over = False
        self.failed = False
        self._on_change = on_change

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        written = self._log.append(event, wait)
        self.take_event(event)
        return written

    def take_event(self, event: Event) -> None:
        if (event.run in self.kept or type(event.body) is RunEnded) and not self.failed:
            if not self.pending:
                self._on_change(self)
            self.pending.append(event)


class RunLogs:
    """The files of all kept runs. Trees pass in their events. A task writes the events in threads, some trees at a
    time, once the log has them. The more there is to do, the more events of a tree are written in one go."""

    def __init__(self, log: Log, state: StateFolder) -> None:
        self._log = log
        self._state = state
        self._trees: dict[str, _TreeFiles] = {}
        self._on_change = self._note_change  # one bound method for all trees
        self._changed: dict[_TreeFiles, None] = {}  # trees with pending events, in order of arrival
        self._owner = TaskOwner()
        self._is_writing = False
        self._is_wanted = asyncio.Event()  # set while a caller waits for files
        self._waiting = 0
        self._settled = asyncio.Event()  # a new one for every round of writing

    def keep(self, tree: Tree, run: int) -> None:
        """Keep the files of a run from the tree's next event on."""
        files = self._trees.get(tree.id)
        if files is None:
            files = self._trees[tree.id] = tree.wrap_log(partial(_TreeFiles, tree.view, self._on_change))
        files.kept[run] = _RunFile()

    def restore(self, tree: str, events: Iterable[Event]) -> None:
        """Take the events of an earlier process, for a tree whose runs are kept."""
        files = self._trees.get(tree)
        if files is not None:
            for event in events:
                files.take_event(event)

    def end_tree(self, tree: str) -> None:
        """Release a tree that has ended, once its files are written."""
        files = self._trees.get(tree)
        if files is not None:
            files.over = True
            if not files.pending and not files.is_written:
                self._release(files)

    def is_kept(self, tree: str, run: int) -> bool:
        found = self._trees.get(tree)
        return found is not None and run in found.kept

    def has_files(self, tree: str, run: int) -> bool:
        """Return True if an earlier process has kept files of the run."""
        return Path(self._state.run_folder(tree, run), "live_logs").exists()

    async def wait_until_created(self, tree: str, runs: Sequence[int]) -> None:
        """Wait until the files of these new runs exist. Give up after some seconds, because the files are a
        convenience."""
        await self._wait(tree, runs, lambda file: file.is_begun)

    async def wait_until_written(self, tree: str, runs: Sequence[int]) -> None:
        """Wait until the files of these ended runs are complete."""
        await self._wait(tree, runs, lambda file: file.is_ended)

    async def _wait(self, tree: str, runs: Sequence[int], is_done: Callable[[_RunFile], bool]) -> None:
        found = self._trees.get(tree)
        files = [] if found is None else [file for run, file in found.kept.items() if run in runs]
        self._waiting += 1
        self._is_wanted.set()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(WAIT_SECONDS):
                    while not all(map(is_done, files)):
                        await self._settled.wait()
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._is_wanted.clear()

    async def close(self) -> None:
        """Write all pending events. Give up if nothing was written for some seconds."""
        self._waiting += 1
        self._is_wanted.set()
        left = -1
        while len(self._changed) != left:
            left = len(self._changed)
            if await self._owner.wait(WAIT_SECONDS):
                return
        self._owner.cancel()
        for tree in list(self._trees.values()):
            self._release(tree)

    def _note_change(self, tree: _TreeFiles) -> None:
        """Schedule the writing of a tree that has pending events."""
        self._changed[tree] = None
        if not self._is_writing:
            self._is_writing = True
            self._owner.start(self._write_changes())

    def _release(self, tree: _TreeFiles) -> None:
        for file in tree.kept.values():
            file.is_begun = file.is_ended = True
        if self._trees.get(tree.runs.tree) is tree:
            del self._trees[tree.runs.tree]

    async def _write_changes(self) -> None:
        """Write pending events until none are left."""
        try:
            while self._changed:
                await self._linger()
                trees = list(islice(self._changed, TREES_AT_ONCE))
                batches = [tree.pending for tree in trees]
                for tree in trees:
                    del self._changed[tree]
                    tree.pending, tree.is_written = [], True
                await self._flush()
                count = min(THREADS, len(trees))
                shares = [(trees[first::count], batches[first::count]) for first in range(count)]
                await asyncio.gather(*(asyncio.to_thread(self._write_batches, *share) for share in shares))
                for tree in trees:
                    tree.is_written = False
                    if tree.failed or (tree.over and not tree.pending):
                        self._release(tree)
                self._wake_waiters()
        except LogLost as error:
            _LOG.warning("the files of runs are not complete: %s", error)
            for tree in list(self._trees.values()):
                tree.failed = True
                self._release(tree)
            self._wake_waiters()
        finally:
            self._is_writing = False

    async def _linger(self) -> None:
        """Wait a moment for more events, and longer while the event loop is busy, unless a caller waits for files."""
        loop = asyncio.get_running_loop()
        latest = loop.time() + LONGEST_LINGER_SECONDS
        while not self._is_wanted.is_set():
            due = loop.time() + LINGER_SECONDS
            with suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._is_wanted.wait()
            if not due + LATE_SECONDS < loop.time() < latest:
                return

    def _wake_waiters(self) -> None:
        self._settled.set()
        self._settled = asyncio.Event()

    async def _flush(self) -> None:
        """Wait until the log has the collected events: no file shows an event before the log has it."""
        while True:
            try:
                return await self._log.flush()
            except LogLost:
                raise
            except LogError:
                await asyncio.sleep(RETRY_SECONDS)

    # The methods from here on run in a thread.

    def _write_batches(self, trees: list[_TreeFiles], batches: list[list[Event]]) -> None:
        """Write the events of each tree since its last batch: once per run, however many events the run has."""
        for tree, batch in zip(trees, batches, strict=True):
            by_run: dict[int, list[Event]] = {}
            for event in batch:
                by_run.setdefault(event.run, []).append(event)
            try:
                for run, new in by_run.items():
                    if run in tree.kept:
                        self._write(tree.runs.tree, tree.runs.runs[run], new, tree.kept[run])
                if any(type(new[-1].body) is RunEnded for new in by_run.values()):
                    self._summarise(tree.runs)
            except (OSError, RetinueError) as error:
                _LOG.warning("the files of tree %s cannot be written any more: %s", tree.runs.tree, error)
                tree.failed = True

    def _write(self, tree: str, run: RunView, new: list[Event], file: _RunFile) -> None:
        """Write the new events of a run, after the events that are written already."""
        own = self._state.run_folder(tree, run.number)
        live, full = f"{own}/live_logs", f"{own}/full_logs"
        is_new = file.events is None
        if is_new:
            for folder in (self._state.tree_folder(tree), own, live, full):  # parents first, so that no mkdir fails
                make_private_folder(folder)
        # A run that is resumed after a crash starts its file anew.
        write_private_file(f"{live}/events.ndjson", encode_events(new), append=not is_new)
        is_over = type(new[-1].body) is RunEnded
        events = file.events = file.events or []
        events += new
        if is_over:  # before the status, which tells readers that these files exist
            try:  # the live file is not written any more
                os.link(f"{live}/events.ndjson", f"{full}/events.ndjson")
            except OSError:
                replace_file(f"{full}/events.ndjson", Path(live, "events.ndjson").read_bytes())
            write_private_file(f"{full}/transcript.md", format_transcript(events).encode())
        if is_new or any(isinstance(event.body, _STATUS_KINDS) for event in new):
            replace_file(f"{full}/status.json", msgspec.json.format(msgspec.json.encode(status_of(tree, run))))
        file.is_begun = True
        if is_over:
            file.events = []
            file.is_ended = True

    def _summarise(self, runs: Runs) -> None:
        views = list(runs.runs.values())
        usage = runs.usage()
        summary = {
            "tree": runs.tree,
            "runs": len(views),
            "ended": sum(view.ended is not None for view in views),
            "tool_calls": sum(view.tool_count for view in views),
            "turns": sum(view.turns for view in views),
            "usage": msgspec.to_builtins(usage),
            "cost": None if any(view.unpriced for view in views) else str(sum(view.cost for view in views)),
        }
        path = f"{self._state.tree_folder(runs.tree)}/metrics_summary.json"
        replace_file(path, msgspec.json.format(msgspec.json.encode(summary)))


def status_of(tree: str, run: RunView) -> dict[str, Any]:
    """Return the content of status.json. A team uses nothing itself, so the usage of its members counts."""
    used = sum_subtree_bill(run) if run.members else Bill(usage=run.usage, cost=run.cost, unpriced=run.unpriced)
    return {
        "tree": tree,
        "run": run.number,
        "path": run.path,
        "label": run.label,
        "agent": run.agent,
        "subagent_id": run.spawned.subagent_id,
        "state": run.state,
        "status": run.status,
        "turns": run.turns,
        "tool_count": run.tool_count,
        "usage": msgspec.to_builtins(used.usage),
        "cost": None if used.unpriced else str(used.cost),
        "workspace": run.find_presented().spawned.workspace,
        "spawned_at": run.spawned_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "error": run.ended.error_details if run.ended else None,
    }
