"""Stopped at every event, in every way there is: each run still ends once, after its children, with what it spent."""

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from retinue import Limits, Retinue
from retinue.core.control import RunHandle
from retinue.core.limits import SPAWNED_SECONDS
from retinue.testing import ManualClock
from tests.soak.checks import by_run, check_all, plain
from tests.soak.conftest import Note
from tests.soak.play import Played, Trip, play
from tests.soak.wild import Wild, wild

NEVER = 10**9
SECONDS = 5.0
ON_DISK = ("primary", "child", "children one by one", "twice")
IN_MEMORY = (*ON_DISK, "deadline", "children's deadlines")


@dataclass
class Stopper:
    """One way to stop a tree or a part of it, with the answer to the stop."""

    way: str
    random: random.Random
    clock: ManualClock | None = None
    told: int | None = None

    async def __call__(self, r: Retinue, run: RunHandle) -> None:
        stop = r.control.cancel
        tree = r.control.trees.get(run.tree)
        count = 0 if tree is None else len(tree.runs)
        match self.way:
            case "primary":
                self.told = 0 if await run.cancel() else None
                assert not await run.cancel()
            case "child":
                number = self.random.randrange(-1, count + 1)
                self.told = number if await stop(run.tree, number) else None
            case "children one by one":
                for number in self.random.sample(range(1, max(1, count)), max(0, count - 1)):
                    await stop(run.tree, number)
            case "twice":
                self.told = 0 if await run.cancel() else None
                await ManualClock.settle() if self.random.random() < 0.3 else None
                for _ in range(2):
                    if run.tree in r.control.trees:  # the cancel may have ended it meanwhile
                        r.control.trees[run.tree].kill()
            case "deadline":
                assert self.clock is not None
                await self.clock.advance(SECONDS + 1)
            case _:
                assert self.clock is not None
                await self.clock.advance(SPAWNED_SECONDS + 1)

    def check(self, played: Played) -> None:
        ended = {number: own[-1].body for number, own in by_run(played.held).items()}
        statuses: dict[int, Any] = {number: body.status for number, body in ended.items()}  # type: ignore[union-attr]
        if self.told is not None:
            assert statuses[self.told] == "cancelled", statuses
        if "deadline" not in self.way:
            assert "timed_out" not in statuses.values()
        check_all(played.held, played.witness, played.result, stopped=True)
        assert plain(played.seen) == plain(played.held) == plain(played.given)


async def stop_at(case: Wild, folder: Path, at: int, *, durable: bool, ways: tuple[str, ...]) -> Played:
    dice = random.Random(f"stop {case.seed} {at}")
    stopper = Stopper(dice.choice(ways), dice)
    turns = dice.choice((0, 0, 1, 2, 3, 5, 8))
    limits = None
    if "deadline" in stopper.way:
        stopper.clock = ManualClock()
        limits = Limits(seconds=SECONDS) if stopper.way == "deadline" else None
    trip = Trip(stopper, at, turns, hangs=not durable, clock=stopper.clock, limits=limits)
    try:
        played = await play(case, folder, durable=durable, trip=trip)
        stopper.check(played)
    except BaseException as error:
        error.add_note(f"seed {case.seed}, {stopper.way} stopped {turns} turns after event {at}, durable={durable}")
        raise
    return played


async def sweep(seed: int, folder: Path, note: Note, *, durable: bool, part: range, size: int) -> None:
    """Play the tree once for each of these events of an undisturbed play, and stop it there."""
    case = wild(seed, size=size, hangs=not durable)
    ways = ON_DISK if durable else IN_MEMORY
    whole = len((await stop_at(case, folder / "whole", NEVER, durable=durable, ways=("primary",))).held)
    for at in range(part.start, whole + 1, part.step):
        played = await stop_at(case, folder / f"{at}", at, durable=durable, ways=ways)
        note(stops=1, runs=len(by_run(played.held)), events=len(played.held))


def parts(count: int) -> list[range]:
    """All places there are, dealt out to that many tests."""
    return [range(1 + first, 10_000, count) for first in range(count)]


@pytest.mark.parametrize("seed", range(4))
async def test_a_tree_stopped_anywhere_ends_whole(seed: int, tmp_path: Path, note: Note) -> None:
    await sweep(seed, tmp_path, note, durable=False, part=parts(9)[seed], size=12)


@pytest.mark.parametrize("seed", range(2))
async def test_a_durable_tree_stopped_anywhere_ends_whole(seed: int, tmp_path: Path, note: Note) -> None:
    await sweep(seed, tmp_path, note, durable=True, part=parts(15)[seed], size=12)


@pytest.mark.soak
@pytest.mark.parametrize("part", parts(4), ids=lambda part: f"from {part[0]}")
@pytest.mark.parametrize("seed", range(1000, 1030))
async def test_trees_stopped_at_every_event_end_whole(seed: int, part: range, tmp_path: Path, note: Note) -> None:
    await sweep(seed, tmp_path, note, durable=False, part=part, size=10)


@pytest.mark.soak
@pytest.mark.parametrize("part", parts(4), ids=lambda part: f"from {part[0]}")
@pytest.mark.parametrize("seed", range(2000, 2010))
async def test_durable_trees_stopped_at_every_event_end_whole(
    seed: int, part: range, tmp_path: Path, note: Note
) -> None:
    await sweep(seed, tmp_path, note, durable=True, part=part, size=8)
