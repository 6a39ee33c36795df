"""Tests of `retinue a2a serve` as a process: its input and output, and the remains after a kill."""

import asyncio
import json
import re
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from retinue.config.project import load_project
from tests.surfaces.a2a.kit import TLS, body_of, message_of
from tests.surfaces.cli.shell import A2A, COMMAND, Project, environment, find_quick_command

ROOT = Path(__file__).parents[3]
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
async def run_server(project: Project, *arguments: str, quick: bool = True) -> AsyncIterator[Process]:
    """Run a server. One that the test kills is not `quick`."""
    process = await asyncio.create_subprocess_exec(
        *(find_quick_command(*A2A) if quick else COMMAND), "a2a", "serve", "--runtime", "inherited", *arguments,
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
async def test_the_example_of_the_page_and_the_curl_line_of_the_seed_work(tmp_path: Path) -> None:
    """The three processes of docs/a2a.md, with ports that are free here."""
    page = (ROOT / "docs/a2a.md").read_text()
    urls: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name, pattern in (("argocd", "subagent"), ("github", "subagent"), ("supervisor", "supervisor")):
            project = Project(tmp_path / name)
            for file in (ROOT / "docs/examples/a2a" / name).iterdir():
                text = file.read_text()
                for known, port in (("argocd", "8001"), ("github", "8002")):
                    text = text.replace(f"http://127.0.0.1:{port}", urls.get(known, ""))
                (project.folder / file.name).write_text(text)
            project.retinue("trust", "--yes")
            options = ("--profile", name, "--stream-as", pattern, "--no-token")
            server = await stack.enter_async_context(run_server(project, *options))
            urls[name] = server.url
        await server.read_until("messageId")  # the greeting says how to try it
        shell = await asyncio.create_subprocess_shell(
            CURL.format(url=urls["supervisor"]), stdout=asyncio.subprocess.PIPE
        )
        out, _ = await shell.communicate()
    greeting = "".join(server.lines)
    assert f"card: {server.url}/.well-known/agent-card.json" in greeting and "curl -N" in greeting
    results = [json.loads(line[6:])["result"] for line in out.decode().splitlines() if line.startswith("data: ")]
    chunks = [(each["artifact"]["artifactId"], each["artifact"]["parts"][0]["text"]) for each in results[1:-1]]
    texts: dict[str, str] = {}
    for name, text in chunks:
        texts[name] = texts.get(name, "") + text
    read = "".join(f"{text.strip()}\n" for text in texts.values())
    assert f"```\n{read}```" in page
    assert results[-1]["status"] == {"state": "completed"}


async def test_a_killed_server_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    """kill -9 while a tool waits: the task is resumed, ends once, and the same client finds it."""
    gate = tmp_path / "gate"
    wait = f"while [ ! -e {gate} ]; do sleep 0.02; done; echo through"
    agents = {"argocd": [{"tools": [{"name": "shell", "args": {"command": wait}}]}, {"text": "It is over."}]}
    project = make_project(tmp_path / "p", agents)
    body = {**message_of("go"), "configuration": {"blocking": False}}
    async with run_server(project, "--profile", "argocd", quick=False) as server, httpx.AsyncClient(verify=TLS) as http:
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
    assert any("resuming the task" in line for line in server.lines)
    assert (again["id"], again["status"]["state"]) == (task, "completed")
    assert again["artifacts"][0]["parts"][0]["text"] == "It is over."
    log = project.retinue("tail", task, "--json").stdout
    assert log.count('"kind":"run.ended"') == 1


WRONG = [
    (("--host", "0.0.0.0", "--no-token"), "--no-token admits every program on this machine"),
    (("--host", "0.0.0.0"), "with --public-url"),
    (("--no-token", "--token", "a"), "--no-token admits every program"),
    (("--tls-cert", "c.pem"), "--tls-cert and --tls-key go together"),
    (("--public-url", "ftp://x"), "--public-url: 'ftp://x' is not an http or https URL"),
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


def test_the_settings_of_the_page_load(tmp_path: Path) -> None:
    """docs/a2a.md."""
    page = (ROOT / "docs/a2a.md").read_text()
    [config] = re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    file = tmp_path / "retinue.yaml"
    file.write_text(config)
    agents = load_project(tmp_path, config=file).settings.a2a_agents
    assert [agent.name for agent in agents] == ["argocd", "github"]
