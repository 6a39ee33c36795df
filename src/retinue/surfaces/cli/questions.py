"""The questions that wait in all processes of a project, and how one is found by what a person typed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from retinue.control.channel import ControlUnreachable
from retinue.control.client import ControlClient
from retinue.core.approvals import Approval
from retinue.core.errors import ConfigError, NotFound, RetinueError
from retinue.core.events import ApprovalDecided, Event
from retinue.core.ports import LogReader
from retinue.log.reading import iterate_events, wait_for_event
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli.control_clients import find_clients


@dataclass(frozen=True)
class Waiting:
    """A pending question, and the client that answers it."""

    approval: Approval
    digest: str
    client: ControlClient

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.to_builtins(self.approval)
        return {"number": self.number, **fields, "digest": self.digest, "pid": self.client.address.pid}

    @property
    def number(self) -> int:
        return self.approval.number


async def waiting(project: screen.ProjectLog) -> list[Waiting]:
    """Every pending question of every process with a control server, the oldest of each tree first."""
    clients = find_clients(project)
    pending = await asyncio.gather(*map(_ask, clients))
    found = [
        Waiting(approval, approval.digest, client)
        for client, approvals in zip(clients, pending, strict=True)
        for approval in approvals
    ]
    return sorted(found, key=lambda each: (each.approval.tree, each.number))


async def _ask(client: ControlClient) -> list[Approval]:
    try:
        return await client.pending()
    except ControlUnreachable:
        return []  # it closed this moment, and its questions with it
    except RetinueError as error:
        screen.print_warning(f"process {client.address.pid} does not say what it asks: {error}")
        return []


def choose(found: Sequence[Waiting], name: str) -> Waiting:
    """The question with that number or id; what could mean several, or none, is an error that lists what there is."""
    by_id = [each for each in found if each.approval.id == name]
    by_number = [each for each in found if name.isascii() and name.isdigit() and each.number == int(name)]
    matching = by_id or by_number or [each for each in found if each.approval.id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(f"{each.number} ({each.approval.id})" for each in (matching or found)[:10])
    if matching:
        raise ConfigError(f"'{name}' could be any of {listed}: give the id")
    raise NotFound(f"no question '{name}' is waiting; " + (f"there is {listed}" if found else "there is none"))


async def find_decision(log: LogReader, approval: Approval) -> ApprovalDecided | None:
    """Return the decision about a question, if the log has one."""
    async for event in iterate_events(log, approval.tree):
        if isinstance(event.body, ApprovalDecided) and event.body.approval_id == approval.id:
            return event.body
    return None


async def wait_for_decision(log: LogReader, approval: Approval, *, seconds: float) -> ApprovalDecided | None:
    """Return the decision about a question whose answer was just taken: it may not be written yet."""

    def is_decision(event: Event) -> bool:
        return isinstance(event.body, ApprovalDecided) and event.body.approval_id == approval.id

    event = await wait_for_event(log, approval.tree, is_decision, seconds=seconds)
    return event.body if event is not None and isinstance(event.body, ApprovalDecided) else None
