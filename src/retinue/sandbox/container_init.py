"""The first process of a container. It filters system calls, starts the tool server and reaps orphaned processes.

It exits when the tool server exits or the host closes the connection; then the kernel ends everything in the
container. The engine's own syscall filter differs between machines, so ours is added from inside, before anything of
the run is read.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from contextlib import suppress

from retinue.sandbox import seccomp
from retinue.sandbox.cgroups import OUT_OF_MEMORY_CODE, ROOT, Group
from retinue.sandbox.process_privacy import hide_process

_NO_NEW_PRIVS, _SECCOMP, _FILTER = 38, 22, 2


def run_first_process() -> None:
    """Fork the tool server. Returns only in the tool server; the first process stays here until it exits."""
    _filter_calls()
    hide_process()
    told, tell = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(told)
        os.close(tell)
        return
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    signal.signal(signal.SIGTERM, _forward_signal)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    looking = select.poll()
    looking.register(told, select.POLLIN)
    looking.register(0, 0)  # watch only for hang-up: the data on stdin is for the tool server
    while True:
        _reap_children(child)
        for fd, _ in looking.poll():
            if fd == 0:
                os._exit(1)  # the host is gone
            os.read(told, 512)


def _forward_signal(*_: object) -> None:
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGTERM)


def _reap_children(server: int) -> None:
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            if pid == server:
                code = os.waitstatus_to_exitcode(status)
                if code == -signal.SIGKILL and Group([ROOT, ROOT / "memory"]).count_memory_kills():
                    os._exit(OUT_OF_MEMORY_CODE)
                os._exit(code if code >= 0 else 128 - code)


def _filter_calls() -> None:
    program = seccomp.make_filter()
    if program is None:
        return

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))

    libc = ctypes.CDLL(None, use_errno=True)
    lines = Program(len(program) // 8, program)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(_SECCOMP, _FILTER, ctypes.byref(lines), 0, 0):
        raise OSError(ctypes.get_errno(), "the syscall filter is refused here")
