"""The Box of a run, which lists everything the run sees of the machine, and the outputs that a run leaves in it."""

from __future__ import annotations

import codecs
import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from retinue.core import secrets
from retinue.core.limits import ResourceLimits
from retinue.core.plans import Job
from retinue.files.atomic import open_replacement
from retinue.files.content import read_chunks, write_all
from retinue.files.opening import open_folder, open_regular_file, stat_real
from retinue.files.private import make_private_folder
from retinue.files.state_folder import find_state_folder
from retinue.files.trees import is_public
from retinue.protocol.tool_server import Pin
from retinue.tools.truncate import SPILL_BYTES
from retinue.workspaces.run_folders import HOST_OUTPUTS, RunFolders
from retinue.workspaces.workspace import Workspace, read_record

MAX_OUTPUTS = 1000
MAX_MASKED_BYTES = 2 * SPILL_BYTES


@dataclass(frozen=True)
class Box:
    """The parts of the machine that a sandbox shows.

    `workspace` is writable if it is the run's own, else read-only. `outputs` holds the run's files for text that does
    not fit inline, `host_outputs` the same files of host tools. `hidden` is our own state, of which the run sees only
    the paths listed here. `objects` are folders that the run's git reads and searches skip; of these,
    `foreign_objects` may belong to another repository. `pinned` identifies the `readable` paths that other runs may
    have replaced: the tool server checks what it sees there. `proxy` is the socket to the allowed hosts, if any.
    `user` is the user of an earlier start, if the sandbox is restarted."""

    tree: str
    workspace: str
    own_workspace: bool
    outputs: str
    host_outputs: str
    readable: tuple[str, ...]
    hidden: str
    resource_limits: ResourceLimits
    objects: tuple[str, ...] = ()
    foreign_objects: tuple[str, ...] = ()
    pinned: tuple[Pin, ...] = ()
    run: int = 0
    proxy: str = ""
    user: tuple[int, int] | None = None

    @property
    def roots(self) -> tuple[str, ...]:
        """Return the visible folders of runs and users, with the workspace last."""
        return (*self.objects, *self.readable, self.workspace)


def make_box(job: Job, folders: RunFolders, resource_limits: ResourceLimits, *, user: tuple[int, int] | None) -> Box:
    """Create the Box of a run. All its paths are resolved, so that no link in them leads outside."""
    own = Path(os.path.realpath(make_private_folder(folders.own)))
    make_private_folder(own.parent / "snapshots")
    workspace = os.path.realpath(folders.workspace)
    made = None if folders.workspace_copy is None else read_record(folders.own, Workspace)
    hidden = str(find_state_folder(own))
    readable = folders.find_readable_paths()
    if folders.granted_paths:
        readable = _drop_nested(readable, folders.granted_paths, workspace, hidden)
    return Box(
        tree=job.ref.tree,
        workspace=workspace,
        own_workspace=is_below(workspace, (str(own),)),
        outputs=str(make_private_folder(own / "outputs")),
        host_outputs=str(make_private_folder(own / HOST_OUTPUTS)),
        readable=tuple(readable),
        pinned=tuple(pin_path(path) for path in readable if path in folders.granted_paths),
        hidden=hidden,
        resource_limits=resource_limits,
        objects=() if made is None else tuple(map(os.path.realpath, filter(os.path.isdir, made.objects))),
        foreign_objects=() if made is None else made.foreign_objects,
        run=job.ref.run,
        user=user,
    )


def _drop_nested(readable: Sequence[str], granted: Collection[str], workspace: str, hidden: str) -> list[str]:
    """Return the readable paths, without the granted paths that are inside another visible folder. A path below
    `hidden` is not visible in a folder above `hidden`, because a mask covers our own state there.

    A path inside a visible folder needs no mount of its own, and a mount there would be unsafe. Another run may write
    that folder: with a link at the path, the mount lands on the target of the link. Once the link is gone again, the
    tool server finds the right folder at the path, and the check of the pin succeeds."""

    def is_visible(path: str) -> bool:
        above = [folder for folder in (*readable, workspace) if is_below(path, (folder,))]
        masked = is_below(path, (hidden,))
        return any(not (masked and is_below(hidden, (folder,))) for folder in above)

    return [path for path in readable if path not in granted or not is_visible(path)]


def pin_path(path: str) -> Pin:
    """Return the path with its device and inode. Raises OSError if it leads over a link."""
    status = stat_real(path)
    return Pin(path, status.st_dev, status.st_ino)


def find_closed_paths(box: Box) -> list[str]:
    """Return the readable paths of the run that its user has no permission to read.

    The run gets a warning for each path. The permissions are not changed."""
    shared = () if box.own_workspace else (box.workspace,)
    given = [path for path in (*box.readable, *box.objects, *shared) if not is_below(path, (box.hidden,))]
    return [path for path in given if not is_public(path)]


def find_output(folder: str, name: str) -> str:
    """Return the path of a regular file in the outputs folder, or "" if there is none. Follows no link."""
    try:
        at = open_folder(folder)
        try:
            os.close(open_regular_file(name, dir_fd=at))
        finally:
            os.close(at)
    except OSError:
        return ""
    return f"{folder}/{name}"


def mask_outputs(folder: str, *, only: str = "") -> None:
    """Replace known secrets in the files of the outputs folder, or in the file `only`.

    A sandbox knows no secrets, so it writes the output of commands unmasked. Skips entries that are not regular files.
    The number of files and their total size are limited, because a sparse file can have any size."""
    if not secrets.known:
        return
    left = MAX_MASKED_BYTES
    with suppress(OSError):
        at = open_folder(folder)
        try:
            with os.scandir(at) as entries:
                names = [only] if only else [entry.name for entry in islice(entries, MAX_OUTPUTS)]
            for name in names:
                with suppress(OSError):
                    left -= _mask_file(name, at, left)
        finally:
            os.close(at)


def _mask_file(name: str, folder: int, limit: int) -> int:
    """Replace secrets in a file of at most `limit` bytes. Returns the size of the file."""
    fd = open_regular_file(name, dir_fd=folder)
    try:
        size = os.fstat(fd).st_size
        if size > limit:
            return 0
        if not _holds_secret(fd):
            return size
        os.lseek(fd, 0, os.SEEK_SET)
        with open_replacement(name, dir_fd=folder, mode=None) as new:
            for _, masked in _read_masked(fd):
                write_all(new, masked.encode("utf-8", "replace"))
            if os.geteuid() == 0:  # the sandbox's user must be able to read the file
                status = os.fstat(fd)
                os.fchown(new, status.st_uid, status.st_gid)
        return size
    finally:
        os.close(fd)


def _holds_secret(fd: int) -> bool:
    waiting = ""
    for text, masked in _read_masked(fd):
        waiting += text
        if not waiting.startswith(masked):
            return True
        waiting = waiting[len(masked) :]
    return False


def _read_masked(fd: int) -> Iterator[tuple[str, str]]:
    """Yield the rest of a file in pieces, each raw and with secrets replaced. The masked text may lag behind."""
    decoder, clean = codecs.getincrementaldecoder("utf-8")("replace"), secrets.SecretStream()
    for chunk in read_chunks(fd):
        text = decoder.decode(chunk)
        yield text, clean.feed(text)
    text = decoder.decode(b"", True)
    yield text, clean.feed(text) + clean.rest()


def is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders) and ".." not in path.split("/")
