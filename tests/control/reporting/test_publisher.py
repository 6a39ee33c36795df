"""Tests of a subagent server of ours in its own process: its reports, and runs whose reports cannot be sent."""

import asyncio
import json
import os
import re
from collections.abc import Awaitable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from retinue.build.parts import Parts
from retinue.build.servers import make_reporting
from retinue.build.supervisor import make_supervisor
from retinue.control.reporting import HookedLog, Poster, Publisher, Relay, Reporting
from retinue.core.caller import NOBODY, Caller
from retinue.core.errors import ConfigError, LogLost
from retinue.core.events import (
    Body,
    Event,
    RunEnded,
    RunSpawned,
    ToolCall,
    ToolResult,
    TurnStarted,
    UsageReported,
    Warned,
)
from retinue.core.limits import Limits
from retinue.core.messages import RunRef
from retinue.core.profiles import Profile, Task
from retinue.core.usage import Usage
from retinue.log.sqlite import SqliteLog
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS
from retinue.remote.collector import LoopbackCollector, RemainingLimits
from retinue.supervisor.caller_limits import serve_caller
from retinue.testing import ManualClock, scripted
from tests.remote.collector.kit import CHILD, of, open_collector, runs_of
from tests.remote.collector.peers import peer, reviewed, root, started

LOOK = {"tools": [{"name": "glob", "args": {"pattern": "*.nothing"}}]}
REVIEW: dict[str, Any] = {
    "reviewer": [
        {"thinking": "first I look", **LOOK, "usage": {"input_tokens": 10, "output_tokens": 2}},
        {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "help me", "subagent_type": "helper"}]}}]},
        {"text": "it is fine", "usage": {"input_tokens": 3, "output_tokens": 4}},
    ],
    "helper": [LOOK, {"text": "helped"}],
}
TWO_LOOKS: dict[str, Any] = {"reviewer": [LOOK, LOOK, {"text": "it is fine"}]}


async def result_of(process: asyncio.subprocess.Process) -> tuple[dict[str, Any], str]:
    said, complaint = await process.communicate()
    assert process.returncode == 0, complaint.decode()
    result: dict[str, Any] = json.loads(said.splitlines()[-1])
    return result, complaint.decode()


@pytest.mark.requirement("CPE-28", "CPE-59", "CPE-24", "CPE-46", "CPE-11", "CPE-38", "CPE-35", "CPE-36")
async def test_a_server_reports_every_run_of_its_tree_in_order(tmp_path: Path) -> None:
    """Over HTTP alone: the process speaks no MCP at all, so nothing depends on its notifications."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        result, complaint = await result_of(await server.start(CHILD, run_id, json.dumps(REVIEW)))
        assert (result["status"], complaint) == ("done", "")
        events = await h.until("run.ended", 2)
        runs = runs_of(events)
        helper = next(run for label, run in runs.items() if label not in ("main", run_id))
        kinds = [event.kind for event in events if event.run == runs[run_id]]
        assert kinds == [
            "run.spawned", "run.started", "thinking", "usage", "tool.call", "tool.result", "tool.call", "tool.result",
            "usage", "run.ended",
        ]  # fmt: skip
        spawned = [event.body for event in events if isinstance(event.body, RunSpawned)][1:]
        assert [(body.parent, body.task, body.server) for body in spawned] == [
            (0, "look at it", "reviewers"), (runs[run_id], "help me", "reviewers"),
        ]  # fmt: skip
        assert [type(body) for body in of(events, helper)[2:]] == [ToolCall, ToolResult, RunEnded]
        assert of(events, runs[run_id])[-1].final_response == "it is fine"
        assert [body.usage for body in of(events, runs[run_id]) if isinstance(body, UsageReported)] == [
            Usage(10, 2), Usage(3, 4),
        ]  # fmt: skip
        ended = [event.run for event in events if isinstance(event.body, RunEnded)]
        assert ended == [helper, runs[run_id]]


@pytest.mark.finding("S13")
@pytest.mark.requirement("CPE-33", "CPE-46", "CPE-54")
async def test_it_is_reported_before_it_is_done(tmp_path: Path) -> None:
    """The process stands still between its turns, and what it has done is here."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        process = await server.start(CHILD, server.call(), json.dumps(TWO_LOOKS), "wait")
        assert process.stdin is not None and process.stdout is not None
        for turn in (2, 3):
            assert json.loads(await process.stdout.readline()) == {"turn": turn}
            events = await h.until("tool.result", turn - 1)
            assert not any(isinstance(event.body, RunEnded) for event in events)
            process.stdin.write(b"\n")
        assert (await result_of(process))[0]["status"] == "done"


