"""`delegated`: the run lives on the host of the container we are in, where a watcher starts it (`retinue watch`).

We write what is asked as a file into the outbox, read what happens there as another, and wait for the response. The run
on the host is a tree of its own; here its runs become runs of our tree, with numbers and paths of ours. What the file
says of them is data: kinds a run may say of itself, in sizes that fit.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import msgspec

from retinue.core.errors import Disconnected, RetinueError
from retinue.core.events import Event, Gap, RunEnded, RunSpawned, RunStarted, Warned, decode
from retinue.core.limits import CANCEL_ASK_SECONDS, EVENT_BYTES, TERM_SECONDS
from retinue.core.plans import Job
from retinue.core.ports import Link, Receipt
from retinue.core.profiles import Profile
from retinue.core.results import Ending
from retinue.files.failpoints import reach_failpoint
from retinue.files.mailbox import Mailbox, UnreadableMessage
from retinue.files.private import make_private_folder
from retinue.protocol import outbox as wire
from retinue.remote.mirror import CHARACTERS, Child, HostLink, Mirror, checked
from retinue.workspaces.run_folders import RunFolders

SIDE = "asks"
POLL_SECONDS = 0.05
UNCLAIMED_SECONDS = 10.0
ANSWER_SECONDS = 10.0
STEER_SECONDS = 5.0
MOST_RUNS = 1000
PIECE_BYTES = 1024 * 1024
UNCLAIMED = (
    "no watcher has taken the request for {seconds:g} s: on the host, run "
    "`retinue watch --outbox {folder} --allow-root PATH`"
)
ENOUGH = f"the host takes no more than {wire.MOST_STEERS} words for one request"
UNTAKEN = "no watcher has taken the words for {seconds:g} s; they were taken back"
UNHEARD = "the host has not said that the run has the words"
UNSEEN = (
    "it was asked of the host before a crash here, and is not asked again: what it did there since is in the log there"
)
KEPT = "errand"
BEFORE = "This goes on from an earlier run of yours, whose messages were these: "


class Delegated:
    """Asks through one outbox. What is written when a run begins comes from the host, so `started` is nothing."""

    name = "delegated"
    grace = CANCEL_ASK_SECONDS + TERM_SECONDS + ANSWER_SECONDS
    started = None

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        Mailbox(folder, SIDE).close()  # a folder that is not there is told before anything runs
        self._mirrors: dict[Profile, Mirror] = {}

    async def run(self, job: Job, link: Link) -> Ending:
        mirror = self._mirrors.pop(job.plan.profile, None)
        if mirror is not None:
            return await mirror.play(link)
        return await _Errand(self._folder, self._mirrors, job, cast(HostLink, link)).run()


class _Errand:
    """One request, from its file to its response."""

    def __init__(self, folder: Path, mirrors: dict[Profile, Mirror], job: Job, link: HostLink) -> None:
        self._job, self._link, self._mirrors = job, link, mirrors
        self._box = Mailbox(folder, SIDE)
        assert isinstance(job.folders, RunFolders)
        self._own = make_private_folder(job.folders.own)
        self._id, asked = self._asked_as()
        past = job.past
        self._unseen = asked and past is not None and (past.reply is not None or len(past.thread) > 1)
        self._runs: dict[int, Mirror] = {0: self._mirror(0)}
        self._steers = 0
        self._events: int | None = None
        self._rest = b""
        self._answered = False

    def _asked_as(self) -> tuple[str, bool]:
        """The id, and whether it was made before: it stands in the run's folder, so that one that goes on after a crash
        asks for nothing twice."""
        kept = Mailbox(self._own, SIDE)
        try:
            if kept.has_entry(KEPT):
                return kept.read_message(KEPT, limit=CHARACTERS)[0].decode(), True
            ref = self._job.ref
            agent = "".join(c if c.isascii() and c.isalnum() else "-" for c in ref.agent.lower())[:20]
            name = f"{agent}-{ref.tree}-{ref.run}-{secrets.token_hex(4)}"
            kept.put_message(KEPT, name.encode())
            return name, False
        finally:
            kept.close()

    async def run(self) -> Ending:
        try:
            self._ask()
        except BaseException as error:
            self._box.close()
            if isinstance(error, OSError):
                text = f"cannot write to the outbox {self._box.folder}: {error.strerror or error}"
                raise RetinueError(text) from None
            raise
        reading = asyncio.create_task(self._read())
        try:
            return await self._runs[0].play(self._link)
        except asyncio.CancelledError:
            await self._cancel(reading)
            raise
        finally:
            reading.cancel()
            with suppress(asyncio.CancelledError):
                await reading
            try:
                self._tidy()
            finally:
                for profile in [each for each, mirror in self._mirrors.items() if mirror in self._runs.values()]:
                    del self._mirrors[profile]  # of runs that never had their turn
                if self._events is not None:
                    os.close(self._events)
                self._box.close()

    def _ask(self) -> None:
        """Writes the request. One that was answered and is asked for again gets the same answer."""
        job = self._job
        assert isinstance(job.folders, RunFolders)
        if self._unseen:
            self._link.emit(Warned(UNSEEN, code="unseen"))
        if any(
            self._box.has_entry(name(self._id)) for name in (wire.request_name, wire.claim_name, wire.response_name)
        ):
            return
        depth, seconds = self._link.left()
        task = job.task
        asked = [text for text in (task.context, self._before(), task.text) if text]
        asked += [words.text for words in self._link.inbox()]  # sent before it could begin
        request = wire.Request(
            id=self._id,
            task="\n\n".join(asked),
            profile=job.plan.profile.name,
            workspace=os.path.realpath(job.folders.workspace),
            context_paths=[os.path.realpath(path) for path in job.folders.readable if Path(path).exists()],
            timeout_seconds=seconds,
            depth=depth,
        )
        data = wire.encode_request(request)
        if len(data) > wire.REQUEST_BYTES:
            raise RetinueError(f"the task is larger than the {wire.REQUEST_BYTES} bytes of a request to the host")
        self._box.put_message(wire.request_name(self._id), data, reader=self._box.owner)
        reach_failpoint("request_renamed")

    def _before(self) -> str:
        """What was said in the run that this one continues: the host has it only from us."""
        past = self._job.past
        if past is None or past.reply is not None or len(past.thread) < 2:
            return ""
        return BEFORE + msgspec.json.encode(past.thread[:-1]).decode()

    def _mirror(self, run: int) -> Mirror:
        return Mirror(self._mirrors, partial(self._steer, run))

    async def _steer(self, run: int, mirror: Mirror, text: str) -> Receipt:
        """Words for a run on the host, in a file of their own. Whoever takes the file away decides: the host has read
        it then, or we have taken it back."""
        if self._steers == wire.MOST_STEERS:
            return Receipt("too_late", why=ENOUGH)
        data, name = wire.encode_steer(run, text), wire.steer_name(self._id, self._steers)
        if len(data) > wire.REQUEST_BYTES:
            raise RetinueError(f"the words are larger than the {wire.REQUEST_BYTES} bytes of a message to the host")
        self._steers += 1
        try:
            self._box.put_message(name, data, reader=self._box.owner)
        except OSError as error:
            return Receipt("too_late", why=f"cannot write to the outbox: {error.strerror or error}")
        place = mirror.told(text)
        await asyncio.wait([place], timeout=STEER_SECONDS)
        if not place.done() and self._box.remove_entry(name):
            mirror.taken_back(place)
            return Receipt("too_late", why=UNTAKEN.format(seconds=STEER_SECONDS))
        await asyncio.wait([place], timeout=STEER_SECONDS)
        heard = place.done() and place.result()
        return Receipt("queued", heard) if heard else Receipt("too_late", why=UNHEARD)

    async def _read(self) -> None:
        """Hands on what the host writes until it has answered."""
        root = self._runs[0]
        try:
            waited = 0.0
            while True:
                response = self._response()
                if self._new_events():
                    await asyncio.sleep(0)
                    continue
                if response is not None:
                    break
                if waited < UNCLAIMED_SECONDS <= waited + POLL_SECONDS and self._is_unclaimed():
                    text = UNCLAIMED.format(seconds=UNCLAIMED_SECONDS, folder=self._box.folder)
                    self._link.emit(Warned(text, code="unclaimed"))
                waited += POLL_SECONDS
                await asyncio.sleep(POLL_SECONDS)
            self._answered = True
            for mirror in self._runs.values():
                if mirror is not root:
                    mirror.close()
            if response.warning:
                root.put(Warned(response.warning[:EVENT_BYTES]))
            root.partial = response.partial[:EVENT_BYTES]
            root.put(wire.ending_of(response, agent=self._job.ref.agent, primary=self._job.ref.run == 0))
        except Exception as error:  # noqa: BLE001 - what a file says must not leave the run waiting for ever
            root.put(Disconnected(f"the outbox cannot be read: {error}"))

    def _response(self) -> wire.Response | None:
        try:
            data, _ = self._box.read_message(wire.response_name(self._id), limit=wire.RESPONSE_BYTES)
        except FileNotFoundError:
            return None
        except UnreadableMessage as error:
            raise wire.RequestError(f"the response {error}") from None
        return wire.parse_response(data, self._id)

    def _is_unclaimed(self) -> bool:
        return self._events is None and not self._box.has_entry(wire.claim_name(self._id))

    def _new_events(self) -> bool:
        """Takes a piece of what is new; whether there was one."""
        if self._unseen:
            return False  # nobody knows which of it was written here
        if self._events is None:
            try:
                self._events = self._box.open_message(wire.events_name(self._id))
            except FileNotFoundError:
                return False
            except UnreadableMessage as error:
                raise wire.RequestError(f"the file of events {error}") from None
        piece = os.read(self._events, PIECE_BYTES)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > wire.LINE_BYTES:
            raise wire.RequestError("the file of events has a line that is too long")
        for line in lines:
            self._take(line)
        return bool(piece)

    def _take(self, line: bytes) -> None:
        try:
            event = decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            self._runs[0].put(Gap(1, "a line from the host is not an event"))
            return
        if isinstance(event.body, RunSpawned):
            self._spawned(event, event.body)
            return
        mirror = self._runs.get(event.run)
        if mirror is None:
            return
        if isinstance(event.body, RunEnded):
            if event.run != 0:  # of the first it is the response that says so
                mirror.end(event.body)
        elif isinstance(event.body, RunStarted):
            walls = tuple(wall[:CHARACTERS] for wall in event.body.walls[:32])
            mirror.put(RunStarted(Delegated.name, walls))
        elif (body := checked(event)) is not None:
            mirror.put(body)

    def _spawned(self, event: Event, body: RunSpawned) -> None:
        parent = None if body.parent is None else self._runs.get(body.parent)
        if parent is None or event.run in self._runs or len(self._runs) >= MOST_RUNS:
            return
        self._runs[event.run] = child = self._mirror(event.run)
        parent.put(Child(child, event.agent, body))

    async def _cancel(self, reading: asyncio.Task[None]) -> None:
        """Asks the host to stop, and waits for what it says: the run there is what has to be stopped."""
        with suppress(OSError):
            self._box.create_mark(wire.cancel_name(self._id))
        await asyncio.wait([reading], timeout=self._job.plan.runtime.grace - ANSWER_SECONDS / 2)
        self._runs[0].drain(self._link)

    def _tidy(self) -> None:
        """An errand that was answered, or never taken, leaves nothing; another its cancel file, for who took it."""
        box, name = self._box, self._id
        with suppress(OSError):
            if not self._answered:
                box.create_mark(wire.cancel_name(name))
                if box.has_entry(wire.claim_name(name)):
                    return
            for number in range(self._steers):
                box.remove_entry(wire.steer_name(name, number))
            for file in (wire.request_name, wire.response_name, wire.events_name, wire.cancel_name):
                box.remove_entry(file(name))
