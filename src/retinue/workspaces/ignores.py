"""The files that `.gitignore` excludes. Git decides, in a folder of ours that holds only copies of the rules.

So git never reads the workspace itself and meets no FIFO, link or nested repository there. If a pattern takes git too
long, the check is abandoned and no further file counts as ignored.
"""

from __future__ import annotations

import os
import select
import stat
import subprocess
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

from retinue.files.content import read_chunks, read_small_file
from retinue.files.reserved import list_all_prefixes
from retinue.files.scratch import make_scratch_folder
from retinue.processes.group import start_group
from retinue.workspaces import git
from retinue.workspaces.walk import FolderEntry, open_entry

SECONDS = 5.0  # git's CPU time for one answer; not wall time, because the machine may be busy
BUSY_FACTOR = 6  # the wall-clock limit is this many times longer
FILE_BYTES = 256 * 1024
_FIELDS = 4


class Ignores:
    """A filter to call with each entry of one walk, in the order of the walk.

    Tracked files and the folders above them are never ignored. The user's `repository` adds the rules from outside the
    project."""

    def __init__(self, tracked: Iterable[str], repository: git.Repository | None) -> None:
        self._tracked = list_all_prefixes(tracked)
        self._repository = repository
        self._prefix = "" if repository is None else repository.prefix
        self.gave_up = False

    def __enter__(self) -> Ignores:
        self._scratch = ExitStack()
        folder = self._scratch.enter_context(make_scratch_folder())
        work, store = f"{folder}/work", f"{folder}/git"
        Path(work).mkdir()
        git.run_in_store("init", "-q", "--bare", "--template=", store, git_dir=store, cwd=str(folder))
        Path(store, "info").mkdir(exist_ok=True)
        if self._repository is not None:
            rules = b"\n".join(_read_rules(file) for file in self._repository.excludes)
            Path(store, "info", "exclude").write_bytes(rules)
            for above, file in self._repository.above:
                place = Path(work, above)
                place.mkdir(parents=True, exist_ok=True)
                (place / ".gitignore").write_bytes(_read_rules(file))
        line, env = git.build_command(
            f"--work-tree={work}", "check-ignore", "--no-index", "--stdin", "-z", "-v", "-n", git_dir=store
        )
        self._work = work
        pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
        self._group = start_group(line, env=env, cwd=work, stdin=pipe, stdout=pipe, stderr=nowhere, bufsize=0)
        return self

    def __exit__(self, *_: object) -> None:
        self._group.kill()
        for stream in (self._group.process.stdin, self._group.process.stdout):
            if stream is not None:
                stream.close()
        self._scratch.close()

    def __call__(self, entry: FolderEntry) -> bool:
        if entry.name == ".gitignore":
            self._copy_rules(entry)
        if entry.path in self._tracked or self.gave_up:
            return False
        place = Path(self._work, self._prefix + entry.path)
        try:
            if entry.is_folder:
                place.mkdir(parents=True, exist_ok=True)  # a pattern may match folders only
            ignored = self._ask_git(self._prefix + entry.path)
            if entry.is_folder and ignored:
                place.rmdir()
        except OSError:  # the path is too long, or git has exited
            return False
        return ignored

    def _copy_rules(self, entry: FolderEntry) -> None:
        if not stat.S_ISREG(entry.status.st_mode) or entry.status.st_size > FILE_BYTES:
            return
        try:
            fd = open_entry(entry)
            try:
                rules = b"".join(read_chunks(fd))[:FILE_BYTES]
            finally:
                os.close(fd)
            place = Path(self._work, self._prefix + entry.path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(rules)
        except OSError:
            return

    def _ask_git(self, path: str) -> bool:
        asking, answering = self._group.process.stdin, self._group.process.stdout
        assert asking is not None and answering is not None
        asking.write(os.fsencode(path) + b"\0")
        waiting = select.poll()
        waiting.register(answering.fileno(), select.POLLIN)
        answer = b""
        used, deadline = self._measure_work(), time.monotonic() + SECONDS * BUSY_FACTOR
        while answer.count(b"\0") < _FIELDS:
            if not waiting.poll(SECONDS * 100):
                if self._measure_work() - used < SECONDS and time.monotonic() < deadline:
                    continue
                self.gave_up = True
                return False
            chunk = os.read(answering.fileno(), 65536)
            if not chunk:
                self.gave_up = True
                return False
            answer += chunk
        source, _, pattern, _ = answer.split(b"\0")[:_FIELDS]
        return bool(source) and not pattern.startswith(b"!")

    def _measure_work(self) -> float:
        """Return the CPU seconds that git has used, or the wall clock if the system does not report them."""
        try:
            fields = Path(f"/proc/{self._group.pid}/stat").read_bytes().rpartition(b")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _read_rules(file: str) -> bytes:
    try:
        return read_small_file(file, FILE_BYTES, follow=True)
    except OSError:
        return b""
