"""A conversation at this terminal: the live view with an input line, on a Control of this process or of another.

Plain text is a message to the run. A line that begins with `/` is a command, which calls Control or reads a view of the
log and prints the result. The conversation stores nothing of its own: everything on screen can be read from the log.
Knows no command line options; `talk.py` opens a conversation and ends the process.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from retinue.concurrency import TaskOwner
from retinue.core.approvals import Allow, Approval, Deny
from retinue.core.changes import ApplyPlan
from retinue.core.control import Control, RunHandle
from retinue.core.errors import ConfigError, ControlUnreachable, RetinueError
from retinue.core.events import Delta, Event, Inbox, RunEnded, RunSpawned, RunWaiting, TurnStarted
from retinue.core.ports import Receipt
from retinue.core.profiles import Profile
from retinue.core.results import format_changed_files
from retinue.log.activity import describe_team
from retinue.log.blocks import format_count
from retinue.log.runs import Runs, RunView
from retinue.surfaces.cli.live_screen import LiveScreen, Unsent, pace_items
from retinue.surfaces.cli.signals import Signals
from retinue.surfaces.printer import colors, safe
from retinue.surfaces.printer.header import Header
from retinue.surfaces.printer.keys import ESCAPE, TAB, Key, Paste
from retinue.surfaces.printer.printer import format_question, truncate_lines
from retinue.surfaces.printer.totals import format_totals

START_HINT = "Type a message. /help lists commands, Ctrl-J begins a new line, Ctrl-D leaves."
WORK_HINT = "Esc interrupts. What you type is read at the next turn."
LEAVE_HINT = "press Ctrl-C again to leave"
LEAVE_QUESTION = "{count} at work: [g]o on in the background, [c]ancel and end, Esc stays"
AGAIN_SECONDS = 2.0
Parting = Literal["", "ended", "left", "open", "lost"]
Begin = Callable[[Control, str], Awaitable[RunHandle]]
Resume = Callable[[Control], Awaitable[RunHandle]]
NOTHING_UNSENT: Unsent = ([], "")
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
RECOVERY_QUESTION = "put them back as they were before it? [y]es [n]o"
STILL_AT_WORK = "it is at work: wait for its answer, or press Esc"


@dataclass(frozen=True, kw_only=True)
class Opening:
    """The start of a conversation: either `begin` starts a new run with the first message, or `resume` resumes a tree.

    A resumed tree has `known` events, of which the first `shown` are on screen. `unsent` is the text typed before the
    conversation was open. `profile` is the profile of the agent, if it is known. `header` is on screen before the first
    message."""

    begin: Begin | None = None
    resume: Resume | None = None
    known: int = 0
    shown: int = 0
    unsent: Unsent = NOTHING_UNSENT
    profile: Profile | None = None
    header: Header | None = None


class Conversation:
    """One conversation with a run.

    `begin` starts the run with the first message, unless `hold` gets a run that already exists. The messages among the
    first `known` events go into the history of the input line. `hosts` is True if the run ends with this process.

    At the end, `parting` says how the user left: `ended` if the run has ended, `left` if runs continue without this
    terminal, `open` if the run stays open for its next message, `lost` if the process of the run is gone. It is empty
    if no run was started."""

    def __init__(
        self,
        live: LiveScreen,
        control: Control,
        signals: Signals,
        *,
        begin: Begin | None = None,
        known: int = 0,
        hosts: bool = True,
    ) -> None:
        self.control = control
        self.run: RunHandle | None = None
        self.parting: Parting = ""
        self.live = live
        self.view = live.view
        self._signals = signals
        self._begin = begin
        self._known = known
        self._hosts = hosts
        self._tasks = TaskOwner()
        self._over = asyncio.Event()
        self._choose: Callable[[str], object] | None = None  # takes the key that answers a question of `ask`
        self._asked_to_leave = 0.0
        self._commands = Commands(self)
        live.screen.terminal.report_keys(self.press_key, on_closed=self.leave_open)
        self._set_hint()

    @property
    def runs(self) -> Runs:
        """Return the runs of the conversation, folded from its events."""
        return self.view.activity.runs

    @property
    def is_waiting(self) -> bool:
        """Return True if the primary waits for a message, has ended, or has not started."""
        primary = self.runs.primary
        return primary is None or primary.waits or primary.ended is not None

    @property
    def questions(self) -> Sequence[Approval]:
        """Return the pending questions of the conversation."""
        return list(self.view.activity.questions.values())

    def list_children(self) -> list[RunView]:
        """Return the subagents of the conversation that have not ended."""
        return [run for run in self.runs.runs.values() if run.number and run.ended is None]

    async def hold(self, run: RunHandle | None = None) -> None:
        """Run the conversation until the user leaves. Attaches to `run`, if given."""
        if run is not None:
            self._attach(run)
        self._aim_signals()
        taking = self._tasks.start(self._take_lines())
        try:
            await self._over.wait()
        finally:
            taking.cancel()
            await self._tasks.close()
            self._release_signals()

    # Messages

    async def _take_lines(self) -> None:
        """Process typed lines in order. Errors are shown as notes."""
        while True:
            text = await self.live.typed.get()
            try:
                await self._take_line(text)
            except RetinueError as error:
                self.view.show_note(str(error))

    async def _take_line(self, text: str) -> None:
        command = parse_command(text)
        if command is not None:
            await self._commands.carry_out(*command)
        elif self.run is None:
            await self._start_run(unescape_message(text))
        else:
            await self._send(self.run, text)

    async def _start_run(self, text: str) -> None:
        assert self._begin is not None
        self.view.show_starting(is_starting=True)
        try:
            self._attach(await self._begin(self.control, text))
        except RetinueError:
            self.view.input.replace_text(text)  # so that the user can send it again
            raise
        finally:
            self.view.show_starting(is_starting=False)

    async def _send(self, run: RunHandle, text: str) -> None:
        try:
            receipt = await self.control.send(run.tree, run.number, unescape_message(text))
        except ControlUnreachable:
            self.live.typed.put_nowait(text)
            self._leave("lost")
            return
        self.show_receipt(receipt)

    def _attach(self, run: RunHandle) -> None:
        self.run = run
        self.live.attach(run, self._signals)
        self._aim_signals()
        self._tasks.start(self._show_run(run))

    async def _show_run(self, run: RunHandle) -> None:
        async with aclosing(self.control.watch(run.tree, deltas=True)) as items:
            with suppress(RetinueError):  # the process of the run is gone
                async for item in pace_items(items):
                    self._show_item(item)
        if not self._over.is_set():
            self._leave("ended" if self.runs.primary is not None and self.runs.primary.ended else "lost")

    def _show_item(self, item: Event | Delta) -> None:
        self.view.apply(item)
        if isinstance(item, Delta) or item.run != 0:
            return
        match item.body:
            case RunSpawned(task=text) | Inbox(text=text, source="user"):
                if item.seq <= self._known:
                    self.view.input.add_history(text)
            case RunEnded():
                self._leave("ended")
        if isinstance(item.body, RunSpawned | TurnStarted | RunWaiting):
            self._set_hint()

    def show_receipt(self, receipt: Receipt) -> None:
        """Show a note if a message came too late. The view itself shows the messages that are read."""
        if receipt.state == "too_late":
            self.view.show_note(receipt.describe())

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work` in the background until the user leaves."""
        self._tasks.start(work)

    def _set_hint(self, text: str = "") -> None:
        if not text and self.run is None:
            text = START_HINT
        elif not text and not self.is_waiting:
            text = WORK_HINT
        self.view.show_hint(text)

    # Keys

    def press_key(self, key: Key | Paste) -> None:
        """Handle a key: as the answer to a question of `ask`, as a command for the turn, or in the input line."""
        if self._choose is not None:
            if isinstance(key, Key):
                self._choose(key.name)
            return
        if isinstance(key, Key) and not self.view.takes_escape:
            if key.name == ESCAPE:
                self._interrupt()
                return
            if key.name == "ctrl-d" and not self.view.input.text:
                self.ask_to_leave()
                return
            if key.name == TAB and self._complete_command():
                return
        self.view.press_key(key)

    def _complete_command(self) -> bool:
        text = self.view.input.text
        found = [name for name in COMMANDS if text and f"/{name}".startswith(text)]
        if len(found) == 1:
            self.view.input.replace_text(f"/{found[0]} ")
            self.live.screen.request_redraw()
        return bool(found)

    def _interrupt(self) -> None:
        if self.run is not None and not self.is_waiting:
            self._tasks.start(self._send_interrupt(self.run))
        else:
            self.view.input.replace_text("")
            self.live.screen.request_redraw()

    async def _send_interrupt(self, run: RunHandle) -> None:
        try:
            await self.control.interrupt_turn(run.tree, run.number)
        except RetinueError as error:
            self.view.show_note(str(error))

    def _press_interrupt(self) -> None:
        """Handle Ctrl-C: clear the line, interrupt the turn, or leave if it was pressed twice within a short time."""
        self._signals.forget_question()
        if self._choose is not None:
            self._end_choice()
        elif self.view.input.text:
            self.view.input.replace_text("")
        elif not self.is_waiting:
            self._asked_to_leave = 0.0  # the next Ctrl-C counts as the first
            self._interrupt()
        elif time.monotonic() - self._asked_to_leave < AGAIN_SECONDS:
            self.ask_to_leave()
        else:
            self._asked_to_leave = time.monotonic()
            self._set_hint(LEAVE_HINT)
        self.live.screen.request_redraw()

    def ask(self, question: str, choose: Callable[[str], object]) -> None:
        """Show `question` and call `choose` with the name of the next key."""

        def take(name: str) -> None:
            self._end_choice()
            choose(name)

        self._choose = take
        self._set_hint(question)

    def _end_choice(self) -> None:
        self._choose = None
        self._set_hint()

    # Leaving

    def ask_to_leave(self) -> None:
        """Leave the conversation. If subagents are at work, first ask whether they continue in the background."""
        children = self.list_children()
        if self.run is None:
            self._leave("")
        elif not children:
            self._tasks.start(self._end())
        else:
            count = f"{format_count(len(children), 'subagent')} {'is' if len(children) == 1 else 'are'}"
            self.ask(LEAVE_QUESTION.format(count=count), self._choose_parting)

    def _choose_parting(self, name: str) -> None:
        if name == "g":
            self._leave("left")
        elif name == "c":
            self._tasks.start(self._end())

    async def _end(self) -> None:
        """End the conversation as done. Everything still at work in it is cancelled."""
        assert self.run is not None
        try:
            await self.control.end_conversation(self.run.tree, self.run.number)
        except RetinueError as error:
            self.view.show_note(str(error))
            self._leave("lost")

    def leave_open(self) -> None:
        """Leave without ending the conversation, because the terminal is gone or a signal stops the process."""
        self._tasks.start(self._leave_open())

    async def _leave_open(self) -> None:
        if self.run is not None and self._hosts and not self.is_waiting:
            seen = max((run.last_seq for run in self.runs.runs.values()), default=0)
            with suppress(RetinueError):
                await self.control.interrupt_turn(self.run.tree, self.run.number)
                await self._wait_until_waiting(self.run, after=seen)
        self._leave("" if self.run is None else "open" if self._hosts else "left")

    async def _wait_until_waiting(self, run: RunHandle, *, after: int) -> None:
        async with aclosing(self.control.watch(run.tree, after=after)) as items:
            async for item in items:
                if isinstance(item, Event) and item.run == 0 and isinstance(item.body, RunWaiting | RunEnded):
                    return

    def _aim_signals(self) -> None:
        """Handle Ctrl-C with `_press_interrupt`, and leave at any other signal."""
        terminal = self.live.screen.terminal
        self._signals.set_actions(
            self.leave_open, self.leave_open, lambda _: None, ask=self._press_interrupt, leave=terminal.restore
        )

    def _release_signals(self) -> None:
        """Direct signals to no run. The third signal still ends the process, even if the terminal is stuck."""
        restore = self.live.screen.terminal.restore
        self._signals.set_actions(lambda: None, lambda: None, lambda _: None, leave=restore)

    def _leave(self, parting: Parting) -> None:
        if not self._over.is_set():
            self.parting = parting
            self._over.set()


