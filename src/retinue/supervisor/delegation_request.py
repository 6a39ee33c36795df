"""One request on the host: checked, given its copies, run as a tree of ours, told of while it runs, brought back."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET

from retinue.core.errors import RetinueError
from retinue.core.events import Delta, Event, Gap, RunSpawned, encode
from retinue.core.limits import DEFAULT_DEPTH, Limits, Timeouts
from retinue.core.profiles import Profile, Task
from retinue.protocol import outbox as wire
from retinue.remote.mailbox import Mailbox, Unreadable, reached
from retinue.supervisor.nodes import Node
from retinue.supervisor.supervisor import Supervisor
from retinue.workspaces.copy_back import Return
from retinue.workspaces.copy_in import FOLDER, Copier, Outside, Roots, Taken, remove
from retinue.workspaces.run_folders import private_folder

POLL_SECONDS = 0.5
STOPPED = "cancelled before it was started"


@dataclass(frozen=True)
class Hosting:
    """What of the host a watcher needs. `project` and `state` are its own folders, `find` gives a profile of its own by
    name, `say` is for its user, `begun` is told of each tree that was started."""

    outbox: Path
    roots: Sequence[Path]
    project: Path
    state: Path
    find: Callable[[str], Profile]
    limits: Limits
    timeouts: Timeouts
    say: Callable[[str], None] = lambda _: None
    begun: Callable[[Node], None] = lambda _: None
    poll: float = POLL_SECONDS


class Turns:
    """Lets one request at a time copy a folder, there or back: none of ours sees half of what another brings back."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, folder: str) -> asyncio.Lock:
        lock = self._locks.get(folder)
        if lock is None:
            lock = self._locks[folder] = asyncio.Lock()
        return lock


