"""Tests of the life of MCP servers: one owner each, started on demand, restarted after a failure, ended with us."""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Limits
from retinue.core.events import Warned
from retinue.core.servers import McpServer
from retinue.testing import ManualClock
from retinue.tools.mcp.connection import LISTINGS_AT_ONCE, MAX_FAILURES, STREAMS_AT_ONCE
from retinue.tools.mcp.servers import McpServers
from tests.gates import pass_time, until
from tests.supervisor.tree.kit import bodies
from tests.tools.mcp.kit import (
    alive,
    call,
    held_port,
    http_server,
    main,
    program,
    quick_program,
    results,
    run,
    turns,
)

ONE = call("mcp__bad__one")
NEVER = 1e-6  # a second: the first at once, and then no more within a test


def servers_of(tmp_path: Path, **about: dict[str, Any]) -> McpServers:
    made = [McpServer(name, **{**each, "args": tuple(each["args"])}) for name, each in about.items()]
    return McpServers(made, project=str(tmp_path), folder=tmp_path / "mcp", back_off=0.01)


async def test_nothing_is_left_of_a_server(tmp_path: Path) -> None:
    _, events = await run({"calm": program("calm", cwd=str(tmp_path))}, turns(call("mcp__calm__who")))
    server, left, folder = results(events)[0].text.split(maxsplit=2)
    assert folder == str(tmp_path)
    assert not alive(int(server)) and not alive(int(left))


async def test_servers_that_no_run_needs_are_not_started(tmp_path: Path) -> None:
    servers = {"bad": program("bad", "lame", str(tmp_path)), "also": program("bad", "dies", str(tmp_path))}
    await run(servers, turns(), fields={"tools": ["read"]})
    assert list(tmp_path.iterdir()) == []
    await run(servers, turns(ONE), fields={"tools": ["mcp__bad"]})
    assert [path.name for path in tmp_path.iterdir()] == ["lame.lives"]


async def test_one_server_is_shared_by_all_runs(tmp_path: Path) -> None:
    async with retinue.open(mode="yes", mcp_servers={"bad": program("bad", "lame", str(tmp_path))}) as r:
        runs = [await r.spawn(main({"main": turns(ONE, ONE)}), "go") for _ in range(5)]
        ended = [await each.result() for each in runs]
    assert [result.status for result in ended] == ["done"] * 5
    assert (tmp_path / "bad.lives").exists() is False and (tmp_path / "lame.lives").read_text() == "x"


@pytest.mark.parametrize(
    ("mode", "why"),
    [
        ("exits", "it ended with exit code 1; it said: cannot find my configuration"),
        ("garbage", "it prints what is not MCP on stdout: 'Welcome to [31mthe server!'"),
        ("hangs", "it did not answer within 60 s; it said: loading the model"),
    ],
)
async def test_a_server_that_fails_is_named_and_others_go_on(tmp_path: Path, mode: str, why: str) -> None:
    servers = {
        "bad": program("bad", mode, str(tmp_path), startup_timeout=60),
        "good": program("bad", "lame", str(tmp_path)),
    }
    opened: list[Any] = []
    running = asyncio.create_task(run(servers, turns(call("mcp__good__one")), opened=opened))
    if mode == "hangs":
        await until(lambda: opened and _is_loading(opened[0].control.servers.connections))
        await pass_time(60)
    result, events = await running
    assert result.status == "done" and results(events)[0].text == "life 1"
    [told] = bodies(events, Warned)
    assert told.code == "lacks_tools"
    assert told.text == f"the MCP server 'bad' is not available: {why}; it is being started again"


def _is_loading(connections: Any) -> bool:
    """Tell if the good server has answered, and the bad one has sent its first message."""
    program = connections["bad"]._program
    return connections["good"].state == "up" and program is not None and "loading" in program.trouble


async def test_a_command_that_is_not_there_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)  # one with a folder that is closed to this user is another error
    _, events = await run({"bad": {"command": "no-such-server"}}, turns())
    [told] = bodies(events, Warned)
    assert (
        told.text == "the MCP server 'bad' is not available: cannot start 'no-such-server': No such file or directory"
    )
    _, events = await run({"bad": program("calm", cwd=str(tmp_path / "away"))}, turns())
    assert bodies(events, Warned)[0].text.endswith(f"there is no folder {tmp_path / 'away'}")


