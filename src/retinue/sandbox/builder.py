"""The base of sandbox builders, and what bubblewrap and containers share: the program inside and its environment, the
files a run is shown, the user it is, and the check from inside that its protections work.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import stat
import sys
import zlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import msgspec

from retinue.core.errors import ConfigError
from retinue.core.limits import Caps
from retinue.files.reserved import GIT_FOLDER, STATE_FOLDER
from retinue.files.scratch import make_scratch_folder
from retinue.files.trees import give_folder
from retinue.sandbox.box import Box
from retinue.sandbox.process import PreparedSandbox, Process

LIBRARY = "/retinue"
PROXY = f"{LIBRARY}/proxy"
FULL_NETWORK = "full_network"  # in the place of the protection `net`
PACKAGES = ("retinue", "msgspec", "re2")
# There is no network inside, so asyncio can do without ssl, which takes long to load.
BOOT = f"import sys; sys.modules['ssl'] = None; sys.path.append({LIBRARY!r}); "
SERVE = "from retinue.sandbox.tool_server import main; main()"
PASSED = frozenset({"LANG", "TZ"})
# Not in the workspace: there they would be among the changes of the run.
CACHES = {"PYTHONPYCACHEPREFIX": "/tmp/pycache", "XDG_CACHE_HOME": "/tmp/cache"}
TEMPORARY_BYTES = 512 * 1024**2
SHARED_BYTES = 64 * 1024**2
FREE_UIDS = (1_879_048_192, 2**28)  # a range that no distribution and no container tool gives away
COVER = "/dev/null"
MAX_LOOKED_AT = 1000
DEEPEST = 3
_GIT_SECRETS = ("config", "config.worktree", "credentials", "FETCH_HEAD")
_NO_REPOSITORIES = frozenset({"objects", "refs", "hooks", "logs", "info", "node_modules", "__pycache__", ".venv"})
_UNIX_SOCKETS = Path("/proc/net/unix")


class SandboxUnavailable(ConfigError):
    """No sandbox can be built here; the text says which package or setting would change that."""


# Leaves `seen`, as `SelfCheck` has it, to a program whose first argument is what must not be seen there.
CHECK_CODE = """
import json, os, sys
said = dict(line.split(":", 1) for line in open("/proc/self/status"))
lines = open("/proc/net/dev").read().splitlines()[2:]
seen = {"uid": os.getuid(), "caps": int(said["CapBnd"], 16) | int(said["CapEff"], 16),
    "nnp": said["NoNewPrivs"].strip(), "seccomp": said["Seccomp"].strip(), "pid": os.getpid(),
    "nets": [line.split(":")[0].strip() for line in lines], "seen": os.path.exists(sys.argv[1])}
