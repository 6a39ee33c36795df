"""A supervisor whose collector is open, a run that calls, and ways to report to it: well and badly behaved ones."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.control.reporting import Reporting
from retinue.core.events import Delta, Event
from retinue.core.limits import Limits
from retinue.core.profiles import Profile, Task
from retinue.protocol.reports import ADDRESS
from retinue.remote.collector import LoopbackCollector
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.tree import Run
from retinue.testing import scripted
from tests.control.loopback.kit import Response, knock
from tests.surfaces.cli.shell import environment, find_python

HANG = {"main": [{"hang": True}]}
CHILD = str(Path(__file__).with_name("child.py"))
CPE = str(Path(__file__).with_name("cpe.py"))
AT = "2026-01-23T00:00:00Z"


@dataclass
class CollectorSetup:
    """`main` is a run that waits, on whose behalf servers are called."""

    supervisor: Supervisor
    collector: LoopbackCollector
    main: Run

    @property
    def tree(self) -> str:
        return self.main.ref.tree

    def server(self, name: str = "reviewers") -> "Server":
        return Server(self, name, dict(self.collector.environment(name)))

    async def events(self) -> list[Event]:
        return await self.supervisor.log.read(self.tree)

    async def until(self, kind: str, count: int = 1) -> list[Event]:
        """Waits until so many events of that kind are in the log of the tree; all of it."""
        seen: list[Event] = []
        left = count
        async with aclosing(self.supervisor.watch(self.tree)) as events:
            async for event in events:
                if isinstance(event, Delta):
                    continue
                seen.append(event)
                left -= event.kind == kind
                if left == 0:
                    return seen
        raise AssertionError(f"the tree ended without {count} x {kind}")


@dataclass
class Server:
    """An MCP server as the collector knows it: its environment, and the reports that it can post."""

    setup: CollectorSetup
    name: str
    environment: Mapping[str, str]

    @property
    def address(self) -> str:
        return self.environment[ADDRESS]

    @property
    def port(self) -> int:
        port = urlsplit(self.address).port
        assert port is not None
        return port

    @property
    def path(self) -> str:
        return urlsplit(self.address).path + "/subagent-events"

    def call(self, tool: str = "review", *, by: Run | None = None) -> str:
        return self.setup.collector.call(self.name, (by or self.setup.main).ref, tool)

    async def post(self, run_id: str, kind: str, name: str = "code-review-agent", **more: Any) -> Response:
        fields = {"subagentName": name, "subagentRunID": run_id, "timestamp": AT, "type": kind, **more}
        return await self.send({key: value for key, value in fields.items() if value is not None})

    async def send(
        self, body: Any, *, method: str = "POST", path: str | None = None, **headers: str | None
    ) -> Response:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given: dict[str, str | None] = {
            "Host": f"127.0.0.1:{self.port}",
            "Content-Type": "application/json",
            "Content-Length": str(len(data)),
            "Connection": "close",
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = [f"{method} {path or self.path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items() if v is not None)]
        return await knock(self.port, "\r\n".join([*lines, "", ""]).encode("latin-1") + data)

    async def start(self, program: str, *words: str, **more: str) -> asyncio.subprocess.Process:
        """A real process with what a server gets of us in its environment, and nothing else of this one."""
        env = {**environment(), **self.environment, "PYTHONPATH": os.pathsep.join(sys.path), **more}
        return await asyncio.create_subprocess_exec(
            *find_python(env),
            program,
            *words,
            env=env,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )


@asynccontextmanager
async def open_collector(
    folder: Path, *, durable: bool = False, limits: Limits | None = None
) -> AsyncIterator[CollectorSetup]:
    limits = limits or Limits()
    parts = Parts(project=folder, state=folder / ".retinue" if durable else None, limits=limits, mode="yes")
    supervisor = make_supervisor(parts)
    reporting = Reporting(None, serves=False, strict=True, limits=limits, caller=supervisor.caller)
    reporting.attach(supervisor, supervisor)
    assert isinstance(reporting.collector, LoopbackCollector)
    main = supervisor.spawner.spawn_primary(Profile("main", "You are main.", model=scripted(HANG)), Task("go"))
    try:
        yield CollectorSetup(supervisor, reporting.collector, main)
    finally:
        await reporting.close()
        await supervisor.close()


def runs_of(events: list[Event]) -> dict[str, int]:
    """The runs of a tree by their labels."""
    return {event.body.label: event.run for event in events if event.kind == "run.spawned"}  # type: ignore[union-attr]


def of(events: list[Event], run: int) -> list[Any]:
    return [event.body for event in events if event.run == run]
