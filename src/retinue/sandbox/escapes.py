"""Attempts to escape from a sandbox: shell commands, targets planted for them, and a model that runs the commands.

Each attempt is a shell command for a sandboxed run, which prints ESCAPED if it succeeds. This module makes no attempt
itself: `retinue doctor --escape` and the tests give the model to a run in the sandbox. Sandboxes of root and of other
users differ, so root tries both: `run_as_user` runs a command as an ordinary user.

A successful attempt does no harm: it only looks, opens files without writing, or touches planted targets, and its use
of resources is limited. Still, no attempt runs without a sandbox: `SANDBOXED` is the first command, and the others run
only if it confirms from inside that the sandbox works.

The run may reach two hosts through its proxy: `{local_host}`, which resolves to this machine, and `{remote_host}`.
`{secret}` is a file of another run, `{home}` a file in the user's home, `{state}` our own state in the project, `{pid}`
a process of the host, `{port}`, `{socket}` and `{abstract}` listening sockets of the host, `{namespaces}` the
namespaces of the host. The name of a system call in braces stands for its number.
"""

from __future__ import annotations

import os
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from retinue.core.limits import MIB, ResourceLimits
from retinue.core.messages import Call, Reply
from retinue.core.profiles import RuntimeName
from retinue.files.state_owner import claim_state_folder
from retinue.processes.group import run_program
from retinue.sandbox import seccomp
from retinue.sandbox.builder import find_python
from retinue.sandbox.container_image import PYTHON

