"""A subagent server without its MCP side: runs a scripted subagent under the run id it is given, and says how it ended.

    child.py RUN_ID SCRIPT [best_effort] [WAIT]

SCRIPT is JSON, as a script file has it. With WAIT it reads a line from stdin before every model call but the first."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.caller import Caller
from retinue.core.messages import Reply, Request
from retinue.core.profiles import Profile, Task
from retinue.supervisor.caller_limits import serve_caller
from retinue.testing import scripted


class Stepwise:
    """The model, which waits for a line before each turn of the primary after the first."""

    name = "stepwise"

    def __init__(self, script: dict[str, object]) -> None:
        self._model = scripted(script)

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        if request.ref.run == 0 and request.turn > 1:
            print(json.dumps({"turn": request.turn}), flush=True)
            await asyncio.to_thread(sys.stdin.readline)
        return await self._model.complete(request, on_delta)


async def main(run_id: str, script: str, *options: str) -> None:
    agents = json.loads(script)
    model = Stepwise(agents) if "wait" in options else scripted(agents)
    parts = Parts(
        project=Path.cwd(), mode="yes", best_effort="best_effort" in options, profiles=[Profile("helper", "You help.")]
    )
    supervisor = make_supervisor(parts)
    try:
        with serve_caller(Caller(run_id=run_id)):
            run = supervisor.spawner.spawn_primary(Profile("reviewer", "You review.", model=model), Task("look at it"))
        await run.join()
        print(json.dumps(run.result().to_json()), flush=True)
    finally:
        await supervisor.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
