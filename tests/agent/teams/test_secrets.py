"""Secrets in what members say: never in the log, and never shown to another member."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from retinue import Team
from retinue.core import secrets
from retinue.core.events import encode_event
from tests.agent.teams.kit import answer, make_members, run_team, vote

KEY = "planted-of-the-team-1"


@pytest.fixture
def key() -> Iterator[str]:
    secrets.hide_secret(KEY)
    yield KEY
    secrets.forget_secret(KEY)


async def test_a_secret_in_an_answer_or_a_vote_is_masked(key: str) -> None:
    members, heard = make_members(
        [answer(f"A {key}"), vote("agent2", key)], [answer("B"), vote("agent2"), {"text": "presented"}]
    )
    _, events = await run_team(Team("t", members=members, strategy="winner_present"))
    assert not [event.kind for event in events if key.encode() in encode_event(event)]
    assert f"A {secrets.HIDDEN}" in heard[1].asked[2]
    assert key not in heard[1].asked[2]
