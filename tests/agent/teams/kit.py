"""Short ways to run a scripted team and look at what it did."""

from __future__ import annotations

from typing import Any

import retinue
from retinue import Event, Limits, Profile, Result, Team
from retinue.testing import scripted
from tests.supervisor.tree.kit import call


def answer(content: str) -> dict[str, Any]:
    return call("new_answer", content=content)


def vote(agent: str, reason: str = "it is right") -> dict[str, Any]:
    return call("vote", agent_id=agent, reason=reason)


def team(*members: list[Any], name: str = "reviewers", **fields: Any) -> Team:
    """A team whose members say what is given for each."""
    profiles = [Profile(f"m{n}", model=scripted({f"agent{n}": replies})) for n, replies in enumerate(members, 1)]
    return Team(name, "You review.", members=profiles, **fields)


async def run_team(subject: Team, *, limits: Limits | None = None, **options: Any) -> tuple[Result[Any], list[Event]]:
    options = {"mode": "yes", **options}
    async with retinue.open(**options) as r:
        run = await r.spawn(subject, "review it", limits=limits)
        events = [event async for event in run.events()]
        return await run.result(), events
