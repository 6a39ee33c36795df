"""The bubblewrap sandbox: separate namespaces, a file system with only the listed paths, no network, no capabilities.

A run that may use the whole network keeps the host's network namespace, and its protections do not include `net`. If
an ordinary user starts bubblewrap, it creates a user namespace with the caller's uid. If root starts bubblewrap, it
creates none. Instead the tool server switches to a uid that nobody else has and to the tree's gid, and drops every
capability, before it reads anything of the run. To drop capabilities but stay uid 0 would protect nothing.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import msgspec

from retinue.files.content import write_all
from retinue.sandbox import cgroups, seccomp
from retinue.sandbox.box import Box
from retinue.sandbox.builder import (
    BOOT,
    LIBRARY,
    SERVE,
    SHARED_BYTES,
    SYSTEM,
    TEMPORARY_BYTES,
    SandboxBuilder,
    SandboxUnavailable,
    SelfCheck,
    find_python,
    find_system_program,
    list_interpreter_folders,
    list_packages,
    make_environment,
    make_probe_box,
)
from retinue.sandbox.hints import find_program_hint
from retinue.sandbox.process import PreparedSandbox

PROBE_SECONDS = 20.0
MASK_BYTES = 4096
# The parts of /etc that programs need to find libraries, names and certificates; no data of users or services.
ETC = (
    "alternatives", "ca-certificates", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "mime.types",
    "pki/tls/certs", "protocols", "services", "ssl/certs", "ssl/openssl.cnf", "terminfo", "timezone",
)  # fmt: skip
RESOLVING = ("resolv.conf", "gai.conf")  # only with the whole network
_JOIN = 'echo 0 > "$1" && echo 0 > "$2" && shift 2 && exec "$@"'
_SYSCTLS = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
)
# Words of bubblewrap's error output: no code exists.
_MARKS = ("permission", "permitted", "namespace", "uid map", "mount proc")
_NAMESPACES = (
    "--die-with-parent", "--new-session", "--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try",
    "--hostname", "retinue",
)  # fmt: skip
_FINAL_OPTIONS = ("--remount-ro", "/dev", "--remount-ro", "/", "--cap-drop", "ALL")
_SETPRIV_CAPABILITIES = ("--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--cap-add", "CAP_SETPCAP")
_TMPFS = "--tmpfs"


class Bubblewrap(SandboxBuilder):
    """The builder of `isolated` sandboxes, created by `probe_bubblewrap`.

    `prefix` is put before every command that starts a sandbox."""

    name = "isolated"
    find_hint = staticmethod(find_program_hint)

    def __init__(
        self, program: str, *, prefix: Sequence[str] = (), expose: Sequence[str] = (), full_network: bool = False
    ) -> None:
        super().__init__(expose=expose, full_network=full_network)
        self._launch = [*prefix, program]
        self._groups = cgroups.find_parent_groups() if os.geteuid() == 0 else None
        self.counts_memory = self._groups is not None
        self._filter = seccomp.make_filter()

    def prepare(self, box: Box, command: Sequence[str] = ()) -> PreparedSandbox:
        """Return a PreparedSandbox that starts the tool server, or `command` instead."""
        user = self._give_to_user(box)
        mounts = _order_mounts(self._list_mounts(box))
        visible = (*list_interpreter_folders(), *box.readable, box.workspace)
        env = make_environment(box, visible, self._expose)
        fds: list[int] = []
        options = [*_NAMESPACES]
        if not self._full_network:
            options.append("--unshare-net")
        if user is None:
            options.append("--unshare-user")
        options += mounts
        with ExitStack() as undo:
            group = None if self._groups is None else cgroups.make_group(self._groups, box.resource_limits)
            if group is not None:
                undo.callback(group.remove)
            for name, text in self._make_etc_files(box, user).items():
                fds.append(_open_data(text.encode(), undo))
                options += ["--perms", "0444", "--ro-bind-data", str(fds[-1]), f"/etc/{name}"]
            options += _FINAL_OPTIONS
            if user is not None:
                options += _SETPRIV_CAPABILITIES
            if self._filter is not None:
                fds.append(_open_data(self._filter, undo))
                options += ["--seccomp", str(fds[-1])]
            # Not a pipe: if we die, a broken pipe ends bubblewrap halfway and leaves half a sandbox.
            fds.append(_open_data(b"", undo))
            options += ["--info-fd", str(fds[-1])]
            info = os.dup(fds[-1])
            undo.callback(os.close, info)
            # Not on the command line, which every process inside can read: it names paths of this machine.
            fds.append(_open_data(b"\0".join(map(os.fsencode, options)), undo))
            undo.pop_all()
        argv = [
            # In cgroup v2 both files are the same.
            *([] if group is None else ["/bin/sh", "-c", _JOIN, "sh", group.procs[0], group.procs[-1]]),
            *self._launch,
            *["--args", str(fds[-1]), "--"],
            *([] if user is None else _make_setpriv_command(user)),
            *(command or [find_python(), "-I", "-S", "-c", BOOT + SERVE]),
        ]
        return PreparedSandbox(argv, env, fds=fds, info=info, group=group, user=user)

    def _make_etc_files(self, box: Box, user: tuple[int, int] | None) -> dict[str, str]:
        uid, gid = user or (os.getuid(), os.getgid())
        home = box.workspace if box.own_workspace else "/tmp"
        return {
            "passwd": f"root:x:0:0:root:/:/bin/sh\nagent:x:{uid}:{gid}:agent:{home}:/bin/sh\n",
            "group": f"root:x:0:\nagent:x:{gid}:\n",
            "hosts": "127.0.0.1 localhost\n::1 localhost\n",
            "nsswitch.conf": f"passwd: files\ngroup: files\nhosts: files{' dns' if self._full_network else ''}\n",
        }

    def _list_mounts(self, box: Box) -> dict[str, list[str]]:
        """Return the bubblewrap options of each mount, keyed by its path inside."""
        mounts = {"/usr": ["--ro-bind", "/usr", "/usr"]}
        for system in map(Path, SYSTEM):
            path = str(system)
            if system.is_symlink():
                mounts[path] = ["--symlink", str(system.readlink()), path]
            elif system.exists():
                mounts[path] = ["--ro-bind", path, path]
        for name in (*ETC, *(RESOLVING if self._full_network else ())):
            mounts[f"/etc/{name}"] = ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        mounts["/proc"] = ["--proc", "/proc"]
        mounts["/dev"] = ["--dev", "/dev"]
        mounts["/dev/shm"] = ["--perms", "1777", "--size", str(SHARED_BYTES), _TMPFS, "/dev/shm"]
        mounts["/tmp"] = ["--perms", "1777", "--size", str(TEMPORARY_BYTES), _TMPFS, "/tmp"]
        mounts |= {path: ["--ro-bind", path, path] for path in list_interpreter_folders()}
        for path, bind in self._list_binds(box).items():
            mounts[path] = ["--bind" if bind.writable else "--ro-bind", bind.source, path]
        for mask in self._list_masks(box):
            mounts[mask] = ["--perms", "0755", "--size", str(MASK_BYTES), _TMPFS, mask]
        return mounts

    def check_protections(self) -> None:
        """Run the self-check inside a sandbox and set `protections`. Raises SandboxUnavailable if one does not work."""
        with make_probe_box() as (box, secret):
            program = f"{LIBRARY}/retinue/sandbox/self_check.py"
            prepared = self.prepare(box, [find_python(), "-I", "-S", program, secret, box.host_outputs])
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
                if prepared.group is not None:
                    prepared.group.remove_soon()
                prepared.discard()
        if done.returncode:
            raise SandboxUnavailable(_explain_failure(done.stderr.decode("utf-8", "replace")))
        try:
            seen = msgspec.json.decode(done.stdout, type=SelfCheck)
        except msgspec.MsgspecError:
            raise SandboxUnavailable("the check inside bubblewrap printed something that cannot be read") from None
        first = ["uid" if prepared.user else "user"]
        self._set_protections(seen, prepared.user, program="bubblewrap", first=first, missing=())


@cache
def probe_bubblewrap(
    *, prefix: tuple[str, ...] = (), expose: tuple[str, ...] = (), full_network: bool = False
) -> Bubblewrap:
    """Return a builder after a self-check inside a sandbox. Runs once per process.

    Raises SandboxUnavailable with the package to install or the setting to change."""
    if platform.system() != "Linux":
        raise SandboxUnavailable("bubblewrap needs Linux")
    program = find_system_program("bwrap")
    if program is None:
        raise SandboxUnavailable("bubblewrap is not installed: apt-get install bubblewrap (or dnf, pacman, zypper)")
    if os.geteuid() == 0 and find_system_program("setpriv") is None:
        raise SandboxUnavailable("setpriv is not installed: apt-get install util-linux")
    builder = Bubblewrap(program, prefix=prefix, expose=expose, full_network=full_network)
    builder.check_protections()
    return builder


def _order_mounts(mounts: dict[str, list[str]]) -> list[str]:
    """Return the options of all mounts, parents before children. Every user can pass through the folders in between."""
    paths = set(mounts)
    for path in mounts:
        for folder in map(str, Path(path).parents):
            if folder == "/" or (folder in mounts and _TMPFS not in mounts[folder]):
                break  # a bind mount brings its own subfolders
            paths.add(folder)
    options: list[str] = []
    for path in sorted(paths):
        options += mounts.get(path) or ["--perms", "0755", "--dir", path]
    return options


def _make_setpriv_command(user: tuple[int, int]) -> list[str]:
    """Return the command prefix that switches to the run's user irrevocably."""
    program = find_system_program("setpriv") or "setpriv"
    uid, gid = map(str, user)
    return [program, "--reuid", uid, "--regid", gid, "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]


def _open_data(data: bytes, undo: ExitStack) -> int:
    """Return a descriptor from which `data` can be read, with no limit of its size. `undo` closes it."""
    fd = os.memfd_create("data")
    undo.callback(os.close, fd)
    write_all(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _explain_failure(said: str) -> str:
    """Return bubblewrap's error output in one line, with advice on how to fix the problem."""
    line = " ".join(said.split())[:300]
    text = f"bubblewrap does not work here: {line or 'it said nothing'}"
    # From Python, about the program of the self-check. A traceback of that program names it too.
    is_closed = f"can't open file '{LIBRARY}/" in said and "Permission denied" in said
    if is_closed and os.geteuid() == 0:  # only root's sandboxes have a user of their own
        [folder] = [source for source, name in list_packages() if name == "retinue"]
        return f"{text}; the user of a sandbox must be able to read retinue itself: chmod -R o+rX {folder}"
    if not any(mark in line.lower() for mark in _MARKS):
        return text
    if os.geteuid() == 0:
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