"""
PRINT_CODE = "print(json.dumps(seen))\n"


class SelfCheck(msgspec.Struct):
    """The findings from inside. `seen` is what it must not see, `seccomp` 2 where calls are filtered."""

    uid: int
    caps: int
    nnp: str
    seccomp: str
    pid: int
    nets: list[str]
    seen: bool


class Bind(NamedTuple):
    """A file or folder of this machine that is mounted inside."""

    source: str
    writable: bool = False


class SandboxBuilder(ABC):
    """Prepares sandboxes of one kind, which `name` names.

    `protections` are the parts that were seen to work from inside, as in `run.started`. `counts_memory` says that the
    kernel counts the memory of a whole run; else each of its processes is limited. `find_hint` explains why a command
    failed inside that works outside, `process` starts and ends the tool server."""

    name: str
    protections: tuple[str, ...] = ()
    counts_memory = False
    process: type[Process] = Process
    find_hint: Callable[[str], str]

    def __init__(self, *, expose: Sequence[str] = (), full_network: bool = False) -> None:
        self._expose = tuple(os.path.realpath(path) for path in expose if Path(path).exists())
        self._full_network = full_network

    @abstractmethod
    def prepare(self, box: Box) -> PreparedSandbox:
        """Return how to start the tool server."""

    def is_exposed(self, path: str) -> bool:
        """Tell whether the user has exposed a path to all sandboxed runs."""
        return any(f"{os.path.realpath(path)}/".startswith(f"{shown}/") for shown in self._expose)

    def _give_to_user(self, box: Box) -> tuple[int, int] | None:
        """Return the user that a run of root's becomes, who owns its files from now on; None where we are not root. It
        has a uid for one run and the gid of its tree, from numbers this machine gives to nobody."""
        if os.geteuid() != 0:
            return None
        user = box.user
        if user is None:
            first, count = _find_free_ids()
            user = first + secrets.randbelow(count), first + zlib.crc32(box.tree.encode()) % count
        give_files(box, user)
        return user

    def _list_binds(self, box: Box) -> dict[str, Bind]:
        """Return what a run is shown of this machine's files beside the system, by its path inside.

        A socket that somebody listens on is covered: a mount that is read-only keeps nobody from connecting."""
        shown = (*self._expose, *box.roots)
        if "/" in shown:
            raise SandboxUnavailable("the folder / cannot be shown in a sandbox: it has everything in it")
        binds = {f"{LIBRARY}/{name}": Bind(source) for source, name in list_packages()}
        binds |= {path: Bind(path) for path in shown}
        binds |= {path: Bind(COVER) for path in find_bound_sockets(shown, box.hidden)}
        binds |= {path: Bind(COVER) for path in find_git_secrets(shown, box.hidden)}
        if box.own_workspace:
            binds[box.workspace] = Bind(box.workspace, writable=True)
        binds[box.outputs] = Bind(box.outputs, writable=True)
        binds[box.host_outputs] = Bind(box.host_outputs)
        if box.proxy:
            binds[PROXY] = Bind(box.proxy)
        return binds

    def _list_masks(self, box: Box) -> list[str]:
        """Return the folders of our own state inside what is shown, which have to be hidden."""
        shown = (*self._expose, *box.roots)
        masks = {box.hidden, *(f"{path}/{STATE_FOLDER}" for path in shown)}.difference(box.roots)
        return sorted(
            mask for mask in masks if Path(mask).is_dir() and any(f"{mask}/".startswith(f"{path}/") for path in shown)
        )

    def _set_protections(
        self,
        seen: SelfCheck,
        user: tuple[int, int] | None,
        *,
        program: str,
        first: Sequence[str],
        missing: Sequence[str],
    ) -> None:
        """Set `protections`; raises SandboxUnavailable if one that was seen from inside does not work. `user` is the
        user it should be, where that is not ours; `first` and `missing` are what `program` adds."""
        works = {
            "uid": seen.uid == (user[0] if user else os.getuid()) != 0,
            "caps": seen.caps == 0,
            "no_new_privs": seen.nnp == "1",
            "pid": seen.pid < 10,
            "net": self._full_network or seen.nets == ["lo"],
            "mount": not seen.seen,
        }
        missing = list(dict.fromkeys([*(name for name, it_works in works.items() if not it_works), *missing]))
        if missing:
            raise SandboxUnavailable(f"{program} started, but these protections do not work here: {', '.join(missing)}")
        filtered = ["seccomp"] if seen.seccomp == "2" else []
        counted = ["cgroup"] if self.counts_memory else []
        net = FULL_NETWORK if self._full_network else "net"
        everywhere = ("pid", "mount", net, "ipc", "caps", "no_new_privs")
        self.protections = (*first, *everywhere, *filtered, *counted, "rlimits")


@contextmanager
def make_probe_box() -> Iterator[tuple[Box, str]]:
    """Make a box for the check from inside, with a file that must not be seen there."""
    with make_scratch_folder() as folder:
        hidden = folder / "project" / STATE_FOLDER
        own = hidden / "runs" / "probe"
        for name in ("workspace", "outputs", "host_outputs"):
            (own / name).mkdir(parents=True)
        secret = hidden / "secret"
        secret.touch()
        box = Box(
            tree="probe",
            workspace=str(own / "workspace"),
            own_workspace=True,
            outputs=str(own / "outputs"),
            host_outputs=str(own / "host_outputs"),
            readable=(str(hidden.parent),),
            hidden=str(hidden),
            caps=Caps(),
        )
        yield box, str(secret)


# The program inside


def find_python() -> str:
    """Return the interpreter itself, not the link to it in a virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


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


def make_environment(box: Box, visible: Sequence[str] = (), exposed: Sequence[str] = ()) -> dict[str, str]:
    """Make the environment inside from an allowlist. Its PATH has the programs that were exposed, the folders of ours
    that can be seen from inside, and those of the interpreter."""
    passed = {name: value for name, value in os.environ.items() if name in PASSED or name.startswith("LC_")}
    seen = ("/usr", "/bin", "/sbin", *visible, *exposed)
    folders = [
        os.path.realpath(folder) for folder in os.environ.get("PATH", os.defpath).split(":") if folder[:1] == "/"
    ]
    folders = [
        *_list_program_folders(exposed),
        *(folder for folder in folders if any(f"{folder}/".startswith(f"{other}/") for other in seen)),
        *_list_program_folders(list_interpreter_folders()),
    ]
    home = box.workspace if box.own_workspace else "/tmp"
    path = ":".join(dict.fromkeys(folders)) or os.defpath
    return {**passed, **CACHES, "PATH": path, "HOME": home, "TMPDIR": "/tmp", "USER": "agent", "SHELL": "/bin/sh"}


