"""The bubblewrap sandbox: namespaces of its own, a file system of what was named, no network, no capability.

A run that may use the whole network keeps the host's network namespace; then `net` is not among its protections.
Started by an ordinary user, bubblewrap makes a user namespace with the caller's own uid. Started by root it makes none:
inside, before anything of the run is read, the tool server becomes a uid that nobody else has, with the tree's gid and
every capability gone. Capabilities dropped under uid 0 alone would protect nothing."""

from __future__ import annotations

import os
import platform
import secrets
import stat
import subprocess
import zlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from retinue.core.limits import Caps
from retinue.sandbox import cgroups, seccomp
from retinue.sandbox.box import (
    FULL_NETWORK,
    LIBRARY,
    PROXY,
    STATE,
    Box,
    Mounts,
    PreparedSandbox,
    SandboxUnavailable,
    find_command,
    find_python,
    list_interpreter_folders,
    list_packages,
    make_environment,
    tool_server_command,
)
from retinue.sandbox.self_check import CHECK_CODE, PRINT_CODE, SelfCheck, find_missing_protections
from retinue.sandbox.unix_sockets import COVER, find_bound_sockets

PROBE_SECONDS = 20.0
TEMPORARY_BYTES = 512 * 1024**2
SHARED_BYTES = 64 * 1024**2
MASK_BYTES = 4096
# Of /etc, what programs need to find libraries, names and certificates; never what belongs to users or services.
ETC = (
    "alternatives", "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "pki/tls/certs", "protocols", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
RESOLVING = ("resolv.conf", "gai.conf")  # with the whole network only
SYSTEM = ("bin", "sbin", "lib", "lib32", "lib64", "libx32")
FREE_UIDS = (1_879_048_192, 2**28)  # a range that no distribution and no container tool gives away
_JOIN = 'echo 0 > "$1" && echo 0 > "$2" && shift 2 && exec "$@"'
_SYSCTLS = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
)
_MARKS = ("permission", "permitted", "namespace", "uid map", "mount proc")


