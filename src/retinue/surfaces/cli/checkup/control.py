"""Doors: whether one can be opened here, which are open, and what dead processes left."""

from __future__ import annotations

import socket
from collections.abc import Iterator

from retinue.control import address_files as files
from retinue.surfaces.cli.checkup.check import Check, Look

HOST = "127.0.0.1"


def checks(look: Look) -> Iterator[Check]:
    yield _loopback()
    live, stale = files.survey(look.state / "doors")
    for pid in live:
        yield Check("door", "ok", f"process {pid} can be reached from here")
    if stale:
        count = f"{len(stale)} file{'' if len(stale) == 1 else 's'}"
        left = ", ".join(str(path) for path in stale[:3])
        yield Check("door", "ok", f"{count} of dead processes, removed when somebody looks for a door: {left}")


def _loopback() -> Check:
    """Opens a port as a door does, and closes it at once."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as made:
            made.bind((HOST, 0))
            made.listen(1)
    except OSError as error:
        do = "runs work without it; `retinue run --no-door` says nothing of it"
        return Check("loopback", "warn", f"cannot listen on {HOST}: {error.strerror or error}: no second terminal", do)
    return Check("loopback", "ok", f"{HOST} can be listened on, so other terminals can reach a run")
