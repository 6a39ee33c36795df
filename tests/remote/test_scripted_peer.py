"""A run at a scripted peer, from its start to its ending: everything that the port of remote runs is for."""

from __future__ import annotations

import asyncio
import os
from contextlib import aclosing
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from retinue.core.approvals import Allow, Deny
from retinue.core.control import ResumeOverrides
from retinue.core.events import (
    ApprovalAsked,
    Body,
    Event,
    Message,
    RunEnded,
    RunRemote,
    RunStarted,
    ToolCall,
    ToolResult,
    ToolStarted,
    TurnEnded,
    TurnStarted,
    UsageReported,
)
from retinue.core.limits import Limits
from retinue.core.profiles import Task
from retinue.core.usage import Usage
from retinue.log.questions import Questions
from retinue.log.runs import Runs
from retinue.remote.port import STARTED, Capabilities, RemoteSpawned
from retinue.supervisor.supervisor import Supervisor
from tests.gates import until
from tests.remote.adapters import SCRIPTED, make_supervisor
from tests.remote.outbox.kit import FlatPrices
from tests.remote.scripted_peer import PeerRun, ScriptedPeer, ScriptedRun

ASKED = ApprovalAsked("theirs-1", "call-1", "shell", {"command": "make"})


def ending(text: str) -> RunEnded:
    return RunEnded("done", text, 0)


def said(events: list[Event], run: int = 0) -> list[str]:
    """The kinds of a run's events, without those that every run has."""
    return [event.kind for event in events if event.run == run and event.kind not in ("run.spawned", "run.remote")]


async def written(supervisor: Supervisor, tree: str, kind: type[Body], count: int = 1) -> list[Event]:
    """Waits until the log has so many events of that kind; all of it."""
    seen: list[Event] = []
    async with aclosing(supervisor.watch(tree)) as events:
        async for event in events:
            assert isinstance(event, Event)
            seen.append(event)
            if sum(isinstance(each.body, kind) for each in seen) >= count:
                break
    return await supervisor.log.read(tree)


async def test_limits_and_trace_travel_down_and_the_reference_is_logged_before_the_peer_is_asked(
    tmp_path: Path,
) -> None:
    logged: list[str] = []

    async def script(run: PeerRun) -> None:
        logged.extend(event.kind for event in await supervisor.log.read(run.request.ref.tree))
        run.say(ending("over"))

    peer = ScriptedPeer(script)
    limits = Limits(depth=2, tokens=500, cost=Decimal("0.50"))
    supervisor = make_supervisor(tmp_path, peer, limits=limits, prices=FlatPrices())
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look", context="mind the gap", timeout_seconds=60))
    await run.join()
    request = peer.runs[0].request
    assert (request.profile, request.text, request.workspace) == ("explorer", "mind the gap\n\nlook", str(tmp_path))
    assert (request.limits.depth, request.limits.tokens, str(request.limits.cost)) == (2, 500, "0.50")
    assert request.limits.deadline is not None and request.limits.traceparent.startswith("00-")
    assert logged == ["run.spawned", "run.remote"]
    assert run.result().final_response == "over"
    await supervisor.close()


async def test_a_run_streams_asks_hears_and_spends_from_our_budget(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def script(run: PeerRun) -> None:
        run.say(RunStarted("theirs", ("net", "proxy")))
        run.say(TurnStarted(1))
        run.say(ASKED)
        assert isinstance(await run.answers.get(), Allow)
        run.say(ToolStarted("c1"))
        begun.set()
        assert await run.words.get() == "left"
        run.say(ToolResult("c1", "shell", "fine", sandbox=("net",)))
        run.say(UsageReported("their-model", Usage(70, 30)))
        run.say(ending("over"))

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script), limits=Limits(tokens=500))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await until(lambda: bool(supervisor.approvals.pending()))
    assert run.view.state == "waiting_approval"
    supervisor.approvals.answer(supervisor.approvals.pending()[0].id, Allow(), by="user")
    await begun.wait()
    assert (await supervisor.send(run.ref.tree, 0, "left")).state == "queued"
    await run.join()
    result = run.result()
    assert (result.status, result.runtime, result.sandbox) == ("done", "scripted", ("net",))
    assert run.account is not None and run.account.spent.tokens == 100
    assert said(await supervisor.log.read(run.ref.tree)) == [
        "run.started", "turn.started", "approval.asked", "approval.decided", "tool.started", "inbox", "tool.result",
        "usage", "run.ended",
    ]  # fmt: skip
    await supervisor.close()


