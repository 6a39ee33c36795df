"""Scenes of runs in a process of their own that crash or exhaust the machine: facts, as in `scenes`."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from retinue import Event, Profile, Result
from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.events import Delta, RunEnded, RunStarted, ToolCall, ToolResult, Warned
from retinue.core.limits import ResourceLimits
from retinue.core.ports import Clock
from retinue.core.profiles import Task
from retinue.sandbox import builder, cgroups, container_image, process, tool_server_session
from retinue.sandbox.container import MAKER_LABEL, find_engine, name_maker
from retinue.supervisor.supervisor import Supervisor
from retinue.surfaces.cli.doctor import try_all
from retinue.testing import scripted
from tests.gates import HeldClock, until
from tests.sandbox.scenes import Facts, project
from tests.supervisor.tree.kit import call, main
from tests.tools.web.kit import Web
from tests.tools.web.kit import answer as web_answer

CRASH_SCENES: dict[str, Callable[[str], Awaitable[Facts]]] = {}
MIB = 1024**2


def crash_scene(play: Callable[[str], Awaitable[Facts]]) -> Callable[[str], Awaitable[Facts]]:
    CRASH_SCENES[play.__name__] = play
    return play


async def play(
    runtime: str,
    replies: list[Any],
    *,
    resource_limits: ResourceLimits | None = None,
    when: type[Any] | None = None,
    then: Callable[[Supervisor, str], Awaitable[Any]] | None = None,
    clock: Clock | None = None,
) -> Facts:
    """One run in a scratch workspace; `then` happens at its first event of the kind `when`."""
    assert runtime != "inherited", "these are for runs in a sandbox only: they take what they can get"
    folder = project()
    parts = Parts(
        folder, folder / ".retinue", mode="yes", runtime=runtime, resource_limits=resource_limits or ResourceLimits()
    )  # type: ignore[arg-type]
    owner = make_supervisor(parts)
    profile = Profile("main", "You are main.", model=scripted({"main": replies}, clock=clock), workspace="scratch")
    run = owner.spawner.spawn_primary(profile, Task("go"))
    events: list[Event] = []
    async for event in owner.watch(run.ref.tree):
        if isinstance(event, Delta):
            continue
        events.append(event)
        if when is not None and then is not None and isinstance(event.body, when):
            await then(owner, run.ref.tree)
            when = None
    await run.join()
    result = run.result()
    await owner.close()
    shutil.rmtree(folder)
    return told(result, events) | {"left": await left(runtime)}


def told(result: Result[Any], events: list[Event]) -> Facts:
    return {
        "status": result.status,
        "error": result.error_details or "",
        "partial": result.partial,
        "tokens": result.usage.total_tokens,
        "endings": sum(isinstance(event.body, RunEnded) for event in events),
        "last": events[-1].kind,
        "results": [event.body.text for event in events if isinstance(event.body, ToolResult)],
        "outcomes": [event.body.outcome for event in events if isinstance(event.body, ToolResult)],
        "stood": [bool(event.body.sandbox) for event in events if isinstance(event.body, ToolResult)],
    }


async def left(runtime: str) -> list[str]:
    """List the remains of the runs of this process: living processes, control groups, containers and their mounts. A
    container engine needs up to 10 s to clean up after its client."""
    deadline = time.monotonic() + (100 if runtime == "container" else 0)
    while (found := remains()) and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    return found + (containers() if runtime == "container" else [])


def remains() -> list[str]:
    """Living processes and control groups of any run of this process."""
    processes = [line for pid in everybody() if (line := cmdline(pid))]
    parents = cgroups.find_parent_groups() or []
    return processes + [path.name for folder in parents for path in folder.glob(f"retinue-{os.getpid()}-*")]


def containers() -> list[str]:
    """List the containers of this process that the engine knows."""
    said = find_engine().call("ps", "--all", "--quiet", "--filter", f"label={MAKER_LABEL}={name_maker()}")
    return said.stdout.split()


def everybody() -> Iterator[int]:
    """Every process below this one; of a container also its monitor, which belongs to nobody."""
    yield from below(os.getpid())
    for path in Path("/proc").glob("[0-9]*"):
        line = cmdline(int(path.name))
        if f" -n retinue-{os.getpid()}-" in line and "conmon" in line:
            yield int(path.name)
            yield from below(int(path.name))


def below(pid: int) -> Iterator[int]:
    for listed in Path("/proc", str(pid), "task").glob("*/children"):
        with suppress(OSError):  # it is gone by now
            for child in map(int, listed.read_text().split()):
                yield child
                yield from below(child)


def cmdline(pid: int) -> str:
    """Return the command line of a living process; empty for a dead one."""
    try:
        return Path("/proc", str(pid), "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


async def kill_tool_server(owner: Supervisor, tree: str) -> None:
    """Kill the last process that looks like a tool server, if any. In a container the first process looks like one
    too."""
    os.kill((await until(tool_servers))[-1], signal.SIGKILL)


def tool_servers() -> list[int]:
    lines = {pid: cmdline(pid) for pid in everybody()}
    servers = [pid for pid, line in lines.items() if " -c import sys; sys.modules" in line]
    return [pid for pid in servers if Path(lines[pid].split()[0]).name.startswith("python")]


async def kill_in_command(owner: Supervisor, tree: str) -> None:
    """Kill the tool server when the command of its call is at work."""
    workspace = Path(owner.trees[tree].runs[0].folders.path)
    await until((workspace / "on").exists)
    await kill_tool_server(owner, tree)


WORDS = {"text": "so far", "usage": {"input_tokens": 5, "output_tokens": 2}}
SLEEPS = call("shell", command="touch on; sleep 60")
AFTERWARDS = call("shell", command="ls; touch again")


@crash_scene
async def killed_between_calls(runtime: str) -> Facts:
    clock = HeldClock()

    async def kill(owner: Supervisor, tree: str) -> None:
        await kill_tool_server(owner, tree)
        clock.release()  # the next call comes before its host can have noticed

    replies = [WORDS | call("shell", command="touch on"), AFTERWARDS | {"delay": 1.0}, {"text": "over"}]
    return await play(runtime, replies, when=ToolResult, then=kill, clock=clock)


@crash_scene
async def killed_in_a_tool(runtime: str) -> Facts:
    return await play(runtime, [WORDS | SLEEPS, AFTERWARDS, {"text": "over"}], when=ToolCall, then=kill_in_command)


@crash_scene
async def stubborn_tool(runtime: str) -> Facts:
    """It does not hear SIGTERM, and has left the group, the session and its parent."""

    async def cancel(owner: Supervisor, tree: str) -> None:
        workspace = Path(owner.trees[tree].runs[0].folders.path)
        await until((workspace / "on").exists)
        assert await owner.cancel(tree)

    command = "trap '' TERM; (setsid sh -c \"trap '' TERM; sleep 77\" &) ; touch on; sleep 78"
    return await play(runtime, [call("shell", command=command)], when=ToolCall, then=cancel)


@crash_scene
async def fill_when_cancelled(runtime: str) -> Facts:
    """The run stops its tool server, so that the cancel gets no answer, and then writes more than its limit. Only the
    check of file sizes can end the host's wait."""

    async def cancel(owner: Supervisor, tree: str) -> None:
        run = owner.trees[tree].runs[0]
        workspace = Path(run.folders.path)
        await until((workspace / "on").exists)
        assert await owner.cancel(tree)
        (workspace / "cancelled").touch()
        await run.join()

    fill = "for i in $(seq 8); do head -c 1000000 /dev/zero > f$i; done"
    command = f"kill -STOP $PPID; touch on; until [ -e cancelled ]; do sleep 0.05; done; {fill}; sleep 1000"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool_server_session, "LOOK_SECONDS", 0.05)
        patch.setattr(tool_server_session.ToolServerSandbox, "grace", 1000.0)
        patch.setattr(process, "CANCEL_ASK_SECONDS", 1000.0)
        replies = [call("shell", command=command)]
        limits = ResourceLimits(workspace_bytes=3 * MIB)
        return await play(runtime, replies, resource_limits=limits, when=ToolCall, then=cancel)


