"""Tests of the shell tool with real processes: output, processes left running, and cost."""

import asyncio
import os
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest

from retinue.core.errors import ToolError
from retinue.core.limits import INLINE_BYTES
from retinue.core.ports import Outcome
from retinue.tools import command_process
from retinue.tools.command_process import PASSED_VARIABLES, OutputPipe
from retinue.tools.shell import Shell
from retinue.tools.truncate import HeadAndTail
from tests.gates import pass_time, until
from tests.tools.folders import RealFolders, make_folders, preview, use

MARK = "echo $$ > pids.tmp; mv pids.tmp pids"
STUBBORN = (
    "trap '' TERM; echo $$ > pids.tmp; (trap '' TERM; exec sleep 300) & echo $! >> pids.tmp; mv pids.tmp pids; wait"
)


@pytest.fixture
def folders(tmp_path: Path) -> RealFolders:
    return make_folders(tmp_path)


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


async def pids_in(folders: RealFolders) -> list[int]:
    """The processes a command wrote down, once it has."""
    path = folders.workspace / "pids"
    await until(path.exists)
    return [int(line) for line in path.read_text().split()]


async def test_it_runs_in_the_workspace_with_both_outputs_in_one(folders: RealFolders) -> None:
    outcome = await use(Shell(), folders, command="pwd; echo err >&2; echo out")
    assert outcome.text == f"{folders.workspace}\nerr\nout\n"
    assert outcome.success
    assert outcome.file == ""


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("echo no; exit 3", "no\n[exit code 3]"),
        ("printf no; exit 3", "no\n[exit code 3]"),
        ("false", "[exit code 1]"),
        ("kill -9 $$", "[exit code 137]"),
        ("read line", "[exit code 1]"),
        ("nonexistent-command 2>/dev/null", "[exit code 127]"),
    ],
)
async def test_a_failed_command_says_its_exit_code(folders: RealFolders, command: str, text: str) -> None:
    outcome = await use(Shell(), folders, command=command)
    assert outcome.text == text
    assert not outcome.success


async def test_its_environment_is_an_allowlist(folders: RealFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "PYTHONPATH", "BASH_ENV", "LD_PRELOAD_NOT"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("LC_TIME", "C")
    outcome = await use(Shell(), folders, command="env")
    names = {line.partition("=")[0] for line in outcome.text.splitlines()}
    assert "secret" not in outcome.text
    assert (
        {"PATH", "LC_TIME"}
        <= names
        <= PASSED_VARIABLES | {"RETINUE_RUN", "LC_TIME", "LC_ALL", "LC_CTYPE", "PWD", "SHLVL", "_"}
    )
    assert "RETINUE_RUN=/main/worker-1" in outcome.text


async def test_it_inherits_no_descriptor(folders: RealFolders) -> None:
    with (folders.workspace / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        outcome = await use(Shell(), folders, command="ls -l /proc/self/fd")
    assert "/open" not in outcome.text


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({}, "missing 'command'"),
        ({"command": ["ls"]}, "'command' must be a string"),
        ({"command": "  "}, "'command' is empty"),
        ({"command": "ls", "timeout": 0}, "'timeout' must be more than 0"),
        ({"command": "ls", "timeout": float("nan")}, "'timeout' must be more than 0"),
        ({"command": "ls", "timeout": "9"}, "'timeout' must be a number"),
        ({"command": "ls \0"}, "cannot start"),
        ({"command": "ls \ud800"}, "cannot start"),
        ({"command": "x" * 4_000_000}, "cannot start"),
    ],
)
async def test_it_names_the_argument_that_is_wrong(folders: RealFolders, args: dict[str, object], words: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ToolError, match=rf"^shell: {words}"):
        await use(Shell(), folders, **args)
    assert len(os.listdir("/proc/self/fd")) <= before


