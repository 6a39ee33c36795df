"""Files of the runs that were delegated, for programs and people who read files: a view of the log like any screen.

`live_logs/events.ndjson` grows as things happen, `full_logs/status.json` is kept current, `full_logs/transcript.md`
and `full_logs/events.ndjson` are there when the run has ended. `metrics_summary.json` is the tree's: written whenever a
run of it ends, so it is complete when the primary has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

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
_LOG = logging.getLogger(__name__)
_STATUS_KINDS = (RunStarted, TurnEnded, ApprovalAsked, ApprovalDecided, RunEnded)


class _Kept(NamedTuple):
    begun: asyncio.Event
    ended: asyncio.Event


class RunFiles:
    """The files of the runs that are kept, written by one watching task per tree."""

    def __init__(self, log: Log, state: StateFolder) -> None:
        self._log = log
        self._state = state
        self._kept: dict[str, dict[int, _Kept]] = {}
        self._owner = TaskOwner()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def keep(self, runs: Runs, run: int, *, after: int) -> None:
        """Keep the files of a run whose events come after that number. `runs` is the view of its tree, which somebody
        else keeps current."""
        kept = self._kept.setdefault(runs.tree, {})
        kept[run] = _Kept(asyncio.Event(), asyncio.Event())
        if runs.tree not in self._tasks:
            self._tasks[runs.tree] = self._owner.start(self._follow(runs, kept, after))

    def keeps(self, tree: str, run: int) -> bool:
        return run in self._kept.get(tree, ())

    def has_files(self, tree: str, run: int) -> bool:
        """Tell whether an earlier process has kept files of the run."""
        return Path(self._state.run_folder(tree, run), "live_logs").exists()

    async def begun(self, tree: str, runs: Sequence[int]) -> None:
        """Wait until the files of these new runs are there, but not for ever: they are a convenience."""
        await self._wait([kept.begun for run, kept in self._kept.get(tree, {}).items() if run in runs])

    async def written(self, tree: str, runs: Sequence[int]) -> None:
        """Wait until the files of these ended runs are complete."""
        await self._wait([kept.ended for run, kept in self._kept.get(tree, {}).items() if run in runs])

    async def _wait(self, events: list[asyncio.Event]) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                for event in events:
                    await event.wait()

    async def close(self) -> None:
        await self._owner.wait(5)
        self._owner.cancel()

    async def _follow(self, runs: Runs, kept: dict[int, _Kept], after: int) -> None:
        tree = runs.tree
        events: dict[int, list[Event]] = {}
        queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self._owner.start(self._read_events(tree, after, queue))
        try:
            while batch := await _take_batch(queue):
                if any(event.run in kept and event.run not in events for event in batch):
                    self._write_batch(runs, batch, kept, events)  # at once: a reply waits for a new run's files
                else:
                    await asyncio.to_thread(self._write_batch, runs, batch, kept, events)
                for event in batch:
                    if event.run in kept:
                        kept[event.run].begun.set()
                        if isinstance(event.body, RunEnded):
                            del events[event.run]
                            kept[event.run].ended.set()
        except (OSError, RetinueError) as error:
            _LOG.warning("the files of tree %s cannot be written any more: %s", tree, error)
        finally:
            for run in kept.values():
                run.begun.set()
                run.ended.set()
            self._kept.pop(tree, None)
            self._tasks.pop(tree, None)

    async def _read_events(self, tree: str, after: int, queue: asyncio.Queue[Event | None]) -> None:
        try:
            async for event in self._log.watch(tree, after=after):
                if not isinstance(event, Delta):
                    queue.put_nowait(event)
        except RetinueError as error:
            _LOG.warning("the files of tree %s are not complete: %s", tree, error)
        finally:
            queue.put_nowait(None)

    def _write_batch(
        self, runs: Runs, batch: list[Event], kept: dict[int, _Kept], events: dict[int, list[Event]]
    ) -> None:
        """Write what happened since the last batch: once for each run, however many events it has."""
        by_run: dict[int, list[Event]] = {}
        for event in batch:
            if event.run in kept:
                by_run.setdefault(event.run, []).append(event)
        for run, new in by_run.items():
            self._write(runs.tree, runs.runs[run], new, events.setdefault(run, []))
        if any(isinstance(event.body, RunEnded) for event in batch):
            self._summarise(runs)

    def _write(self, tree: str, run: RunView, new: list[Event], events: list[Event]) -> None:
        """Write the new events of a run whose earlier `events` are written, and add them to those."""
        folder = Path(self._state.run_folder(tree, run.number))
        lines = b"".join(encode_event(event) + b"\n" for event in new)
        live = make_private_folder(folder / "live_logs") / "events.ndjson"
        write_private_file(live, lines, append=bool(events))  # a run that resumes after a crash starts its file anew
        full = folder / "full_logs"
        if not events or any(isinstance(event.body, _STATUS_KINDS) for event in new):
            replace_file(
                make_private_folder(full) / "status.json",
                msgspec.json.format(msgspec.json.encode(status_of(tree, run))),
            )
        events += new
        if isinstance(new[-1].body, RunEnded):
            replace_file(full / "events.ndjson", b"".join(encode_event(e) + b"\n" for e in events))
            replace_file(full / "transcript.md", format_transcript(events).encode())

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
        path = make_private_folder(self._state.tree_folder(runs.tree)) / "metrics_summary.json"
        replace_file(path, msgspec.json.format(msgspec.json.encode(summary)))


async def _take_batch(queue: asyncio.Queue[Event | None]) -> list[Event]:
    """Return what is in the queue, at least one event; nothing at its end."""
    batch = [await queue.get()]
    while batch[-1] is not None and not queue.empty():
        batch.append(queue.get_nowait())
    if batch[-1] is None and len(batch) > 1:
        queue.put_nowait(None)  # the end, for the next time
    return [event for event in batch if event is not None]


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
