"""The context of a Python function that runs as a tool or as a run: its own run, and the requests open to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from retinue.core.control import Control, RunHandle
from retinue.core.events import Body, Message, Warned
from retinue.core.messages import QUESTION, Call, RunRef, ToolSpec
from retinue.core.ports import Folders, Link, Outcome, RunSummary, SpawnOrder
from retinue.core.profiles import Profile, Task
from retinue.core.results import OutputT, Result

CURRENT: ContextVar[Context | None] = ContextVar("retinue_run", default=None)
METADATA_SUBAGENT_DEPTH = "subagent_depth"
METADATA_MAX_SUBAGENT_DEPTH = "max_subagent_depth"
NOT_AS_ASKED = "The question was about other arguments, so this is not an approval."


class QuestionTool:
    """A tool that runs nothing: its call asks a person. `answer` holds the arguments as the person left them, or None
    without a yes. With `fixed` arguments, others are not a yes."""

    def __init__(self, spec: ToolSpec, text: str = "", fixed: dict[str, Any] | None = None) -> None:
        self.spec, self._text, self._fixed = spec, text, fixed
        self.answer: dict[str, Any] | None = None

    async def preview(self, call: Call, folders: Folders) -> str:
        return self._text

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        if self._fixed is not None and call.args != self._fixed:
            return Outcome(NOT_AS_ASKED, success=False)
        self.answer = call.args
        return Outcome("answered" if self._fixed is None else "allowed")


class HostLink(Link, Protocol):
    """The link of a run, with the services for Python functions and MCP tools, which run on the host."""

    def spill(self, name: str) -> Path: ...

    def record_activity(self) -> None: ...

    async def ask(self, call: Call, question: QuestionTool, asker: Sequence[str] = ()) -> None:
        """Run the call of a question, which gets an id if it has none. The call belongs to the run below this one that
        the asking server reports under one of the ids `asker`, if any. Raises Unconfirmed if nobody can be asked,
        unless only a person can answer the question."""


class Context:
    """A run, seen from inside. `handle` is the run as other code sees it. `metadata` holds the depth of the run and
    the maximum depth."""

    __slots__ = ("_asked", "_control", "_link", "_schedule", "metadata", "workspace")

    def __init__(self, link: HostLink, *, control: Control, workspace: str, metadata: dict[str, Any]) -> None:
        self._link, self._control = link, control
        self._asked = 0
        self._schedule: Callable[..., Any] | None = None  # set for a thread outside the event loop
        self.workspace: str = workspace
        self.metadata: dict[str, Any] = metadata

    @property
    def ref(self) -> RunRef:
        return self._link.ref

    @property
    def handle(self) -> RunHandle:
        return RunHandle(self._control, self._link.ref)

    @property
    def tree(self) -> str:
        return self._link.ref.tree

    @property
    def run(self) -> int:
        return self._link.ref.run

    @property
    def path(self) -> str:
        return self._link.ref.path

    @property
    def label(self) -> str:
        return self._link.ref.label

    def emit(self, text: str) -> None:
        """Show `text` to the user, as a message of this run."""
        self._say(Message(str(text), host=True))

    def warn(self, text: str) -> None:
        """Warn the user. The warning stays in the run's result."""
        self._say(Warned(str(text)))

    def record_activity(self) -> None:
        """Record activity in a call that writes no event, to keep the run from counting as stalled."""
        self._link.record_activity()

    def spill(self, name: str) -> Path:
        """Return a new file that the run can read, for a result that does not fit inline."""
        return self._link.spill(name)

    async def ask_person(
        self, name: str, args: dict[str, Any], text: str, asker: Sequence[str] = ()
    ) -> dict[str, Any] | None:
        """Ask a person to fill in `args`, regardless of the rules and the mode. Return the answer, or None if the
        person says no or nobody can be asked. An MCP server asks under the `name` `mcp__SERVER`; `asker` are ids under
        which that server may report a run below this one: the question then belongs to that run."""
        question = QuestionTool(ToolSpec(name, text, {}, tier=QUESTION, host=True), text)
        await self._link.ask(Call("", name, args), question, asker)
        return question.answer

    def list_children(self) -> list[RunSummary]:
        """Return the runs below this run, ended ones too, in the order of creation."""
        return self._link.children.list_runs()

    async def wait_for_children(self, runs: Sequence[int]) -> list[Result[Any]]:
        """Return the results of runs below this run, once all have ended."""
        return await self._link.children.wait_for(runs)

    def aside(self, schedule: Callable[..., Any]) -> Context:
        """Return a copy of this context for a thread outside the event loop. `schedule` runs its messages on the
        loop."""
        other = copy(self)
        other._schedule = schedule
        return other

    def _say(self, body: Body) -> None:
        if self._schedule is None:
            self._link.emit(body)
        else:
            self._schedule(self._link.emit, body)

    async def approve(self, action: str, **args: Any) -> bool:
        """Ask the user to approve `action`. Return False if the user denies it or changes the arguments. Without an
        approver the run ends."""
        self._asked += 1
        question = QuestionTool(ToolSpec(action, "", {}, host=True), fixed=args)
        await self._link.ask(Call(f"ctx_{action}_{self._asked}", action, args), question)
        return question.answer is not None

    async def spawn(self, profile: Profile[OutputT] | str, task: str | Task) -> RunHandle[OutputT]:
        """Start a child run. Raises SpawnRefused. `await child.result()` waits for the child; meanwhile the slot of
        this run is free for others."""
        wanted = task if isinstance(task, Task) else Task(task)
        [child] = await self._link.children.spawn_runs([SpawnOrder(profile, wanted, asked_by_model=False)])
        return RunHandle(self._control, child.ref, wait=partial(_wait_for_child, self._link, child.run))


async def _wait_for_child(link: Link, run: int) -> Result[Any]:
    [result] = await link.children.wait_for([run])
    return result
