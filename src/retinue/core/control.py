"""Control: every command that people and programs give to runs, and the handle of one run.

Surfaces know this port and the views of the log, and nothing of the supervisor behind it. There are three
implementations: the supervisor of this process, the client of another process (`retinue.control.client`), and the
reader of stored trees, which also applies their changes (`retinue.supervisor.stored_control`). Profile values, Python
approvers, typed outputs and the tool calls of clients work only in process. Over loopback a profile is passed by name,
limits may only narrow, and values that cannot be sent raise ConfigError.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, aclosing
from typing import Any, Generic, Literal, Protocol, overload

import msgspec

from retinue.core.approvals import Answered, Approval, Decision, QuestionChange
from retinue.core.caller import NOBODY, Caller, ClientRequest
from retinue.core.changes import ApplyPlan, ChangedLines, Changes, RunCopy
from retinue.core.errors import ConfigError
from retinue.core.events import Delta, Event, RunEnded
from retinue.core.limits import Limits
from retinue.core.messages import Call, RunRef
from retinue.core.ports import Outcome, Receipt, RunSummary, SpawnedRun
from retinue.core.profiles import Profile, RuntimeName, Task
from retinue.core.replies import SpokenText
from retinue.core.results import ChangedFile, OutputT_co, Result

ONLY_IN_PROCESS = "{what} works only in the process that has the runs"
ONLY_WATCHED = "{who} is only watched here: it runs {where}, which cannot receive messages from here"
INTERRUPTED = "{tree}/{run} was interrupted: `retinue resume {tree}` resumes it"
NOT_AT_WORK = Receipt("too_late", why="no such run is at work here")
RAN_ELSEWHERE = "{who} ran {where}: it cannot be continued from here"


class SpawnBelow(msgspec.Struct, frozen=True, kw_only=True):
    """The parent of a new run, and the options of the spawn. `call_id` is the tool call that asks for the run. Without
    `queue` a full tree refuses the run. With `background` the parent is notified when the run ends. With `files` the
    run's log and status are also kept as files."""

    tree: str
    run: int = 0
    call_id: str = ""
    queue: bool = True
    background: bool = False
    files: bool = False


class ResumeOverrides(msgspec.Struct, frozen=True, kw_only=True):
    """Replacements for logged values when a tree is resumed or a run is continued.

    `profiles` are profiles that the log cannot store. `limits` override the logged limits, `model` the model of the
    primary, and `runtime` the runtime of all runs from now on. `seconds` is the timeout of a continued run. `files`
    keeps its log and status as files. `call_id` is the waiting tool call of its parent; a run without a `call_id` is
    in the background. `unattended` accepts a process that asks nobody for approval. `request` and `new_files` come
    from the client that continues a primary. With `conversation` the run continues as a conversation."""

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
    """Options of a client: a program that delegates, represented by run 0 of a tree, which does no work itself. `task`
    describes the client. `tools` are the tools its children may have. `limits` and `narrow` are as in `spawn`. `caller`
    holds the limits left to a client that is a run in another process."""

    name: str
    task: str
    description: str = ""
    tools: Sequence[Any] | None = None
    limits: Limits = Limits()
    narrow: Limits | None = None
    caller: Caller = NOBODY


class TreeInfo(msgspec.Struct, frozen=True):
    """A tree in a list. `live` is True while its runs are at work; `writer` is then the id of their process in the log.
    `root` is the run whose ending ends the tree, if the tree is at work in the process of this Control, else 0."""

    tree: str
    live: bool
    runs: list[RunSummary]
    writer: str | None = None
    root: int = 0


