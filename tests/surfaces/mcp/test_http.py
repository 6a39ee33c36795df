"""Streamable HTTP: who is let in, sessions, and both revisions with the SDK's own client."""

from __future__ import annotations

import asyncio
import json
import os
import stat
from pathlib import Path
from typing import Any

import httpx2
import pytest
from mcp import Client
from mcp.client.streamable_http import streamable_http_client

from retinue.files.state_owner import claim_state_folder
from tests.gates import Gate
from tests.gates import until as wait_until
from tests.surfaces.cli.shell import Project
from tests.surfaces.mcp.kit import BOTH, Server, listening

STUCK: dict[str, Any] = {"*": [{"hang": True}]}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "raw", "version": "1"}},
}
META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
TASKS = {"tasks": [{"task": "t", "subagent_id": "one"}]}


def call(name: str, arguments: dict[str, Any], *, id: int = 7, **meta: Any) -> dict[str, Any]:
    params = {"name": name, "arguments": arguments, **({"_meta": meta} if meta else {})}
    return {"jsonrpc": "2.0", "id": id, "method": "tools/call", "params": params}


async def session_of(server: Server) -> str:
    status, headers, _ = await server.post(HELLO)
    assert status == 200
    return headers["mcp-session-id"]


async def post_in_a_session(server: Server, body: dict[str, Any]) -> tuple[str, int, Any]:
    """The session, status and JSON of a POST in a new session, which is made again if it has timed out by then."""
    status = 404
    while status == 404:
        session = await session_of(server)
        status, _, found = await server.post(body, Mcp_Session_Id=session)
    return session, status, found


def trees(project: Project) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for run in json.loads(project.retinue("ps", "--all", "--json").stdout):
        found.setdefault(run["tree"], []).append(f"{run['subagent_id'] if run['run'] else 'client'}:{run['state']}")
    return found


async def until(project: Project, run: str) -> None:
    """Waits until a run stands there, such as `one:running`."""
    while not any(run in runs for runs in (await asyncio.to_thread(trees, project)).values()):
        await asyncio.sleep(0)


@pytest.mark.parametrize("mode", BOTH)
async def test_the_sdks_client_with_the_token(project: Project, mode: str) -> None:
    async with listening(project) as server:
        file = project.folder / ".retinue" / "mcp" / "token"
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        headers = {"Authorization": f"Bearer {file.read_text()}"}
        http = httpx2.AsyncClient(headers=headers, timeout=200)
        async with http, Client(streamable_http_client(server.url, http_client=http), mode=mode) as client:
            assert len((await client.list_tools()).tools) == 9
            result = await client.call_tool("spawn_subagents", TASKS)
    assert result.structured_content["results"][0]["answer"] == "hello from the subagent"
    kept = file.read_text()
    async with listening(project):
        assert file.read_text() == kept  # clients are told once


async def test_who_is_not_let_in(project: Project) -> None:
    async with listening(project) as server:
        token = (project.folder / ".retinue" / "mcp" / "token").read_text()
        ok = {"Authorization": f"Bearer {token}"}
        assert (await server.post(HELLO, **ok))[0] == 200
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer wrong"}, 401),
            ({"Authorization": f"Basic {token}"}, 401),
            ({"Authorization": token}, 401),
            ({**ok, "Host": "evil.example:80"}, 403),
            ({**ok, "Host": "127.0.0.1"}, 403),
            ({**ok, "Origin": "http://evil.example"}, 403),
            ({**ok, "Origin": "null"}, 403),
            ({**ok, "Content_Type": "text/plain"}, 415),
            ({**ok, "Content_Type": ""}, 415),
            ({**ok, "Content_Encoding": "gzip"}, 415),
            ({**ok, "Accept": "text/html"}, 406),
            ({**ok, "Content_Length": "x"}, 400),
            ({**ok, "Transfer_Encoding": "chunked"}, 411),
        ):
            found, _, body = await server.post(HELLO, **headers)
            assert found == status, (headers, body)
            assert body["error"]["message"] and token not in json.dumps(body)
        for method in ("GET", "PUT", "OPTIONS", "HEAD", "PATCH"):
            head = f"{method} /mcp HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {token}\r\n\r\n"
            assert b" 405 " in (await server.raw(head.encode())).split(b"\r\n")[0]
        other = f"POST / HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nAuthorization: Bearer {token}\r\n\r\n"
        assert b" 404 " in await server.raw(other.encode())
        assert (await server.post(HELLO, Origin=f"http://localhost:{server.port}", **ok))[0] == 200


