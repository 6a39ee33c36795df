"""The host's side of an outbox: takes requests, runs them as trees of this supervisor, and answers each once.

Nothing in the folder is believed. A request names a task, a profile of ours and folders below the allowed roots, of
which the run gets copies; what it changed is copied back. What was claimed and answered is kept in our own state, so
that an id has one effect and one answer, whoever is killed when.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
from msgspec import UNSET

from retinue.core.errors import ConfigError, RetinueError
from retinue.core.events import Delta, Event, Gap, RunSpawned, encode
from retinue.core.limits import DEFAULT_CONCURRENT, DEFAULT_DEPTH, Limits
from retinue.core.profiles import Profile, Task
from retinue.runtime.folders import private_folder
from retinue.runtime.mailbox import Mailbox, Unreadable, reached
from retinue.runtime.staging import Copier, Known, Outside, Roots, known, remove
from retinue.supervisor.nodes import Node
from retinue.supervisor.supervisor import Supervisor
from retinue.supervisor.timeouts import Timeouts
from retinue.wire import outbox as wire

POLL_SECONDS = 0.5
STOP_SECONDS = 40.0
HELD = "another watcher has this outbox; taking over when it ends"
FALLEN = "the watcher that ran it ended; what the run had done until then is not known"
STOPPED = "cancelled before it was started"


@dataclass(frozen=True)
class Hosting:
    """What of the host a watcher needs. `state` is its own folder, `find` gives a profile of its own by name, `say` is
    for its user, `begun` is told of each tree that was started."""

    outbox: Path
    roots: Sequence[Path]
    state: Path
    find: Callable[[str], Profile]
    limits: Limits
    timeouts: Timeouts
    say: Callable[[str], None] = lambda _: None
    begun: Callable[[Node], None] = lambda _: None
    poll: float = POLL_SECONDS


class Watcher:
    """One outbox. `watch` serves it until it is cancelled, `close` ends what it runs and answers it."""

    def __init__(self, supervisor: Supervisor, hosting: Hosting) -> None:
        self._supervisor = supervisor
        self._host = hosting
        self._box = Mailbox(hosting.outbox)
        try:
            self._roots = Roots(hosting.roots, hidden=hosting.state)
            if Path(os.path.realpath(hosting.outbox)).is_relative_to(os.path.realpath(hosting.state)):
                raise ConfigError("the outbox may not be in the watcher's own .retinue folder")
            key = hashlib.sha256(os.fsencode(os.path.realpath(hosting.outbox))).hexdigest()[:16]
            self._kept = Mailbox(private_folder(hosting.state / "outbox" / key))
        except BaseException:
            self._box.close()
            raise
        self._stage = private_folder(hosting.state / "outbox" / f"{key}.copies")
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._trees: dict[str, str] = {}
        self._odd: set[str] = set()
        self._stopping = False

    async def watch(self) -> None:
        """Waits for the folder to be ours, answers what a watcher before us has left, then serves."""
        told = False
        while not self._lock():
            if not told:
                self._host.say(HELD)
                told = True
            await asyncio.sleep(self._host.poll)
        self._recover()
        while True:
            try:
                self.look()
            except OSError as error:
                self._host.say(f"the outbox cannot be read: {error.strerror or error}")
            await asyncio.sleep(self._host.poll)

    async def close(self) -> None:
        """Cancels what runs and waits for the answers; what was not taken stays for the next watcher."""
        self._stopping = True
        for tree in self._trees.values():
            await self._supervisor.cancel(tree)
        if self._serving:
            await asyncio.wait(self._serving.values(), timeout=STOP_SECONDS)
        for task in self._serving.values():
            task.cancel()
        for box in (self._box, self._kept, self._roots):
            box.close()

    def look(self) -> None:
        """One look into the folder: starts what is new, cancels what is to stop."""
        for name in list(self._serving):
            self._obey_cancel(name)
        asked = [name for name in map(wire.asked_id, self._box.names()) if name is not None]
        self._odd &= set(asked)
        most = self._host.limits.concurrent
        most = DEFAULT_CONCURRENT if most is UNSET else most
        for name in asked:
            if name in self._serving or name in self._odd or self._stopping:
                continue
            if most is None or len(self._serving) < max(most, 1):
                task = self._serving[name] = asyncio.create_task(self._serve(name))
                task.add_done_callback(partial(self._served, name))
            elif self._is_new(name) and self._box.exists(wire.cancel_name(name)):
                self._answer(wire.Response(id=name, status="cancelled", final_response=STOPPED, error_details=STOPPED))

    def _served(self, name: str, _: asyncio.Task[None]) -> None:
        self._serving.pop(name, None)

    def _lock(self) -> bool:
        try:
            fcntl.flock(self._box.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

    def _recover(self) -> None:
        """We hold the folder, so whoever claimed something that is not answered is gone."""
        self._box.sweep()
        self._kept.sweep()
        for path in self._stage.iterdir():
            remove(path)
        for name in self._kept.names():
            if self._answer_of(name) == b"":
                self._host.say(f"{name}: {FALLEN}")
                self._answer(_failed(name, FALLEN, "disconnected"))

    def _answer_of(self, name: str) -> bytes | None:
        """What is kept of an id: nothing, that it is claimed (no bytes), or its answer."""
        try:
            return self._kept.read(name, most=2 * wire.RESPONSE_BYTES)[0]
        except FileNotFoundError:
            return None
        except Unreadable:
            return b""

    def _is_new(self, name: str) -> bool:
        return self._answer_of(name) is None

    def _obey_cancel(self, name: str) -> None:
        tree = self._trees.get(name)
        if tree is not None and self._box.exists(wire.cancel_name(name)):
            reached("cancel_seen")
            node = self._supervisor.trees.get(tree)
            if node is not None and node.nodes[0].stop("cancelled"):
                self._host.say(f"{name}: cancelled by the side that asked")

    async def _serve(self, name: str) -> None:
        """One request to its response; whatever happens, it is one."""
        try:
            answer = self._answer_of(name)
            if answer:
                self._deliver(name, answer, None)
                return
            if answer == b"" or not self._claim(name):
                self._answer(_failed(name, FALLEN, "disconnected"))
                return
            errand = _Errand(self._supervisor, self._host, self._box, self._roots, self._stage / name, name)
            try:
                response = await errand.response(self._trees)
            except Exception as error:  # noqa: BLE001 - a request is answered whatever happens here
                response = _failed(name, f"the watcher failed: {type(error).__name__}: {error}")
            self._answer(response, errand.owner)
        except OSError as error:
            self._host.say(f"{name}: the outbox cannot be used: {error.strerror or error}")
        finally:
            self._trees.pop(name, None)
            remove(self._stage / name)

    def _claim(self, name: str) -> bool:
        self._kept.mark(name)
        os.fsync(self._kept.fd)
        reached("claimed")
        marked = self._box.mark(wire.claim_name(name))
        reached("marked")
        return marked

    def _answer(self, response: wire.Response, owner: int | None = None) -> None:
        data = wire.encode_response(response)
        self._kept.put(response.id, data)
        reached("answer_kept")
        self._host.say(
            ": ".join(filter(None, (response.id, response.status, response.error_details, response.warning)))
        )
        self._deliver(response.id, data, owner)

    def _deliver(self, name: str, data: bytes, owner: int | None) -> None:
        """The response in its place, then the request out of the way."""
        file = wire.response_name(name)
        there = b""
        with suppress(FileNotFoundError, Unreadable):
            there = self._box.read(file, most=len(data), owners=(os.geteuid(),))[0]
        if there != data:
            reader = self._box.owner if owner is None else owner
            self._box.put(file, data, reader=reader, half="response_half_written")
        reached("response_written")
        self._box.remove(wire.request_name(name))
        reached("request_removed")
        for mark in (wire.claim_name(name), wire.cancel_name(name)):
            self._box.remove(mark)
        if self._box.exists(wire.request_name(name)):
            self._odd.add(name)


class _Errand:
    """One request that is ours to run. `owner` is whose file it was."""

    def __init__(
        self, supervisor: Supervisor, host: Hosting, box: Mailbox, roots: Roots, stage: Path, name: str
    ) -> None:
        self._supervisor, self._host, self._box, self._roots = supervisor, host, box, roots
        self._stage, self._name = stage, name
        self._before: Known = {}
        self._notes: list[str] = []
        self._lines = 0
        self.owner: int | None = None

    async def response(self, trees: dict[str, str]) -> wire.Response:
        name = self._name
        try:
            data, self.owner = self._box.read(
                wire.request_name(name), most=wire.REQUEST_BYTES, owners=(self._box.owner, os.geteuid())
            )
            request = wire.parse_request(data, name)
            profile = self._host.find(request.profile)
            readable = await asyncio.to_thread(self._take, request)
            reached("checked")
            if self._box.exists(wire.cancel_name(name)):
                return _failed(name, STOPPED, "cancelled")
            node = self._spawn(request, profile, readable)
        except FileNotFoundError:
            return _failed(name, "the request went away while it was looked at")
        except Unreadable as error:
            return _failed(name, f"the request {error}")
        except RetinueError as error:
            return _failed(name, str(error))
        trees[name] = node.ref.tree
        reached("spawned")
        self._host.begun(node)
        await self._stream(node)
        await node.join()
        result = node.result()
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
        copier, found = Copier(), []
        self._stage.mkdir(mode=0o700)
        with self._roots.opened(request.workspace, what="workspace") as fd:
            copier.take(fd, self._stage / "workspace", what="workspace")
        self._before = known(self._stage / "workspace")
        context = private_folder(self._stage / "context")
        for index, path in enumerate(request.context_paths):
            what = f"context_paths[{index}]"
            copy = context / f"{index}-{os.path.basename(path)}"  # noqa: PTH119 - a plain path of theirs
            with self._roots.opened(path, what=what, file=True) as fd:
                copier.take(fd, copy, what=what)
            found.append((path, str(copy)))
        return found

    def _spawn(self, request: wire.Request, profile: Profile, readable: list[tuple[str, str]]) -> Node:
        """The run: a primary of ours with a copy as its workspace. It is as narrow as the request and as our limits."""
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
        node = self._supervisor.spawn(replace(profile, workspace="scratch"), task, limits=depth)
        private_folder(node.folders.own)
        (self._stage / "workspace").rename(node.folders.path)  # before its task has run at all
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
        copier = Copier()
        try:
            with self._roots.opened(request.workspace, what="workspace") as target:
                about = os.fstat(target)
                owner = (about.st_uid, about.st_gid) if os.geteuid() == 0 else None
                source = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                try:
                    copier.give(source, target, self._before, owner=owner)
                finally:
                    os.close(source)
        except (OSError, Outside) as error:
            self._notes.append(f"what it wrote could not all be brought back: {error}")
        if copier.skipped:
            self._notes.append(f"{copier.skipped} links or other things that are no plain files were not brought back")


def _failed(name: str, text: str, status: str = "failed") -> wire.Response:
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
