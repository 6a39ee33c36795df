"""`retinue approvals`, `approve` and `deny`: the questions that wait for an answer in all processes of the project."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import msgspec

from retinue.control.client import ControlClient, ControlUnreachable
from retinue.core.approvals import Allow, Approval, Decision, Deny
from retinue.core.errors import ConfigError, NotFound, RetinueError
from retinue.core.events import ApprovalDecided, Event
from retinue.core.ports import LogReader
from retinue.core.rules import explain_missing_rule
from retinue.log.blocks import make_question_spans
from retinue.log.reading import iterate_events, wait_for_event
from retinue.surfaces.cli import output as screen
from retinue.surfaces.cli import prompts
from retinue.surfaces.cli.control_clients import find_clients, who
from retinue.surfaces.printer import safe
from retinue.surfaces.printer.printer import Printer

HEADS = ("NO", "RUN", "AGENT", "QUESTION", "ID")
POLL_SECONDS = 0.3
QUESTION_WIDTH = 60
SCOPES = {
    "run": "also approve this tool for the rest of the run",
    "tool": "also approve this tool in the whole tree",
    "project": "always approve it in this project: adds the rule that `retinue approvals --json` shows to retinue.yaml",
    "pending": "also approve everything else that this run asks now",
}
ID_HELP = "the question's number, its id, or a unique beginning of its id (see `retinue approvals`)"
NO_TERMINAL = "there is no terminal to ask on: look with `retinue approvals ID`, then give --yes"
NO_RULE = "no rule would allow only {what}, because {why}: answer without --project, or with --run or --tool"
KEPT_SECONDS = 5.0
NO_CHANGES: Mapping[str, Any] = MappingProxyType({})


def configure_approvals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", nargs="?", help="show this question in full; its number or id")
    parser.add_argument("--watch", action="store_true", help="also show new questions as they come, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="print one JSON array; with --watch, one object per line")


def execute_approvals(args: argparse.Namespace) -> int:
    """List the questions of this project's runs that wait for an answer.

    Questions are numbered within their tree. If two trees have a question with the same number, use its id. The first
    answer counts, whoever gives it.

    examples:
      retinue approvals                 the questions that wait now
      retinue approvals 2               question 2 in full: the whole command or diff
      retinue approvals --watch         also new ones, each as the terminal would show it
      retinue approve 2
      retinue deny 3 "not in this folder"
      retinue approvals --json | jq -r '.[].id'
    """
    project = screen.open_project_log()
    if args.watch:
        asyncio.run(_watch(project, as_json=args.json))
        return 0
    found = asyncio.run(find_waiting(project))
    if args.id is not None:
        found = [choose_question(found, args.id)]
    if args.json:
        screen.print_json([each.to_json() for each in found])
    elif args.id is not None:
        printer = Printer(sys.stdout)
        printer.show_question(found[0].approval, whole=True)
        printer.check_output()
    elif not found:
        print("Nothing waits for an answer.")
    else:
        print("\n".join(screen.format_table(HEADS, [_make_row(each) for each in found], right=frozenset({"NO"}))))
    return 0


def _make_row(each: Waiting) -> tuple[str, ...]:
    about = each.approval
    question = screen.shorten_to_width(format_question(about), QUESTION_WIDTH)
    return (
        str(about.number),
        f"{about.tree}/{about.run}",
        safe.escape_line(about.agent),
        question,
        safe.escape_line(about.id),
    )


async def _watch(project: screen.ProjectLog, *, as_json: bool) -> None:
    printer = Printer(sys.stdout)
    seen: dict[str, Waiting] = {}
    while True:
        now = {each.approval.id: each for each in await find_waiting(project)}
        for each in [each for name, each in now.items() if name not in seen]:
            if as_json:
                screen.print_json(each.to_json())
                sys.stdout.flush()
            else:
                printer.show_question(each.approval)
                number, name = each.approval.number, f"{each.approval.tree}/{each.approval.run}"
                printer.show_note(f"{number}  {name}: retinue approve {number} · retinue deny {number} REASON")
        for each in [each for name, each in seen.items() if name not in now and not as_json]:
            printer.show_note(f"{each.approval.number}  {await describe_outcome(project.log, each.approval)}")
        seen = now
        printer.check_output()
        await asyncio.sleep(POLL_SECONDS)


def configure_approve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    scope = parser.add_mutually_exclusive_group()
    scope.set_defaults(scope="call")
    for name, words in SCOPES.items():
        scope.add_argument(f"--{name}", dest="scope", action="store_const", const=name, help=words)
    parser.add_argument("--yes", action="store_true", help="answer without showing the question")
    parser.add_argument(
        "--set",
        dest="changes",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        type=_parse_change,
        help="change an argument or fill in a field; a value that is not JSON is text",
    )


def execute_approve(args: argparse.Namespace) -> int:
    """Approve a tool call that waits for an answer.

    Shows the whole question and asks, unless you give --yes. The answer covers this call alone, exactly as it was
    shown, unless an option says more. The first answer counts; if somebody else was faster, the exit code is 1.

    examples:
      retinue approvals
      retinue approve 2
      retinue approve 2 --yes                            after `retinue approvals 2`
      retinue approve 2 --run
      retinue approve 2 --pending
      retinue approve 2 --set name=Ann --set age=41      with other arguments, or a server's form filled in
      retinue approve toje555k2w/3/41
    """
    if args.changes and args.scope in ("pending", "project"):
        raise ConfigError(f"--set is about one call: give it without --{args.scope}")
    if args.scope == "pending":
        return asyncio.run(answer_all_of_run(args.id, Allow(), shown=args.yes))
    return asyncio.run(answer_question(args.id, Allow(scope=args.scope), dict(args.changes), shown=args.yes))


def _parse_change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return name, value


def configure_deny(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", help=ID_HELP)
    parser.add_argument("reason", metavar="REASON", nargs="?", default="", help="the reason, which the model reads")
    parser.add_argument("--pending", action="store_true", help="also deny everything else that this run asks now")


def execute_deny(args: argparse.Namespace) -> int:
    """Deny a tool call that waits for an answer.

    The run continues, and its model reads the reason. The first answer counts; if somebody else was faster, the exit
    code is 1.

    examples:
      retinue deny 2
      retinue deny 2 "use the copy in build/ instead"
      retinue deny 2 "you are going the wrong way" --pending
    """
    give = answer_all_of_run if args.pending else answer_question
    return asyncio.run(give(args.id, Deny(os.fsencode(args.reason).decode("utf-8", "replace"))))


@dataclass(frozen=True)
class Waiting:
    """A pending question, and the client that answers it."""

    approval: Approval
    client: ControlClient

    def to_json(self) -> dict[str, Any]:
        return {**msgspec.to_builtins(self.approval), "pid": self.client.address.pid}


async def find_waiting(project: screen.ProjectLog) -> list[Waiting]:
    """Return every pending question of every process with a control server, the oldest of each tree first."""
    clients = find_clients(project)
    pending = await asyncio.gather(*map(_list_pending, clients))
    found = [
        Waiting(approval, client) for client, approvals in zip(clients, pending, strict=True) for approval in approvals
    ]
    return sorted(found, key=lambda each: (each.approval.tree, each.approval.number))


async def _list_pending(client: ControlClient) -> list[Approval]:
    try:
        return await client.pending()
    except ControlUnreachable:
        return []  # it closed this moment, and its questions with it
    except RetinueError as error:
        screen.print_warning(f"process {client.address.pid} does not answer which questions it asks: {error}")
        return []


def choose_question(found: Sequence[Waiting], name: str) -> Waiting:
    """Return the question with that number or id. Raises an error that lists what there is if several or none fit.

    A number is never the beginning of an id: if its question has been answered, it must not mean another one."""
    if name.isascii() and name.isdigit():
        matching = [each for each in found if each.approval.number == int(name)]
    else:
        matching = [each for each in found if each.approval.id == name]
        matching = matching or [each for each in found if each.approval.id.startswith(name)]
    if len(matching) == 1:
        return matching[0]
    listed = ", ".join(f"{each.approval.number} ({each.approval.id})" for each in (matching or found)[:10])
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

    await wait_for_event(log, approval.tree, is_decision, seconds=seconds)
    return await find_decision(log, approval)


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


async def answer_question(
    name: str, decision: Decision, changes: Mapping[str, Any] = NO_CHANGES, *, shown: bool = False
) -> int:
    """Give the answer, print what became of it and return the exit code. `changes` replace arguments of the call. A
    person who says yes sees the call first, unless it was `shown` to them."""
    project = screen.open_project_log()
    chosen = choose_question(await find_waiting(project), name)
    about = chosen.approval
    if changes:
        decision = msgspec.structs.replace(decision, args={**about.args, **changes})
    if isinstance(decision, Allow) and decision.scope == "project" and not about.rule:
        raise ConfigError(NO_RULE.format(what=format_question(about), why=explain_missing_rule(about.tool, about.args)))
    if isinstance(decision, Allow) and not shown:
        _confirm_questions([chosen])
    return await _give_answer(project.log, chosen, decision)


def _confirm_questions(found: Sequence[Waiting]) -> None:
    """Show questions, all of each, and ask whether to say yes. Raises ConfigError if not."""
    if not prompts.at_terminal():
        raise ConfigError(NO_TERMINAL)
    printer = Printer(sys.stderr)
    for each in found:
        printer.show_question(each.approval, whole=True)
    if not prompts.ask_yes_no(f"approve {'this' if len(found) == 1 else f'these {len(found)}'}?", default=False):
        raise ConfigError("nothing was answered")


async def answer_all_of_run(name: str, decision: Decision, *, shown: bool = False) -> int:
    """Give the same answer to all that the run of a question asks now, each bound to what it is. A person who says yes
    sees them first."""
    project = screen.open_project_log()
    found = await find_waiting(project)
    one = choose_question(found, name).approval
    meant = [each for each in found if (each.approval.tree, each.approval.run) == (one.tree, one.run)]
    if isinstance(decision, Allow) and not shown:
        _confirm_questions(meant)
    return max([await _give_answer(project.log, each, decision) for each in meant])


async def _give_answer(log: LogReader, chosen: Waiting, decision: Decision) -> int:
    about = chosen.approval
    outcome = await chosen.client.answer(about.id, decision, by=who(), digest=about.digest)
    if outcome != "taken":
        what = await describe_outcome(log, about)
        screen.print_error(f"somebody else was first: {format_question(about)} of {about.tree}/{about.run} {what}")
        return 1
    word = "approved" if isinstance(decision, Allow) else "denied"
    print(f"{word} {format_question(about)} of {about.tree}/{about.run}")
    if isinstance(decision, Allow) and decision.scope == "project":
        decided = await wait_for_decision(log, about, seconds=KEPT_SECONDS)
        rules = ", ".join(about.rule.splitlines())
        if decided is None or decided.scope != "project":
            screen.print_warning(f"the answer holds for this call only: the rule {rules} could not be written")
        else:
            print(f"allowed in this project from now on, by the rule in retinue.yaml: {safe.escape_line(rules)}")
    return 0
