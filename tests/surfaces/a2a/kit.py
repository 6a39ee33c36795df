"""A real A2A server in this process, and real clients of it: the SDK's, and plain HTTP."""

from __future__ import annotations

import json
import re
import ssl
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from a2a.client import A2ACardResolver, Client, ClientConfig, ClientFactory
from a2a.types import Message, Part, Role, SendMessageRequest, StreamResponse, TaskState
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Value

from retinue import Profile, tool
from retinue.build.logs import open_log_reader
from retinue.build.parts import Parts
from retinue.build.supervisor import open_served_control
from retinue.core.events import Event
from retinue.core.messages import Reply, Request, UserTurn
from retinue.surfaces.a2a.options import OperatorScreen, ServerOptions
from retinue.surfaces.a2a.server import A2aServer
from retinue.testing import scripted

Body = TypeVar("Body")
TLS = ssl.create_default_context()  # costs more than a request: made once
VERSION_TOOL = "version_service__version"


@tool(name=VERSION_TOOL, tier="observe")
async def show_version() -> str:
    """Say which version runs."""
    return "v2.9.3"


@tool(tier="confirm", repeatable=False)
async def deploy(target: str) -> str:
    """Deploy something."""
    return f"deployed to {target}"


ARGOCD: dict[str, Any] = {
    "argocd": [{"tools": [{"name": VERSION_TOOL}]}, {"text": "ArgoCD runs v2.9.3."}],
}
SUPERVISED: dict[str, Any] = {
    "supervisor": [
        {"text": "⟦🎯 Execution Plan: get the version⟧", "tools": [{"name": "subagent_argocd", "args": {"task": "v"}}]},
        {"text": "The version is v2.9.3.", "chunks": 4},
    ],
    **ARGOCD,
}


def make_argocd(script: dict[str, Any] | None = None, **more: Any) -> Profile:
    fields = {"tools": [show_version, deploy], "workspace": "scratch", "description": "Knows ArgoCD.", **more}
    fields.setdefault("model", scripted(script or ARGOCD))
    return Profile("argocd", "You know ArgoCD.", **fields)


def make_supervisor(script: dict[str, Any] | None = None, tools: Sequence[Any] | None = None) -> Profile:
    script = script or SUPERVISED
    given = [make_argocd(script)] if tools is None else tools
    return Profile("platform", "You supervise.", model=scripted(_rename(script)), tools=given, workspace="scratch")


def _rename(script: dict[str, Any]) -> dict[str, Any]:
    return {("platform" if name == "supervisor" else name): said for name, said in script.items()}


class Echo:
    """A model that says what its user has said, from the first message of the conversation on."""

    name = "echo"

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        return Reply(" / ".join(turn.text for turn in request.thread if isinstance(turn, UserTurn)))


class Notes:
    """The screen of a server: its messages, and the lines about its tasks."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def show_task(self, tree: str, label: str, line: str) -> None:
        self.said.append(line)

    @property
    def screen(self) -> OperatorScreen:
        return OperatorScreen(say=self.said.append, show_task=self.show_task)


async def read_only_tree(folder: Path) -> list[Event]:
    """Read the events of the only tree of a server."""
    log = open_log_reader(folder / ".retinue")
    [stored] = await log.list_trees()
    return await log.read(stored.tree)


async def read_bodies(folder: Path, tree: str, kind: type[Body]) -> list[Body]:
    """Read the bodies of one kind from the log of a task."""
    events = await open_log_reader(folder / ".retinue").read(tree)
    return [event.body for event in events if isinstance(event.body, kind)]


@asynccontextmanager
async def serve(
    folder: Path, profile: Profile, notes: Notes | None = None, *, parts: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[A2aServer]:
    """Serve a profile; `parts` and `options` replace the usual ones."""
    made = Parts(**{"project": folder, "state": folder / ".retinue", "wait_approvals": 30.0, **(parts or {})})
    chosen = {
        "profiles": (), "host": "127.0.0.1", "port": 0, "public_url": "", "tokens": {}, "pattern": "supervisor",
        "asks_client": False, "on_disconnect": "continue", "most_tasks": 100, "certificate": None,
        "key": None, "version": "1",
        **options,
    }  # fmt: skip
    screen = (notes or Notes()).screen
    async with (
        open_served_control(made, screen.say, serves=False) as control,
        A2aServer(control, folder / ".retinue", ServerOptions(profile=profile, **chosen), screen) as server,
    ):
        yield server


@asynccontextmanager
async def connect(
    server: A2aServer, *, version: str = "1.0", binding: str = "JSONRPC", token: str = ""
) -> AsyncIterator[Client]:
    """The SDK's client, which speaks one version over one binding."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    async with httpx.AsyncClient(headers=headers, timeout=60, verify=TLS) as http:
        card = await A2ACardResolver(http, server.url).get_agent_card()
        wanted = [
            each
            for each in card.supported_interfaces
            if (each.protocol_binding, each.protocol_version) == (binding, version)
        ]
        del card.supported_interfaces[:]
        card.supported_interfaces.extend(wanted)
        config = ClientConfig(httpx_client=http, supported_protocol_bindings=[binding])
        yield ClientFactory(config).create(card)


