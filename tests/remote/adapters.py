"""The adapters there are, each with the hand of its peer, as the contract of remote runs wants them."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from retinue.build import supervisor as supervisors
from retinue.build.parts import Parts
from retinue.build.remote_agents import RemoteAgents, prepare_nothing
from retinue.core.approvals import Allow, Decision, Deny
from retinue.core.events import Body, Inbox, RunEnded, Thinking, ToolCall, ToolResult, UsageReported
from retinue.core.messages import ASKER
from retinue.core.plans import Runtime
from retinue.core.profiles import Profile, Task
from retinue.core.remote_agents import A2aAgent
from retinue.remote.outbox import OutboxRun
from retinue.remote.port import STARTED, Capabilities, RemoteAdapter, RemoteRuntime, RemoteSpawned
from retinue.supervisor.supervisor import Supervisor
from retinue.testing import scripted
from tests.gates import until
from tests.remote.a2a_kit import Hand, serve_hand
from tests.remote.collector.kit import Server, open_collector
from tests.remote.contract import Bench
from tests.remote.outbox.kit import put
from tests.remote.scripted_peer import PeerRun, ScriptedPeer, ScriptedRun

PROFILE = Profile("explorer", "You explore.", model=scripted({}), runtime="delegated")


SCRIPTED = Profile("explorer", "You explore.", model=scripted({}))


class ScriptedAgents(RemoteAgents):
    """A remote agent: the profile `SCRIPTED` behind an adapter of the test's own."""

    def __init__(self, adapter: RemoteAdapter) -> None:
        super().__init__()
        self._runtime = RemoteRuntime(adapter=adapter, prepare=prepare_nothing)

    def find_runtime(self, profile: Profile) -> Runtime | None:
        return self._runtime if profile.name == SCRIPTED.name else super().find_runtime(profile)


def make_supervisor(folder: Path, adapter: RemoteAdapter | None = None, **parts: Any) -> Supervisor:
    agents = None if adapter is None else ScriptedAgents(adapter)
    return supervisors.make_supervisor(Parts(**{"project": folder, "wait_approvals": 60, **parts}), agents)


class ScriptedBench:
    """The tiny adapter, whose peer says what the test says."""

    capabilities = ScriptedRun.capabilities

    def __init__(self, supervisor: Supervisor, tree: str, peer: PeerRun) -> None:
        self.supervisor, self.tree, self.run, self.peer = supervisor, tree, 0, peer

    async def say(self, body: Body | RemoteSpawned, run: str = STARTED) -> None:
        self.peer.say(body, run)

    async def end(self, status: str, text: str) -> None:
        self.peer.say(RunEnded(status, text, 0))

    async def lose(self) -> None:
        self.peer.lose()

    async def take_words(self) -> str:
        return await self.peer.words.get()

    async def wait_for_cancel(self) -> None:
        await self.peer.cancelled.wait()

    async def take_answer(self) -> Decision:
        return await self.peer.answers.get()


async def _silent(_: PeerRun) -> None:
    """Return the script of a peer that reports only what the test sends."""


@asynccontextmanager
async def scripted_bench(folder: Path) -> AsyncIterator[Bench]:
    peer = ScriptedPeer(_silent)
    supervisor = make_supervisor(folder, peer)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("go"))
    await until(lambda: bool(peer.runs))
    try:
        yield ScriptedBench(supervisor, run.ref.tree, peer.runs[0])
    finally:
        peer.runs[0].lose()
        await supervisor.close()


class _EventBench:
    """A bench whose peer reports events of its own tree, which `_send` brings to us."""

    _runs: dict[str, int]

    async def say(self, body: Body | RemoteSpawned, run: str = STARTED) -> None:
        number = self._runs.setdefault(run, len(self._runs))
        if isinstance(body, RemoteSpawned):
            fields = {"kind": "run.spawned", "parent": self._runs[body.parent], "label": run, "depth": 1,
                      "task": body.task, "subagent_id": run, "workspace": "/theirs"}  # fmt: skip
            self._report(number, body.agent, fields)
        else:
            self._report(number, "x", msgspec.to_builtins(body))

    def _report(self, run: int, agent: str, fields: dict[str, Any]) -> None:
        head = {"seq": 1, "tree": "theirs", "run": run, "path": "/theirs", "agent": agent, "at": 1.0}
        self._send({**head, **fields})

    def _send(self, event: dict[str, Any]) -> None:
        raise NotImplementedError


class OutboxBench(_EventBench):
    """The outbox, whose host is a hand that writes files."""

    capabilities = OutboxRun.capabilities

    def __init__(self, supervisor: Supervisor, tree: str, outbox: Path, name: str) -> None:
        self.supervisor, self.tree, self.run = supervisor, tree, 0
        self._outbox, self._name = outbox, name
        self._runs = {STARTED: 0, "stranger": 99}
        (outbox / f"claim_{name}").touch()

    def _send(self, event: dict[str, Any]) -> None:
        with (self._outbox / f"events_{self._name}.ndjson").open("ab") as file:
            file.write(json.dumps(event).encode() + b"\n")

    async def end(self, status: str, text: str) -> None:
        if (self._outbox / f"response_{self._name}.json").exists():
            return
        known = status if status != "unheard of" else "failed"
        said = {"id": self._name, "status": known, "final_response": text, "error_details": text or None}
        put(self._outbox, f"response_{self._name}.json", json.dumps(said).encode())

    async def lose(self) -> None:
        put(self._outbox, f"response_{self._name}.json", b"not a response")

    async def take_words(self) -> str:
        file = self._outbox / f"steer_{self._name}_0000.json"
        await until(file.exists)
        text: str = json.loads(file.read_bytes())["text"]
        file.unlink()
        self._report(0, "x", {"kind": "inbox", "text": text, "source": ASKER})
        return text

    async def wait_for_cancel(self) -> None:
        await until((self._outbox / f"cancel_{self._name}").exists)

    async def take_answer(self) -> Decision:
        raise AssertionError("questions are answered on the host")


