"""The life of a tool call: policy, preview and approval, run, truncation, result. One function serves every call of a
run: from the model, from a program of code mode, or from the setup of the workspace.

This module knows the tool, and the link that logs, judges and asks. It does not know where the tool runs.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time

import msgspec

from retinue.core.approvals import Allow, describe_denial, describe_edit, is_edit
from retinue.core.errors import Stop, ToolError
from retinue.core.limits import INLINE_BYTES
from retinue.core.messages import NOTHING_TO_RUN, QUESTION, Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome, Tool
from retinue.core.profiles import ToolHooks
from retinue.core.sendable import repair_text
from retinue.tools.arguments import find_unknown_argument
from retinue.tools.truncate import truncate_text

FILE_NAME_CHARACTERS = 64
_LOG = logging.getLogger(__name__)


class FinishedCall(msgspec.Struct, frozen=True, gc=False):
    """A call with its result.

    - `outcome`: the whole outcome, for programs.
    - `shown`: the outcome as the model and the log get it.
    - `changed`: a sentence about arguments that a person changed."""

    outcome: Outcome
    shown: Outcome
    changed: str = ""


class HookedTool:
    """A tool with hooks of the embedding program: `before_tool` may refuse the call, `after_tool` sees its result."""

    def __init__(self, tool: Tool, hooks: ToolHooks) -> None:
        self._tool, self._hooks = tool, hooks
        self.spec, self.preview = tool.spec, tool.preview

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        refusal = await self._hooks.before_tool(call.name, call.args)
        if isinstance(refusal, str):
            return Outcome(refusal, success=False)
        if refusal is not None:
            kind = type(refusal).__name__
            raise ToolError(f"the hook before {call.name} returned {kind}, neither None nor a text: nothing was run")
        try:
            outcome = await self._tool(call, folders, link)
        except ToolError as error:
            outcome = Outcome(str(error), success=False)
        try:
            await self._hooks.after_tool(call.name, call.args, outcome.text, outcome.success)
        except Exception as error:  # noqa: BLE001 - the boundary to the program's hooks
            _LOG.warning("the hook after %s failed: %s: %s", call.name, type(error).__name__, error)
        return outcome


async def run_tool_call(
    call: Call, tool: Tool, folders: Folders, link: Link, spec: ToolSpec | None = None
) -> FinishedCall:
    """Run one call from `tool.call` to `tool.result`. If the tool fails, the model gets the error as text and the run
    continues.

    `spec` replaces the tool's own spec when the call is judged and logged."""
    started = time.monotonic()
    outcome, changed = None, ""
    try:
        decision = await link.begin(call, tool.spec if spec is None else spec, tool.preview)
    except ToolError as error:  # the preview found that the call cannot work, so nobody was asked
        outcome = Outcome(str(error), success=False)
    else:
        if not isinstance(decision, Allow):
            outcome = Outcome(describe_denial(decision), success=False)
        elif decision.args is not None:
            # Arguments that answer a question are no edit, and what a person typed belongs in no result.
            is_told = tool.spec.tier != QUESTION and is_edit(call.args, decision.args)
            changed = describe_edit(decision.args) if is_told else ""
            call = Call(call.id, call.name, decision.args, within=call.within)
            problem = find_unknown_argument(call, tool.spec)
            outcome = Outcome(problem, success=False) if problem else None
    if outcome is None:
        try:
            outcome = await tool(call, folders, link)
        except ToolError as error:
            outcome = Outcome(str(error), success=False)
        except Stop:
            raise
        except Exception as error:  # noqa: BLE001 - the boundary to tools: a bug there must not end the run
            outcome = Outcome(f"{call.name} failed: {type(error).__name__}: {error}", success=False)
    shown = msgspec.structs.replace(outcome, text=f"{changed}\n{outcome.text}") if changed else outcome
    if not shown.text.isascii():
        shown = msgspec.structs.replace(shown, text=repair_text(shown.text))
    if len(shown.text) * 4 > INLINE_BYTES:
        shown = fit_inline(shown, call, folders)
    link.finish(call, shown, round((time.monotonic() - started) * 1000))
    return FinishedCall(outcome, shown, changed)


async def run_caller_call(
    call: Call, tool: Tool, folders: Folders, link: Link, spec: ToolSpec | None = None, *, given_up: str
) -> FinishedCall:
    """Run one call of a caller outside the loop: a program of code mode, or a client. If the caller gives the call up,
    `given_up` is the result. A Stop in a program ends its whole run."""
    started = time.monotonic()
    try:
        return await run_tool_call(call, tool, folders, link, spec)
    except (asyncio.CancelledError, Stop) as error:
        if not (call.within and isinstance(error, Stop)):
            link.give_up(call, given_up, round((time.monotonic() - started) * 1000))
        raise


class RefusedTool:
    """The tool of a call that names no tool or cannot be read. Runs nothing: the problem is the result."""

    def __init__(self, call: Call, problem: str) -> None:
        self.spec, self._problem = ToolSpec(call.name, "", {}, tier=NOTHING_TO_RUN), problem

    async def preview(self, call: Call, folders: Folders) -> str:
        return ""

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        raise ToolError(self._problem)


def fit_inline(outcome: Outcome, call: Call, folders: Folders) -> Outcome:
    """Cut the text to the size that goes to the model, and keep the whole text in a file. The name of the call may be
    any text that a model wrote."""
    if outcome.file:
        return outcome
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", call.name[:FILE_NAME_CHARACTERS])
    text, file = truncate_text(outcome.text, spill=lambda: folders.spill(f"{name}.txt"))
    return msgspec.structs.replace(outcome, text=text, file=str(file or ""))
