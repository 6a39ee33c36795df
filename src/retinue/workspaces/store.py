"""The store of a tree: a bare git repository of ours with the first and last state of each copied workspace.

Nothing is ever checked out of the store, and it has no work tree. Names and contents come from runs and are treated as
data.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Protocol

from retinue.core.errors import RetinueError
from retinue.core.limits import MIB
from retinue.files.content import read_chunks, read_up_to
from retinue.files.private import make_private_folder
from retinue.processes.group import start_group
from retinue.workspaces import git

# Unset all attributes, so that a `.gitattributes` of a run cannot change the diff that a person is shown.
_ATTRIBUTES = "* !diff !merge !text !eol !crlf !ident !filter !working-tree-encoding !whitespace\n"
WAIT_SECONDS = 0.2
STORE = "workspaces.git"
IN_MEMORY_BYTES = 16 * MIB
_DIFF = ("--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules=all")


class StoredFile(NamedTuple):
    """A file of a stored tree: its git mode and the oid of its content."""

    mode: str
    oid: str


Files = dict[str, StoredFile]


class Store:
    """One store. Several threads may use it; each import writes its own pack."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._known: set[str] = set()
        self._lock = threading.Lock()

    def ensure_created(self) -> Store:
        if not Path(self.folder, "HEAD").exists():
            make_private_folder(self.folder)
            words = ("init", "-q", "--bare", "--template=", "--object-format=sha1", self.folder)
            git.run_in_store(*words, git_dir=self.folder)
            Path(self.folder, "info").mkdir(exist_ok=True)
            Path(self.folder, "info", "attributes").write_text(_ATTRIBUTES)
        return self

    @contextmanager
    def hold(self, stop: threading.Event) -> Iterator[None]:
        """Hold the store's exclusive lock. Raises RetinueError if `stop` is set while waiting for the lock."""
        while not self._lock.acquire(timeout=WAIT_SECONDS):
            if stop.is_set():
                raise RetinueError("stopped")
        try:
            yield
        finally:
            self._lock.release()

    def has_content(self, oid: str) -> bool:
        return oid in self._known

    def add_known(self, oids: Iterable[str]) -> None:
        self._known.update(oids)

    def list_files(self, ref: str) -> Files:
        """Return all files of the tree at `ref`."""
        found: Files = {}
        for line in git.run_in_store("ls-tree", "-r", "-z", "--full-tree", ref, git_dir=self.folder).split(b"\0"):
            if line:
                about, _, name = line.partition(b"\t")
                mode, _, oid = about.decode().split(" ")
                found[os.fsdecode(name)] = StoredFile(mode, oid)
        return found

    def has_ref(self, ref: str) -> bool:
        return bool(git.run_in_store("for-each-ref", ref, git_dir=self.folder))

    def read_content(self, oid: str) -> bytes:
        return git.run_in_store("cat-file", "blob", oid, git_dir=self.folder)

    def write_content(self, oid: str, fd: int) -> None:
        """Write a content of any size to an open file. Does not let git write, which keeps the reason of a failed
        write to itself: a full disk raises OSError."""
        line, env = git.build_command("cat-file", "blob", oid, git_dir=self.folder)
        reading = subprocess.Popen(
            line, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        with reading, open(fd, "wb", closefd=False) as file:
            assert reading.stdout is not None
            shutil.copyfileobj(reading.stdout, file)
        if reading.returncode:
            raise RetinueError(f"the store {self.folder} has no {oid}: it is damaged")

    def diff(self, old: str, new: str, *options: str) -> bytes:
        return git.run_in_store("diff", *_DIFF, *options, old, new, "--", git_dir=self.folder)

    def drop_ref(self, ref: str) -> None:
        git.run_in_store("update-ref", "-d", ref, git_dir=self.folder)


def find_store(own: str) -> Store:
    """Return the store of the tree that a run's folder belongs to."""
    with _finding:
        return _open_store(str(Path(own).parent / STORE))


_finding = threading.Lock()  # so that threads that look for a store at once get the same one


@lru_cache(64)
def _open_store(folder: str) -> Store:
    """Return a store. It remembers its contents, so that eight copies of a project are stored once."""
    return Store(folder)


class Contents(Protocol):
    """A sink for file contents, each identified by its git oid."""

    def add_content(self, oid: str, size: int, data: Iterator[bytes]) -> None: ...

    def add_bytes(self, data: bytes) -> str: ...


class ContentNames:
    """A sink that only computes oids and stores nothing."""

    def add_content(self, oid: str, size: int, data: Iterator[bytes]) -> None:
        pass

    def add_bytes(self, data: bytes) -> str:
        return hash_content(len(data), iter((data,)))


class Import:
    """A stream of contents and trees into the store. They are stored once the block ends without an error."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._new: set[str] = set()

    def __enter__(self) -> Import:
        line, env = git.build_command(
            "fast-import", "--quiet", "--done", "--force", "--depth=0", git_dir=self._store.folder
        )
        self._group = start_group(
            line,
            env=env,
            cwd=self._store.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        self._write(b"blob\ndata 32\n%s\n" % secrets.token_hex(16).encode())  # makes the pack's name unique
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._group.kill()
        else:
            self._write(b"done\n")
        _, words = self._group.process.communicate()
        if error is None and self._group.process.returncode:
            raise RetinueError(git.describe_failure("git fast-import", words, self._store.folder, writes=True))
        if error is None:
            self._store.add_known(self._new)

    def has_content(self, oid: str) -> bool:
        return oid in self._new or self._store.has_content(oid)

    def add_content(self, oid: str, size: int, data: Iterator[bytes]) -> None:
        """Add a content with known oid and size, unless the store has it. Raises RetinueError if the data do not
        match."""
        if self.has_content(oid):
            return
        digest, left = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False), size
        self._write(b"blob\ndata %d\n" % size)
        for chunk in data:
            self._write(chunk[:left])
            digest.update(chunk)
            left -= len(chunk)
        if left or digest.hexdigest() != oid:
            raise RetinueError("a file was changed while it was looked at")
        self._write(b"\n")
        self._new.add(oid)

    def add_bytes(self, data: bytes) -> str:
        """Add a content and return its oid."""
        oid = hash_content(len(data), iter((data,)))
        self.add_content(oid, len(data), iter((data,)))
        return oid

    def add_tree(self, ref: str, files: Mapping[str, StoredFile]) -> None:
        """Add a tree of files under the ref `ref`."""
        self._write(b"commit %s\ncommitter retinue <> 0 +0000\ndata 0\ndeleteall\n" % ref.encode())
        for path, held in files.items():
            self._write(b"M %s %s %s\n" % (held.mode.encode(), held.oid.encode(), git.quote_path(os.fsencode(path))))
        self._write(b"\n")

    def _write(self, data: bytes) -> None:
        assert self._group.process.stdin is not None
        try:
            self._group.process.stdin.write(data)
        except BrokenPipeError:
            words = b"" if self._group.process.stderr is None else self._group.process.stderr.read(git.LINE_BYTES)
            raise RetinueError(
                git.describe_failure("git fast-import", words, self._store.folder, writes=True)
            ) from None


def add_file(contents: Contents, fd: int) -> str:
    """Add the whole content of an open file and return its oid."""
    size = os.lseek(fd, 0, os.SEEK_END)
    os.lseek(fd, 0, os.SEEK_SET)
    if size <= IN_MEMORY_BYTES:
        return contents.add_bytes(read_up_to(fd, 2 * IN_MEMORY_BYTES))
    oid = hash_content(size, read_chunks(fd))
    os.lseek(fd, 0, os.SEEK_SET)
    contents.add_content(oid, size, read_chunks(fd))
    return oid


def hash_content(size: int, data: Iterator[bytes]) -> str:
    """Return the git oid of a content."""
    digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    for chunk in data:
        digest.update(chunk)
    return digest.hexdigest()