async def test_a_peer_that_uses_no_folder_of_ours_has_none_made(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(ending("over"))

    peer = ScriptedPeer(script)
    supervisor = make_supervisor(tmp_path, peer)
    run = supervisor.spawner.spawn_primary(replace(SCRIPTED, workspace="scratch"), Task("look"))
    await run.join()
    assert peer.runs[0].request.workspace == os.path.realpath(run.folders.path)
    assert not Path(run.folders.path).exists()
    await supervisor.close()


async def test_without_anybody_to_ask_the_answer_is_no(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(ASKED)
        decision = await run.answers.get()
        run.say(ending(decision.reason if isinstance(decision, Deny) else "allowed"))

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script), wait_approvals=None)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    assert run.result().final_response == "nobody could be asked"
    await supervisor.close()


async def test_a_question_has_the_same_number_everywhere_also_after_one_that_is_answered_at_the_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ScriptedRun, "capabilities", Capabilities(send=True, replay=True))
    is_shown = asyncio.Event()

    async def script(run: PeerRun) -> None:
        run.say(ASKED)
        await is_shown.wait()
        monkeypatch.setattr(ScriptedRun, "capabilities", Capabilities(send=True, answer=True, replay=True))
        run.say(msgspec.structs.replace(ASKED, approval_id="theirs-2"))
        await run.answers.get()
        run.say(ending("over"))

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await written(supervisor, run.ref.tree, ApprovalAsked)
    is_shown.set()
    questions = Questions()
    for event in await written(supervisor, run.ref.tree, ApprovalAsked, 2):
        questions.apply(event)
    [pending] = supervisor.approvals.pending()
    assert (pending.number, questions.open[pending.id].number) == (2, 2)
    supervisor.approvals.answer(pending.id, Allow(), by="user")
    await run.join()
    await supervisor.close()


@pytest.mark.parametrize(
    "lie",
    [
        lambda run: run.say(RunEnded("done", "of another", 0), "never announced"),
        lambda run: run.say(TurnStarted(0)),
        lambda run: run.say(UsageReported("m", Usage(-5, 1))),
        lambda run: run.say(RemoteSpawned(parent="never announced", agent="x"), "y"),
        lambda run: run.say(ToolCall("c", "n" * 10_000, {})),
        lambda run: run.say(RunRemote("scripted", "another reference")),
    ],
)
async def test_a_peer_that_lies_changes_nothing_but_its_own_run(tmp_path: Path, lie: Any) -> None:
    async def script(run: PeerRun) -> None:
        lie(run)
        run.say(ending("over"))

    peer = ScriptedPeer(script)
    supervisor = make_supervisor(tmp_path, peer)
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    events, result = await supervisor.log.read(run.ref.tree), run.result()
    assert (result.status, result.final_response, result.usage.total_tokens, result.total_turns) == (
        "done",
        "over",
        0,
        0,
    )
    assert [event.run for event in events if event.kind == "run.spawned"] == [0]
    assert [event.body.reference for event in events if isinstance(event.body, RunRemote)] == ["0"]
    assert all(len(event.body.name) <= 200 for event in events if isinstance(event.body, ToolCall))
    await supervisor.close()