TRY_SECONDS = 15
RESOURCE_LIMITS = ResourceLimits(memory=1024 * MIB, processes=64, file_bytes=16 * MIB, workspace_bytes=64 * MIB)
MARK = "ESCAPED"
STANDS = "THE SANDBOX STANDS"
SANDBOXED = (
    'for n in {namespaces}; do test "$(readlink /proc/self/ns/${n%%:*})" != "$n" || exit 1; done; '
    "test ! -e {secret} && test ! -e {home} && test $(grep -c : /proc/net/dev) = 1 && test $(id -u) != 0 && "
    "grep -q 'NoNewPrivs:.1' /proc/self/status && grep -q 'CapBnd:.0000000000000000' /proc/self/status && "
    "grep -q 'Seccomp:.2' /proc/self/status && {python} -I -S -c 'import ctypes' && "
    'test -n "$HTTP_PROXY" && echo {stands}'
)
SOCKETS = "{python} -I -S -c 'import socket; "
ASKS = (  # sends each argument, a CONNECT or GET line, to the proxy
    '{python} -I -S -c \'import os, socket, sys\nh, p = os.environ["HTTP_PROXY"][7:].split(":")\n'
    "for ask in sys.argv[1:]:\n s = socket.create_connection((h, int(p)), 5)\n"
    ' s.sendall(ask.encode() + b" HTTP/1.1\\r\\n\\r\\n")\n r = s.recv(4096)\n'
    ' print("ESCAPED" if b" 200 " in r[:13] else r)\' '
)
CALLS = "{python} -I -S -c 'import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); "
TRIES = {
    # files
    "a file of another run": "cat {secret} && echo ESCAPED",
    "a file in the home folder": "cat {home} && echo ESCAPED",
    "our own state in the project": "cat {state} && echo ESCAPED",
    "the host's passwords": "test -r /etc/shadow && echo ESCAPED",
    "the root of the first process": "ls /proc/1/root/{home} && echo ESCAPED",
    "the root of the host's process": "cat /proc/{pid}/root{home} && echo ESCAPED",
    "the folder of the parent process": "cat /proc/$PPID/root/{secret} && echo ESCAPED",
    "a symlink": "ln -s {secret} link; cat link && echo ESCAPED",
    "a hard link": "ln {secret} hard && echo ESCAPED",
    "a path upwards": "cat ../../../../../../../..{secret} && echo ESCAPED",
    "the environment of others": "cat /proc/*/environ | tr '\\0' '\\n' | grep PLANTED && echo ESCAPED",
    "the project's files, to write": ": >> {project}/notes.txt && echo ESCAPED",
    "new files in the project": "touch {project}/new && echo ESCAPED",
    "the program of the tool server": ": >> /retinue/retinue/__init__.py && echo ESCAPED",
    "the system's programs": ": >> /usr/bin/env && echo ESCAPED",
    "the disk itself": "for d in /dev/vda /dev/sda /dev/nvme0n1; do head -c 1 $d && echo ESCAPED; done",
    "a device of our own": "mknod null c 1 3 && echo ESCAPED",
    "descriptors that were left open": "for f in /proc/self/fd/*; do readlink $f | grep -v -e ^/dev -e ^/proc "
    "-e ^pipe && echo ESCAPED; done",
    "the root by its own link": "cat /proc/self/root{home} /proc/self/cwd/../../../../../../..{home} && echo ESCAPED",
    "the memory of the machine": "for f in /dev/mem /dev/kmem /proc/kcore; do test $(head -c 1 $f | wc -c) = 1 && "
    "echo ESCAPED; done",
    "the machine's switches": ": >> /proc/sysrq-trigger && echo ESCAPED",
    "programs the kernel starts": "for f in /sys/kernel/uevent_helper $(find /sys/fs/cgroup -name release_agent "
    "2>/dev/null); do : >> $f && echo ESCAPED; done",
    "a link that is swapped while it is read": "for i in 1 2 3 4 5 6 7 8 9; do ln -sfn . swap; "
    "(ln -sfn $(dirname {secret}) swap &) ; cat swap/secret && echo ESCAPED; done",
    "a folder that is swapped by renaming": "mkdir -p one; ln -sfn $(dirname {secret}) two; for i in 1 2 3 4 5 6 7 "
    "8 9; do "
    "(mv -T one three; mv -T two one; mv -T one two; mv -T three one) & cat one/secret && echo ESCAPED; wait; done",
    "protected files that are not there yet": "for f in retinue.yaml .mcp.json .git/config .git/hooks/pre-commit; do "
    "mkdir -p {project}/.git/hooks; : >> {project}/$f && echo ESCAPED; done",
    # privileges and namespaces
    "a user namespace": "unshare -U true && echo ESCAPED",
    "a mount namespace": "unshare -Urm true && echo ESCAPED",
    "a namespace by clone": CALLS + "p = libc.syscall({clone}, 0x10000000 | 17, 0, 0, 0, 0)\n"
    'print("ESCAPED") if p > 0 else os._exit(0)\'',
    "a namespace by clone3": CALLS + "b = (ctypes.c_uint64 * 11)(); b[0] = 0x10000000; "
    "b[4] = 17\np = libc.syscall({clone3}, b, 88)\nprint(\"ESCAPED\") if p > 0 else os._exit(0)'",
    "the namespaces of others": "nsenter -t 1 -m true && echo ESCAPED",
    "a mount": "mkdir m; mount -t tmpfs none m && echo ESCAPED; umount m 2>/dev/null",
    "to make the project writable": "mount -o remount,rw,bind {project} && echo ESCAPED",
    "another root": "chroot / true && echo ESCAPED",
    "root by setuid": "{python} -I -S -c 'import os; os.setuid(0); print(\"ESCAPED\")'",
    "root by a program": "cp /bin/true true; chown 0 true && echo ESCAPED",
    "capabilities": "test $(grep CapEff /proc/self/status | cut -f2) = 0000000000000000 || echo ESCAPED",
    "the kernel's settings": ": >> /proc/sys/kernel/core_pattern && echo ESCAPED",
    "control groups": "find / -xdev -name cgroup.procs 2>/dev/null | grep . && echo ESCAPED",
    "a namespace inside a namespace": "unshare -Ur unshare -m true && echo ESCAPED; unshare -pf true && echo ESCAPED",
    "a program that is root's": "for p in su sudo newgrp mount; do test -u $(command -v $p) && "
    "$p -c 'id -u' < /dev/null | grep -x 0 && echo ESCAPED; done",
    "a file by its handle": CALLS + "b = (ctypes.c_char * 128)(); "
    "print(\"ESCAPED\") if libc.syscall({open_by_handle_at}, 3, b, 0) >= 0 or ctypes.get_errno() not in (1, 38) "
    "else 0'",
    # processes
    "to see the host's processes": "ls /proc/{pid}/cmdline && tr '\\0' ' ' < /proc/{pid}/cmdline | grep 987 && echo "
    "ESCAPED",
    "a signal to the host": "kill -9 {pid} && echo ESCAPED",
    "the memory of its own tool server": "for f in environ maps auxv; do head -c 1 /proc/$PPID/$f "
    ">/dev/null && echo ESCAPED; done; : >> /proc/$PPID/mem && echo ESCAPED",
    "ptrace": CALLS + "print(\"ESCAPED\") if libc.ptrace(0, 0, 0, 0) == 0 else 0'",
    "the keys of the session": CALLS + "print(\"ESCAPED\") if libc.syscall({keyctl}, 0, -3, 1) > 0 else 0'",
    "io_uring": CALLS + "b = (ctypes.c_char * 256)(); "
    "print(\"ESCAPED\") if libc.syscall({io_uring_setup}, 1, b) >= 0 else 0'",
    "words in the terminal": "{python} -I -S -c 'import fcntl; fcntl.ioctl(0, 0x5412, b\"x\"); print(\"ESCAPED\")'",
    "the controlling terminal": "exec 3<>/dev/tty && echo ESCAPED",
    "the memory of another process": CALLS + "b = (ctypes.c_char * 64)()\n"
    "print(\"ESCAPED\") if libc.syscall({process_vm_readv}, 1, b, 1, b, 1, 0) >= 0 or ctypes.get_errno() not in (1, "
    "38) else 0'",
    "a descriptor of another process": CALLS + "import os; p = os.pidfd_open(1); "
    "print(\"ESCAPED\") if libc.syscall({pidfd_getfd}, p, 0, 0) >= 0 else 0'",
    "a fork bomb": "{python} -I -S -c 'import os, select, signal\nmade = []\ntry:\n while len(made) < 400:\n  p = "
    "os.fork()\n"
    "  if p == 0: select.select([], [], [], 20); os._exit(0)\n  made.append(p)\nexcept OSError: pass\n"
    "for p in made: os.kill(p, signal.SIGKILL)\nprint(\"ESCAPED\" if len(made) == 400 else len(made))'",
    "a memory bomb": "{python} -I -S -c 'x = bytearray(3 * 1024**3 // 2); x[::4096] = b\"x\" * len(x[::4096]); "
    "print(\"ESCAPED\")'",
    "a file without end": "head -c 40000000 /dev/zero > big; test $(wc -c < big) -gt 17000000 && echo ESCAPED; rm big",
    "a full /tmp": "for i in $(seq 60); do head -c 15000000 /dev/zero > /tmp/f$i || break; test $i = 60 && echo "
    "ESCAPED; "
    "done; rm /tmp/f*",
    # the network
    "loopback": SOCKETS + "socket.create_connection((\"127.0.0.1\", {port}), 2); print(\"ESCAPED\")'",
    "an abstract socket": SOCKETS + "s = socket.socket(socket.AF_UNIX); "
    "s.connect(chr(0) + \"{abstract}\"); print(\"ESCAPED\")'",
    "the metadata address": SOCKETS + "socket.create_connection((\"169.254.169.254\", 80), 2); "
    "print(\"ESCAPED\")'",
    "names": SOCKETS + "socket.getaddrinfo(\"example.com\", 80); print(\"ESCAPED\")'",
    "a name server": SOCKETS + "s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
    "s.sendto(b\"x\", (\"8.8.8.8\", 53)); print(\"ESCAPED\")'",
    "sockets of the system": "ls /run/* /var/run/* 2>/dev/null | grep -i -e sock -e docker && echo ESCAPED",
    "raw packets": SOCKETS + "socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print(\"ESCAPED\")'",
    "netlink": SOCKETS + "socket.socket(socket.AF_NETLINK); print(\"ESCAPED\")'",
    "a unix socket of the host": SOCKETS + "s = socket.socket(socket.AF_UNIX); "
    "s.connect(\"{socket}\"); print(\"ESCAPED\")'",
    "the host through the proxy": ASKS + "'CONNECT 127.0.0.1:{port}' 'CONNECT [::1]:{port}' 'CONNECT localhost:{port}' "
    "'GET http://127.0.0.1:{port}/'",
    "the host by a name that is allowed": ASKS + "'CONNECT {local_host}:{port}' 'GET http://{local_host}:{port}/'",
    "the host by numbers in disguise": ASKS + "'CONNECT 2130706433:{port}' 'CONNECT 0x7f000001:{port}' "
    "'CONNECT 127.1:{port}' 'CONNECT [::ffff:127.0.0.1]:{port}' 'CONNECT 0177.0.0.1:{port}'",
    "metadata through the proxy": ASKS + "'GET http://169.254.169.254/latest/' 'CONNECT 169.254.169.254:80' "
    "'CONNECT [fd00:ec2::254]:80'",
    "hosts and ports that are not allowed": ASKS + "'CONNECT example.org:443' 'CONNECT 8.8.8.8:53' "
    "'CONNECT {remote_host}:22' 'GET http://{remote_host}:8080/'",
    "the socket of the proxy": SOCKETS + "s = socket.socket(socket.AF_UNIX); s.connect(\"/retinue/proxy\"); "
    "s.sendall(b\"CONNECT 127.0.0.1:{port} HTTP/1.1\\r\\n\\r\\n\"); r = s.recv(99); "
    "print(\"ESCAPED\" if b\" 200 \" in r[:13] else r)'",
    # last, because it ends the run
    "a full workspace": "for i in $(seq 12); do head -c 15000000 /dev/zero > f$i; done; sleep 9; echo ESCAPED",
}  # fmt: skip


