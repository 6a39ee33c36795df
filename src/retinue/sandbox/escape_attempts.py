"""Attempts against a sandbox: something to find, somebody to hurt, and a model that is a list of commands.

Does not run anything itself: who does (`retinue doctor --escape`, the tests) gives the model to a run behind the wall.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from retinue.core.messages import Call, Reply
from retinue.core.profiles import RuntimeName
from retinue.sandbox import escapes
from retinue.sandbox.box import python
from retinue.sandbox.container_image import PYTHON

TRY_SECONDS = 15
TRIES = escapes.TRIES | escapes.LAST
CAPS = escapes.CAPS


class OneByOne:
    """A model that says one command after the other, if the first one's answer is the right one."""

    name = "list"

    def __init__(self, commands: list[str]) -> None:
        self.commands = commands
        self.said: list[str] = []
        self.stands = False

    async def complete(self, request: Any, on_delta: Any) -> Reply:
        del on_delta
        if request.turn > 1:
            self.said.append(request.thread[-1].text)
        if request.turn == 2:
            self.stands = self.said[0].strip() == escapes.STANDS
        if (request.turn > 1 and not self.stands) or request.turn > len(self.commands):
            return Reply("over")
        command = self.commands[request.turn - 1]
        return Reply("", (Call(f"c{request.turn}", "shell", {"command": command, "timeout": TRY_SECONDS}),))


class Names:
    """The internet as the run may reach it: a name that leads to this machine, and one that leads nowhere."""

    near, far = "near.invalid", "far.invalid"

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return [host if host[0] in "0123456789:" else "127.0.0.1" if host == self.near else "93.184.216.34"]

    async def connect(self, address: str, port: int, *, tls: str | None) -> Any:
        raise OSError(f"{address}:{port} is not there")


class Attempts:
    """All tries against one wall; `folder` is the project of the run that makes them, `network` what it may reach
    through `dialer`."""

    dialer = Names()

    def __init__(self, folder: Path, values: dict[str, str], victim: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        self.network = [self.dialer.far, f"{self.dialer.near}:{values['port']}", self.dialer.near]
        self._secret, self._victim = values["planted"], victim
        self.model = OneByOne([escapes.filled(command, values) for command in (escapes.WALLED, *TRIES.values())])

    def escaped(self, status: str) -> dict[str, bool | None]:
        """Return which attempts got out, of a run that ended so; None for one without an answer."""
        said = dict(zip(TRIES, self.model.said[1:], strict=False))
        if len(said) == len(TRIES) - 1 and status == "limited":
            said[list(TRIES)[-1]] = ""  # filling the workspace is what a run ends of
        if self._victim.poll() is not None:
            said["a signal to the host"] = escapes.MARK
        out = {name: escapes.MARK in text or self._secret in text for name, text in said.items()}
        return {name: out.get(name) for name in TRIES}


@contextmanager
def planted(runtime: RuntimeName) -> Iterator[Attempts]:
    """Something to find, in a folder of its own, and somebody to hurt; all of it gone afterwards."""
    secret = secrets.token_hex(8)
    with ExitStack() as stack:
        folder, home = (Path(tempfile.mkdtemp(prefix=f"retinue-{name}-")) for name in ("project", "home"))
        for made in (folder, home):
            stack.callback(shutil.rmtree, made, ignore_errors=True)
        folder.chmod(0o755)
        home.chmod(0o755)
        files = {"home": home / "key", "state": folder / ".retinue/control/one.json", "notes": folder / "notes.txt"}
        files["secret"] = folder / ".retinue/runs/other/1/workspace/secret"
        for path in files.values():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(secret)
        listening = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        for address in (f"\0{secret}", str(home / "socket")):
            hidden = stack.enter_context(socket.socket(socket.AF_UNIX))
            hidden.bind(address)
            hidden.listen()
        os.environ["PLANTED_KEY"] = secret
        stack.callback(os.environ.pop, "PLANTED_KEY")
        victim = subprocess.Popen(["sleep", "987"])
        stack.callback(victim.wait)
        stack.callback(victim.kill)
        values = {name: str(path) for name, path in files.items()} | {
            "planted": secret,
            "project": str(folder),
            "pid": str(victim.pid),
            "port": str(listening.getsockname()[1]),
            "abstract": secret,
            "socket": str(home / "socket"),
            "python": PYTHON if runtime == "container" else python(),
            "stands": escapes.STANDS,
            "near": Names.near,
            "far": Names.far,
            "spaces": " ".join(str(Path("/proc/self/ns", name).readlink()) for name in ("pid", "mnt", "net", "ipc")),
        }
        yield Attempts(folder, values, victim)
