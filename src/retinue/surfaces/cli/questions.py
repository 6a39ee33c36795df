"""The questions that wait in all processes of a project: found by number or id, shown on a line, answered."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from retinue.control.client import ControlClient, ControlUnreachable
from retinue.core.approvals import Allow, Approval, Decision
from retinue.core.errors import ConfigError, NotFound, RetinueError
from retinue.core.events import ApprovalDecided, Event
from retinue.core.ports import LogReader
from retinue.log.blocks import make_question_spans
from retinue.log.reading import iterate_events, wait_for_event
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import prompts
from retinue.surfaces.cli.control_clients import find_clients, who
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import Printer

ID_HELP = "the question's number or id, as `retinue approvals` lists them, or a unique beginning of its id"
NO_RULE = "no rule says just {what}: answer without --project, or with --run or --tool"
KEPT_SECONDS = 5.0
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


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


async def find_waiting(project: screen.ProjectLog) -> list[Waiting]:
    """Return every pending question of every process with a control server, the oldest of each tree first."""
    clients = find_clients(project)
    pending = await asyncio.gather(*map(_list_pending, clients))
    found = [
        Waiting(approval, approval.digest, client)
        for client, approvals in zip(clients, pending, strict=True)
        for approval in approvals
    ]
    return sorted(found, key=lambda each: (each.approval.tree, each.number))


async def _list_pending(client: ControlClient) -> list[Approval]:
    try:
        return await client.pending()
    except ControlUnreachable:
        return []  # it closed this moment, and its questions with it
    except RetinueError as error:
        screen.print_warning(f"process {client.address.pid} does not say what it asks: {error}")
        return []


def choose_question(found: Sequence[Waiting], name: str) -> Waiting:
    """Return the question with that number or id. Raises an error that lists what there is if several or none fit."""
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


def format_question(approval: Approval) -> str:
    """Return the question on a line: `[label] edit(src/lib.rs)`."""
    spans = make_question_spans(approval.label, approval.tool, approval.args)[1:]
    return safe.escape_line("".join(text for _, text in spans))


async def describe_outcome(log: LogReader, approval: Approval) -> str:
    """Say who decided what about a question that is no longer open."""
    decided = await find_decision(log, approval)
    if decided is None:
        return "no longer needed"
    reason = f": {decided.reason}" if decided.reason else ""
    return f"{'approved' if decided.allowed else 'denied'} by {decided.by or 'somebody'}{reason}"


async def answer_question(name: str, decision: Decision, changes: Mapping[str, Any] = NO_CHANGES) -> int:
    """Give the answer, print what became of it and return the exit code. `changes` replace arguments of the call."""
    project = screen.open_project_log()
    chosen = choose_question(await find_waiting(project), name)
    about = chosen.approval
    if changes:
        decision = msgspec.structs.replace(decision, args={**about.args, **changes})
    if isinstance(decision, Allow) and decision.scope == "project" and not about.rule:
        raise ConfigError(NO_RULE.format(what=format_question(about)))
    return await _give_answer(project.log, chosen, decision)


async def answer_all_of_run(name: str, decision: Decision) -> int:
    """Give the same answer to all that the run of a question asks now, each bound to what it is. A person who says yes
    sees them first."""
    project = screen.open_project_log()
    found = await find_waiting(project)
    one = choose_question(found, name).approval
    meant = [each for each in found if (each.approval.tree, each.approval.run) == (one.tree, one.run)]
    if isinstance(decision, Allow) and prompts.at_terminal():
        printer = Printer(sys.stderr)
        for each in meant:
            printer.show_question(each.approval)
        if not prompts.ask_yes_no(f"yes to {'this' if len(meant) == 1 else f'these {len(meant)}'}?", default=False):
            raise ConfigError("nothing was answered")
    return max([await _give_answer(project.log, each, decision) for each in meant])


async def _give_answer(log: LogReader, chosen: Waiting, decision: Decision) -> int:
    about = chosen.approval
    outcome = await chosen.client.answer(about.id, decision, by=who(), digest=chosen.digest)
    if outcome != "taken":
        what = await describe_outcome(log, about)
        screen.print_error(f"somebody else was first: {format_question(about)} of {about.tree}/{about.run} {what}")
        return 1
    word = "approved" if isinstance(decision, Allow) else "denied"
    print(f"{word} {format_question(about)} of {about.tree}/{about.run}")
    if isinstance(decision, Allow) and decision.scope == "project":
        decided = await wait_for_decision(log, about, seconds=KEPT_SECONDS)
        if decided is None or decided.scope != "project":
            screen.print_warning(f"the answer holds for this call only: the rule {about.rule} could not be written")
        else:
            print(f"allowed in this project from now on, by the rule in retinue.yaml: {safe.escape_line(about.rule)}")
    return 0
