"""Tests of runtimes for an ordinary user, beside test_contract.py, test_crashes_and_limits.py and test_escapes.py: a
sample of their scenes, and in `make soak` the escape list in a rootless container."""

from __future__ import annotations

import asyncio
import random
import secrets
import subprocess
import threading

import pytest

from retinue.sandbox.escapes import TRIES, run_as_user
from tests.control.outbox_watcher.test_kills import running
from tests.sandbox.crash_scenes import CRASH_SCENES
from tests.sandbox.places import ROOT, USERS_CONTAINER, Place, needs_bubblewrap, needs_users_containers
from tests.sandbox.scenes import SCENES, in_process
from tests.surfaces.cli.shell import until

SEED = 4
SECONDS = 900.0  # on a machine with nothing else to do 20 are enough
LONG = {"stall", "timeout", "cancel_at_each_stage", "host_tools", "approvals_at_depth_3"}
BOMBS = {"memory_bomb", "fork_bomb", "disk_fill"}
TELL_OTHER_FACTS = {"escapes", "hosts"}
SCENES_TRIED = random.Random(SEED).sample(sorted(SCENES.keys() - LONG), 2)
CRASHES_TRIED = random.Random(SEED).sample(sorted(CRASH_SCENES.keys() - BOMBS - TELL_OTHER_FACTS), 1)


@pytest.mark.parametrize(
    ("place", "crashes"),
    [
        pytest.param(USERS_CONTAINER, CRASHES_TRIED, id="container", marks=[*needs_users_containers, pytest.mark.soak]),
        pytest.param(
            Place("delegated", ordinary=True),
            [],
            id="delegated",
            marks=[needs_bubblewrap, pytest.mark.skipif(not ROOT, reason="needs root")],
        ),
    ],
)
def test_a_sample_is_the_same_when_an_ordinary_user_plays_it(place: Place, crashes: list[str]) -> None:
    escapes = ["escapes"] if crashes else []
    played = place.play_as_user(*escapes, *SCENES_TRIED, *crashes, seconds=SECONDS)
    if escapes:
        assert played.pop(0) == {"escaped": dict.fromkeys(TRIES, False), "left": []}
    for scene in SCENES_TRIED:
        assert played.pop(0) == asyncio.run(in_process(scene))
    for told in played:
        assert (told["endings"], told["last"], told["left"]) == (1, "run.ended", [])


@pytest.mark.skipif(not ROOT, reason="needs root")
def test_nothing_is_left_of_a_user_s_command_that_takes_too_long() -> None:
    mark = f"9{secrets.randbelow(10**6):06}"
    begun, over = threading.Event(), threading.Event()

    def look() -> None:
        while not begun.is_set() and not over.is_set():
            if len(running(mark)) == 2:
                begun.set()

    for seconds in (1, 10, 100):  # a slow machine needs longer to begin
        over.clear()
        looking = threading.Thread(target=look)
        looking.start()
        with pytest.raises(subprocess.TimeoutExpired):
            run_as_user(["/bin/sh", "-c", f"setsid sleep {mark} & sleep {mark}"], seconds=seconds)
        over.set()
        looking.join()
        if begun.is_set():
            break
    assert begun.is_set()
    until(lambda: running(mark) == [])
