"""The `/` commands of a conversation. Each asks Control or the views of the log, and prints what it gets."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from retinue.core.approvals import Allow, Approval, Decision, Deny
from retinue.core.control import Control, RunHandle
from retinue.core.errors import ConfigError, RetinueError
from retinue.core.ports import Receipt
from retinue.core.results import ChangedFile, format_changed_files
from retinue.log.blocks import make_question_spans
from retinue.log.runs import Runs, RunView
from retinue.log.teams import describe_team
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.printer import truncate_text
from retinue.surfaces.printer.summary import format_status_bar
from retinue.surfaces.printer.totals import format_totals

COMMANDS = {
    "tree": ("", "show the runs of this conversation"),
    "inbox": ("[N [y|n]]", "list the questions that wait, show question N whole, or answer it"),
    "diff": ("[N]", "show what this conversation, or run N, changed and has not applied"),
    "apply": ("[N]", "apply these changes to the project"),
    "send": ("N TEXT", "send a message to run N"),
    "cancel": ("N", "cancel run N and everything below it"),
    "cost": ("", "show tokens, cost and what is left of the budget"),
    "model": ("[NAME]", "show the model, or ask another one from the next turn on"),
    "help": ("", "show this"),
    "exit": ("", "leave; asks whether subagents that are at work go on"),
}
KEYS = """\
Enter sends, Ctrl-J begins a new line, Up and Down go through what you sent.
While it works, what you type is read at its next turn, and Esc interrupts it.
Text that begins with // is sent with one /."""
NOTHING_SAID = "nothing was said yet"
INBOX_USAGE = "/inbox N y says yes, /inbox N n REASON says no"
INBOX_HINT = "Keys answer the pinned one. /inbox N shows another; /inbox N y (or n) answers."
NO_QUESTION = "no question {number} is waiting: /inbox lists them"
NO_RUN = "say which run: {usage} (/tree shows their numbers)"
DIFF_LINES = 400
APPLY_QUESTION = "apply these changes? [y]es [n]o"
STILL_AT_WORK = "it is at work: wait for its answer, or press Esc"


class Talk(Protocol):
    """The part of a conversation that its commands use."""

    run: RunHandle | None
    control: Control

    @property
    def runs(self) -> Runs: ...

    @property
    def is_waiting(self) -> bool: ...

    @property
    def color(self) -> bool: ...

    @property
    def questions(self) -> Sequence[Approval]: ...

    def show_question(self, question: Approval) -> None: ...
    def answer(self, question: Approval, decision: Decision) -> None: ...
    def show_note(self, text: str) -> None: ...
    def show_text(self, text: str) -> None: ...
    def show_receipt(self, receipt: Receipt) -> None: ...
    def ask(self, question: str, choose: Callable[[str], object]) -> None: ...
    def ask_to_leave(self) -> None: ...
    def start(self, work: Coroutine[Any, Any, None]) -> None: ...


def find_command(text: str) -> tuple[str, str] | None:
    """Return the command and its argument that a typed text is; None for a message. `/etc/hosts is wrong` is one."""
    word, _, rest = text.strip().partition(" ")
    name = word[1:]
    if not word.startswith("/") or "/" in name:
        return None
    return name, rest.strip()


def unescape_message(text: str) -> str:
    """Return a message as it is meant: `//` at its beginning stands for one `/`."""
    return text[1:] if text.startswith("//") else text