def _list_program_folders(exposed: Sequence[str]) -> Iterator[str]:
    """Yield the folders of programs among the exposed paths."""
    for path in exposed:
        if Path(path, "bin").is_dir():
            yield f"{path}/bin"
        elif Path(path).is_file():
            yield os.path.dirname(path)  # noqa: PTH120


def find_system_program(name: str) -> str | None:
    """Return the path of a program of the system; the user's own folders are not looked at."""
    return shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")


# What is covered of the folders that are shown


def find_git_secrets(folders: Sequence[str], hidden: str) -> list[str]:
    """Return the files of git in these folders that can hold a token: a remote's address may have one in it. Looks in
    the repositories themselves, their submodules and worktrees, and repositories a few folders below. The folders of
    runs, which are in `hidden`, have settings of their own without any."""
    users = [folder for folder in folders if not folder.startswith(f"{hidden}/")]
    places = [Path(git, name) for folder in users for git in _find_git_folders(folder, hidden) for name in _GIT_SECRETS]
    return [str(path) for path in places if path.is_file() and not path.parent.is_symlink()]


def _find_git_folders(folder: str, hidden: str) -> Iterator[str]:
    """Yield the git folders at and below a folder, whatever their names are. Looks at so many folders and no more."""
    waiting, seen = deque([(folder, 0)]), 0
    while waiting and seen < MAX_LOOKED_AT:
        path, depth = waiting.popleft()
        seen += 1
        try:
            with os.scandir(path) as entries:
                inner = {entry.name: entry.is_dir(follow_symlinks=False) for entry in entries}
        except OSError:
            continue
        in_git = f"/{GIT_FOLDER}/" in f"{path}/"
        if in_git or ("HEAD" in inner and inner.get("objects") and inner.get("refs")):
            yield path
        for name in (name for name, is_folder in inner.items() if is_folder):
            below = f"{path}/{name}"
            if below == hidden or name in _NO_REPOSITORIES:
                continue
            if in_git or name == GIT_FOLDER:  # the repositories of submodules and worktrees are below it
                waiting.appendleft((below, depth + 1))
            elif depth < DEEPEST:
                waiting.append((below, depth + 1))


def find_bound_sockets(folders: Sequence[str], hidden: str) -> list[str]:
    """Return the unix sockets below these folders, which are real paths, and not in what is hidden of them. One that
    was bound by a relative path is looked for in the folders themselves.

    Sockets that are made later, or in another network namespace, are not known here."""
    found = set()
    with suppress(OSError):
        for line in _UNIX_SOCKETS.read_bytes().splitlines()[1:]:
            name = os.fsdecode(line.split(b" ", 7)[-1]) if line.count(b" ") >= 7 else ""
            if not name or name.startswith(("@", "/proc/")):
                continue
            for path in [name] if name.startswith("/") else [f"{folder}/{name}" for folder in folders]:
                real = os.path.realpath(path)
                shown = any(real.startswith(f"{folder}/") for folder in folders)
                if shown and not real.startswith(f"{hidden}/") and _is_socket(real):
                    found.add(real)
    return sorted(found)


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.lstat(path).st_mode)
    except (OSError, ValueError):
        return False


# The user of a run, if root starts it


def _find_free_ids() -> tuple[int, int]:
    """Return the first free id and their number; in a container that maps fewer, the upper half of what it maps."""
    largest = 0
    for line in Path("/proc/self/uid_map").read_text().splitlines():
        inside, _, count = map(int, line.split())
        if inside <= FREE_UIDS[0] and inside + count >= sum(FREE_UIDS):
            return FREE_UIDS
        largest = max(largest, inside + count)
    if largest < 2000:
        raise SandboxUnavailable("this container has too few user ids for runs of their own")
    return largest // 2, largest // 2 - 1


def give_files(box: Box, user: tuple[int, int]) -> None:
    """Give the run what it writes, and its group what it reads of the tree. What is shared is not touched."""
    uid, gid = user
    for folder in (box.outputs, *([box.workspace] if box.own_workspace else [])):
        give_folder(folder, uid, gid)
    if box.proxy:
        os.chown(box.proxy, uid, gid, follow_symlinks=False)
    os.chown(box.host_outputs, 0, gid)
    Path(box.host_outputs).chmod(0o750)
    for folder in (path for path in (*box.readable, box.workspace) if path.startswith(f"{box.hidden}/")):
        about = Path(folder).stat()
        if about.st_uid == 0 and about.st_gid != gid:  # of a run above that has started no sandbox of its own
            give_folder(folder, -1, gid)
