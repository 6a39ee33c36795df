"""Rounds go on after a crash at any event: the same answers, one evaluator each, one ending."""

from __future__ import annotations

import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Event, Profile, Rounds
from retinue.core.events import (
    ChecklistAccepted,
    ImprovementsProposed,
    RoundAnswered,
    RoundEvaluated,
    RoundVoted,
    RunEnded,
    RunSpawned,
    ToolCall,
    ToolResult,
    Warned,
    encode_event,
)
from tests.agent.rounds.kit import answer, checklist, evaluator, improve, main, vote, write
from tests.supervisor.tree.kit import bodies, call

SEED, SAMPLE = 20261116, 6
FACTS = (RoundAnswered, RoundEvaluated, ChecklistAccepted, ImprovementsProposed, RoundVoted)
SCRIPTS: dict[str, tuple[list[Any], dict[int, list[Any]]]] = {
    "calls": (
        [
            write("poem.txt", "roses"),
            answer("one"),
            call("get_task_plan"),
            answer("two"),
            checklist(3),
            improve("structural"),
            answer("three"),
            checklist(9),
            vote("agent1.2"),
        ],
        {2: evaluator(), 3: evaluator(tasks=None), 4: ["nothing"]},
    ),
    "words": (["one", "fine", "fine", answer("two")], {2: evaluator()}),
}
LENGTHS = {"calls": 97, "words": 43}


def make_profile(script: str) -> Profile:
    said, evaluators = SCRIPTS[script]
    return main(said, evaluators, workspace="scratch")


async def run_whole(script: str, folder: Path) -> list[Event]:
    async with retinue.open(folder / "whole", mode="yes") as r:
        rounds = Rounds(4 if script == "calls" else 2, criteria=["It runs."])
        run = await r.spawn(make_profile(script), "write a poem", rounds=rounds)
        return [event async for event in run.events()]


async def resume(script: str, folder: Path, before: Sequence[Event]) -> list[Event]:
    """Go on in a new process whose log has just these events, and whose folders have what was written until then."""
    state, tree = folder / "resumed", before[0].tree
    calls = [(str(event.run), event.body.args.get("path")) for event in before if isinstance(event.body, ToolCall)]
    async with retinue.open(state) as r:
        for event in before:
            r.control.log.append(event)
    shutil.copytree(folder / "whole" / "runs", state / "runs", dirs_exist_ok=True)
    for path in state.glob(f"runs/{tree}/*/workspace/*"):
        if (path.parent.parent.name, path.name) not in calls:
            path.unlink()
    async with retinue.open(state, mode="yes") as r:
        run = await r.resume(tree, profiles=[make_profile(script)])
        await run.result()
        return [event async for event in run.events()]


def describe(events: Sequence[Event]) -> list[Any]:
    """The facts of the rounds, without the folders that they name."""
    found = [event.body for event in events if isinstance(event.body, FACTS)]
    return [
        (each.label, each.call_id, each.text, Path(each.snapshot).name) if isinstance(each, RoundAnswered) else each
        for each in found
    ]


def list_moments() -> list[Any]:
    """Every event of both scripts: a few of them always, all in `make soak`."""
    chance = random.Random(SEED)
    moments = []
    for script, length in LENGTHS.items():
        sample = set(chance.sample(range(1, length), SAMPLE))
        for at in range(1, length):
            marks = [] if at in sample else [pytest.mark.soak]
            moments.append(pytest.param(script, at, marks=marks, id=f"{script}-{at}"))
    return moments


@pytest.mark.requirement("MASS-34")
@pytest.mark.parametrize(("script", "at"), list_moments())
async def test_rounds_go_on_from_every_single_event(script: str, at: int, tmp_path: Path) -> None:
    whole = await run_whole(script, tmp_path)
    assert len(whole) == LENGTHS[script], "say so in LENGTHS, or the sweep leaves events out"
    events = await resume(script, tmp_path, whole[:at])
    assert [encode_event(event) for event in events[:at]] == [encode_event(event) for event in whole[:at]]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    assert describe(events) == describe(whole)
    assert events[-1].body.final_response == whole[-1].body.final_response  # type: ignore[union-attr]
    runs = [event.run for event in events if isinstance(event.body, RunSpawned)]
    assert runs == [event.run for event in whole if isinstance(event.body, RunSpawned)]
    assert sorted(event.run for event in events if isinstance(event.body, RunEnded)) == runs
    for run in runs:
        calls = [body.call_id for body in bodies(events, ToolCall, run=run)]
        assert calls == [body.call_id for body in bodies(events, ToolResult, run=run)]
    warned = {body.text.replace("/resumed/", "/whole/") for body in bodies(events, Warned)}
    assert warned == {body.text for body in bodies(whole, Warned)}