async def test_a_server_that_dies_is_started_again(tmp_path: Path) -> None:
    async with retinue.open(mode="yes", mcp_servers={"bad": program("bad", "dies", str(tmp_path))}) as r:
        first = await r.spawn(main({"main": turns(ONE)}), "go")
        [gone] = results([event async for event in first.events()])
        assert not gone.success
        assert gone.text == (
            "the MCP server 'bad' went away during the call: it ended with exit code 3; it said: "
            "Segmentation fault in libcheese"
        )
        servers: Any = r.control.servers
        await until(lambda: servers.connections["bad"].state == "up")
        again = await r.spawn(main({"main": turns(ONE)}), "go")
        assert results([event async for event in again.events()])[0].text == "life 2"


async def test_tools_that_change_again_and_again_are_listed_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retinue.tools.mcp.connection.LISTINGS_PER_SECOND", NEVER)
    servers = servers_of(tmp_path, bad=program("bad", "restless", str(tmp_path)))
    try:
        await servers.ready(None)
        connection, listings = servers.connections["bad"], tmp_path / "listings"
        await until(lambda: len(listings.read_text()) > LISTINGS_AT_ONCE)
        for _ in range(100):  # each takes a turn of the server
            assert connection._client is not None
            await connection._client.call_tool("one", {})
        assert connection.state == "up"
        assert len(listings.read_text()) <= 2 + LISTINGS_AT_ONCE
    finally:
        await servers.close()


async def test_there_is_an_end_to_starting_again(tmp_path: Path) -> None:
    servers = servers_of(tmp_path, bad=program("bad", "exits", str(tmp_path)))
    try:
        await servers.ready(None)
        connection = servers.connections["bad"]
        await until(lambda: connection.state == "given up")
        assert len((tmp_path / "exits.lives").read_text()) == MAX_FAILURES
        assert connection.unavailable_reason == (
            "the MCP server 'bad' is not available: it ended with exit code 1; it said: cannot find my configuration "
            f"({MAX_FAILURES} times; it is not tried again)"
        )
    finally:
        await servers.close()


async def test_an_address_that_goes_away_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("retinue.tools.mcp.connection.MAX_FAILURES", 1000)  # a slow machine starts it after a while
    monkeypatch.setattr("retinue.tools.mcp.connection.MAX_BACK_OFF", 1.0)
    one = {"main": turns(call("mcp__calm__say", text="here"))}
    with held_port() as port:
        async with retinue.open(mode="yes", mcp_servers={"calm": {"url": f"http://127.0.0.1:{port}/mcp"}}) as r:

            async def said() -> str:
                going = await r.spawn(main(one), "go")
                return results([event async for event in going.events()])[0].text

            async with http_server(port=port):
                assert await said() == "here"
            assert await said() == "the MCP server 'calm' went away during the call: All connection attempts failed"
            assert (await said()).startswith("the MCP server 'calm' is not available: ")
            async with http_server(port=port):
                servers: Any = r.control.servers
                await until(lambda: servers.connections["calm"].state == "up")
                assert await said() == "here"


JSON = "200 OK\r\nContent-Type: application/json"
MANY_VALUES = b"[" + b"0," * 1_000_000 + b"0]"


