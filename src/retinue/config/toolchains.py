"""Toolchains of a project, found by its files, with the test commands that `retinue init` proposes to allow."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shutil import which

from retinue.config.files import exists, read_text
from retinue.core.errors import ConfigError

_NO_TEST = "no test specified"  # what `npm init` writes
_LOCKS = {"pnpm-lock.yaml": "pnpm", "yarn.lock": "yarn", "bun.lock": "bun", "bun.lockb": "bun"}
_BELOW = {"npm": ["node"], "pnpm": ["node"], "yarn": ["node"], "maven": ["java"], "gradle": ["java"]}
_PYTHON = ("pyproject.toml", "setup.py", "setup.cfg", "requirements.txt", "pytest.ini", "tox.ini")
_PYTESTS = ("pytest.ini", "conftest.py", "tests", "test")


@dataclass(frozen=True)
class Toolchain:
    """A toolchain, the file that shows it, and the command that tests the project with it."""

    name: str
    mark: str
    test: str
    path: str | None = None  # where programs are looked for, if not on the PATH

    @property
    def programs(self) -> tuple[str, ...]:
        """Return the programs on the PATH that the command needs."""
        first = self.test.split()[0]
        return (*([] if first.startswith("./") else [first]), *_BELOW.get(self.name, ()))

    @property
    def installed(self) -> bool:
        program = self.test.split()[0]
        return program.startswith("./") or which(program, path=self.path) is not None


def find_toolchains(folder: Path) -> list[Toolchain]:
    """Return the toolchains that have a test command, the most likely one first."""
    return [*_find_make(folder), *_find_python(folder), *_find_node(folder), *_find_others(folder)]


def _find_make(folder: Path) -> Iterator[Toolchain]:
    for name in ("GNUmakefile", "makefile", "Makefile"):
        if re.search(r"^test\s*:(?!=)", _read_text(folder / name), re.MULTILINE):
            yield Toolchain("make", name, "make test")
            return


def _find_python(folder: Path) -> Iterator[Toolchain]:
    mark = next((name for name in _PYTHON if exists(folder / name)), None)
    if mark is None:
        return
    if not any(exists(folder / name) for name in _PYTESTS) and "pytest" not in _read_text(folder / "pyproject.toml"):
        return
    if exists(folder / "uv.lock"):
        yield Toolchain("uv", "uv.lock", "uv run pytest")
    elif exists(folder / "poetry.lock"):
        yield Toolchain("poetry", "poetry.lock", "poetry run pytest")
    else:
        venv = next((name for name in (".venv", "venv") if exists(folder / name / "pyvenv.cfg")), None)
        path = None if venv is None else f"{folder / venv / 'bin'}:{os.environ.get('PATH', os.defpath)}"
        yield Toolchain("python", mark, "pytest" if which("pytest", path=path) else "python -m pytest", path)


def _find_node(folder: Path) -> Iterator[Toolchain]:
    try:
        package = json.loads(_read_text(folder / "package.json") or "null")
        test = package["scripts"]["test"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return
    if isinstance(test, str) and test.strip() and _NO_TEST not in test:
        lock = next((name for name in _LOCKS if exists(folder / name)), "package.json")
        manager = _LOCKS.get(lock, "npm")
        yield Toolchain(manager, lock, "bun run test" if manager == "bun" else f"{manager} test")


def _find_others(folder: Path) -> Iterator[Toolchain]:
    for name, mark, test in (
        ("cargo", "Cargo.toml", "cargo test"),
        ("go", "go.mod", "go test ./..."),
        ("maven", "pom.xml", "mvn test"),
        ("gradle", "gradlew", "./gradlew test"),
    ):
        if exists(folder / mark):
            yield Toolchain(name, mark, test)


def _read_text(path: Path) -> str:
    """Return the text of the file; nothing when it cannot be read."""
    try:
        return read_text(path)
    except ConfigError:
        return ""
