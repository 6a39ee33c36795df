"""The paths of this machine that a program needs in a sandbox: its installation folder. Runs no program.

With a version manager, the program on the PATH is only a shim. The shims of rustup, pyenv and similar managers are
resolved here. If the folder holds more than the program (a home, `~/.local`, `~/.cargo` with its keys), only the
program's file is returned.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from retinue.files.content import read_small_file
from retinue.files.reserved import STATE_FOLDER
from retinue.sandbox.builder import SYSTEM, list_interpreter_folders

LARGEST = 64 * 1024
_DEFAULT = re.compile(r'^default_toolchain\s*=\s*"([^"/]+)"', re.MULTILINE)
_BASE = re.compile(r"^home[ \t]*=[ \t]*(/[^\n\0]*)$", re.MULTILINE)
_PYTHON = re.compile(r"(python|pypy)[0-9.]*[a-z]?")


def find_needed_paths(programs: Sequence[str], folder: Path, env: Mapping[str, str]) -> list[str]:
    """Return the paths to expose so that these programs and the project's virtual environment work in a sandbox.

    Leaves out paths that are visible anyway. The order decides which program is found first inside: the virtual
    environment, its base Python, then the other programs."""
    found = [*_find_environment(folder, env)]
    for program in programs:
        path = shutil.which(program, path=env.get("PATH", os.defpath))
        if path is not None:
            found += find_program_paths(path, folder, env)
    paths = dict.fromkeys(found)
    return [path for path in paths if not any(path.startswith(f"{other}/") for other in paths)]


def find_program_paths(path: str, folder: Path, env: Mapping[str, str]) -> list[str]:
    """Return the paths to expose for a program; empty if the program is visible anyway."""
    home = Path(env.get("HOME") or "/nowhere")
    real = Path(os.path.realpath(path))
    if real.name == "rustup":
        real = _resolve_rustup(Path(path).name, home, env) or real
    elif Path(path).parent.name == "shims":
        real = _resolve_shim(Path(path), folder) or real
    root = _find_install_folder(real, Path(os.path.realpath(home)))
    return [] if _is_seen(root) else [str(root)]


def _find_environment(folder: Path, env: Mapping[str, str]) -> Iterator[str]:
    for place in (env.get("VIRTUAL_ENV", ""), folder / ".venv", folder / "venv"):
        base = _BASE.search(_read_text(Path(place, "pyvenv.cfg")))
        # A file of the project names this folder, so accept the folder only if it has a Python.
        pythons = [f"{base[1].rstrip()}/{name}" for name in ("python3", "python")] if base else []
        python = next(filter(_is_python, pythons), None)
        root = os.path.realpath(place)
        if place and python is not None and not _is_ours(Path(root), Path(os.path.realpath(folder))):
            yield from ([] if _is_seen(Path(root)) else [root])
            yield from find_program_paths(python, folder, env)
            return


def _is_ours(root: Path, folder: Path) -> bool:
    """Return True if a link of the project leads to the project itself, above it, or to our state in it."""
    return folder.is_relative_to(root) or root.is_relative_to(folder / STATE_FOLDER)


def _is_python(path: str) -> bool:
    """Return True if `path` is a Python. It may be a link made by the project, so the target is checked."""
    real = Path(os.path.realpath(path))
    # `os.path.isfile` returns False for a path that is too long; `Path.is_file` raises.
    return _PYTHON.fullmatch(real.name) is not None and os.path.isfile(real) and os.access(real, os.X_OK)  # noqa: PTH113


def _resolve_rustup(name: str, home: Path, env: Mapping[str, str]) -> Path | None:
    rustup = Path(env.get("RUSTUP_HOME") or home / ".rustup")
    default = _DEFAULT.search(_read_text(rustup / "settings.toml"))
    program = rustup / "toolchains" / (default[1] if default else "stable") / "bin" / name
    return Path(os.path.realpath(program)) if program.exists() else None


def _resolve_shim(shim: Path, folder: Path) -> Path | None:
    """Return the program of the chosen version, or of the newest version that has the program."""
    manager = shim.parent.parent
    chosen = f"{_read_text(folder / '.python-version')}\n{_read_text(manager / 'version')}".split()
    found = sorted(manager.glob(f"versions/*/bin/{shim.name}"), key=lambda path: path.parts[-3])
    by_version = {path.parts[-3]: path for path in found}
    program = next((by_version[name] for name in chosen if name in by_version), found[-1] if found else None)
    return None if program is None else Path(os.path.realpath(program))


def _find_install_folder(program: Path, home: Path) -> Path:
    folder = program.parent.parent if program.parent.name == "bin" else program.parent
    hidden = folder.parent == home and (folder.name.startswith(".") or folder == program.parent)
    wide = hidden or folder == home / ".local" or home.is_relative_to(folder)
    return program if wide else folder


def _is_seen(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in ("/usr", *SYSTEM, *list_interpreter_folders()))


def _read_text(path: Path) -> str:
    """Return the text of a regular file, or "" for any other entry, such as a pipe that would block."""
    with suppress(OSError, ValueError):
        return read_small_file(path, LARGEST, follow=True).decode()
    return ""
