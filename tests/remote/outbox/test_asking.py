"""Tests of the container's side of the outbox: the requests that it writes, and its reading of the answers."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import retinue
import retinue.remote.outbox
from retinue import Event, Profile, Task, tool
from retinue.core.control import RunHandle
from retinue.core.errors import ConfigError
from retinue.core.events import Message, RunEnded, RunSpawned, ToolCall, Warned
from retinue.core.messages import Call, Reply
from retinue.core.ports import Clock
from retinue.supervisor import adoption, driver
from retinue.testing import ManualClock, scripted
from tests.gates import until
from tests.remote.outbox.kit import explorer, put
from tests.sandbox.hosts import host
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call, main, spawn
from tests.supervisor.tree.kit import until as until_event

HERE = Profile("explorer", model=explorer().model, runtime="delegated")


@asynccontextmanager
async def asking(
    tmp_path: Path, profile: Profile = HERE, *, clock: Clock | None = None, **task: Any
) -> AsyncIterator[tuple[RunHandle, Path, str]]:
    """A run that waits for a host, the outbox, and the id of its request."""
    outbox = tmp_path / "outbox"
    outbox.mkdir(exist_ok=True)
    timed = {} if clock is None else {"clock": clock}
    async with retinue.open(path=tmp_path / ".retinue", outbox=outbox, mode="yes", **timed) as r:
        run = await r.spawn(profile, Task("look", **task))
        await until(lambda: any(name.startswith("request_") for name in os.listdir(outbox)))
        [file] = [name for name in os.listdir(outbox) if name.startswith("request_")]
        yield run, outbox, file.removeprefix("request_").removesuffix(".json")


def line(kind: str, *, run: int = 0, **fields: Any) -> bytes:
    event = {"seq": 1, "tree": "theirs", "run": run, "path": "/evil", "agent": fields.pop("agent", "x"), "at": 1.0}
    return json.dumps({**event, "kind": kind, **fields}).encode() + b"\n"


def _spawned(run: int, **fields: Any) -> bytes:
    return line(
        "run.spawned",
        run=run,
        **{"parent": 0, "label": "l", "task": "t", "subagent_id": "s", "workspace": "", **fields},
    )


def respond(outbox: Path, name: str, **fields: Any) -> None:
    data = {"version": 1, "id": name, "status": "done", "final_response": "fine", **fields}
    put(outbox, f"response_{name}.json", json.dumps(data).encode())


@pytest.mark.requirement("MASS-9", "MASS-16", "P33")
async def test_a_request_names_what_it_may_and_nothing_of_the_launch(tmp_path: Path) -> None:
    async with asking(tmp_path, context="mind the gap", timeout_seconds=90) as (run, outbox, name):
        asked = json.loads((outbox / f"request_{name}.json").read_bytes())
        assert asked == {
            "version": 1,
            "id": name,
            "subagent_id": asked["subagent_id"],
            "task": "mind the gap\n\nlook",
            "profile": "explorer",
            "workspace": str(tmp_path),
            "context_paths": [],
            "timeout_seconds": asked["timeout_seconds"],
            "depth": 3,
            "traceparent": asked["traceparent"],
        }
        assert 0 < asked["timeout_seconds"] <= 90
        assert asked["subagent_id"].startswith("explorer_") and name.startswith(f"{asked['subagent_id']}-")
        assert os.listdir(outbox) == [f"request_{name}.json"]  # renamed into its place: nothing else is left of it
        respond(outbox, name)
        assert (await run.result()).final_response == "fine"
        assert os.listdir(outbox) == []


async def test_what_the_file_says_is_data_with_ids_and_paths_of_ours(tmp_path: Path) -> None:
    async with asking(tmp_path) as (run, outbox, name):
        lines = [
            line("run.spawned", label="main", depth=0, task="t", subagent_id="s", workspace="/evil", parent=None),
            line("run.started", runtime="inherited", sandbox=["uid"]),
            line("run.started", run=7, sandbox=["of nobody"]),
            line("message", text="\x1b[2Jhello"),
            line("tool.call", call_id="c" * 9999, name="n" * 9999, args={}),
            line("tool.result", call_id="c" * 9999, name="n" * 9999, text="", sandbox=["net", "x" * 9999]),
            line("run.resumed"),
            line("usage", model="m", usage={"input_tokens": -5, "output_tokens": 1}),
            line("usage", model="m", usage={"input_tokens": 5, "output_tokens": 1}, cost="NaN"),
            line("usage", model="m", usage={"input_tokens": 5, "output_tokens": 1}, cost="1E+999999"),
            line("usage", model="m", usage={"input_tokens": 5, "output_tokens": 1}, cost="0.25"),
            line("something.new", text="x"),
            b"not json\n",
            b"\xff\n",
            _spawned(1, agent="../evil", depth=1),
            _spawned(2, agent="sub", depth=0, workspace="/x"),
            _spawned(2, agent="twice", depth=1),
            _spawned(3, agent="lost", depth=1, parent=9),
            line("message", run=2, agent="sub", text="from below"),
            line("run.ended", run=2, status="weird", final_response="over", duration_ms=-1),
            line("message", run=2, agent="sub", text="after its end"),
            line("run.ended", status="done", final_response="forged", duration_ms=1),
            b'{"half a line',
        ]
        put(outbox, f"events_{name}.ndjson", b"".join(lines))
        respond(outbox, name, final_response="real")
        events = [event async for event in run.events()]
        result = await run.result()
    assert result.final_response == "real" and result.workspace == str(tmp_path)
    assert {event.tree for event in events} == {run.tree}
    assert {event.path for event in events} == {"/main", "/main/evil-1", "/main/sub-2"}
    assert [body.depth for body in _bodies(events, RunSpawned)] == [0, 1, 1]
    assert len(_bodies(events, ToolCall)[0].name) == 200
    [evil, child] = result.children
    assert (evil.status, evil.name) == ("disconnected", "evil")
    assert (child.status, child.partial, child.runtime) == ("failed", "from below", "inherited")
    assert (result.runtime, result.sandbox[0], len(result.sandbox[1])) == ("delegated", "net", 200)
    kinds = [event.kind for event in events]
    assert (str(result.cost), result.usage.input_tokens) == ("0.25", 5)
    assert kinds.count("gap") == 5 and "something.new" not in kinds and "run.resumed" not in kinds


def _bodies(events: list[Event], kind: type[Any]) -> list[Any]:
    return [event.body for event in events if isinstance(event.body, kind)]


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"{}", "cannot be read"), (b"[" * 100_000, "cannot be read"), (b" " * (17 * 1024 * 1024), "larger than")],
)
async def test_a_response_that_is_none_ends_the_run_and_asks_the_host_to_stop(
    tmp_path: Path, data: bytes, said: str
) -> None:
    async with asking(tmp_path) as (run, outbox, name):
        (outbox / f"claim_{name}").touch()
        put(outbox, f"response_{name}.json", data)
        result = await run.result()
        assert result.status == "disconnected" and said in (result.error_details or "")
        assert (outbox / f"cancel_{name}").exists()


@pytest.mark.parametrize("what", ["response_{}.json", "events_{}.ndjson"])
async def test_a_link_in_the_place_of_an_answer_is_not_followed(tmp_path: Path, what: str) -> None:
    (tmp_path / "secret").write_text("planted-secret\n")
    async with asking(tmp_path) as (run, outbox, name):
        (outbox / what.format(name)).symlink_to(tmp_path / "secret")
        result = await run.result()
        assert result.status == "disconnected" and "planted" not in str(result.to_json())


@pytest.mark.requirement("MASS-18")
async def test_cancelling_writes_a_cancel_file_and_waits_for_the_answer(tmp_path: Path) -> None:
    async with asking(tmp_path) as (run, outbox, name):
        assert await run.cancel()
        await until((outbox / f"cancel_{name}").exists)
        assert (outbox / f"cancel_{name}").read_bytes() == b""
        respond(outbox, name, status="cancelled", final_response="Run cancelled", error_details="Run 'x' was cancelled")
        assert (await run.result()).status == "cancelled"
        assert os.listdir(outbox) == []


async def test_a_cancelled_request_that_nobody_has_picked_up_is_withdrawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retinue.remote.outbox, "CANCEL_ASK_SECONDS", 0.0)
    monkeypatch.setattr(retinue.remote.outbox.OutboxAdapter, "grace", 1e6)  # the wait for the answer of a host
    async with asking(tmp_path) as (run, outbox, _):
        assert await run.cancel()
        assert (await run.result()).status == "cancelled"
        assert os.listdir(outbox) == []


@pytest.mark.requirement("MASS-18")
async def test_a_timeout_writes_a_cancel_file_too(tmp_path: Path) -> None:
    clock = ManualClock()
    async with asking(tmp_path, clock=clock, timeout_seconds=60) as (run, outbox, name):
        await clock.advance(60)
        await until((outbox / f"cancel_{name}").exists)
        respond(outbox, name, status="cancelled", final_response="Run cancelled", error_details="x")
        assert (await run.result()).status == "timed_out"
        assert os.listdir(outbox) == []


async def test_an_outbox_that_nobody_watches_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retinue.remote.outbox, "UNCLAIMED_SECONDS", 0.1)
    async with asking(tmp_path) as (run, outbox, name):
        event = await until_event(run, Warned)
        assert "no watcher has picked up the request" in event.body.text  # type: ignore[union-attr]
        assert f"retinue watch --outbox {outbox}" in event.body.text  # type: ignore[union-attr]
        respond(outbox, name)
        await run.result()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for a host that takes its time."""
    monkeypatch.setattr(retinue.remote.outbox, "STEER_SECONDS", 200.0)
    monkeypatch.setattr(adoption, "CONFIRM_SECONDS", 200.0)


