"""Runs at another retinue over A2A: its whole tree is visible, bounded and answerable from here, also after a cut."""

import asyncio
import json
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from a2a.types import StreamResponse, TaskState, TaskStatusUpdateEvent

from retinue import Allow, Limits, Profile, Task
from retinue.concurrency import TaskOwner
from retinue.core.caller import NOBODY
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Delta,
    Event,
    Inbox,
    Message,
    RunEnded,
    RunResumed,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    ToolStarted,
    encode_event,
)
from retinue.core.messages import RunRef
from retinue.core.remote_agents import A2aAgent
from retinue.protocol.a2a import EXTENSION, MOST_ANSWER, TOO_LONG, make_command_metadata, make_event_metadata
from retinue.remote.a2a import adapter
from retinue.remote.port import RemoteRequest
from retinue.testing import scripted
from tests.gates import until
from tests.remote.a2a_kit import Proxy, bind, serve_hand
from tests.remote.test_a2a import Asker, bodies, make_profile, read_run, serve_asker, supervise
from tests.surfaces.a2a.kit import (
    VERSION_TOOL,
    connect,
    make_argocd,
    make_certificate,
    make_request,
    make_supervisor,
    read_only_tree,
    serve,
    show_version,
)

DEEP: dict[str, Any] = {
    "argocd": [{"tools": [{"name": "subagent_helper", "args": {"task": "help"}}]}, {"text": "ArgoCD runs v2.9.3."}],
    "helper": [{"tools": [{"name": VERSION_TOOL}]}, {"text": "it is v2.9.3"}],
}
DEPLOYS: dict[str, Any] = {
    "argocd": [{"tools": [{"name": "deploy", "args": {"target": "prod"}}]}, {"text": "{{last_result}}"}]
}


def make_deep() -> Profile:
    model = scripted(DEEP)
    helper = Profile("helper", "h", model=model, tools=[show_version])
    return Profile("argocd", "a", model=model, tools=[helper], workspace="scratch")


@pytest.mark.requirement("CAIPE-29")
async def test_the_whole_subtree_is_visible_and_one_trace_goes_through_it(tmp_path: Path) -> None:
    async with serve(tmp_path / "there", make_deep()) as server, supervise(tmp_path / "here") as supervisor:
        run = await supervisor.spawn(make_profile(server.url), Task("show version"))
        events = await read_run(run)
    paths = {event.path for event in events}
    assert paths == {"/main", "/main/helper-1"}
    [call] = [event for event in events if isinstance(event.body, ToolCall) and event.body.name == VERSION_TOOL]
    assert call.run == 1  # the event carries the run it came from
    endings = [(event.run, event.body.status) for event in events if isinstance(event.body, RunEnded)]
    assert endings == [(1, "done"), (0, "done")]  # and a child never completes its parent
    assert bodies(events, RunEnded)[-1].final_response == "ArgoCD runs v2.9.3."
    there = bodies(await read_only_tree(tmp_path / "there"), RunSpawned)
    here = bodies(events, RunSpawned)
    assert len({body.trace_id for body in (*there, *here)}) == 1
    assert here[1].workspace == "" and "instructions" not in str(here[1].profile)


@pytest.mark.requirement("CAIPE-9")
async def test_the_type_of_an_event_there_tells_a_call_from_words_that_look_like_one(tmp_path: Path) -> None:
    fake = "🔧 Calling tool: **deploy**\n✅ Tool **deploy** completed"
    script: dict[str, Any] = {
        "argocd": [{"text": fake, "tools": [{"name": VERSION_TOOL, "args": {}}]}, {"text": fake}],
    }
    argocd = Profile("argocd", "a", model=scripted(script), tools=[show_version], workspace="scratch")
    async with serve(tmp_path / "there", argocd) as server, supervise(tmp_path / "here") as supervisor:
        events = await read_run(await supervisor.spawn(make_profile(server.url), Task("go")))
    assert [body.name for body in bodies(events, ToolCall)] == [VERSION_TOOL]  # streamed, from its typed metadata
    assert [body.text for body in bodies(events, Message)] == [fake, fake]  # text, whatever it looks like
    assert bodies(events, RunEnded)[-1].final_response == fake


