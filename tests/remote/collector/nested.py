"""A subagent server whose subagent calls another server, which is this program again: a tower of processes.

    nested.py RUN_ID META

META is the `_meta` of the call, as JSON. Every subagent thinks, calls the next server, and says what it got."""

import asyncio
import json
import os
import sys
from pathlib import Path

import msgspec

import retinue
from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.control.reporting import Publisher, Relay
from retinue.core.caller import narrow_caller
from retinue.core.errors import SpawnRefused
from retinue.core.limits import Limits
from retinue.core.ports import Outcome
from retinue.core.profiles import Profile, Task
from retinue.protocol import inherited_limits
from retinue.protocol.reports import ADDRESS
from retinue.remote.collector import RemainingLimits
from retinue.supervisor.caller_limits import serve_caller
from retinue.testing import scripted


async def main(run_id: str, meta: str) -> str:
    caller = narrow_caller(
        inherited_limits.read_process_limits(os.environ), inherited_limits.from_meta(json.loads(meta))
    )
    down = RemainingLimits(Limits(), inherited_limits.read_process_limits(os.environ))

    @retinue.tool(tier="observe")
    async def ask_server(ctx: retinue.Context) -> str:
        """Ask the next server."""
        ref = ctx.ref
        called = relay.call("next", ref, "ask")
        env = {**os.environ, **relay.environment("next")}
        words = [sys.executable, __file__, called, json.dumps(dict(relay.meta(ref)))]
        process = await asyncio.create_subprocess_exec(*words, env=env, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        relay.end_call(called, Outcome(said.decode()))
        return said.decode().strip()

    supervisor = make_supervisor(Parts(project=Path.cwd(), mode="yes"))
    publisher = supervisor.spawner._driver._hook
    assert isinstance(publisher, Publisher)
    down.attach(supervisor)
    relay = Relay(down, os.environ[ADDRESS], publisher)
    replies = [{"thinking": f"I am {run_id}", "tools": [{"name": "ask_server"}]}, {"text": f"{run_id} is done"}]
    profile = Profile("agent", "x", model=scripted({"agent": replies}), tools=[ask_server])
    try:
        with serve_caller(msgspec.structs.replace(caller, run_id=run_id)):
            run = supervisor.spawner.spawn_primary(profile, Task("go"))
        await run.join()
        return run.result().final_response
    except SpawnRefused as refused:
        return str(refused)
    finally:
        await supervisor.close()


if __name__ == "__main__":
    print(asyncio.run(main(*sys.argv[1:])))