@pytest.mark.parametrize(
    ("head", "body", "why"),
    [
        ("401 Unauthorized", b"", "it answered HTTP 401; set its credentials in mcp_servers.it.headers"),
        ("200 OK\r\nContent-Type: text/html", b"<p>\x1b[31mhello", "Unexpected content type: text/html"),
        (JSON, b"[1,2", "Failed to parse JSON response: "),
        (f"{JSON}", MANY_VALUES, "it sent a message with more than 1,000,000 values"),
        (
            f"{JSON}\r\nContent-Encoding: gzip",
            gzip.compress(MANY_VALUES),
            "Failed to parse JSON response: it compressed its answer, which was not asked for",
        ),
        (
            "200 OK\r\nContent-Type: text/event-stream",
            b"data: " + MANY_VALUES + b"\n\n",
            "it sent a message with more than 1,000,000 values",
        ),
        ("307 Away\r\nLocation: http://example.com/", b"", "Redirect to http://example.com/ not followed"),
        ("500 No", b"", "Server returned an error response"),
    ],
)
async def test_an_address_that_answers_something_else(head: str, body: bytes, why: str) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(f"HTTP/1.1 {head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        result, events = await run({"it": {"url": f"http://127.0.0.1:{port}/mcp"}}, turns())
    assert result.status == "done"
    [told] = bodies(events, Warned)
    assert told.text.startswith(f"the MCP server 'it' is not available: {why}")
    assert told.text.endswith("; it is being tried again") and told.text.isprintable()


async def test_a_stream_that_ends_at_once_is_opened_again_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server says after how many milliseconds: 0."""
    monkeypatch.setattr("retinue.tools.mcp.connection.STREAMS_PER_SECOND", NEVER)
    opened: list[None] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = (await reader.readuntil(b"\r\n\r\n")).lower()
        kind, body = "application/json", b""
        if asked.startswith(b"get"):
            opened.append(None)
            kind, body = "text/event-stream", b"id: 1\nretry: 0\ndata:\n\n"
        elif found := re.search(rb"content-length: (\d+)", asked):
            message = json.loads(await reader.readexactly(int(found[1])))
            about = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}}
            tools = {"tools": [{"name": "one", "inputSchema": {"type": "object"}}]}
            known = {
                "initialize": {**about, "serverInfo": {"name": "it", "version": "1"}},
                "tools/list": tools,
                "tools/call": {"content": []},
            }
            said = {"jsonrpc": "2.0", "id": message.get("id")}
            result = known.get(message["method"])
            error = {"code": -32601, "message": "no such method"}
            body = json.dumps({**said, "error": error} if result is None else {**said, "result": result}).encode()
        head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nMcp-Session-Id: s\r\nContent-Length: {len(body)}\r\n"
        writer.write(f"{head}Connection: close\r\n\r\n".encode() + body)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    address = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/mcp"
    async with server, retinue.open(mode="yes", mcp_servers={"it": {"url": address}}) as r:
        await r.control.prepare()
        servers: Any = r.control.servers
        connection = servers.connections["it"]
        await until(lambda: len(opened) >= STREAMS_AT_ONCE)
        for _ in range(30):  # each takes several turns of the server
            await connection._client.call_tool("one", {})
        assert len(opened) <= 1 + STREAMS_AT_ONCE


async def test_tools_that_no_run_has_are_not_kept(tmp_path: Path) -> None:
    """A server may have other tools each time it is asked."""
    servers = servers_of(tmp_path, bad=program("bad", "lame", str(tmp_path)))
    try:
        await servers.ready(None)
        found = servers.find(None)
        assert set(servers.find(None).values()) == set(found.values()) and len(servers._tools) == 2
        del found
        assert not servers._tools
    finally:
        await servers.close()


async def test_a_few_words_beside_the_protocol_do_no_harm(tmp_path: Path) -> None:
    servers = {"bad": program("bad", "noisy", str(tmp_path))}
    _, events = await run(servers, turns(ONE), path=tmp_path / ".retinue", project=tmp_path)
    assert results(events)[0].text == "life 1"
    assert "not MCP: npm notice: a new version is out" in (tmp_path / ".retinue/mcp/bad.log").read_text()


async def test_half_a_character_is_made_whole_and_what_cannot_be_read_is_told_at_once(tmp_path: Path) -> None:
    servers = {"half": program("bad", "half", str(tmp_path)), "deep": program("bad", "deep", str(tmp_path))}
    _, events = await run(servers, turns(call("mcp__half__one"), call("mcp__deep__one")))
    half, deep = results(events)
    assert half.text == "\U0001f600|\ufffd|\\ud83d"
    assert "went away during the call: it sent a message that cannot be read: " in deep.text


async def test_a_line_without_end_is_the_end_of_the_server(tmp_path: Path) -> None:
    _, events = await run({"bad": program("bad", "endless", str(tmp_path))}, turns(ONE))
    assert "it printed a line of more than 64 MiB" in results(events)[0].text


@pytest.mark.requirement("P8")
async def test_what_a_server_complains_of_is_kept_and_never_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = turns(call("mcp__calm__complain", kilobytes=6000), call("mcp__calm__say", text="still here"))
    _, events = await run({"calm": quick_program("calm")}, script, path=tmp_path / ".retinue", project=tmp_path)
    assert [body.text for body in results(events)] == ["complained", "still here"]
    log = tmp_path / ".retinue" / "mcp" / "calm.log"
    assert log.stat().st_mode & 0o777 == 0o600
    assert 3_000_000 < log.stat().st_size < 5_000_000 and b"the rest is not kept" in log.read_bytes()
    shown = capfd.readouterr()
    assert shown.out == "" and shown.err == ""


async def test_cancelling_a_run_cancels_its_call_and_spares_the_server(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    async with retinue.open(mode="yes", mcp_servers={"calm": quick_program("calm")}) as r:
        run = await r.spawn(main({"main": turns(call("mcp__calm__wait", marker=str(marker)))}), "go")
        await until(marker.exists)
        assert await run.cancel()
        assert (await run.result()).status == "cancelled"
        await until(lambda: marker.read_text() == "cancelled")
        other = await r.spawn(main({"main": turns(call("mcp__calm__say", text="here"))}), "go")
        events = [event async for event in other.events()]
    assert results(events)[0].text == "here"


async def test_a_silent_call_is_given_up_and_progress_is_life(tmp_path: Path) -> None:
    script = turns(
        call("mcp__calm__wait", marker=str(tmp_path / "marker")),
        call("mcp__calm__work", steps=4, marker=str(tmp_path / "step")),
    )
    clock = ManualClock()
    async with retinue.open(mode="yes", mcp_servers={"calm": quick_program("calm", timeout=60)}, clock=clock) as r:
        going = await r.spawn(main({"main": script}, limits=Limits(stall=60)), "go")
        await until((tmp_path / "marker").exists)
        await pass_time(60)
        calls: Any = r.control.servers.connections["calm"]._calls._calls  # type: ignore[union-attr]

        def deadlines() -> list[float]:
            return [call.limit.when() for _, call in calls.values() if call.tool == "mcp__calm__work" and call.limit]

        await until(deadlines)
        for step in range(4):
            before = deadlines()
            (tmp_path / f"step{step}").touch()
            await until(lambda: deadlines() != before)  # noqa: B023
            await pass_time(40)
            await clock.advance(40)
        events = [event async for event in going.events()]
        result = await going.result()
    silent, worked = results(events)
    assert silent.text == "mcp__calm__wait: the server did not answer within 60 s, so the call was given up"
    assert worked.text == "4 steps"
    assert result.status == "done" and (tmp_path / "marker").read_text() == "cancelled"
    assert not any(body.code == "stalled" for body in bodies(events, Warned))


@pytest.mark.requirement("P37")
async def test_the_task_that_opens_a_connection_closes_it(tmp_path: Path) -> None:
    """Tasks that call, wait and are cancelled come and go; whoever closes is another one still."""
    servers = {"calm": quick_program("calm"), "bad": program("bad", "lame", str(tmp_path))}
    async with retinue.open(mode="yes", mcp_servers=servers) as r:
        waiting = [asyncio.create_task(r.control.prepare()) for _ in range(20)]
        await asyncio.sleep(0)
        for task in waiting[::2]:
            task.cancel()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in ended] == [True, False] * 10
        runs = []
        for number in range(20):
            script = turns(call("mcp__calm__wait", marker=str(tmp_path / f"m{number}")), ONE)
            runs.append(await r.spawn(main({"main": script}), "go"))
        await until(lambda: all((tmp_path / f"m{number}").exists() for number in range(20)))
        await asyncio.gather(*(each.cancel() for each in runs))
        assert {(await each.result()).status for each in runs} == {"cancelled"}
        connections = list(getattr(r.control.servers, "connections").values())  # noqa: B009 - no part of the port
        assert [connection.state for connection in connections] == ["up", "up"]
        busy = collect_busy_turns(asyncio.get_running_loop())
    assert len(busy) < 2000  # nobody spins
    assert [connection.state for connection in connections] == ["closed", "closed"]
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("mcp ")]


def collect_busy_turns(loop: Any) -> list[None]:
    """Return a list that grows with every turn of the loop in which a callback is ready at once."""
    found: list[None] = []
    select = loop._selector.select

    def count(timeout: float | None = None) -> Any:
        if timeout == 0:
            found.append(None)
        return select(timeout)

    loop._selector.select = count
    return found
