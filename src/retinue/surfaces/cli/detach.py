"""`run --detach`: the command continues in a process and session of its own, without the terminal.

The first process waits until the second has a tree, prints its id and exits. Until then the second reports errors on
the terminal like any command; from then on its output goes to files in the folder of its run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from retinue.core.control import RunHandle
from retinue.files.private import make_private_folder, open_private_file

FILES = ((1, "stdout.txt"), (2, "stderr.txt"))


class DetachedProcess:
    """The second process, with the pipe to the first."""

    def __init__(self, pipe: int) -> None:
        self._pipe = pipe

    def announce(self, state: Path, run: RunHandle) -> None:
        """Leave the terminal and tell the first process the id of the tree."""
        folder = make_private_folder(state / "runs" / run.tree / str(run.number))
        sys.stdout.flush()
        sys.stderr.flush()
        for fd, name in FILES:
            file = open_private_file(folder / name, append=True)
            os.dup2(file, fd)
            os.close(file)
        os.write(self._pipe, run.tree.encode())
        os.close(self._pipe)


def detach() -> int | DetachedProcess:
    """Fork. Return in the second process what it needs; in the first the exit code, once the tree has an id.

    Must be called before there is a thread or an event loop."""
    sys.stdout.flush()
    sys.stderr.flush()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        os.setsid()
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere, 1)  # whoever reads the first process's output must not wait for the second's
        os.close(nowhere)
        return DetachedProcess(tell)
    os.close(tell)
    with os.fdopen(told, "rb") as pipe:
        tree = pipe.read().decode()
    if tree:
        print(tree)
        return 0
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
