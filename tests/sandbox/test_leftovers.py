"""The look at what is left sees what is left."""

from __future__ import annotations

import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.sandbox import leftovers
from tests.sandbox.crash_scenes import cmdline
from tests.sandbox.leftovers import nothing_left


def a_process() -> Callable[[], object]:
    process = subprocess.Popen(["sleep", "60"])
    while not cmdline(process.pid):  # it has none before it is what it will be
        pass
    return lambda: (process.kill(), process.wait())


def a_socket() -> Callable[[], object]:
    return socket.socket().close


def a_file() -> Callable[[], object]:
    return Path(tempfile.mkdtemp()).joinpath("left").touch


@pytest.mark.parametrize(("leave", "seen"), [(a_process, "sleep 60"), (a_socket, "socket:"), (a_file, "retinue-left")])
def test_what_is_left_is_seen(
    leave: Callable[[], Callable[[], object]], seen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "SECONDS", 0.1)
    end: Callable[[], object] = int
    try:
        with pytest.raises(AssertionError, match=seen), nothing_left("isolated"):
            end = leave()
    finally:
        if leave is not a_file:
            end()
    with nothing_left("isolated"):
        assert tempfile.gettempdir() != "/tmp"


def test_mounts_of_others_are_theirs(tmp_path: Path) -> None:
    mine = [f"{tmp_path}/x", "/tmp/retinue-user-1/home"]
    theirs = ["/proc", "/var/lib/containers/storage/overlay/abc/merged"]
    assert sorted(leftovers._ours({*mine, *theirs}, tmp_path, by_engine=False)) == sorted(mine)
