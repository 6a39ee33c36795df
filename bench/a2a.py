"""A2A: 100 remote subagents at once against a bare client of the SDK, and how soon `retinue a2a serve` answers."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from bench.start import time_command
from bench.table import Row, compare, time_run

COUNT = 100
ROUNDS = 3
START_ROUNDS = 3
STEPS = 5
AGENT = """
import asyncio, sys
from a2a.types import Part
from tests.remote.a2a_kit import say, serve_agent

async def act(updater, context):
    for step in range({steps}):
        await say(updater, f"🔧 Calling tool: **step_{{step}}**", f"✅ Tool **step_{{step}}** completed")
    await updater.add_artifact([Part(text="answer " + context.get_user_input())], name="answer")
    await updater.complete()

async def main():
    async with serve_agent(act) as (url, _):
        print(url, flush=True)
        await asyncio.Event().wait()

asyncio.run(main())
"""


async def call_bare(url: str) -> None:
    """The same calls with nothing but the SDK's client."""
    import httpx
    from a2a.client import A2ACardResolver, ClientConfig, ClientFactory
    from a2a.types import Message, Part, Role, SendMessageRequest

    async with httpx.AsyncClient(timeout=60, limits=httpx.Limits(max_connections=None)) as http:
        card = await A2ACardResolver(http, url).get_agent_card()
        client = ClientFactory(ClientConfig(httpx_client=http)).create(card)

        async def call(number: int) -> None:
            message = Message(
                message_id=f"m{time.time_ns()}-{number}", role=Role.ROLE_USER, parts=[Part(text=f"{number}")]
            )
            texts = []
            async for event in client.send_message(SendMessageRequest(message=message)):
                if event.HasField("artifact_update"):
                    texts.append(event.artifact_update.artifact.parts[0].text)
            assert texts == [f"answer {number}"]

        await asyncio.gather(*(call(number) for number in range(COUNT)))


async def call_ours(url: str, folder: Path) -> None:
    """A tree with so many remote subagents at once, in a log on disk; none is lost and none comes twice."""
    from retinue import Limits, Profile, Task
    from retinue.build.parts import Parts
    from retinue.build.supervisor import open_control
    from retinue.core.control import ClientOptions
    from retinue.core.remote_agents import A2aAgent

    state = Path(tempfile.mkdtemp(dir=folder)) / ".retinue"
    control = open_control(Parts(project=folder, state=state, limits=Limits(concurrent=None)))
    try:
        client = await control.open_client(ClientOptions(name="bench", task="bench", limits=Limits(seconds=None)))
        profile: Any = Profile("remote", tools=(), a2a=A2aAgent(url=url))
        runs = [await client.spawn(profile, Task(f"{number}")) for number in range(COUNT)]
        results = await asyncio.gather(*(run.result() for run in runs))
        assert [result.final_response for result in results] == [f"answer {number}" for number in range(COUNT)]
        assert all(result.tool_count == STEPS for result in results)
        await client.close()
    finally:
        await control.close()


def time_first_card() -> float:
    """Return the seconds from the start of `retinue a2a serve` until its card is read."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "retinue", "a2a", "serve", "--no-token", "--runtime", "inherited"]
        started = time.perf_counter()
        with subprocess.Popen(
            [*command, "--model", "scripted:none.yaml"], cwd=folder, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stderr is not None
            url = ""
            while not url:
                line = process.stderr.readline()
                assert line, "it ended"
                url = line.partition(" over A2A on ")[2].partition(" ")[0]
            try:
                urlopen(f"{url}/.well-known/agent-card.json").read()
            except URLError as error:
                raise AssertionError(error) from None
            seconds = time.perf_counter() - started
            process.kill()
    return seconds


def rows() -> Iterator[Row]:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", AGENT.format(steps=STEPS)], stdout=subprocess.PIPE, text=True
        ) as process,
    ):
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            bare = partial(time_run, partial(call_bare, url))
            yield Row(f"reference: {COUNT} streams of a bare a2a-sdk client", f"{bare() * 1e3:.0f} ms")
            ours = partial(time_run, partial(call_ours, url, Path(folder)))
            seconds, ratio = compare(ours, bare, rounds=ROUNDS)
            yield Row(f"{COUNT} remote subagents at once, on disk", f"{seconds * 1e3:.0f} ms", ratio, 2)
        finally:
            process.kill()
    sdk = partial(time_command, sys.executable, "-c", "import a2a.server.routes, uvicorn")
    yield Row("reference: import of the a2a-sdk server and uvicorn", f"{sdk() * 1e3:.0f} ms")
    seconds, ratio = compare(time_first_card, sdk, rounds=START_ROUNDS)
    yield Row("retinue a2a serve: the first answer", f"{seconds * 1e3:.0f} ms", ratio, 3)
