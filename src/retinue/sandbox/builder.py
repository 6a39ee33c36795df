"""The base class of sandbox builders, and the parts that bubblewrap and containers share.

These are: the program inside and its environment, the files that a run sees, its user id, and the self-check of the
protections from inside.
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
from retinue.core.limits import ResourceLimits
from retinue.files.opening import open_real_folder
from retinue.files.private import make_private_folder
from retinue.files.reserved import GIT_FOLDER, STATE_FOLDER
from retinue.files.scratch import make_scratch_folder
from retinue.files.trees import give_folder
from retinue.sandbox.box import Box
from retinue.sandbox.process import PreparedSandbox, Process

LIBRARY = "/retinue"
PROXY = f"{LIBRARY}/proxy"
FULL_NETWORK = "full_network"  # replaces the protection `net`
PACKAGES = ("retinue", "msgspec", "re2")
# There is no network inside, so asyncio does not need ssl, which is slow to import.
BOOT = f"import sys; sys.modules['ssl'] = None; sys.path.append({LIBRARY!r}); "
SERVE = "from retinue.sandbox.tool_server import main; main()"
# The folders of the system beside /usr.
SYSTEM = ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
PASSED = frozenset({"LANG", "TZ"})
# Outside of the workspace, where they would count as changes of the run.
CACHES = {"PYTHONPYCACHEPREFIX": "/tmp/pycache", "XDG_CACHE_HOME": "/tmp/cache"}
TEMPORARY_BYTES = 512 * 1024**2
SHARED_BYTES = 64 * 1024**2
FREE_UIDS = (1_879_048_192, 2**28)  # a range that no distribution and no container tool assigns
COVER = "/dev/null"
MAX_LOOKED_AT = 1000
DEEPEST = 3
_GIT_SECRETS = ("config", "config.worktree", "credentials", "FETCH_HEAD")
_NO_REPOSITORIES = frozenset({"objects", "refs", "hooks", "logs", "info", "node_modules", "__pycache__", ".venv"})
_UNIX_SOCKETS = Path("/proc/net/unix")


class SandboxUnavailable(ConfigError):
    """No sandbox can be built here. The text names the package or setting that would help."""


class SelfCheck(msgspec.Struct, frozen=True):
    """The findings from inside a sandbox, which the program `self_check.py` prints."""

    uid: int
    pid: int
    capabilities: int
    no_new_privs: bool
    filters_calls: bool
    networks: list[str]
    sees_secret: bool
    writes_outside: bool
    memory_limit: int
    machine: str


class Bind(NamedTuple):
    """A file or folder of this machine to mount into the sandbox."""

    source: str
    writable: bool = False


class SandboxBuilder(ABC):
    """The base class of builders, one for each kind of sandbox. `name` is the kind.

    `protections` lists the protections that passed the self-check, as shown in `run.started`. `counts_memory` is True
    if the kernel limits the memory of the whole run; otherwise each process is limited. `find_hint` explains why a
    command failed inside that works outside. `process` is the class that starts and ends the tool server."""

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
        """Return a PreparedSandbox that starts the tool server."""

    def is_exposed(self, path: str) -> bool:
        """Return True if the user has exposed `path` to all sandboxed runs."""
        return any(f"{os.path.realpath(path)}/".startswith(f"{shown}/") for shown in self._expose)

    def _give_to_user(self, box: Box) -> tuple[int, int] | None:
        """Return the uid and gid for a run and make them the owner of its files. Returns None if we are not root.

        Each run gets its own uid and each tree its own gid, from a range of ids that this machine does not use."""
        if os.geteuid() != 0:
            return None
        user = box.user
        if user is None:
            first, count = _find_free_ids()
            user = first + secrets.randbelow(count), first + zlib.crc32(box.tree.encode()) % count
        give_files(box, user)
        return user

    def _list_binds(self, box: Box) -> dict[str, Bind]:
        """Return the files of this machine that a run sees besides the system, keyed by their path inside.

        A socket with a listener is covered, because a read-only mount does not prevent connecting."""
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
        """Return the folders with our own state below the visible folders. They have to be hidden."""
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
        """Set `protections`. Raises SandboxUnavailable if the self-check found a protection that does not work.

        `user` is the expected user if it differs from ours. `program` is named in the error; `first` and `missing` are
        its extra protections and its extra failures."""
        works = {
            "uid": seen.uid == (user[0] if user else os.getuid()) != 0,
            "no_capabilities": seen.capabilities == 0,
            "no_new_privs": seen.no_new_privs,
            "pid": seen.pid < 10,
            "net": self._full_network or seen.networks == ["lo"],
            "mount": not seen.sees_secret and not seen.writes_outside,
        }
        missing = list(dict.fromkeys([*(name for name, it_works in works.items() if not it_works), *missing]))
        if missing:
            raise SandboxUnavailable(f"{program} started, but these protections do not work here: {', '.join(missing)}")
        filtered = ["seccomp"] if seen.filters_calls else []
        counted = ["cgroup"] if self.counts_memory else []
        net = FULL_NETWORK if self._full_network else "net"
        everywhere = ("pid", "mount", net, "ipc", "no_capabilities", "no_new_privs")
        self.protections = (*first, *everywhere, *filtered, *counted, "rlimits")


@contextmanager
def make_probe_box() -> Iterator[tuple[Box, str]]:
    """Yield a Box for the self-check, and the path of a file that must not be visible inside."""
    with make_scratch_folder() as folder:
        hidden = folder / "project" / STATE_FOLDER
        own = hidden / "runs" / "probe"
        for name in ("workspace", "outputs", "host_outputs"):
            make_private_folder(own / name)
        for made in (hidden.parent, *hidden.parent.rglob("*")):
            made.chmod(0o755)  # whatever the umask: only the sandbox hides the secret, not the mode of a folder
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
            resource_limits=ResourceLimits(),
        )
        yield box, str(secret)


# The program inside


def find_python() -> str:
    """Return the real interpreter, not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)