class Bubblewrap:
    """A builder of sandboxes. `probe` alone makes it, so that `protections` were all seen to work from inside."""

    def __init__(
        self, program: str, *, expose: Sequence[str] = (), prefix: Sequence[str] = (), full_network: bool = False
    ) -> None:
        self._launch = [*prefix, program]
        self._full_network = full_network
        self._expose = tuple(os.path.realpath(path) for path in expose if Path(path).exists())
        if "/" in self._expose:
            raise SandboxUnavailable("the folder / cannot be shown in a sandbox: it has everything in it")
        self._root = os.geteuid() == 0
        self._groups = cgroups.find_parent_groups() if self._root else None
        self._filter = seccomp.make_filter()
        self.protections: tuple[str, ...] = ()

    @property
    def counts_memory(self) -> bool:
        return self._groups is not None

    def prepare(self, box: Box, inside: Sequence[str] = ()) -> PreparedSandbox:
        """Return how to start the tool server, or another command in its place."""
        user = box.user or pick_user(box.tree) if self._root else None
        if user is not None:
            give_files(box, user)
        group = None if self._groups is None else cgroups.make_group(self._groups, box.caps)
        return self._prepare_start(box, user, group, inside or tool_server_command())

    def _prepare_start(
        self, box: Box, user: tuple[int, int] | None, group: cgroups.Group | None, inside: Sequence[str]
    ) -> PreparedSandbox:
        uid, gid = user or (os.getuid(), os.getgid())
        home = box.workspace if box.own_workspace else "/tmp"
        fds = [
            _write_to_pipe(f"root:x:0:0:root:/:/bin/sh\nagent:x:{uid}:{gid}:agent:{home}:/bin/sh\n".encode()),
            _write_to_pipe(f"root:x:0:\nagent:x:{gid}:\n".encode()),
            _write_to_pipe(b"127.0.0.1 localhost\n::1 localhost\n"),
            _write_to_pipe(
                f"passwd: files\ngroup: files\nhosts: files{' dns' if self._full_network else ''}\n".encode()
            ),
        ]
        made = [_mount_file(fd, f"/etc/{name}") for fd, name in zip(fds, _ETC_FILES, strict=True)]
        filtered = []
        if self._filter is not None:
            fds.append(_write_to_pipe(self._filter))
            filtered = ["--seccomp", str(fds[-1])]
        fds.append(os.memfd_create("info"))  # a pipe without us would end bubblewrap half way, and leave the other half
        argv = [
            *([] if group is None else ["/bin/sh", "-c", _JOIN, "sh", *_pick_procs_files(group.procs)]),
            *self._launch,
            *_NAMESPACES,
            *([] if self._full_network else ["--unshare-net"]),
            *(["--unshare-user"] if user is None else []),
            *self._list_mounts(box),
            *[argument for arguments in made for argument in arguments],
            *_FINAL_OPTIONS,
            *([] if user is None else _SETPRIV_CAPABILITIES),
            *filtered,
            *["--info-fd", str(fds[-1]), "--"],
            *([] if user is None else _make_setpriv_command(user)),
            *inside,
        ]
        visible = (*list_interpreter_folders(), *box.readable, box.workspace)
        return PreparedSandbox(
            argv, make_environment(box, os.environ, visible, self._expose), fds, os.dup(fds[-1]), group, user
        )

    def _list_mounts(self, box: Box) -> list[str]:
        mounts = Mounts()
        mounts.add("/usr", "--ro-bind", "/usr", "/usr")
        for name in SYSTEM:
            system = Path("/", name)
            if system.is_symlink():
                mounts.add(str(system), "--symlink", str(system.readlink()), str(system))
            elif system.exists():
                mounts.add(str(system), "--ro-bind", str(system), str(system))
        for name in (*ETC, *(RESOLVING if self._full_network else ())):
            mounts.add(f"/etc/{name}", "--ro-bind-try", f"/etc/{name}", f"/etc/{name}")
        mounts.add("/proc", "--proc", "/proc")
        mounts.add("/dev", "--dev", "/dev")
        mounts.add("/dev/shm", "--perms", "1777", "--size", str(SHARED_BYTES), "--tmpfs", "/dev/shm")
        mounts.add("/tmp", "--perms", "1777", "--size", str(TEMPORARY_BYTES), "--tmpfs", "/tmp")
        for path in (*list_interpreter_folders(), *self._expose):
            mounts.add(path, "--ro-bind", path, path)
        for source, name in list_packages():
            mounts.add(f"{LIBRARY}/{name}", "--ro-bind", source, f"{LIBRARY}/{name}")
        roots = (*box.objects, *box.readable, box.workspace)
        for path in roots:
            if path == "/":
                raise SandboxUnavailable("the folder / cannot be shown in a sandbox: it has everything in it")
            mounts.add(path, "--ro-bind", path, path)
        self._cover_hidden_paths(mounts, box, roots)
        if box.own_workspace:
            mounts.add(box.workspace, "--bind", box.workspace, box.workspace)
        mounts.add(box.outputs, "--bind", box.outputs, box.outputs)
        mounts.add(box.lent, "--ro-bind", box.lent, box.lent)
        if box.proxy:
            mounts.add(PROXY, "--ro-bind", box.proxy, PROXY)
        return mounts.list_arguments()

    def _cover_hidden_paths(self, mounts: Mounts, box: Box, roots: Sequence[str]) -> None:
        """Cover what is hidden in the folders that are shown: our state, and sockets that somebody listens on."""
        shown = (*self._expose, *roots)
        for mask in {box.hidden, *(f"{path}/{STATE}" for path in shown)}.difference(roots):
            if Path(mask).is_dir() and any(f"{mask}/".startswith(f"{path}/") for path in shown):
                mounts.add(mask, "--perms", "0755", "--size", str(MASK_BYTES), "--tmpfs", mask)
        for path in find_bound_sockets(shown, box.hidden):
            mounts.add(path, "--ro-bind", COVER, path)

    def check_protections(self, box: Box, secret: str) -> None:
        """Look from inside; raises SandboxUnavailable unless all works. `secret` must not be seen there."""
        user = pick_user(box.tree) if self._root else None
        if user is not None:
            give_files(box, user)
        try:
            group = None if self._groups is None else cgroups.make_group(self._groups, box.caps)
        except OSError:
            group = self._groups = None
        try:
            prepared = self._prepare_start(
                box, user, group, [find_python(), "-I", "-S", "-c", CHECK_CODE + PRINT_CODE, secret]
            )
            seen = _run_self_check(prepared, root=self._root)
        finally:
            if group is not None:
                group.remove_soon()
        trouble = find_missing_protections(seen, user=user, full_network=self._full_network)
        if trouble:
            raise SandboxUnavailable(
                f"bubblewrap started, but these protections do not work here: {', '.join(trouble)}"
            )
        net = FULL_NETWORK if self._full_network else "net"
        protections = ["uid" if user else "user", "pid", "mount", net, "ipc", "caps", "no_new_privs"]
        protections += ["seccomp"] if seen.seccomp == "2" else []
        self.protections = (*protections, *(["cgroup"] if group is not None else []), "rlimits")


_PROBED: dict[tuple[object, ...], Bubblewrap] = {}
_ETC_FILES = ("passwd", "group", "hosts", "nsswitch.conf")
_NAMESPACES = (
    "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--hostname", "retinue",
)  # fmt: skip
_FINAL_OPTIONS = ("--remount-ro", "/dev", "--remount-ro", "/", "--cap-drop", "ALL")
_SETPRIV_CAPABILITIES = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP")


