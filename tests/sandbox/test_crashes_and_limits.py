"""Tests of a sandbox that dies, hangs, or uses as many resources as it can get."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from retinue.core.events import LOST_SANDBOX_TEXT, UNKNOWN_AFTER_CRASH
from retinue.core.limits import ResourceLimits
from retinue.processes.group import has_living_member
from retinue.sandbox import bubblewrap, cgroups
from retinue.sandbox.box import Box
from tests.gates import until
from tests.sandbox.crash_scenes import cmdline
from tests.sandbox.places import PLACES, Place, make_image, needs_bubblewrap, needs_containers

places = pytest.mark.parametrize("place", PLACES)


@places
async def test_a_sandbox_that_is_killed_between_two_calls_costs_nothing(place: Place) -> None:
    told = await place.play("killed_between_calls")
    assert (told["status"], told["endings"], told["tokens"], told["left"]) == ("done", 1, 7, [])
    assert (told["results"], told["outcomes"]) == (["", "on\n"], ["", ""])
    assert told["stood"] == [True, True]  # the first call of each start says what stood around it


@places
async def test_a_sandbox_that_is_killed_costs_the_call_in_flight_and_starts_again(place: Place) -> None:
    told = await place.play("killed_in_a_tool")
    assert (told["status"], told["endings"], told["tokens"], told["left"]) == ("done", 1, 7, [])
    assert told["outcomes"] == [UNKNOWN_AFTER_CRASH, ""]
    assert told["results"] == [LOST_SANDBOX_TEXT, "on\n"]


@places
@pytest.mark.requirement("P19", "P20")
async def test_cancel_ends_what_hears_no_signal_and_has_left_its_session(place: Place) -> None:
    told = await place.play("stubborn_tool")
    assert (told["status"], told["endings"], told["left"]) == ("cancelled", 1, [])


@places
@pytest.mark.requirement("P30")
async def test_nothing_is_left_of_a_run_that_is_done(place: Place) -> None:
    told = await place.play("daemons")
    assert (told["status"], told["left"]) == ("done", [])


@places
@pytest.mark.requirement("MASS-13")
async def test_a_command_that_takes_all_memory_ends_and_the_run_goes_on(place: Place) -> None:
    told = await place.play("memory_bomb")
    assert (told["status"], told["left"]) == ("done", [])
    assert "[exit code" in told["results"][0] and "1000000000" not in told["results"][0]


@places
@pytest.mark.requirement("MASS-13")
async def test_a_fork_bomb_is_bounded(place: Place) -> None:
    told = await place.play("fork_bomb")
    assert (told["status"], told["left"]) == ("done", [])
    assert told["most"] <= 70


@places
async def test_a_run_that_writes_more_than_it_may_is_limited(place: Place) -> None:
    told = await place.play("disk_fill")
    assert (told["status"], told["left"]) == ("limited", [])
    assert "its files are" in told["error"]


@places
async def test_what_a_cancelled_command_writes_is_still_limited(place: Place) -> None:
    told = await place.play("fill_when_cancelled")
    assert (told["status"], told["endings"], told["left"]) == ("cancelled", 1, [])


@places
async def test_no_file_is_larger_than_it_may(place: Place) -> None:
    told = await place.play("large_file")
    assert told["status"] == "done"
    assert "\n9000000" not in f"\n{told['results'][0]}"


@places
@pytest.mark.requirement("P7")
async def test_a_call_of_a_megabyte_crosses_whole_and_one_of_many_is_refused_in_words(place: Place) -> None:
    told = await place.play("large_calls")
    assert told["status"] == "done"
    assert told["results"][0] == "wrote big (1000000 bytes)"
    assert told["results"][1].strip() == "1000000 big"
    assert "larger than a sandbox can be sent. It was not run." in told["results"][2]


@places
@pytest.mark.requirement("P29")
async def test_a_command_sees_an_allowlist_of_the_environment(place: Place) -> None:
    told = await place.play("environment")
    seen = dict(line.split("=", 1) for line in told["results"][0].splitlines())
    assert set(seen) <= {
        "PATH",
        "HOME",
        "TMPDIR",
        "USER",
        "SHELL",
        "LANG",
        "TZ",
        "PWD",
        "SHLVL",
        "_",
        "RETINUE_RUN",
        "TERM",
        "PYTHONPYCACHEPREFIX",
        "XDG_CACHE_HOME",
    }
    assert seen["HOME"] == seen["PWD"] and seen["TMPDIR"] == "/tmp"


@pytest.mark.parametrize(
    "runtime",
    [
        pytest.param("isolated", marks=needs_bubblewrap),
        pytest.param("container", marks=needs_containers),
        "inherited",
    ],
)
@pytest.mark.requirement("P19")
async def test_nothing_outlives_a_host_that_is_killed(tmp_path: Path, runtime: str) -> None:
    if runtime == "container":
        make_image()
    tmp_path.chmod(0o755)
    (tmp_path / "retinue.yaml").touch()  # nothing above decides
    mark = f"9{secrets.randbelow(10**6):06}"
    left = f"{'' if runtime == 'inherited' else 'setsid '}sleep {mark} & trap : TERM; sleep {mark}; sleep {mark}"
    (tmp_path / "s.yaml").write_text(f"agents: {{main: [{{tools: [{{name: shell, args: {{command: '{left}'}}}}]}}]}}\n")
    argv = [
        sys.executable,
        "-m",
        "retinue",
        "run",
        "go",
        "--yes",
        "--model",
        "scripted:s.yaml",
        "--runtime",
        runtime,
    ]
    host = subprocess.Popen(argv, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        await until(lambda: len(_running(mark)) >= 2)
    finally:
        host.kill()
        host.wait()
    await until(lambda: _running(mark) == [])
    groups = cgroups.find_parent_groups() or []

    def swept() -> bool:  # as the next start does; a group is in use until the kernel is done with its last process
        cgroups.remove_leftover_groups(groups)
        return not [left for folder in groups for left in folder.glob(f"retinue-{host.pid}-*")]

    await until(swept)


@needs_bubblewrap
@pytest.mark.requirement("P19")
def test_a_sandbox_whose_host_is_killed_while_it_starts_comes_to_an_end(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    paths = [tmp_path / name for name in ("workspace", "outputs", "host_outputs", "hidden")]
    for path in paths:
        path.mkdir()
    work, outputs, host_outputs, hidden = map(str, paths)
    box = Box("t", work, True, outputs, host_outputs, (), hidden, ResourceLimits())
    prepared = bubblewrap.probe_bubblewrap().prepare(box)
    assert prepared.info is not None
    os.close(prepared.info)  # as all that a killed host has open
    process = subprocess.Popen(
        prepared.argv,
        env=dict(prepared.env),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=prepared.fds,
        start_new_session=True,
    )
    replace(prepared, info=None, group=None).discard()
    try:
        assert process.wait(150) == 1  # by itself, since its link is at its end
        assert not has_living_member(process.pid)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    if prepared.group is not None:
        prepared.group.remove_soon()


def _running(mark: str) -> list[str]:
    lines = (cmdline(int(path.name)) for path in Path("/proc").glob("[0-9]*"))
    return [line for line in lines if line.startswith(f"sleep {mark}")]