@pytest.mark.usefixtures("patient")
async def test_words_for_a_run_on_the_host_are_a_file_and_written_when_it_has_them(tmp_path: Path) -> None:
    async with asking(tmp_path) as (run, outbox, name):
        put(outbox, f"events_{name}.ndjson", line("run.started", sandbox=["net"]))
        sending = asyncio.create_task(run.send("left, not right"))
        file = outbox / f"steer_{name}_0000.json"
        await until(file.exists)
        assert json.loads(file.read_bytes()) == {"version": 1, "run": 0, "text": "left, not right"}
        with (outbox / f"events_{name}.ndjson").open("ab") as events:
            events.write(line("inbox", text="left", source="asker") + line("turn.started", turn=3))
        receipt = await sending
        assert receipt.state == "queued"
        respond(outbox, name)
        told = [event async for event in run.events()]
        [words] = _bodies(told, retinue.core.events.Inbox)
        assert (words.text, words.source) == ("left, not right", "user")
        [turn] = [event for event in told if event.kind == "turn.started"]
        assert receipt.seq < turn.seq
        await run.result()
        assert os.listdir(outbox) == []


@pytest.mark.parametrize("taken", [False, True])
async def test_words_that_the_host_does_not_take_or_confirm_are_too_late_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    monkeypatch.setattr(retinue.remote.outbox, "STEER_SECONDS", 100.0 if taken else 0.1)
    monkeypatch.setattr(adoption, "CONFIRM_SECONDS", 0.1)
    async with asking(tmp_path) as (run, outbox, name):
        sending = asyncio.create_task(run.send("left, not right"))
        file = outbox / f"steer_{name}_0000.json"
        if taken:
            await until(file.exists)
            file.unlink()
        receipt = await sending
        assert receipt.state == "too_late" and ("has not confirmed" if taken else "was withdrawn") in receipt.why
        assert not file.exists()
        respond(outbox, name)
        assert [event.kind async for event in run.events()].count("inbox") == 0