def fill_command(command: str, values: Mapping[str, str]) -> str:
    """Fill in the placeholders of a command.

    Splits the mark in two halves, which the shell or Python joins, so that an error message with the command's text is
    not mistaken for an escape."""
    text = re.sub(r"\{(\w+)\}", lambda found: values.get(found[1]) or str(seccomp.find_call_number(found[1])), command)
    return text.replace(MARK, 'ESC""APED')


class CommandListModel:
    """A model that calls the shell with one command after another, but stops unless the first output is STANDS."""

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
            self.stands = self.said[0].strip() == STANDS
        if (request.turn > 1 and not self.stands) or request.turn > len(self.commands):
            return Reply("over")
        command = self.commands[request.turn - 1]
        return Reply("", (Call(f"c{request.turn}", "shell", {"command": command, "timeout": TRY_SECONDS}),))


class FakeNetwork:
    """A fake resolver and network for the run: `local_host` resolves to this machine, other names to a host that cannot
    be reached."""

    local_host, remote_host = "local.invalid", "remote.invalid"

    async def resolve(self, host: str, port: int) -> Sequence[str]:
        return [host if host[0] in "0123456789:" else "127.0.0.1" if host == self.local_host else "93.184.216.34"]

    async def connect(self, address: str, port: int, *, tls: str | None) -> Any:
        raise OSError(f"{address}:{port} is not there")


