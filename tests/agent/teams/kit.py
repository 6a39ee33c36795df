"""Short ways to run a scripted team and look at what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import retinue
from retinue import Event, Limits, Profile, Result, Team
from retinue.core.messages import Reply, Request
from retinue.testing import scripted
from tests.supervisor.tree.kit import call


def answer(content: str) -> dict[str, Any]:
    return call("new_answer", content=content)


def vote(agent: str, reason: str = "it is right") -> dict[str, Any]:
    return call("vote", agent_id=agent, reason=reason)


class Heard:
    """A scripted model that records the texts of each request, by turn."""

    def __init__(self, agent: str, replies: list[Any], name: str) -> None:
        self._model = scripted({agent: replies}, strict=True)
        self.name = name
        self.asked: dict[int, str] = {}

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        self.asked[request.turn] = "\n".join([request.system, *(turn.text for turn in request.thread)])
        return await self._model.complete(request, on_delta)


def make_members(*members: list[Any], **fields: Any) -> tuple[list[Profile], list[Heard]]:
    """The members of a team, which say what is given for each, and what each was asked."""
    heard = [Heard(f"agent{n}", replies, f"secret-model-{n}") for n, replies in enumerate(members, 1)]
    return [Profile(f"m{n}", model=model, **fields) for n, model in enumerate(heard, 1)], heard


def team(*members: list[Any], name: str = "reviewers", **fields: Any) -> Team:
    """A team whose members say what is given for each."""
    return Team(name, "You review.", members=make_members(*members)[0], **fields)


async def run_team(subject: Team, *, limits: Limits | None = None, **options: Any) -> tuple[Result[Any], list[Event]]:
    options = {"mode": "yes", **options}
    async with retinue.open(**options) as r:
        run = await r.spawn(subject, "review it", limits=limits)
        events = [event async for event in run.events()]
        return await run.result(), events
