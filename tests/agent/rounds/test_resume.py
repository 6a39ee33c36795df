"""Rounds go on after a crash at any event: the same answers, one evaluator each, one ending."""

from __future__ import annotations

import json
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
    decode_event,
    encode_event,
)
from tests.agent.rounds.kit import CONFIG, answer, checklist, evaluator, improve, main, vote, write
from tests.supervisor.tree.kit import bodies, call

SEED, SAMPLE = 20261116, 5
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
MEMBER = [*evaluator()[:2], call("new_answer", content="judged"), call("vote", agent_id="agent2", reason="x"), "judged"]
TEAM = {"main": [answer("one"), answer("two")], "agent1": MEMBER, "agent2": MEMBER}
LENGTHS = {"calls": 97, "words": 43, "team": 76}


class Crash:
    """A run of a script up to an event, resumed by a new process. The files are those of the calls written before that
    event."""

    def __init__(self, script: str, folder: Path) -> None:
        self._folder, self._state = folder, folder / ".retinue"
        self._options: dict[str, Any] = {"mode": "yes"}
        self._profiles: list[Profile] = []
        if script == "team":
            (folder / "script.yaml").write_text(json.dumps({"agents": TEAM}))
            (folder / "retinue.yaml").write_text(f"{CONFIG}    round_evaluator_refine: true\n")
            self._options |= {"config": folder / "retinue.yaml", "project": folder}
            self._profile = Profile("main", workspace="scratch")
        else:
            self._profile = main(*SCRIPTS[script], workspace="scratch")
            self._profiles = [self._profile]
        answers = {"calls": 4}.get(script, 2)
        self._rounds = Rounds(answers, criteria=["It runs."], refine=script == "team")

    async def run_whole(self) -> list[Event]:
        async with retinue.open(self._state, **self._options) as r:
            run = await r.spawn(self._profile, "write a poem", rounds=self._rounds)
            events = [event async for event in run.events()]
        shutil.copytree(self._state / "runs", self._folder / "runs")
        shutil.rmtree(self._state)
        return events

    async def resume(self, before: Sequence[Event]) -> list[Event]:
        tree = before[0].tree
        async with retinue.open(self._state) as r:
            for event in before:
                r.control.log.append(event)
        shutil.copytree(self._folder / "runs", self._state / "runs", dirs_exist_ok=True)
        calls = [(str(event.run), event.body.args.get("path")) for event in before if isinstance(event.body, ToolCall)]
        for path in self._state.glob(f"runs/{tree}/*/workspace/*"):
            if (path.parent.parent.name, path.name) not in calls:
                path.unlink()
        async with retinue.open(self._state, **self._options) as r:
            run = await r.resume(tree, profiles=self._profiles)
            await run.result()
            return [event async for event in run.events()]


def encode_again(events: Sequence[Event]) -> list[bytes]:
    """Events as they are when they were read from a log once."""
    return [encode_event(decode_event(encode_event(event))) for event in events]


def list_moments() -> list[Any]:
    """Every event of each script: a few of them always, all in `make soak`."""
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
    crash = Crash(script, tmp_path)
    whole = await crash.run_whole()
    assert len(whole) == LENGTHS[script], "say so in LENGTHS, or the sweep leaves events out"
    events = await crash.resume(whole[:at])
    assert encode_again(events[:at]) == encode_again(whole[:at])
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    for kind in (*FACTS, Warned):
        assert bodies(events, kind) == bodies(whole, kind)
    assert events[-1].body.final_response == whole[-1].body.final_response  # type: ignore[union-attr]
    runs = [event.run for event in events if isinstance(event.body, RunSpawned)]
    assert runs == [event.run for event in whole if isinstance(event.body, RunSpawned)]
    assert sorted(event.run for event in events if isinstance(event.body, RunEnded)) == runs
    for run in runs:
        calls = [body.call_id for body in bodies(events, ToolCall, run=run)]
        assert calls == [body.call_id for body in bodies(events, ToolResult, run=run)]
