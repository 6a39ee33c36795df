"""Requests with random faults, of both versions and bindings: each gets an answer of the protocol, and no 500."""

import copy
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from retinue.protocol.a2a import EXTENSION
from tests.surfaces.a2a.kit import TLS, body_of, make_argocd, message_of, serve

COUNT = 100
JUNK: list[Any] = [
    None, True, 0, -1, 1.5, 10**30, 1e308, "", "x", "\x00", "²", "9" * 5000, "..", "a" * 300, [], [[]], {}, {"x": 1},
    [1, 2], "TASK_STATE_WORKING", "ROLE_USER", "user", {"kind": "text", "text": "hi"}, "2024-01-01T00:00:00Z",
]  # fmt: skip
ANSWER = {"type": "approval.answer", "approval_id": "a", "digest": "d", "decision": "allow"}
METADATA = {EXTENSION: {"retinue/run": "1", "retinue/path": "/x"}}
PARTS = {
    "0.3": [
        {"kind": "text", "text": "hi"},
        {"kind": "file", "file": {"bytes": "aGk="}},
        {"kind": "data", "data": ANSWER},
    ],
    "1.0": [{"text": "hi"}, {"raw": "aGk=", "filename": "n"}, {"data": ANSWER}],
}
METHODS = {
    "0.3": ("message/send", "message/stream", "tasks/get", "tasks/cancel", "tasks/resubscribe",
            "tasks/pushNotificationConfig/get", "agent/getAuthenticatedExtendedCard"),
    "1.0": ("SendMessage", "SendStreamingMessage", "GetTask", "CancelTask", "SubscribeToTask", "ListTasks",
            "GetTaskPushNotificationConfig", "GetExtendedAgentCard"),
}  # fmt: skip
PATHS = {
    "0.3": ("/v1/message:send", "/v1/message:stream", "/v1/tasks/{task}:cancel", "/v1/tasks/{task}:subscribe"),
    "1.0": ("/message:send", "/message:stream", "/tasks/{task}:cancel", "/tasks/{task}:subscribe"),
}


def make_params(version: str, method: str, task: str, number: int) -> dict[str, Any]:
    if "message" not in method.lower():
        return {"id": task, "historyLength": 1, "pageSize": 5, "status": "TASK_STATE_COMPLETED", "pageToken": "x"}
    role = "user" if version == "0.3" else "ROLE_USER"
    message = {"role": role, "messageId": f"m{number}", "contextId": "c", "taskId": task, "parts": PARTS[version]}
    return {"message": {**message, "metadata": METADATA}, "configuration": {"historyLength": 1}, "metadata": {"a": 1}}


def list_places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if place:
        yield place
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield from list_places(inner, (*place, key))


def spoil(value: dict[str, Any], dice: random.Random) -> dict[str, Any]:
    """Return a copy in which something is wrong or missing."""
    spoiled = copy.deepcopy(value)
    place = dice.choice([*list_places(spoiled)])
    inner: Any = spoiled
    for key in place[:-1]:
        inner = inner[key]
    if dice.random() < 0.2:
        del inner[place[-1]]
    else:
        inner[place[-1]] = dice.choice(JUNK)
    return spoiled


@pytest.mark.parametrize("seed", range(1))
async def test_random_faults_are_answered_in_the_words_of_the_protocol(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    async with (
        serve(tmp_path, make_argocd(), asks_client=True) as server,
        httpx.AsyncClient(timeout=60, verify=TLS) as http,
    ):
        first = await http.post(server.url, json=body_of("message/send", message_of("go")))
        known = first.json()["result"]["id"]
        for number in range(COUNT):
            version, task = dice.choice(("0.3", "1.0")), dice.choice((known, "", "nosuch"))
            method = dice.choice(METHODS[version])
            headers = {"Content-Type": "application/json", "Retinue-After": dice.choice(("0", "9" * 5000, "x"))}
            headers |= {"A2A-Version": version, "A2A-Extensions": dice.choice(("", EXTENSION))}
            body = spoil(body_of(method, make_params(version, method, task, number)), dice)
            path = ""
            if dice.random() < 0.3:
                path, body = dice.choice(PATHS[version]).format(task=task or "x"), body.get("params", {})
            response = await http.post(f"{server.url}{path}", content=json.dumps(body).encode(), headers=headers)
            said = f"{path} {body} -> {response.status_code} {response.text[:300]}"
            assert response.status_code < 500 and response.text, said
            assert "-32603" not in response.text and "Traceback" not in response.text, said
        assert (await http.post(server.url, json=body_of("tasks/get", {"id": known}))).json()["result"]["id"] == known
