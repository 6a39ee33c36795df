"""The calls that a program of a run makes (code mode): each is a call of the run like any other, with an id of ours,
written, asked about, run and written again. What the program says is data: it can name only MCP tools of its run.

Made by the run's link for as long as the program runs; whoever runs the program awaits the calls and cancels them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Protocol

import msgspec

from retinue.core.approvals import Decision, Deny, denial, edited
from retinue.core.errors import Stop, ToolError
from retinue.core.events import ToolResult
from retinue.core.limits import INLINE_BYTES
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Made, Outcome, Tool
from retinue.supervisor.approvals import Approvals
from retinue.supervisor.run import Run
from retinue.supervisor.tree import Tree

CALLS = 1000
DEEP = 64
VALUE_BYTES = 2 * 1024 * 1024
UNKNOWN = "There is no tool '{name}' that a program of this run can call."
TOO_MANY = f"A program can make {CALLS} calls, and this one has made them."
TOO_DEEP = f"Arguments can be nested {DEEP} levels deep."
TOO_LARGE = f"The result of {{name}} is {{size}} bytes; a program can be given {VALUE_BYTES}."
NO_JSON = "The result of {name} is no JSON: {error}"
GIVEN_UP = "The program that made this call ended before it; nobody waited for its result."


class CallServices(Protocol):
    """The part of a run's services that a program needs: they write, judge and run its calls."""

    @property
    def tree(self) -> Tree: ...
    @property
    def run(self) -> Run: ...
    @property
    def approvals(self) -> Approvals: ...
    async def begin(self, call: Call, spec: ToolSpec, preview: str) -> Decision: ...
    def finish(self, call: Call, outcome: Outcome, duration_ms: int) -> None: ...
    def lend(self, call: Call) -> Awaitable[Outcome]: ...


class Program:
    """One program at work. As a context it gives itself: what makes its calls."""

    def __init__(
        self,
        services: CallServices,
        outer: Call,
        kept: Callable[[Call, Outcome], Outcome],
        person: Callable[[bool], None],
    ) -> None:
        self._services, self._run = services, services.run
        self._outer, self._kept, self._person = outer, kept, person
        self._made = 0
        self._asking: dict[str, Call] = {}
        self._running: dict[str, Call] = {}
        self._over = False

    def __enter__(self) -> Program:
        self._run.add_question_listener(self._person)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """What is still open gets its ending now, before that of the program; its tasks are cancelled by their owner.
        A run that is being stopped ends as a whole."""
        run, self._over = self._run, True
        run.remove_question_listener(self._person)
        asking, running, self._asking, self._running = self._asking, self._running, {}, {}
        if kind is not None or run.stopping is not None or run.ending:
            return
        for asked in run.view.approvals:
            if asked.call_id in asking:
                self._services.approvals.answer(asked.approval_id, Deny(GIVEN_UP), by="expiry")
        for call in asking.values():  # it is no call at work any more when `begin` has heard of it
            self._services.tree.write(run, ToolResult(call.id, call.name, GIVEN_UP, success=False))
        for call in running.values():
            self._services.finish(call, Outcome(GIVEN_UP, success=False), 0)

    async def __call__(self, name: str, args: dict[str, Any]) -> Made:
        """Raises what ends the run, and nothing else."""
        tool = self._run.plan.by_name.get(name)
        if self._over:
            return Made(error=GIVEN_UP)
        if tool is None or not tool.spec.server or name not in self._run.plan.host:
            return Made(error=UNKNOWN.format(name=name[:200]))
        if self._made >= CALLS:
            return Made(error=TOO_MANY)
        if _is_deep(args):
            return Made(error=TOO_DEEP)
        self._made += 1
        return await self._make(
            tool, Call(self._run.claim_call_id(f"{self._outer.id}.{self._made}"), name, args, within=self._outer.id)
        )

    async def _make(self, tool: Tool, call: Call) -> Made:
        started, run, note = time.monotonic(), self._run, ""
        spec = msgspec.structs.replace(tool.spec, host=True)
        preview, problem = "", ""
        try:
            preview = tool.preview(call, run.folders)
        except ToolError as error:
            spec, problem = ToolSpec(call.name, "", {}, tier="none", host=True), str(error)
        self._asking[call.id] = call
        decision = await self._services.begin(call, spec, preview)
        if self._asking.pop(call.id, None) is None:
            run.slot.drop_call()
            raise asyncio.CancelledError
        self._running[call.id] = call
        if problem:
            outcome = Outcome(problem, success=False)
        elif isinstance(decision, Deny):
            outcome = Outcome(denial(decision), success=False)
        elif decision.args is None:
            outcome = await self._execute(call)
        else:
            note = f"{call.name}: {edited(decision.args)}"
            outcome = await self._execute(Call(call.id, call.name, decision.args, within=call.within))
        if self._running.pop(call.id, None) is None:
            raise asyncio.CancelledError
        said = self._kept(call, outcome)
        if note:
            said = msgspec.structs.replace(said, text=f"{note}\n{said.text}")
        self._services.finish(call, said, round((time.monotonic() - started) * 1000))
        made = _value(call.name, outcome)
        return msgspec.structs.replace(made, note=note) if note else made

    async def _execute(self, call: Call) -> Outcome:
        try:
            return await self._services.lend(call)
        except ToolError as error:
            return Outcome(str(error), success=False)
        except Stop:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to tools: a bug there must not end the run
            return Outcome(f"{call.name} failed: {type(error).__name__}: {error}", success=False)


def _is_deep(args: Any) -> bool:
    """Whether it is nested deeper than copying and writing it should have to follow."""
    level = [args]
    for _ in range(DEEP):
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return False
    return True


def _value(name: str, outcome: Outcome) -> Made:
    """What the program gets: the tool's structured content where it has any, else its text."""
    if not outcome.success:
        return Made(error=outcome.text[:INLINE_BYTES])
    try:
        value = msgspec.json.encode(outcome.text if outcome.data is None else outcome.data, enc_hook=str)
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: half a character too
        return Made(error=NO_JSON.format(name=name, error=error))
    if len(value) > VALUE_BYTES:
        return Made(error=TOO_LARGE.format(name=name, size=len(value)))
    return Made(msgspec.Raw(value))
