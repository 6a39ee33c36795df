"""`isolated`: every run is a process of its own behind a wall, with nothing of the machine but what it was given.

It holds no key and has no network: model calls, host-side tools, approvals and spawns go over its link, and hosts that
its profile allows are reached through a proxy of the host's. Folders that are shared with the user are only read behind
the wall; `write` and `edit` there are the host's, after approval.
"""

from __future__ import annotations

import asyncio
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from retinue.agent.local import EDITING, LOCAL
from retinue.agent.programs import callable_by_programs
from retinue.core.errors import Disconnected, Limited, RetinueError
from retinue.core.events import RunStarted, Warned
from retinue.core.limits import CANCEL_ASK_SECONDS, TERM_SECONDS, Caps
from retinue.core.plans import Job
from retinue.core.ports import Link
from retinue.core.results import Ending
from retinue.core.rules import CODE_MODE
from retinue.files.private import make_private_folder
from retinue.protocol import link as wire
from retinue.sandbox.box import FULL_NETWORK, PROXY, Box, Opening, Wall
from retinue.sandbox.channel import Channel
from retinue.sandbox.hints import Starved, hint, offline_hint
from retinue.sandbox.near import NearEnd
from retinue.sandbox.process import REAP_SECONDS, Process
from retinue.sandbox.proxy_socket import Gate, Proxies
from retinue.workspaces.run_folders import RunFolders
from retinue.workspaces.workspace import WORKSPACE_FILE, WorkspaceRecord, read_record

START_SECONDS = 60.0
LOOK_SECONDS = 1.0
CLOSED = "behind the wall the run is a user of its own, and {path} is closed to others: it is not read there"
LOOK_SHARE = 20  # of the time, at most so large a part is spent counting bytes


class Isolated:
    """Runs jobs behind one kind of wall. `proxies` makes what runs reach their hosts through; without it none does."""

    name = "isolated"
    process = Process
    hint = staticmethod(hint)
    grace = CANCEL_ASK_SECONDS + TERM_SECONDS + REAP_SECONDS

    def __init__(self, wall: Wall, *, caps: Caps | None = None, proxies: Proxies | None = None) -> None:
        self._wall = wall
        self._caps = caps or Caps()
        self._proxies = proxies
        self.started = RunStarted(self.name, (*wall.words, *(["proxy"] if proxies is not None else [])))

    async def run(self, job: Job, link: Link) -> Ending:
        assert isinstance(job.folders, RunFolders)
        box = box_of(job, job.folders, self._caps)
        if self._proxies is None:
            return await self._run(job, link, box, None)
        async with Gate(os.path.dirname(box.lent), job.plan.network, link, self._proxies) as gate:  # noqa: PTH120
            return await self._run(job, link, replace(box, proxy=str(gate.path)), gate)

    async def _run(self, job: Job, link: Link, box: Box, gate: Gate | None) -> Ending:
        assert isinstance(job.folders, RunFolders)
        try:
            opening = await self._opened(box)
            process = self.process(opening, Path(job.folders.own, "full_logs", "worker.log"))
            process.start()
        except OSError as error:
            raise RetinueError(f"cannot start a process behind the wall: {error}") from None
        if opening.user is not None:
            for path in closed_paths(box):
                link.emit(Warned(CLOSED.format(path=path), code="closed_path"))
        walled = walled_tools(job, box)
        folders = HostFolders(job.folders, box.lent, opening.user)
        near = NearEnd(
            job,
            link,
            walled=walled,
            folders=folders,
            is_output=lambda file: _is_below(file, (box.outputs, box.lent)),
        )
        channel = Channel(process.reading, process.writing, incoming="up", on_frame=near.take, on_end=near.closed)
        near.send = channel.send
        starved = None if opening.group is None else Starved(opening.group.memory_kills, box.caps.memory)

        def hints(said: str) -> str:
            found = self.hint(said), self._unreached(said, gate), "" if starved is None else starved.hint()
            return "\n".join(filter(None, found))

        near.hint = hints
        if gate is not None:
            near.hello = gate.vanish
        channel.send(self._start(job, box, walled, near.stopped()))
        size = asyncio.create_task(_watch_size((box.workspace,) if box.own_workspace else (), box, near))
        late = asyncio.get_running_loop().call_later(START_SECONDS, near.give_up)
        ask = None

        async def stop() -> None:
            channel.send(wire.Stop())
            await near.silent.wait()

        try:
            return await near.ending()
        except Disconnected:
            await process.stop(None)
            raise _went_away(process, near, box.caps) from None
        except wire.LinkError as error:
            raise RetinueError(f"{job.ref.agent}: {error}") from None
        except BaseException:
            ask = stop
            raise
        finally:
            size.cancel()
            late.cancel()
            try:
                await process.stop(ask)
            finally:
                channel.close()

    def _unreached(self, said: str, gate: Gate | None) -> str:
        """Words for a command that failed because of what it could not reach."""
        if gate is not None:
            return gate.note()
        return "" if FULL_NETWORK in self._wall.words else offline_hint(said)

    async def _opened(self, box: Box) -> Opening:
        """Beside the loop: giving a large workspace to its run takes a while."""
        opening = asyncio.ensure_future(asyncio.to_thread(self._wall.open, box))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            opening.add_done_callback(_drop)
            raise

    def _start(self, job: Job, box: Box, walled: Sequence[str], past: wire.Stopped | None) -> wire.Start:
        return wire.Start(
            wire.VERSION,
            job.ref,
            tuple(job.plan.by_name),
            tuple(walled),
            job.max_turns,
            box.workspace,
            tuple(os.path.realpath(path) for path in job.folders.searched),
            (box.workspace, *box.readable, box.outputs, box.lent),
            box.outputs,
            box.caps,
            not self._wall.counts_memory,
            job.setup,
            past,
            len(os.listdir(box.outputs)),  # noqa: PTH208
            PROXY if box.proxy else "",
            callable_by_programs(job.plan) if CODE_MODE in walled else (),
        )


