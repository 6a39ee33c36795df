"""Tests of two surfaces that answer each question at once: exactly one wins, and the other learns the winner's name."""

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from retinue.core.approvals import Allow, Deny, QuestionClosed, describe_closing
from retinue.core.control import Control
from retinue.core.events import ApprovalDecided
from retinue.log.questions import find_closing
from tests.control.loopback.kit import serve_supervisor


class Surface:
    """A surface that answers each question after a seeded delay. It records by question if its answer was accepted, and
    how the question was closed."""

    def __init__(self, name: str, control: Control, seed: int) -> None:
        self.name, self._control = name, control
        self._random = random.Random(f"{name} {seed}")
        self.taken: dict[str, bool] = {}
        self.told: dict[str, str] = {}
        self.seen: dict[str, QuestionClosed] = {}

    async def watch(self, rounds: int) -> None:
        async with aclosing(self._control.watch_questions()) as changes, asyncio.TaskGroup() as answers:
            async for change in changes:
                if isinstance(change, QuestionClosed):
                    self.seen[change.id] = change
                    if len(self.seen) == rounds:
                        return
                    continue
                answers.create_task(self._answer(change.id, change.digest, change.tree))

    async def _answer(self, name: str, digest: str, tree: str) -> None:
        for _ in range(self._random.randrange(12)):
            await asyncio.sleep(0)
        decision = Allow() if self._random.random() < 0.5 else Deny(f"no, says {self.name}")
        given = await self._control.answer(name, decision, by=self.name, digest=digest, surface=f"{self.name}'s screen")
        self.taken[name] = given == "taken"
        if given != "taken":
            async with aclosing(self._control.watch(tree)) as events:
                self.told[name] = describe_closing(await find_closing(events, name))


@pytest.mark.parametrize(
    ("seed", "rounds"),
    [(1, 20), pytest.param(2, 200, marks=pytest.mark.soak), pytest.param(3, 200, marks=pytest.mark.soak)],
)
async def test_two_surfaces_answer_at_the_same_moment_and_the_late_one_is_told(
    seed: int, rounds: int, tmp_path: Path
) -> None:
    calls = [{"tools": [{"name": "write", "args": {"path": f"{n}.txt", "content": "x"}}]} for n in range(rounds)]
    async with serve_supervisor(tmp_path) as h:
        surfaces = [Surface("anna", h.client, seed), Surface("bert", h.client, seed)]
        async with asyncio.TaskGroup() as group:
            for surface in surfaces:
                group.create_task(surface.watch(rounds))
            run = h.run({"main": [*calls, "end"]})
        await run.join()
        events = await h.supervisor.log.read(run.ref.tree)
    decided = {event.body.approval_id: event.body for event in events if isinstance(event.body, ApprovalDecided)}
    anna, bert = surfaces
    assert len(decided) == rounds and anna.seen == bert.seen and decided.keys() == anna.seen.keys()
    assert {surface.name for surface in surfaces if any(surface.taken.values())} == {"anna", "bert"}
    for (name, body), number in zip(decided.items(), range(rounds), strict=True):
        winner, late = (anna, bert) if body.by == "anna" else (bert, anna)
        assert (winner.taken.get(name), late.taken.get(name, False)) == (True, False)
        assert (body.surface, anna.seen[name].surface) == (f"{winner.name}'s screen",) * 2
        if name in late.told:  # else the question was gone before it was seen
            word = "approved" if body.allowed else "denied"
            assert late.told[name].startswith(f"{word} by {winner.name} ({winner.name}'s screen) at ")
        assert (tmp_path / f"{number}.txt").exists() is body.allowed
    assert anna.told.keys() | bert.told.keys()