async def test_what_is_refused_is_refused_before_its_body_is_read(project: Project) -> None:
    """The answer is there although not one byte of the body was sent."""
    async with listening(project) as server:
        token = (project.folder / ".retinue" / "mcp" / "token").read_text()
        good = {
            "Host": f"127.0.0.1:{server.port}",
            "Authorization": f"Bearer {token}",
            "Content-Type": "application/json",
            "Content-Length": "1000",
        }
        for name, value, status in (
            ("Host", "evil.example", 403),
            ("Origin", "http://evil.example", 403),
            ("Authorization", "Bearer wrong", 401),
            ("Content-Type", "text/plain", 415),
            ("Content-Length", "999999999", 413),
        ):
            head = "".join(f"{key}: {each}\r\n" for key, each in {**good, name: value}.items())
            async with asyncio.timeout(100):
                answer = await server.raw(f"POST /mcp HTTP/1.1\r\n{head}\r\n".encode())
            assert f" {status} ".encode() in answer.split(b"\r\n")[0], (name, answer)


async def test_a_session_is_one_tree_and_ends_with_it(project: Project) -> None:
    async with listening(project, "--no-token", agents=STUCK) as server:
        first, second = await session_of(server), await session_of(server)
        spawn = call("spawn_subagents", {**TASKS, "background": True})
        for session in (first, second, first):
            status, _, body = await server.post(spawn, Mcp_Session_Id=session)
            assert status == 200
            spawn["params"]["arguments"]["tasks"] = [{"task": "u", "subagent_id": f"{body['id']}-more"}]
        assert sorted(map(len, trees(project).values())) == [2, 3]
        assert (await server.post(call("list_subagents", {}), Mcp_Session_Id="unknown"))[0] == 404
        assert (await server.post(call("list_subagents", {})))[0] == 400
        assert (await server.post(call("list_subagents", {}), Mcp_Session_Id=first, MCP_Protocol_Version="1"))[0] == 400
        head = f"DELETE /mcp HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nMcp-Session-Id: {first}\r\n\r\n"
        assert b" 200 " in await server.raw(head.encode())
        assert (await server.post(call("list_subagents", {}), Mcp_Session_Id=first))[0] == 404
        found = trees(project)
        [ended] = [runs for runs in found.values() if len(runs) == 3]
        assert [run.split(":")[1] for run in ended] == ["done", "cancelled", "cancelled"]
        assert (await server.post(call("list_subagents", {}), Mcp_Session_Id=second))[0] == 200


async def test_requests_without_a_session_share_one_tree(project: Project) -> None:
    async with listening(project, "--no-token") as server:
        headers = {"MCP_Protocol_Version": "2026-07-28", "Mcp_Method": "tools/call", "Mcp_Name": "spawn_subagents"}
        for number in range(3):
            tasks = {"tasks": [{"task": "t", "subagent_id": f"s{number}"}]}
            status, found, body = await server.post(call("spawn_subagents", tasks, id=1, **META), **headers)
            assert status == 200 and "mcp-session-id" not in found
            assert body["result"]["structuredContent"]["success"]
        assert [len(runs) for runs in trees(project).values()] == [4]


async def test_a_client_without_a_session_that_goes_away_has_cancelled(project: Project) -> None:
    async with listening(project, "--no-token", agents=STUCK) as server:
        body = json.dumps(call("spawn_subagents", TASKS, **META)).encode()
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
            f"MCP-Protocol-Version: 2026-07-28\r\nMcp-Method: tools/call\r\nMcp-Name: spawn_subagents\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head.encode() + body)
        await until(project, "one:running")
        writer.close()
        await until(project, "one:cancelled")


async def test_a_client_with_a_session_may_lose_its_connection(project: Project, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    async with listening(project, "--no-token", "--yes", agents={"*": [gate.reply, "late"]}) as server:
        session = await session_of(server)
        body = json.dumps(call("spawn_subagents", TASKS)).encode()
        head = (
            f"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
            f"Mcp-Session-Id: {session}\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        _, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(head.encode() + body)
        await until(project, "one:running")
        writer.close()
        await gate.let_pass()
        wait = call("wait_for_background_tool", {"subagent_id": "one"}, id=8)
        _, _, found = await server.post(wait, Mcp_Session_Id=session)
        assert found["result"]["structuredContent"]["results"][0]["answer"] == "late"
        cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}}
        assert (await server.post(cancel, Mcp_Session_Id=session))[0] == 202