def make_request(text: str, **fields: Any) -> SendMessageRequest:
    fields = {"message_id": str(uuid.uuid4()), "role": Role.ROLE_USER, "parts": [Part(text=text)], **fields}
    return SendMessageRequest(message=Message(**fields))


async def ask(client: Client, text: str, **fields: Any) -> list[StreamResponse]:
    """All events of a streamed message."""
    return [event async for event in client.send_message(make_request(text, **fields))]


def answer(question: dict[str, Any], decision: str = "allow", **changes: Any) -> Part:
    data = {
        "type": "approval.answer",
        "approval_id": question["approval_id"],
        "digest": question["digest"],
        "decision": decision,
        **changes,
    }
    return Part(data=ParseDict(data, Value()))


def question_of(events: list[Any]) -> dict[str, Any]:
    status = events[-1].status_update.status
    assert status.state == TaskState.TASK_STATE_INPUT_REQUIRED
    [data] = [MessageToDict(part.data) for part in status.message.parts if part.HasField("data")]
    return dict(data)


def body_of(method: str, params: dict[str, Any], request_id: Any = "1") -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": request_id, "method": method, "params": params}


def message_of(text: str, **fields: Any) -> dict[str, Any]:
    parts = [{"kind": "text", "text": text}]
    return {"message": {"role": "user", "parts": parts, "messageId": str(uuid.uuid4()), **fields}}


async def post(server: A2aServer, body: Any, **headers: str) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60, verify=TLS) as http:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **headers}
        return await http.post(server.url, content=data, headers=given)


async def stream(server: A2aServer, body: dict[str, Any], **headers: str) -> list[dict[str, Any]]:
    """The results of a stream. Each event is checked: one line of data with the request's id, and a blank line.
    Comments keep a connection alive."""
    response = await post(server, body, Accept="text/event-stream", **headers)
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    *blocks, end = re.split(r"\r?\n\r?\n", response.text)
    events = [block for block in blocks if not block.startswith(":")]
    assert end == "" and all(re.fullmatch(r"data: [^\r\n]+", event) for event in events), response.text
    found = [json.loads(event.removeprefix("data: ")) for event in events]
    assert all(set(each) == {"id", "jsonrpc", "result"} for each in found)
    assert all(each["id"] == body["id"] and each["jsonrpc"] == "2.0" for each in found)
    return [each["result"] for each in found]


def join_chunks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events with the words of each artifact as one chunk. Where they are cut is nobody's business: a letter with
    which a random secret of the process begins waits for the next one."""
    joined: list[dict[str, Any]] = []
    for event in events:
        made, last = event.get("artifact"), joined[-1].get("artifact") if joined else None
        if made and last and made["artifactId"] == last["artifactId"] and made["parts"][0]["text"]:
            assert event["append"] and not joined[-1]["lastChunk"]
            text = last["parts"][0]["text"] + made["parts"][0]["text"]
            joined[-1] = {**joined[-1], "artifact": {**last, "parts": [{**last["parts"][0], "text": text}]}}
        else:
            joined.append(event)
    return joined


def texts_of(events: list[dict[str, Any]]) -> list[str]:
    """Return the texts that a user reads, in order; the pieces of an artifact are one text."""
    found = []
    for event in join_chunks(events):
        message = event.get("artifact") or event.get("status", {}).get("message") or {}
        found += [part["text"] for part in message.get("parts", []) if part.get("text")]
    return found


def without_ids(value: Any) -> Any:
    """A JSON value without the ids and times in it."""
    hidden = {"contextId", "taskId", "id", "messageId", "artifactId", "timestamp"}
    if isinstance(value, dict):
        return {key: "*" if key in hidden else without_ids(inner) for key, inner in value.items()}
    return [without_ids(inner) for inner in value] if isinstance(value, list) else value


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Make a certificate of our own for this machine, and its key."""
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    here = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    authority = x509.BasicConstraints(ca=True, path_length=0)
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(here, critical=False).add_extension(authority, critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    (folder / "c.pem").write_bytes(made.public_bytes(pem))
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "k.pem").write_bytes(private)
    return folder / "c.pem", folder / "k.pem"
