"""Tests of the network of a run: nothing, some hosts through its proxy, or everything; never more than its parent."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from retinue import Allow, Event, Profile
from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.approvals import Approval
from retinue.core.events import RunStarted, ToolResult, Warned
from retinue.core.ports import AttachedApprover
from retinue.core.profiles import RuntimeName, Task
from retinue.sandbox.builder import SandboxUnavailable
from retinue.sandbox.container import TUN, find_engine
from tests.sandbox.places import PLACES, Place, make_image, needs_bubblewrap, needs_containers
from tests.supervisor.tree.kit import bodies, call, main, spawn
from tests.tools.web.kit import Web


async def play(parts: Parts, profile: Profile) -> list[Any]:
    owner = make_supervisor(parts)
    try:
        return [event async for event in (await owner.spawn(profile, Task("go"))).events()]
    finally:
        await owner.close()


@pytest.mark.requirement("P32")
@pytest.mark.parametrize("place", PLACES)
async def test_hosts_that_are_allowed_are_reached_and_no_others(place: Place) -> None:
    told = await place.play("hosts")
    main_said, child_said = told["said"]
    assert main_said[:2] == child_said[1:2] * 2 == ["b'hello'\n"] * 2
    assert "403: evil.org:80 is not among the hosts" in main_said[2]
    refused = "[refused: evil.org:80 is not among the hosts that this run may reach. "
    assert main_said[2].endswith(f"{refused}This run may reach: a.com, b.com, near.com]")
    assert "near.com leads to 127.0.0.1, which is not a public address" in main_said[3]
    assert "Network is unreachable" in main_said[4] and main_said[5] == "1\n"  # its own namespace has loopback only
    assert all("is not among the hosts" in child_said[number] for number in (0, 2, 3))
    assert told["warned"][0][-1] == "network_refused near.com leads to 127.0.0.1, which is not a public address"
    assert [text.partition(":80")[0] for text in told["warned"][1]] == [
        f"network_refused {host}" for host in ("a.com", "evil.org", "near.com")
    ]
    assert told["sandbox"] == [[True, True]] * 2
    assert told["resolved"] == ["a.com", "b.com", "b.com", "near.com"]
    assert told["left"] == []


@needs_bubblewrap
async def test_the_socket_of_a_running_run_has_no_name_that_a_killed_process_could_leave(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    owner = make_supervisor(Parts(tmp_path, tmp_path / ".retinue", network=["a.com"], runtime="isolated", mode="yes"))
    run = owner.spawner.spawn_primary(
        main({"main": [call("shell", command="ls /retinue/proxy"), {"hang": True}]}), Task("go")
    )
    async for event in owner.watch(run.ref.tree):
        if isinstance(event, Event) and isinstance(event.body, ToolResult):
            assert event.body.text == "/retinue/proxy\n"
            break
    assert list(tmp_path.rglob("proxy")) == []
    await owner.cancel(run.ref.tree)
    await run.join()
    await owner.close()


def can_have_networks() -> bool:
    """Podman makes the network of an ordinary user's container with a device, which need not be open to them."""
    return not find_engine().is_podman or os.geteuid() == 0 or os.access(TUN, os.R_OK | os.W_OK)


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("isolated", marks=needs_bubblewrap), pytest.param("container", marks=needs_containers)],
)
async def test_the_full_network_is_the_host_s_and_said_plainly(tmp_path: Path, runtime: RuntimeName) -> None:
    """Below it, hosts and nothing can be had; and a child of a run that has hosts does not get more by asking."""
    if runtime == "container":
        make_image()
    tmp_path.chmod(0o755)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    look = call("shell", command=f"grep -c : /proc/net/dev; exec 3<>/dev/tcp/127.0.0.1/{port} && echo reached")
    profiles = [Profile("some", network=["a.com"]), Profile("none", network="none"), Profile("more", network="full")]
    tasks = [{"task": "x", "subagent_type": name} for name in ("some", "none", "more")]
    agents = {
        "main": [look, spawn(*tasks), {"text": "x"}],
        "some": [look, spawn({"task": "x", "subagent_type": "more"}), {"text": "x"}],
        "none": [look, {"text": "x"}],
        "more": [look, {"text": "x"}],
    }
    parts = Parts(tmp_path, network="full", runtime=runtime, mode="yes", profiles=profiles)
    async with server:
        if runtime == "container" and not can_have_networks():
            with pytest.raises(SandboxUnavailable, match=f"^podman cannot give containers the full network: .* {TUN}"):
                await play(parts, main(agents, workspace="shared"))
            return
        events = await play(parts, main(agents, workspace="shared"))
    words = {event.path: event.body.sandbox for event in events if isinstance(event.body, RunStarted)}
    reach = {
        path: [word for word in ("net", "proxy", "full_network") if word in parts] for path, parts in words.items()
    }
    [deepest] = [path for path in reach if path.count("/") == 3]
    assert reach == {
        "/main": ["full_network"],
        "/main/some-1": ["net", "proxy"],
        "/main/none-2": ["net"],
        "/main/more-3": ["full_network"],
        deepest: ["net", "proxy"],
    }
    said = {
        event.path: event.body.text
        for event in events
        if isinstance(event.body, ToolResult) and "shell" in event.body.name
    }
    assert {path for path, text in said.items() if not text.startswith("1\n")} == {"/main", "/main/more-3"}
    reached = {"/main", "/main/more-3"} if runtime == "isolated" else set()  # an engine's network is not the host's own
    assert {path for path, text in said.items() if text.endswith("reached\n")} == reached


@needs_bubblewrap
async def test_in_mode_sandboxed_a_run_with_the_full_network_is_asked_about(tmp_path: Path) -> None:
    asked: list[str] = []

    async def person(question: Approval) -> Allow:
        asked.append(question.tool)
        return Allow()

    agents = {"main": [call("shell", command="echo x"), {"text": "x"}]}
    for network, questions in (("none", []), ("full", ["shell"])):
        asked.clear()
        parts = Parts(
            tmp_path, network=network, runtime="isolated", mode="sandboxed", approver=AttachedApprover(person)
        )
        await play(parts, main(agents, workspace="scratch"))
        assert asked == questions


@pytest.mark.parametrize(
    ("network", "fields", "warned"),
    [
        (None, {}, False),
        (["a.com"], {}, True),
        ("none", {}, True),
        ("full", {}, False),
        ("full", {"network": "none"}, True),
        (None, {"network": ["a.com"]}, True),
        (["a.com"], {"tools": ["read"]}, False),
    ],
)
async def test_without_a_sandbox_the_setting_cannot_hold_and_that_is_said(
    tmp_path: Path, network: Any, fields: dict[str, Any], warned: bool
) -> None:
    async with Web({}) as web:
        events = await play(Parts(tmp_path, network=network, dialer=web), main({"main": ["x"]}, **fields))
    told = [body for body in bodies(events, Warned) if body.code == "network"]
    assert [("has no sandbox" in body.text) for body in told] == [True] * warned
