"""A plain agent of `a2a-sdk` in a process of its own, with a tool that waits for a file: `plain_agent.py PORT GATE`."""

import asyncio
import sys
from pathlib import Path

from a2a.server.agent_execution import RequestContext
from a2a.server.tasks import TaskUpdater
from a2a.types import Part

from tests.gates import until
from tests.remote.a2a_kit import say, serve_agent


async def main(port: int, gate: Path) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, "🔧 Calling tool: **list_issues**\n")
        await until(gate.exists)
        await say(updater, "✅ Tool **list_issues** completed\n")
        await updater.add_artifact([Part(text="3 issues are open")], name="answer")
        await updater.complete()

    async with serve_agent(act, port) as (url, _):
        print(url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), Path(sys.argv[2])))
