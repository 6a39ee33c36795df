"""Ways out of a wall. Each is a command run by a walled run's shell; the one that gets out says ESCAPED.

None does harm where it succeeds: it looks, opens without writing, or touches only what the test has made. All the same
they are never run without walls: `escapes` refuses before the first one.

`{secret}` is a file of another run, `{home}` one in the user's home, `{door}` our own state in the project, `{pid}` a
process of the host, `{port}` and `{abstract}` where it listens, `{python}` an interpreter.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

from retinue.build import Parts, supervisor
from retinue.core.events import Delta, ToolResult
from retinue.core.profiles import Task
from retinue.runtime.walls.box import python
from tests.runtime.falls import fall
from tests.runtime.scenes import Facts, project
from tests.tree.kit import call, main

CTYPES = "import ctypes, os; libc = ctypes.CDLL(None, use_errno=True); "
TRIES = {
    # files
    "a file of another run": "cat {secret} && echo ESCAPED",
    "a file in the home folder": "cat {home} && echo ESCAPED",
    "our own state in the project": "cat {door} && echo ESCAPED",
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
    "the program of the worker": ": >> /retinue/retinue/__init__.py && echo ESCAPED",
    "the system's programs": ": >> /usr/bin/env && echo ESCAPED",
    "the disk itself": "for d in /dev/vda /dev/sda /dev/nvme0n1; do head -c 1 $d && echo ESCAPED; done",
    "a device of our own": "mknod null c 1 3 && echo ESCAPED",
    "descriptors that were left open": "for f in /proc/self/fd/*; do readlink $f | grep -v -e ^/dev -e ^/proc "
    "-e ^pipe && echo ESCAPED; done",
    # privileges and namespaces
    "a user namespace": "unshare -U true && echo ESCAPED",
    "a mount namespace": "unshare -Urm true && echo ESCAPED",
    "a namespace by clone": "{python} -I -S -c '" + CTYPES + "p = libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0)\n"
    'print("ESCAPED") if p > 0 else os._exit(0)\'',
    "a namespace by clone3": "{python} -I -S -c '" + CTYPES + "b = (ctypes.c_uint64 * 11)(); b[0] = 0x10000000; "
    "b[4] = 17\np = libc.syscall(435, b, 88)\nprint(\"ESCAPED\") if p > 0 else os._exit(0)'",
    "the namespaces of others": "nsenter -t 1 -m true && echo ESCAPED",
    "a mount": "mkdir m; mount -t tmpfs none m && echo ESCAPED; umount m 2>/dev/null",
    "to make the project writable": "mount -o remount,rw,bind {project} && echo ESCAPED",
    "another root": "chroot / true && echo ESCAPED",
    "root by setuid": "{python} -I -S -c 'import os; os.setuid(0); print(\"ESCAPED\")'",
    "root by a program": "cp /bin/true true; chown 0 true && echo ESCAPED",
    "capabilities": "test $(grep CapEff /proc/self/status | cut -f2) = 0000000000000000 || echo ESCAPED",
    "the kernel's settings": ": >> /proc/sys/kernel/core_pattern && echo ESCAPED",
    "control groups": "find / -xdev -name cgroup.procs 2>/dev/null | grep . && echo ESCAPED",
    # processes
    "to see the host's processes": "ls /proc/{pid}/cmdline && tr '\\0' ' ' < /proc/{pid}/cmdline | grep 987 && echo ESCAPED",
    "a signal to the host": "kill -9 {pid} && echo ESCAPED",
    "ptrace": "{python} -I -S -c '" + CTYPES + "print(\"ESCAPED\") if libc.ptrace(0, 0, 0, 0) == 0 else 0'",
    "the keys of the session": "{python} -I -S -c '" + CTYPES + "print(\"ESCAPED\") if libc.syscall(250, 0, -3, 1) > 0 else 0'",
    "io_uring": "{python} -I -S -c '" + CTYPES + "b = (ctypes.c_char * 256)(); "
    "print(\"ESCAPED\") if libc.syscall(425, 1, b) >= 0 else 0'",
    "words in the terminal": "{python} -I -S -c 'import fcntl; fcntl.ioctl(0, 0x5412, b\"x\"); print(\"ESCAPED\")'",
    "the controlling terminal": "exec 3<>/dev/tty && echo ESCAPED",
    # the network
    "loopback": "{python} -I -S -c 'import socket; socket.create_connection((\"127.0.0.1\", {port}), 2); print(\"ESCAPED\")'",
    "an abstract socket": "{python} -I -S -c 'import socket; s = socket.socket(socket.AF_UNIX); "
    "s.connect(chr(0) + \"{abstract}\"); print(\"ESCAPED\")'",
    "the metadata address": "{python} -I -S -c 'import socket; socket.create_connection((\"169.254.169.254\", 80), 2); "
    "print(\"ESCAPED\")'",
    "names": "{python} -I -S -c 'import socket; socket.getaddrinfo(\"example.com\", 80); print(\"ESCAPED\")'",
    "a name server": "{python} -I -S -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); "
    "s.sendto(b\"x\", (\"8.8.8.8\", 53)); print(\"ESCAPED\")'",
    "sockets of the system": "ls /run/* /var/run/* 2>/dev/null | grep -i -e sock -e docker && echo ESCAPED",
    "raw packets": "{python} -I -S -c 'import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW); print(\"ESCAPED\")'",
    "netlink": "{python} -I -S -c 'import socket; socket.socket(socket.AF_NETLINK); print(\"ESCAPED\")'",
}  # fmt: skip


@fall
async def escapes(runtime: str) -> Facts:
    """Tries them all from one run; what each said."""
    assert runtime != "inherited", "these commands are for walled runs only"
    folder, planted = project(), secrets.token_hex(8)
    home = Path(tempfile.mkdtemp(prefix="retinue-home-"))
    (home / "key").write_text(planted)
    for name in ("doors/one.json", "runs/other/1/workspace/secret"):
        path = folder / ".retinue" / name
        path.parent.mkdir(parents=True)
        path.write_text(planted)
    listening, hidden = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX)
    hidden.bind(f"\0{planted}")
    hidden.listen()
    os.environ["PLANTED_KEY"] = planted
    victim = subprocess.Popen(["sleep", "987"])
    values = {
        "secret": str(folder / ".retinue/runs/other/1/workspace/secret"),
        "door": str(folder / ".retinue/doors/one.json"),
        "home": str(home / "key"),
        "project": str(folder),
        "pid": str(victim.pid),
        "port": str(listening.getsockname()[1]),
        "abstract": planted,
        "python": python(),
    }
    try:
        said = await _said(runtime, folder, [_filled(command, values) for command in TRIES.values()])
        alive = victim.poll() is None
    finally:
        victim.kill()
        victim.wait()
        listening.close()
        hidden.close()
        del os.environ["PLANTED_KEY"]
        shutil.rmtree(home)
        shutil.rmtree(folder)
    return {"said": dict(zip(TRIES, said, strict=True)), "planted": planted, "alive": alive}


def _filled(command: str, values: dict[str, str]) -> str:
    for name, value in values.items():
        command = command.replace("{" + name + "}", value)
    return command


async def _said(runtime: str, folder: Path, commands: list[str]) -> list[str]:
    owner = supervisor(Parts(folder, folder / ".retinue", mode="yes", runtime=runtime))  # type: ignore[arg-type]
    replies = [call("shell", command=command, timeout=10) for command in commands]
    node = owner.spawn(main({"main": [*replies, {"text": "over"}]}, workspace="scratch"), Task("go"))
    walls = node.plan.runtime.started.walls
    assert {"pid", "mount", "net", "caps"} <= set(walls), walls  # before anything of the run has happened
    said = []
    async for event in owner.watch(node.ref.tree):
        if not isinstance(event, Delta) and isinstance(event.body, ToolResult):
            said.append(event.body.text)
    await node.join()
    assert node.result().status == "done", node.result().error_details
    await owner.close()
    return said
