"""The self-check of a sandbox: what a process sees from inside, and the protections that are missing."""

from __future__ import annotations

import os

import msgspec

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


def find_missing_protections(seen: SelfCheck, *, user: tuple[int, int] | None, full_network: bool) -> list[str]:
    """Return the protections that do not work. `user` is the user it should be, where that is not ours."""
    stands = {
        "uid": seen.uid == (user[0] if user else os.getuid()) != 0,
        "caps": seen.caps == 0,
        "no_new_privs": seen.nnp == "1",
        "pid": seen.pid < 10,
        "net": full_network or seen.nets == ["lo"],
        "mount": not seen.seen,
    }
    return [word for word, stand in stands.items() if not stand]
