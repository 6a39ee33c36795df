"""The places where a scene can be played: the runtimes of this user, and of an ordinary user. A new runtime is a new
row."""

from __future__ import annotations

import fcntl
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from retinue.sandbox import container_image, escapes
from retinue.sandbox.builder import find_system_program
from retinue.sandbox.container import find_engine
from tests.sandbox.crash_scenes import CRASH_SCENES
from tests.sandbox.scenes import SCENES

REPO = Path(__file__).parents[2]
IMAGE_LOCK = Path(tempfile.gettempdir(), f"retinue-image-{os.geteuid()}.lock")  # images belong to one user
ROOT = os.geteuid() == 0
USER_SECONDS = 280.0  # only ends what hangs
needs_containers = pytest.mark.skipif(
    find_system_program("podman") is None and find_system_program("docker") is None,
    reason="neither podman nor docker is installed",
)
needs_bubblewrap = pytest.mark.skipif(find_system_program("bwrap") is None, reason="bubblewrap is not installed")


@cache
def make_image() -> None:
    """The default image, made once a machine, by whoever comes first."""
    made = find_engine()
    with IMAGE_LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if made.call("image", "inspect", container_image.NAME).returncode:
            container_image.build_image(made.argv)


@dataclass(frozen=True)
class Place:
    runtime: str
    ordinary: bool = False

    async def play(self, scene: str) -> Any:
        if not self.ordinary or not ROOT:
            if self.runtime == "container":
                make_image()
            return await {**SCENES, **CRASH_SCENES}[scene](self.runtime)
        return self.play_as_user(scene)[0]

    def play_as_user(self, *scenes: str, seconds: float = USER_SECONDS) -> list[Any]:
        """Play the scenes in turn as the same ordinary user, whose setup is made once."""
        argv = [sys.executable, "-m", "tests.sandbox", self.runtime, *scenes]
        played: list[Any] = json.loads(run_as_user(argv, seconds=seconds))
        return played


# An ordinary user makes an image of their own first, so all of the suite is played there in `make soak` only.
USERS_CONTAINER = Place("container", ordinary=True)
needs_users_containers = [
    needs_containers,
    pytest.mark.skipif(not ROOT or find_system_program("newuidmap") is None, reason="needs root and newuidmap"),
]
USERS_SANDBOX = Place("isolated", ordinary=True)
needs_users_sandboxes = [needs_bubblewrap, pytest.mark.skipif(not ROOT, reason="the same as by this process's user")]
PLACES = [
    pytest.param(Place("isolated"), id="isolated", marks=needs_bubblewrap),
    pytest.param(USERS_SANDBOX, id="isolated-by-ordinary-user", marks=needs_users_sandboxes),
    pytest.param(Place("container"), id="container", marks=needs_containers),
    pytest.param(USERS_CONTAINER, id="container-by-ordinary-user", marks=[*needs_users_containers, pytest.mark.soak]),
]
# Runs of the host of a container, asked for through files; the host's sandbox is the first of those above.
ELSEWHERE = [
    pytest.param(Place("delegated"), id="delegated", marks=needs_bubblewrap),
    pytest.param(
        Place("delegated", ordinary=True),
        id="delegated-by-ordinary-user",
        marks=[needs_bubblewrap, pytest.mark.soak, pytest.mark.skipif(not ROOT, reason="the same as the one above")],
    ),
]


def run_as_user(argv: Sequence[str], *, seconds: float = USER_SECONDS) -> str:
    done = escapes.run_as_user(argv, seconds=seconds, also=[str(REPO)])
    assert done.returncode == 0, done.stderr
    return done.stdout
