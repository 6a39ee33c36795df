"""Running a command as an ordinary user when we are root.

The command runs in its own mount and process namespaces. There the user has a name and a range of subordinate user ids
for containers. This Python and this package are reachable even below folders that are closed to other users; such a
folder shows only the paths that are needed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from retinue.processes.group import run_program

USER, NAME = 23_456, "retinue-ordinary"
MORE_IDS = f"{NAME}:1879048192:65536\n"
PACKAGE = Path(__file__).parents[2]
# The namespace ends every process that the command leaves behind (podman does), also after a timeout.
NAMESPACES = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]


def run_as_user(argv: Sequence[str], *, seconds: float, also: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """Run a command with a new environment and a new home folder. `also` lists more folders the command must reach."""
    made = Path(tempfile.mkdtemp(prefix="retinue-user-"))
    made.chmod(0o755)
    home = made / "home"
    for folder in (home, home / "run"):
        folder.mkdir()
        os.chown(folder, USER, USER)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "TMPDIR": str(home), "HOME": str(home)}
    env |= {"LANG": "C.UTF-8", "XDG_RUNTIME_DIR": str(home / "run")}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path.startswith("/"))
    mounts = _list_mount_commands(made, {sys.prefix, sys.base_prefix, str(PACKAGE), *also})
    # No `exec`: the shell stays as process 1 and reaps orphans.
    script = "\n".join(["set -e", *mounts, '"$@" || exit $?', "exit 0"])
    leave = ["setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups", "--inh-caps=-all"]
    before = [*NAMESPACES, "/bin/sh", "-c", script, "sh", *leave]
    try:
        done = run_program([*before, *argv], cwd="/", env=env, seconds=seconds)
        return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _list_mount_commands(made: Path, needed: set[str]) -> Iterator[str]:
    """Yield the shell commands that mount the user's files. They vanish with the last process of the namespace."""
    texts = {
        "passwd": Path("/etc/passwd").read_text() + f"{NAME}:x:{USER}:{USER}::{made}/home:/bin/sh\n",
        "group": Path("/etc/group").read_text() + f"{NAME}:x:{USER}:\n",
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
