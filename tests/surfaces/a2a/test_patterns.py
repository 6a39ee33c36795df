"""The two patterns of seed 003: the exact events, their order and their words."""

from pathlib import Path
from typing import Any

import pytest
from a2a.server.agent_execution import RequestContext
from a2a.server.tasks import TaskUpdater
from a2a.types import Part

from retinue import Profile
from retinue.core.remote_agents import A2aAgent
from retinue.testing import scripted
from tests.remote.a2a_kit import say, serve_agent
from tests.surfaces.a2a.kit import (
    VERSION_TOOL,
    body_of,
    join_chunks,
    make_argocd,
    make_supervisor,
    message_of,
    serve,
    show_version,
    stream,
    texts_of,
    without_ids,
)

IDS = {"contextId": "*", "taskId": "*"}


def status(text: str) -> dict[str, Any]:
    message = {**IDS, "kind": "message", "messageId": "*", "parts": [{"kind": "text", "text": text}], "role": "agent"}
    return {**IDS, "final": False, "kind": "status-update", "status": {"message": message, "state": "working"}}


def artifact(name: str, about: str, text: str, *, append: bool = False, last: bool = False) -> dict[str, Any]:
    made = {"artifactId": "*", "description": about, "name": name, "parts": [{"kind": "text", "text": text}]}
    return {**IDS, "append": append, "artifact": made, "kind": "artifact-update", "lastChunk": last}


COMPLETED = {**IDS, "final": True, "kind": "status-update", "status": {"state": "completed"}}


def submitted(text: str) -> dict[str, Any]:
    message = {**IDS, "kind": "message", "messageId": "*", "parts": [{"kind": "text", "text": text}], "role": "user"}
    return {"contextId": "*", "history": [message], "id": "*", "kind": "task", "status": {"state": "submitted"}}


@pytest.mark.requirement(
    "CAIPE-12", "CAIPE-13", "CAIPE-14", "CAIPE-15", "CAIPE-16", "CAIPE-18", "CAIPE-20", "CAIPE-22", "CAIPE-23",
    "CAIPE-25",
)  # fmt: skip
async def test_a_subagent_sends_the_six_events_of_the_seed(tmp_path: Path) -> None:
    body = body_of("message/stream", message_of("show version"), "subagent-events")
    del body["jsonrpc"]
    async with serve(tmp_path, make_argocd(), pattern="subagent") as server:
        events = await stream(server, body)
    assert without_ids(events) == [
        submitted("show version"),
        status("🔧 Argocd: Calling tool: Version_Service__Version\n"),
        status("✅ Argocd: Tool Version_Service__Version completed\n"),
        status("ArgoCD runs v2.9.3."),
        artifact("current_result", "Result of the request", "", last=True),
        COMPLETED,
    ]
    assert len({event["contextId"] for event in events}) == 1
    assert len({event.get("taskId", event.get("id")) for event in events}) == 1


@pytest.mark.requirement(
    "CAIPE-1", "CAIPE-2", "CAIPE-3", "CAIPE-4", "CAIPE-5", "CAIPE-6", "CAIPE-7", "CAIPE-8", "CAIPE-17", "CAIPE-19",
    "CAIPE-21", "CAIPE-27", "CAIPE-31", "CAIPE-32",
)  # fmt: skip
async def test_a_supervisor_sends_notices_and_words_as_artifacts(tmp_path: Path) -> None:
    async with serve(tmp_path, make_supervisor()) as server:
        sent = await stream(server, body_of("message/stream", message_of("show argocd version")))
    events = without_ids(join_chunks(sent))
    plan, answer = "Execution plan", "Answer, as it is written"
    assert sum(event.get("artifact", {}).get("description") == answer for event in sent) >= 3  # token by token
    assert events == [
        submitted("show argocd version"),
        artifact("streaming_result", plan, "⟦🎯 Execution Plan: get the version⟧"),
        artifact("streaming_result", plan, "", append=True, last=True),
        artifact("tool_notification_start", "Tool call started: argocd", "\n🔧 Supervisor: Calling Argocd...\n"),
        artifact(
            "tool_notification_start",
            f"Tool call started: {VERSION_TOOL}",
            "\n🔧 Argocd: Calling tool: Version_Service__Version\n",
        ),
        artifact(
            "tool_notification_end",
            f"Tool call completed: {VERSION_TOOL}",
            "\n✅ Argocd: Tool Version_Service__Version completed\n",
        ),
        artifact("tool_notification_end", "Tool call completed: argocd", "\n✅ Supervisor: Argocd completed\n"),
        artifact("streaming_result", answer, "The version is v2.9.3."),
        artifact("streaming_result", answer, "", append=True, last=True),
        COMPLETED,
    ]
    assert "**" not in "".join(texts_of(sent))


