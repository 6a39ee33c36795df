"""A tree whose process is killed in the middle of a child's turn: `python -m tests.golden.dying_tree STATE_FOLDER`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import retinue
from retinue import Profile, tool
from retinue.testing import scripted


@tool
def die() -> str:
    """Kill this process."""
    os.kill(os.getpid(), signal.SIGKILL)
    return "never"


def make_profile() -> Profile:
    """Return the primary: its child dies in the second of its three turns."""
    script = {
        "main": [{"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "a"}]}}]}, {"text": "over"}],
        "subagent": [
            {"tools": [{"name": "list_agents", "args": {}}]},
            {"text": "now", "tools": [{"name": "die", "args": {}}]},
            {"text": "{{last_result}}"},
        ],
    }
    return Profile("main", "You are main.", model=scripted(script), tools=["spawn_subagents", "list_agents", die])


async def main(state: str) -> None:
    async with retinue.open(state, mode="yes") as r:
        run = await r.spawn(make_profile(), "go")
        print(run.tree, flush=True)
        await run.result()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
