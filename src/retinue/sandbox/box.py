"""The box of a run, which is all it gets of the machine, for every kind of sandbox; and the program inside."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Protocol

from retinue.core.errors import ConfigError
from retinue.core.limits import Caps
from retinue.sandbox.cgroups import Group

LIBRARY = "/retinue"
PROXY = f"{LIBRARY}/proxy"
FULL_NETWORK = "full_network"  # in the place of the protection `net`
PACKAGES = ("retinue", "msgspec", "re2")
# There is no network inside, so asyncio can do without ssl, which takes long to load.
BOOT = (
    f"import sys; sys.modules['ssl'] = None; sys.path.append({LIBRARY!r}); "
    "from retinue.sandbox.tool_server import main; main()"
)
PASSED = frozenset({"LANG", "TZ"})
STATE = ".retinue"


class SandboxUnavailable(ConfigError):
    """No sandbox can be built here; the text says which package or setting would change that."""


@dataclass(frozen=True)
class Box:
    """`workspace` is written when it is the run's own, else only read; `outputs` are its files for text that does not
    fit inline, `lent` those of the host. `hidden` is our own state, of which it sees only what is named here;
    `objects` are what its git reads, and nobody searches. `proxy` is the socket through which it reaches hosts, if it
    may reach any. `user` is who it was before, where its sandbox is started again."""

    tree: str
    workspace: str
    own_workspace: bool
    outputs: str
    lent: str
    readable: tuple[str, ...]
    hidden: str
    caps: Caps
    objects: tuple[str, ...] = ()
    run: int = 0
    proxy: str = ""
    user: tuple[int, int] | None = None


@dataclass(frozen=True)
class PreparedSandbox:
    """The way to start the tool server of one run. The descriptors are closed when it has started; `info` is a file in
    which the pid of its first process inside will stand. `user` owns what the run may write, where that is somebody
    else than we. `kill` ends a run whose processes are not below its first one, and waits for that; it can be called
    again."""

    argv: Sequence[str]
    env: Mapping[str, str]
    fds: Sequence[int] = ()
    info: int | None = None
    group: Group | None = None
    user: tuple[int, int] | None = None
    kill: Callable[[], None] | None = None
    cwd: str | None = None

    def discard(self) -> None:
        """Close the descriptors and remove the group: others have used them, or nobody will."""
        for fd in (*self.fds, *([] if self.info is None else [self.info])):
            os.close(fd)
        if self.group is not None:
            self.group.remove()


class SandboxBuilder(Protocol):
    """Prepares sandboxes of one kind. `protections` name the parts that work, as in `run.started`."""

    @property
    def protections(self) -> tuple[str, ...]: ...

    @property
    def counts_memory(self) -> bool:
        """Tell whether the kernel counts the memory of a whole run; else each of its processes is limited."""
        ...

    def prepare(self, box: Box) -> PreparedSandbox: ...


def find_python() -> str:
    """Return the interpreter itself, not the link to it in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


def tool_server_command() -> list[str]:
    """Return the command inside: no environment, no site-packages but those we show it."""
    return [find_python(), "-I", "-S", "-c", BOOT]


@cache
def list_packages() -> tuple[tuple[str, str], ...]:
    """Return the packages that the tool server imports: their folders, and their names in the library folder inside."""
    found = []
    for name in PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None or not spec.submodule_search_locations:
            continue
        folder = Path(os.path.realpath(spec.submodule_search_locations[0]))
        found.append((str(folder), name))
        found += [(str(libs), libs.name) for libs in folder.parent.glob(f"*{name}.libs")]
    return tuple(found)


@cache
def list_interpreter_folders() -> tuple[str, ...]:
    """List the folders that Python itself needs, beyond /usr."""
    folders = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    folders.add(str(Path(find_python()).parent))
    return tuple(sorted(folder for folder in folders if not folder.startswith("/usr/") and folder != "/usr"))


def make_environment(
    box: Box, given: Mapping[str, str], visible: Sequence[str], exposed: Sequence[str] = ()
) -> dict[str, str]:
    """Make the environment inside from an allowlist. Its PATH has the programs that were exposed, the folders of ours
    that can be seen from inside, and those of the interpreter."""
    passed = {name: value for name, value in given.items() if name in PASSED or name.startswith("LC_")}
    seen = ("/usr", "/bin", "/sbin", *visible, *exposed)
    folders = [os.path.realpath(folder) for folder in given.get("PATH", os.defpath).split(":") if folder[:1] == "/"]
    folders = [
        *_list_program_folders(exposed),
        *(folder for folder in folders if _is_below(folder, seen)),
        *_list_program_folders(list_interpreter_folders()),
    ]
    home = box.workspace if box.own_workspace else "/tmp"
    path = ":".join(dict.fromkeys(folders)) or os.defpath
    return {**passed, "PATH": path, "HOME": home, "TMPDIR": "/tmp", "USER": "agent", "SHELL": "/bin/sh"}


def _list_program_folders(exposed: Sequence[str]) -> Iterator[str]:
    """Yield the folders of programs among the exposed paths."""
    for path in exposed:
        if Path(path, "bin").is_dir():
            yield f"{path}/bin"
        elif Path(path).is_file():
            yield os.path.dirname(path)  # noqa: PTH120


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path == folder or path.startswith(f"{folder}/") for folder in folders)


def find_command(name: str) -> str | None:
    """Return the path of a program of the system; the user's own folders are not looked at."""
    return shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")


@dataclass
class Mounts:
    """The mounts inside, parents before children whatever the order they were added in."""

    _at: dict[str, list[str]] = field(default_factory=dict)

    def add(self, path: str, *arguments: str) -> None:
        self._at[path] = list(arguments)

    def list_arguments(self) -> list[str]:
        """Return the options for bubblewrap. Everybody can pass through the folders on the way to a mount."""
        said: list[str] = []
        for path in sorted({*self._at, *self._list_parents()}, key=lambda path: path.count("/")):
            said += self._at.get(path) or ["--perms", "0755", "--dir", path]
        return said

    def _list_parents(self) -> Iterator[str]:
        for path in self._at:
            for folder in Path(path).parents:
                if str(folder) == "/" or (str(folder) in self._at and "--tmpfs" not in self._at[str(folder)]):
                    break  # what is bound has its own folders
                if str(folder) not in self._at:
                    yield str(folder)