async def test_notices_name_every_run_at_depth_3_and_beside_each_other(tmp_path: Path) -> None:
    calls = [{"name": "subagent_left", "args": {"task": "l"}}, {"name": "subagent_right", "args": {"task": "r"}}]
    script: dict[str, Any] = {
        "supervisor": [{"tools": calls}, {"text": "both done"}],
        "left": [{"tools": [{"name": "subagent_deep_one", "args": {"task": "d"}}]}, {"text": "left done"}],
        "deep_one": [{"tools": [{"name": VERSION_TOOL}]}, {"text": "deep done"}],
        "right": [{"tools": [{"name": VERSION_TOOL}]}, {"text": "right done"}],
    }
    model = scripted(script)
    deep = Profile("deep_one", "d", model=model, tools=[show_version])
    left = Profile("left", "l", model=model, tools=[deep])
    right = Profile("right", "r", model=model, tools=[show_version])
    async with serve(tmp_path, make_supervisor(script, [left, right])) as server:
        events = await stream(server, body_of("message/stream", message_of("go")))
    lines = [text.strip() for text in texts_of(events)]
    chain = [
        "🔧 Supervisor: Calling Left...",
        "🔧 Left: Calling Deep_One...",
        "🔧 Deep_One: Calling tool: Version_Service__Version",
        "✅ Deep_One: Tool Version_Service__Version completed",
        "✅ Left: Deep_One completed",
        "✅ Supervisor: Left completed",
        "both done",
    ]
    places = [lines.index(line) for line in chain]
    assert places == sorted(places)
    assert len(lines) == len(set(lines)) == len(chain) + 4  # each once
    assert not any(text in "".join(lines) for text in ("**", "left done", "deep done", "right done"))


async def test_notices_of_spawn_subagents_name_the_children(tmp_path: Path) -> None:
    tasks = [{"task": "look", "subagent_type": "explorer"}, {"task": "look again", "subagent_type": "explorer"}]
    script: dict[str, Any] = {
        "supervisor": [{"tools": [{"name": "spawn_subagents", "args": {"tasks": tasks}}]}, {"text": "seen"}],
        "explorer": [{"text": "there"}],
    }
    explorer = Profile("explorer", "e", model=scripted(script), description="looks")
    parts = {"profiles": [explorer]}
    async with serve(tmp_path, make_supervisor(script, ["spawn_subagents"]), parts=parts) as server:
        events = await stream(server, body_of("message/stream", message_of("go")))
    lines = [text.strip() for text in texts_of(events)]
    assert lines[:2] == ["🔧 Supervisor: Calling Explorer..."] * 2
    assert lines[2:] == [*["✅ Supervisor: Explorer completed"] * 2, "seen"]


async def test_a_plan_is_streamed_and_no_part_of_the_result(tmp_path: Path) -> None:
    script: dict[str, Any] = {"supervisor": [{"text": "⟦ think\nhard ⟧\n\nIt is 42. [[x]]", "chunks": 12, "delay": 0}]}
    async with serve(tmp_path, make_supervisor(script, [])) as server:
        events = await stream(server, body_of("message/stream", message_of("go")))
        found = await stream_get(server, events[0]["id"])
    by_id: dict[str, str] = {}
    for event in events[1:-1]:
        made = event["artifact"]
        assert event["append"] == (made["artifactId"] in by_id)
        by_id[made["artifactId"]] = by_id.get(made["artifactId"], "") + made["parts"][0]["text"]
    assert list(by_id.values()) == ["⟦ think\nhard ⟧", "It is 42. [[x]]"]
    assert sum(event["lastChunk"] for event in events[1:-1]) == 2
    assert [part["text"] for each in found["artifacts"] for part in each["parts"]] == ["It is 42. [[x]]"]


async def stream_get(server: Any, task: str) -> Any:
    from tests.surfaces.a2a.kit import post

    return (await post(server, body_of("tasks/get", {"id": task}))).json()["result"]


async def test_a_failed_call_and_a_failed_run_say_so(tmp_path: Path) -> None:
    script: dict[str, Any] = {
        "argocd": [{"tools": [{"name": "nosuch"}]}, {"error": "the model is away"}],
    }
    async with serve(tmp_path, make_argocd(script), pattern="subagent") as server:
        events = await stream(server, body_of("message/stream", message_of("go")))
    assert texts_of(events)[:2] == ["🔧 Argocd: Calling tool: Nosuch\n", "❌ Argocd: Tool Nosuch failed\n"]
    last = events[-1]
    assert (last["final"], last["status"]["state"]) == (True, "failed")
    assert "the model is away" in last["status"]["message"]["parts"][0]["text"]


async def test_an_agent_elsewhere_is_served_word_by_word_and_nothing_takes_the_place_of_anything(
    tmp_path: Path,
) -> None:
    async def act(updater: TaskUpdater, context: RequestContext) -> None:
        await say(updater, "Looking.", "Found it.")
        for number, word in enumerate(("It ", "runs ", "well.")):
            await updater.add_artifact([Part(text=word)], artifact_id="a", append=number > 0)
        await updater.complete()

    async with serve_agent(act) as (url, _):
        profile = Profile("argocd", tools=(), a2a=A2aAgent(url=url))
        async with serve(tmp_path, profile) as server:
            events = await stream(server, body_of("message/stream", message_of("go")))
    chunks = [each for each in events if each["kind"] == "artifact-update"]
    assert [(each["append"], each["artifact"]["parts"][0]["text"]) for each in chunks] == [
        (False, "Looking."), (True, ""), (False, "Found it."), (True, ""),
        (False, "It runs "), (True, "well."), (True, ""),
    ]  # fmt: skip
    assert len({each["artifact"]["artifactId"] for each in chunks}) == 3