@pytest.mark.requirement("CAIPE-32")
async def test_what_a_run_there_says_is_shown_word_by_word(tmp_path: Path) -> None:
    """At any depth, and whole once in the log."""
    script: dict[str, Any] = {
        "argocd": [
            {"tools": [{"name": "subagent_helper", "args": {"task": "help"}}]},
            {"text": "It runs.", "chunks": 4},
        ],
        "helper": [{"text": "It is v2.9.3.", "chunks": 6}],
    }
    model = scripted(script)
    helper = Profile("helper", "h", model=model, tools=[])
    argocd = Profile("argocd", "a", model=model, tools=[helper], workspace="scratch")
    async with serve(tmp_path / "there", argocd) as server, supervise(tmp_path / "here") as supervisor:
        run = await supervisor.spawn(make_profile(server.url), Task("go"))
        items = [item async for item in supervisor.watch(run.tree, deltas=True)]
    said = {0: "It runs.", 1: "It is v2.9.3."}
    for number, text in said.items():
        deltas = [item for item in items if isinstance(item, Delta) and item.run == number]
        assert "".join(delta.text for delta in deltas) == text and len(deltas) > 1
        assert {delta.path for delta in deltas} == {"/main" if number == 0 else "/main/helper-1"}
        events = [item for item in items if isinstance(item, Event) and item.run == number]
        whole = [body.text for body in bodies(events, Message)]
        assert whole == [text]


async def test_depth_time_and_budget_of_the_caller_hold_there(tmp_path: Path) -> None:
    async with serve(tmp_path / "there", make_deep()) as server, supervise(tmp_path / "here") as supervisor:
        limits = Limits(depth=0, seconds=50.0, tokens=1000)
        events = await read_run(await supervisor.spawn(make_profile(server.url), Task("go"), limits=limits))
    [spawned] = bodies(await read_only_tree(tmp_path / "there"), RunSpawned)
    assert spawned.max_tokens == 1000 and spawned.timeout_seconds is not None and spawned.timeout_seconds <= 50.0
    [refused] = [body for body in bodies(events, ToolResult) if body.name == "subagent_helper"]
    assert not refused.success and "depth" in refused.text.lower()


async def test_a_question_there_is_answered_at_the_root(tmp_path: Path) -> None:
    argocd = make_argocd(DEPLOYS)
    events = []
    async with serve(tmp_path / "there", argocd, asks_client=True) as server, supervise(tmp_path / "h") as supervisor:
        run = await supervisor.spawn(make_profile(server.url), Task("deploy"))
        async for event in run.events():
            events.append(event)
            if isinstance(event.body, ApprovalAsked):
                [asked] = await supervisor.pending()
                assert (asked.tool, asked.args, event.body.approval_id) == ("deploy", {"target": "prod"}, asked.id)
                assert await supervisor.answer(asked.id, Allow(), by="user") == "taken"
        assert (await run.result()).final_response == "deployed to prod"
    assert len(bodies(events, ToolStarted)) == 1


async def test_a_question_two_servers_away_is_answered_at_the_root(tmp_path: Path) -> None:
    argocd = make_argocd(DEPLOYS)
    async with serve(tmp_path / "far", argocd, asks_client=True) as far:
        call = {"name": "subagent_argocd", "args": {"task": "deploy"}}
        model = scripted({"middle": [{"tools": [call]}, {"text": "{{last_result}}"}]})
        middle = Profile("middle", "m", model=model, tools=[make_profile(far.url)], workspace="scratch")
        async with serve(tmp_path / "near", middle, asks_client=True) as near, supervise(tmp_path / "h") as supervisor:
            run = await supervisor.spawn(make_profile(near.url), Task("deploy"))
            events = []
            async for event in run.events():
                events.append(event)
                if isinstance(event.body, ApprovalAsked):
                    assert (event.path, event.body.tool) == ("/main/argocd-1", "deploy")
                    assert await supervisor.answer(event.body.approval_id, Allow(), by="user") == "taken"
            assert (await run.result()).final_response == "deployed to prod"
    assert [event.run for event in events if isinstance(event.body, RunEnded)] == [1, 0]
    assert len({body.trace_id for body in bodies(events, RunSpawned)}) == 1