@pytest.mark.finding("S13")
@pytest.mark.requirement("CPE-46", "CPE-61")
async def test_an_event_is_posted_when_the_one_before_it_has_arrived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to the thought is held back. The tool is called meanwhile, and that is not posted yet."""
    arrived, held = asyncio.Event(), asyncio.Event()

    async def hold(post: dict[str, Any]) -> None:
        if post["type"] == "thought_trace":
            arrived.set()
            await held.wait()

    async with peer("", hold=hold) as (address, posts):
        monkeypatch.setenv(ADDRESS, address)
        reviewing = asyncio.create_task(reviewed(tmp_path, {"reviewer": [{"thinking": "hm", **LOOK}, {"text": "ok"}]}))
        await arrived.wait()
        await ManualClock.settle()
        assert [post["type"] for post in posts] == ["subagent_start", "thought_trace"]
        held.set()
        assert (await reviewing)[0] == "done"
    assert [(post["type"], post["seq"]) for post in posts] == [
        ("subagent_start", 1), ("thought_trace", 2), ("tool_call", 3), ("tool_result", 4), ("subagent_end", 5),
    ]  # fmt: skip


@pytest.mark.requirement("CPE-29", "CPE-54")
async def test_what_is_reported_stands_on_the_stderr_of_the_root_and_never_on_its_stdout(tmp_path: Path) -> None:
    async with root(tmp_path) as r:
        await result_of(await r.start(REVIEW))
        said, screen = await r.process.communicate(b"")
        assert said == b""  # the line with the address was read before
        blocks = screen.decode().split("\n\n")
        headers = [line for block in blocks for line in block.splitlines() if line.startswith("####")]
        assert headers == [
            "#### reviewer thought trace",
            "#### reviewer [tool call]",
            '#### reviewer Tool "glob" result:',
            "#### reviewer [tool call]",
            "#### helper [tool call]",
            '#### helper Tool "glob" result:',
            '#### reviewer Tool "spawn_subagents" result:',
        ]
        assert "it is fine" not in screen.decode()
        received = [block for block in blocks if block.startswith("####")]
        assert received[0] == "#### reviewer thought trace\nfirst I look"
        looked = '[tool call]\nglob\n{\n  "pattern": "*.nothing"\n}'
        assert (received[1], received[4]) == (f"#### reviewer {looked}", f"#### helper {looked}")


@pytest.mark.requirement("CPE-33", "CPE-47")
async def test_strict_the_collector_is_killed_in_the_middle(tmp_path: Path) -> None:
    """The collector is a process of its own here, killed as `kill -9` does it."""
    async with root(tmp_path) as r:
        child = await r.start(TWO_LOOKS, "wait")
        assert child.stdin is not None and child.stdout is not None
        assert json.loads(await child.stdout.readline()) == {"turn": 2}
        await r.shows('Tool "glob" result:')
        r.process.kill()
        await r.process.wait()
        child.stdin.write(b"\n\n")
        result, complaint = await result_of(child)
        assert (result["status"], result["success"]) == ("failed", False)
        where = r.address.split("/")[2]
        assert result["error_details"].startswith(f"cannot report to the collector: cannot reach {where}: ")
        assert result["tool_count"] == 2 and len(result["tool_logs"]) == 1  # the second call never ran
        assert "the end of" in complaint and "was not reported" in complaint
        assert r.address.rpartition("/")[2] not in json.dumps(result) + complaint


@pytest.mark.requirement("CPE-47")
async def test_best_effort_the_collector_is_killed_in_the_middle(tmp_path: Path) -> None:
    async with root(tmp_path) as r:
        child = await r.start(TWO_LOOKS, "wait", "best_effort")
        assert child.stdin is not None and child.stdout is not None
        assert json.loads(await child.stdout.readline()) == {"turn": 2}
        await r.shows('Tool "glob" result:')
        r.process.kill()
        await r.process.wait()
        child.stdin.write(b"\n\n")
        result, complaint = await result_of(child)
        assert (result["status"], result["tool_count"]) == ("done", 2)
        # Nothing waits for the failed post, so the run may have ended before it.
        said = (result.get("warning") or "") + complaint
        assert said.count("the runs continue unreported (best_effort)") == 1


@pytest.mark.requirement("CPE-47")
@pytest.mark.parametrize(("again", "seqs"), [(0.0, [1, 2, 3, 4, 5]), (1000.0, [1, 2])])
async def test_best_effort_tries_again_later_and_what_was_lost_shows_as_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, again: float, seqs: list[int]
) -> None:
    """The second event is refused. The numbers go on, so whoever takes the third knows that one is missing."""
    monkeypatch.setattr("retinue.control.reporting.AGAIN_SECONDS", again)
    async with peer("thought_trace") as (address, posts):
        monkeypatch.setenv(ADDRESS, address)
        script = {"reviewer": [{"thinking": "hm", **LOOK}, {"text": "fine"}]}
        ended, _, events = await reviewed(tmp_path, script, best_effort=True)
        assert (ended, [post["seq"] for post in posts]) == ("done", seqs)
        warned = [event.body.text for event in events if isinstance(event.body, Warned)]
        warned += [record.message for record in caplog.records]  # where the run had ended before the answer came
        assert len(warned) == 1 and "answered 403" in warned[0] and "best_effort" in warned[0]


@pytest.mark.requirement("CPE-65")
@pytest.mark.parametrize("option", ["strict", "best_effort"])
async def test_a_run_that_is_cancelled_at_the_root_ends_in_its_own_process(tmp_path: Path, option: str) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        script = {"reviewer": [LOOK, LOOK, {"hang": True}]}  # it learns of the cancel by its next post
        child = await server.start(CHILD, run_id, json.dumps(script), "wait", option)
        assert child.stdin is not None and child.stdout is not None
        assert json.loads(await child.stdout.readline()) == {"turn": 2}
        run = runs_of(await h.until("tool.result"))[run_id]
        assert await h.supervisor.cancel(h.tree, run)
        child.stdin.write(b"\n\n")
        result, complaint = await result_of(child)
        assert (result["status"], complaint) == ("cancelled", "")
        assert len(result["tool_logs"]) < 2 or option == "best_effort"


@pytest.mark.requirement("CPE-47")
@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b'HTTP/1.1 403 Forbidden\r\nContent-Length: 14\r\n\r\n{"error":"no"}', 'answered 403: {"error":"no"}'),
        (b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n", "answered 500"),
        (b"HTTP/1.1 302 Found\r\nLocation: http://evil.example/\r\nContent-Length: 0\r\n\r\n", "answered 302"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "is not a collector"),
        (b"x" * 100_000, "is not a collector"),
        (b"HTTP/1.1 200 OK\r\nContent-Le", "broke off its answer"),
        (b"", "closed the connection without an answer"),
        (None, "no answer from 127.0.0.1:[0-9]+ within 0.2 s"),
    ],
)
async def test_every_way_not_to_arrive_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, why: str
) -> None:
    if answer is None:
        monkeypatch.setattr("retinue.control.reporting.POST_SECONDS", 0.2)
    async with peer(answer) as (address, _):
        monkeypatch.setenv(ADDRESS, address)
        status, error, _ = await reviewed(tmp_path, TWO_LOOKS)
        assert status == "failed"
        assert error.startswith("cannot report to the collector: ")
        assert re.search(why, error), error
        assert "secret-of-the-path" not in error


@pytest.mark.requirement("CPE-33", "CPE-47")
@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("subagent_start", "failed"),
        ("thought_trace", "failed"),
        ("tool_call", "failed"),
        ("tool_result", "failed"),
        ("subagent_end", "done"),
    ],
)
async def test_of_each_kind_what_a_refusal_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, kind: str, status: str
) -> None:
    async with peer(kind) as (address, posts):
        monkeypatch.setenv(ADDRESS, address)
        ended, error, events = await reviewed(tmp_path, {"reviewer": [{"thinking": "hm", **LOOK}, {"text": "fine"}]})
        assert ended == status, error
        kinds = [post["type"] for post in posts]
        assert kinds[-1] == "subagent_end"  # sent whatever became of the run
        assert posts[-1]["status"] == status
        began = any(isinstance(event.body, TurnStarted) for event in events)
        assert began is (kind != "subagent_start"), "no run begins before it is reported"
        ran = any(isinstance(event.body, ToolResult) for event in events)
        assert ran is (kind in ("tool_result", "subagent_end")), "no tool runs before its call is reported"
        warned = [record for record in caplog.records if "was not reported" in record.message]
        assert len(warned) == (kind == "subagent_end")


@pytest.mark.requirement("CPE-48")
async def test_without_an_address_nothing_is_reported_and_nothing_is_loaded(tmp_path: Path) -> None:
    program = """
