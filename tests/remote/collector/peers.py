"""Peers of the collector: a socket that listens, and a root in its own process."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.caller import Caller
from retinue.core.events import Event
from retinue.core.profiles import Profile, Task
from retinue.protocol.reports import ADDRESS
from retinue.supervisor.caller_limits import serve_caller
from retinue.testing import scripted
from tests.remote.collector.kit import CHILD
from tests.surfaces.cli.shell import environment, find_python


async def reviewed(folder: Path, script: dict[str, Any], *, best_effort: bool = False) -> tuple[str, str, list[Event]]:
    """A run of this process, reported to the address in the environment: its status, its error, its events."""
    supervisor = make_supervisor(Parts(project=folder, mode="yes", best_effort=best_effort))
    with serve_caller(Caller(run_id="run-1")):
        run = supervisor.spawner.spawn_primary(Profile("reviewer", "You review.", model=scripted(script)), Task("look"))
    await run.join()
    result, events = run.result(), await supervisor.log.read(run.ref.tree)
    await supervisor.close()
    assert [event.kind for event in events].count("run.ended") == 1
    return result.status, result.error_details or "", events


@asynccontextmanager
async def peer(
    answer: bytes | str | None,
    *,
    hang_up_after: int | None = None,
    hold: Callable[[dict[str, Any]], Awaitable[None]] | None = None,
) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Something that listens. Bytes are its answer to everything, None is none; words: the type of event it refuses.
    `hold` is awaited before an answer is sent."""
    posts: list[dict[str, Any]] = []
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answers(reader, writer)
        finally:
            writer.close()

    async def answers(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served = 0
        while hang_up_after is None or served < hang_up_after:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except asyncio.IncompleteReadError:
                break
            length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            posts.append(json.loads(await reader.readexactly(length)))
            served += 1
            if hold is not None:
                await hold(posts[-1])
            if answer is None:
                continue
            if isinstance(answer, bytes):
                writer.write(answer)
                break
            status = b"403 Forbidden" if posts[-1]["type"] == answer else b"200 OK"
            writer.write(b"HTTP/1.1 " + status + b"\r\nContent-Length: 2\r\n\r\n{}")

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/secret-of-the-path", posts
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass
class Root:
    """A root in a process of its own, and what it gives a server."""

    process: asyncio.subprocess.Process
    environment: dict[str, str]
    run_id: str

    @property
    def address(self) -> str:
        return self.environment[ADDRESS]

    async def shows(self, text: str) -> None:
        """Waits until it stands on its stderr."""
        assert self.process.stderr is not None
        while text not in (await self.process.stderr.readline()).decode():
            pass

    async def start(self, script: dict[str, Any], *options: str) -> asyncio.subprocess.Process:
        return await started(CHILD, self.run_id, json.dumps(script), *options, quick=True, **self.environment)


@asynccontextmanager
async def root(folder: Path) -> AsyncIterator[Root]:
    process = await started(str(Path(__file__).with_name("root.py")), str(folder))
    assert process.stdout is not None
    given = json.loads(await process.stdout.readline())
    try:
        yield Root(process, given["environment"], given["run_id"])
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def started(program: str, *words: str, quick: bool = False, **more: str) -> asyncio.subprocess.Process:
    env = {**environment(), "PYTHONPATH": os.pathsep.join(sys.path), **more}
    return await asyncio.create_subprocess_exec(
        *(find_python(env) if quick else [sys.executable]),
        program,
        *words,
        env=env,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
