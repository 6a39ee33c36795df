"""Files of the runs that were delegated, for programs and people who read files: a view of the log like any screen.

`live_logs/events.ndjson` grows as things happen, `full_logs/status.json` is kept current, `full_logs/transcript.md`
and `full_logs/events.ndjson` are there when the run has ended. `metrics_summary.json` is the tree's: written whenever a
run of it ends, so it is complete when the primary has ended.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Delta,
    Event,
    RunEnded,
    RunStarted,
    TurnEnded,
    encode_event,
)
from retinue.core.ports import Log
from retinue.files.atomic import replace_file
from retinue.files.private import make_private_folder, write_private_file
from retinue.log.runs import Runs, RunView
from retinue.log.transcripts import format_transcript
from retinue.workspaces.run_folders import StateFolder

WAIT_SECONDS = 5.0
TREES_AT_ONCE = 32
THREADS = 4  # making a file is mostly waiting for the disk
_LOG = logging.getLogger(__name__)
_STATUS_KINDS = (RunStarted, TurnEnded, ApprovalAsked, ApprovalDecided, RunEnded)


class _RunFile(msgspec.Struct, eq=False):
    """The files of one run: the events that are in them, and who waits for them."""

    begun: asyncio.Event
    ended: asyncio.Event
    events: list[Event] = []

    def release_waiters(self) -> None:
        self.begun.set()
        self.ended.set()


class _TreeFiles(msgspec.Struct, eq=False):
    """The files of a tree: those of its runs, and the events that are not yet in them. A tree that is `over` gets no
    more of them; one that `failed` could not be written."""

    runs: Runs
    kept: dict[int, _RunFile] = {}
    pending: list[Event] = []
    is_written: bool = False  # at this moment, in a thread
    over: bool = False
    failed: bool = False

    def take_pending(self) -> list[Event]:
        taken, self.pending = self.pending, []
        return taken


class RunFiles:
    """The files of the runs that are kept. A task follows each tree; one writes what has come in, in threads, some
    trees at a time. So a tree has the more events in one go, the more there is to do."""

    def __init__(self, log: Log, state: StateFolder) -> None:
        self._log = log
        self._state = state
        self._trees: dict[str, _TreeFiles] = {}
        self._changed: dict[str, _TreeFiles] = {}  # trees with pending events, in the order they got them
        self._owner = TaskOwner()
        self._is_writing = False

    def keep(self, runs: Runs, run: int, *, after: int) -> None:
        """Keep the files of a run whose events come after that number. `runs` is the view of its tree, which somebody
        else keeps current."""
        tree = self._trees.get(runs.tree)
        if tree is None:
            tree = self._trees[runs.tree] = _TreeFiles(runs)
            self._owner.start(self._follow(tree, after))
        tree.kept[run] = _RunFile(asyncio.Event(), asyncio.Event())

    def keeps(self, tree: str, run: int) -> bool:
        found = self._trees.get(tree)
        return found is not None and run in found.kept

    def has_files(self, tree: str, run: int) -> bool:
        """Tell whether an earlier process has kept files of the run."""
        return Path(self._state.run_folder(tree, run), "live_logs").exists()

    async def begun(self, tree: str, runs: Sequence[int]) -> None:
        """Wait until the files of these new runs are there, but not for ever: they are a convenience."""
        await self._wait([file.begun for file in self._find_files(tree, runs)])

    async def written(self, tree: str, runs: Sequence[int]) -> None:
        """Wait until the files of these ended runs are complete."""
        await self._wait([file.ended for file in self._find_files(tree, runs)])

    def _find_files(self, tree: str, runs: Sequence[int]) -> list[_RunFile]:
        found = self._trees.get(tree)
        return [] if found is None else [file for run, file in found.kept.items() if run in runs]

    async def _wait(self, events: list[asyncio.Event]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                for event in events:
                    await event.wait()

    async def close(self) -> None:
        """Write what is left. Gives up when nothing was written for some seconds."""
        left = -1
        while len(self._trees) != left:
            left = len(self._trees)
            if await self._owner.wait(WAIT_SECONDS):
                return
        self._owner.cancel()
        for tree in list(self._trees.values()):
            self._release(tree)

    async def _follow(self, tree: _TreeFiles, after: int) -> None:
        name = tree.runs.tree
        try:
            async for event in self._log.watch(name, after=after):
                if isinstance(event, Delta) or tree.failed:
                    continue
                if event.run in tree.kept or isinstance(event.body, RunEnded):
                    tree.pending.append(event)
                    self._changed[name] = tree
                    if not self._is_writing:
                        self._is_writing = True
                        self._owner.start(self._write_changes())
        except RetinueError as error:
            _LOG.warning("the files of tree %s are not complete: %s", name, error)
        finally:
            tree.over = True
            if not tree.pending and not tree.is_written:
                self._release(tree)

    def _release(self, tree: _TreeFiles) -> None:
        for file in tree.kept.values():
            file.release_waiters()
        if self._trees.get(tree.runs.tree) is tree:
            del self._trees[tree.runs.tree]

    async def _write_changes(self) -> None:
        """Write what is pending, until nothing is."""
        try:
            while self._changed:
                names = list(islice(self._changed, TREES_AT_ONCE))
                trees = [self._changed.pop(name) for name in names]
                batches = [tree.take_pending() for tree in trees]
                for tree in trees:
                    tree.is_written = True
                count = min(THREADS, len(trees))
                shares = [(trees[first::count], batches[first::count]) for first in range(count)]
                await asyncio.gather(*(asyncio.to_thread(self._write_batches, *share) for share in shares))
                for tree, batch in zip(trees, batches, strict=True):
                    self._settle(tree, batch)
        finally:
            self._is_writing = False

    def _settle(self, tree: _TreeFiles, batch: list[Event]) -> None:
        """Wake those who wait for what was written."""
        tree.is_written = False
        for event in batch:
            file = tree.kept.get(event.run)
            if file is not None:
                file.begun.set()
                if isinstance(event.body, RunEnded):
                    file.events = []
                    file.ended.set()
        if tree.failed or (tree.over and not tree.pending):
            self._release(tree)

    # The methods from here on run in a thread.

    def _write_batches(self, trees: list[_TreeFiles], batches: list[list[Event]]) -> None:
        for tree, batch in zip(trees, batches, strict=True):
            try:
                self._write_batch(tree, batch)
            except (OSError, RetinueError) as error:
                _LOG.warning("the files of tree %s cannot be written any more: %s", tree.runs.tree, error)
                tree.failed = True

    def _write_batch(self, tree: _TreeFiles, batch: list[Event]) -> None:
        """Write what happened since the last batch: once for each run, however many events it has."""
        by_run: dict[int, list[Event]] = {}
        for event in batch:
            if event.run in tree.kept:
                by_run.setdefault(event.run, []).append(event)
        for run, new in by_run.items():
            self._write(tree.runs.tree, tree.runs.runs[run], new, tree.kept[run].events)
        if any(isinstance(event.body, RunEnded) for event in batch):
            self._summarise(tree.runs)

    def _write(self, tree: str, run: RunView, new: list[Event], events: list[Event]) -> None:
        """Write the new events of a run whose earlier `events` are written, and add them to those."""
        own = self._state.run_folder(tree, run.number)
        live, full = f"{own}/live_logs", f"{own}/full_logs"
        if not events:
            for folder in (self._state.tree_folder(tree), own, live, full):  # so that none is tried in vain
                make_private_folder(folder)
        lines = b"".join(encode_event(event) + b"\n" for event in new)
        # A run that resumes after a crash starts its file anew.
        write_private_file(f"{live}/events.ndjson", lines, append=bool(events))
        if not events or any(isinstance(event.body, _STATUS_KINDS) for event in new):
            replace_file(f"{full}/status.json", msgspec.json.format(msgspec.json.encode(status_of(tree, run))))
        events += new
        if isinstance(new[-1].body, RunEnded):
            _copy_file(f"{live}/events.ndjson", f"{full}/events.ndjson")
            replace_file(f"{full}/transcript.md", format_transcript(events).encode())

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


def _copy_file(source: str, target: str) -> None:
    """Give a file that is not written any more a second name, or where that cannot be, a copy."""
    try:
        os.link(source, target)
    except OSError:
        replace_file(target, Path(source).read_bytes())


def status_of(tree: str, run: RunView) -> dict[str, Any]:
    """Return the content of status.json."""
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
        "usage": msgspec.to_builtins(run.usage),
        "cost": None if run.unpriced else str(run.cost),
        "workspace": run.spawned.workspace,
        "spawned_at": run.spawned_at,
        "started_at": run.started_at,
        "ended_at": run.ended_at,
        "error": run.ended.error_details if run.ended else None,
    }
