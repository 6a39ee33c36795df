"""The server with the SDK's client: both versions, both bindings, tasks, contexts, restarts, tokens and files."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from a2a.client import Client
from a2a.client.errors import A2AClientError
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    ListTasksRequest,
    Part,
    SendMessageConfiguration,
    StreamResponse,
    SubscribeToTaskRequest,
    TaskState,
)
from a2a.utils.errors import (
    ContentTypeNotSupportedError,
    InvalidParamsError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)

from retinue import Limits
from retinue.build.logs import open_log_reader
from retinue.core.errors import RetinueError
from retinue.core.events import ApprovalDecided, Inbox, RunSpawned
from retinue.protocol.a2a import EXTENSION
from retinue.surfaces.a2a import gate
from retinue.testing import FixedPrices
from tests.surfaces.a2a.kit import (
    TLS,
    Echo,
    Notes,
    answer,
    ask,
    body_of,
    connect,
    make_argocd,
    make_certificate,
    make_request,
    make_supervisor,
    message_of,
    post,
    question_of,
    read_bodies,
    serve,
    stream,
)

WIRES = [(version, binding) for version in ("1.0", "0.3") for binding in ("JSONRPC", "HTTP+JSON")]
HANGS: dict[str, Any] = {"argocd": [{"hang": True}]}


async def follow_until_working(client: Client, text: str) -> tuple[str, AsyncIterator[StreamResponse]]:
    """Begin a task, and return its id with the rest of its stream."""
    events = client.send_message(make_request(text))
    first = await anext(events)
    return first.task.id, events


@pytest.mark.parametrize(("version", "binding"), WIRES)
async def test_every_binding_streams_and_reads_a_task(tmp_path: Path, version: str, binding: str) -> None:
    async with (
        serve(tmp_path, make_supervisor()) as server,
        connect(server, version=version, binding=binding) as client,
    ):
        events = await ask(client, "show argocd version")
        task = await client.get_task(GetTaskRequest(id=events[0].task.id))
    assert events[0].task.status.state == TaskState.TASK_STATE_SUBMITTED
    names = [event.artifact_update.artifact.name for event in events if event.HasField("artifact_update")]
    assert names[2:6] == ["tool_notification_start"] * 2 + ["tool_notification_end"] * 2
    assert events[-1].status_update.status.state == TaskState.TASK_STATE_COMPLETED
    assert task.status.state == TaskState.TASK_STATE_COMPLETED
    assert [part.text for artifact in task.artifacts for part in artifact.parts] == ["The version is v2.9.3."]
    assert [part.text for message in task.history for part in message.parts] == ["show argocd version"]


@pytest.mark.parametrize(("version", "binding"), WIRES)
async def test_every_binding_cancels_and_subscribes_again(tmp_path: Path, version: str, binding: str) -> None:
    async with (
        serve(tmp_path, make_argocd(HANGS)) as server,
        connect(server, version=version, binding=binding) as client,
    ):
        task, events = await follow_until_working(client, "hang")
        again = client.subscribe(SubscribeToTaskRequest(id=task))
        first = await anext(again)
        assert first.task.id == task
        cancelled = await client.cancel_task(CancelTaskRequest(id=task))
        assert cancelled.status.state == TaskState.TASK_STATE_CANCELED
        for stream_events in (events, again):  # the ending reaches everybody, by the same way as all events
            rest = [event async for event in stream_events]
            assert rest[-1].status_update.status.state == TaskState.TASK_STATE_CANCELED
        with pytest.raises((TaskNotCancelableError, A2AClientError)):  # of the SDK's 0.3 REST
            await client.cancel_task(CancelTaskRequest(id=task))


@pytest.mark.requirement("P4")
async def test_tasks_are_listed_newest_first_in_pages(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd()) as server, connect(server) as client:
        made = [(await ask(client, f"task {number}"))[0].task.id for number in range(3)]
        first = await client.list_tasks(ListTasksRequest(page_size=2, include_artifacts=True))
        rest = await client.list_tasks(ListTasksRequest(page_size=2, page_token=first.next_page_token))
        done = await client.list_tasks(ListTasksRequest(status=TaskState.TASK_STATE_COMPLETED))
        none = await client.list_tasks(ListTasksRequest(status=TaskState.TASK_STATE_WORKING))
    assert [task.id for task in [*first.tasks, *rest.tasks]] == made[::-1]
    assert (first.total_size, rest.next_page_token, len(done.tasks), len(none.tasks)) == (3, "", 3, 0)
    assert first.tasks[0].artifacts and not rest.tasks[0].artifacts


async def test_a_context_is_a_conversation_that_continues_also_after_a_restart(tmp_path: Path) -> None:
    profile = make_argocd(model=Echo())
    async with serve(tmp_path, profile) as server, connect(server) as client:
        first = (await ask(client, "one"))[0].task
        second = (await ask(client, "two", context_id=first.context_id))[0].task
    async with serve(tmp_path, profile) as server, connect(server) as client:
        third = (await ask(client, "three", context_id=first.context_id))[0].task
        found = await client.list_tasks(ListTasksRequest(context_id=first.context_id, include_artifacts=True))
    said = {task.id: task.artifacts[0].parts[0].text for task in found.tasks}
    assert said == {first.id: "one", second.id: "one / two", third.id: "one / two / three"}
    assert len({first.context_id, second.context_id, third.context_id}) == 1


async def test_a_repeated_message_returns_the_same_task(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd()) as server, connect(server) as client:
        twice = await asyncio.gather(*(ask(client, "once", message_id="m-1") for _ in range(2)))
        tasks = {events[0].task.id for events in twice}
    notes = Notes()
    async with serve(tmp_path, make_argocd(), notes) as server, connect(server) as client:
        tasks |= {(await ask(client, "once", message_id="m-1"))[0].task.id}
        listed = await client.list_tasks(ListTasksRequest())
    assert len(tasks) == 1 and len(listed.tasks) == 1
    assert f"client 'anyone' sends the message 'm-1' again: it gets the task {tasks.pop()}" in notes.said[-1]


async def test_words_for_a_task_at_work_steer_it_and_an_ended_one_says_how_to_go_on(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd(HANGS)) as server, connect(server) as client:
        task, events = await follow_until_working(client, "hang")
        request = make_request("left, not right", task_id=task)  # without its contextId
        request.configuration.CopyFrom(SendMessageConfiguration(return_immediately=True))
        [steered] = [event async for event in _without_streaming(client).send_message(request)]
        await client.cancel_task(CancelTaskRequest(id=task))
        rest = [event async for event in events]
        with pytest.raises(UnsupportedOperationError, match="contextId"):
            await ask(client, "more", task_id=task)
    assert steered.task.id == task == rest[-1].status_update.task_id
    assert [part.text for message in steered.task.history for part in message.parts] == ["hang", "left, not right"]


@pytest.mark.parametrize("run", ["-1", "x", 1])
async def test_a_command_for_a_run_that_has_no_number_reaches_nothing(tmp_path: Path, run: object) -> None:
    """Above all, it does not cancel the whole task."""
    metadata = {EXTENSION: {"retinue/run": run}}
    async with serve(tmp_path, make_argocd(HANGS)) as server, connect(server) as client:
        task, _ = await follow_until_working(client, "hang")
        with pytest.raises(InvalidParamsError, match="must be the number of a run"):
            await client.cancel_task(CancelTaskRequest(id=task, metadata=metadata))
        request = make_request("go on", task_id=task)
        request.message.metadata.update(metadata)
        with pytest.raises(InvalidParamsError, match="must be the number of a run"):
            [_ async for _ in client.send_message(request)]
        assert (await client.get_task(GetTaskRequest(id=task))).status.state != TaskState.TASK_STATE_CANCELED


async def test_words_and_answers_that_come_again_after_a_kill_count_once(tmp_path: Path) -> None:
    """The client that lost the answer of a killed server sends its message again to the next one."""
    script: dict[str, Any] = {
        "argocd": [{"tools": [{"name": "deploy", "args": {"target": "prod"}}]}, {"text": "first"}, {"text": "over"}]
    }
    async with serve(tmp_path, make_argocd(script), asks_client=True) as server, connect(server) as client:
        events = await ask(client, "deploy")
        task, question = events[0].task.id, question_of(events)
        await ask(client, "mind the gap", task_id=task, message_id="steer-1")
        await ask(client, "", task_id=task, parts=[answer(question)], message_id="answer-1")
    async with serve(tmp_path, make_argocd(script), asks_client=True) as server, connect(server) as client:
        again = [
            await ask(client, "mind the gap", task_id=task, message_id="steer-1"),
            await ask(client, "", task_id=task, parts=[answer(question)], message_id="answer-1"),
        ]
        with pytest.raises(UnsupportedOperationError, match="has ended"):
            await ask(client, "mind the gap", task_id=task, message_id="steer-2")
        with pytest.raises(UnsupportedOperationError, match="has ended"):
            await ask(client, "", task_id=task, parts=[answer(question, "deny")], message_id="answer-2")
        found = await client.get_task(GetTaskRequest(id=task))
    assert [events[0].task.id for events in again] == [task, task]
    assert [message.message_id for message in found.history][1:] == ["steer-1"]
    assert [body.message_id for body in await read_bodies(tmp_path, task, Inbox)] == ["steer-1"]
    assert [body.by for body in await read_bodies(tmp_path, task, ApprovalDecided)] == ["a2a client anyone"]


def _without_streaming(client: Client) -> Client:
    client._config.streaming = False  # type: ignore[attr-defined]
    return client


async def test_each_token_sees_its_own_tasks(tmp_path: Path) -> None:
    tokens = {"alice": "a" * 32, "bob": "b" * 32}
    async with serve(tmp_path, make_argocd(), tokens=tokens) as server:
        async with connect(server, token=tokens["alice"]) as alice, connect(server, token=tokens["bob"]) as bob:
            events = await ask(alice, "secret", context_id="shared")
            task = events[0].task.id
            for call in (
                bob.get_task(GetTaskRequest(id=task)),
                bob.cancel_task(CancelTaskRequest(id=task)),
                anext(bob.subscribe(SubscribeToTaskRequest(id=task))),
                anext(bob.send_message(make_request("mine?", task_id=task))),
            ):
                with pytest.raises(TaskNotFoundError):
                    await call
            assert not (await bob.list_tasks(ListTasksRequest())).tasks
            other = (await ask(bob, "mine", context_id="shared"))[0].task  # a context of the same name, not the same
            assert (await alice.get_task(GetTaskRequest(id=task))).status.state == TaskState.TASK_STATE_COMPLETED
        refused = await post(server, body_of("message/send", message_of("x")))
        wrong = await post(server, body_of("message/send", message_of("x")), Authorization="Bearer " + "c" * 32)
        async with httpx.AsyncClient(verify=TLS) as http:
            card = await http.get(f"{server.url}/.well-known/agent-card.json")
    [spawned] = [
        run.first.body
        for run in await open_log_reader(tmp_path / ".retinue").read_runs([other.id])
        if run.first.run == 0
    ]
    assert isinstance(spawned, RunSpawned) and spawned.continues is None
    assert (refused.status_code, wrong.status_code, card.status_code) == (401, 401, 200)
    assert card.json()["securitySchemes"] and card.headers["cache-control"]


REFUSED_HEADERS: list[tuple[dict[str, str], int]] = [
    ({"Host": "evil.example"}, 421),
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Encoding": "gzip"}, 415),
]


async def test_host_origin_and_type_are_checked_without_tokens_too(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd()) as server:
        for headers, status in REFUSED_HEADERS:
            response = await post(server, body_of("message/send", message_of("x")), **headers)
            assert (response.status_code, server.tasks.list_tasks("anyone")) == (status, []), headers
            assert response.json()["error"]["message"]


async def test_a_client_that_asks_too_often_is_told_to_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gate, "REQUEST_RATE", 0.001)
    monkeypatch.setattr(gate, "REQUEST_BURST", 3)
    tokens = {"alice": "a" * 32, "bob": "b" * 32}
    async with serve(tmp_path, make_argocd(), tokens=tokens) as server:
        body = body_of("tasks/get", {"id": "nosuch"})
        alice = [await post(server, body, Authorization=f"Bearer {tokens['alice']}") for _ in range(4)]
        bob = await post(server, body, Authorization=f"Bearer {tokens['bob']}")
    assert [response.status_code for response in [*alice, bob]] == [200, 200, 200, 429, 200]
    assert alice[-1].headers["retry-after"] == "1" and "try again later" in alice[-1].json()["error"]["message"]


async def test_a_stray_request_is_told_where_the_card_is(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd()) as server, httpx.AsyncClient(verify=TLS) as http:
        for method, path, status in (
            ("GET", "/", 405),
            ("DELETE", "/", 405),
            ("GET", "/foo", 404),
            ("POST", "/foo", 404),
        ):
            response = await http.request(method, f"{server.url}{path}")
            assert response.status_code == status, path
            assert "/.well-known/agent-card.json" in response.json()["error"]["message"]


@pytest.mark.parametrize("header", ["A2A-Extensions", "X-A2A-Extensions"])
async def test_the_answer_names_the_extension_that_was_asked_for(tmp_path: Path, header: str) -> None:
    async with serve(tmp_path, make_argocd()) as server:
        body = body_of("tasks/get", {"id": "nosuch"})
        asked = await post(server, body, **{header: f"urn:other:1, {EXTENSION}"})
        other = await post(server, body, **{header: "urn:other:1"})
    assert asked.headers[header] == EXTENSION and header.lower() not in other.headers


BAD_BODIES = [
        (b"{", -32700),
        (b'{"id":1,"id":2,"method":"tasks/get"}', -32700),
        (b'{"id":1,"method":"tasks/get","params":' + b"[" * 200 + b"]" * 200 + b"}", -32700),
        (b'{"id":1,"method":"tasks/get","params":{"x":NaN}}', -32700),
        (b'{"id":1,"method":"tasks/get","params":{"x":1e999}}', -32700),
        (b'{"id":1,"method":"tasks/get","params":{"id":"\\ud800"}}', -32700),
        (b"[]", -32600),
        (b'{"id":1,"method":5}', -32600),
        (b'{"id":1,"method":"nosuch/method"}', -32601),
        (b'{"id":1,"method":"tasks/get","params":{}}', -32602),
        (b'{"method":"message/send","params":{"":"not_a_dict"}}', -32602),
        (b'{"id":{"bad":"type"},"method":"message/send","params":{}}', -32600),
        (b'{"id":1,"method":"message/send","params":{"message":{"role":"user","parts":[]}}}', -32602),
        (b'{"id":1,"method":"tasks/get","params":{"id":"nosuch"}}', -32001),
        (b'{"id":1,"method":"tasks/cancel","params":{"id":"nosuch"}}', -32001),
        (json.dumps(body_of("message/send", {"message": {"role": "user", "parts": [{"kind": "text", "text": " "}],
                                                         "messageId": "m"}})).encode(), -32602),
        (json.dumps(body_of("message/send", message_of("x", messageId="m" * 300))).encode(), -32602),
        (json.dumps(body_of("message/send", message_of("x", taskId="nosuch"))).encode(), -32001),
        (json.dumps(body_of("tasks/pushNotificationConfig/get", {"id": "x"})).encode(), -32003),
        (json.dumps(body_of("message/send", {"message": {"role": "user", "messageId": "m", "parts": [
            {"kind": "file", "file": {"bytes": "x"}}]}})).encode(), -32602),
]  # fmt: skip


async def test_bad_input_gets_the_error_of_the_protocol_with_a_sentence(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd()) as server:
        for body, code in BAD_BODIES:
            response = await post(server, body)
            said = response.json()["error"]
            assert (response.status_code, said["code"]) == (200, code), body
            assert said["message"] and "Traceback" not in response.text
        assert (await stream(server, body_of("message/stream", message_of("still there"))))[-1]["final"]


async def test_a_number_that_is_too_large_is_refused_over_rest(tmp_path: Path) -> None:
    body = b'{"message":{"role":"ROLE_USER","messageId":"m","parts":[{"data":1e999}]}}'
    headers = {"Content-Type": "application/json", "A2A-Version": "1.0"}
    async with serve(tmp_path, make_argocd()) as server, httpx.AsyncClient(verify=TLS) as http:
        response = await http.post(f"{server.url}/message:send", content=body, headers=headers)
    assert (response.status_code, response.json()["error"]["message"]) == (400, "the number 1e999 is too large")


BAD_STREAMS: list[tuple[str, dict[str, Any], int]] = [
    ("/v1/message:stream", {"message": {"role": "ROLE_USER", "messageId": "m"}}, 400),
    ("/v1/message:stream", {"message": 5}, 400),
    ("/v1/message:stream", {"message": {"role": "ROLE_USER", "messageId": "m", "content": [{"text": "x"}],
                                        "taskId": "nosuch"}}, 404),
    ("/v1/tasks/nosuch:subscribe", {}, 404),
    ("/message:stream", {"message": {"role": "ROLE_USER", "messageId": "m"}}, 400),
    ("/tasks/nosuch:subscribe", {}, 404),
]  # fmt: skip


async def test_a_stream_that_cannot_begin_is_answered_with_the_reason(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd()) as server, httpx.AsyncClient(verify=TLS) as http:
        for path, body, status in BAD_STREAMS:
            headers = {} if path.startswith("/v1") else {"A2A-Version": "1.0"}
            response = await http.post(f"{server.url}{path}", json=body, headers=headers)
            assert response.status_code == status, (path, response.text)
            assert response.json()["error"]["message"]


async def test_a_cursor_that_is_no_number_is_none(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd(HANGS)) as server, connect(server) as client:
        task, _ = await follow_until_working(client, "hang")
        for cursor in ("9" * 5000, "-1", "x"):
            body = json.dumps(body_of("tasks/resubscribe", {"id": task})).encode()
            headers = {"Content-Type": "application/json", "A2A-Extensions": EXTENSION, "Retinue-After": cursor}
            async with (
                httpx.AsyncClient(verify=TLS) as http,
                http.stream("POST", server.url, content=body, headers=headers) as response,
            ):
                first = await anext(response.aiter_lines())
            assert json.loads(first.removeprefix("data: "))["result"]["id"] == task


async def test_a_body_over_the_limit_is_refused(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd()) as server:
        response = await post(server, b" " * (13 * 1024 * 1024))
        assert response.status_code == 413


async def test_file_bytes_go_to_the_workspace_and_addresses_are_refused(tmp_path: Path) -> None:
    script: dict[str, Any] = {
        "argocd": [{"tools": [{"name": "read", "args": {"path": "notes.txt"}}]}, {"text": "{{last_result}}"}]
    }
    profile = make_argocd(script, tools=["read"], workspace="copy")
    (tmp_path / "own.txt").write_text("the project's own")
    async with serve(tmp_path, profile) as server, connect(server) as client:
        parts = [Part(text="read it"), Part(raw=b"hello from afar", filename="../../notes.txt")]
        task = (await ask(client, "", parts=parts))[0].task.id
        found = await client.get_task(GetTaskRequest(id=task))
        with pytest.raises(ContentTypeNotSupportedError, match="send its bytes"):
            await ask(client, "", parts=[Part(url="file:///etc/passwd")])
    assert "hello from afar" in found.artifacts[0].parts[0].text
    workspace = tmp_path / ".retinue" / "runs" / task / "0" / "workspace"
    assert (workspace / "notes.txt").read_bytes() == b"hello from afar"
    assert sorted(path.name for path in tmp_path.iterdir()) == [".retinue", "own.txt"]  # nothing is applied
    assert not list((tmp_path / ".retinue" / "a2a" / "files").iterdir())


async def test_budgets_hold_for_a_task_and_for_the_server(tmp_path: Path) -> None:
    reply = {"text": "x", "usage": {"input_tokens": 600, "output_tokens": 400}}
    script: dict[str, Any] = {"argocd": [{**reply, "tools": [{"name": "version_service__version"}]}, reply, reply]}
    parts = {"prices": FixedPrices({"*": ("1", "1")}), "limits": Limits(tokens=1000), "total": Limits(tokens=2500)}
    async with serve(tmp_path, make_argocd(script), parts=parts) as server, connect(server) as client:
        ends = [(await ask(client, "go"))[-1].status_update.status for _ in range(3)]
        with pytest.raises(UnsupportedOperationError, match="budget of 2,500 tokens of this process is spent"):
            await ask(client, "", parts=[Part(text="go"), Part(raw=b"hello", filename="notes.txt")])
        assert not list((tmp_path / ".retinue" / "a2a" / "files").iterdir())
    assert [end.state for end in ends] == [TaskState.TASK_STATE_FAILED] * 3
    assert "budget of 1,000 tokens" in ends[0].message.parts[0].text


@pytest.mark.requirement("CAIPE-28")
@pytest.mark.parametrize("on_disconnect", ["continue", "cancel"])
async def test_a_client_that_goes_away_is_logged_and_its_task_does_as_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, on_disconnect: str
) -> None:
    notes = Notes()
    with caplog.at_level(logging.INFO, "retinue"):
        async with serve(tmp_path, make_argocd(HANGS), notes, on_disconnect=on_disconnect) as server:
            async with httpx.AsyncClient(verify=TLS) as http:
                body = body_of("message/stream", message_of("hang"))
                async with http.stream("POST", server.url, json=body) as response:
                    lines = response.aiter_lines()
                    task = json.loads((await anext(lines)).removeprefix("data: "))["result"]["id"]
                    await lines.aclose()  # type: ignore[attr-defined]
            found = server.tasks.find(task, "anyone")
            assert found is not None
            while not any("went away" in text for text in notes.said):
                await asyncio.sleep(0)
            if on_disconnect == "cancel":
                view = await server.tasks.wait_until(found, lambda view: view.ending is not None)
                assert view.ending is not None and view.ending.status == "cancelled"
            else:
                assert (await server.tasks.read_view(found)).ending is None
    assert any("client disconnection" in record.getMessage() for record in caplog.records)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_server_takes_so_many_tasks_at_once(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd(HANGS), most_tasks=1) as server, connect(server) as client:
        task, events = await follow_until_working(client, "hang")
        with pytest.raises(UnsupportedOperationError, match="try again later"):
            await ask(client, "hang too")
        await client.cancel_task(CancelTaskRequest(id=task))
        assert [event async for event in events]
        again, _ = await follow_until_working(client, "hang")
        assert again != task


async def test_a_typed_answer_is_data(tmp_path: Path) -> None:
    script: dict[str, Any] = {"argocd": [{"tools": [{"name": "final_answer", "args": {"version": "v2"}}]}]}
    schema = {"type": "object", "properties": {"version": {"type": "string"}}, "required": ["version"]}
    async with serve(tmp_path, make_argocd(script, output=schema)) as server:
        done = (await post(server, body_of("message/send", message_of("go")))).json()["result"]
    assert [part["data"] for part in done["artifacts"][0]["parts"]] == [{"version": "v2"}]


async def test_a_blocking_call_waits_and_one_that_does_not_wait_returns_at_once(tmp_path: Path) -> None:
    async with serve(tmp_path, make_argocd()) as server:
        done = (await post(server, body_of("message/send", message_of("go")))).json()["result"]
        params = {**message_of("go"), "configuration": {"blocking": False}}
        begun = (await post(server, body_of("message/send", params))).json()["result"]
    assert (done["status"]["state"], done["artifacts"][0]["parts"][0]["text"]) == ("completed", "ArgoCD runs v2.9.3.")
    assert begun["status"]["state"] in ("submitted", "working")


async def test_tokens_and_tls_can_be_had_on_another_address(tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path)
    async with serve(tmp_path, make_argocd(), certificate=certificate, key=key) as server:
        assert server.url.startswith("https://")
        async with httpx.AsyncClient(verify=False) as http:
            found = (await http.get(f"{server.url}/.well-known/agent-card.json")).json()
    assert found["url"] == server.url and found["capabilities"]["pushNotifications"] is False


async def test_a_server_that_cannot_start_says_why_and_leaves_nothing_open(tmp_path: Path) -> None:
    (tmp_path / "c.pem").write_text("no certificate")
    with pytest.raises(RetinueError, match="the TLS certificate and key cannot be used"):
        async with serve(tmp_path, make_argocd(), certificate=tmp_path / "c.pem", key=tmp_path / "c.pem"):
            pass
    async with serve(tmp_path, make_argocd()) as server:  # the log is free again
        with pytest.raises(RetinueError, match="cannot listen on"):
            async with serve(tmp_path / "other", make_argocd(), port=int(server.address.rpartition(":")[2])):
                pass