def parse_command(text: str) -> tuple[str, str] | None:
    """Split a typed text into a command and its argument, or return None for a message.

    A first word with a second slash is not a command, so `/etc/hosts is wrong` is a message."""
    word, _, rest = text.strip().partition(" ")
    name = word[1:]
    if not word.startswith("/") or "/" in name:
        return None
    return name, rest.strip()


def unescape_message(text: str) -> str:
    """Replace `//` at the beginning of a message by `/`."""
    return text[1:] if text.startswith("//") else text


class Commands:
    """The slash commands of one conversation."""

    def __init__(self, talk: Conversation) -> None:
        self._talk = talk

    async def carry_out(self, name: str, rest: str) -> None:
        """Execute the command `name` with the argument `rest`. Raises RetinueError if it fails."""
        if name not in COMMANDS:
            raise ConfigError(f"there is no command /{name}; /help lists them")
        await COMMANDS[name].execute(self, rest)

    # Commands that only show something

    async def _show_help(self, rest: str) -> None:
        usages = {f"/{name} {command.usage}".rstrip(): command.about for name, command in COMMANDS.items()}
        width = max(map(len, usages)) + 2
        lines = [f"{usage:<{width}}{about}" for usage, about in usages.items()]
        self._talk.view.show_text("\n".join([*lines, "", KEYS]))

    async def _show_tree(self, rest: str) -> None:
        self._get_run()
        runs = self._talk.runs
        lines = []
        for branch, run in runs.list_branches():
            state = f"{run.state}, {describe_team(run)}" if run.members else run.state
            lines.append(f"{run.number:>3}  {branch}{_name_run(run)}  {state}")
        self._talk.view.show_text("\n".join([*lines, "", runs.counts().describe()]))

    async def _open_inbox(self, rest: str) -> None:
        """List the pending questions, or show or answer the question of this conversation with the given number."""
        number, _, answer = rest.partition(" ")
        if not number:
            await self._list_questions()
            return
        question = next((each for each in self._talk.questions if str(each.number) == number), None)
        if question is None:
            raise ConfigError(NO_QUESTION.format(number=number))
        word, _, reason = answer.strip().partition(" ")
        if not word:
            self._talk.view.panel.show_question(question.id)
        elif word.lower() in ("y", "yes") and not reason:
            self._talk.live.send_answer(question, Allow())
        elif word.lower() in ("n", "no"):
            self._talk.live.send_answer(question, Deny(reason.strip()))
        else:
            raise ConfigError(INBOX_USAGE)

    async def _list_questions(self) -> None:
        """List the pending questions of this conversation, and of the other trees in its process."""
        own = self._talk.questions
        tree = None if self._talk.run is None else self._talk.run.tree
        others = [each for each in await self._talk.control.pending() if each.tree != tree]
        lines = [f"{each.number}. {format_question(each)}" for each in own]
        lines += [f"{format_question(each)}: retinue approve {safe.escape_line(each.id)}" for each in others]
        hint = [INBOX_HINT] if own else []
        self._talk.view.show_text("\n".join([*lines, *hint]) if lines else "nothing waits for an answer")

    async def _show_cost(self, rest: str) -> None:
        self._get_run()
        self._talk.view.show_text(safe.escape_text(format_totals(self._talk.runs, time.time())))

    async def _show_diff(self, rest: str) -> None:
        number, run = self._find_number(rest), self._get_run()
        text = self._format_diff(await self._talk.control.diff(run.tree, number), number)
        self._talk.view.show_text(text or "nothing has changed")

    def _format_diff(self, text: str, number: int) -> str:
        """Return a diff of run `number` as escaped text of limited length."""
        how = f"`retinue diff {self._get_run().tree}/{number}` shows all"
        cut = truncate_lines(text.rstrip("\n"), lines=DIFF_LINES, size=DIFF_LINES * 200, how=how)
        return colors.paint_diff(safe.escape_text(cut), color=self._talk.live.screen.color)

    # Commands that change something

    async def _offer_changes(self, rest: str) -> None:
        run, number = self._get_run(), self._find_number(rest)
        if number == 0 and not self._talk.is_waiting:
            raise ConfigError(STILL_AT_WORK)
        plan = await self._talk.control.plan_apply(run.tree, [number])
        if not plan.runs:
            self._talk.view.show_note("; ".join(plan.skipped))
        elif plan.unfinished:
            files = ", ".join(map(safe.escape_line, plan.unfinished))
            self._talk.view.show_note(f"an earlier apply was interrupted while it changed these files: {files}")
            self._ask(RECOVERY_QUESTION, lambda: self._recover(rest))
        elif plan.conflicts:
            lines = [f"  {safe.escape_line(conflict)}" for conflict in plan.conflicts]
            count = len(plan.conflicts)
            self._talk.view.show_text("\n".join([f"{count} of the files cannot be applied:", *lines]))
        elif not plan.count:
            await self._talk.control.apply_planned(plan.tree, plan.runs, digest=plan.digest)
            self._talk.view.show_note("the project already has these changes")
        else:
            self._talk.view.show_text(self._format_diff(plan.diff, number))
            self._ask(APPLY_QUESTION, lambda: self._apply(plan))

    def _ask(self, question: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Show `question` and do the work after a yes."""

        def choose(key: str) -> None:
            if key == "y":
                self._talk.start(work())
            else:
                self._talk.view.show_note("nothing was applied")

        self._talk.ask(question, choose)

    async def _recover(self, rest: str) -> None:
        try:
            await self._talk.control.undo_interrupted_apply()
            await self._offer_changes(rest)
        except RetinueError as error:
            self._talk.view.show_note(str(error))

    async def _apply(self, plan: ApplyPlan) -> None:
        try:
            await self._talk.control.apply_planned(plan.tree, plan.runs, digest=plan.digest)
        except RetinueError as error:
            self._talk.view.show_note(str(error))
            return
        lines = map(safe.escape_line, format_changed_files(plan.files, plan.count))
        self._talk.view.show_text("\n".join(["applied:", *(f"  {line}" for line in lines)]))

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
            self._talk.view.show_note(f"run {number} has ended, or is stopping already")

    async def _choose_model(self, rest: str) -> None:
        run, primary = self._get_run(), self._talk.runs.primary
        if not rest:
            self._talk.view.show_note("" if primary is None else primary.spawned.model)
            return
        model = await self._talk.control.change_model(run.tree, run.number, rest)
        self._talk.view.show_note(f"{model} answers from the next turn on")

    async def _leave(self, rest: str) -> None:
        self._talk.ask_to_leave()

    def _get_run(self) -> RunHandle:
        if self._talk.run is None:
            raise ConfigError(NOTHING_SAID)
        return self._talk.run

    def _find_number(self, name: str, *, usage: str = "") -> int:
        """Return the number of the run that `name` names by number, label or path.

        Without a name, return 0, the conversation itself, or raise ConfigError if `usage` requires a run."""
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


class SlashCommand(NamedTuple):
    """A slash command: its arguments, its line in /help, and the method that executes it."""

    usage: str
    about: str
    execute: Callable[[Commands, str], Awaitable[None]]


COMMANDS = {
    "tree": SlashCommand("", "show the runs of this conversation", Commands._show_tree),
    "inbox": SlashCommand(
        "[N [y|n]]", "list the questions that wait, show question N whole, or answer it", Commands._open_inbox
    ),
    "diff": SlashCommand(
        "[N]", "show what this conversation, or run N, changed and has not applied", Commands._show_diff
    ),
    "apply": SlashCommand("[N]", "apply these changes to the project", Commands._offer_changes),
    "send": SlashCommand("N TEXT", "send a message to run N", Commands._send_message),
    "cancel": SlashCommand("N", "cancel run N and everything below it", Commands._cancel_run),
    "cost": SlashCommand("", "show tokens, cost and what is left of the budget", Commands._show_cost),
    "model": SlashCommand("[NAME]", "show the model, or ask another one from the next turn on", Commands._choose_model),
    "help": SlashCommand("", "show this", Commands._show_help),
    "exit": SlashCommand("", "leave; asks whether subagents at work should continue", Commands._leave),
}


def _name_run(run: RunView) -> str:
    return safe.escape_line(f"{run.agent} [{run.label}]" if run.number else run.agent)