def _drop(opened: asyncio.Future[Opening]) -> None:
    """Nobody waits for it any more."""
    if not opened.cancelled() and opened.exception() is None:
        opened.result().drop()


class HostFolders:
    """The run's folders, for tools of the host: what they spill can be read behind the wall."""

    def __init__(self, folders: RunFolders, lent: str, user: tuple[int, int] | None) -> None:
        self._folders, self._lent, self._user = folders, lent, user
        self._spilled = len(os.listdir(lent))  # noqa: PTH208

    @property
    def workspace(self) -> Path:
        return self._folders.workspace

    @property
    def roots(self) -> Sequence[Path]:
        return (self._folders.workspace, *map(Path, self._folders.readable), Path(self._lent))

    @property
    def searched(self) -> Sequence[Path]:
        return self._folders.searched

    def spill(self, name: str) -> Path:
        self._spilled += 1
        path = Path(self._lent, f"{self._spilled:03d}-{name}")
        fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            if self._user is not None:
                os.fchown(fd, *self._user)
        finally:
            os.close(fd)
        return path


def box_of(job: Job, folders: RunFolders, caps: Caps) -> Box:
    """What the run sees, all of it there; resolved, so that no link in a path leads elsewhere inside."""
    own = Path(os.path.realpath(make_private_folder(folders.own)))
    made = {name: str(make_private_folder(own / name)) for name in ("outputs", "lent")}
    make_private_folder(own.parent / "snapshots")
    workspace = os.path.realpath(folders.workspace)
    readable = [os.path.realpath(path) for path in folders.readable]
    return Box(
        tree=job.ref.tree,
        workspace=workspace,
        own_workspace=_is_below(workspace, (str(own),)),
        outputs=made["outputs"],
        lent=made["lent"],
        readable=tuple(path for path in readable if Path(path).exists()),
        hidden=str(own.parents[2]),
        caps=caps,
        objects=tuple(_objects(folders)),
        run=job.ref.run,
    )


def _objects(folders: RunFolders) -> Iterator[str]:
    """The folders that a worktree's git reads its history from."""
    made = None if folders.workspace_copy is None else read_record(folders.own, WORKSPACE_FILE, WorkspaceRecord)
    for path in made.objects if made is not None else ():
        if Path(path).is_dir():
            yield os.path.realpath(path)


def closed_paths(box: Box) -> list[str]:
    """What the run was given to read and, being another user, cannot. It is told, never opened up."""
    given = [path for path in (*box.readable, *box.objects) if not _is_below(path, (box.hidden,))]
    if not box.own_workspace:
        given.append(box.workspace)
    return [path for path in given if not _is_open(path)]


def _is_open(path: str) -> bool:
    try:
        mode = Path(path).stat().st_mode
    except OSError:
        return False
    needed = stat.S_IROTH | (stat.S_IXOTH if stat.S_ISDIR(mode) else 0)
    return mode & needed == needed


def walled_tools(job: Job, box: Box) -> list[str]:
    """The tools that run behind the wall; a function of the host stays there whatever its name is."""
    names = [name for name in job.plan.by_name if name in LOCAL and name not in job.plan.host]
    return names if box.own_workspace else [name for name in names if name not in EDITING]


def _went_away(process: Process, near: NearEnd, caps: Caps) -> Exception:
    """What a link that closed without an ending means."""
    if process.why == "out of memory":
        return Limited(f"its memory of {caps.memory // 1024**2} MiB is used up")
    said = f" ({process.last_words})" if process.last_words else ""
    if not near.greeted:
        return RetinueError(f"the worker behind the wall did not start: {process.why}{said}")
    return Disconnected(process.why + said)


async def _watch_size(folders: Sequence[str], box: Box, near: NearEnd) -> None:
    """Ends the run when what it has written is more than it may."""
    loop, pause = asyncio.get_running_loop(), LOOK_SECONDS
    while True:
        await asyncio.sleep(pause)
        before = loop.time()
        used = await asyncio.to_thread(lambda: sum(map(size_of, (*folders, box.outputs))))
        if used > box.caps.workspace_bytes:
            near.fail(Limited(f"its files are {used} bytes, more than the {box.caps.workspace_bytes} it may have"))
            return
        pause = max(LOOK_SECONDS, LOOK_SHARE * (loop.time() - before))


def size_of(folder: str) -> int:
    """The bytes its files take on disk, by descriptors: a folder that is swapped for a link leads nowhere."""
    total = 0
    with suppress(OSError):
        for _, _, names, at in os.fwalk(folder):
            for name in names:
                with suppress(OSError):
                    found = os.stat(name, dir_fd=at, follow_symlinks=False)
                    total += found.st_blocks * 512 if stat.S_ISREG(found.st_mode) else 0
    return total


def _is_below(path: str, folders: Sequence[str]) -> bool:
    return any(path.startswith(f"{folder}/") for folder in folders) and ".." not in path.split("/")