class Attempts:
    """All attempts against one sandbox. `folder` is the project of the run; `network` lists the hosts it may reach."""

    dialer = FakeNetwork()

    def __init__(self, folder: Path, values: dict[str, str], victim: subprocess.Popen[bytes]) -> None:
        self.folder = folder
        local_host = self.dialer.local_host
        self.network = [self.dialer.remote_host, f"{local_host}:{values['port']}", local_host]
        self._secret, self._victim = values["planted"], victim
        self.model = CommandListModel([fill_command(command, values) for command in (SANDBOXED, *TRIES.values())])

    def list_escapes(self, status: str) -> dict[str, bool | None]:
        """Return True for each attempt that escaped, None for an attempt without output. `status` is the run's final
        status."""
        said = dict(zip(TRIES, self.model.said[1:], strict=False))
        if len(said) == len(TRIES) - 1 and status == "limited":
            said[list(TRIES)[-1]] = ""  # this attempt fills the workspace, which rightly ends the run
        if self._victim.poll() is not None:
            said["a signal to the host"] = MARK
        out = {name: MARK in text or self._secret in text for name, text in said.items()}
        return {name: out.get(name) for name in TRIES}


@contextmanager
def plant_targets(runtime: RuntimeName) -> Iterator[Attempts]:
    """Create the files, sockets and process that the attempts target, and remove all of them afterwards."""
    secret = secrets.token_hex(8)
    with ExitStack() as stack:
        folder, home = (Path(tempfile.mkdtemp(prefix=f"retinue-{name}-")) for name in ("project", "home"))
        for made in (folder, home):
            stack.callback(shutil.rmtree, made, ignore_errors=True)
        folder.chmod(0o755)
        home.chmod(0o755)
        claim_state_folder(folder / ".retinue")  # otherwise the run would refuse this state folder
        (folder / ".retinue").chmod(0o755)  # so that only the sandbox protects it, not its mode
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
            "python": PYTHON if runtime == "container" else find_python(),
            "stands": STANDS,
            "local_host": FakeNetwork.local_host,
            "remote_host": FakeNetwork.remote_host,
            "namespaces": " ".join(
                str(Path("/proc/self/ns", name).readlink()) for name in ("pid", "mnt", "net", "ipc")
            ),
        }
        yield Attempts(folder, values, victim)


