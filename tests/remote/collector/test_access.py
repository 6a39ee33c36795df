"""Tests of access to the collector: addresses, Host, Origin, methods, types, sizes, and runs of other reporters."""

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import apsw
import pytest

from retinue.core.events import RunSpawned
from retinue.core.ports import Outcome
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS
from retinue.remote import collector
from tests.control.loopback.kit import knock
from tests.gates import hurry, pass_time
from tests.remote.collector.kit import AT, CollectorSetup, Server, of, open_collector, runs_of

START: dict[str, Any] = {"subagentName": "a", "timestamp": AT, "type": "subagent_start"}


@pytest.mark.requirement("CPE-25", "CPE-26", "CPE-27", "CPE-32", "CPE-49", "CPE-51", "CPE-53")
async def test_an_address_for_each_server_on_a_port_of_this_machine_only(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h, open_collector(tmp_path / "other") as other:
        first, second, elsewhere = h.server("one"), h.server("two"), other.server("one")
        for server in (first, second, elsewhere):
            assert server.environment[ADDRESS] == server.environment[CPE_ADDRESS]
            assert server.address.startswith(f"http://127.0.0.1:{server.port}/")
            assert len(server.path.split("/")[1]) >= 32
        assert first.port == second.port != elsewhere.port
        assert len({first.path, second.path, elsewhere.path}) == 3
        # open before whoever gets the address can have been started
        answer = await first.post(first.call(), "subagent_start")
        assert (answer.status, answer.body) == (200, b"{}")
        for family, address in ((socket.AF_INET, "127.0.0.2"), (socket.AF_INET6, "::1")):
            with socket.socket(family) as outside:
                assert outside.connect_ex((address, first.port)) != 0


@pytest.mark.requirement("CPE-25", "CPE-63")
async def test_what_cannot_name_an_address_gets_404(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        body = {**START, "subagentRunID": server.call()}
        secret = server.path.split("/")[1]
        wrong = [secret[:-1], secret.swapcase(), f"/{secret}", ""]
        near = ["/", "/subagent-events", f"/{secret}", f"{server.path}/", f"{server.path}x"]
        for path in (*near, *(f"/{each}/subagent-events" for each in wrong)):
            assert (await server.send(body, path=path)).status == 404, path
        for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "TRACE"):
            refused = await server.send(body, method=method)
            assert (refused.status, refused.headers["Allow"]) == (405, "POST")
        assert list(runs_of(await h.events())) == ["main"]


@pytest.mark.requirement("CPE-63")
async def test_what_is_wrong_with_a_head_is_told_before_the_body_is_read(tmp_path: Path) -> None:
    """The body never comes, and the answer is there all the same."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        good = {"Host": f"127.0.0.1:{server.port}", "Content-Type": "application/json", "Content-Length": "1000"}
        for changes, status in (
            ({"Host": "evil.example"}, 403),
            ({"Host": f"evil.example:{server.port}"}, 403),
            ({"Host": ""}, 403),
            ({"Origin": "http://evil.example"}, 403),
            ({"Origin": "null"}, 403),
            ({"Content-Type": "text/plain"}, 415),
            ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
            ({"Content-Encoding": "gzip"}, 415),
            ({"Content-Length": "4194305"}, 413),
            ({"Content-Length": "999999999999999"}, 413),
            ({"Content-Length": "9" * 40}, 400),
            ({"Content-Length": "-1"}, 400),
            ({"Transfer-Encoding": "chunked"}, 411),
        ):
            head = [f"POST {server.path} HTTP/1.1", *(f"{k}: {v}" for k, v in {**good, **changes}.items()), "", ""]
            answer = await knock(server.port, "\r\n".join(head).encode())
            assert answer.status == status, changes
            assert answer.error and answer.headers["Connection"] == "close"


@pytest.mark.requirement("CPE-37")
async def test_errors_say_what_is_wrong_and_the_collector_lives(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        for body, words in (
            (b"nonsense", "not JSON"),
            ({**START}, "missing required field `subagentRunID`"),
            *(
                (
                    {key: value for key, value in START.items() if key != name} | {"subagentRunID": run_id},
                    f"missing required field `{name}`",
                )
                for name in START
            ),
            ({**START, "subagentRunID": run_id, "type": "x"}, "Invalid enum value 'x'"),
        ):
            answer = await server.send(body)
            assert answer.status == 400 and words in answer.error
        assert (await knock(server.port, b"\x16\x03\x01nonsense\r\n\r\n")).status == 400
        assert (await server.post(run_id, "subagent_start")).status == 200


async def test_a_body_that_does_not_come_is_not_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "IDLE_SECONDS", 20.0)
    async with open_collector(tmp_path) as h:
        server = h.server()
        assert (await hurry(server.send(b'{"', Content_Length="1000"), 20)).status == 408
        assert (await hurry(knock(server.port, b""), 20)).status == 408
        run_id = server.call()
        data = json.dumps({**START, "subagentRunID": run_id}).encode()
        head = f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
        asked = f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(asked)
        assert (await reader.readuntil(b"\r\n\r\n{}")).startswith(b"HTTP/1.1 200 ")
        await pass_time(20)
        assert await reader.read() == b""  # one who has spoken, and is silent now, is hung up on
        writer.close()


@pytest.mark.requirement("CPE-63")
async def test_a_server_speaks_of_runs_below_its_own_calls_only(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        one, two = h.server("one"), h.server("two")
        mine, theirs = one.call(), two.call()
        assert (await two.post(mine, "subagent_start")).status == 403  # announced for the other
        assert (await one.post(mine, "subagent_start")).status == 200
        assert (await two.post(mine, "tool_call", toolName="x")).status == 403
        assert (await two.post(mine, "subagent_end")).status == 403
        assert (await two.post("below", "subagent_start", parentRunID=mine)).status == 403
        assert (await one.post("below", "subagent_start", parentRunID=mine)).status == 200
        assert (await two.post("below", "thought_trace", payload="x")).status == 403  # first seen on the other's path
        refused = await one.post("x", "subagent_start", parentRunID="nobody knows it")
        assert (refused.status, refused.error) == (403, "run 'x' is not below a call that was made on this server")
        assert (await two.post(theirs, "subagent_start")).status == 200
        h.collector.end_call(theirs, Outcome("done"))
        assert (await two.post("late", "subagent_start")).status == 404  # it has no run at work
        assert set(runs_of(await h.until("run.started", 4))) == {"main", mine, "below", theirs}


@pytest.mark.requirement("CPE-38", "CPE-63")
async def test_runs_nobody_announced_stand_below_the_one_they_name(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        first = server.call()
        await server.post(first, "subagent_start", name="outer")
        await server.post("deeper", "subagent_start", name="inner", parentRunID=first, rootRunID=first)
        await server.post("unsaid", "subagent_start", name="other")  # as a CPE process below a CPE process reports
        anchor = h.collector.meta(h.main.ref)["retinue/parentRunID"]
        await server.post("beside", "subagent_start", name="sibling", parentRunID=anchor)
        events = await h.until("run.started", 5)
        runs = runs_of(events)
        parents = {event.run: event.body.parent for event in events if isinstance(event.body, RunSpawned)}
        assert parents[runs["deeper"]] == parents[runs["unsaid"]] == runs[first]
        assert parents[runs["beside"]] == parents[runs[first]] == 0
        paths = {event.run: event.path for event in events}
        assert paths[runs["deeper"]] == f"/main/outer-{runs[first]}/inner-{runs['deeper']}"


@pytest.mark.finding("M8")
@pytest.mark.parametrize("ours", [True, False])
async def test_an_unknown_run_id_is_refused_and_makes_no_run(tmp_path: Path, ours: bool) -> None:
    """Before, during and after a call, whether or not the server says anything about the call's own run."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        more = {"rootRunID": "first", "seq": 1} if ours else {}

        async def refused() -> None:
            for kind in ("subagent_start", "thought_trace", "subagent_end"):
                answer = await server.post("ghost-1", kind, **more)
                assert answer.status == 404
                assert answer.error == (
                    "there is no run 'ghost-1': report under the runId of the call, or name the run above it as"
                    " parentRunID"
                )

        await refused()
        run_id = server.call()
        await refused()
        if ours:
            assert (await server.post(run_id, "subagent_start", rootRunID=run_id, seq=1)).status == 200
            await refused()
        h.collector.end_call(run_id, Outcome("done"))
        await refused()
        assert set(runs_of(await h.events())) == {"main", run_id} if ours else {"main"}


@pytest.mark.finding("M8")
async def test_calls_of_a_reported_process_are_placed_by_the_tag_in_their_ids(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        one, two = h.server("one"), h.server("two")
        first, second = one.call(), one.call()
        for run_id in (first, second):
            await one.post(run_id, "subagent_start", rootRunID=run_id)
        called = collector.generate_run_id("ask", caller=first)
        assert (await two.post(called, "subagent_start")).status == 403  # a run of another server
        assert (
            await one.post(collector.generate_run_id("ask", caller=second), "subagent_end")
        ).status == 200  # said nothing
        assert (await one.post(called, "subagent_start")).status == 200
        assert (await one.post("nested", "subagent_start")).status == 200  # plain, below a plain one at work
        assert (await one.post("nested", "subagent_end")).status == 200
        assert (await one.post(called, "subagent_end")).status == 200
        assert (await one.post("late", "subagent_start")).status == 404
        events = await h.until("run.ended", 2)
        runs = runs_of(events)
        parents = {event.run: event.body.parent for event in events if isinstance(event.body, RunSpawned)}
        assert (parents[runs[called]], parents[runs["nested"]]) == (runs[first], runs[called])
        assert len(runs) == 5


@pytest.mark.requirement("CPE-34", "CPE-61")
async def test_parallel_posts_over_kept_connections(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        runs = [server.call() for _ in range(40)]
        await asyncio.gather(*[_talk(server, run) for run in runs])
        events = await h.until("run.ended", 40)
        for run_id, run in runs_of(events).items():
            if run:
                thoughts = [body.text for body in of(events, run) if hasattr(body, "text")]
                assert thoughts == [f"{run_id} {number}" for number in range(10)]


async def _talk(server: Server, run_id: str) -> None:
    """One connection, one request after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    bodies = [{"type": "subagent_start"}]
    bodies += [{"type": "thought_trace", "payload": f"{run_id} {number}"} for number in range(10)]
    for body in [*bodies, {"type": "subagent_end"}]:
        data = json.dumps({**START, "subagentRunID": run_id, **body}).encode()
        head = f"POST {server.path} HTTP/1.1\r\nHost: localhost:{server.port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n") and await reader.readexactly(2) == b"{}"
    writer.close()


@pytest.mark.requirement("CPE-62", "CPE-34")
async def test_a_screen_that_stands_still_and_a_disk_that_is_busy_hold_up_nobody(tmp_path: Path) -> None:
    """A report is accepted when it is handed over, independently of screens and of the write to disk."""
    async with open_collector(tmp_path, durable=True) as h:
        server = h.server()
        run_id = server.call()
        await h.until("run.started")
        screen = h.supervisor.watch(h.tree)
        await anext(screen)  # and never again
        [file] = (tmp_path / ".retinue" / "logs").glob("*.db")
        other = apsw.Connection(str(file))  # a second SQLite in this process would drop the locks of the first
        other.execute("BEGIN IMMEDIATE")  # nobody else can write the file now
        for number in range(200):
            assert (await server.post(run_id, "thought_trace", payload=str(number))).status == 200
        other.execute("ROLLBACK")
        other.close()
        events = await h.until("thinking", 200)
        assert [body.text for body in of(events, 1)[2:]] == [str(number) for number in range(200)]
        await screen.aclose()


async def test_a_peer_that_waits_to_be_told_to_go_on(tmp_path: Path) -> None:
    """curl sends `Expect: 100-continue` with a large body."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        data = json.dumps({**START, "subagentRunID": server.call()}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = f"POST {server.path} HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Expect: 100-continue\r\nContent-Length: {len(data)}\r\n\r\n".encode())
        assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        writer.write(data)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 OK")
        writer.close()


async def test_the_secret_of_an_address_is_shown_nowhere(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        h2 = CollectorSetup(
            h.supervisor, h.collector, h.supervisor.spawner.spawn_primary(h.main.plan.profile, h.main.task)
        )
        run_id = server.call(by=h2.main)
        await server.post(run_id, "tool_result", toolName="shell", payload=f"ADDRESS={server.address}")
        events = await h2.until("tool.result")
        assert events[-1].body.text == f"ADDRESS=http://127.0.0.1:{server.port}/[secret]"  # type: ignore[union-attr]