async def use_up_time(shell: Shell, folders: RealFolders, command: str) -> Outcome:
    """The outcome of a command with a timeout of 100 seconds, which are over when it has written `pids`."""
    using = asyncio.create_task(use(shell, folders, command=command, timeout=100))
    await pids_in(folders)
    await pass_time(100)
    return await using


async def test_a_timeout_ends_the_group_and_keeps_the_output(folders: RealFolders) -> None:
    command = f"echo so far; sleep 300 & {MARK}; sleep 300"
    outcome = await use_up_time(Shell(), folders, command)
    assert outcome.text == "so far\n[timed out after 100s]"
    assert not outcome.success


async def test_a_command_may_clean_up_after_sigterm(folders: RealFolders) -> None:
    command = f"trap 'echo bye; exit 0' TERM; {MARK}; sleep 300 & wait"
    outcome = await use_up_time(Shell(grace=100), folders, command)
    assert outcome.text == "bye\n[timed out after 100s]"


async def test_a_timeout_kills_what_ignores_sigterm(folders: RealFolders) -> None:
    outcome = await use_up_time(Shell(grace=0.2), folders, STUBBORN)
    assert outcome.text == "[timed out after 100s]"
    assert not [pid for pid in await pids_in(folders) if is_alive(pid)]


async def test_cancelling_ends_the_whole_group(folders: RealFolders) -> None:
    command = f"setsid sleep 300 >/dev/null 2>&1 & echo $! > escaped; {STUBBORN}"
    task = asyncio.create_task(use(Shell(grace=0.2), folders, command=command))
    pids = await pids_in(folders)
    assert all(map(is_alive, pids))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not [pid for pid in pids if is_alive(pid)]
    escaped = int((folders.workspace / "escaped").read_text())
    if is_alive(escaped):  # it left the group, and is this test's to end
        os.kill(escaped, 9)


async def test_cancelling_again_and_again_does_not_cut_the_ending_short(folders: RealFolders) -> None:
    task = asyncio.create_task(use(Shell(grace=0.3), folders, command=STUBBORN))
    pids = await pids_in(folders)
    while not task.done():
        task.cancel()
        await asyncio.sleep(0.02)
    assert task.cancelled()
    assert not [pid for pid in pids if is_alive(pid)]


async def test_a_cancel_while_a_timeout_is_ending_it_is_not_swallowed(folders: RealFolders) -> None:
    command = f"trap 'touch asked' TERM; {MARK}; while ! test -e go; do read -t 0.05 < <(exec sleep 1); done"
    task = asyncio.create_task(use_up_time(Shell(grace=200), folders, command))
    await until((folders.workspace / "asked").exists)
    task.cancel()
    (folders.workspace / "go").touch()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_loop_that_is_torn_down_leaves_nothing_running(folders: RealFolders) -> None:
    async def main() -> list[int]:
        task = asyncio.create_task(use(Shell(grace=30), folders, command=STUBBORN))
        pids = await pids_in(folders)
        task.cancel()
        await asyncio.sleep(0)  # it has begun to end the command, and gets no further
        return pids

    pids = asyncio.run(main())
    asyncio.run(until(lambda: not any(map(is_alive, pids))))


async def test_a_background_process_that_holds_the_pipe_does_not_hang_it(folders: RealFolders) -> None:
    outcome = await use(Shell(), folders, command="sleep 900 & echo $! > pids; echo done")  # a test has 300 s
    assert outcome.text == "done\n[ended what was left in the background]"
    assert outcome.success
    assert not [pid for pid in await pids_in(folders) if is_alive(pid)]