@pytest.mark.usefixtures("patient")
async def test_words_for_a_run_below_one_on_the_host_reach_that_one(tmp_path: Path) -> None:
    go = asyncio.Event()

    @tool(tier="observe")
    async def hold() -> str:
        """Waits until it may go on."""
        await go.wait()
        return "held"

    heard: list[str] = []

    class Listening:
        name = "listening"

        async def complete(self, request: Any, on_delta: Any) -> Reply:
            heard.extend(turn.text for turn in request.thread if getattr(turn, "source", "") == "asker")
            return Reply("", (Call("c1", "hold", {}),)) if request.turn == 1 else Reply("thanks")

    child = Profile("listener", model=Listening(), tools=[hold])
    above = explorer([call("subagent_listener", task="x"), {"text": "over"}], tools=[child])
    async with (
        host(tmp_path, profiles=[above], runtime="inherited") as there,
        retinue.open(path=tmp_path / ".retinue", outbox=there.outbox, mode="yes") as r,
    ):
        run = await r.spawn(HERE, "go")
        async for event in run.events():
            if isinstance(event.body, ToolCall) and event.body.name == "hold":
                break
        receipt = await r.control.send(run.tree, event.run, "turn left")
        assert receipt.state == "queued" and event.run == 1
        go.set()
        await run.result()
    assert heard == ["turn left"]


