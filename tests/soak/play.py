"""Playing a case to its end, with a log that can be asked afterwards and an action that can be taken on the way."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import retinue
from retinue import Event, Limits, Result, Retinue
from retinue.core.control import RunHandle
from retinue.core.ports import Clock
from tests.soak.checks import check_no_tasks
from tests.soak.wild import Wild
from tests.soak.witness import KIDS, Tee, Witness

QUIET_TURNS = 200
SECONDS = 150.0  # only ends what hangs

Action = Callable[[Retinue, RunHandle], Coroutine[Any, Any, None]]


@dataclass
class Played:
    """The record of a tree: the events given to the log, the events seen by a watcher, and the events now in the
    log."""

    witness: Witness
    result: Result[Any]
    given: list[Event]
    seen: list[Event]
    held: list[Event]


@dataclass(frozen=True)
class Trip:
    """An action that is taken `turns` turns of the event loop after event number `at`. In a tree that `hangs`, it is
    taken once nothing happens any more, and the primary is cancelled when that is true again."""

    action: Action
    at: int
    turns: int = 0
    hangs: bool = False
    clock: Clock | None = None
    limits: Limits | None = None


async def play(case: Wild, folder: Path, *, durable: bool, trip: Trip | None = None) -> Played:
    """Play the tree to its end. Raise an error with the pending tasks if that takes too long: leaving a Retinue waits
    for its runs."""
    playing = asyncio.create_task(_play(case, folder, durable=durable, trip=trip))
    if not (await asyncio.wait({playing}, timeout=SECONDS))[0]:
        stuck = "\n".join(str(task) for task in asyncio.all_tasks())
        for _ in range(2):  # the second time it stops waiting for what does not end
            playing.cancel()
            await asyncio.wait({playing}, timeout=1)
        raise AssertionError(f"the tree has not ended after {SECONDS:g} s; there is:\n{stuck}")
    return playing.result()


async def _play(case: Wild, folder: Path, *, durable: bool, trip: Trip | None) -> Played:
    before = asyncio.all_tasks()
    clock = None if trip is None else trip.clock
    witness = Witness(case, clock=clock)
    folder.mkdir(exist_ok=True)
    async with retinue.open(
        folder / ".retinue" if durable else None,
        project=folder,
        mode="yes" if case.mode == "yes" else "ask",
        approver=witness.decide if case.mode == "ask" else None,
        limits=case.limits,
        profiles=KIDS,
        clock=clock,
    ) as r:
        r.control.trees.log = tee = Tee(r.control.log)
        if trip is not None:
            tee.at, tee.turns = trip.at, trip.turns
        run = await r.spawn(witness.primary(), "go", limits=None if trip is None else trip.limits)
        if trip is not None:
            tee.action = lambda: trip.action(r, run)
        watching = asyncio.create_task(_watch(run))
        ending = asyncio.create_task(run.result())
        if trip is not None and trip.hangs:
            await _when_quiet(tee, ending, tee.take_action)
            await _when_quiet(tee, ending, lambda: asyncio.ensure_future(run.cancel()))
        result = await ending
        seen = await watching
        held = await r.control.log.read(run.tree)
        tee.action = None  # too late now
        if tee.acting is not None:
            await tee.acting
    await check_no_tasks(before)
    return Played(witness, result, await tee.memory.read(run.tree), seen, held)


async def _watch(run: RunHandle) -> list[Event]:
    return [event async for event in run.events()]


async def _when_quiet(tee: Tee, ending: asyncio.Task[Any], then: Callable[[], Any]) -> None:
    count, quiet = tee.count, 0
    while not ending.done() and quiet < QUIET_TURNS:
        await asyncio.sleep(0)
        quiet = quiet + 1 if tee.count == count else 0
        count = tee.count
    if not ending.done():
        tee.turns = 0
        then()