@pytest.mark.finding("M5")
@pytest.mark.parametrize("mode", BOTH)
async def test_the_subagents_of_a_client_that_left_end_with_its_session(project: Project, mode: str) -> None:
    """Most clients send no DELETE: they are just not there any more."""
    spawn = {**TASKS, "background": True}
    async with listening(project, "--no-token", "--session-timeout", "2", agents=STUCK) as server:
        session, status = "", 0
        if mode == "legacy":
            session, status, _ = await post_in_a_session(server, call("spawn_subagents", spawn))
        else:
            headers = {"MCP_Protocol_Version": mode, "Mcp_Method": "tools/call", "Mcp_Name": "spawn_subagents"}
            status, _, _ = await server.post(call("spawn_subagents", spawn, **META), **headers)
        assert status == 200
        await until(project, "one:cancelled")
        if mode == "legacy":
            assert (await server.post(call("list_subagents", {}), Mcp_Session_Id=session))[0] == 404


@pytest.mark.finding("M5")
async def test_a_client_that_waits_for_its_call_has_not_left(project: Project, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    agents = {"one": [gate.reply, "late"], "two": [{"hang": True}]}
    other = {"tasks": [{"task": "t", "subagent_id": "two"}], "background": True}
    async with listening(project, "--no-token", "--yes", "--session-timeout", "1", agents=agents) as server:
        waiting = asyncio.create_task(post_in_a_session(server, call("spawn_subagents", TASKS)))
        held = await gate.wait_for_arrival()
        await post_in_a_session(server, call("spawn_subagents", other))
        await until(project, "two:cancelled")  # its client left after the other one was seen for the last time
        os.close(held)
        _, _, body = await waiting
    assert body["result"]["structuredContent"]["results"][0]["answer"] == "late"


async def test_bad_bodies_are_answered_and_the_server_lives(project: Project) -> None:
    async with listening(project, "--no-token") as server:
        for body in (b"{", b"[" * 100_000, b"\xff", b"[]", b"null", b'{"jsonrpc":"2.0"}', b""):
            status, _, found = await server.post(body)
            assert status == 400 and found["error"]["code"] in (-32700, -32600), body[:20]
        status, _, found = await server.post(b'{"jsonrpc":"2.0","id":7,"method":"ping","method":"ping"}')
        twice = {"code": -32600, "message": "the key 'method' is given twice"}
        assert (status, found) == (400, {"jsonrpc": "2.0", "id": 7, "error": twice})
        assert (await server.post(HELLO))[0] == 200
        assert b" 400 " in await server.raw(b"GARBAGE\r\n\r\n")
        assert b" 431 " in await server.raw(b"POST /mcp HTTP/1.1\r\nX: " + b"x" * 20_000 + b"\r\n\r\n")
        assert await server.raw(b"", end=True) == b""
        assert (await server.post(HELLO))[0] == 200


@pytest.mark.finding("X1")
@pytest.mark.parametrize("mode", [0o644, 0o600])
async def test_a_token_that_somebody_else_can_know_is_not_used(project: Project, mode: int) -> None:
    """A pull can bring a token file of any mode: a file that other users can read or have made is not used."""
    file = project.folder / ".retinue" / "mcp" / "token"
    claim_state_folder(file.parent.parent)
    file.parent.mkdir(mode=0o700)
    file.write_text("A" * 40)
    file.chmod(mode)
    async with listening(project) as server:
        assert file.read_text() != "A" * 40
        assert stat.S_IMODE(os.stat(file).st_mode) == 0o600
        assert (await server.post(HELLO, Authorization=f"Bearer {'A' * 40}"))[0] == 401


class LeavingHost:
    """A host without tools: while it ends its first session, the client of the second one leaves too."""

    def __init__(self) -> None:
        self.url, self.names = "", list[str]()
        self.ended = 0

    async def end_session(self, session: object) -> None:
        self.ended += 1
        if self.ended == 1:
            async with httpx2.AsyncClient() as http:
                await http.delete(self.url, headers={"Mcp-Session-Id": self.names[1]})


async def test_a_client_that_leaves_while_idle_sessions_end_stops_none_of_their_ends() -> None:
    from retinue.surfaces.mcp.http import Endpoint
    from retinue.surfaces.mcp.server import Server as McpServer

    host = LeavingHost()

    async def load() -> Any:
        return host

    server = McpServer(load, say=lambda _: None)
    await server.wait_for_host()
    async with Endpoint(server, port=0, token="", idle_seconds=1.0) as endpoint, httpx2.AsyncClient() as http:
        host.url = endpoint.url
        answers = await asyncio.gather(*(http.post(endpoint.url, json=HELLO) for _ in range(3)))
        host.names += [answer.headers["mcp-session-id"] for answer in answers]
        await wait_until(lambda: host.ended == 3)
        ask = {"jsonrpc": "2.0", "id": 2, "method": "tools/list"}
        answers = [await http.post(endpoint.url, json=ask, headers={"Mcp-Session-Id": name}) for name in host.names]
        assert [answer.status_code for answer in answers] == [404] * 3
