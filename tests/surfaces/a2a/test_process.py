"""`retinue a2a serve` as a process: what a person types and reads, and what is left when it is killed."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.surfaces.a2a.kit import TLS, body_of, message_of
from tests.surfaces.cli.shell import COMMAND, Project, environment

YAML = """
model: scripted:script.yaml
approvals: {mode: yes}
profiles:
  argocd: {description: Knows ArgoCD., instructions: You know., tools: [glob, shell], workspace: scratch}
  supervisor: {description: Asks., instructions: You ask., tools: [subagent_argocd, glob], workspace: scratch}
"""
CURL = (
    "curl -sN -X POST {url} -H 'Content-Type: application/json' -H 'Accept: text/event-stream' "
    """-d '{{"id":"test","method":"message/stream","params":{{"message":{{"role":"user","parts":"""
    """[{{"kind":"text","text":"show argocd version"}}],"messageId":"msg-test"}}}}}}'"""
)


class Process:
    """A server, its address and what it has printed."""

    def __init__(self, process: asyncio.subprocess.Process, url: str, lines: list[str]) -> None:
        self.process, self.url, self.lines = process, url, lines

    async def read_until(self, wanted: str) -> str:
        assert self.process.stderr is not None
        while True:
            line = (await self.process.stderr.readline()).decode()
            assert line, f"it ended without {wanted!r}: {self.lines}"
            self.lines.append(line)
            if wanted in line:
                return line


@asynccontextmanager
async def run_server(project: Project, *arguments: str) -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, "a2a", "serve", "--runtime", "inherited", *arguments,
        cwd=project.folder, env=environment(), stderr=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip
    try:
        found = Process(process, "", [])
        line = await found.read_until("over A2A on")
        found.url = re.search(r"https?://\S+", line)[0]  # type: ignore[index]
        yield found
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


def make_project(folder: Path, agents: dict[str, Any]) -> Project:
    project = Project(folder)
    project.script(agents)
    (project.folder / "retinue.yaml").write_text(YAML)
    project.retinue("trust", "--yes")
    return project


@pytest.mark.requirement("CAIPE-33")
async def test_the_curl_line_of_the_seed_works(tmp_path: Path) -> None:
    agents: dict[str, Any] = {
        "supervisor": [
            {"text": "⟦plan⟧", "tools": [{"name": "subagent_argocd", "args": {"task": "v"}}]},
            {"text": "The answer.", "chunks": 2},
        ],
        "argocd": [{"tools": [{"name": "glob", "args": {"pattern": "*"}}]}, {"text": "v2"}],
    }
    project = make_project(tmp_path / "p", agents)
    async with run_server(project, "--profile", "supervisor", "--no-token") as server:
        await server.read_until("messageId")  # the greeting says how to try it
        shell = await asyncio.create_subprocess_shell(CURL.format(url=server.url), stdout=asyncio.subprocess.PIPE)
        out, _ = await shell.communicate()
    greeting = "".join(server.lines)
    assert f"card: {server.url}/.well-known/agent-card.json" in greeting and "curl -N" in greeting
    results = [json.loads(line[6:])["result"] for line in out.decode().splitlines() if line.startswith("data: ")]
    words = [part["text"].strip() for each in results if "artifact" in each for part in each["artifact"]["parts"]]
    assert [word for word in words if word] == [
        "⟦plan⟧", "🔧 Supervisor: Calling Argocd...", "🔧 Argocd: Calling tool: Glob",
        "✅ Argocd: Tool Glob completed", "✅ Supervisor: Argocd completed", "The an", "swer.",
    ]  # fmt: skip
    assert results[-1]["status"] == {"state": "completed"}


async def test_a_killed_server_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    """kill -9 while a tool waits: the task is resumed, ends once, and the same client finds it."""
    gate = tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.02; done; echo through"
    agents = {"argocd": [{"tools": [{"name": "shell", "args": {"command": wait}}]}, {"text": "It is over."}]}
    project = make_project(tmp_path / "p", agents)
    body = {**message_of("go"), "configuration": {"blocking": False}}
    async with run_server(project, "--profile", "argocd") as server, httpx.AsyncClient(verify=TLS) as http:
        token = (project.folder / ".retinue" / "a2a" / "tokens" / "default").read_text()
        http.headers["Authorization"] = f"Bearer {token}"
        task = (await http.post(server.url, json=body_of("message/send", body))).json()["result"]["id"]
        await server.read_until("sleep 0.02")
        server.process.kill()
        await server.process.wait()
    gate.touch()
    async with run_server(project, "--profile", "argocd") as server, httpx.AsyncClient(verify=TLS) as http:
        http.headers["Authorization"] = f"Bearer {token}"
        again = (await http.post(server.url, json=body_of("message/send", message_of("go", **{
            "messageId": body["message"]["messageId"]})), timeout=60)).json()["result"]  # fmt: skip
    assert any("going on with the task" in line for line in server.lines)
    assert (again["id"], again["status"]["state"]) == (task, "completed")
    assert again["artifacts"][0]["parts"][0]["text"] == "It is over."
    log = project.retinue("tail", task, "--json").stdout
    assert log.count('"kind":"run.ended"') == 1


WRONG = [
    (("--host", "0.0.0.0", "--no-token"), "--no-token lets in every program of this machine"),
    (("--host", "0.0.0.0"), "say with --public-url"),
    (("--no-token", "--token", "a"), "--no-token lets in every program"),
    (("--tls-cert", "c.pem"), "--tls-cert and --tls-key go together"),
    (("--public-url", "ftp://x"), "--public-url: 'ftp://x' is no http or https address"),
    (("--token", "a b"), "--token 'a b' must be"),
    (("--profile", "nosuch"), "unknown profile 'nosuch'"),
    (("--port", "0"), "must be a port"),
]


def test_what_would_let_in_too_many_is_refused_in_one_line(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", {})
    for arguments, words in WRONG:
        done = project.retinue("a2a", "serve", *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert words in done.stderr, done.stderr
