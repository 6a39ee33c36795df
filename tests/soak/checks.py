"""Invariants of every tree, from reliability.md, as far as a log and a model can show them."""

from __future__ import annotations

import asyncio
import gc
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from retinue import Event, Result
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Message,
    RunEnded,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    TurnStarted,
    encode_event,
)
from retinue.core.results import STATUSES
from retinue.core.usage import NO_USAGE
from retinue.log.runs import RunCounts, Runs
from retinue.log.threads import fold_thread
from tests.soak.witness import Asked, Witness

FAULTS = {"refuse": "refused", "error": "failed", "crash": "failed", "cut": "disconnected", "hang": None}
APPROVER_BROKE = "the approver failed: RuntimeError: the approver broke"

THREAD_SECONDS = 100.0


def by_run(events: Sequence[Event]) -> dict[int, list[Event]]:
    runs: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        runs[event.run].append(event)
    return runs


def check_order(events: Sequence[Event]) -> None:
    """I1, I2, I3: every event once and in its place; every run begins once, ends once, and is silent afterwards."""
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert len({event.tree for event in events}) == 1
    for number, own in by_run(events).items():
        kinds = [event.kind for event in own]
        assert kinds[0] == "run.spawned" and kinds.count("run.spawned") == 1, (number, kinds)
        assert kinds[-1] == "run.ended" and kinds.count("run.ended") == 1, (number, kinds)
        assert kinds.count("run.started") <= 1, (number, kinds)
        turns = [event.body.turn for event in own if isinstance(event.body, TurnStarted)]
        assert turns == list(range(1, len(turns) + 1)), (number, turns)
        assert own[-1].body.status in STATUSES  # type: ignore[union-attr]
    assert events[-1].run == 0


def check_calls(events: Sequence[Event]) -> None:
    """I5, I6: a call has at most one result, and exactly one if its run is done. A question has at most one answer."""
    for number, own in by_run(events).items():
        calls = [event.body.call_id for event in own if isinstance(event.body, ToolCall)]
        results = [event.body.call_id for event in own if isinstance(event.body, ToolResult)]
        assert len(set(calls)) == len(calls) and len(set(results)) == len(results), number
        assert set(results) <= set(calls), number
        if own[-1].body.status == "done":  # type: ignore[union-attr]
            assert set(results) == set(calls), number
    asked = Counter(event.body.approval_id for event in events if isinstance(event.body, ApprovalAsked))
    decided = Counter(event.body.approval_id for event in events if isinstance(event.body, ApprovalDecided))
    assert set(asked.values()) <= {1} and set(decided.values()) <= {1} and set(decided) <= set(asked)


def check_families(events: Sequence[Event], *, depth: int) -> None:
    """Children live inside their parents; depth, paths and labels are the registry's."""
    spawned = {event.run: event for event in events if isinstance(event.body, RunSpawned)}
    started = {event.run: event.seq for event in events if isinstance(event.body, RunStarted)}
    ended = {event.run: event.seq for event in events if isinstance(event.body, RunEnded)}
    asked = {(event.run, event.body.call_id): event.seq for event in events if isinstance(event.body, ToolCall)}
    answered = {(event.run, event.body.call_id): event.seq for event in events if isinstance(event.body, ToolResult)}
    labels = Counter(event.body.label for event in spawned.values())  # type: ignore[union-attr]
    assert set(labels.values()) == {1}, labels
    for number, event in spawned.items():
        body = event.body
        assert isinstance(body, RunSpawned)
        assert body.depth <= depth
        if body.parent is None:
            assert (number, body.depth, event.path) == (0, 0, "/main")
            continue
        above = spawned[body.parent]
        assert body.depth == above.body.depth + 1  # type: ignore[union-attr]
        assert event.path == f"{above.path}/{event.agent}-{number}"
        assert started[body.parent] < event.seq < ended[number] < ended[body.parent]
        call = (body.parent, body.call_id)
        assert asked[call] < event.seq
        if call in answered and not body.background:
            assert ended[number] < answered[call]


def check_folds(events: Sequence[Event], result: Result[Any]) -> None:
    """The log alone says what the live tree says."""
    runs = Runs.of(events[0].tree, events)
    assert runs.primary is not None
    folded = runs.primary.result(events[0].tree)
    assert msgspec.structs.replace(result, parse=msgspec.UNSET) == folded
    assert result.total_usage == runs.usage()
    assert runs.counts() == RunCounts(primary=1, finished=len(runs.runs) - 1)
    assert all(run.state in STATUSES and not run.calls and not run.approvals for run in runs.runs.values())
    assert _count(result) == len(runs.runs)


def _count(result: Result[Any]) -> int:
    return 1 + sum(_count(child) for child in result.children)


def check_usage(events: Sequence[Event], witness: Witness) -> None:
    """Every run was charged what the script says of the replies it got, no more and no less."""
    for number, view in Runs.of(events[0].tree, events).runs.items():
        assert view.usage == witness.spent.get(number, NO_USAGE), view.path


def check_threads(events: Sequence[Event], witness: Witness) -> None:
    """Check that the thread in the log is the thread that the model saw, turn by turn."""
    runs = by_run(events)
    asked: dict[int, list[Asked]] = defaultdict(list)
    for one in witness.asked:
        asked[one.ref.run].append(one)
    for number, calls in asked.items():
        assert [one.turn for one in calls] == list(range(1, len(calls) + 1))
        own = runs[number]
        starts = {event.body.turn: place for place, event in enumerate(own) if isinstance(event.body, TurnStarted)}
        assert list(starts) == [one.turn for one in calls]
        for one in calls:
            assert fold_thread(own[: starts[one.turn] + 1], number) == one.thread, (one.ref.path, one.turn)


