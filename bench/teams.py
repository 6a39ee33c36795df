"""Benchmark of a team of five against its slowest member and its presenter."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import retinue
from bench.table import Row, compare, time_run
from retinue import Profile, Team
from retinue.testing import scripted

MEMBERS = 5
DELAY = 0.05  # of each model call
ROUNDS = 5


@retinue.tool(tier="observe")
async def look() -> str:
    """Take no time, so that all of it is the model's and ours."""
    return "nothing"


def think(name: str, **args: Any) -> dict[str, Any]:
    return {"tools": [{"name": name, "args": args}], "delay": DELAY}


def work(calls: int) -> list[dict[str, Any]]:
    """Replies of a member that looks around `calls` times before it answers."""
    return [think("look") for _ in range(calls)]


def make_team(*, votes: bool) -> Team:
    """Return a team whose members have 1 to 5 calls of work, then an answer, a vote if they vote, and the last text."""
    vote = [think("vote", agent_id="agent1", reason="it is right")] if votes else []
    last = [{"text": "the answer", "delay": DELAY}]
    members = [
        Profile(
            f"m{number}",
            model=scripted({f"agent{number}": [*work(number), think("new_answer", content="x"), *vote, *last]}),
        )
        for number in range(1, MEMBERS + 1)
    ]
    return Team("team", members=members, strategy="winner_present" if votes else "synthesize", tools=[look])


def make_agent(*, votes: bool) -> Profile:
    """Return one agent with as many model calls as the slowest member and the presenter."""
    calls = work(MEMBERS + 1 + votes)  # its answer and its vote are calls too
    return Profile("one", model=scripted({"one": [*calls, {"text": "x", "delay": DELAY}]}), tools=[look])


def rows() -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:

        async def run(profile: Profile) -> None:
            async with retinue.open(Path(folder), mode="yes", project=Path(folder)) as r:
                result = await r.run(profile, "go")
                assert result.success, result.error_details

        def measure(profile: Profile) -> float:
            return time_run(lambda: run(profile))

        for what, votes in (("quick", False), ("with a vote", True)):
            team, agent = partial(measure, make_team(votes=votes)), partial(measure, make_agent(votes=votes))
            seconds, ratio = compare(team, agent, rounds=ROUNDS)
            named = f"team of {MEMBERS}, {what}, beside its slowest member and its presenter"
            yield Row(named, f"{seconds * 1e3:.0f} ms", ratio, 1.3)