async def test_a_cancel_of_a_run_below_one_on_the_host_reaches_that_one(tmp_path: Path) -> None:
    child = Profile("listener", model=scripted({"listener": [{"hang": True}]}))
    above = explorer([call("subagent_listener", task="x"), {"text": "over"}], tools=[child])
    async with (
        host(tmp_path, profiles=[above], runtime="inherited") as there,
        retinue.open(path=tmp_path / ".retinue", outbox=there.outbox, mode="yes") as r,
    ):
        run = await r.spawn(HERE, "go")
        async for event in run.events():
            if event.run == 1 and event.kind == "run.started":
                break
        assert await r.control.cancel(run.tree, 1)
        async with asyncio.timeout(100):  # on the host nothing else ends the child
            assert (await run.result()).final_response == "over"
        [tree] = there.trees
        endings = {e.run: e.body.status for e in await there.supervisor.log.read(tree) if isinstance(e.body, RunEnded)}
        assert endings == {0: "done", 1: "cancelled"}
        assert any("run 1 cancelled by the side that asked" in text for text in there.said)
        here = {e.run: e.body.status async for e in run.events() if isinstance(e.body, RunEnded)}
        assert here == {0: "done", 1: "cancelled"}
        assert os.listdir(there.outbox) == []


async def test_words_that_were_sent_before_it_began_are_part_of_what_is_asked(tmp_path: Path) -> None:
    outbox = tmp_path / "outbox"
    outbox.mkdir()
    async with retinue.open(path=tmp_path / ".retinue", outbox=outbox, mode="yes") as r:
        run = await r.spawn(HERE, "look")
        assert (await run.send("left, not right")).state == "queued"
        await until(lambda: bool(list(outbox.glob("request_*.json"))))
        [file] = outbox.glob("request_*.json")
        assert json.loads(file.read_bytes())["task"] == "look\n\nleft, not right"
        respond(outbox, file.name.removeprefix("request_").removesuffix(".json"))
        await run.result()