class Control(Protocol):
    """The commands for runs, plus `watch`. `tree` and `run`, the number in the tree, name a run."""

    @property
    def writer(self) -> str:
        """The id in the log of the process that has the runs; empty over the log alone."""

    async def prepare(self, profile: Profile | str | None = None, say: Callable[[str], object] | None = None) -> None:
        """Wait until the MCP servers with tools for `profile` (None: any profile) are connected or have failed. Tell
        `say`, which works only in process, which servers are awaited."""

    async def spawn(
        self,
        profile: Profile | str,
        task: Task,
        *,
        limits: Limits | None = None,
        narrow: Limits | None = None,
        below: SpawnBelow | None = None,
        caller: Caller | None = None,
        starts_from: str = "",
    ) -> RunHandle:
        """Start a primary run in a tree of its own, or a run `below` another one.

        Raises ConfigError for a wrong profile, model or path, and SpawnRefused if the limits forbid the run. No run
        exists then. `limits` replace those of the project. `narrow` applies in addition: the smaller number counts. A
        run for a `caller` uses up one of the caller's levels and is bound by the caller's remaining time and budget,
        and by those left to this process. Limits and a caller are only for primaries. The scratch workspace of a
        primary takes over the folder `starts_from`, which works only in process."""

    async def open_client(self, options: ClientOptions) -> ClientHandle:
        """Start a run that represents a client. It ends when the handle is closed, or with the process or connection
        that opened the run."""

    def serve_caller(self, caller: Caller) -> AbstractContextManager[None]:
        """Return a context for serving one call of `caller`. The limits left to the caller bound every run started
        inside, and these runs are reported under the caller's ids. Works only in process; other implementations raise
        ConfigError."""

    async def resume(self, tree: str, overrides: ResumeOverrides = NO_OVERRIDES) -> RunHandle:
        """Resume a tree whose process is gone. Return the run whose ending ends the tree. Raises ConfigError if the
        tree cannot be resumed, and LogHeld while another process may write the tree."""

    async def continue_run(
        self, tree: str, run: int, text: str, overrides: ResumeOverrides = NO_OVERRIDES
    ) -> RunHandle:
        """Start a run with the conversation of an ended run, followed by `text`."""

    async def send(self, tree: str, run: int, text: str, *, source: str = "user", message_id: str = "") -> Receipt:
        """Send a message to a run, which reads it at its next turn. A `source` other than the user, and the
        `message_id` of a client, work only in process."""

    async def cancel(self, tree: str, run: int = 0) -> bool:
        """Stop a run and all runs below it. Return False if there is nothing to stop (ended, already stopping,
        unknown)."""

    async def interrupt_turn(self, tree: str, run: int = 0) -> bool:
        """Interrupt the current turn of a conversation: its model call or tool calls, and the runs these wait for. The
        conversation then waits for the next message. Return False if no turn is in progress."""

    async def end_conversation(self, tree: str, run: int = 0) -> bool:
        """End a conversation as done, with its newest answer. A turn in progress is interrupted and the runs below are
        cancelled. Return False if there is no conversation to end."""

    async def change_model(self, tree: str, run: int, model: str) -> str:
        """Use another model from the next turn of a conversation on. Return the name of the model. Raises ConfigError
        for an unknown model, or for a run that is not a conversation."""

    async def kill(self, tree: str) -> None:
        """Stop a whole tree at once, without waiting for its cleanup."""

    async def wait(self, tree: str, run: int = 0) -> Result[Any]:
        """Wait for a run to end and return its result. A failed run is a Result, not an exception. Raises ConfigError
        if the run was interrupted."""

    async def result(self, tree: str, run: int = 0) -> Result[Any] | None:
        """Return the result of a run, or None if it has not ended."""

    async def describe_run(self, tree: str, run: int = 0) -> RunSummary:
        """Return the current state of a run, as a row of a list. Raises NotFound."""

    async def list_trees(self, *, live: bool = False) -> list[TreeInfo]:
        """Return the trees, newest first. With `live`, return only trees at work in the process of this Control; over
        the log alone there are none."""

    async def find_run(self, name: str) -> RunRef:
        """Return the run called `name`: `TREE/N`, a tree, a path, a label, a subagent id, or a unique prefix. Raises
        NotFound or Ambiguous."""

    async def pending(self, tree: str | None = None) -> list[Approval]:
        """Return the unanswered questions, in the order they were asked."""

    def watch_questions(self, tree: str | None = None) -> AsyncGenerator[QuestionChange]:
        """Yield the unanswered questions, then each new question as it is asked. Yield a QuestionClosed, with the
        author of the answer, for each question answered or no longer needed."""

    async def answer(
        self, approval_id: str, decision: Decision, *, by: str, digest: str = "", surface: str = "", key: str = ""
    ) -> Answered:
        """Answer a question. The first answer is taken; later answers are stale. With the question's `digest`, the
        answer counts only for exactly the action shown. `surface` is where the person answers, for the log. By the
        `key`, a random text, the caller can find out in the log whether its own answer was taken."""

    def attend(self, tree: str | None = None) -> AbstractAsyncContextManager[None]:
        """Attend a tree, or all trees, as an approver. Inside the context, questions wait for `answer` instead of
        ending their run. Leaving the context answers nothing: open questions wait some time for another approver."""

    async def wait_until_idle(self, tree: str) -> None:
        """Wait until no run of a tree is at work, no message waits to be read, and nobody attends this tree by its
        name. Its process can then close without cancelling anything. Works only in process; other implementations
        raise ConfigError."""

    async def list_copies(self, tree: str, run: int | None = None) -> list[RunCopy]:
        """Return the copied workspaces of all runs of a tree, or those that a command about `run` covers.

        These are the run's own copy, for a team the copy of its presenter, and for a primary without a copy all copies
        of the project below it. The list is empty for a run that never needed its copy. Raises ConfigError for a run
        that works in no copy. A copy that cannot be read has a `problem`; with `run`, RetinueError is raised."""

    async def changes(self, tree: str, run: int = 0) -> Changes:
        """Return the changes of an ended run in its copied workspace, without those that were applied before its end.
        Raises RetinueError if the run has no such workspace."""

    async def diff(self, tree: str, run: int = 0, *, stat_columns: int | None = None) -> str:
        """Return the changes of a run in its copied workspace as a git diff, or as statistics in this many columns. Of
        a run that has not ended, return the changes so far. Changes that were applied before the end of the run are
        left out."""

    async def count_changed_lines(self, tree: str, run: int = 0) -> list[ChangedLines]:
        """Return every file that `diff` shows, with the numbers of its added and removed lines."""

    async def plan_apply(self, tree: str, runs: Sequence[int]) -> ApplyPlan:
        """Return a plan to apply the changes of these runs to the project, also those of a run whose workspace is a
        copy of its parent's. Of a waiting conversation, plan the changes since the last apply. Raises RetinueError for
        any other run that has not ended."""

    async def apply_planned(self, tree: str, runs: Sequence[int], *, digest: str) -> None:
        """Apply the changes of these runs, all or none, if the plan for them still has this `digest`. Else change
        nothing and raise RetinueError. Asks for no approval: whoever was shown the plan has approved it."""

    async def undo_interrupted_apply(self) -> bool:
        """Put back the files of the project that an interrupted apply left half changed. Return True if there was such
        an apply. Raises RetinueError for one that this user did not start here."""

    async def apply(self, tree: str, run: int = 0) -> Sequence[ChangedFile]:
        """Apply the changes of one run to the project, without showing a plan first. An interrupted apply is undone
        before. Return the files of the project that changed, up to the list limit. On a conflict, apply none and raise
        RetinueError with the reason. Asks for no approval."""

    def watch(self, tree: str, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield the events of a tree after number `after`, then new events as they happen, without a gap. With
        `deltas`, yield deltas too. Ends with the tree."""

    async def close(self) -> None:
        """Close everything that this Control owns: in process every run and the log, over loopback only its
        connections."""


class RunHandle(Generic[OutputT_co]):
    """The handle of one run: its names, its events and its result.

    `wait` replaces the wait for the ending: a tool that waits for its own child gives the slot of its run to others.
    `since` is the number of an event before the run's first, from which `events` reads. `start_seq` is the number of
    the event that started or resumed the run, or of a later event."""

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
        """Wait for the run to end and return its result. A failed run is a Result, not an exception."""
        if self._wait is not None:
            return await self._wait()
        return await self.control.wait(self.tree, self.number)

    @overload
    def events(self, *, after: int = 0, deltas: Literal[False] = False) -> AsyncGenerator[Event]: ...
    @overload
    def events(self, *, after: int = 0, deltas: Literal[True]) -> AsyncGenerator[Event | Delta]: ...
    async def events(self, *, after: int = 0, deltas: bool = False) -> AsyncGenerator[Event | Delta]:
        """Yield the events of this run and of all runs below it, first from the log and then live, up to its ending.
        With `deltas`, also yield the pieces of text from models and tools as they arrive."""
        below = self.path + "/"
        async with aclosing(self.control.watch(self.tree, after=max(after, self._since), deltas=deltas)) as items:
            async for item in items:
                if not (item.run == self.number or item.path.startswith(below)):
                    continue
                yield item
                if isinstance(item, Event) and item.run == self.number and isinstance(item.body, RunEnded):
                    return

    async def stream_text(self) -> AsyncGenerator[str]:
        """Yield the text of the run, piece by piece as the model writes it, up to its ending. Every reply comes once
        and complete, including the part written before this call. A blank line separates two replies."""
        spoken = SpokenText(self.number)
        async with aclosing(self.events(deltas=True)) as items:
            async for item in items:
                for piece in spoken.apply(item):
                    yield piece

    async def wait_until_logged(self) -> None:
        """Wait until the log has the event that started or resumed the run, so readers of the log can find the run."""
        async with aclosing(self.control.watch(self.tree, after=self._start_seq - 1)) as events:
            async for _ in events:
                return

    async def cancel(self) -> bool:
        """Stop the run and all runs below it. Return False if the run has ended or is already stopping."""
        return await self.control.cancel(self.tree, self.number)

    async def send(self, text: str) -> Receipt:
        """Send a message of the user, which the run reads at its next turn. The receipt is `too_late` if there is no
        next turn."""
        return await self.control.send(self.tree, self.number, text)

    async def diff(self) -> str:
        """Return the changes of the run in its copied workspace, as a git diff."""
        return await self.control.diff(self.tree, self.number)

    async def apply(self) -> Sequence[ChangedFile]:
        """Apply the changes of the run, which must have ended or wait for a message, to the project. Return the files
        of the project that changed, up to the list limit. On a conflict, apply none and raise RetinueError with the
        reason. Asks for no approval."""
        return await self.control.apply(self.tree, self.number)


class ClientHandle(RunHandle):
    """The handle of a client's run. The supervisor writes the run's events. Closing the handle ends the run. Only a
    handle in the process that has the run can make tool calls; others raise ConfigError."""

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
        """Make a call for the client with a tool of its run, or with `work` in place of a tool.

        The log gets the call and its result as events of the client's run. Raises ToolError, and logs nothing, if a
        rule forbids the tool `rules_of` (default: the call's own) with these arguments. Asks for no approval: the
        client has asked its user. Raises the RetinueErrors of `work`; another exception gives a failed Outcome, as in
        every tool call."""
        raise ConfigError(ONLY_IN_PROCESS.format(what="a tool call of a client"))

    async def make_reply(self, tool: str, results: Sequence[tuple[Result[Any], SpawnedRun]]) -> Outcome:
        """Return the reply that a spawn tool of the client's run gives for `results`."""
        raise ConfigError(ONLY_IN_PROCESS.format(what="a reply to a client"))

    async def is_at_work(self) -> bool:
        """Return True if the client's run can start others: it has not ended and is not stopping."""
        return await self.control.result(self.tree, self.number) is None

    async def close(self) -> None:
        """End the client's run and all runs below it."""
        await self._leave()
