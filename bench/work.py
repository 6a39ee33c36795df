"""The work every candidate does: a parent delegates to a subagent of three model calls and two tool calls.

Five model calls in all, two of the parent's. The model answers at once, or after a delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import retinue
from retinue.core.messages import Model
from retinue.models.scripted import ScriptedModel
from retinue.testing import scripted

MODEL_CALLS = 5
TOOL_CALLS = 2
USAGE = {"input_tokens": 10, "output_tokens": 5}


async def reference(delay: float) -> None:
    """Nothing but the awaits: five model calls, two tool calls, one child task."""

    async def model() -> dict[str, str]:
        await asyncio.sleep(delay)
        return {"text": "ok"}

    async def tool() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"result": "ok"}

    async def child() -> dict[str, str]:
        await model()
        await tool()
        await model()
        await tool()
        return await model()

    await model()
    await asyncio.create_task(child())
    await model()


@retinue.tool(tier="observe", repeatable=True)
async def look(what: str) -> str:
    """Look at something."""
    await asyncio.sleep(0)
    return "ok"


def script(delay: float) -> ScriptedModel:
    call = {"tools": [{"name": "look", "args": {"what": "this"}}], "usage": USAGE, "delay": delay}
    say = {"text": "found it", "usage": USAGE, "delay": delay}
    hand_over = {"tools": [{"name": "subagent_child", "args": {"task": "look"}}], "usage": USAGE, "delay": delay}
    return scripted({"child": [call, call, say], "parent": [hand_over, {**say, "text": "all done"}]})


def parent(model: Model) -> retinue.Profile[str]:
    child = retinue.Profile("child", "Look twice.", tools=[look])
    return retinue.Profile("parent", "Delegate.", model=model, tools=[child])


def guards() -> dict[str, Any]:
    """Return a careful user's settings: asking mode, a rule for each kind of verdict, and a budget."""
    return {
        "mode": "ask",
        "allow": ["subagent_child", "shell(git status*)"],
        "ask": ["edit(src/**)"],
        "deny": ["shell(rm *)", "write(.git/**)"],
        "limits": retinue.Limits(tokens=10**9),
    }


async def ours(
    state: Path | None,
    *,
    count: int,
    delay: float,
    at_once: bool,
    guarded: bool = False,
    when_answered: Callable[[], None] = lambda: None,
) -> retinue.Retinue:
    """`count` parents with a subagent each, the full path with every event; guarded, with rules and budget too.
    `when_answered` is called when all results are there, before the supervisor is closed."""
    profile = parent(script(delay))
    async with retinue.open(state, **(guards() if guarded else {"mode": "yes"})) as r:
        if at_once:
            runs = [await r.spawn(profile, "go") for _ in range(count)]
            results = [await run.result() for run in runs]
        else:
            results = [await r.run(profile, "go") for _ in range(count)]
        when_answered()
    assert all(result.final_response == "all done" and len(result.children) == 1 for result in results)
    return r


async def bare(*, count: int, delay: float, at_once: bool) -> None:
    if at_once:
        await asyncio.gather(*(reference(delay) for _ in range(count)))
    else:
        for _ in range(count):
            await reference(delay)