async def test_one_that_continues_another_is_asked_for_with_what_was_said(tmp_path: Path) -> None:
    outbox = tmp_path / "outbox"
    outbox.mkdir()

    async def answered(run: RunHandle, *events: bytes) -> Any:
        await until(lambda: bool(list(outbox.glob("request_*.json"))))
        [file] = outbox.glob("request_*.json")
        name, asked = file.name.removeprefix("request_").removesuffix(".json"), json.loads(file.read_bytes())
        put(outbox, f"events_{name}.ndjson", b"".join(events))
        respond(outbox, name)
        result = await run.result()
        assert result.status == "done" and result.warning is None
        return asked["task"]

    turn = line("turn.started", turn=1), line("message", text="it is under the stairs"), line("turn.ended", turn=1)
    async with retinue.open(path=tmp_path / ".retinue", outbox=outbox, mode="yes") as r:
        run = await r.spawn(HERE, "look")
        assert await answered(run, *turn) == "look"
        again = await r.continue_run(run.tree, "bring it", profiles=[HERE])
        before, _, words = (await answered(again, *turn)).rpartition("\n\n")
        assert words == "bring it" and before.startswith(driver.BEFORE)
        assert [said["text"] for said in json.loads(before.removeprefix(driver.BEFORE))] == [
            "look", "it is under the stairs",
        ]  # fmt: skip
        events = [event async for event in again.events()]
        assert bodies(events, Message)[-1].text == "it is under the stairs"  # and what it does is seen


@pytest.mark.finding("U3")
async def test_one_that_continues_another_is_asked_for_with_its_files(tmp_path: Path) -> None:
    outbox, profile = tmp_path / "outbox", replace(HERE, workspace="scratch")
    outbox.mkdir()

    async def answered(run: RunHandle) -> Path:
        await until(lambda: bool(os.listdir(outbox)))
        [file] = outbox.iterdir()
        workspace = Path(json.loads(file.read_bytes())["workspace"])
        (workspace / f"left-{len(list(workspace.iterdir()))}").write_text("kept")
        respond(outbox, file.name.removeprefix("request_").removesuffix(".json"))
        assert (await run.result()).status == "done"
        return workspace

    async with retinue.open(path=tmp_path / ".retinue", outbox=outbox, mode="yes") as r:
        run = await r.spawn(profile, "look")
        first = await answered(run)
        again = await r.continue_run(run.tree, "bring it", profiles=[profile])
        second = await answered(again)
    assert first != second
    assert sorted(file.name for file in second.iterdir()) == ["left-0", "left-1"]


async def test_while_the_host_asks_its_user_the_clock_stands(tmp_path: Path) -> None:
    asked = {"approval_id": "q", "call_id": "c", "tool": "shell", "args": {}}
    clock = ManualClock()
    async with asking(tmp_path, clock=clock, timeout_seconds=60) as (run, outbox, name):
        put(outbox, f"events_{name}.ndjson", line("run.started", sandbox=["net"]) + line("approval.asked", **asked))
        await until_event(run, retinue.core.events.ApprovalAsked)
        await clock.advance(3600)
        respond(outbox, name)
        assert (await run.result()).status == "done"


async def test_without_a_folder_nothing_is_run(tmp_path: Path) -> None:
    async with retinue.open(path=tmp_path / ".retinue", runtime="delegated") as r:
        with pytest.raises(ConfigError, match="RETINUE_DELEGATION_DIRECTORY"):
            await r.spawn(HERE, "go")
    async with retinue.open(path=tmp_path / ".retinue", outbox=tmp_path / "missing") as r:
        with pytest.raises(ConfigError, match="cannot open the outbox"):
            await r.spawn(HERE, "go")


@pytest.mark.requirement("MASS-6", "MASS-53")
async def test_the_primary_stays_in_the_container_and_its_subagents_go_to_the_host(tmp_path: Path) -> None:
    agents = {"main": [spawn({"task": "look", "subagent_type": "explorer"}), {"text": "{{last_result}}"}]}
    async with host(tmp_path, profiles=[explorer()], runtime="inherited") as there:
        options: dict[str, Any] = {"runtime": "delegated", "outbox": there.outbox, "profiles": [explorer()]}
        async with retinue.open(path=tmp_path / ".retinue", mode="yes", **options) as r:
            result = await r.run(main(agents), "go")
        [child] = result.children
        assert (result.runtime, child.runtime, child.status) == ("inherited", "delegated", "done")
        assert child.final_response == "done here" and child.path == "/main/explorer-1"
        assert (Path(child.workspace) / "made.txt").read_text() == "made\n"
        reply = json.loads(result.final_response)
        assert set(reply) == {"success", "operation", "mode", "results", "summary"}
        assert {
            "subagent_id", "status", "success", "answer", "workspace", "execution_time_seconds", "error",
            "token_usage", "log_path", "warning",
        } <= set(reply["results"][0])  # fmt: skip
        assert len(there.trees) == 1 and os.listdir(there.outbox) == []