class Errand:
    """One request that is ours to run. `stage` is where its copies go, named as it is; `owner` is whose file it was."""

    def __init__(
        self, supervisor: Supervisor, host: Hosting, box: Mailbox, roots: Roots, turns: Turns, stage: Path
    ) -> None:
        self._supervisor, self._host, self._box, self._roots, self._turns = supervisor, host, box, roots, turns
        self._stage, self._name = stage, stage.name
        self._taken: Taken = {}
        self._notes: list[str] = []
        self._lines = 0
        self.owner: int | None = None

    async def response(self, trees: dict[str, str], stopping: Callable[[], bool]) -> wire.Response:
        """Runs it, if that may be; `trees` is told which tree it is, `stopping` says that none is to be started."""
        name = self._name
        try:
            data, self.owner = self._box.read(
                wire.request_name(name), most=wire.REQUEST_BYTES, owners=(self._box.owner, os.geteuid())
            )
            request = wire.parse_request(data, name)
            if self._box.exists(wire.cancel_name(name)):
                return failed(name, STOPPED, "cancelled")
            profile = self._host.find(request.profile)
            async with self._turns.of(request.workspace):
                readable = await asyncio.to_thread(self._take, request)
            await self._supervisor.prepare(profile)
            reached("checked")
            if stopping() or self._box.exists(wire.cancel_name(name)):
                return failed(name, STOPPED, "cancelled")
            node = self._spawn(request, profile, readable)
        except FileNotFoundError:
            return failed(name, "the request went away while it was looked at")
        except Unreadable as error:
            return failed(name, f"the request {error}")
        except RetinueError as error:
            return failed(name, str(error))
        trees[name] = node.ref.tree
        reached("spawned")
        try:
            self._host.begun(node)
            await self._stream(node)
        except BaseException:
            node.stop("cancelled")  # nobody would tell how it goes on
            raise
        await node.join()
        result = node.result()
        async with self._turns.of(request.workspace):
            await asyncio.to_thread(self._give, request, Path(node.folders.path))
        reached("copied_back")
        if request.ignored:
            self._notes.append(f"keys of the request that nobody here knows: {', '.join(request.ignored[:10])}"[:500])
        return wire.Response(
            id=name,
            status=result.status,
            final_response=result.final_response,
            error_details=result.error_details,
            structured=result.structured,
            partial=result.partial,
            warning="; ".join(self._notes),
            events=self._lines,
        )

    def _take(self, request: wire.Request) -> list[tuple[str, str]]:
        """Copies of what the run gets: its workspace, and each context path with where it is now."""
        try:
            return self._copies(request)
        except OSError as error:
            raise Outside(f"its files could not be copied: {error.strerror or error}") from None

    def _copies(self, request: wire.Request) -> list[tuple[str, str]]:
        copier, found = Copier(never=self._roots.never), []
        self._stage.mkdir(mode=0o700)
        with self._roots.opened(request.workspace, what="workspace") as fd:
            self._taken = copier.take(fd, self._stage / "workspace", what="workspace")
        context = private_folder(self._stage / "context")
        for index, path in enumerate(request.context_paths):
            what = f"context_paths[{index}]"
            copy = context / f"{index}-{os.path.basename(path)}"  # noqa: PTH119 - a plain path of theirs
            with self._roots.opened(path, what=what, file=True) as fd:
                copier.take(fd, copy, what=what)
            found.append((path, str(copy)))
        return found

    def _spawn(self, request: wire.Request, profile: Profile, readable: list[tuple[str, str]]) -> Node:
        """The run: a primary of ours with a copy as its workspace. It is as narrow as the request and as our limits. Of
        the network it has what our own profile of that name says, and nothing where that says nothing."""
        there = [f"{request.workspace} is your workspace", *(f"{path} is {copy}" for path, copy in readable)]
        task = Task(
            request.task,
            context="Paths in the task are those of another machine. Here, " + "; ".join(there) + ".",
            context_paths=[copy for _, copy in readable],
            include_parent_workspace=False,
            subagent_id=self._name,
            label=self._name,
            timeout_seconds=_seconds(request, profile.limits, self._host),
        )
        depth = Limits(depth=_depth(request, profile.limits, self._host.limits))
        given = replace(profile, workspace="scratch", network=profile.network or "none")
        node = self._supervisor.spawn(given, task, limits=depth)
        try:
            private_folder(node.folders.own)
            (self._stage / "workspace").rename(node.folders.path)  # before its task has run at all
        except (OSError, RetinueError) as error:
            node.stop("cancelled")
            raise Outside(f"its workspace could not be made: {error}") from None
        return node

    async def _stream(self, node: Node) -> None:
        """Writes what happens, without what only the host should know; a run is not held up by it."""
        fd: int | None = None
        try:
            fd = self._box.create(wire.events_name(self._name), reader=self.owner)
        except OSError as error:
            self._notes.append(f"its events could not be written: {error.strerror or error}")
        try:
            async for event in self._supervisor.watch(node.ref.tree):
                if isinstance(event, Delta) or fd is None:
                    continue
                try:
                    _write(fd, _line(event))
                    self._lines += 1
                except OSError as error:
                    self._notes.append(f"its events could not all be written: {error.strerror or error}")
                    os.close(fd)
                    fd = None
                reached("event_written")
        finally:
            if fd is not None:
                os.close(fd)

    def _give(self, request: wire.Request, workspace: Path) -> None:
        back: Return | None = None
        try:
            with self._roots.opened(request.workspace, what="workspace") as target:
                about = os.fstat(target)
                owner = (about.st_uid, about.st_gid) if os.geteuid() == 0 else None
                back = Return(self._taken, copier=Copier(never=self._roots.never), owner=owner)
                source = os.open(workspace, FOLDER)
                try:
                    back.give(source, target)
                finally:
                    os.close(source)
            remove(workspace)
        except (OSError, Outside) as error:
            self._notes.append(f"what it wrote could not all be brought back: {error}")
        if back is not None:
            self._notes += back.notes()


def failed(name: str, text: str, status: str = "failed") -> wire.Response:
    return wire.Response(id=name, status=status, final_response=text, error_details=text)


def _depth(request: wire.Request, own: Limits, host: Limits) -> int:
    allowed = own.depth if own.depth is not UNSET else host.depth
    return min(request.depth, DEFAULT_DEPTH if allowed is UNSET else allowed)


def _seconds(request: wire.Request, own: Limits, host: Hosting) -> float | None:
    """What was asked, never more than a person on the host has set for the profile or for all."""
    set_here = [limits.seconds for limits in (own, host.limits) if limits.seconds is not UNSET]
    bounds = [seconds for seconds in set_here if seconds is not None]
    if request.timeout_seconds is not None:
        bounds.append(min(request.timeout_seconds, host.timeouts.maximum))
    elif not set_here:
        bounds.append(host.timeouts.default)
    return min(bounds) if bounds else None


def _line(event: Event) -> bytes:
    body = event.body
    if isinstance(body, RunSpawned):
        body = msgspec.structs.replace(body, profile={}, tools=[], workspace="", task_context="")
    elif getattr(body, "file", ""):
        body = msgspec.structs.replace(body, file="")  # type: ignore[type-var]
    line = encode(msgspec.structs.replace(event, body=body))
    if len(line) > wire.LINE_BYTES:
        line = encode(msgspec.structs.replace(event, body=Gap(1, "an event that is too long for the outbox")))
    return line + b"\n"


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