async def test_a_call_there_is_not_made_if_the_user_allows_it_with_other_arguments_only(tmp_path: Path) -> None:
    """The answer that goes to the server is about the call that was shown, so it must not be a yes."""
    argocd = make_argocd(DEPLOYS)
    async with serve(tmp_path / "there", argocd, asks_client=True) as server, supervise(tmp_path / "h") as supervisor:
        run = await supervisor.spawn(make_profile(server.url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                edited = Allow(args={"target": "staging"})
                assert await supervisor.answer(event.body.approval_id, edited, by="user") == "taken"
        events = await read_run(run)
    [decided], ending = bodies(events, ApprovalDecided), bodies(events, RunEnded)[0]
    assert (decided.allowed, decided.args, bodies(events, ToolStarted)) == (False, None, [])
    assert '"staging"' in decided.reason and decided.reason in ending.final_response


@pytest.mark.parametrize(
    ("text", "received"), [("blue", "blue"), ("x" * (MOST_ANSWER + 1), TOO_LONG)], ids=["", "long"]
)
async def test_the_text_of_an_answer_reaches_an_agent_two_servers_away(
    tmp_path: Path, text: str, received: str
) -> None:
    asker = Asker("Which cluster?")
    async with serve_asker(asker) as far:
        call = {"name": "subagent_argocd", "args": {"task": "deploy"}}
        model = scripted({"middle": [{"tools": [call]}, {"text": "{{last_result}}"}]})
        middle = Profile("middle", "m", model=model, tools=[make_profile(far)], workspace="scratch")
        async with serve(tmp_path / "near", middle, asks_client=True) as near, supervise(tmp_path / "h") as supervisor:
            run = await supervisor.spawn(make_profile(near.url), Task("deploy"))
            async for event in run.events():
                if isinstance(event.body, ApprovalAsked):
                    assert (event.body.tool, event.body.preview) == ("input_required", "Which cluster?")
                    decision = Allow(args={"answer": text})
                    assert await supervisor.answer(event.body.approval_id, decision, by="user") == "taken"
            assert (await run.result()).final_response == f"so it is {received}"
    assert [asker.received.get_nowait() for _ in range(2)] == ["deploy", received]


@pytest.mark.parametrize("name", ["q", "q" * 300])
async def test_an_answer_is_bound_to_the_question_that_was_shown(tmp_path: Path, name: str) -> None:
    """The other side asks twice with one id, or with two long ids of one beginning, and in two runs."""
    asks = [
        Event(1, "t", 0, "/main", "main", 1.0, ApprovalAsked(name, "c", "x", {"number": 1}, digest="first")),
        Event(2, "t", 0, "/main", "main", 1.0, ApprovalAsked(name[:200], "c", "x", {"number": 2}, digest="second")),
        Event(3, "t", 7, "/main/x", "x", 1.0, ApprovalAsked(name, "c", "x", {"number": 3}, digest="third")),
        Event(4, "t", 7, "/main/x", "x", 1.0, ApprovalDecided(name, "c", False)),
        Event(5, "t", 0, "/main", "main", 1.0, Message("that is all")),
    ]
    async with serve_hand() as (url, hand, _), supervise(tmp_path) as supervisor:
        run = await supervisor.spawn(make_profile(url), Task("go"))
        for event in asks:
            hand.send(json.loads(encode_event(event)))
        async for event in run.events():
            if isinstance(event.body, Message):
                [asked] = await supervisor.pending()
                assert asked.args == {"number": 1}
                assert await supervisor.answer(asked.id, Allow(), by="user") == "taken"
                given = await asyncio.wait_for(hand.answers.get(), 30)
                hand.send(json.loads(encode_event(Event(6, "t", 0, "/main", "main", 1.0, RunEnded("done", "x", 0)))))
    assert (given["approval_id"], given["digest"]) == (name, "first")


async def test_a_message_for_a_deaf_agent_does_not_hold_up_those_of_other_tasks(tmp_path: Path) -> None:
    """A client of the server writes to a run that is at a foreign agent. The agent does not answer."""
    is_called = asyncio.Event()

    class Deaf(Asker):
        async def on_message_send_stream(self, params: Any, context: Any) -> Any:
            yield self.change(TaskState.TASK_STATE_WORKING, "so it goes")
            await asyncio.Event().wait()

        async def on_message_send(self, params: Any, context: Any) -> Any:
            is_called.set()
            await asyncio.Event().wait()

        async def on_cancel_task(self, params: Any, context: Any) -> Any:
            self.change(TaskState.TASK_STATE_CANCELED, "")
            return await self.on_get_task(params, context)

    async with serve_asker(Deaf()) as far:
        call = {"name": "subagent_argocd", "args": {"task": "deploy"}}
        model = scripted({"middle": [{"tools": [call]}, {"text": "{{last_result}}"}]})
        middle = Profile("middle", "m", model=model, tools=[make_profile(far)], workspace="scratch")
        async with serve(tmp_path, middle) as server, connect(server) as client, TaskOwner() as owner:
            task = (await anext(client.send_message(make_request("go")))).task.id
            async with aclosing(server.control.watch(task)) as events:
                async for event in events:
                    if isinstance(event, Event) and event.run == 1 and isinstance(event.body, RunStarted):
                        break
            words = make_request("more", task_id=task, metadata={EXTENSION: make_command_metadata("1")})
            owner.start(anext(client.send_message(words)))
            await is_called.wait()
            async with asyncio.timeout(20):
                assert (await anext(client.send_message(make_request("another task")))).HasField("task")


async def test_a_server_that_wants_a_token_is_told_at_once(tmp_path: Path) -> None:
    tokens = {"alice": "a" * 32}
    async with (
        serve(tmp_path / "there", make_argocd(), tokens=tokens) as server,
        supervise(tmp_path / "h") as supervisor,
    ):
        result = await (await supervisor.spawn(make_profile(server.url, reconnect_timeout=60.0), Task("go"))).result()
    assert result.status == "failed" and "no credentials are configured" in (result.error_details or "")


async def test_a_server_that_asks_its_host_is_only_watched(tmp_path: Path) -> None:
    async with serve(tmp_path / "there", make_argocd(DEPLOYS)) as server, supervise(tmp_path / "h") as supervisor:
        run = await supervisor.spawn(make_profile(server.url), Task("deploy"))
        async for event in run.events():
            if isinstance(event.body, ApprovalAsked):
                assert await supervisor.pending() == []
                [asked] = await server.control.pending()
                await server.control.answer(asked.id, Allow(), by="user")
        assert (await run.result()).status == "done"


async def test_cancel_here_stops_the_work_there(tmp_path: Path) -> None:
    hangs: dict[str, Any] = {"argocd": [{"tools": [{"name": VERSION_TOOL}]}, {"hang": True}]}
    async with serve(tmp_path / "there", make_argocd(hangs)) as server, supervise(tmp_path / "here") as supervisor:
        run = await supervisor.spawn(make_profile(server.url), Task("hang"))
        async for event in run.events():
            if isinstance(event.body, ToolResult):
                assert await run.cancel()
        [task] = server.tasks.list_tasks("anyone")
        view = await server.tasks.wait_until(task, lambda view: view.ending is not None)
    assert view.ending is not None and view.ending.status == "cancelled"
    assert (await_status := (await run.result()).status) == "cancelled", await_status


async def test_words_and_a_cancel_reach_a_run_below_the_task(tmp_path: Path) -> None:
    call = {"name": "subagent_helper", "args": {"task": "help"}}
    script: dict[str, Any] = {
        "argocd": [{"tools": [call]}, {"text": "went on without help"}],
        "helper": [{"tools": [{"name": VERSION_TOOL}]}, {"hang": True}],
    }
    model = scripted(script)
    helper = Profile("helper", "h", model=model, tools=[show_version])
    argocd = Profile("argocd", "a", model=model, tools=[helper], workspace="scratch")
    async with serve(tmp_path / "there", argocd) as server, supervise(tmp_path / "here") as supervisor:
        run = await supervisor.spawn(make_profile(server.url), Task("go"))
        async for event in run.events():
            if isinstance(event.body, ToolResult) and event.run == 1:
                assert (await supervisor.send(run.tree, 1, "hurry")).state == "queued"
                assert await supervisor.cancel(run.tree, 1)
        assert (await run.result()).final_response == "went on without help"
    there = [(event.run, event.body) for event in await read_only_tree(tmp_path / "there")]
    assert [(number, body.text) for number, body in there if isinstance(body, Inbox)] == [(1, "hurry")]
    assert [(number, body.status) for number, body in there if isinstance(body, RunEnded)] == [
        (1, "cancelled"),
        (0, "done"),
    ]


@pytest.mark.requirement("P5")
@pytest.mark.parametrize("fault", ["cut", "stall"])
async def test_after_a_fault_the_stream_goes_on_where_it_stopped(tmp_path: Path, fault: str) -> None:
    """Nothing is lost and nothing comes twice when the connection is cut, or is only half open."""
    argocd = make_argocd(DEPLOYS)
    async with Proxy() as proxy, supervise(tmp_path / "here") as supervisor:
        options: dict[str, Any] = {"asks_client": True, "public_url": proxy.url}
        async with serve(tmp_path / "there", argocd, **options) as server:
            proxy.target = int(server.address.rpartition(":")[2])
            run = await supervisor.spawn(
                make_profile(proxy.url, reconnect_timeout=30.0, idle_timeout=0.5), Task("deploy")
            )
            async for event in run.events():
                if isinstance(event.body, ApprovalAsked):
                    break
            getattr(proxy, fault)()
            [asked] = await supervisor.pending()
            assert await supervisor.answer(asked.id, Allow(), by="user") == "taken"
            events = await read_run(run)
    assert [body.name for body in bodies(events, ToolCall)] == ["deploy"]
    assert [body.text for body in bodies(events, ToolResult)] == ["deployed to prod"]
    assert [body.text for body in bodies(events, Message)] == ["deployed to prod"]
    assert [body.status for body in bodies(events, RunEnded)] == ["done"]


@pytest.mark.parametrize("command", ["answer", "cancel"])
async def test_an_answer_or_a_cancel_while_the_server_is_out_of_reach_arrives_later(
    tmp_path: Path, command: str
) -> None:
    async with Proxy() as proxy, supervise(tmp_path / "here") as supervisor:
        options: dict[str, Any] = {"asks_client": True, "public_url": proxy.url}
        async with serve(tmp_path / "there", make_argocd(DEPLOYS), **options) as server:
            proxy.target = int(server.address.rpartition(":")[2])
            run = await supervisor.spawn(make_profile(proxy.url, reconnect_timeout=60.0), Task("deploy"))
            async for event in run.events():
                if isinstance(event.body, ApprovalAsked):
                    break
            proxy.is_down = True
            proxy.cut()
            [asked] = await supervisor.pending()
            if command == "answer":
                assert await supervisor.answer(asked.id, Allow(), by="user") == "taken"
            else:
                assert await run.cancel()
            tried = proxy.refused + 2  # one of them may be for the stream
            await until(lambda: proxy.refused >= tried)
            proxy.is_down = False
            [task] = server.tasks.list_tasks("anyone")
            view = await server.tasks.wait_until(task, lambda view: view.ending is not None)
            result = await run.result()
    assert view.ending is not None
    assert view.ending.status == result.status == ("done" if command == "answer" else "cancelled")


@pytest.mark.parametrize("fault", ["refused", "silent"])
async def test_a_cancelled_run_ends_although_its_agent_cannot_be_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    monkeypatch.setattr(adapter, "CANCEL_ASK_SECONDS", 0.1)
    monkeypatch.setattr(adapter.A2aAdapter, "grace", 1e6)  # the wait for an ending that the agent reports
    silent, _ = bind()  # accepts connections and never answers
    with silent:
        async with Proxy() as proxy, serve(tmp_path / "there", make_argocd(DEPLOYS), public_url=proxy.url) as server:
            proxy.target = int(server.address.rpartition(":")[2])
            async with supervise(tmp_path / "here", wait_approvals=1e6) as supervisor:
                argocd = make_profile(proxy.url, reconnect_timeout=1e6)
                run = await supervisor.spawn(make_supervisor(tools=[argocd]), Task("deploy"))
                async for event in run.events():
                    if isinstance(event.body, ToolCall) and event.run == 1:
                        break
                if fault == "refused":
                    proxy.is_down = True
                    proxy.cut()
                else:
                    proxy.target = silent.getsockname()[1]
                    proxy.stall()
                assert await supervisor.cancel(run.tree, 1)
                assert (await supervisor.wait(run.tree, 1)).status == "cancelled"
                assert (await run.result()).status == "done"
                proxy.cut()


async def test_a_cancel_that_cannot_arrive_is_given_up_when_the_supervisor_closes(tmp_path: Path) -> None:
    async with Proxy() as proxy, serve(tmp_path / "there", make_argocd(DEPLOYS), public_url=proxy.url) as server:
        proxy.target = int(server.address.rpartition(":")[2])
        async with supervise(tmp_path / "here") as supervisor:
            run = await supervisor.spawn(make_profile(proxy.url), Task("deploy"))
            async for event in run.events():
                if isinstance(event.body, ToolCall):
                    break
            proxy.is_down = True
            proxy.cut()
            assert await run.cancel()
        assert not [task for task in asyncio.all_tasks() if "A2aRun" in repr(task.get_coro())]


async def test_an_agent_that_was_silent_for_long_is_looked_for_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        later = 0.0

        def monotonic(self) -> float:
            return time.monotonic() + self.later

    clock = Clock()
    monkeypatch.setattr(adapter, "time", clock)
    async with Proxy() as proxy, supervise(tmp_path / "here") as supervisor:
        options: dict[str, Any] = {"asks_client": True, "public_url": proxy.url}
        async with serve(tmp_path / "there", make_argocd(DEPLOYS), **options) as server:
            proxy.target = int(server.address.rpartition(":")[2])
            run = await supervisor.spawn(make_profile(proxy.url, reconnect_timeout=30.0), Task("deploy"))
            async for event in run.events():
                if isinstance(event.body, ApprovalAsked):
                    break
            clock.later = 1000.0
            proxy.cut()
            [asked] = await supervisor.pending()
            assert await supervisor.answer(asked.id, Allow(), by="user") == "taken"
            result = await run.result()
    assert (result.status, result.final_response) == ("done", "deployed to prod")


async def test_several_hundred_events_arrive_once_and_in_order(tmp_path: Path) -> None:
    turns: list[dict[str, Any]] = [{"tools": [{"name": VERSION_TOOL}] * 5} for _ in range(20)]
    script = {"argocd": [*turns, {"text": "over"}]}
    async with serve(tmp_path / "there", make_argocd(script)) as server, supervise(tmp_path / "here") as supervisor:
        events: list[Event] = await read_run(await supervisor.spawn(make_profile(server.url), Task("go")))
    calls = [body.call_id for body in bodies(events, ToolCall)]
    assert len(calls) == len(set(calls)) == 100 == len(bodies(events, ToolResult))


async def test_an_agent_behind_tls_is_called_if_its_certificate_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serve(tmp_path / "there", make_argocd(), certificate=certificate, key=key) as server:
        async with supervise(tmp_path / "stranger") as supervisor:
            refused = await (await supervisor.spawn(make_profile(server.url), Task("go"))).result()
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        async with supervise(tmp_path / "friend") as supervisor:
            result = await (await supervisor.spawn(make_profile(server.url), Task("go"))).result()
    assert refused.status == "disconnected" and "certificate" in (refused.error_details or "").lower()
    assert (result.status, result.final_response) == ("done", "ArgoCD runs v2.9.3.")


def test_what_an_agent_may_reach() -> None:
    agent = A2aAgent(url="http://A.example:80/x", allowed_hosts=("b.example",))
    assert agent.origins == {"a.example:80", "b.example"}


async def test_a_run_that_resumes_there_withdraws_its_open_questions() -> None:
    """The other Retinue was killed with a question open. The resumed run asks anew; nobody there knows the old one."""
    request = RemoteRequest(
        ref=RunRef("t", 0, "/main", "main", "a", "id"),
        profile="a",
        text="go",
        workspace="/w",
        limits=NOBODY,
    )
    run = adapter.A2aAdapter(A2aAgent(url="http://127.0.0.1:1")).start(request)
    assert isinstance(run, adapter.A2aRun)
    reports = []
    for seq, body in enumerate((ApprovalAsked("q1", "c", "x", {}), RunResumed(), ApprovalAsked("q2", "c", "x", {})), 1):
        metadata = make_event_metadata(Event(seq, "t", 0, "/main", "main", 1.0, body))
        assert metadata is not None
        status = TaskStatusUpdateEvent()
        status.metadata.update({EXTENSION: metadata})
        reports += run._read_typed(StreamResponse(status_update=status))
    asked, withdrawn, anew = [report.body for report in reports]
    assert isinstance(asked, ApprovalAsked) and isinstance(anew, ApprovalAsked)
    assert isinstance(withdrawn, ApprovalDecided)
    assert (asked.approval_id, withdrawn.approval_id, withdrawn.allowed, anew.approval_id) == ("q1", "q1", False, "q2")
