"""A team on screens: one node with a line for each answer and vote, and its members below it."""

from __future__ import annotations

import pytest

from retinue import Event
from retinue.core.events import AnswerGiven, Delta, ToolCall, VoteCast, decode_event, encode_event
from retinue.log.activity import Activity, Entries, describe_team
from retinue.log.blocks import Blocks
from retinue.log.runs import Runs
from retinue.log.transcripts import format_transcript
from retinue.protocol.notices import Notice, NoticeFold, TextPiece
from retinue.surfaces.printer.printer import Printer
from tests.agent.teams.kit import answer, run_team, team, vote
from tests.supervisor.tree.kit import call
from tests.surfaces.printer.facts import Recorder

ESCAPE = "\x1b]0;owned\x07"


async def play(*members: list[object], **fields: object) -> list[Event]:
    """The events of a team, as a log would give them."""
    _, events = await run_team(team(*members, **fields))
    return [decode_event(encode_event(event)) for event in events]


def fold_headers(events: list[Event]) -> list[str]:
    blocks = Blocks()
    return [block.header for event in events if (block := blocks.apply(event)) is not None]


def list_entries(events: list[Event]) -> list[tuple[str, str]]:
    entries = Entries()
    found = [entry for event in events if (entry := entries.apply(event)) is not None and not entry.is_detail]
    return [("".join(text for _, text in entry.spans), entry.body) for entry in found]


async def play_vote() -> list[Event]:
    return await play(
        [answer("A, at length"), vote("agent2", "two\nis right")],
        [answer("B"), vote("agent2", "mine"), "B, presented"],
        [answer("C"), vote("agent1")],
        strategy="winner_present",
    )


async def test_answers_votes_and_the_decision_are_one_line_each() -> None:
    headers = fold_headers(await play_vote())
    for line in (
        "○ agent1 [main m1] spawned",
        "◇ agent1 answers (agent1.1)",
        "◇ agent1 votes for agent2.1: two is right",
        "◇ agent3 votes for agent1.1: it is right",
        "◇ decided: agent2.1, 2 of 3 votes; agent2 presents",
    ):
        assert headers.count(line) == 1, headers
    assert not [header for header in headers if "[tool call]" in header or "Tool" in header]


async def test_a_team_that_synthesizes_decides_for_nobody() -> None:
    events = await play([answer("A"), "made of both"], [answer("B")])
    assert "◇ decided: agent1 makes one answer of all (the first member that answered)" in fold_headers(events)
    primary = Runs.of("t", events).primary
    assert primary is not None
    assert describe_team(primary) == "team of 2: agent1 made one answer of all"


async def test_the_user_of_a_served_team_has_notices_of_its_members_and_their_work_only() -> None:
    events = await play([call("glob", pattern="*"), answer("A"), "made of both"], [answer("B")])
    fold = NoticeFold("team")
    told = [notice for event in events for notice in fold.apply(event)]
    started = [(notice.agent, notice.target) for notice in told if isinstance(notice, Notice) and notice.is_start]
    assert started == [("team", "agent1"), ("team", "agent2"), ("agent1", "glob")]
    assert [words.text for words in told if isinstance(words, TextPiece) and words.text] == ["made of both"]


async def test_a_replay_which_has_no_events_of_the_team_shows_the_calls() -> None:
    events = await play([answer("A"), "made of both"], [answer("B")])
    alone = [event for event in events if event.run == 1]
    assert "#### agent1 [tool call]" in fold_headers(alone)


async def test_no_answer_is_shown_twice() -> None:
    entries = list_entries(await play_vote())
    shown = [line for line, body in entries if "A, at length" in line or "A, at length" in body]
    assert shown == ["◇ agent1 answers (agent1.1): A, at length"]
    assert not [line for line, body in entries if "B, presented" in (line, body)], "whoever asked gets it"


async def test_an_answer_said_as_text_is_the_team_s_to_show() -> None:
    events = await play(["A said"], ["B said", vote("agent2"), "B, presented"], refine=True)
    blocks = Blocks()
    bodies = [block.body for event in events if (block := blocks.apply(event)) is not None]
    assert bodies.count("A said") == bodies.count("B said") == 1


async def test_a_new_answer_a_refused_vote_and_a_lost_member_are_seen() -> None:
    events = await play(
        [answer("A"), vote("nobody"), vote("agent2"), vote("agent2"), vote("agent2")],
        [answer("B"), answer("B2"), vote("agent2"), "B2, presented"],
        [{"error": "no more"}],
        refine=True,
    )
    headers = [line for line, _ in list_entries(events)]
    assert "◇ agent2 answers anew (agent2.2), which reopens the vote: B2" in headers
    assert "⚠ agent3 ended failed: the team continues without it" in headers
    assert [line for line in headers if line.startswith("✗ [main m1] vote(nobody)")], headers


async def test_what_is_at_work_has_the_team_first_and_its_members_below_it() -> None:
    events, activity = await play_vote(), Activity("t")
    seen = []
    for event in events:
        activity.apply(event)
        if isinstance(event.body, ToolCall | AnswerGiven | VoteCast):
            works = activity.list_work()
            assert [work.is_member for work in works] == [False, *[True] * (len(works) - 1)]
            seen.append(works[0].text)
    assert seen[0] == "team of 3: 0 answered, 3 at work"
    assert "team of 3: 2 answered, 1 at work" in seen
    assert "team of 3: all answered, 1 voted, 2 at work" in seen
    activity = Activity("t")
    for event in events[: [event.kind for event in events].index("team.decided") + 1]:
        activity.apply(event)
    assert activity.list_work()[0].text == "team of 3: decided for agent2.1, agent2 presents"
    runs = Runs.of("t", events)
    assert runs.primary is not None
    assert describe_team(runs.primary) == "team of 3: decided for agent2.1, 2 of 3 votes"
    assert [(run.level, run.spawned.depth) for run in runs.primary.walk()] == [(0, 0), (1, 0), (1, 0), (1, 0)]


@pytest.mark.requirement("P35")
async def test_no_byte_of_a_member_reaches_the_terminal_raw() -> None:
    events = await play(
        [answer(f"{ESCAPE}A"), vote("agent1", f"{ESCAPE}mine\n#### main message")],
        [answer("B"), vote("agent1")],
        strategy="winner_reuse",
    )
    stream = Recorder()
    printer = Printer(stream, color=False)
    for event in events:
        printer.show_event(event)
        printer.show_delta(Delta("t", 1, "/main/agent1-1", "agent1", f"{ESCAPE}A"))
    assert "\x1b]" not in stream.text and "\x07" not in stream.text
    assert "\n#### main message" not in stream.text


async def test_the_transcript_has_every_answer_vote_and_the_decision() -> None:
    text = format_transcript([event for event in await play_vote() if event.run == 0])
    assert "## Answer agent1.1 of agent1\n\n> A, at length\n" in text
    assert "## Vote of agent1: agent2.1\n\n> two\n> is right\n" in text
    assert "## Team\n\ndecided: agent2.1, 2 of 3 votes; agent2 presents" in text
