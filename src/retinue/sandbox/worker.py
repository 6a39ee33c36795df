"""The process at the far end of a link: runs one job with the same loop as everywhere, and leaves.

The host starts it behind a wall with the link on stdin and stdout. It imports little, holds no key and knows no
network but the host's proxy, if there is one; limits on itself are the first thing it sets.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from retinue.agent.jobs import run_job
from retinue.agent.local import local
from retinue.agent.loop import REMINDER
from retinue.core.errors import Limited, RetinueError
from retinue.core.limits import Caps
from retinue.core.messages import Reply, UserTurn
from retinue.core.network import PROXY_VARIABLE
from retinue.core.plans import Job, Past, Plan
from retinue.core.ports import Outcome
from retinue.core.profiles import Profile, Task
from retinue.protocol import link as wire
from retinue.sandbox.channel import Channel
from retinue.sandbox.far import FarLink, LentTool
from retinue.sandbox.process_privacy import hide
from retinue.sandbox.proxy_socket import forward

UMASK = 0o027
_NOTHING = msgspec.Raw(b"null")


def main() -> None:
    """Never returns: when all is said, the host ends the process and whatever else is left here."""
    hide()
    os.umask(UMASK)
    reading, writing = os.dup(0), os.dup(1)  # nobody who prints or reads, and no command, can touch the link
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    asyncio.run(_work(reading, writing))


async def _work(reading: int, writing: int) -> None:
    await _Worker().work(reading, writing)


class FarFolders:
    """The folders the host named; text that does not fit inline goes to the run's own outputs."""

    def __init__(self, start: wire.Start) -> None:
        self.workspace = Path(start.workspace)
        self.roots: Sequence[Path] = tuple(map(Path, start.roots))
        self.searched: Sequence[Path] = tuple(map(Path, start.searched))
        self._outputs = Path(start.outputs)
        self._spilled = start.spilled

    def spill(self, name: str) -> Path:
        self._spilled += 1
        return self._outputs / f"{self._spilled:03d}-{name}"


class _Worker:
    def __init__(self) -> None:
        self._start: asyncio.Future[wire.Start] = asyncio.get_running_loop().create_future()
        self._link: FarLink | None = None
        self._task: asyncio.Task[Any] | None = None

    async def work(self, reading: int, writing: int) -> None:
        channel = Channel(reading, writing, incoming="down", on_frame=self._take, on_end=lambda _: os._exit(1))
        channel.send(wire.Hello(wire.VERSION))
        start = await self._start
        if start.version != wire.VERSION:
            os._exit(1)
        limit(start.caps, memory=start.limit_memory)
        if start.proxy:
            os.environ[PROXY_VARIABLE] = f"http://127.0.0.1:{await forward(start.proxy)}"
        self._link = FarLink(start.ref, channel)
        self._task = asyncio.create_task(run_job(job_of(start), self._link))
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._task.cancel)
        channel.send(await self._ended(self._task))
        await asyncio.get_running_loop().create_future()  # the host ends what is left here, all of it at once

    async def _ended(self, task: asyncio.Task[Any]) -> wire.Frame:
        try:
            ending = await task
        except Limited as limited:
            return wire.End("limited", str(limited))
        except RetinueError as error:
            return wire.End("failed", str(error))
        except asyncio.CancelledError:
            return wire.End("crashed", "was told to stop")
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the worker's boundary: the host tells it
            return wire.End("crashed", f"{type(error).__name__}: {error}")
        return wire.End(ending.status, ending.text if ending.status == "failed" else "")

    def _take(self, frame: wire.Down) -> None:
        match frame:
            case wire.Start():
                self._start.set_result(frame)
            case wire.Stop():
                if self._task is None:
                    os._exit(0)
                self._task.cancel()
            case wire.Person():
                if self._link is not None:
                    self._link.person(frame)
            case _ if self._link is not None:
                self._link.answer(frame)


def job_of(start: wire.Start) -> Job:
    """The job as the loop takes it. What only the host needs of it is left empty."""
    tools = {name: local(name, start.lent) if name in start.walled else LentTool(name) for name in start.tools}
    profile = Profile(start.ref.agent)
    plan = Plan(
        profile=profile,
        system="",
        model=None,
        model_name="",
        tools=tuple(tools.values()),
        specs=(),
        by_name=tools,
        host={},
        children=(),
        profile_json=_NOTHING,
        tools_json=_NOTHING,
        runtime=None,  # type: ignore[arg-type]  # where it runs is no question any more
        floor="isolated",
    )
    past = None if start.past is None else past_of(start.past)
    thread = () if past is None else past.thread
    return Job(start.ref, plan, Task(""), "", start.max_turns, thread, FarFolders(start), None, past, start.setup)


def past_of(stopped: wire.Stopped) -> Past:
    thread = (UserTurn(REMINDER, "notice"),) if stopped.reminded else ()
    reply = None if stopped.calls is None else Reply("", stopped.calls)
    known = {name: Outcome("", success) for name, success in stopped.known.items()}
    return Past(thread, stopped.turn, reply, known, stopped.ended)


def limit(caps: Caps, *, memory: bool) -> None:
    """Bounds this process and all it starts; nobody here can take that back."""
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_NPROC, caps.processes)
    _lower(resource.RLIMIT_CPU, caps.cpu_seconds)
    _lower(resource.RLIMIT_FSIZE, caps.file_bytes)
    _lower(resource.RLIMIT_NOFILE, caps.open_files)
    if memory:
        _lower(resource.RLIMIT_AS, caps.memory)


def _lower(kind: int, most: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (value, value))