import asyncio, json, sys, retinue
from retinue.testing import scripted
async def main():
    async with retinue.open(mode="yes") as r:
        profile = retinue.Profile("reviewer", "You review.", model=scripted(json.loads(sys.argv[1])))
        print(json.dumps((await (await r.spawn(profile, "look")).result()).to_json()))
asyncio.run(main())
assert not [name for name in sys.modules if name.startswith("retinue.control")], sys.modules
"""
    process = await started("-c", program, json.dumps(TWO_LOOKS))
    result, complaint = await result_of(process)
    assert (result["status"], complaint) == ("done", "")


def count_listening_sockets() -> int:
    """Count the TCP sockets on which this process listens."""
    own = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            own.add(os.readlink(entry))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[3] == "0A" and f"socket:[{row[9]}]" in own for row in rows)


@pytest.mark.finding("S13")
@pytest.mark.requirement("CPE-31", "CPE-27")
async def test_a_process_that_is_reported_opens_no_collector_and_passes_the_address_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make_reporting(collects=False, serves=False, strict=True, limits=Limits(), caller=NOBODY) is None
    own = make_reporting(collects=True, serves=False, strict=True, limits=Limits(), caller=NOBODY)
    assert own is not None and isinstance(own.collector, LoopbackCollector)
    supervisor = make_supervisor(Parts(project=tmp_path))
    own.attach(supervisor, supervisor)
    before = count_listening_sockets()
    own.collector.environment("any")
    assert count_listening_sockets() == before + 1  # as one does that opens a collector
    await own.close()
    await supervisor.close()
    server = make_reporting(collects=True, serves=True, strict=True, limits=Limits(), caller=NOBODY)
    assert server is not None and isinstance(server.collector, Relay)
    assert server.publisher is None  # it reports to nobody
    supervisor = make_supervisor(Parts(project=tmp_path))
    server.attach(supervisor, supervisor)
    assert not {ADDRESS, CPE_ADDRESS} & set(server.collector.environment("any"))
    assert count_listening_sockets() == before
    await supervisor.close()
    for name in (ADDRESS, CPE_ADDRESS):
        monkeypatch.setenv(name, "http://127.0.0.1:9/inherited-secret")
        made = make_reporting(collects=True, serves=False, strict=True, limits=Limits(), caller=NOBODY)
        assert isinstance(made, Reporting) and isinstance(made.collector, Relay)
        supervisor = make_supervisor(Parts(project=tmp_path))
        made.attach(supervisor, supervisor)
        given = made.collector.environment("any")
        assert given[ADDRESS] == given[CPE_ADDRESS] == "http://127.0.0.1:9/inherited-secret"
        assert count_listening_sockets() == before
        await supervisor.close()
        monkeypatch.delenv(name)


async def test_calls_of_a_reported_run_name_it_as_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a server behind a server is reported below the run that called it, whatever else runs."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "subagent_start", name="outer")
        monkeypatch.setenv(ADDRESS, server.address)
        inner = make_supervisor(Parts(project=tmp_path / "inner", mode="yes"))
        publisher = inner.spawner._driver._hook
        assert isinstance(publisher, Publisher)
        down = RemainingLimits(Limits(), NOBODY)
        down.attach(inner)
        try:
            with serve_caller(Caller(run_id=run_id, parent_id="up", root_id="top")):
                profile = Profile("outer", "x", model=scripted({"outer": [{"hang": True}]}))
                run = inner.spawner.spawn_primary(profile, Task("wait"))
            meta = Relay(down, server.address, publisher).meta(run.ref)
            assert (meta["retinue/parentRunID"], meta["retinue/rootRunID"]) == (run_id, "top")
        finally:
            await inner.close()


async def test_a_primary_that_stands_for_the_caller_is_not_reported_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with peer("") as (address, posts):
        monkeypatch.setenv(ADDRESS, address)
        script = {
            "main": [{"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "help"}]}}]}, {"text": "x"}]
        }
        supervisor = make_supervisor(Parts(project=tmp_path, mode="yes"))
        with serve_caller(Caller(parent_id="anchor-1")):
            model = scripted({**script, "*": [{"text": "helped"}]})
            run = supervisor.spawner.spawn_primary(Profile("main", "x", model=model), Task("go"))
        await run.join()
        await supervisor.close()
        assert [(post["type"], post.get("parentRunID")) for post in posts] == [
            ("subagent_start", "anchor-1"), ("subagent_end", "anchor-1"),
        ]  # fmt: skip
        assert posts[0]["subagentRunID"] == f"{run.ref.tree}-1"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1:1", "https://127.0.0.1:1", "http://127.0.0.1", "http://127.0.0.1:x", "http://u@127.0.0.1:1",
     "http://127.0.0.1:1/?a=b", "http://example.com:80", "http://169.254.169.254:80/x"],
)  # fmt: skip
async def test_an_address_that_is_none_or_not_here_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setenv(ADDRESS, address)
    with pytest.raises(ConfigError, match="the address to report to"):
        make_supervisor(Parts(project=tmp_path))


async def test_a_connection_that_was_closed_meanwhile_is_replaced(tmp_path: Path) -> None:
    """One event is heard once, also when the first connection broke after it had been taken."""
    async with peer("", hang_up_after=1) as (address, posts):
        sender = Poster(address, "/subagent-events")
        for number in range(4):
            await sender.post(json.dumps({"type": "x", "n": number}).encode())
        assert [post["n"] for post in posts] == [0, 1, 2, 3]
        sender.close()


class RecordingHook:
    """A hook that keeps the kinds of its events."""

    def __init__(self) -> None:
        self.taken: list[str] = []

    def take(self, event: Event, written: Awaitable[None] | None) -> Awaitable[None] | None:
        self.taken.append(event.kind)
        return written

    async def settle(self, ref: RunRef) -> None: ...

    async def close(self) -> None: ...


async def test_the_ending_of_a_run_is_reported_also_when_the_log_is_lost(tmp_path: Path) -> None:
    """Else the run would stay at work in the tree of the caller."""
    inner, hook = SqliteLog(tmp_path), RecordingHook()
    log = HookedLog(inner, hook)

    def at(seq: int, body: Body) -> Event:
        return Event(seq, "t", 0, "/main", "main", 1.0, body)  # type: ignore[arg-type]

    spawned = RunSpawned(None, "main", 0, "go", "id", "")
    written = log.append(at(1, spawned), True)
    assert written is not None
    await written
    inner.path.with_suffix(".lock").unlink()
    other = SqliteLog(tmp_path)
    with pytest.raises(LogLost):
        lost = log.append(at(2, TurnStarted(1)), True)
        assert lost is not None
        await lost
    for body in (TurnStarted(2), RunEnded("failed", "lost", 0)):
        with pytest.raises(LogLost):
            log.append(at(3, body))
    assert hook.taken == ["run.spawned", "turn.started", "run.ended"]
    with pytest.raises(LogLost):
        await log.close()
    await other.close()
