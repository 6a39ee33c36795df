"""Root runs a command as an ordinary user, who can reach this Python and this package wherever they are."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

USER = 23_456
PACKAGE = Path(__file__).parents[3]


def run(argv: Sequence[str], *, seconds: float, also: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    """With an environment and a home of its own; `also` are more folders it has to reach."""
    folder = Path(tempfile.mkdtemp(prefix="retinue-user-"))
    folder.chmod(0o755)
    os.chown(folder, USER, USER)
    env = {"PATH": "/usr/local/bin:/usr/bin:/bin", "TMPDIR": str(folder), "HOME": str(folder), "LANG": "C.UTF-8"}
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path.startswith("/"))
    try:
        return subprocess.run(
            [*_before(also), *argv], cwd="/", env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _before(also: Sequence[str]) -> list[str]:
    """What to put before a command: folders that are closed to others are empty but for what is needed in them."""
    needed = {sys.prefix, sys.base_prefix, str(PACKAGE), *also}
    closed = {str(next(p for p in reversed(Path(path).parents) if not p.stat().st_mode & 1))
              for path in needed if any(not p.stat().st_mode & 1 for p in Path(path).parents)}  # fmt: skip
    opened = [argument for folder in closed for argument in ("--perms", "0755", "--tmpfs", folder)]
    for path in sorted(needed):
        for folder in reversed(Path(path).parents):
            if any(Path(folder).is_relative_to(shut) for shut in closed):
                opened += ["--perms", "0755", "--dir", str(folder)]
        opened += ["--bind", path, path]
    kept = [word for name in ("SETUID", "SETGID", "KILL") for word in ("--cap-add", f"CAP_{name}")]
    leave = ["setpriv", "--reuid", str(USER), "--regid", str(USER), "--clear-groups"]
    return ["bwrap", "--dev-bind", "/", "/", *opened, "--chdir", "/", *kept, "--", *leave]
