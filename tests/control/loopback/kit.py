"""A supervisor with its control server, and requests that no well-behaved client sends."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.control.client import ControlClient
from retinue.control.server import ControlServer
from retinue.core.limits import Limits
from retinue.core.ports import Approver, AttachedApprover, Clock
from retinue.core.profiles import Profile, Task
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.tree import Run
from retinue.testing import scripted
from tests.gates import until

GLOB = {"tools": [{"name": "glob", "args": {"pattern": "*"}}]}
HANG = {"hang": True}
WRITE = {"tools": [{"name": "write", "args": {"path": "a.txt", "content": "x"}}]}


@dataclass
class ServedSupervisor:
    supervisor: Supervisor
    server: ControlServer
    state: Path

    @property
    def client(self) -> ControlClient:
        return ControlClient(self.server.address)

    def run(self, agents: dict[str, Any], *, clock: Clock | None = None) -> Run:
        profile = Profile("main", "You are main.", model=scripted(agents, clock=clock))
        return self.supervisor.spawner.spawn_primary(profile, Task("go"), limits=Limits(turns=None))

    async def questions(self, count: int = 1) -> list[Any]:
        """Waits until that many questions are open."""
        await until(lambda: len(self.supervisor.approvals.pending()) >= count)
        return self.supervisor.approvals.pending()


@asynccontextmanager
async def serve_supervisor(
    folder: Path,
    *,
    approver: Approver | None = None,
    wait: float | None = 60,
    durable: bool = True,
    script: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[ServedSupervisor]:
    """`script` is what the model says; `workspace` is the explorer's, other `options` are parts of the supervisor."""
    state = folder / ".retinue"
    model = None if script is None else scripted(script)
    explorer = Profile("explorer", "You look.", model=model, workspace=options.pop("workspace", None))
    parts = Parts(
        project=folder,
        profiles=[explorer, *options.pop("profiles", ())],
        state=state if durable else None,
        approver=None if approver is None else AttachedApprover(approver),
        wait_approvals=wait,
        **options,
    )
    supervisor = make_supervisor(parts)
    try:
        async with ControlServer(supervisor, state, unattended=parts.is_unattended) as server:
            yield ServedSupervisor(supervisor, server, state)
    finally:
        await supervisor.close()


@dataclass
class Response:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> str:
        text: str = json.loads(self.body)["error"]
        return text


async def knock(port: int, data: bytes, *, eof: bool = False) -> Response:
    """Sends these bytes and reads whatever comes, to the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        if eof:
            writer.write_eof()
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    finally:
        writer.close()
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return Response(int(first.split()[1]), headers, body)


async def request(server: ControlServer, method: str, path: str, body: Any = None, **headers: str | None) -> Response:
    """Send a request with good headers, except for the given ones; None leaves a header out."""
    address = server.address
    data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    given: dict[str, str | None] = {
        "Host": f"127.0.0.1:{address.port}",
        "Authorization": f"Bearer {address.token}",
        "Content-Type": "application/json",
        "Content-Length": str(len(data)),
        **{name.replace("_", "-"): value for name, value in headers.items()},
    }
    lines = [f"{method} {path} HTTP/1.1", *(f"{k}: {v}" for k, v in given.items() if v is not None)]
    return await knock(address.port, "\r\n".join([*lines, "", ""]).encode("latin-1") + data)
