"""Real repositories, real runs in copies of them, and what is outside, hashed."""

from __future__ import annotations

import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import retinue
from retinue import Event, Profile, Result
from retinue.testing import scripted
from retinue.workspaces import copies
from retinue.workspaces.copies import CopiedWorkspace, TargetFolder
from tests.supervisor.tree.kit import call

LINES = "".join(f"line {number}\n" for number in range(1, 21))


def git(folder: Path, *words: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    names = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    done = subprocess.run(["git", *names, *words], cwd=folder, env=env, capture_output=True, check=True)
    return done.stdout.decode("utf-8", "surrogateescape")


def repository(folder: Path, **files: str) -> Path:
    """A repository with one commit of these files, and a.txt."""
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-q")
    for name, text in {"a.txt": LINES, **files}.items():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    return folder


def shell(command: str) -> dict[str, Any]:
    return call("shell", command=command)


async def work(project: Path, *commands: str, kind: str = "worktree", **options: Any) -> Result[Any]:
    """A primary in a copy of the project that runs these commands."""
    result, _ = await seen(project, {"main": [*map(shell, commands), {"text": "done"}]}, kind=kind, **options)
    return result


async def seen(
    project: Path, agents: dict[str, Any], *, kind: str | None = None, profiles: Any = (), **options: Any
) -> tuple[Result[Any], list[Event]]:
    given = {"mode": "yes", **options}
    async with retinue.open(project / ".retinue", profiles=profiles, **given) as r:
        main = Profile("main", "You are main.", model=scripted(agents), workspace=kind)  # type: ignore[arg-type]
        run = await r.spawn(main, "go")
        events = [event async for event in run.events()]
        return await run.result(), events


def copied(result: Result[Any]) -> CopiedWorkspace:
    """The copy a run worked in, found as the command line finds it."""
    state = str(Path(result.workspace).parents[3])
    found = copies.find_copy(state, result.tree, result.run)
    assert found is not None
    return found


def into(project: Path) -> TargetFolder:
    """The project as the folder that gets the changes of its runs."""
    return TargetFolder(str(project), state=f"{project}/.retinue")


def apply_copy(result: Result[Any], project: Path) -> None:
    one, target = copied(result), into(project)
    target.carry_out(target.plan([one]), [one])


def changes(result: Result[Any]) -> dict[str, str]:
    return {file.path: file.status for file in result.changed_files}


def hashed(folder: Path) -> dict[str, str]:
    """Everything in a folder but our state: names, kinds, modes and contents."""
    found: dict[str, str] = {}
    for above, folders, names in os.walk(folder):
        if ".retinue" in folders:
            folders.remove(".retinue")
        for name in (*folders, *names):
            path = os.path.join(above, name)
            status = os.lstat(path)
            content = b""
            if os.path.islink(path):
                content = os.fsencode(os.readlink(path))
            elif os.path.isfile(path):
                content = Path(path).read_bytes()
            found[os.path.relpath(path, folder)] = f"{status.st_mode:o} {hashlib.sha256(content).hexdigest()}"
    return found
