"""Control: every command that people and programs give to runs, and the handle of one run.

Surfaces know this port and the views of the log, nothing of the supervisor behind it. It has two implementations: the
supervisor of this process, and the client of another process (`retinue.control.client`). A third one, over the log
alone, reads trees that no process runs any more, and applies their changes. Profile values, Python approvers, typed
outputs and the tool calls of clients stay in process: over loopback a profile goes by its name, limits may only narrow,
and what cannot cross is refused with a ConfigError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from typing import Any, Generic, Literal, Protocol, overload

import msgspec

from retinue.core.approvals import Answered, Approval, Decision, QuestionChange
from retinue.core.caller import NOBODY, Caller, ClientRequest
from retinue.core.errors import ConfigError
from retinue.core.events import Delta, Event, Message, RunEnded, TurnStarted
from retinue.core.limits import Limits
from retinue.core.messages import Call, RunRef
from retinue.core.ports import Outcome, Receipt, Row, Ticket
from retinue.core.profiles import Profile, RuntimeName, Task
from retinue.core.results import ChangedFile, OutputT_co, Result

MCP_CLIENT = "mcp-client"  # the agent of a run that stands for an MCP client
MCP_CLIENT_DESCRIPTION = "An MCP client: run 0 of the tree of what it delegates"
ONLY_IN_PROCESS = "{what} works only in the process that has the runs"
ONLY_WATCHED = "{who} is only watched here: it runs {where}, which words from here do not reach"
RAN_ELSEWHERE = "{who} ran in the MCP server '{server}': it cannot be continued from here"
BETWEEN_REPLIES = "\n\n"


class SpawnBelow(msgspec.Struct, frozen=True, kw_only=True):
    """The run that a new run is a child of. `call_id` is the tool call that asks for it; without `queue` a full tree
    refuses; `background` tells the parent of its ending; `files` keeps its log and status as files too."""

    tree: str
    run: int = 0
    call_id: str = ""
    queue: bool = True
    background: bool = False
    files: bool = False


class ResumeOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """Values that replace those of the log when a tree is resumed or a run continued: `profiles` that the log cannot
    keep, `limits` over those it has, the `model` instead of the primary's, the `runtime` of its runs from now on.
    `seconds` is the timeout of a continued run; `files` keeps its log and status as files; `call_id` is the tool call
    of its parent that waits for it, without which it runs in the background. `unattended` accepts another process that
    asks nobody. `request` and `new_files` are those of the client who continues a primary; with `conversation` it goes
    on as one."""

    profiles: Sequence[Profile] = ()
    limits: Limits = Limits()
    model: str | None = None
    runtime: RuntimeName | None = None
    seconds: float | None = None
    files: bool = False
    call_id: str = ""
    unattended: bool = False
    request: ClientRequest | None = None
    new_files: Sequence[str] = ()
    conversation: bool = False


NO_OVERRIDES = ResumeOverrides()


class ClientOptions(msgspec.Struct, frozen=True, kw_only=True):
    """A program outside that delegates: run 0 of a tree, which does nothing but stand for it. `task` says who it is;
    `tools` are those that its children may have; `caller` is what is left to it, where it is a run elsewhere."""

    name: str
    task: str
    description: str = ""
    tools: Sequence[Any] | None = None
    limits: Limits = Limits()
    caller: Caller = NOBODY


class TreeInfo(msgspec.Struct, frozen=True):
    """One tree in a list. `live` says that its runs are at work; `pid` is the process that has it then, `root` the run
    that the tree ends with."""

    tree: str
    live: bool
    runs: list[Row]
    pid: int | None = None
    root: int = 0


class Changes(msgspec.Struct, frozen=True):
    """The changes of a run in its copied workspace: the files, as many as fit in a list, of `count` in all. `target` is
    the folder they would be applied to; `applied` the one they were applied to already."""

    files: tuple[ChangedFile, ...]
    count: int
    target: str
    applied: str = ""


class Control(Protocol):
    """The commands, plus `watch`. A run is named by its tree and its number there."""

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        """Wait until the MCP servers that the profile (None: any) has tools from are there or have failed. `say` is
        told what is waited for."""

    async def spawn(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        below: SpawnBelow | None = None,
        caller: Caller | None = None,
    ) -> RunHandle:
        """Start a primary run in a tree of its own, or a run `below` another one. Raises ConfigError for a wrong
        profile, model or path and SpawnRefused for what the limits forbid; then no run exists. `limits` replace those
        of the project, `narrow` holds beside them: the smaller number counts. A `caller` elsewhere gives the run one
        of the levels, and the time and budget, that are left to it."""

    async def open_client(self, options: ClientOptions) -> ClientHandle:
        """Start a run that stands for a program outside. It lives until the handle is closed, or with the process or
        connection that opened it."""

    def serve_caller(self, caller: Caller) -> AbstractContextManager[None]:
        """Serve one call of a run elsewhere: what is left to that run bounds every run that any command starts inside,
        and they are reported as the caller says. Works only in process; elsewhere it raises ConfigError."""

    async def resume(self, tree: str, overrides: ResumeOverrides = NO_OVERRIDES) -> RunHandle:
        """Resume a tree whose process is gone; return the run it ends with. Raises ConfigError if it cannot."""

    async def continue_run(
        self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES
    ) -> RunHandle:
        """Start a run that begins with the conversation of an ended one, and this text."""

    async def send(self, tree: str, run: int, text: str, *, source: str = "user", message_id: str = "") -> Receipt:
        """Send a message to a run, read at its next turn. A `source` other than the user, with the id that a client
        gave the message, crosses only in process."""

    async def cancel(self, tree: str, run: int = 0) -> bool:
        """Stop a run and all below it; False if there is nothing to stop (ended, stopping already, unknown)."""

    async def interrupt_turn(self, tree: str, run: int = 0) -> bool:
        """Break off the turn that a conversation works on: its model call or tool calls, and the runs that these wait
        for. The conversation waits for the next message then. False if there is no such turn."""

    async def end_conversation(self, tree: str, run: int = 0) -> bool:
        """End a conversation as done, with the newest answer; a turn in progress is broken off, and runs below are
        cancelled. False if there is none to end."""

    async def change_model(self, tree: str, run: int, model: str) -> str:
        """Ask another model from the next turn of a conversation on; return its name. Raises ConfigError for a model
        that is not known, or a run that is no conversation."""

    async def kill(self, tree: str) -> None:
        """Stop a whole tree at once, without waiting for its clean-up."""

    async def wait(self, tree: str, run: int = 0) -> Result[Any]:
        """Wait for the ending of a run. A run that failed is a Result, not an exception."""

    async def result(self, tree: str, run: int = 0) -> Result[Any] | None:
        """Return the result of a run, or None if it has not ended."""

    async def describe_run(self, tree: str, run: int = 0) -> Row:
        """Return how a run stands now. Raises NotFound."""

    async def list_trees(self, *, live: bool = False) -> list[TreeInfo]:
        """Return the trees, the newest first; with `live` only those at work in the process of this Control."""

    async def find_run(self, name: str) -> RunRef:
        """Return the run of that name: `TREE/N`, a tree, a path, a label, a subagent id, or a unique prefix. Raises
        NotFound, and ConfigError for a name that could be several."""

    async def pending(self, tree: str | None = None) -> list[Approval]:
        """Return the questions that wait for an answer, in the order they were asked."""

    def watch_questions(self, tree: str | None = None) -> AsyncGenerator[QuestionChange]:
        """Yield the questions that wait, then each new one as it is asked, and for each one that is answered or no
        longer needed a QuestionClosed, which says by whom."""

    async def answer(
        self, approval_id: str, decision: Decision, *, by: str, digest: str = "", surface: str = ""
    ) -> Answered:
        """Answer a question: the first answer is taken, a later one is stale. With the digest of the question it counts
        only for exactly the action that was shown. `surface` is where the person answers, for the log."""

    def attend(self, tree: str | None = None) -> AbstractAsyncContextManager[None]:
        """Be present as an approver of a tree, or of all: while inside, questions wait for `answer` instead of ending
        their run. Leaving answers nothing: what waits then, waits some time for somebody else."""

    async def changes(self, tree: str, run: int = 0) -> Changes:
        """Return what an ended run changed in its copied workspace. Raises RetinueError if it has none."""

    async def diff(self, tree: str, run: int = 0) -> str:
        """Return what a run has changed in its copied workspace, as git shows it."""

    async def apply(self, tree: str, run: int = 0) -> Sequence[ChangedFile]:
        """Apply the changes of an ended run to the folder its copy was made of: all, or, on a conflict, none, and
        RetinueError says why. Asks nobody."""

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield what is in the log after that number, then what happens, without a seam; ends with the tree."""

    async def close(self) -> None:
        """End what this Control owns: in process every run and the log, over loopback only its connections."""


