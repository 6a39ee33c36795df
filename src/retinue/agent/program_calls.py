"""The calls that a program of code mode makes: each is a call of its run, with an id of ours, and has the same life as
any other. A program can name only the MCP tools it was given; all else it says is data.

Made for one program; whoever runs the program awaits the calls, and cancels those that are open when it has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from retinue.agent.tool_calls import FinishedCall, run_tool_call
from retinue.core.limits import INLINE_BYTES
from retinue.core.messages import Call
from retinue.core.ports import Folders, Link, Made, Outcome, Tool

CALLS = 1000
DEEP = 64
VALUE_BYTES = 2 * 1024 * 1024
UNKNOWN = "There is no tool '{name}' that a program of this run can call."
TOO_MANY = f"A program can make {CALLS} calls, and this one has made them."
TOO_DEEP = f"Arguments can be nested {DEEP} levels deep."
TOO_LARGE = f"The result of {{name}} is {{size}} bytes; a program can be given {VALUE_BYTES}."
NO_JSON = "The result of {name} is no JSON: {error}"


class ProgramCalls:
    """Makes the calls of the program that the call `outer` runs, of these tools."""

    def __init__(self, outer: Call, tools: Mapping[str, Tool], folders: Folders, link: Link) -> None:
        self._outer, self._tools = outer, tools
        self._folders, self._link = folders, link
        self._count = 0

    async def call_tool(self, name: str, args: dict[str, Any]) -> Made:
        """Make one call. Raises what ends the run, and nothing else."""
        tool = self._tools.get(name)
        if tool is None:
            return Made(error=UNKNOWN.format(name=name[:200]))
        if self._count >= CALLS:
            return Made(error=TOO_MANY)
        if _is_deep(args):
            return Made(error=TOO_DEEP)
        self._count += 1
        call_id = self._link.claim_call_id(f"{self._outer.id}.{self._count}")
        call = Call(call_id, name, args, within=self._outer.id)
        spec = msgspec.structs.replace(tool.spec, host=True)
        try:
            done = await run_tool_call(call, tool, self._folders, self._link, spec)
        except asyncio.CancelledError:  # the program ended before it, or the run is being stopped
            self._link.withdraw(call)
            raise
        return _as_made(name, done)


def _is_deep(args: Any) -> bool:
    """Tell whether it is nested deeper than copying and writing it should have to follow."""
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


def _as_made(name: str, done: FinishedCall) -> Made:
    made = _value(name, done.outcome)
    return msgspec.structs.replace(made, note=f"{name}: {done.changed}") if done.changed else made


def _value(name: str, outcome: Outcome) -> Made:
    """Return what the program gets: the tool's structured content where it has any, else its text."""
    if not outcome.success:
        return Made(error=outcome.text[:INLINE_BYTES])
    try:
        value = msgspec.json.encode(outcome.text if outcome.data is None else outcome.data, enc_hook=str)
    except (TypeError, ValueError, RecursionError) as error:  # ValueError: half a character too
        return Made(error=NO_JSON.format(name=name, error=error))
    if len(value) > VALUE_BYTES:
        return Made(error=TOO_LARGE.format(name=name, size=len(value)))
    return Made(msgspec.Raw(value))
