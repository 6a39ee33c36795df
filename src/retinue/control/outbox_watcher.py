"""The watcher of an outbox on the host. It claims requests, runs each as a tree, and answers each once.

Nothing in the folder is trusted. A request names a task, a profile of ours and folders below the allowed roots. The
run gets copies of the folders, and its changes are copied back. Claims and answers are stored in the host's state
folder, so a request id has one effect and one answer even if a process is killed at any point. Uses only the commands
of Control.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from contextlib import suppress
from pathlib import Path

from msgspec import UNSET

from retinue.concurrency import TaskOwner
from retinue.control.delegation_request import (
    STOPPED,
    DelegationRequest,
    FolderLocks,
    WatcherSettings,
    failure_response,
)
from retinue.core.control import Control
from retinue.core.errors import ConfigError, RetinueError
from retinue.core.limits import DEFAULT_CONCURRENT, RETENTION_DAYS
from retinue.core.messages import ASKER
from retinue.files.atomic import sync_folder
from retinue.files.failpoints import reach_failpoint
from retinue.files.locks import take_file_lock
from retinue.files.mailbox import Mailbox, UnreadableMessage
from retinue.files.private import make_private_folder
from retinue.files.state_folder import OUTBOX_FOLDER
from retinue.files.trees import remove_tree
from retinue.protocol import outbox as protocol
from retinue.workspaces.delegated import AllowedRoots, remove_temporary_files

SIDE = "watches"
UNREAD_SECONDS = 24 * 3600.0
GLANCE_SECONDS = 0.02
STOP_SECONDS = 40.0
MOST_KEPT = 20_000  # as many names as one listing of a folder returns
MOST_NAMED = 20
ODD_NAME = "{file!r} is not taken: the id of a request has 1 to 128 of A-Z, a-z, 0-9, '-' and '_'"
HELD = "another watcher has this outbox; taking over when it ends"
FALLEN = "the watcher that ran it ended; what the run had done until then is not known"


class OutboxWatcher:
    """The watcher of one outbox. `watch` serves the outbox until cancelled. `close` ends and answers the running
    requests."""

    def __init__(self, control: Control, hosting: WatcherSettings) -> None:
        self._control = control
        self._host = hosting
        self._box = Mailbox(hosting.outbox, SIDE)
        try:
            self._roots = AllowedRoots(hosting.roots, ours=[hosting.project, hosting.state], never=[self._box.fd])
            if Path(os.path.realpath(hosting.outbox)).is_relative_to(os.path.realpath(hosting.state)):
                raise ConfigError("the outbox may not be in the watcher's own .retinue folder")
            key = hashlib.sha256(os.fsencode(os.path.realpath(hosting.outbox))).hexdigest()[:16]
            self._kept = Mailbox(make_private_folder(hosting.state / OUTBOX_FOLDER / key), SIDE)
        except BaseException:
            self._box.close()
            raise
        self._stage = make_private_folder(hosting.state / OUTBOX_FOLDER / f"{key}.copies")
        self._locks = FolderLocks()
        self._serving: dict[str, asyncio.Task[None]] = {}
        self._requests: dict[str, DelegationRequest] = {}
        self._commands = TaskOwner()
        self._odd: set[str] = set()
        self._said: set[str] = set()
        self._stopping = False

    async def watch(self) -> None:
        """Wait for the lock on the folder, answer the requests that an earlier watcher left open, then serve new
        ones."""
        is_told = False
        while not self._take_lock():
            if not is_told:
                self._host.say(HELD)
                is_told = True
            await asyncio.sleep(self._host.poll)
        self._recover()
        while True:
            changed = self._box.modified_at()
            try:
                self.look_once()
            except OSError as error:
                self._complain(f"the outbox cannot be used: {error.strerror or error}")
            for _ in range(max(1, round(self._host.poll / GLANCE_SECONDS))):
                await asyncio.sleep(GLANCE_SECONDS)
                if self._box.modified_at() != changed:
                    break

    async def close(self) -> None:
        """Cancel the runs and wait for their answers. Unclaimed requests stay for the next watcher."""
        self._stopping = True
        for request in list(self._requests.values()):
            if request.tree:
                await self._control.cancel(request.tree)
        serving = list(self._serving.values())
        if serving:
            await asyncio.wait(serving, timeout=STOP_SECONDS)
        if self._serving:
            return  # running requests still use the folders; they end with the process
        for box in (self._box, self._kept, self._roots):
            box.close()

    def look_once(self) -> None:
        """Scan the folder once: start new requests, and cancel and steer running ones."""
        for request in self._requests.values():
            if request.tree and self._box.has_entry(protocol.cancel_name(request.name)):
                reach_failpoint("cancel_seen")
                self._commands.start(self._cancel(request))
        files = self._box.list_names()
        for file in files:
            self._read_steer(file)
        asked = [name for name in map(protocol.parse_request_name, files) if name is not None]
        for file in [file for file in files if protocol.is_odd_request(file)][:MOST_NAMED]:
            self._complain(ODD_NAME.format(file=file))
        self._odd &= set(asked)
        if asked and len(self._kept.list_names()) >= MOST_KEPT:
            self._complain(f"{MOST_KEPT} requests are remembered in {self._kept.folder}; no more are taken")
            return
        most = self._host.limits.concurrent
        most = DEFAULT_CONCURRENT if most is UNSET else most
        for name in asked:
            if name in self._serving or name in self._odd or self._stopping:
                continue
            if most is None or len(self._serving) < max(most, 1):
                task = self._serving[name] = self._commands.start(self._serve(name))
                task.add_done_callback(lambda _, name=name: self._serving.pop(name, None))  # type: ignore[misc]
            elif self._box.has_entry(protocol.cancel_name(name)) and self._kept_answer(name) is None:
                self._answer(failure_response(name, STOPPED, "cancelled"))
        awaited = {*asked, *self._serving}
        for file in files:
            about = protocol.parse_cancel_name(file) or protocol.parse_steer_name(file)
            if about is not None and about not in awaited and self._kept.has_entry(about):
                self._box.remove_entry(file)  # the cancel or message came too late

    def _complain(self, text: str) -> None:
        """Show a message to the user, unless it was shown before."""
        if text not in self._said:
            self._said.add(text)
            self._host.say(text)

    def _take_lock(self) -> bool:
        try:
            return take_file_lock(self._box.fd)
        except OSError:  # a file system without locks
            return False

    def _recover(self) -> None:
        """Answer the claims of dead watchers. This watcher holds the lock, so the owner of an unanswered claim is
        gone."""
        self._box.remove_leftovers()
        self._kept.remove_leftovers()
        for path in self._stage.iterdir():
            remove_tree(path)
        for name in self._kept.list_names():
            if self._kept_answer(name) == b"":
                self._sweep_workspace(name)
                self._answer(failure_response(name, FALLEN, "disconnected"))
            elif self._kept.entry_age(name) > UNREAD_SECONDS and not self._box.has_entry(protocol.request_name(name)):
                for file in (protocol.response_name(name), protocol.events_name(name)):
                    self._box.remove_entry(file)  # nobody has collected it
                if self._kept.entry_age(name) > RETENTION_DAYS * 24 * 3600:
                    self._kept.remove_entry(name)

    def _sweep_workspace(self, name: str) -> None:
        """Remove half-written files that a killed watcher left in the workspace of a request."""
        with suppress(OSError, UnreadableMessage, RetinueError):  # without the request, the workspace is unknown
            request = protocol.parse_request(
                self._box.read_message(protocol.request_name(name), limit=protocol.REQUEST_BYTES)[0], name
            )
            with self._roots.open_path(request.workspace, what="workspace") as fd:
                remove_temporary_files(fd)

    def _kept_answer(self, name: str) -> bytes | None:
        """Return the stored answer for an id: empty bytes if the id is only claimed, None if it is unknown."""
        try:
            return self._kept.read_message(name, limit=2 * protocol.RESPONSE_BYTES)[0]
        except FileNotFoundError:
            return None
        except UnreadableMessage:
            return b""

    async def _cancel(self, request: DelegationRequest, run: int = 0) -> None:
        if await self._control.cancel(request.tree, run):
            self._host.say(f"{request.name}: {f'run {run} ' if run else ''}cancelled by the side that asked")

    def _read_steer(self, file: str) -> None:
        """Send the message in a steer file to its run, or cancel the run, unless the sender withdraws the file first.
        The side that removes the file has the message."""
        request = self._requests.get(protocol.parse_steer_name(file) or "")
        if request is None or not request.tree:
            return
        try:
            run, text = request.read_steer(file)
        except FileNotFoundError:
            return
        except (UnreadableMessage, protocol.RequestError) as error:
            self._complain(f"{request.name}: a message for it was not read: the file {error}")
            self._box.remove_entry(file)
            return
        if self._box.remove_entry(file):
            command = self._cancel(request, run) if text is None else self._send(request.tree, run, text)
            self._commands.start(command)

    async def _send(self, tree: str, run: int, text: str) -> None:
        try:
            await self._control.send(tree, run, text, source=ASKER)
        except RetinueError as error:
            self._complain(f"{tree}: a message for it was not read: {error}")

    async def _serve(self, name: str) -> None:
        """Serve the request `name` and always write an answer."""
        try:
            answer = self._kept_answer(name)
            if answer:
                self._deliver(name, answer, None)
                return
            if answer == b"" or not self._claim(name):
                self._answer(failure_response(name, FALLEN, "disconnected"))
                return
            request = self._requests[name] = DelegationRequest(
                self._control, self._host, self._box, self._roots, self._locks, self._stage / name
            )
            try:
                response = await request.serve(lambda: self._stopping)
            except Exception as error:  # noqa: BLE001 - every request gets an answer
                self._complain(f"{name}: {type(error).__name__}: {error}")
                response = failure_response(name, f"the watcher failed ({type(error).__name__}); its user was told why")
            self._answer(response, request.owner, tree=request.tree)
        except OSError as error:
            self._complain(f"{name}: the outbox cannot be used: {error.strerror or error}")
        finally:
            self._requests.pop(name, None)
            remove_tree(self._stage / name)

    def _claim(self, name: str) -> bool:
        self._kept.create_mark(name)
        sync_folder(dir_fd=self._kept.fd)
        reach_failpoint("claimed")
        marked = self._box.create_mark(protocol.claim_name(name))
        reach_failpoint("marked")
        return marked

    def _answer(self, response: protocol.OutboxResponse, owner: int | None = None, *, tree: str = "") -> None:
        """Keep and deliver a response, and show it to the host's user. `tree` is empty if the request did not run."""
        data = protocol.encode_response(response)
        self._kept.put_message(response.id, data)
        reach_failpoint("answer_kept")
        line = ": ".join(filter(None, (response.id, response.status, response.error_details, response.warning)))
        if tree and self._host.answered is not None:
            self._host.answered(tree, line)
        else:
            self._host.say(line)
        self._deliver(response.id, data, owner)

    def _deliver(self, name: str, data: bytes, owner: int | None) -> None:
        """Write the response file, then remove the request."""
        file = protocol.response_name(name)
        there = b""
        with suppress(FileNotFoundError, UnreadableMessage):
            there = self._box.read_message(file, limit=len(data), owners=(os.geteuid(),))[0]
        if there != data:
            reader = self._box.owner if owner is None else owner
            self._box.put_message(file, data, reader=reader, failpoint="response_half_written")
        reach_failpoint("response_written")
        request = protocol.request_name(name)
        # Check immediately: the client may write a new request as soon as the old one is gone.
        if not self._box.remove_entry(request) and self._box.has_entry(request):
            self._odd.add(name)
        reach_failpoint("request_removed")
        for mark in (protocol.claim_name(name), protocol.cancel_name(name)):
            self._box.remove_entry(mark)