class Commands:
    """The commands of one conversation."""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._work: dict[str, Callable[[str], Awaitable[None]]] = {
            "tree": self._show_tree,
            "inbox": self._open_inbox,
            "diff": self._show_diff,
            "apply": self._offer_changes,
            "send": self._send_message,
            "cancel": self._cancel_run,
            "cost": self._show_cost,
            "model": self._choose_model,
            "help": self._show_help,
            "exit": self._leave,
        }

    async def carry_out(self, name: str, rest: str) -> None:
        """Carry out a command. Raises RetinueError for one that cannot be."""
        if name not in self._work:
            raise ConfigError(f"there is no command /{name}; /help lists them")
        await self._work[name](rest)

    # Looking

    async def _show_help(self, rest: str) -> None:
        names = {name: f"/{name} {usage}".rstrip() for name, (usage, _) in COMMANDS.items()}
        width = max(map(len, names.values())) + 2
        lines = [f"{names[name]:<{width}}{text}" for name, (_, text) in COMMANDS.items()]
        self._talk.show_text("\n".join([*lines, "", KEYS]))

    async def _show_tree(self, rest: str) -> None:
        self._get_run()
        runs = self._talk.runs
        lines = [
            f"{run.number:>3}  {branch}{_name_run(run)}  {_name_state(run)}" for branch, run in runs.list_branches()
        ]
        self._talk.show_text("\n".join([*lines, "", format_status_bar(runs)]))

    async def _open_inbox(self, rest: str) -> None:
        """List the questions, or show or answer one. A number is that of a question of this conversation."""
        number, _, answer = rest.partition(" ")
        if not number:
            await self._list_questions()
            return
        question = next((each for each in self._talk.questions if str(each.number) == number), None)
        if question is None:
            raise ConfigError(NO_QUESTION.format(number=number))
        word, _, reason = answer.strip().partition(" ")
        if not word:
            self._talk.show_question(question)
        elif word.lower() in ("y", "yes") and not reason:
            self._talk.answer(question, Allow())
        elif word.lower() in ("n", "no"):
            self._talk.answer(question, Deny(reason.strip()))
        else:
            raise ConfigError(INBOX_USAGE)

    async def _list_questions(self) -> None:
        """List the questions of this conversation, and those of other trees in its process."""
        own = self._talk.questions
        tree = None if self._talk.run is None else self._talk.run.tree
        others = [each for each in await self._talk.control.pending() if each.tree != tree]
        lines = [f"{each.number}. {_describe_question(each)}" for each in own]
        lines += [f"{_describe_question(each)}: retinue approve {safe.escape_line(each.id)}" for each in others]
        hint = [INBOX_HINT] if own else []
        self._talk.show_text("\n".join([*lines, *hint]) if lines else "nothing waits for an answer")

    async def _show_cost(self, rest: str) -> None:
        self._get_run()
        self._talk.show_text(safe.escape_text(format_totals(self._talk.runs, time.time())))

    async def _show_diff(self, rest: str) -> None:
        text = await self._read_diff(self._find_number(rest))
        self._talk.show_text(text or "nothing has changed")

    async def _read_diff(self, number: int) -> str:
        run = self._get_run()
        text = await self._talk.control.diff(run.tree, number)
        how = f"`retinue diff {run.tree}/{number}` shows all"
        cut = truncate_text(text.rstrip("\n"), lines=DIFF_LINES, size=DIFF_LINES * 200, how=how)
        return colors.paint_diff(safe.escape_text(cut), color=self._talk.color)

    # Doing

    async def _offer_changes(self, rest: str) -> None:
        run, number = self._get_run(), self._find_number(rest)
        if number == 0 and not self._talk.is_waiting:
            raise ConfigError(STILL_AT_WORK)
        text = await self._read_diff(number)
        if not text:
            self._talk.show_note("nothing has changed")
            return
        self._talk.show_text(text)

        def choose(key: str) -> None:
            if key == "y":
                self._talk.start(self._apply(run, number))
            else:
                self._talk.show_note("nothing was applied")

        self._talk.ask(APPLY_QUESTION, choose)

    async def _apply(self, run: RunHandle, number: int) -> None:
        try:
            files = list(await self._talk.control.apply(run.tree, number))
        except RetinueError as error:
            self._talk.show_note(str(error))
            return
        self._talk.show_text(_describe_applied(files))

    async def _send_message(self, rest: str) -> None:
        run = self._get_run()
        name, _, text = rest.partition(" ")
        number = self._find_number(name, usage="/send N TEXT")
        self._talk.show_receipt(await self._talk.control.send(run.tree, number, text))

    async def _cancel_run(self, rest: str) -> None:
        run, number = self._get_run(), self._find_number(rest, usage="/cancel N")
        if number == 0:
            raise ConfigError("that is this conversation: Esc interrupts it, /exit ends it")
        if not await self._talk.control.cancel(run.tree, number):
            self._talk.show_note(f"run {number} has ended, or is stopping already")

    async def _choose_model(self, rest: str) -> None:
        run, primary = self._get_run(), self._talk.runs.primary
        if not rest:
            self._talk.show_note("" if primary is None else primary.spawned.model)
            return
        model = await self._talk.control.change_model(run.tree, run.number, rest)
        self._talk.show_note(f"{model} answers from the next turn on")

    async def _leave(self, rest: str) -> None:
        self._talk.ask_to_leave()

    def _get_run(self) -> RunHandle:
        if self._talk.run is None:
            raise ConfigError(NOTHING_SAID)
        return self._talk.run

    def _find_number(self, name: str, *, usage: str = "") -> int:
        """Return the number of the run that a person names: a number or a label; the conversation itself for none."""
        if not name:
            if usage:
                raise ConfigError(NO_RUN.format(usage=usage))
            return 0
        found: list[RunView] = [
            run for run in self._talk.runs.runs.values() if name in (str(run.number), run.label, run.path)
        ]
        if not found:
            raise ConfigError(f"there is no run '{name}' here: /tree shows the runs and their numbers")
        return found[0].number


def _describe_question(question: Approval) -> str:
    spans = make_question_spans(question.label, question.tool, question.args)[1:]
    return safe.escape_line("".join(text for _, text in spans))


def _name_run(run: RunView) -> str:
    return safe.escape_line(f"{run.agent} [{run.label}]" if run.number else run.agent)


def _name_state(run: RunView) -> str:
    return f"{run.state}, {describe_team(run)}" if run.members else run.state


def _describe_applied(files: list[ChangedFile]) -> str:
    if not files:
        return "nothing has changed"
    lines = [safe.escape_line(line) for line in format_changed_files(files, len(files))]
    return "\n".join(["applied:", *(f"  {line}" for line in lines)])
