"""Tests of the end of a code mode program: no process or descriptor stays, and its output is kept."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from retinue.core.events import ToolResult
from retinue.core.limits import INLINE_BYTES
from retinue.tools.code_program import ProgramChannel, ToolError
from tests.gates import pass_time, until
from tests.supervisor.tree.kit import bodies
from tests.tools.code_mode.kit import run

STUBBORN = """
import os, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
deaf = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", deaf])
open("pids.tmp", "w").write(f"{os.getpid()} {child.pid}")
os.rename("pids.tmp", "pids")
print("so far", flush=True)
open("ready", "w").close()
signal.pause()
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


async def test_a_timeout_ends_all_of_it_and_keeps_its_output(tmp_path: Path) -> None:
    running = asyncio.create_task(run(STUBBORN, timeout=100, tools=[], path=tmp_path / ".retinue"))
    await until((tmp_path / "ready").exists)
    await pass_time(100)
    given, _, _ = await running
    assert given == "so far\n[timed out after 100s]"
    pids = (tmp_path / "pids").read_text().split()
    assert not [pid for pid in map(int, pids) if is_alive(pid)]


async def test_what_it_leaves_behind_is_ended() -> None:
    code = "import os, signal\nif os.fork() == 0:\n    signal.pause()\nprint('parent is done')"
    given, _, _ = await run(code)
    assert given == "parent is done\n[ended what was left in the background]"


async def test_a_call_that_cannot_be_sent_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    theirs.shutdown(socket.SHUT_RD)  # the other side still writes, so only the sending fails
    channel = ProgramChannel(ours.detach())
    with theirs:
        for _ in range(2):
            with pytest.raises(ToolError, match="the channel to the tools is closed: "):
                await channel.call("mcp__weather__report", {})
        assert channel._waiting == {}
    assert channel._reader is not None
    await asyncio.to_thread(channel._reader.join)
    channel._socket.close()


async def test_a_fork_cannot_use_the_channel() -> None:
    code = """
import os
from tools import ToolError, weather
pid = os.fork()
try:
    print("parent" if pid else "child", await weather.report("Rome"))
except ToolError as error:
    print(error)
if pid:
    os.waitpid(pid, 0)
else:
    os._exit(0)  # without taking the parent's event loop apart
"""
    given, _, _ = await run(code)
    assert sorted(given.splitlines()) == [
        "parent fine in Rome",
        "tools can be called from the program's first process only",
    ]


async def test_a_flood_is_cut_with_the_whole_in_a_file(tmp_path: Path) -> None:
    given, _, events = await run("for n in range(100_000): print(n)", path=tmp_path / ".retinue")
    [result] = bodies(events, ToolResult)
    assert len(given) <= INLINE_BYTES
    assert "bytes cut; whole text in" in given
    assert Path(result.file).read_text() == "".join(f"{n}\n" for n in range(100_000))


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (
            r"b'\xff\xff\xff\xffgarbage'",
            "a frame of 4294967295 bytes is larger than 4194304]",
        ),
        (
            r"b'\0\0\0\x04abcd'",
            "a frame that cannot be read: JSON is malformed",
        ),
        (
            r"b'\0\0\0\x02{}'",
            "a frame that cannot be read: Object missing required field `id`",
        ),
        (r"b'\0\0\x20\0' + b'[' * 8192", ""),
    ],
)
async def test_a_program_that_garbles_its_channel_is_ended(written: str, words: str) -> None:
    code = f"""
import os, signal
print("before")
[channel] = [fd for fd in range(3, 256) if os.path.exists(f"/proc/self/fd/{{fd}}")]
os.write(channel, {written})
signal.pause()
"""
    given, result, _ = await run(code)
    assert given.startswith(f"before\n[ended: it broke the channel to its tools: {words}")
    assert result.status == "done"


async def test_a_program_that_closes_its_channel_can_call_nothing() -> None:
    code = """
import os
from tools import weather
for fd in os.listdir("/proc/self/fd"):
    if int(fd) > 2:
        try:
            os.close(int(fd))
        except OSError:
            pass
try:
    await weather.report("Rome")
except Exception as error:
    print(type(error).__name__)
"""
    given, result, _ = await run(code)
    assert given.splitlines()[-1] in ("ToolError", "OSError") or "[exit code" in given
    assert result.status == "done"
