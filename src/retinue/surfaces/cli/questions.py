"""The pending questions of all processes of the project, for the commands that list, show and answer them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from retinue.build.servers import connect_to_server
from retinue.control.address_files import find_addresses
from retinue.core.approvals import Allow, Answered, Approval, Decision, QuestionClosed, describe_closing
from retinue.core.control import Control
from retinue.core.errors import Ambiguous, ControlUnreachable, NotFound, ReplyTimeout, RetinueError
from retinue.core.events import ApprovalDecided, Event
from retinue.core.ports import LogReader
from retinue.log.lookup import MOST_CANDIDATES, describe_origin
from retinue.log.questions import find_closing, find_question
from retinue.log.reading import follow_events, iterate_events, wait_for_event
from retinue.surfaces.cli import output
from retinue.surfaces.cli.control_clients import describe_user, report_silence
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import format_question

WRITTEN_SECONDS = 5.0
NOT_KEPT = "the answer holds for this call only: the rule {rules} could not be written"
UNKNOWN_QUESTIONS = "process {pid} does not answer, so it is not known what it asks (stopped? `fg` lets it go on)"
KEPT = "allowed in this project from now on, by the rule in retinue.yaml: {rules}"


@dataclass(frozen=True)
class PendingQuestion:
    """A pending question, and the id and the Control of the process that asks it."""

    approval: Approval
    pid: int
    control: Control

    def to_json(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self.approval), "pid": self.pid}


# Finding


async def find_waiting(project: output.ProjectLog) -> list[PendingQuestion]:
    """Return every pending question of every process with a control server, the oldest of each tree first.

    Prints a warning for each process that does not reply in time. Raises ReplyTimeout if there is such a process and no
    question of another one, because then nobody knows whether anything waits."""
    found = find_addresses(project.state)
    return await list_questions([(address.pid, connect_to_server(address)) for address in found])


async def list_questions(processes: Sequence[tuple[int, Control]]) -> list[PendingQuestion]:
    """Do as `find_waiting`, for these processes, given by their ids and Controls."""
    pending = await asyncio.gather(*(_list_pending(pid, control) for pid, control in processes))
    listed = list(zip(processes, pending, strict=True))
    found = [
        PendingQuestion(approval, pid, control) for (pid, control), approvals in listed for approval in approvals or ()
    ]
    silent = [UNKNOWN_QUESTIONS.format(pid=pid) for (pid, _), approvals in listed if approvals is None]
    if silent and not found:
        raise ReplyTimeout("; ".join(silent))
    for text in silent:
        output.print_warning(text)
    return sorted(found, key=lambda each: (each.approval.tree, each.approval.number))


async def _list_pending(pid: int, control: Control) -> list[Approval] | None:
    """Return the pending questions of one process, or None if it does not reply in time."""
    try:
        with report_silence(f"process {pid}"):
            return await control.pending()
    except ReplyTimeout:
        return None
    except ControlUnreachable:
        return []  # the process has just ended, and its questions with it
    except RetinueError as error:
        output.print_warning(f"process {pid} does not answer which questions it asks: {error}")
        return []


def match_questions(found: Sequence[PendingQuestion], name: str) -> list[PendingQuestion]:
    """Return the questions whose number is `name`, or whose id is or begins with `name`.

    A number never matches the beginning of an id, or it could mean another question once its own is answered."""
    if is_number(name):
        return [each for each in found if each.approval.number == int(name)]
    exact = [each for each in found if each.approval.id == name]
    return exact or [each for each in found if each.approval.id.startswith(name)]


def is_number(name: str) -> bool:
    """Return True if `name` is the number of a question and not an id."""
    return name.isascii() and name.isdigit()


async def choose_or_explain(project: output.ProjectLog, found: Sequence[PendingQuestion], name: str) -> PendingQuestion:
    """Return the one question with the number or id `name`.

    Raises Ambiguous if there are several, listing each with the time and task of its tree, and NotFound if there is
    none. If the question was answered already, the error says by whom."""
    matching = match_questions(found, name)
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise Ambiguous(name, await _list_candidates(project.log, matching[:MOST_CANDIDATES]))
    listed = ", ".join(f"{each.approval.number} ({each.approval.id})" for each in found[:MOST_CANDIDATES])
    error = f"no question '{name}' is waiting; " + (f"there is {listed}" if found else "there is none")
    answered = await _find_answered(project, name)
    if answered is None:
        raise NotFound(error)
    approval, closed = answered
    what = f"{format_question(approval)} of {closed.id.rpartition('/')[0]}"
    raise NotFound(f"too late: {what} was {describe_closing(closed)}; {error}")


async def _list_candidates(log: LogReader, found: Sequence[PendingQuestion]) -> list[str]:
    """Describe each question by its id, its call, and the time and task of its tree."""
    trees = list(dict.fromkeys(each.approval.tree for each in found))
    origins = {run.first.tree: describe_origin(run) for run in await log.read_runs(trees) if run.first.run == 0}
    return [
        f"{about.id} ({format_question(about)}) of {origins.get(about.tree, 'an unknown tree')}"
        for about in (each.approval for each in found)
    ]


async def _find_answered(project: output.ProjectLog, name: str) -> tuple[Approval, QuestionClosed] | None:
    """Return an answered question and its closing by id, or by number if exactly one tree is live. Else None."""
    trees = [name.partition("/")[0]]
    if is_number(name):
        listed = [stored.tree for stored in await project.log.list_trees(only="live")]
        trees = listed if len(listed) == 1 else []
    for tree in trees:
        asked = await find_question(iterate_events(project.log, tree), name)
        if asked is not None:
            closed = await find_closing(iterate_events(project.log, tree), asked.id)
            return None if closed.allowed is None else (asked, closed)
    return None


# Answering


async def describe_outcome(log: LogReader, approval: Approval) -> str:
    """Describe the outcome of a closed question: who decided, where and when.

    Waits for the event in the log: an answer takes effect before its event is written."""
    closed = QuestionClosed(approval.id)
    with suppress(TimeoutError):
        async with asyncio.timeout(WRITTEN_SECONDS), aclosing(follow_events(log, approval.tree)) as events:
            closed = await find_closing(events, approval.id)
    return describe_closing(closed)


async def send_answer(
    project: output.ProjectLog, chosen: PendingQuestion, decision: Decision, *, surface: str
) -> Answered:
    """Send an answer to the process that asks. If the process is gone, read from the log whose answer it took."""
    about, key = chosen.approval, secrets.token_hex(16)
    try:
        with report_silence(f"process {chosen.pid}"):
            return await chosen.control.answer(
                about.id, decision, by=describe_user(), digest=about.digest, surface=surface, key=key
            )
    except ControlUnreachable:
        closed = await find_closing(iterate_events(project.log, about.tree), about.id)
        if closed.allowed is None:
            raise
        return "taken" if closed.key == key else "stale"


async def give_answer(project: output.ProjectLog, chosen: PendingQuestion, decision: Decision, *, surface: str) -> bool:
    """Send an answer and print the outcome. Return False if another answer came first."""
    about = chosen.approval
    if await send_answer(project, chosen, decision, surface=surface) != "taken":
        what = await describe_outcome(project.log, about)
        output.print_error(f"somebody else was first: {format_question(about)} of {about.tree}/{about.run} {what}")
        return False
    word = "approved" if isinstance(decision, Allow) else "denied"
    print(f"{word} {format_question(about)} of {about.tree}/{about.run}")
    if isinstance(decision, Allow) and decision.scope == "project":
        if await is_rule_kept(project.log, about):
            print(KEPT.format(rules=format_rules(about)))
            async for other in spread_rule(project, chosen, surface=surface):
                print(f"approved {format_question(other)} of {other.tree}/{other.run}, by the same rule")
        else:
            output.print_warning(NOT_KEPT.format(rules=format_rules(about)))
    return True


def format_rules(approval: Approval) -> str:
    return safe.escape_line(", ".join(approval.rule.splitlines()))


async def is_rule_kept(log: LogReader, approval: Approval) -> bool:
    """Return True if an answer with the scope `project` has written its rule. Waits for the event in the log."""

    def is_decision(event: Event) -> bool:
        return isinstance(event.body, ApprovalDecided) and event.body.approval_id == approval.id

    event = await wait_for_event(log, approval.tree, is_decision, seconds=WRITTEN_SECONDS)
    return event is not None and isinstance(event.body, ApprovalDecided) and event.body.scope == "project"


async def spread_rule(
    project: output.ProjectLog, answered: PendingQuestion, *, surface: str
) -> AsyncIterator[Approval]:
    """Give the same answer to pending questions of other processes that have the same rule, and yield these questions.

    The other processes would read the new rule only at their next start."""
    rule = answered.approval.rule
    try:
        found = await find_waiting(project)
    except ReplyTimeout:
        return  # it reads the rule when it starts again
    for each in found:
        about = each.approval
        if each.control.writer == answered.control.writer or about.rule != rule:
            continue
        try:
            outcome = await send_answer(project, each, Allow("project"), surface=surface)
        except ControlUnreachable:
            continue  # the process has just ended
        if outcome == "taken":
            yield about