@asynccontextmanager
async def outbox_bench(folder: Path) -> AsyncIterator[Bench]:
    outbox = folder / "outbox"
    outbox.mkdir()
    supervisor = make_supervisor(folder, outbox=outbox)
    run = supervisor.spawner.spawn_primary(PROFILE, Task("go"))
    await until(lambda: any(name.startswith("request_") for name in os.listdir(outbox)))
    [file] = [name for name in os.listdir(outbox) if name.startswith("request_")]
    name = file.removeprefix("request_").removesuffix(".json")
    bench = OutboxBench(supervisor, run.ref.tree, outbox, name)
    try:
        yield bench
    finally:
        await bench.end("cancelled", "over")
        await supervisor.close()


class CollectorBench:
    """The collector, whose peer is an MCP server that posts. The run is that of a call made by the primary."""

    capabilities = Capabilities()

    def __init__(self, server: Server, run_id: str, given_up: asyncio.Event) -> None:
        self.supervisor, self.tree, self.run = server.setup.supervisor, server.setup.tree, 1
        self._server, self._given_up = server, given_up
        self._ids = {STARTED: run_id}

    async def say(self, body: Body | RemoteSpawned, run: str = STARTED) -> None:
        kind, fields = _posted(body)
        name = "x"
        if isinstance(body, RemoteSpawned):
            name, fields["parentRunID"] = body.agent, self._ids.get(body.parent, body.parent)
            self._ids[run] = run
        elif run not in self._ids:
            fields["parentRunID"] = "nobody's"
        await self._server.post(self._ids.get(run, run), kind, name, **fields)

    async def end(self, status: str, text: str) -> None:
        await self._server.post(self._ids[STARTED], "subagent_end", status=status, payload=text or None)

    async def lose(self) -> None:
        collector = self._server.setup.collector
        collector._servers[self._server.name].open.clear()  # a call that is still open would say why
        collector.end_server(self._server.name)

    async def take_words(self) -> str:
        raise AssertionError("words do not reach a server")

    async def wait_for_cancel(self) -> None:
        await self._given_up.wait()

    async def take_answer(self) -> Decision:
        raise AssertionError("answers do not reach a server")


def _posted(body: Body | RemoteSpawned) -> tuple[str, dict[str, Any]]:
    match body:
        case Thinking(text=text):
            return "thought_trace", {"payload": text}
        case ToolCall(call_id=call_id, name=name, args=args):
            return "tool_call", {"toolCallID": call_id, "toolName": name, "payload": json.dumps(args)}
        case ToolResult(call_id=call_id, name=name, text=text):
            return "tool_result", {"toolCallID": call_id, "toolName": name, "payload": text}
        case UsageReported(usage=usage):
            tokens = {"inputTokens": usage.input_tokens, "outputTokens": usage.output_tokens}
            return "thought_trace", {"payload": "x", "tokenUsage": tokens}
        case RunEnded(status=status, final_response=text):
            return "subagent_end", {"status": status, "payload": text}
        case _:
            return "subagent_start", {}


@asynccontextmanager
async def collector_bench(folder: Path) -> AsyncIterator[Bench]:
    async with open_collector(folder) as h:
        server, given_up = h.server(), asyncio.Event()
        run_id = h.collector.call(server.name, h.main.ref, "review", given_up.set)
        await server.post(run_id, "subagent_start")
        await h.until("run.started", 2)
        yield CollectorBench(server, run_id, given_up)


class A2aBench(_EventBench):
    """The A2A adapter, whose peer is the hand of another retinue."""

    capabilities = Capabilities(send=True, answer=True, replay=True)

    def __init__(self, supervisor: Supervisor, tree: str, hand: Hand, server: Any) -> None:
        self.supervisor, self.tree, self.run = supervisor, tree, 0
        self._hand, self._server = hand, server
        self._runs = {STARTED: 0, "stranger": 99}

    def _send(self, event: dict[str, Any]) -> None:
        self._hand.send(event)

    async def end(self, status: str, text: str) -> None:
        await self.say(RunEnded(status, text, 0))

    async def lose(self) -> None:
        self._server.should_exit = True
        self._hand.updates.put_nowait(None)

    async def take_words(self) -> str:
        text = await self._hand.words.get()
        await self.say(Inbox(text, source=ASKER))
        return text

    async def wait_for_cancel(self) -> None:
        await self._hand.cancelled.wait()

    async def take_answer(self) -> Decision:
        said = await self._hand.answers.get()
        return Allow() if said["decision"] == "allow" else Deny(said["reason"])


@asynccontextmanager
async def a2a_bench(folder: Path) -> AsyncIterator[Bench]:
    async with serve_hand() as (url, hand, server):
        supervisor = make_supervisor(folder)
        profile = Profile("explorer", tools=(), a2a=A2aAgent(url=url, reconnect_timeout=0.5))
        run = supervisor.spawner.spawn_primary(profile, Task("go"))
        await hand.asked.wait()
        try:
            yield A2aBench(supervisor, run.ref.tree, hand, server)
        finally:
            hand.updates.put_nowait(None)
            server.should_exit = True
            await supervisor.close()


BENCHES: dict[str, tuple[Capabilities, Callable[[Path], AbstractAsyncContextManager[Bench]]]] = {
    "scripted": (ScriptedBench.capabilities, scripted_bench),
    "outbox": (OutboxBench.capabilities, outbox_bench),
    "collector": (CollectorBench.capabilities, collector_bench),
    "a2a": (A2aBench.capabilities, a2a_bench),
}