@pytest.mark.parametrize("is_held", [False, True])
async def test_a_busy_machine_is_not_taken_for_a_background_process(
    is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time for the end of the output is over before the loop has looked for it."""
    monkeypatch.setattr(command_process, "DRAIN_SECONDS", 0.0)
    reading, writing = os.pipe()
    os.write(writing, b"done\n")
    if not is_held:
        os.close(writing)
    shown: list[bytes] = []
    with closing(OutputPipe(reading, HeadAndTail(INLINE_BYTES), shown.append)) as pipe:
        assert await pipe.wait_for_end() is not is_held
    assert shown == [b"done\n"]
    if is_held:
        os.close(writing)


async def test_a_quiet_background_process_is_ended_too(folders: RealFolders) -> None:
    outcome = await use(Shell(), folders, command="sleep 300 >/dev/null 2>&1 & echo $! > pids; echo done")
    assert outcome.text == "done\n"
    assert not [pid for pid in await pids_in(folders) if is_alive(pid)]


async def test_a_background_flood_does_not_hang_it(folders: RealFolders) -> None:
    outcome = await asyncio.wait_for(use(Shell(), folders, command="yes & echo $! > pids"), 150)
    assert "[ended what was left in the background]" in outcome.text
    assert not [pid for pid in await pids_in(folders) if is_alive(pid)]


async def test_long_output_is_cut_with_the_whole_in_a_file(folders: RealFolders) -> None:
    outcome = await use(Shell(), folders, command="seq 1 100000; exit 1")
    assert len(outcome.text.encode()) <= INLINE_BYTES
    assert outcome.text.startswith("1\n2\n")
    assert outcome.text.endswith("\n99999\n100000\n[exit code 1]")
    assert f"bytes cut; whole text in {outcome.file} ...]" in outcome.text
    assert Path(outcome.file).read_text() == "".join(f"{number}\n" for number in range(1, 100_001))
    assert Path(outcome.file).stat().st_mode & 0o777 == 0o600


FLOOD = """
    import asyncio, resource, sys
    from pathlib import Path
    from retinue.tools.shell import Shell
    from tests.tools.folders import make_folders, use

    folders = make_folders(Path(sys.argv[1]))

    async def main():
        await use(Shell(), folders, command="echo warm")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcome = await use(Shell(), folders, command="head -c 100000000 /dev/zero | tr '\\\\0' x")
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(grown, len(outcome.text), Path(outcome.file).stat().st_size, "bytes cut; whole text in" in outcome.text)

    asyncio.run(main())
"""


def test_a_line_of_100_mb_leaves_memory_flat(tmp_path: Path) -> None:
    repo = Path(__file__).resolve().parents[2]
    env = {**os.environ, "PYTHONPATH": f"{repo / 'src'}:{repo}"}
    argv = [sys.executable, "-c", textwrap.dedent(FLOOD), str(tmp_path)]
    printed = subprocess.run(argv, env=env, check=True, capture_output=True, text=True, timeout=200).stdout
    grown_kib, inline, spilled, marked = printed.split()
    assert int(grown_kib) < 16 * 1024
    assert int(inline) <= INLINE_BYTES
    assert int(spilled) == 100_000_000
    assert marked == "True"


async def test_many_commands_leave_no_descriptor_and_no_child(folders: RealFolders) -> None:
    await use(Shell(), folders, command="true")
    before = len(os.listdir("/proc/self/fd"))
    outcomes = await asyncio.gather(*(use(Shell(), folders, command=f"echo {number}") for number in range(20)))
    assert [outcome.text for outcome in outcomes] == [f"{number}\n" for number in range(20)]
    assert len(os.listdir("/proc/self/fd")) <= before
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


async def test_without_pidfd_it_polls(folders: RealFolders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    assert (await use(Shell(), folders, command="echo polled; exit 2")).text == "polled\n[exit code 2]"
    assert (await use(Shell(), folders, command="sleep 300", timeout=0.1)).text == "[timed out after 0.1s]"


def test_the_preview_is_the_command(folders: RealFolders) -> None:
    assert preview(Shell(), folders, command="rm -rf build\nls") == "rm -rf build\nls"
    assert preview(Shell(), folders, command="ls\x1b[2K") == "ls\\x1b[2K"
    with pytest.raises(ToolError, match="missing 'command'"):
        preview(Shell(), folders)
