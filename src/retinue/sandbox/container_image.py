"""A container image built from this machine's own files: its Python, a shell, small programs and their libraries.

The image is built from scratch. So nothing is downloaded, and its Python is the one the tool server is compiled for.
It suffices for the tools of an agent. A user who needs compilers or git sets another image.
"""

from __future__ import annotations

import io
import os
import platform
import re
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO

from retinue.processes.group import run_program
from retinue.sandbox.builder import SYSTEM, SandboxUnavailable, find_python, find_system_program, list_packages

PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
NAME = f"localhost/retinue:py{sys.version_info.major}.{sys.version_info.minor}-{platform.machine()}"
PROGRAMS = (
    "sh", "bash", "env", "cat", "ls", "cp", "mv", "rm", "ln", "mkdir", "rmdir", "mknod", "mkfifo", "touch", "chmod",
    "chown", "chroot", "head", "tail", "wc", "sort", "uniq", "cut", "tr", "tee", "seq", "date", "sleep", "true",
    "false", "test", "expr", "printf", "echo", "pwd", "basename", "dirname", "readlink", "realpath", "stat", "du",
    "df", "id", "whoami", "uname", "nohup", "timeout", "nproc", "mktemp", "od", "sha256sum", "base64", "paste",
    "comm", "join", "split", "dd", "sync", "tty", "kill", "grep", "egrep", "sed", "awk", "find", "xargs", "diff",
    "cmp", "patch", "tar", "gzip", "gunzip", "setsid", "unshare", "nsenter", "mount", "umount", "ps",
)  # fmt: skip
SKIPPED = {
    "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip", "lib2to3",
}  # fmt: skip
ETC = {
    "etc/passwd": "root:x:0:0:root:/:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n",
    "etc/group": "root:x:0:\nnobody:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
BUILD_SECONDS = 300.0
_LIBRARY = re.compile(r"(/\S+) \(0x")


def build_image(engine: Sequence[str]) -> str:
    """Build the default image and return a summary of its content. Raises SandboxUnavailable."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        raise SandboxUnavailable(
            "the default image is made of this machine's own programs, which takes Linux with glibc"
        )
    count = 0

    def write(pipe: IO[bytes]) -> None:
        nonlocal count
        count = _write_image(pipe)

    try:
        done = run_program([*engine, "import", "-", NAME], seconds=BUILD_SECONDS, write_input=write)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise SandboxUnavailable(f"the image cannot be made: {error}") from None
    if done.returncode:
        said = " ".join(done.stderr.decode("utf-8", "replace").split())[:300]
        raise SandboxUnavailable(f"the image cannot be made: {said}")
    return (
        f"{NAME}: {count} files of this machine, {PYTHON} and {len(_find_programs())} programs; nothing was downloaded"
    )


def _write_image(pipe: IO[bytes]) -> int:
    with tarfile.open(fileobj=pipe, mode="w|") as tar:
        image = _Image(tar)
        for name in ("usr", "etc", "proc", "sys", "dev", "run", "var", "tmp"):
            image.add_folder(f"/{name}")
        for system in map(Path, SYSTEM):
            if system.is_symlink():
                image.add_link(str(system), str(system.readlink()))
        for name, text in ETC.items():
            image.add_text(name, text)
        programs = _find_programs()
        for name, found in programs.items():
            image.add_file(os.path.realpath(found), f"{os.path.realpath(Path(found).parent)}/{name}")
        image.add_file(find_python(), find_python())
        for name in ("python3", PYTHON):
            if f"/usr/bin/{name}" not in image.names:
                image.add_link(f"/usr/bin/{name}", find_python())
        compiled = [find_python(), *programs.values()]
        for path in _walk_standard_library():
            image.add_file(path, path)
            if ".so" in Path(path).name:
                compiled.append(path)
        compiled += [str(path) for folder, _ in list_packages() for path in Path(folder).rglob("*.so*")]
        for path in sorted(_find_libraries(compiled)):
            image.add_file(os.path.realpath(path), f"{os.path.realpath(Path(path).parent)}/{Path(path).name}")
        if Path("/etc/ld.so.cache").exists():
            image.add_file("/etc/ld.so.cache", "/etc/ld.so.cache")
        return len(image.names)


class _Image:
    """A writer of image entries. Adds each path once, together with its parent folders, which every user may enter."""

    def __init__(self, tar: tarfile.TarFile) -> None:
        self._tar = tar
        self.names: set[str] = set()

    def add_folder(self, path: str) -> None:
        if path in self.names or path == "/":
            return
        self.add_folder(str(Path(path).parent))
        self._write_entry(path, tarfile.DIRTYPE, mode=0o1777 if path == "/tmp" else 0o755)

    def add_link(self, path: str, target: str) -> None:
        self.add_folder(str(Path(path).parent))
        self._write_entry(path, tarfile.SYMTYPE, target=target)

    def add_text(self, path: str, text: str) -> None:
        self._write_entry(f"/{path}", tarfile.REGTYPE, mode=0o644, content=io.BytesIO(text.encode()), size=len(text))

    def add_file(self, source: str, path: str) -> None:
        if path in self.names:
            return
        self.add_folder(str(Path(path).parent))
        with Path(source).open("rb") as content:
            found = os.fstat(content.fileno())
            mode = 0o755 if found.st_mode & 0o111 else 0o644
            self._write_entry(path, tarfile.REGTYPE, mode=mode, content=content, size=found.st_size)

    def _write_entry(
        self,
        path: str,
        kind: bytes,
        *,
        mode: int = 0o777,
        target: str = "",
        content: IO[bytes] | None = None,
        size: int = 0,
    ) -> None:
        self.names.add(path)
        entry = tarfile.TarInfo(path.lstrip("/"))
        entry.type, entry.mode, entry.linkname, entry.size = kind, mode, target, size
        self._tar.addfile(entry, content)


def _find_programs() -> dict[str, str]:
    return {name: found for name in PROGRAMS if (found := find_system_program(name)) is not None}


def _walk_standard_library() -> Iterator[str]:
    for folder in {sysconfig.get_path(name, vars=_BASE) for name in ("stdlib", "platstdlib")}:
        for top, folders, files in os.walk(folder):
            folders[:] = [name for name in folders if name not in SKIPPED and not name.startswith("config-")]
            for name in files:
                path = f"{top}/{name}"
                if Path(path).is_file() and not name.endswith((".opt-1.pyc", ".opt-2.pyc", ".a")):
                    yield path


_BASE = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix, "installed_base": sys.base_prefix,
         "installed_platbase": sys.base_exec_prefix}  # fmt: skip


def _find_libraries(compiled: list[str]) -> set[str]:
    """Return the libraries that these files load, and the loader itself, under the paths that the loader uses."""
    ldd = find_system_program("ldd")
    if ldd is None:
        raise SandboxUnavailable("ldd is not there: apt-get install libc-bin")
    said = subprocess.run([ldd, *compiled], capture_output=True, text=True, check=False, timeout=60).stdout
    return set(_LIBRARY.findall(said))
