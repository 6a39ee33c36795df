"""A tiny adapter: a peer in memory that follows a script. The smallest thing that fulfils the port of remote runs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from retinue.core.approvals import Decision
from retinue.core.errors import Disconnected
from retinue.core.events import Body, Inbox
from retinue.core.messages import ASKER
from retinue.remote.port import STARTED, Capabilities, RemoteRequest, RemoteSpawned, Report


class PeerRun:
    """A run at the peer. It outlives the process of its caller; `history` holds all its reports, `cancels` the runs
    whose cancel has come, in order."""

    def __init__(self, request: RemoteRequest) -> None:
        self.request = request
        self.history: list[Report] = []
        self.cancels: list[str] = []
        self.news, self.cancelled, self.is_lost = asyncio.Event(), asyncio.Event(), False
        self.words: asyncio.Queue[str] = asyncio.Queue()
        self.answers: asyncio.Queue[Decision] = asyncio.Queue()
        self.task: asyncio.Future[Any] | None = None

    def say(self, body: Body | RemoteSpawned, run: str = STARTED) -> None:
        self.history.append(Report(run, body, cursor=str(len(self.history) + 1)))
        self.news.set()

    def lose(self) -> None:
        self.is_lost = True
        self.news.set()


class ScriptedPeer:
    name, grace = "scripted", 6.0

    def __init__(self, script: Callable[[PeerRun], Awaitable[None]]) -> None:
        self.script = script
        self.runs: list[PeerRun] = []

    def start(self, request: RemoteRequest) -> ScriptedRun:
        self.runs.append(PeerRun(request))
        return self.attach(request, reference=str(len(self.runs) - 1), cursor="")

    def attach(self, request: RemoteRequest, *, reference: str, cursor: str) -> ScriptedRun:
        return ScriptedRun(self, reference, int(cursor or 0))


class ScriptedRun:
    capabilities = Capabilities(send=True, answer=True, replay=True)

    def __init__(self, peer: ScriptedPeer, reference: str, cursor: int) -> None:
        self.reference, self._run, self._script, self._cursor = (
            reference,
            peer.runs[int(reference)],
            peer.script,
            cursor,
        )

    async def reports(self) -> AsyncGenerator[Report]:
        self._run.task = self._run.task or asyncio.ensure_future(self._script(self._run))
        while not self._run.is_lost:
            self._run.news.clear()
            for report in self._run.history[self._cursor :]:
                self._cursor += 1
                yield report
            await self._run.news.wait()
        raise Disconnected("the peer hung up")

    async def send(self, run: str, text: str) -> None:
        self._run.words.put_nowait(text)
        self._run.say(Inbox(text, source=ASKER), run)

    def cancel(self, run: str) -> None:
        self._run.cancels.append(run)
        self._run.cancelled.set()

    async def answer(self, run: str, approval_id: str, decision: Decision) -> None:
        self._run.answers.put_nowait(decision)
