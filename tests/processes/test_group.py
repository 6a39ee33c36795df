"""A program and all it started: ended together, in time, also when we are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

import pytest

from retinue.processes.group import (
    Guard,
    ProcessGroup,
    exit_code,
    has_living_member,
    is_alive,
    run_program,
    start_group,
    wait_until,
)
from tests.gates import pass_time
from tests.gates import until as wait_for
from tests.surfaces.cli.shell import until

# A parent that ignores SIGTERM if told so, with a child that does the same; both say when they are ready.
STUBBORN = "trap '' TERM; sleep 300 & echo ready; wait; wait"
POLITE = "sleep 300 & echo ready; wait"


def started(script: str, *, guard: Guard | None = None) -> ProcessGroup:
    group = start_group(["/bin/sh", "-c", script], stdout=subprocess.PIPE, guard=guard)
    assert group.process.stdout is not None
    with group.process.stdout as stdout:
        assert stdout.readline() == b"ready\n"
    return group


async def test_a_polite_group_ends_at_sigterm() -> None:
    group = started(POLITE)
    await group.end(term=20)
    assert group.returncode == -signal.SIGTERM and group.is_gone() and not has_living_member(group.pid)


async def test_a_stubborn_group_is_killed_when_its_time_is_up() -> None:
    group = started(STUBBORN)
    await group.end(term=0.1)
    assert group.returncode == -signal.SIGKILL and not has_living_member(group.pid)


async def test_without_time_it_is_killed_at_once_and_a_second_end_does_nothing() -> None:
    group = started(POLITE)
    await group.end(term=0)
    assert group.returncode == -signal.SIGKILL
    await group.end()
    group.kill()


async def test_time_to_leave_lets_it_exit_by_itself_and_ends_what_it_leaves() -> None:
    group = started("sleep 300 & echo ready; exit 3")
    await group.end(leave=200, term=5)
    assert group.returncode == 3 and not has_living_member(group.pid)


async def test_waiting_for_the_exit_does_not_reap_and_has_an_end() -> None:
    group = started("echo ready; exit 5")
    assert await group.wait_for_exit(200)
    assert group.returncode is None and Path(f"/proc/{group.pid}").exists()
    await group.end()
    assert group.returncode == 5
    other = started(POLITE)
    assert not await other.wait_for_exit(0.01)
    await other.end(term=0)


async def test_a_cancelled_end_is_finished_and_a_second_cancel_hurries_it(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    group = started(f"trap 'touch \"{asked}\"' TERM; (trap '' TERM; echo ready; sleep 300) & wait; wait; wait")
    ending = asyncio.create_task(group.end(term=300))
    await wait_for(asked.exists)
    ending.cancel()
    await pass_time(0)
    assert not ending.done() and has_living_member(group.pid)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert not has_living_member(group.pid)


async def test_a_guard_ends_the_group_when_we_are_killed(tmp_path: Path) -> None:
    code = (
        "import os, signal, subprocess\n"
        "from retinue.processes.group import Guard, start_group\n"
        f"group = start_group(['/bin/sh', '-c', {POLITE!r}], stdout=subprocess.PIPE, guard=Guard(term=0.1))\n"
        "group.process.stdout.readline()\n"
        "print(group.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    died = await asyncio.to_thread(subprocess.run, [sys.executable, "-c", code], capture_output=True, check=False)
    assert died.returncode == -signal.SIGKILL
    assert await wait_until(lambda: not has_living_member(int(died.stdout)), 200)


async def test_a_guard_goes_with_the_group() -> None:
    before = children()
    group = started(POLITE, guard=Guard())
    assert len(children() - before) == 2
    await group.end()
    assert children() == before


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


def test_a_program_that_cannot_start_leaves_nothing() -> None:
    before = children()
    for argv in (["/nonexistent"], ["/bin/sh", "a\0b"]):
        with pytest.raises((OSError, ValueError)):
            start_group(argv, guard=Guard())
    assert children() == before


def test_a_program_is_run_to_its_end_or_killed_with_its_children(tmp_path: Path) -> None:
    done = run_program(["/bin/sh", "-c", "echo out; echo oops >&2; exit 4"], cwd=None, env={}, seconds=200)
    assert (done.returncode, done.stdout, done.stderr) == (4, b"out\n", b"oops\n")
    mark = f"RETINUE_TEST={tmp_path}".encode()
    env = {"PATH": os.defpath, "RETINUE_TEST": str(tmp_path)}
    begun = tmp_path / "begun"
    for seconds in (0.5, 5.0, 50.0):  # a slow machine needs longer to begin
        if not begun.exists():
            with pytest.raises(subprocess.TimeoutExpired):
                run_program(
                    ["/bin/sh", "-c", f"sleep 300 & echo > '{begun}'; wait"], cwd=None, env=env, seconds=seconds
                )
    assert begun.exists()
    until(lambda: not [pid for pid in Path("/proc").glob("[0-9]*") if mark in read_environment(pid)])


def read_environment(process: Path) -> list[bytes]:
    """The environment of a process that is alive and ours to look at."""
    try:
        return (process / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def test_input_is_written_and_an_error_there_ends_the_program_and_its_children(tmp_path: Path) -> None:
    done = run_program(["/bin/cat"], seconds=200, write_input=lambda pipe: pipe.write(b"x" * 100_000))
    assert (done.returncode, done.stdout) == (0, b"x" * 100_000)

    def fail(pipe: IO[bytes]) -> None:
        pipe.write(b"half")
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().endswith("\n"):
            pass
        raise ValueError("no more input")

    with pytest.raises(ValueError, match="no more input"):
        run_program(["/bin/sh", "-c", f"sleep 300 & echo $$ > '{tmp_path}/pid'; wait"], seconds=200, write_input=fail)
    until(lambda: not has_living_member(int((tmp_path / "pid").read_text())))


@pytest.mark.parametrize(("returncode", "code"), [(0, 0), (3, 3), (-9, 137), (-15, 143)])
def test_exit_codes_are_those_of_shells(returncode: int, code: int) -> None:
    assert exit_code(returncode) == code


def test_a_process_is_alive_until_it_is_reaped_and_no_process_has_a_huge_pid() -> None:
    group = started(POLITE)
    assert is_alive(group.pid) and is_alive(os.getpid()) and is_alive(1)
    group.signal(signal.SIGKILL)
    group.kill()
    assert not is_alive(group.pid)
    assert not is_alive(10**12)


def test_a_program_that_fails_before_it_has_read_its_input_says_why() -> None:
    much = b"x" * 10_000_000
    done = run_program(
        ["/bin/sh", "-c", "echo no space left >&2; exit 3"], seconds=200, write_input=lambda pipe: pipe.write(much)
    )
    assert (done.returncode, done.stderr) == (3, b"no space left\n")
    with pytest.raises(BrokenPipeError):
        run_program(["/bin/true"], seconds=200, write_input=lambda pipe: pipe.write(much))


def test_a_program_that_does_not_read_its_input_is_ended_in_time() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run_program(["/bin/sleep", "300"], seconds=0.5, write_input=lambda pipe: pipe.write(b"x" * 10_000_000))