async def test_a_peer_that_hangs_up_leaves_a_run_that_is_disconnected_with_what_it_had_said(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(Message("so far"))
        run.lose()

    supervisor = make_supervisor(tmp_path, ScriptedPeer(script))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await run.join()
    result = run.result()
    assert result.status == "disconnected" and "the peer hung up" in (result.error_details or "")
    await supervisor.close()


@pytest.mark.parametrize(("number", "cancels"), [(0, [STARTED]), (1, ["a"]), (2, ["b"])])
async def test_a_cancel_names_only_the_uppermost_run(tmp_path: Path, number: int, cancels: list[str]) -> None:
    """The peer ends what is below a run with it. Told of a run below first, it would let the run above go on."""

    async def script(run: PeerRun) -> None:
        run.say(RunStarted("theirs"))
        run.say(RemoteSpawned(parent=STARTED, agent="helper", is_at_work=True), "a")
        run.say(RemoteSpawned(parent="a", agent="helper", is_at_work=True), "b")
        await run.cancelled.wait()
        for each in ("b", "a", STARTED):
            run.say(ending("over"), each)

    peer = ScriptedPeer(script)
    supervisor = make_supervisor(tmp_path, peer, limits=Limits(depth=3))
    run = supervisor.spawner.spawn_primary(SCRIPTED, Task("look"))
    await written(supervisor, run.ref.tree, RunStarted, count=3)
    assert await supervisor.cancel(run.ref.tree, number)
    await run.join()
    assert peer.runs[0].cancels == cancels
    await supervisor.close()


@pytest.mark.parametrize("crash", range(1, 10))
async def test_after_a_crash_the_run_is_attached_to_and_nothing_is_lost_or_written_twice(
    tmp_path: Path, crash: int
) -> None:
    """The process dies after so many events are written. The peer goes on meanwhile."""
    story: list[tuple[Body | RemoteSpawned, str]] = [
        (TurnStarted(1), STARTED),
        (Message("one"), STARTED),
        (TurnEnded(1), STARTED),
        (RemoteSpawned(parent=STARTED, agent="helper", task="help"), "h"),
        (TurnStarted(1), "h"),
        (Message("from below"), "h"),
        (RunEnded("done", "helped", 0), "h"),
        (TurnStarted(2), STARTED),
        (Message("two"), STARTED),
    ]

    async def script(run: PeerRun) -> None:
        for body, of in story:
            run.say(body, of)

    peer = ScriptedPeer(script)
    first = make_supervisor(tmp_path, peer)
    tree = first.spawner.spawn_primary(SCRIPTED, Task("look")).ref.tree
    before = (await written(first, tree, Message, 3))[: 2 + crash]
    second = make_supervisor(tmp_path, peer)
    for event in before:
        second.log.append(event)
    run = await second.resume(tree, ResumeOverrides(profiles=[SCRIPTED]))
    peer.runs[0].say(ending("over"))
    await run.result()
    events = await second.log.read(tree)
    assert [kind for kind in said(events) if kind != "run.resumed"] == [
        "turn.started", "message", "turn.ended", "turn.started", "message", "run.ended",
    ]  # fmt: skip
    assert said(events, 1) == ["turn.started", "message", "run.ended"]
    runs = Runs.of(tree, events).runs
    assert (runs[0].status, runs[1].status, runs[1].path, len(runs)) == ("done", "done", "/main/helper-1", 2)
    assert len(peer.runs) == 1
    await first.close()
    await second.close()


async def test_a_question_that_was_open_at_the_crash_is_asked_again(tmp_path: Path) -> None:
    async def script(run: PeerRun) -> None:
        run.say(TurnStarted(1))
        run.say(ASKED)
        run.say(ending(type(await run.answers.get()).__name__))

    peer = ScriptedPeer(script)
    first = make_supervisor(tmp_path, peer)
    tree = first.spawner.spawn_primary(SCRIPTED, Task("look")).ref.tree
    before = await written(first, tree, ApprovalAsked)
    second = make_supervisor(tmp_path, peer)
    for event in before:
        second.log.append(event)
    run = await second.resume(tree, ResumeOverrides(profiles=[SCRIPTED]))
    await until(lambda: bool(second.approvals.pending()))
    second.approvals.answer(second.approvals.pending()[0].id, Allow(), by="user")
    assert (await run.result()).final_response == "Allow"
    await second.close()
    await first.close()