def check_endings(events: Sequence[Event], witness: Witness, *, stopped: bool = False) -> None:
    """Check that undisturbed runs ended as their script says. `stopped` means that some runs were stopped."""
    last = {one.ref.run: one for one in witness.asked}
    limit = witness.case.limits.turns
    background = {event.run for event in events if isinstance(event.body, RunSpawned) and event.body.background}
    parents = {event.run: event.body.parent for event in events if isinstance(event.body, RunSpawned)}
    broken = {
        event.run
        for event in events
        if isinstance(event.body, RunEnded) and event.body.final_response == APPROVER_BROKE
    }
    said_last: dict[int, str] = {}
    replies: dict[int, list[str]] = defaultdict(list)
    for event in events:
        if isinstance(event.body, Message):
            said_last[event.run] = event.body.text
            replies[event.run] += [event.body.text] if event.body.final else []
        if not isinstance(event.body, RunEnded):
            continue
        if event.body.status not in ("done", "disconnected"):
            newest = said_last.get(event.run, "")
            words = replies[event.run] if newest in replies[event.run][-1:] else [*replies[event.run], newest]
            assert event.body.partial.endswith(newest), event
            assert "\n\n".join(words).endswith(event.body.partial), event  # of several replies none is left out
        status, run, said = event.body.status, event.run, last[event.run].reply if event.run in last else {}
        if re.match(r"(\w+|model provider) panicked", event.body.final_response):
            assert "crash" in said, event
        if status in ("cancelled", "timed_out"):
            above = run
            # Only what runs behind its parent's back, or below a run that its approver failed.
            while above not in background | broken and above != 0 and not stopped:
                above = parents[above]  # type: ignore[assignment]
            assert stopped or above != 0 or 0 in broken or witness.case.mode == "nobody", event
            continue
        if run in broken:
            assert status == "failed", event
            continue
        fault = next((FAULTS[key] for key in FAULTS if key in said), None)
        if fault is not None:
            assert status == fault, event
        elif limit is not None and last[run].turn == limit:
            assert status in ("limited", "done", "failed"), event
        else:
            assert status == "done" or event.agent == "typed" or witness.case.mode == "nobody", event


def check_slots(witness: Witness) -> None:
    """No more runs than may asked a model, or ran a tool of their own, at the same time."""
    limit = witness.case.limits.concurrent
    if isinstance(limit, int):
        assert witness.most_asking <= limit, f"{witness.most_asking} model calls at once, {limit} may be"
        assert witness.most_busy <= limit, f"{witness.most_busy} runs worked at once, {limit} may"
    assert not witness.busy


def check_questions(events: Sequence[Event], witness: Witness) -> None:
    """Nothing dangerous happened unasked, or more often than somebody said yes."""
    assert set(witness.questions.values()) <= {1}
    if witness.case.mode == "nobody":
        assert not witness.effects
    if witness.case.mode == "ask":
        paths = {event.run: event.path for event in events}
        yes = Counter(
            paths[event.run]
            for event in events
            if isinstance(event.body, ApprovalDecided) and event.body.approval_id in witness.allowed
        )
        assert not witness.effects - yes


def check_all(events: Sequence[Event], witness: Witness, result: Result[Any], *, stopped: bool = False) -> None:
    check_order(events)
    check_calls(events)
    check_families(events, depth=witness.case.limits.depth)  # type: ignore[arg-type]
    check_folds(events, result)
    check_usage(events, witness)
    check_threads(events, witness)
    check_endings(events, witness, stopped=stopped)
    check_slots(witness)
    check_questions(events, witness)


def check_files(events: Sequence[Event], state: Path) -> int:
    """The files a reply of `spawn_subagents` names say what the log says; how many runs have them."""
    found = 0
    for number, own in by_run(events).items():
        folder = state / "runs" / own[0].tree / str(number) / "full_logs"
        if not (folder / "status.json").exists():
            continue
        found += 1
        lines = (folder / "events.ndjson").read_bytes().splitlines()
        assert lines == [encode_event(event) for event in own]
        assert msgspec.json.decode((folder / "status.json").read_bytes())["status"] == own[-1].body.status  # type: ignore[union-attr]
    return found


def plain(events: Sequence[Event]) -> list[bytes]:
    """Events as they stand in a file, so that two logs can be compared."""
    return [encode_event(event) for event in events]


async def check_no_tasks(before: set[asyncio.Task[Any]]) -> None:
    """Nothing that was started here still runs, a few turns of the loop after everything was closed.

    Only a thread may need some time: a call that is cancelled twice does not wait for it."""
    for _ in range(100):
        await asyncio.sleep(0)
    left = asyncio.all_tasks() - before
    threads = {task for task in left if getattr(task.get_coro(), "__name__", "") == "to_thread"}
    assert left == threads, f"still running: {left - threads}"
    if threads:
        _, left = await asyncio.wait(threads, timeout=THREAD_SECONDS)
        assert not left, f"still running: {left}"


async def check_nothing_left(left: Mapping[str, Callable[[], Any]]) -> None:
    """Check that each function, named by its fault, finds nothing more. The thread of a cancelled call may keep its
    objects for a moment."""
    deadline = time.monotonic() + THREAD_SECONDS
    gc.collect()
    for fault, find in left.items():
        while find():
            assert time.monotonic() < deadline, f"{fault}: {find()}"
            await asyncio.sleep(0.01)
