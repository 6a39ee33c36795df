"""The self-check of a sandbox: a program that runs inside and prints what it finds there, as `builder.SelfCheck`.

It imports little, because every start with a sandbox waits for it.
"""

from __future__ import annotations

import json
import os
import sys

MEMORY_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
READ_ONLY = ("/", "/etc", "/usr")
FILTERED = "2"  # how the kernel says that a syscall filter is active


def print_findings() -> None:
    """Print the findings. The arguments of the program are a file that must not be visible inside, and a folder that
    must not be writable there."""
    secret, outputs = sys.argv[1:]
    status = dict(line.split(":", 1) for line in _read("/proc/self/status").splitlines())
    networks = _read("/proc/net/dev").splitlines()[2:]
    found = {
        "uid": os.getuid(),
        "pid": os.getpid(),
        "capabilities": int(status["CapBnd"], 16) | int(status["CapEff"], 16),
        "no_new_privs": status["NoNewPrivs"].strip() == "1",
        "filters_calls": status["Seccomp"].strip() == FILTERED,
        "networks": [line.split(":")[0].strip() for line in networks],
        "sees_secret": os.access(secret, os.F_OK),
        "writes_outside": any(map(_is_writable, (*READ_ONLY, outputs))),
        "memory_limit": _read_memory_limit(),
        "machine": os.uname().machine,
    }
    print(json.dumps(found))


def _read(path: str) -> str:
    with open(path) as file:  # noqa: PTH123 - pathlib takes longer to import than all the rest
        return file.read()


def _is_writable(folder: str) -> bool:
    try:
        os.close(os.open(f"{folder}/.probe", os.O_CREAT | os.O_WRONLY))
    except OSError:
        return False
    return True


def _read_memory_limit() -> int:
    """Return the limit of the memory in bytes, or 0 if there is none."""
    for path in MEMORY_LIMITS:
        try:
            return int(_read(path))
        except (OSError, ValueError):  # ValueError: "max"
            continue
    return 0


if __name__ == "__main__":
    print_findings()
