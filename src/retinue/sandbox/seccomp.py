"""The syscall filter of sandboxed runs, as a BPF program: it denies calls that no tool of an agent needs.

A denylist, not an allowlist, because compilers and test suites must run. Denied are namespaces, mounts, access to the
memory of other processes, keys, kernel features with a history of vulnerabilities, and typing into terminals.
"""

from __future__ import annotations

import errno
import platform
import struct
from typing import NamedTuple

_LOAD, _JUMP_EQUAL, _JUMP_OVER, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
# CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET and, of unshare only, NEWTIME
_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
_NEWTIME = 0x00000080
_TERMINAL = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX can inject input into a terminal
_FAMILIES = (1, 2, 10)  # AF_UNIX, AF_INET, AF_INET6

_Line = tuple[int, int, int, int]  # the operation, how many lines to skip if the test holds or fails, and the value


class _Machine(NamedTuple):
    audit: int
    column: int
    x32: bool = False


_MACHINES = {"x86_64": _Machine(0xC000003E, 0, True), "aarch64": _Machine(0xC00000B7, 1)}
_NONE = -1
# name: its number on x86_64, on aarch64
_DENIED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "open_tree": (428, 428),
    "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "setns": (308, 268), "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264), "fanotify_init": (300, 262), "fanotify_mark": (301, 263),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "memfd_secret": (447, 447),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443), "syslog": (103, 116), "vhangup": (153, 58),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "personality": (135, 92), "lookup_dcookie": (212, 18), "move_pages": (279, 239), "migrate_pages": (256, 238),
    "iopl": (172, _NONE), "ioperm": (173, _NONE), "modify_ldt": (154, _NONE), "uselib": (134, _NONE),
}  # fmt: skip
_CLONE, _UNSHARE, _CLONE3 = (56, 220), (272, 97), (435, 435)
_SOCKET, _SOCKETPAIR, _IOCTL = (41, 198), (53, 199), (16, 29)


def find_call_number(name: str) -> int:
    """Return the number of a denied system call on this machine. Raises KeyError for any other call."""
    known = {**_DENIED, "clone": _CLONE, "clone3": _CLONE3}
    return known[name][_MACHINES[platform.machine()].column]


def make_filter() -> bytes | None:
    """Return the filter for this machine, or None if the machine is not supported."""
    kind = _MACHINES.get(platform.machine())
    if kind is None:
        return None
    at = kind.column
    lines: list[_Line] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, kind.audit),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if kind.x32:  # x32 has the same calls under other numbers
        lines += _return_if(_JUMP_OVER, 0x40000000, _ERRNO | errno.ENOSYS)
    for numbers in _DENIED.values():
        if numbers[at] != _NONE:
            lines += _return_if(_JUMP_EQUAL, numbers[at], _ERRNO | errno.EPERM)
    # A filter cannot read the flags of clone3, which are in memory. With ENOSYS, programs fall back to clone.
    lines += _return_if(_JUMP_EQUAL, _CLONE3[at], _ERRNO | errno.ENOSYS)
    lines += _check_argument(_CLONE[at], 0, _return_if(_JUMP_SET, _NAMESPACES, _ERRNO | errno.EPERM))
    lines += _check_argument(_UNSHARE[at], 0, _return_if(_JUMP_SET, _NAMESPACES | _NEWTIME, _ERRNO | errno.EPERM))
    known = [line for family in _FAMILIES for line in _return_if(_JUMP_EQUAL, family, _ALLOW)]
    for call in (_SOCKET, _SOCKETPAIR):
        lines += _check_argument(call[at], 0, [*known, (_RETURN, 0, 0, _ERRNO | errno.EAFNOSUPPORT)])
    typing = [line for code in _TERMINAL for line in _return_if(_JUMP_EQUAL, code, _ERRNO | errno.EPERM)]
    lines += _check_argument(_IOCTL[at], 1, typing)
    lines.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _check_argument(number: int, argument: int, check: list[_Line]) -> list[_Line]:
    """Return the lines that test the low half of one argument of the call `number` with `check`, and else allow the
    call."""
    body = [(_LOAD, 0, 0, _ARGUMENTS + 8 * argument), *check, (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_EQUAL, 0, len(body), number), *body]


def _return_if(test: int, value: int, answer: int) -> list[_Line]:
    """Return the lines that end with `answer` if the test of the loaded value holds, and else continue."""
    return [(test, 0, 1, value), (_RETURN, 0, 0, answer)]
