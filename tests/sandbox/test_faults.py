"""A sandbox that is killed, stopped or lies at any frame: the run goes on or fails, and nothing is done twice."""

from __future__ import annotations

import asyncio
import copy
import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import pytest

from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.approvals import Allow, Approval
from retinue.core.events import UNKNOWN_AFTER_CRASH, Delta, Event, RunEnded, ToolCall, ToolResult
from retinue.core.ports import AttachedApprover
from retinue.core.profiles import Profile, Task
from retinue.protocol import tool_server
from retinue.protocol.frames import ProtocolError
from retinue.sandbox import tool_server_session
from retinue.sandbox.bubblewrap import probe_bubblewrap
from retinue.sandbox.builder import SandboxBuilder
from retinue.sandbox.channel import FrameChannel
from retinue.sandbox.process import Process
from retinue.sandbox.tool_server_session import ToolServerSandbox
from retinue.testing import scripted
from tests.gates import pass_time, until
from tests.sandbox.places import needs_bubblewrap
from tests.sandbox.test_hostile import SERVES, NoProtection
from tests.supervisor.tree.kit import bodies, call
from tests.tools.code_mode.kit import NAME, report, served

Fault = Literal["killed", "stopped", "lies", "cancelled"]
FRAMES = 34  # of the script below, both ways, when nothing goes wrong
SAMPLE = 4
SEED = 20261116
LIES: list[tool_server.FromServer] = [
    tool_server.ResultFrame(999, "x"),
    tool_server.Previewed(999, "x"),
    tool_server.Accepted(999),
    tool_server.Output(999, "x"),
    tool_server.CallTool(999, 1, "x", {}),
    tool_server.Hello(1),
]
PROGRAM = "from tools import weather\nprint(await weather.report('Rome'), file=open('log', 'a'))"
SLEEPS = "sleep 1000"  # ends at its deadline, which comes once the tool server has accepted the call
SCRIPT: list[Any] = [
    call("write", path="made", content="x\n"),
    call("read", path="made"),
    {"tools": [
        {"name": "shell", "args": {"command": "echo first >> log", "timeout": 60}},
        {"name": "glob", "args": {"pattern": "*"}},
        {"name": "read", "args": {"path": "made"}},
    ]},
    call(NAME, code=PROGRAM, executionTimeout=60),
    call("shell", command="echo last >> log", timeout=60),
    call("shell", command="cat log", timeout=60),
    call("shell", command=SLEEPS, timeout=60),
    {"text": "over"},
]  # fmt: skip


