"""One request from an outbox, on the host: checked, copied in, run as a tree, streamed, and copied back.

Uses runs only through the commands of Control in this process. The outbox watcher makes a `DelegationRequest` for each
request file and writes the returned response.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import msgspec
from msgspec import UNSET

from retinue.core.caller import NOBODY, Caller, narrow_caller
from retinue.core.control import Control, RunHandle
from retinue.core.errors import RetinueError
from retinue.core.events import Delta, Event, Gap, encode_event
from retinue.core.limits import Limits, Timeouts
from retinue.core.messages import RunRef
from retinue.core.profiles import Profile, Task
from retinue.core.results import WITHOUT_WORDS, Result
from retinue.files.content import write_all
from retinue.files.failpoints import reach_failpoint
from retinue.files.mailbox import Mailbox, UnreadableMessage
from retinue.protocol import outbox as protocol
from retinue.protocol.peer_events import strip_event
from retinue.workspaces.delegated import AllowedRoots, DelegatedWorkspace, RefusedPath

POLL_SECONDS = 0.5
STOPPED = "cancelled before it was started"
# One lock per requested folder, so that no request copies a folder while another request writes it.
FolderLocks = WeakValueDictionary[str, asyncio.Lock]


@dataclass(frozen=True)
class WatcherSettings:
    """The host's settings for an outbox.

    `project` and `state` are the host's own folders. `find` returns a profile by name. `say` shows a line to the
    host's user. `begun` is called with the ref and the task of each spawned run, and `answered` with its tree and a
    line about its answer, which `say` shows if there is no `answered`. `caller` holds the limits that the whole process
    inherited."""

    outbox: Path
    roots: Sequence[Path]
    project: Path
    state: Path
    find: Callable[[str], Profile]
    limits: Limits
    timeouts: Timeouts
    say: Callable[[str], None] = lambda _: None
    begun: Callable[[RunRef, str], None] = lambda _, __: None
    answered: Callable[[str, str], None] | None = None
    caller: Caller = NOBODY
    poll: float = POLL_SECONDS


class DelegationRequest:
    """A claimed request. `stage` is the folder for its copies and has the request's name. `owner` is the user id of
    the request file. `tree` is empty until the request runs."""

    def __init__(
        self,
        control: Control,
        host: WatcherSettings,
        box: Mailbox,
        roots: AllowedRoots,
        locks: FolderLocks,
        stage: Path,
    ) -> None:
        self._control, self._host, self._box, self._roots, self._locks = control, host, box, roots, locks
        self._stage, self.name = stage, stage.name
        self._copies = DelegatedWorkspace(stage, never=roots.never)
        self._notes: list[str] = []
        self._lines = 0
        self._steers = 0
        self.owner: int | None = None
        self.tree = ""

    async def serve(self, stopping: Callable[[], bool]) -> protocol.OutboxResponse:
        """Run the request, if it is allowed, and return its response. Starts nothing once `stopping` returns True."""
        name = self.name
        try:
            data, self.owner = self._read_file(protocol.request_name(name))
            request = protocol.parse_request(data, name)
            if self._is_cancelled():
                return failure_response(name, STOPPED, "cancelled")
            profile = self._host.find(request.profile)
            async with self._locks.setdefault(request.workspace, asyncio.Lock()):
                readable = await asyncio.to_thread(self._copy_in, request)
            await self._control.prepare(profile)
            reach_failpoint("checked")
            if stopping() or self._is_cancelled():
                return failure_response(name, STOPPED, "cancelled")
            run, workspace = await self._spawn(request, profile, readable)
        except FileNotFoundError:
            return failure_response(name, "the request was removed while it was being read")
        except UnreadableMessage as error:
            return failure_response(name, f"the request {error}")
        except RetinueError as error:
            return failure_response(name, str(error))
        self.tree = run.tree
        reach_failpoint("spawned")
        try:
            self._host.begun(run.ref, request.task)
            await self._stream(run.tree)
        except BaseException:
            await self._control.cancel(run.tree)  # its further events would not be reported
            raise
        result = await run.result()
        async with self._locks.setdefault(request.workspace, asyncio.Lock()):
            await asyncio.to_thread(self._copy_back, request, workspace)
        reach_failpoint("copied_back")
        if request.ignored:
            self._notes.append(
                f"the request has unknown keys, which were ignored: {', '.join(request.ignored[:10])}"[:500]
            )
        return self._make_response(result)

    def read_steer(self, file: str) -> tuple[int, str | None]:
        """Return the message in a file of the outbox, as `parse_steer` does. Raises RequestError, UnreadableMessage and
        FileNotFoundError."""
        self._steers += 1
        if self._steers > protocol.MOST_STEERS:
            raise UnreadableMessage(f"exceeds the limit of {protocol.MOST_STEERS} messages for one request")
        return protocol.parse_steer(self._read_file(file)[0])

    def _read_file(self, file: str) -> tuple[bytes, int]:
        """Return the content and the owner of a file that the requesting side has written."""
        return self._box.read_message(file, limit=protocol.REQUEST_BYTES, owners=(self._box.owner, os.geteuid()))

    def _is_cancelled(self) -> bool:
        return self._box.has_entry(protocol.cancel_name(self.name))

    def _make_response(self, result: Result[Any]) -> protocol.OutboxResponse:
        return protocol.OutboxResponse(
            id=self.name,
            status=result.status,
            final_response=result.final_response,
            error_details=result.error_details,
            structured=result.structured,
            code=result.code,
            is_named=result.status in WITHOUT_WORDS,
            partial=result.partial,
            warning="; ".join(self._notes),
            events=self._lines,
        )

    def _copy_in(self, request: protocol.OutboxRequest) -> list[tuple[str, str]]:
        """Copy the workspace and the context paths. Return each context path with the path of its copy."""
        found = []
        try:
            self._stage.mkdir(mode=0o700)
            with self._roots.open_path(request.workspace, what="workspace") as fd:
                self._copies.copy_workspace(fd)
            for index, path in enumerate(request.context_paths):
                what = f"context_paths[{index}]"
                name = f"{index}-{os.path.basename(path)}"  # noqa: PTH119 - a path of the other machine
                with self._roots.open_path(path, what=what, file=True) as fd:
                    found.append((path, str(self._copies.copy_context(fd, name, what=what))))
        except OSError as error:
            raise RefusedPath(f"its files could not be copied: {error.strerror or error}") from None
        return found

    async def _spawn(
        self, request: protocol.OutboxRequest, profile: Profile, readable: list[tuple[str, str]]
    ) -> tuple[RunHandle, Path]:
        """Spawn a primary whose workspace is the copy, within the limits of the request and of the host. Return the
        run and its workspace. The run may reach the hosts in `profile.network`, or no host if that is not set."""
        there = [f"{request.workspace} is your workspace", *(f"{path} is {copy}" for path, copy in readable)]
        task = Task(
            request.task,
            context="Paths in the task are those of another machine. Here, " + "; ".join(there) + ".",
            context_paths=[copy for _, copy in readable],
            include_parent_workspace=False,
            subagent_id=request.subagent_id or self.name,
            label=self.name,
            timeout_seconds=_choose_timeout(request, profile.limits, self._host),
        )
        placed = replace(profile, workspace="scratch", network=profile.network or "none")
        caller = narrow_caller(self._host.caller, request.limits.as_client())
        run = await self._control.spawn(placed, task, caller=caller, starts_from=str(self._copies.path))
        return run, Path((await self._control.describe_run(run.tree)).workspace)

    async def _stream(self, tree: str) -> None:
        """Write the events of the tree to the outbox. A write error does not stop the run."""
        fd: int | None = None
        try:
            fd = self._box.create_stream(protocol.events_name(self.name), reader=self.owner)
        except OSError as error:
            self._notes.append(f"its events could not be written: {error.strerror or error}")
        try:
            async for event in self._control.watch(tree):
                line = None if isinstance(event, Delta) else _encode_line(event)
                if line is None or fd is None:
                    continue
                try:
                    write_all(fd, line)
                    self._lines += 1
                except OSError as error:
                    self._notes.append(f"its events could not all be written: {error.strerror or error}")
                    os.close(fd)
                    fd = None
                reach_failpoint("event_written")
        finally:
            if fd is not None:
                os.close(fd)

    def _copy_back(self, request: protocol.OutboxRequest, workspace: Path) -> None:
        """Copy the changes of the run back. The run's version wins; the notes name the files it replaced."""
        try:
            with self._roots.open_path(request.workspace, what="workspace") as target:
                self._notes += self._copies.bring_back(workspace, target)
        except (OSError, RetinueError) as error:
            self._notes.append(f"some of its changes could not be copied back: {error}")


def failure_response(name: str, text: str, status: str = "failed") -> protocol.OutboxResponse:
    return protocol.OutboxResponse(id=name, status=status, final_response=text, error_details=text)


def _choose_timeout(request: protocol.OutboxRequest, own: Limits, host: WatcherSettings) -> float | None:
    """Return the requested timeout in seconds, limited by the timeouts set on the host."""
    set_here = [limits.seconds for limits in (own, host.limits) if limits.seconds is not UNSET]
    bounds = [seconds for seconds in set_here if seconds is not None]
    if request.timeout_seconds is not None:
        bounds.append(min(request.timeout_seconds, host.timeouts.maximum))
    elif not set_here:
        bounds.append(host.timeouts.default)
    return min(bounds) if bounds else None


def _encode_line(event: Event) -> bytes | None:
    """Encode an event as the requesting side may see it, or return None if that side may not see it."""
    shown = strip_event(event)
    if shown is None:
        return None
    line = encode_event(shown)
    if len(line) > protocol.LINE_BYTES:
        line = encode_event(msgspec.structs.replace(shown, body=Gap(1, "an event that is too long for the outbox")))
    return line + b"\n"