@cache
def list_packages() -> tuple[tuple[str, str], ...]:
    """Return the folder of each package that the tool server imports, with its name in the library folder inside."""
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
    """Return the folders outside of /usr that Python itself needs."""
    folders = {os.path.realpath(prefix) for prefix in (sys.base_prefix, sys.base_exec_prefix)}
    folders.add(str(Path(find_python()).parent))
    return tuple(sorted(folder for folder in folders if not folder.startswith("/usr/") and folder != "/usr"))


def make_environment(box: Box, visible: Sequence[str] = (), exposed: Sequence[str] = ()) -> dict[str, str]:
    """Build the environment inside from an allowlist.

    PATH holds the exposed programs, then the folders of our own PATH that are visible inside, then the interpreter's.
    """
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
    """Yield the folders with programs among the exposed paths."""
    for path in exposed:
        if Path(path, "bin").is_dir():
            yield f"{path}/bin"
        elif Path(path).is_file():
            yield os.path.dirname(path)  # noqa: PTH120


def find_system_program(name: str) -> str | None:
    """Return the path of a system program. Does not search the user's own folders."""
    return shutil.which(name, path="/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")


# Files to cover inside the visible folders


def find_git_secrets(folders: Sequence[str], hidden: str) -> list[str]:
    """Return the git files below these folders that can hold a token, such as one in a remote's URL.

    Searches the repositories, their submodules and worktrees, and repositories a few levels below. Skips the folders
    of runs, which are below `hidden`: their git config holds no token."""
    users = [folder for folder in folders if not folder.startswith(f"{hidden}/")]
    places = [Path(git, name) for folder in users for git in _find_git_folders(folder, hidden) for name in _GIT_SECRETS]
    return [str(path) for path in places if path.is_file() and not path.parent.is_symlink()]


def _find_git_folders(folder: str, hidden: str) -> Iterator[str]:
    """Yield the git folders at and below a folder, regardless of their names. Reads at most MAX_LOOKED_AT folders."""
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
            if in_git or name == GIT_FOLDER:  # holds the repositories of submodules and worktrees
                waiting.appendleft((below, depth + 1))
            elif depth < DEEPEST:
                waiting.append((below, depth + 1))


def find_bound_sockets(folders: Sequence[str], hidden: str) -> list[str]:
    """Return the bound unix sockets below these folders, except those below `hidden`.

    `folders` must be real paths. A socket bound by a relative path is searched in the folders themselves. Sockets that
    are created later, or in another network namespace, are not found."""
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
    """Return the first free id and the number of free ids. A container with fewer ids uses the upper half of them."""
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
    """Make the run the owner of the files it writes, and let its group read the tree's files. Skips shared folders."""
    uid, gid = user
    for folder in (box.outputs, *([box.workspace] if box.own_workspace else [])):
        give_folder(folder, uid, gid)
    if box.proxy:
        os.chown(box.proxy, uid, gid, follow_symlinks=False)
    os.chown(box.host_outputs, 0, gid)
    Path(box.host_outputs).chmod(0o750)
    for folder in (path for path in (*box.readable, box.workspace) if path.startswith(f"{box.hidden}/")):
        with suppress(NotADirectoryError):  # a granted file keeps its mode
            fd = open_real_folder(folder)
            try:
                about = os.fstat(fd)
                if about.st_uid == 0 and about.st_gid != gid:  # of an ancestor that has not started its own sandbox
                    give_folder(fd, -1, gid)
            finally:
                os.close(fd)