@crash_scene
async def daemons(runtime: str) -> Facts:
    """A command leaves processes behind that nobody would find."""
    command = (
        "setsid nohup sh -c 'sleep 79 & sleep 80 & wait' >/dev/null 2>&1 & (setsid sleep 81 >/dev/null 2>&1 &); echo on"
    )
    return await play(runtime, [call("shell", command=command), {"text": "done"}])


@crash_scene
async def memory_bomb(runtime: str) -> Facts:
    command = "python3 -c 'x = bytearray(10**9); x[::4096] = b\"x\" * len(x[::4096]); print(len(x))'"
    return await play(
        runtime, [call("shell", command=command), {"text": "lived"}], resource_limits=ResourceLimits(memory=600 * MIB)
    )


@crash_scene
async def fork_bomb(runtime: str) -> Facts:
    command = "f() { sleep 3 & f; }; for i in 1 2 3 4 5 6 7 8; do f & done; wait; echo over"
    most = 0

    async def count(owner: Supervisor, tree: str) -> None:
        nonlocal most
        for _ in range(100):
            most = max(most, len(list(everybody())))
            await asyncio.sleep(0.01)

    replies = [call("shell", command=command, timeout=2), {"text": "lived"}]
    facts = await play(runtime, replies, resource_limits=ResourceLimits(processes=60), when=ToolCall, then=count)
    return facts | {"most": most}


