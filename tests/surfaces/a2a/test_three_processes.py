"""A supervisor and two subagents, one of them not ours, each a process: one stream to the user, and every kill."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any

import httpx
import pytest

from retinue.concurrency import TaskOwner
from tests.gates import wait_for_answer
from tests.remote.a2a_kit import bind
from tests.surfaces.a2a.kit import TLS, body_of, message_of
from tests.surfaces.a2a.test_process import Process
from tests.surfaces.cli.shell import COMMAND, SOURCE, Project, environment

ARGOCD_YAML = """
model: scripted:script.yaml
profiles:
  argocd: {description: Knows ArgoCD., instructions: You know., tools: [shell], workspace: scratch}
"""
SUPERVISOR_YAML = """
model: scripted:script.yaml
a2a_agents:
  argocd: {url: "%(argocd)s", description: Knows ArgoCD., reconnect_timeout: 60}
  github: {url: "%(github)s", description: Knows GitHub., reconnect_timeout: 60}
profiles:
  supervisor:
    description: Asks the others.
    instructions: You supervise. Write your plan between ⟦ and ⟧ first.
    tools: [subagent_argocd, subagent_github]
    workspace: scratch
"""


class Processes:
    """The three processes, their folders and the files that let their tools go on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.gates = {name: folder / f"{name}.gate" for name in ("argocd", "github")}
        self.ports = {name: self._find_port() for name in ("argocd", "github", "supervisor")}
        self.urls = {name: f"http://127.0.0.1:{port}" for name, port in self.ports.items()}
        self.running: dict[str, Process] = {}
        wait = f"while [ ! -e {self.gates['argocd']} ]; do sleep 0.02; done; echo v2.9.3"
        self.argocd = Project(folder / "argocd")
        self.argocd.script({"argocd": [{"tools": [{"name": "shell", "args": {"command": wait}}]}, {"text": "v2.9.3"}]})
        (self.argocd.folder / "retinue.yaml").write_text(ARGOCD_YAML)
        calls = [{"name": f"subagent_{name}", "args": {"task": f"ask {name}"}} for name in ("argocd", "github")]
        self.supervisor = Project(folder / "supervisor")
        self.supervisor.script(
            {"supervisor": [{"text": "⟦ask both⟧", "tools": calls}, {"text": "All_is_well.", "chunks": 3}]}
        )
        (self.supervisor.folder / "retinue.yaml").write_text(SUPERVISOR_YAML % self.urls)
        self.supervisor.retinue("trust", "--yes")

    def _find_port(self) -> int:
        bound, url = bind()
        bound.close()
        return int(url.rpartition(":")[2])

    async def start(self, name: str) -> None:
        port = str(self.ports[name])
        serve = [*COMMAND, "a2a", "serve", "--runtime", "inherited", "--no-token", "--port", port]
        commands = {
            "argocd": [*serve, "--profile", "argocd", "--stream-as", "subagent", "--approve-by", "client"],
            "supervisor": [*serve, "--profile", "supervisor"],
            "github": [sys.executable, "-m", "tests.remote.plain_agent", port, str(self.gates["github"])],
        }
        folder = {"argocd": self.argocd.folder, "supervisor": self.supervisor.folder}.get(name, Path(SOURCE).parent)
        process = await asyncio.create_subprocess_exec(
            *commands[name], cwd=folder, env=environment(),
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        self.running[name] = Process(process, self.urls[name], [])
        async with httpx.AsyncClient(verify=TLS) as http:

            async def is_served() -> bool:
                assert process.returncode is None, f"{name} ended"
                with suppress(httpx.HTTPError):
                    await http.get(f"{self.urls[name]}/.well-known/agent-card.json")
                    return True
                return False

            await wait_for_answer(is_served)

    async def kill(self, name: str) -> None:
        process = self.running[name].process
        if process.returncode is None:
            process.kill()
        await process.wait()

    async def approve(self) -> None:
        """Answer at the root whatever the tree asks, from another terminal, until somebody stops this."""
        number = 1
        while True:
            done = await asyncio.to_thread(self.supervisor.retinue, "approve", str(number), "--yes")
            number = number + 1 if done.returncode == 0 else 1 + number % 3

    def read_log(self, project: Project, tree: str) -> list[dict[str, Any]]:
        lines = project.retinue("tail", tree, "--json").stdout.splitlines()
        return [json.loads(line) for line in lines]


@asynccontextmanager
async def start_processes(folder: Path) -> AsyncIterator[Processes]:
    processes = Processes(folder)
    async with AsyncExitStack() as stack:
        for name in ("argocd", "github", "supervisor"):
            stack.push_async_callback(processes.kill, name)
        await asyncio.gather(*(processes.start(name) for name in ("argocd", "github", "supervisor")))
        yield processes


async def follow(processes: Processes, wanted: str, body: dict[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    """Stream a request until an event with these words; return the task and what came."""
    found: list[dict[str, Any]] = []
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(httpx.AsyncClient(verify=TLS, timeout=120))
        response = await stack.enter_async_context(http.stream("POST", processes.urls["supervisor"], json=body))
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                found.append(json.loads(line[6:])["result"])
                if wanted and wanted in line:
                    break
    return found[0].get("id", ""), found


def words_of(events: list[dict[str, Any]]) -> list[str]:
    parts = [part for each in events if "artifact" in each for part in each["artifact"]["parts"]]
    return [part["text"].strip() for part in parts if part["text"].strip()]


@pytest.mark.requirement("CAIPE-11", "CAIPE-24", "P2")
async def test_one_stream_of_three_processes_and_a_cancel_that_reaches_all(
    tmp_path: Path,
) -> None:
    async with start_processes(tmp_path) as processes:
        processes.gates["github"].touch()
        processes.gates["argocd"].touch()
        async with TaskOwner() as owner:
            owner.start(processes.approve())
            task, events = await follow(processes, "", body_of("message/stream", message_of("how are things?")))
        log = processes.read_log(processes.supervisor, task)
        remote = next(each for each in log if each["kind"] == "run.remote" and '"typed":true' in each["reference"])
        there = processes.read_log(processes.argocd, json.loads(remote["reference"]).get("task", "") or "")
        for gate in processes.gates.values():
            gate.unlink()
        await stop_the_work(processes)
    lines = words_of(events)
    assert lines[0] == "⟦ask both⟧" and "".join(lines[-3:]) == "All_is_well."
    for agent, tool in (("Argocd", "Shell"), ("Github", "List_Issues")):
        own = [line for line in lines if agent in line]
        assert own == [
            f"🔧 Supervisor: Calling {agent}...",
            f"🔧 {agent}: Calling tool: {tool}",
            f"✅ {agent}: Tool {tool} completed",
            f"✅ Supervisor: {agent} completed",
        ]
    assert len(lines) == 1 + 8 + 3 and "**" not in "".join(lines)
    assert [each["status"]["state"] for each in events if each.get("final")] == ["completed"]
    assert len({each.get("taskId", each.get("id")) for each in events}) == 1
    traces = {each["trace_id"] for each in [*log, *there] if each["kind"] == "run.spawned"}
    assert len(traces) == 1 and there


async def stop_the_work(processes: Processes) -> None:
    """Cancel at the root, and wait until the others say that their task is cancelled."""
    task, _ = await follow(processes, "Calling tool: List_Issues", body_of("message/stream", message_of("go")))
    async with httpx.AsyncClient(verify=TLS, timeout=60) as http:
        answer = await http.post(processes.urls["supervisor"], json=body_of("tasks/cancel", {"id": task}))
        assert answer.json()["result"]["status"]["state"] == "canceled"
        listed = {"jsonrpc": "2.0", "id": 1, "method": "ListTasks", "params": {}}
        for url in (processes.urls["argocd"], processes.urls["github"]):

            async def is_cancelled(url: str = url) -> bool:
                said = await http.post(url, json=listed, headers={"A2A-Version": "1.0"})
                states = [each["status"]["state"] for each in said.json()["result"]["tasks"]]
                return sorted(states) == ["TASK_STATE_CANCELED", "TASK_STATE_COMPLETED"]

            await wait_for_answer(is_cancelled)


async def test_a_kill_of_each_leaves_one_ending_per_run_and_nothing_twice(tmp_path: Path) -> None:
    async with start_processes(tmp_path) as processes:
        for victim in ("supervisor", "argocd", "github"):
            for gate in processes.gates.values():
                gate.unlink(missing_ok=True)
            task, _ = await follow(processes, "Calling tool: List_Issues", body_of("message/stream", message_of("go")))
            await processes.kill(victim)
            await processes.start(victim)
            for gate in processes.gates.values():
                gate.touch()
            async with TaskOwner() as owner:
                owner.start(processes.approve())
                state = await wait_for_ending(processes, task)
            log = processes.read_log(processes.supervisor, task)
            assert state == "completed", victim
            runs = {each["run"]: each["agent"] for each in log if each["kind"] == "run.spawned"}
            endings = [(runs[each["run"]], each["status"]) for each in log if each["kind"] == "run.ended"]
            forgets = victim == "github"  # a plain agent keeps its tasks in memory
            expected = {"supervisor": "done", "argocd": "done", "github": "disconnected" if forgets else "done"}
            assert len(endings) == 3 and dict(endings) == expected, victim
            for agent, kind in product(("argocd", "github"), ("run.started", "tool.call", "tool.result")):
                count = len([each for each in log if (each["kind"], each["agent"]) == (kind, agent)])
                assert count == (0 if forgets and (agent, kind) == ("github", "tool.result") else 1), (
                    victim,
                    agent,
                    kind,
                )


async def wait_for_ending(processes: Processes, task: str) -> str:
    async with httpx.AsyncClient(verify=TLS, timeout=60) as http:

        async def read_ending() -> str | None:
            said = await http.post(processes.urls["supervisor"], json=body_of("tasks/get", {"id": task}))
            state: str = said.json()["result"]["status"]["state"]
            return None if state in ("submitted", "working") else state

        return await wait_for_answer(read_ending)
