"""`retinue approvals`, `approve` and `deny`: the pending questions of all processes of the project.

`--watch` shows every question when it is asked. At a terminal the user can answer there, just as at the terminal of the
run: with one key in the question panel of the live view, or line by line if the terminal cannot draw. While `--watch`
is open at a terminal it counts as an approver, so runs without a terminal wait for an answer. Leaving it answers
nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Any

import msgspec

from retinue.build.servers import connect_to_server
from retinue.concurrency import TaskOwner
from retinue.control.address_files import find_addresses
from retinue.core.approvals import Allow, Approval, Decision, Deny, QuestionClosed, describe_closing
from retinue.core.control import Control
from retinue.core.errors import ApproverLeft, ConfigError, NotFound, RetinueError
from retinue.core.rules import explain_missing_rule
from retinue.surfaces.cli import output, prompts
from retinue.surfaces.cli.questions import (
    KEPT,
    NOT_KEPT,
    PendingQuestion,
    choose_or_explain,
    describe_outcome,
    find_waiting,
    format_rules,
    give_answer,
    is_number,
    is_rule_kept,
    send_answer,
    spread_rule,
)
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.approver import TerminalApprover
from retinue.surfaces.printer.keys import Key, Paste
from retinue.surfaces.printer.printer import Printer, format_question
from retinue.surfaces.printer.question_panel import QuestionPanel
from retinue.surfaces.printer.screen import BottomArea, Line, Screen
from retinue.surfaces.printer.terminal import Terminal, can_draw

EMPTY = "No question waits. New ones appear here; Ctrl-C leaves, and answers nothing."
WAITING = "Ctrl-C leaves, and answers nothing."
SURFACE = "retinue approvals --watch"
POLL_SECONDS = 0.1
HEADS = ("NO", "RUN", "AGENT", "QUESTION", "ID")
QUESTION_WIDTH = 60
FLEXIBLE = {"QUESTION": 20}
EXPENDABLE = ("RUN", "AGENT", "ID")  # an id begins with the run
SCOPES = {
    "run": "also approve this tool for the rest of the run",
    "tool": "also approve this tool in the whole tree",
    "project": "always approve it in this project: adds the rule that `retinue approvals --json` shows to retinue.yaml",
    "pending": "also approve everything else that this run asks now",
}
ID_HELP = "the question's number, its id, or a unique beginning of its id (see `retinue approvals`)"
NO_TERMINAL = "there is no terminal to ask on: look with `retinue approvals ID`, then give --yes"
NO_RULE = "no rule would allow only {what}, because {why}: answer without --project, or with --run or --tool"
ABOUT_ONE = "--{option} is about one question: name one, and no others"
NOTHING_NAMED = "say which: the number or id of a question, --all, --from RUN or --for TOOL"
_WHOLE_ID = re.compile(r"[0-9a-z]+/\d+/\d+")
NAMED_TWICE = "give the numbers of questions, or --all, --from and --for, not both"


def configure_approvals(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("id", metavar="ID", nargs="?", help="show this question in full; its number or id")
    parser.add_argument("--watch", action="store_true", help="show questions as they come, and answer them here")
    parser.add_argument("--json", action="store_true", help="print one JSON array; with --watch, one object per line")


def execute_approvals(args: argparse.Namespace) -> int:
    """List the questions of this project's runs that wait for an answer.

    Questions are numbered within their tree. If two trees have a question with the same number, use its id. The first
    answer counts, whoever gives it.

    examples:
      retinue approvals                 the questions that wait now
      retinue approvals 2               question 2 in full: the whole command or diff
      retinue approvals --watch         also new ones, each as the terminal of its run asks it
      retinue approve 2
      retinue approve --all             everything that waits
      retinue deny 3 "not in this folder"
      retinue approvals --json | jq -r '.[].id'
    """
    project = output.open_project_log()
    if args.watch:
        asks = not args.json and sys.stdin.isatty() and sys.stdout.isatty()
        asyncio.run(QuestionWatch(project, as_json=args.json, asks=asks).run())
        return 0
    found = asyncio.run(find_waiting(project))
    if args.id is not None:
        found = [asyncio.run(choose_or_explain(project, found, args.id))]
    if args.json:
        output.print_json([each.to_json() for each in found])
    elif args.id is not None:
        printer = Printer(sys.stdout)
        printer.show_question(found[0].approval, whole=True, asker=True)
        printer.check_output()
    elif not found:
        print("Nothing waits for an answer.")
    else:
        rows, right = [_make_row(each) for each in found], frozenset({"NO"})
        print("\n".join(output.format_table(HEADS, rows, right=right, flexible=FLEXIBLE, expendable=EXPENDABLE)))
        print(f"\n{_describe_answers(found[0].approval, found)}")
    return 0


def _describe_answers(about: Approval, found: Iterable[PendingQuestion]) -> str:
    """Return the commands that answer a question, which name it by its id if another tree has its number."""
    numbers = [each.approval.number for each in found]
    name = str(about.number) if numbers.count(about.number) == 1 else safe.escape_line(about.id)
    return f"retinue approve {name} · retinue deny {name} REASON"


def _make_row(each: PendingQuestion) -> tuple[str, ...]:
    about = each.approval
    question = safe.cut_to_width(format_question(about), QUESTION_WIDTH)
    return (
        str(about.number),
        f"{about.tree}/{about.run}",
        safe.escape_line(about.agent),
        question,
        safe.escape_line(about.id),
    )


def _add_selection(parser: argparse.ArgumentParser) -> None:
    which = parser.add_argument_group("questions")
    which.add_argument("--all", action="store_true", help="all that wait now")
    which.add_argument("--from", dest="run", metavar="RUN", help="all of this run and those below it that wait now")
    which.add_argument("--for", dest="tool", metavar="TOOL", help="all about this tool that wait now")


def configure_approve(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("ids", metavar="ID", nargs="*", help=ID_HELP)
    _add_selection(parser)
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
    """Approve tool calls that wait for an answer.

    Shows each question whole and asks, unless you give --yes. An answer covers this call alone, exactly as it was
    shown, unless an option says more. The first answer counts; if somebody else was faster, the exit code is 1, and you
    are told who, where and when.

    examples:
      retinue approvals
      retinue approve 2
      retinue approve 2 --yes                            after `retinue approvals 2`
      retinue approve 2 3 5                              these three
      retinue approve --all                              everything that waits
      retinue approve --from /main/tester-1 --for shell  the commands of this run
      retinue approve 2 --run
      retinue approve 2 --pending
      retinue approve 2 --set name=Ann --set age=41      with other arguments, or a server's form filled in
      retinue approve 7jw4p2xk9mtb/3/41
    """
    if args.changes and args.scope in ("pending", "project"):
        raise ConfigError(f"--set is about one call: give it without --{args.scope}")
    project = output.open_project_log()
    meant = asyncio.run(_select_questions(project, args, args.ids))
    option = "set" if args.changes else "" if args.scope == "call" else args.scope
    if option and len(meant) != 1:
        raise ConfigError(ABOUT_ONE.format(option=option))
    if args.scope == "pending":
        meant = asyncio.run(_list_run_questions(project, meant[0]))
    decision = Allow() if args.scope == "pending" else Allow(scope=args.scope)
    if args.changes:
        decision = msgspec.structs.replace(decision, args={**meant[0].approval.args, **dict(args.changes)})
    if args.scope == "project" and not meant[0].approval.rule:
        about = meant[0].approval
        raise ConfigError(NO_RULE.format(what=format_question(about), why=explain_missing_rule(about.tool, about.args)))
    if not args.yes:
        _confirm_questions(meant)  # outside an event loop, which would keep the first Ctrl-C from the prompt
    return asyncio.run(_answer_all(project, meant, decision, surface="retinue approve"))


def _parse_change(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return name, value


def configure_deny(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", metavar="ID", nargs="*", help=f"{ID_HELP}; then the reason, which the model reads")
    _add_selection(parser)
    parser.add_argument("--pending", action="store_true", help="also deny everything else that this run asks now")


def execute_deny(args: argparse.Namespace) -> int:
    """Deny tool calls that wait for an answer.

    The runs continue, and their models read the reason: the last word, if it is neither a number nor the id of a
    question. The first answer counts; if somebody else was faster, the exit code is 1, and you are told who, where and
    when.

    examples:
      retinue deny 2
      retinue deny 2 "use the copy in build/ instead"
      retinue deny 2 3 "not now"
      retinue deny --for shell "no commands today"
      retinue deny 2 "you are going the wrong way" --pending
    """
    project = output.open_project_log()
    names, reason = _split_reason(args.words, is_selected=args.all or bool(args.run or args.tool))
    meant = asyncio.run(_select_questions(project, args, names))
    if args.pending:
        if len(meant) != 1:
            raise ConfigError(ABOUT_ONE.format(option="pending"))
        meant = asyncio.run(_list_run_questions(project, meant[0]))
    denial = Deny(os.fsencode(reason).decode("utf-8", "replace"))
    return asyncio.run(_answer_all(project, meant, denial, surface="retinue deny"))


def _split_reason(words: Sequence[str], *, is_selected: bool) -> tuple[list[str], str]:
    """Split the arguments of `deny` into names of questions and the reason.

    The last word is the reason, unless it is a number or a complete id. The first word always names a question, unless
    options select the questions (`is_selected`)."""
    first = 0 if is_selected else 1
    if len(words) > first and not is_number(words[-1]) and not _WHOLE_ID.fullmatch(words[-1]):
        return list(words[:-1]), words[-1]
    return list(words), ""


async def _select_questions(
    project: output.ProjectLog, args: argparse.Namespace, names: Sequence[str]
) -> list[PendingQuestion]:
    """Return the pending questions that `names` or the options select. Raises NotFound if there is none."""
    is_selected = args.all or args.run is not None or args.tool is not None
    if names and is_selected:
        raise ConfigError(NAMED_TWICE)
    if not names and not is_selected:
        raise ConfigError(NOTHING_NAMED)
    found = await find_waiting(project)
    if not found and is_selected:
        raise NotFound("nothing waits for an answer")
    if names:
        chosen = [await choose_or_explain(project, found, name) for name in names]
        return list({each.approval.id: each for each in chosen}.values())
    if args.run is not None:
        _, ref = await output.look_up(args.run, live=True)
        below = f"{ref.path}/"
        found = [
            each
            for each in found
            if each.approval.tree == ref.tree and (each.approval.run == ref.run or each.approval.path.startswith(below))
        ]
    if args.tool is not None:
        found = [each for each in found if each.approval.tool == args.tool]
    if not found:
        raise NotFound("no such question is waiting")
    return found


async def _list_run_questions(project: output.ProjectLog, one: PendingQuestion) -> list[PendingQuestion]:
    """Return all pending questions of the run that asks `one`."""
    run = one.approval.tree, one.approval.run
    return [each for each in await find_waiting(project) if (each.approval.tree, each.approval.run) == run]


def _confirm_questions(found: Sequence[PendingQuestion]) -> None:
    """Show each question in full and ask for a confirmation. Raises ConfigError if the user says no."""
    if not prompts.at_terminal():
        raise ConfigError(NO_TERMINAL)
    printer = Printer(sys.stderr)
    for each in found:
        printer.show_question(each.approval, whole=True, asker=True)
    if not prompts.ask_yes_no(f"approve {'this' if len(found) == 1 else f'these {len(found)}'}?", default=False):
        raise ConfigError("nothing was answered")


async def _answer_all(
    project: output.ProjectLog, meant: Sequence[PendingQuestion], decision: Decision, *, surface: str
) -> int:
    """Send the same decision for each question, bound to the action the question shows. Return the exit code."""
    given = [await give_answer(project, each, decision, surface=surface) for each in meant]
    return 0 if all(given) else 1


# `retinue approvals --watch`

TakeAnswer = Callable[[Approval, Decision], object]


class LineAsker:
    """An asker that shows one question at a time and reads a line as the answer, on the terminal of a printer.

    A question is asked from `show_question` until `withdraw_question`, or until `answer` gets its answer. `leave` is
    called when the user leaves. `close` answers nothing, and returns False if the terminal is stuck."""

    def __init__(self, printer: Printer, answer: TakeAnswer, leave: Callable[[], object]) -> None:
        self._printer = printer
        self._answer, self._leave = answer, leave
        self._approver = TerminalApprover(printer, names_runs=True)
        self._asking: dict[str, asyncio.Task[None]] = {}
        self._tasks = TaskOwner()
        printer.show_note(WAITING)

    def show_question(self, question: Approval) -> None:
        self._asking[question.id] = self._tasks.start(self._ask(question))
        asyncio.get_running_loop().call_soon(self._approver.mark_shown, question.id)  # after the task has begun

    def withdraw_question(self, question: Approval) -> None:
        self._asking.pop(question.id).cancel()

    def show_note(self, text: str) -> None:
        self._printer.show_note(text)

    async def close(self) -> bool:
        self._approver.leave()
        await self._tasks.close()
        return True

    async def _ask(self, question: Approval) -> None:
        try:
            decision = await self._approver(question)
        except ApproverLeft:
            self._leave()
            return
        del self._asking[question.id]
        self._answer(question, decision)


class PanelAsker:
    """An asker that pins questions in the panel of the live view, where one key answers a question. Has the methods of
    `LineAsker`."""

    def __init__(self, answer: TakeAnswer, leave: Callable[[], object]) -> None:
        self._answer, self._leave = answer, leave
        self._screen = Screen(Terminal(input_fd=0, output_fd=1), color=colors.wants_color(sys.stdout))
        self._panel = QuestionPanel(self._screen, self._take_answer, names_runs=True)
        self._questions: dict[str, Approval] = {}
        self._screen.draw_bottom(self._compose, self._panel.arm_later)
        self._screen.terminal.report_keys(self._press_key, on_closed=leave)
        self._screen.open()

    def show_question(self, question: Approval) -> None:
        self._questions[question.id] = question
        self._show_questions()

    def withdraw_question(self, question: Approval) -> None:
        del self._questions[question.id]
        self._show_questions()

    def show_note(self, text: str) -> None:
        self._screen.print_text(colors.paint_faint(safe.escape_text(text), color=self._screen.color))

    async def close(self) -> bool:
        return await self._screen.close()

    def _show_questions(self) -> None:
        self._panel.show_questions(self._questions)
        self._screen.request_redraw(at_once=True)

    def _take_answer(self, question: Approval, decision: Decision) -> None:
        if question.id in self._questions:
            self.withdraw_question(question)
            self._answer(question, decision)

    def _press_key(self, key: Key | Paste) -> None:
        if isinstance(key, Key) and key.name == "ctrl-d":
            self._leave()
        else:
            self._panel.press_key(key)

    def _compose(self, columns: int, rows: int) -> BottomArea:
        lines, cursor = self._panel.layout_lines(columns, max(3, rows - 2))
        current = self._panel.current
        status: Line = (("faint", EMPTY if current is None else WAITING),)
        return BottomArea(lines=[*lines, status], cursor=cursor, mark=None if current is None else current.id)


class QuestionWatch:
    """A watcher that shows the questions of all processes of a project. With `asks`, the user can answer them.

    A question leaves `_open` when its answer is sent from here, or else when it is closed."""

    def __init__(self, project: output.ProjectLog, *, as_json: bool, asks: bool) -> None:
        self._project = project
        self._as_json = as_json
        self._printer = Printer(sys.stdout)
        self._asks = asks
        self._asker: LineAsker | PanelAsker | None = None
        self._open: dict[str, PendingQuestion] = {}
        self._left = asyncio.Event()
        self._tasks = TaskOwner()

    async def run(self) -> None:
        """Watch until the user leaves."""
        if self._asks and can_draw(0, 1):
            self._asker = PanelAsker(self._take_answer, self._left.set)
        elif self._asks:
            self._asker = LineAsker(self._printer, self._take_answer, self._left.set)
        followed: dict[str, asyncio.Task[None]] = {}  # by the process's id in the log
        async with self._tasks:
            try:
                while not self._left.is_set():
                    for address in find_addresses(self._project.state):
                        if address.writer not in followed or followed[address.writer].done():
                            following = self._follow(address.pid, connect_to_server(address))
                            followed[address.writer] = self._tasks.start(following)
                    self._printer.check_output()
                    await asyncio.sleep(POLL_SECONDS)
            finally:
                if self._asker is not None and not await self._asker.close():
                    output.exit_stuck()

    async def _follow(self, pid: int, control: Control) -> None:
        """Follow the questions of one process until the process is gone."""
        try:
            async with AsyncExitStack() as stack:
                if self._asker is not None:
                    await stack.enter_async_context(control.attend())
                changes = await stack.enter_async_context(aclosing(control.watch_questions()))
                async for change in changes:
                    if isinstance(change, QuestionClosed):
                        self._close(change.id, describe_closing(change))
                    else:
                        self._show(PendingQuestion(change, pid, control))
        except RetinueError:  # the process is gone, or stopping
            pass
        for waiting in [each for each in self._open.values() if each.control is control]:
            self._close(waiting.approval.id, await describe_outcome(self._project.log, waiting.approval))

    def _show(self, waiting: PendingQuestion) -> None:
        about = waiting.approval
        self._open[about.id] = waiting
        if self._as_json:
            output.print_json(waiting.to_json())
            sys.stdout.flush()
        elif self._asker is not None:
            self._asker.show_question(about)
        else:
            self._printer.show_question(about, asker=True)
            how = _describe_answers(about, self._open.values())
            self._printer.show_note(f"{about.number}  {about.tree}/{about.run}: {how}")

    def _close(self, question_id: str, outcome: str) -> None:
        """Withdraw an open question that another surface closed or whose process is gone, and show the outcome."""
        waiting = self._open.pop(question_id, None)
        if waiting is None:
            return
        if self._asker is not None:
            self._asker.withdraw_question(waiting.approval)
        if not self._as_json:
            asyncio.get_running_loop().call_soon(self._say, waiting.approval, outcome)  # after the prompt is gone

    def _take_answer(self, question: Approval, decision: Decision) -> None:
        self._tasks.start(self._send(self._open.pop(question.id), decision))

    async def _send(self, waiting: PendingQuestion, decision: Decision) -> None:
        """Send an answer to the process that asked, and show the outcome."""
        about = waiting.approval
        try:
            answered = await send_answer(self._project, waiting, decision, surface=SURFACE)
        except RetinueError as error:
            self._say(about, f"was not answered: {error}")
            return
        if answered != "taken":
            late = await describe_outcome(self._project.log, about)
            self._say(about, f"too late, somebody else was first: {late}")
            return
        self._say(about, "approved" if isinstance(decision, Allow) else "denied")
        if isinstance(decision, Allow) and decision.scope == "project":
            await self._tell_rule(waiting)

    async def _tell_rule(self, waiting: PendingQuestion) -> None:
        is_kept = await is_rule_kept(self._project.log, waiting.approval)
        self._show_note((KEPT if is_kept else NOT_KEPT).format(rules=format_rules(waiting.approval)))
        if is_kept:
            async for other in spread_rule(self._project, waiting, surface=SURFACE):
                self._say(other, "approved by the same rule")

    def _say(self, about: Approval, text: str) -> None:
        self._show_note(f"{about.number}  {format_question(about)} of {about.tree}/{about.run}: {text}")

    def _show_note(self, text: str) -> None:
        if self._asker is None:
            self._printer.show_note(text)
        else:
            self._asker.show_note(text)