@needs_bubblewrap
@pytest.mark.finding("S13")
@pytest.mark.requirement("MASS-13", "MASS-14")
async def test_a_delegated_run_has_no_network_no_privilege_and_the_tool_server_as_its_process(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    look = (
        "tr '\\0' ' ' < /proc/$PPID/cmdline; grep -E 'CapEff|NoNewPrivs' /proc/self/status; cat /proc/self/limits; "
        "tail -n +3 /proc/net/dev | tr -d ' ' | cut -d: -f1 | sed 's/^/net:/'"
    )
    replies = [{"text": "so far", **call("shell", command=look)}, {"text": "over"}]
    async with (
        host(tmp_path, profiles=[explorer(replies)]) as there,
        retinue.open(path=tmp_path / ".retinue", outbox=there.outbox, mode="yes") as r,
    ):
        run = await r.spawn(HERE, "go")
        seen = (await until_event(run, retinue.core.events.ToolResult)).body.text  # type: ignore[union-attr]
        result = await run.result()
    assert "CapEff:\t0000000000000000" in seen and "NoNewPrivs:\t1" in seen
    assert "from retinue.sandbox.tool_server import main" in seen, seen  # the command's parent is our tool server
    assert re.findall("^net:(.*)$", seen, re.MULTILINE) == ["lo"]
    assert re.search(r"Max cpu time +14400 ", seen) and re.search(r"Max processes +512 ", seen), seen
    assert "cgroup" in result.sandbox or re.search(rf"Max address space +{4096 * 1024**2} ", seen), seen
    assert {"net", "no_capabilities", "no_new_privs", "pid", "mount"} <= set(result.sandbox)
    assert result.status == "done"


@needs_bubblewrap
@pytest.mark.requirement("MASS-13")
@pytest.mark.parametrize(("says", "reach"), [(None, ["net"]), (["a.com"], ["net", "proxy"])])
async def test_what_a_delegated_run_may_reach_is_said_by_the_host_s_own_profile(
    tmp_path: Path, says: list[str] | None, reach: list[str]
) -> None:
    """The host's limit for all its runs is not enough, and a profile sent by the asking side counts for nothing."""
    tmp_path.chmod(0o755)
    async with (
        host(tmp_path, profiles=[explorer(network=says)], network="full") as there,
        retinue.open(path=tmp_path / ".retinue", outbox=there.outbox, mode="yes", network="full") as r,
    ):
        run = await r.spawn(replace(HERE, network="full"), "go")
        result = await run.result()
    assert result.status == "done"
    assert [word for word in ("net", "proxy", "full_network") if word in result.sandbox] == reach


@needs_bubblewrap
async def test_a_run_that_has_a_link_never_asks_the_host(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "outbox").mkdir()
    agents = {
        "main": [spawn({"task": "look", "subagent_type": "explorer"}), {"text": "over"}],
        "explorer": [{"text": "x"}],
    }
    asks = Profile("explorer", model=main(agents).model, runtime="delegated")
    options: dict[str, Any] = {"runtime": "isolated", "outbox": tmp_path / "outbox", "profiles": [asks]}
    async with retinue.open(path=tmp_path / ".retinue", mode="yes", **options) as r:
        result = await r.run(main(agents), "go")
    assert [result.runtime, *(child.runtime for child in result.children)] == ["isolated", "isolated"]
    assert os.listdir(tmp_path / "outbox") == []
