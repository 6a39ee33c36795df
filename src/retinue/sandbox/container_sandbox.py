"""`container`: a run's tools execute in a container of its own. Like `isolated` in all but how the tool server is
started and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress

from retinue.concurrency import TaskOwner
from retinue.sandbox.box import SandboxUnavailable
from retinue.sandbox.container_init import OUT_OF_MEMORY as MEMORY_CODE
from retinue.sandbox.hints import find_image_hint
from retinue.sandbox.isolated import Isolated
from retinue.sandbox.process import OUT_OF_MEMORY, REAP_SECONDS, Process

AGAIN_SECONDS = 0.2


class ContainerProcess(Process):
    """The engine's program, which is there as long as its container is. A signal to it reaches everybody inside; only
    the engine can kill them."""

    _killing: asyncio.Task[None] | None = None

    def _describe_end(self) -> str:
        return OUT_OF_MEMORY if self._process.returncode == MEMORY_CODE else super()._describe_end()

    def _list_processes(self) -> Iterator[int]:
        yield self._process.pid

    def _kill(self) -> None:
        if self._killing is None and not self._exited.is_set():
            self._killing = TaskOwner().start(self._kill_all())

    async def _kill_all(self) -> None:
        """Kill the container, again and again: one that is just being made is not found the first time."""
        assert self._prepared.kill is not None
        deadline = self._loop.time() + REAP_SECONDS
        while self._loop.time() < deadline:
            with suppress(SandboxUnavailable):  # an engine that does not answer is asked again
                await asyncio.to_thread(self._prepared.kill)
            if await self._is_gone_within(AGAIN_SECONDS):
                return
        self._process.kill()

    async def _release_resources(self) -> None:
        if self._killing is not None:
            await self._killing
        await super()._release_resources()


class Container(Isolated):
    """A sandbox in containers of one image."""

    name = "container"
    process = ContainerProcess
    find_hint = staticmethod(find_image_hint)
