"""A team after kill -9 at any event: the same answers, no vote twice, one ending each."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from retinue.core.events import AnswerGiven, Event, RunEnded, TeamDecided, ToolCall, ToolResult, VoteCast, Warned
from tests.agent.teams.kit import answer, team, vote
from tests.crash.test_library import Crash
from tests.supervisor.tree.kit import bodies

QUICK = team([answer("A"), "made of A and B"], [answer("B")])
PRESENTED = team(
    [answer("A"), vote("agent2")],
    [answer("B"), vote("agent2"), "B, presented"],
    [answer("C"), vote("agent1")],
    strategy="winner_present",
)
REUSED = team([answer("A"), vote("agent2")], [answer("B"), vote("agent1")], strategy="winner_reuse")
REFINED = team(
    [answer("A"), vote("agent2"), vote("agent2"), vote("agent2")],
    [answer("B"), answer("B2"), vote("agent2"), "B2, presented"],
    refine=True,
)
IN_TEXT = team(["A", "I like B", vote("agent2")], ["B", vote("agent2"), "B, presented"], refine=True)
FAILED = team([{"error": "no"}], [answer("B"), "B alone"])
TEAMS = {
    "quick": (QUICK, "made of A and B"),
    "presented": (PRESENTED, "B, presented"),
    "reused": (REUSED, "A"),
    "refined": (REFINED, "B2, presented"),
    "in text": (IN_TEXT, "B, presented"),
    "failed": (FAILED, "B alone"),
}


def summarize(events: list[Event]) -> dict[str, Any]:
    """The answers and votes that count, and the endings of a team."""
    return {
        "answers": sorted((each.label, each.text) for each in bodies(events, AnswerGiven)),
        "endings": sorted((e.run, e.body.status) for e in events if isinstance(e.body, RunEnded)),
        "decided": len(bodies(events, TeamDecided)),
    }


@pytest.mark.parametrize("name", TEAMS)
async def test_a_team_goes_on_after_a_crash(name: str) -> None:
    """At five events of each, other ones for each; the soak has them all."""
    await _check_cuts(name, lambda count: random.Random(name).sample(range(1, count), 5))


@pytest.mark.soak
@pytest.mark.parametrize("name", TEAMS)
async def test_a_team_goes_on_from_every_single_event(name: str) -> None:
    await _check_cuts(name, lambda count: range(1, count))


async def _check_cuts(name: str, choose: Callable[[int], Sequence[int]]) -> None:
    subject, final = TEAMS[name]
    crash = Crash(subject)
    whole = await crash.events()
    assert whole[-1].body.final_response == final
    for cut in choose(len(whole)):
        await _check_resumed(crash, whole, cut)


async def _check_resumed(crash: Crash, whole: list[Event], cut: int) -> None:
    before = whole[:cut]
    _, events = await crash.goes_on(before)
    assert events[:cut] == before
    assert summarize(events) == summarize(whole), cut
    assert events[-1].body.final_response == whole[-1].body.final_response, cut
    votes = [(vote.member_run, vote.call_id) for vote in bodies(events, VoteCast)]
    assert len(votes) == len(set(votes)), cut
    assert bodies(events, TeamDecided)[0].votes == bodies(whole, TeamDecided)[0].votes, cut
    for number in {event.run for event in events}:
        calls = [body.call_id for body in bodies(events, ToolCall, run=number)]
        assert sorted(calls) == sorted(body.call_id for body in bodies(events, ToolResult, run=number)), cut


async def test_a_crash_before_the_ending_repeats_no_warning() -> None:
    crash = Crash(FAILED)
    whole = await crash.events()
    cut = max(place for place, event in enumerate(whole, 1) if isinstance(event.body, Warned))
    _, events = await crash.goes_on(whole[:cut])
    assert [each.text for each in bodies(events, Warned)] == ["agent1 (failed) gave no answer that counts"]
