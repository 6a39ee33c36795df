"""Started in place of `python`: asks the fork server for a process with the same arguments, folder, environment and
streams, passes signals on to it and ends as it does. Killed, it takes the other with it.

Run as `python -I -S fork_client.py SERVER MODULES ARGUMENTS...`. Imports little, since it is started hundreds of times.
"""

import _signal
import _socket
import array
import marshal
import os
import sys

PASSED_ON = (_signal.SIGINT, _signal.SIGTERM, _signal.SIGHUP, _signal.SIGQUIT, _signal.SIGWINCH)


def ask_server(name: str, load: list[str], arguments: list[str]) -> _socket.socket:
    """Return the socket that tells the number of the process, and at its end the exit code."""
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "arguments": arguments,
        "cwd": os.getcwd(),
        "env": dict(os.environ),
        "umask": umask,
        "load": load,
    }
    words = os.memfd_create("x")
    os.write(words, marshal.dumps(request))
    told, their_told = _socket.socketpair(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    server.connect(f"\0{name}")
    fds = array.array("i", [their_told.fileno(), words, 0, 1, 2])
    server.sendmsg([b"x"], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)])
    their_told.close()
    return told


def end_as(code: int) -> None:
    """End with the code, or by the signal that it stands for."""
    if code < 0:
        if -code in PASSED_ON:
            _signal.signal(-code, _signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    _signal.pthread_sigmask(_signal.SIG_BLOCK, PASSED_ON)
    told = ask_server(sys.argv[1], [name for name in sys.argv[2].split(",") if name], sys.argv[3:])
    pid = int(told.recv(64))
    for number in PASSED_ON:
        _signal.signal(number, lambda number, _: os.kill(pid, number))
    _signal.pthread_sigmask(_signal.SIG_UNBLOCK, PASSED_ON)
    for fd in (0, 1, 2):
        os.close(fd)
    end_as(int(told.recv(64)))