# An ordinary user, for attempts when we are root. The user has a name and a range of subordinate user ids for
# containers. This Python and this package are reachable even below folders that are closed to other users; such a
# folder shows only the paths that are needed.

USER_ID, USER_NAME = 23_456, "retinue-ordinary"
MORE_IDS = f"{USER_NAME}:1879048192:65536\n"
PACKAGE = Path(__file__).parents[2]
# The namespace ends every process that the command leaves behind (podman does), also after a timeout.
NAMESPACES = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]


def run_as_user(argv: Sequence[str], *, seconds: float, also: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command of root as an ordinary user, in mount and process namespaces of its own, with a new environment and
    a new home folder. `also` lists more folders the command must reach."""
    made = Path(tempfile.mkdtemp(prefix="retinue-user-"))
    made.chmod(0o755)
    home = made / "home"
    for folder in (home, home / "run"):
        folder.mkdir()
        os.chown(folder, USER_ID, USER_ID)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "TMPDIR": str(home), "HOME": str(home)}
    env |= {"LANG": "C.UTF-8", "XDG_RUNTIME_DIR": str(home / "run")}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path.startswith("/"))
    mounts = _list_mount_commands(made, {sys.prefix, sys.base_prefix, str(PACKAGE), *also})
    # No `exec`: the shell stays as process 1 and reaps orphans.
    script = "\n".join(["set -e", *mounts, '"$@" || exit $?', "exit 0"])
    leave = ["setpriv", "--reuid", str(USER_ID), "--regid", str(USER_ID), "--clear-groups", "--inh-caps=-all"]
    before = [*NAMESPACES, "/bin/sh", "-c", script, "sh", *leave]
    try:
        done = run_program([*before, *argv], cwd="/", env=env, seconds=seconds)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _list_mount_commands(made: Path, needed: set[str]) -> Iterator[str]:
    """Yield the shell commands that mount the user's files. They vanish with the last process of the namespace."""
    texts = {
        "passwd": Path("/etc/passwd").read_text() + f"{USER_NAME}:x:{USER_ID}:{USER_ID}::{made}/home:/bin/sh\n",
        "group": Path("/etc/group").read_text() + f"{USER_NAME}:x:{USER_ID}:\n",
        "subuid": MORE_IDS,
        "subgid": MORE_IDS,
    }
    for name, text in texts.items():
        if Path("/etc", name).exists():
            (made / name).write_text(text)
            yield f"mount --bind {made / name} /etc/{name}"
    hidden = sorted(path for path in needed if _find_closed_folder(path))
    for number, path in enumerate(hidden):
        (made / str(number)).mkdir()
        yield f"mount --rbind {shlex.quote(path)} {made / str(number)}"
    for folder in sorted({_find_closed_folder(path) for path in hidden}):
        yield f"mount -t tmpfs -o mode=755 none {shlex.quote(folder)}"
    for number, path in enumerate(hidden):
        if not any(path.startswith(f"{other}/") for other in hidden):
            yield f"mkdir -p {shlex.quote(path)}; mount --rbind {made / str(number)} {shlex.quote(path)}"


def _find_closed_folder(path: str) -> str:
    """Return the first folder on the way to `path` that other users may not enter, or ""."""
    return next((str(parent) for parent in reversed(Path(path).parents) if not parent.stat().st_mode & 1), "")