def probe(
    folder: Path,
    *,
    expose: Sequence[str] = (),
    prefix: Sequence[str] = (),
    caps: Caps | None = None,
    full_network: bool = False,
) -> Bubblewrap:
    """Return the builder, checked from inside, once in a process. Raises SandboxUnavailable, which says what to install
    or set. `folder` is a new one for the check; `prefix` comes before every command that starts a sandbox."""
    key = (tuple(expose), tuple(prefix), full_network)
    if key in _PROBED:
        return _PROBED[key]
    if platform.system() != "Linux":
        raise SandboxUnavailable("bubblewrap needs Linux")
    program = find_command("bwrap")
    if program is None:
        raise SandboxUnavailable("bubblewrap is not installed: apt-get install bubblewrap (or dnf, pacman, zypper)")
    if os.geteuid() == 0 and find_command("setpriv") is None:
        raise SandboxUnavailable("setpriv is not installed: apt-get install util-linux")
    builder = Bubblewrap(program, expose=expose, prefix=prefix, full_network=full_network)
    if builder._groups is not None:
        cgroups.remove_leftover_groups(builder._groups)
    places = [folder / name for name in ("workspace", "outputs", "lent", "hidden")]
    for place in places:
        place.mkdir(parents=True)
    workspace, outputs, lent, hidden = map(str, places)
    box = Box("probe", workspace, True, outputs, lent, (), hidden, caps or Caps())
    builder.check_protections(box, hidden)
    _PROBED[key] = builder
    return builder


def _run_self_check(prepared: PreparedSandbox, *, root: bool) -> SelfCheck:
    try:
        done = subprocess.run(
            prepared.argv,
            env=dict(prepared.env),
            pass_fds=prepared.fds,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"bubblewrap cannot be started: {error}") from None
    finally:
        prepared.discard()
    if done.returncode:
        raise SandboxUnavailable(_explain_failure(done.stderr.decode("utf-8", "replace"), root=root))
    try:
        return msgspec.json.decode(done.stdout, type=SelfCheck)
    except msgspec.MsgspecError:
        raise SandboxUnavailable("what runs behind bubblewrap here cannot be read") from None


def pick_user(tree: str) -> tuple[int, int]:
    """Pick a uid for one run and the gid of its tree, from numbers this machine gives to nobody."""
    first, count = _find_free_ids()
    return first + secrets.randbelow(count), first + zlib.crc32(tree.encode()) % count


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
        _give_folder(folder, uid, gid)
    if box.proxy:
        os.chown(box.proxy, uid, gid, follow_symlinks=False)
    os.chown(box.lent, 0, gid)
    Path(box.lent).chmod(0o750)
    for folder in (path for path in box.readable if path.startswith(f"{box.hidden}/")):
        about = Path(folder).stat()
        if about.st_uid == 0 and about.st_gid != gid:  # of a run above that has started no sandbox of its own
            _give_folder(folder, -1, gid)


def _give_folder(folder: str, uid: int, gid: int) -> None:
    """Give a folder with all it holds to a user (-1: leave the owner) and to the tree's group, for reading. The folder
    itself comes last: its group says that all is done."""
    for _, _, files, at in os.fwalk(folder, topdown=False):
        os.fchown(at, uid, gid)
        os.fchmod(at, stat.S_IMODE(os.fstat(at).st_mode) | 0o050)
        for name in files:
            _give_file(name, at, uid, gid)


def _give_file(name: str, folder: int, uid: int, gid: int) -> None:
    """Give a file to the run, and to its tree for reading. What is no plain file has no content of its own."""
    os.chown(name, uid, gid, dir_fd=folder, follow_symlinks=False)
    mode = os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode
    if stat.S_ISREG(mode):
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            Path(f"/proc/self/fd/{fd}").chmod(stat.S_IMODE(mode) | 0o040 | (mode & 0o100) >> 3)
        finally:
            os.close(fd)


def _make_setpriv_command(user: tuple[int, int]) -> list[str]:
    """Return the command that becomes the run's own user, for good."""
    program = find_command("setpriv") or "setpriv"
    uid, gid = map(str, user)
    return [program, "--reuid", uid, "--regid", gid, "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]


def _mount_file(fd: int, path: str) -> list[str]:
    return ["--perms", "0444", "--ro-bind-data", str(fd), path]


def _write_to_pipe(data: bytes) -> int:
    reading, writing = os.pipe()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(data)
    return reading


def _pick_procs_files(procs: Sequence[str]) -> list[str]:
    """Return the files to write to: in the new hierarchy both are one."""
    return [procs[0], procs[-1]]


def _explain_failure(said: str, *, root: bool) -> str:
    """Return what bubblewrap said, in one line, and what to do about it."""
    line = " ".join(said.split())[:300]
    text = f"bubblewrap does not work here: {line or 'it said nothing'}"
    if not any(mark in line.lower() for mark in _MARKS):
        return text
    if root:
        return (
            f"{text}; root needs CAP_SYS_ADMIN here (docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined)"
        )
    settings = [advice for name, bad, advice in _SYSCTLS if _read_sysctl(name) == bad]
    return (
        f"{text}; user namespaces are closed here: {' and '.join(settings) or 'ask for unprivileged user namespaces'}"
    )


def _read_sysctl(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""