@crash_scene
async def disk_fill(runtime: str) -> Facts:
    command = "for i in $(seq 8); do head -c 1000000 /dev/zero > f$i; done; sleep 60"
    return await play(
        runtime, [call("shell", command=command)], resource_limits=ResourceLimits(workspace_bytes=3 * MIB)
    )


@crash_scene
async def large_file(runtime: str) -> Facts:
    command = "head -c 9000000 /dev/zero > big; ls -l big | cut -d' ' -f5"
    return await play(
        runtime, [call("shell", command=command), {"text": "x"}], resource_limits=ResourceLimits(file_bytes=2 * MIB)
    )


@crash_scene
async def large_calls(runtime: str) -> Facts:
    replies = [
        call("write", path="big", content="x" * 1_000_000),
        call("shell", command="wc -c big"),
        call("write", path="bigger", content="x" * 3_000_000),
        {"text": "done"},
    ]
    return await play(runtime, replies)


@crash_scene
async def environment(runtime: str) -> Facts:
    os.environ["PLANTED_KEY"] = "secret"
    try:
        return await play(runtime, [call("shell", command="env | grep -v ^LC_"), {"text": "x"}])
    finally:
        del os.environ["PLANTED_KEY"]


@crash_scene
async def hosts(runtime: str) -> Facts:
    """Play a parent with a list of allowed hosts, and a child with a shorter list."""
    python = container_image.PYTHON if runtime == "container" else builder.find_python()
    ask = "{} -I -S -c 'import urllib.request as u; print(u.urlopen(\"http://{}/\").read())'"
    get = [call("shell", command=ask.format(python, host)) for host in ("a.com", "b.com", "evil.org", "near.com")]
    raw = 'import socket as s; s.create_connection(("93.184.216.34", 80), 2)'
    alone = [call("shell", command=f"{python} -I -S -c '{raw}'"), call("shell", command="grep -c : /proc/net/dev")]
    child = Profile("child", network=["b.com", "evil.org"])
    agents = {"main": [*get, *alone, call("subagent_child", task="x"), {"text": "x"}], "child": [*get, {"text": "y"}]}
    folder = project()
    async with Web({"/": web_answer(b"hello")}, near_com=["127.0.0.1"]) as web:
        reach = {"network": ["a.com", "b.com", "near.com"], "dialer": web, "profiles": [child]}
        owner = make_supervisor(Parts(folder, folder / ".retinue", mode="yes", runtime=runtime, **reach))  # type: ignore[arg-type]
        run = owner.spawner.spawn_primary(main(agents, workspace="scratch"), Task("go"))
        events = [event async for event in owner.watch(run.ref.tree) if not isinstance(event, Delta)]
        await run.join()
        sockets = [str(path) for path in folder.rglob("proxy")]
        await owner.close()
    shutil.rmtree(folder)
    said: list[list[str]] = [[], []]
    warned: list[list[str]] = [[], []]
    for event in events:
        if isinstance(event.body, ToolResult) and event.body.name == "shell":
            said[event.run].append(event.body.text)
        elif isinstance(event.body, Warned):
            warned[event.run].append(f"{event.body.code} {event.body.text}")
    started = [event.body.sandbox for event in events if isinstance(event.body, RunStarted)]
    return {
        "said": said,
        "warned": warned,
        "sandbox": [["net" in sandbox, "proxy" in sandbox] for sandbox in started],
        "resolved": sorted(web.resolved),
        "left": await left(runtime) + sockets,
    }


@crash_scene
async def escapes(runtime: str) -> Facts:
    escaped = await try_all(runtime)  # type: ignore[arg-type]
    return {"escaped": escaped, "left": await left(runtime)}
