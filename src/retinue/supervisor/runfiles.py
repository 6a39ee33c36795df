"""Files of some runs, for callers whose replies name them: a view of the log like any screen.

`live_logs/events.ndjson` grows as things happen, `full_logs/status.json` is kept current, `full_logs/transcript.md`
and `full_logs/events.ndjson` are there when the run has ended, `metrics_summary.json` is the tree's.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import RetinueError
from retinue.core.events import Delta, Event, RunEnded, RunStarted, TurnEnded, encode_event
from retinue.files.atomic import replace_file
from retinue.files.private import make_private_folder, write_private_file
from retinue.log.runs import Runs, RunView
from retinue.log.transcripts import format_transcript
from retinue.workspaces.run_folders import StateFolder

WAIT_SECONDS = 5.0
_LOG = logging.getLogger(__name__)
_STATUS_KINDS = (RunStarted, TurnEnded, RunEnded)


class _Kept(NamedTuple):
    begun: asyncio.Event
    ended: asyncio.Event


class RunFiles:
    """The files of the runs that are kept, written by one watching task per tree."""

    def __init__(self, watch: Callable[[str], AsyncGenerator[Event | Delta]], state: StateFolder) -> None:
        self._watch = watch
        self._state = state
        self._kept: dict[str, dict[int, _Kept]] = {}
        self._owner = TaskOwner()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def keep(self, tree: str, run: int) -> None:
        kept = self._kept.setdefault(tree, {})
        kept[run] = _Kept(asyncio.Event(), asyncio.Event())
        if tree not in self._tasks:
            self._tasks[tree] = self._owner.start(self._follow(tree, kept))

    def keeps(self, tree: str, run: int) -> bool:
        return run in self._kept.get(tree, ())

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

    async def _follow(self, tree: str, kept: dict[int, _Kept]) -> None:
        runs = Runs(tree)
        events: dict[int, list[Event]] = {}
        try:
            async for event in self._watch(tree):
                if isinstance(event, Delta):
                    continue
                runs.apply(event)
                if event.run in kept:
                    told, view = events.setdefault(event.run, []), runs.runs[event.run]
                    if told:
                        await asyncio.to_thread(self._write, tree, view, event, told)
                    else:  # at once: a reply waits for it
                        self._write(tree, view, event, told)
                    kept[event.run].begun.set()
                    if isinstance(event.body, RunEnded):
                        del events[event.run]
                        await asyncio.to_thread(self._summarise, tree, runs)
                        kept[event.run].ended.set()
        except (OSError, RetinueError) as error:
            _LOG.warning("the files of tree %s cannot be written any more: %s", tree, error)
        finally:
            for run in kept.values():
                run.begun.set()
                run.ended.set()
            self._kept.pop(tree, None)
            self._tasks.pop(tree, None)

    def _write(self, tree: str, run: RunView, event: Event, events: list[Event]) -> None:
        folder = Path(self._state.run_folder(tree, run.number))
        line = encode_event(event) + b"\n"
        live = make_private_folder(folder / "live_logs") / "events.ndjson"
        write_private_file(live, line, append=bool(events))  # a run that resumes after a crash starts its file anew
        events.append(event)
        full = folder / "full_logs"
        if len(events) == 1 or isinstance(event.body, _STATUS_KINDS):
            replace_file(
                make_private_folder(full) / "status.json",
                msgspec.json.format(msgspec.json.encode(status_of(tree, run))),
            )
        if isinstance(event.body, RunEnded):
            replace_file(full / "events.ndjson", b"".join(encode_event(e) + b"\n" for e in events))
            replace_file(full / "transcript.md", format_transcript(events).encode())

    def _summarise(self, tree: str, runs: Runs) -> None:
        views = list(runs.runs.values())
        usage = runs.usage()
        summary = {
            "tree": tree,
            "runs": len(views),
            "ended": sum(view.ended is not None for view in views),
            "tool_calls": sum(view.tool_count for view in views),
            "turns": sum(view.turns for view in views),
            "usage": msgspec.to_builtins(usage),
            "cost": None if any(view.unpriced for view in views) else str(sum(view.cost for view in views)),
        }
        path = make_private_folder(self._state.tree_folder(tree)) / "metrics_summary.json"
        replace_file(path, msgspec.json.format(msgspec.json.encode(summary)))


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