class RunHandle(Generic[OutputT_co]):
    """One run: what it is, what happens in it, and how it ends. `wait` replaces the wait for its ending: that of a
    tool for its own child gives the slot of the waiting run to others. `since` is the number of an event before its
    first, where events begin to be read; `start_seq` the number of the event that started or resumed it, or of a later
    one."""

    def __init__(
        self,
        control: Control,
        ref: RunRef,
        *,
        wait: Callable[[], Awaitable[Result[OutputT_co]]] | None = None,
        since: int = 0,
        start_seq: int = 1,
    ) -> None:
        self.control = control
        self.ref = ref
        self._wait = wait
        self._since = since
        self._start_seq = start_seq

    @property
    def tree(self) -> str:
        return self.ref.tree

    @property
    def number(self) -> int:
        return self.ref.run

    @property
    def path(self) -> str:
        return self.ref.path

    @property
    def label(self) -> str:
        return self.ref.label

    async def state(self) -> str:
        """Return the live state, or the status once the run has ended."""
        return (await self.control.describe_run(self.tree, self.number)).state

    async def result(self) -> Result[OutputT_co]:
        """Wait for the ending. A run that failed is a Result, not an exception."""
        if self._wait is not None:
            return await self._wait()
        return await self.control.wait(self.tree, self.number)

    @overload
    def events(self, *, after: int = 0, deltas: Literal[False] = False) -> AsyncGenerator[Event]: ...
    @overload
    def events(self, *, after: int = 0, deltas: Literal[True]) -> AsyncGenerator[Event | Delta]: ...
    async def events(self, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield the events of this run and everything below it, from the log and then live, up to its ending. With
        `deltas` also the pieces of text that models and tools give meanwhile."""
        below = self.path + "/"
        async with aclosing(self.control.watch(self.tree, after=max(after, self._since), deltas=deltas)) as items:
            async for item in items:
                if not (item.run == self.number or item.path.startswith(below)):
                    continue
                yield item
                if isinstance(item, Event) and item.run == self.number and isinstance(item.body, RunEnded):
                    return

    async def stream_text(self) -> AsyncGenerator[str]:
        """Yield what the run says, piece by piece as the model gives it, up to its ending. Every reply comes once and
        whole, also the part that was said before; a blank line separates two replies."""
        spoken = SpokenText(self.number)
        async with aclosing(self.events(deltas=True)) as items:
            async for item in items:
                for piece in spoken.apply(item):
                    yield piece

    async def wait_until_logged(self) -> None:
        """Wait until the log has the event that started or resumed the run, so that a reader of the log finds it."""
        async with aclosing(self.control.watch(self.tree, after=self._start_seq - 1)) as events:
            async for _ in events:
                return

    async def cancel(self) -> bool:
        """Stop the run and all below it; False if it has ended or is stopping already."""
        return await self.control.cancel(self.tree, self.number)

    async def send(self, text: str) -> Receipt:
        """Send a message of the user, read at the run's next turn; `too_late` if it will have none."""
        return await self.control.send(self.tree, self.number, text)

    async def diff(self) -> str:
        """Return what the run has changed in its copied workspace, as git shows it."""
        return await self.control.diff(self.tree, self.number)

    async def apply(self) -> Sequence[ChangedFile]:
        """Apply the changes of the run, which has ended, to the folder its copy was made of: all, or, on a conflict,
        none, and RetinueError says why. Asks nobody."""
        return await self.control.apply(self.tree, self.number)


class ClientHandle(RunHandle):
    """The run of a program outside; the supervisor writes its events. Closing the handle ends it. Only a handle in the
    process that has the run makes tool calls; others refuse them with a ConfigError."""

    def __init__(self, control: Control, ref: RunRef, *, leave: Callable[[], Awaitable[None]]) -> None:
        super().__init__(control, ref)
        self._leave = leave

    async def __aenter__(self) -> ClientHandle:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def spawn(
        self, profile: Profile | str, task: Task, *, call_id: str = "", queue: bool = True, background: bool = False
    ) -> RunHandle:
        """Start a run below the client."""
        below = SpawnBelow(tree=self.tree, run=self.number, call_id=call_id, queue=queue, background=background)
        return await self.control.spawn(profile, task, below=below)

    async def call_tool(
        self, call: Call, *, rules_of: str = "", work: Callable[[], Awaitable[Outcome]] | None = None
    ) -> Outcome:
        """Make a call of the client with a tool that its run has, or with `work` in place of a tool. The log gets the
        call and its result as events of the client's run. Raises ToolError, and logs nothing, if a rule forbids the
        tool `rules_of` (or else the call's own) with these arguments. Nobody is asked: the client has asked its
        user."""
        raise ConfigError(ONLY_IN_PROCESS.format(what="a tool call of a client"))

    async def make_reply(self, tool: str, results: Sequence[tuple[Result[Any], Ticket]]) -> Outcome:
        """Make the reply that a spawn tool of the client's run gives for these results."""
        raise ConfigError(ONLY_IN_PROCESS.format(what="a reply to a client"))

    async def is_at_work(self) -> bool:
        """Tell whether the client's run can start others: it has not ended, and is not stopping."""
        return await self.control.result(self.tree, self.number) is None

    async def close(self) -> None:
        """End the client's run, and with it everything below it."""
        await self._leave()


class SpokenText:
    """The fold of a run's deltas and events into the text that it says: each reply once and whole, with a blank line
    between two. Words of host-side functions and thinking are not part of it. A run that has no model gives its answer
    when it is done.

    A delta is shown at once and never again, so a reader that comes late or is slow misses some. The event of the whole
    reply always comes. So pieces are given as they arrive while they follow on one another, and the rest with the
    event."""

    def __init__(self, run: int) -> None:
        self._run = run
        self._turn = 0
        self._given = ""  # of the reply of this turn
        self._early: list[Delta] = []  # of a turn whose event has not come yet
        self._has_begun = False

    def apply(self, item: Event | Delta) -> list[str]:
        """Fold one item; return the pieces that can be given now."""
        if item.run != self._run:
            return []
        if isinstance(item, Delta):
            return self._apply_delta(item) if item.kind == "text" else []
        match item.body:
            case TurnStarted(turn=turn):
                self._turn, self._given = turn, ""
                early, self._early = self._early, []
                return [piece for delta in early for piece in self._apply_delta(delta)]
            case Message(text=text, host=False):
                return self._finish_reply(text)
            case RunEnded(status="done", structured=None, final_response=text) if not self._has_begun:
                return self._finish_reply(text)
        return []

    def _apply_delta(self, delta: Delta) -> list[str]:
        if delta.turn > self._turn:
            self._early.append(delta)
            return []
        if delta.turn == self._turn and delta.offset == 0:  # the reply begins, or begins again after a failed attempt
            self._given = delta.text
            return self._begin_reply(delta.text)
        if delta.turn == self._turn and delta.offset == len(self._given):
            self._given += delta.text
            return [delta.text]
        return []

    def _begin_reply(self, text: str) -> list[str]:
        pieces = [BETWEEN_REPLIES, text] if self._has_begun else [text]
        self._has_begun = True
        return pieces

    def _finish_reply(self, text: str) -> list[str]:
        given, self._given = self._given, ""
        if given and text.startswith(given):
            rest = text[len(given) :]
            return [rest] if rest else []
        return self._begin_reply(text) if text and text.strip() != given.strip() else []