def read_state(pid: int) -> str:
    """The state of a process as `ps` shows it; `X` if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def find_processes(folder: Path) -> list[int]:
    """Return the processes that work in a folder or below it."""
    found = []
    for place in Path("/proc").glob("[0-9]*/cwd"):
        with suppress(OSError):
            if f"{place.readlink()}/".startswith(f"{folder}/"):
                found.append(int(place.parent.name))
    return found


@pytest.fixture(autouse=True)
def commands_end(tmp_path: Path) -> Iterator[None]:
    """End the commands of tool servers that were killed without a sandbox around them: nobody else can know them."""
    yield
    while found := find_processes(tmp_path):
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class FaultyChannel:
    """All frames of one run, counted. The fault happens before the frame with this number is passed on."""

    def __init__(self, fault: Fault | None = None, at: int = 0, lie: tool_server.FromServer | None = None) -> None:
        self.fault, self.at, self.lie = fault, at, lie
        self.count = 0
        self.processes: list[CountedProcess] = []
        self.pids: list[int] = []
        self.cancel_run: Callable[[], object]
        self._hurrying: list[asyncio.Task[None]] = []
        self._sleeping = -1

    def note_call(self, frame: tool_server.Frame) -> None:
        if isinstance(frame, tool_server.CallFrame) and frame.args.get("command") == SLEEPS:
            self._sleeping = frame.id

    def note_answer(self, frame: tool_server.Frame) -> None:
        """Let the deadline of the sleeping command come, now that it runs, unless the run is cancelled."""
        is_cancelled = self.fault == "cancelled" and self.count >= self.at
        if isinstance(frame, tool_server.Accepted) and frame.id == self._sleeping and not is_cancelled:
            self._hurrying.append(asyncio.create_task(pass_time(60.0)))

    def pass_frame(self, deliver: Callable[[Any], None]) -> None:
        self.count += 1
        if self.count != self.at or self.fault is None:
            return
        if self.fault == "lies":
            deliver(self.lie)
            return
        if self.fault == "cancelled":
            self.cancel_run()
            return
        pid = self.processes[-1].find_tool_server()
        self.pids.append(pid)
        if self.fault == "killed":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            self._hurrying.append(asyncio.create_task(self._hurry(pid)))

    async def _hurry(self, pid: int) -> None:
        """Let the time pass at once in which the host waits for one who has stopped, and no longer."""
        process = self.processes[-1]
        await until(lambda: read_state(pid) in "TZX")
        while not process.is_killed and read_state(pid) == "T":
            await pass_time(1.0)
            await asyncio.sleep(0.001)  # what really happens, such as a commit, goes on meanwhile


class CountedProcess(Process):
    """A process that its channel knows."""

    channel: FaultyChannel
    is_killed = False

    def _kill(self) -> None:
        self.is_killed = True
        super()._kill()

    def start(self) -> None:
        super().start()
        self.channel.processes.append(self)
        self.channel.pids.append(self._group.pid)

    def find_tool_server(self) -> int:
        """Its pid: in a real sandbox the first child of the first process inside."""
        return next(self._list_processes(), self._group.pid)


async def play(
    channel: FaultyChannel, monkeypatch: pytest.MonkeyPatch, folder: Path, builder: SandboxBuilder | None = None
) -> tuple[list[Event], str]:
    """Play the script in a sandbox with this channel; its events, and what stands in its log file."""

    class CountedChannel(FrameChannel):
        def __init__(self, *args: Any, on_frame: Callable[[Any], None], **options: Any) -> None:
            self._deliver = on_frame
            super().__init__(*args, on_frame=self._take, **options)

        def _take(self, frame: Any) -> None:
            if not isinstance(frame, tool_server.Output):
                channel.pass_frame(self._deliver)
            if not self.closed:
                self._deliver(frame)
                channel.note_answer(frame)

        def send(self, frame: tool_server.Frame) -> None:
            try:
                channel.pass_frame(self._deliver)
            except ProtocolError as error:
                self._end(error)
            channel.note_call(frame)
            super().send(frame)

    class ThisProcess(CountedProcess):
        pass

    async def allow(question: Approval) -> Allow:
        return Allow()

    monkeypatch.setattr(tool_server_session, "FrameChannel", CountedChannel)
    monkeypatch.setattr(tool_server_session, "FILE_SECONDS", 60.0)
    ThisProcess.channel = channel
    builder = copy.copy(builder or NoProtection(SERVES))
    builder.process = ThisProcess
    owner = make_supervisor(Parts(folder, folder / ".retinue", mode="ask", approver=AttachedApprover(allow)))
    monkeypatch.setattr("retinue.build.sandboxes._make_sandbox", lambda *_: ToolServerSandbox(builder))
    tools = ["write", "read", "shell", "glob", NAME, served(report)]
    profile = Profile("main", model=scripted({"main": SCRIPT}), runtime="isolated", workspace="scratch", tools=tools)
    run = owner.spawner.spawn_primary(profile, Task("go"))
    channel.cancel_run = lambda: run.stop("cancelled")
    events = [event async for event in owner.watch(run.ref.tree) if not isinstance(event, Delta)]
    log = Path(run.folders.path, "log")
    written = log.read_text() if log.exists() else ""
    await owner.close()
    return events, written


def check(fault: Fault, starts: int, events: list[Event], written: str) -> None:
    [ended] = bodies(events, RunEnded)
    calls, results = bodies(events, ToolCall), bodies(events, ToolResult)
    counted = Counter(body.call_id for body in results)
    assert set(counted.values()) <= {1}
    if fault == "lies":
        assert (ended.status, starts) == ("failed", 1)
        assert "the tool server broke the protocol" in (ended.error_details or "")
        return
    if fault == "cancelled":
        assert (ended.status, starts) == ("cancelled", 1)
        assert max(Counter(written.splitlines()).values(), default=0) <= 1
        return
    assert (ended.status, ended.final_response) == ("done", "over")
    assert set(counted) == {body.call_id for body in calls}
    assert starts <= 2
    by_id = {body.call_id: body for body in results}
    for call_id, line in (("call_3_1", "first"), ("call_4_1", "fine in Rome"), ("call_5_1", "last")):
        times = written.splitlines().count(line)
        assert times == 1 if by_id[call_id].success else times <= 1, (call_id, written)
    for name in ("call_1_1", "call_3_1", "call_4_1", "call_5_1"):
        assert by_id[name].success or by_id[name].outcome == UNKNOWN_AFTER_CRASH or "not run" in by_id[name].text
    sleeping = by_id["call_7_1"]
    assert not sleeping.success
    assert "timed out after 60s" in sleeping.text or sleeping.outcome == UNKNOWN_AFTER_CRASH
    for name in ("call_2_1", "call_3_2", "call_3_3"):  # these may run twice, so nobody is left in doubt
        assert by_id[name].success or (not by_id["call_1_1"].success and "No such file" in by_id[name].text)


async def test_the_script_has_so_many_frames_and_leaves_its_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    channel = FaultyChannel()
    events, written = await play(channel, monkeypatch, tmp_path)
    assert (channel.count, len(channel.processes)) == (FRAMES, 1)
    assert sorted(written.splitlines()) == ["fine in Rome", "first", "last"]
    assert bodies(events, RunEnded)[0].status == "done"


def _moments() -> list[Any]:
    """Every frame with every fault and every lie: a few of them always, all in `make soak`."""
    chance = random.Random(SEED)
    kinds: list[tuple[Fault, tool_server.FromServer | None, int]] = [
        ("killed", None, SAMPLE),
        ("stopped", None, SAMPLE),
    ]
    kinds += [("lies", lie, 1) for lie in LIES]
    kinds += [("cancelled", None, SAMPLE)]
    moments = []
    for fault, lie, size in kinds:
        sample = set(chance.sample(range(1, FRAMES + 1), size))
        name = fault if lie is None else f"{fault}-{type(lie).__name__}"
        for at in range(1, FRAMES + 1):
            marks = [] if at in sample else [pytest.mark.soak]
            moments.append(pytest.param(fault, lie, at, marks=marks, id=f"{name}-{at}"))
    return moments


async def play_fault(channel: FaultyChannel, *options: Any) -> None:
    assert channel.fault is not None
    events, written = await play(channel, *options)
    check(channel.fault, len(channel.processes), events, written)
    assert channel.count >= channel.at
    for pid in channel.pids:
        assert not Path("/proc", str(pid)).exists()


@pytest.mark.parametrize(("fault", "lie", "at"), _moments())
async def test_a_fault_at_any_frame_costs_the_calls_in_flight_at_most(
    fault: Fault, lie: tool_server.FromServer | None, at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    await play_fault(FaultyChannel(fault, at, lie), monkeypatch, tmp_path)


def _moments_of_a_real_sandbox() -> list[Any]:
    """Every frame with every fault: the middle one always, all in `make soak`. A lie of each kind is tried above."""
    faults: list[Fault] = ["killed", "stopped", "cancelled", "lies"]
    return [
        pytest.param(fault, at, marks=[] if at == FRAMES // 2 else [pytest.mark.soak], id=f"{fault}-{at}")
        for fault in faults
        for at in range(1, FRAMES + 1)
    ]


@needs_bubblewrap
@pytest.mark.parametrize(("fault", "at"), _moments_of_a_real_sandbox())
async def test_a_fault_of_a_real_sandbox_costs_the_calls_in_flight_at_most(
    fault: Fault, at: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    channel = FaultyChannel(fault, at, LIES[0] if fault == "lies" else None)
    await play_fault(channel, monkeypatch, tmp_path, probe_bubblewrap())
    if fault in ("killed", "stopped") and at == FRAMES // 2:  # the tool server itself, not the program that started it
        assert channel.pids[1] != channel.pids[0]
