"""The adapter for delegated runs. It sends requests to the host of our container through a shared folder, the outbox.

The request is one file, the run's events are another, and the response file ends the exchange. On the host, `retinue
watch` takes the request. Reports arrive as events of the host's tree, whose primary is the requested run.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from retinue.core.approvals import Decision
from retinue.core.errors import Disconnected, RetinueError
from retinue.core.events import Gap, RunEnded, Warned, decode_event
from retinue.core.limits import CANCEL_ASK_SECONDS, TERM_SECONDS
from retinue.files.failpoints import reach_failpoint
from retinue.files.mailbox import Mailbox, UnreadableMessage
from retinue.protocol import outbox as protocol
from retinue.remote.port import STARTED, Capabilities, RemoteRequest, Report, Undelivered, make_report

SIDE = "asks"
NAME = "delegated"
POLL_SECONDS = 0.05
UNCLAIMED_SECONDS = 10.0
ANSWER_SECONDS = 10.0
STEER_SECONDS = 5.0
OWN_CHARACTERS = 82  # of the part of an id that comes from the subagent's id
PIECE_BYTES = 1024 * 1024
UNCLAIMED = (
    "no watcher has picked up the request for {seconds:g} s: on the host, run "
    "`retinue watch --outbox {folder} --allow-root PATH`"
)
TOO_MANY = f"the host accepts at most {protocol.MOST_STEERS} messages for one request"
OVER = "the request has been answered, so the host accepts no more messages for it"
UNCANCELLED = f"no watcher has picked up the request or its cancel within {CANCEL_ASK_SECONDS:g} s"
UNTAKEN = "no watcher has picked up the message for {seconds:g} s, so it was withdrawn"


class OutboxAdapter:
    """The adapter for one outbox. Its creation fails if the folder cannot be opened."""

    name = NAME
    grace = CANCEL_ASK_SECONDS + TERM_SECONDS + ANSWER_SECONDS

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        Mailbox(folder, SIDE).close()

    def start(self, request: RemoteRequest) -> OutboxRun:
        ref = request.ref
        own = "".join(c if c.isascii() and (c.isalnum() or c in "_-") else "-" for c in ref.subagent_id)
        reference = f"{own[:OWN_CHARACTERS]}-{ref.tree}-{ref.run}-{secrets.token_hex(4)}"  # models reuse ids
        return OutboxRun(self._folder, request, reference=reference, offset=0)

    def attach(self, request: RemoteRequest, *, reference: str, cursor: str) -> OutboxRun:
        return OutboxRun(self._folder, request, reference=reference, offset=int(cursor or 0))


class OutboxRun:
    """One request, from its request file to its response. The cursor is an offset in the events file."""

    capabilities = Capabilities(send=True, replay=True)

    def __init__(self, folder: Path, request: RemoteRequest, *, reference: str, offset: int) -> None:
        self.reference = reference
        self._request = request
        self._box = Mailbox(folder, SIDE)
        self._offset = offset
        self._steers = 0
        self._events: int | None = None
        self._rest = b""
        self._is_answered = False
        self._is_over = False
        self._give_up_at = math.inf

    async def reports(self) -> AsyncGenerator[Report]:
        try:
            self._ask()
            try:
                async for report in self._read():
                    yield report
            except (protocol.RequestError, OSError) as error:
                raise Disconnected(f"the outbox cannot be read: {error}") from None
            finally:
                self._tidy()
        finally:
            self._is_over = True
            if self._events is not None:
                os.close(self._events)
            self._box.close()

    def _ask(self) -> None:
        """Write the request, unless it was written, claimed or answered before. Then the existing response counts and
        nothing runs twice."""
        name, request = self.reference, self._request
        written = protocol.request_name(name), protocol.claim_name(name), protocol.response_name(name)
        if any(map(self._box.has_entry, written)):
            return
        deadline = request.limits.deadline
        data = protocol.encode_request(
            protocol.OutboxRequest(
                id=name,
                subagent_id=request.ref.subagent_id[: protocol.SUBAGENT_ID_CHARACTERS],
                task="\n\n".join(filter(None, (request.before, request.text))),
                profile=request.profile,
                workspace=request.workspace,
                context_paths=request.readable,
                timeout_seconds=None if deadline is None else max(0.001, deadline - time.time()),
                limits=request.limits,
            )
        )
        if len(data) > protocol.REQUEST_BYTES:
            raise RetinueError(f"the task is larger than the {protocol.REQUEST_BYTES} bytes of a request to the host")
        try:
            self._box.put_message(protocol.request_name(name), data, reader=self._box.owner)
        except OSError as error:
            text = f"cannot write to the outbox {self._box.folder}: {error.strerror or error}"
            raise RetinueError(text) from None
        reach_failpoint("request_renamed")

    # Reading the host's files

    async def _read(self) -> AsyncGenerator[Report]:
        waited = 0.0
        while True:
            response = self._read_response()  # read first: the events file is complete once the response exists
            piece = self._read_piece()
            if piece:
                for report in self._split(piece):
                    yield report
                await asyncio.sleep(0)
                continue
            if response is not None:
                break
            if waited < UNCLAIMED_SECONDS <= waited + POLL_SECONDS and self._is_unclaimed():
                text = UNCLAIMED.format(seconds=UNCLAIMED_SECONDS, folder=self._box.folder)
                yield Report(STARTED, Warned(text, code="unclaimed"))
            if asyncio.get_running_loop().time() >= self._give_up_at and self._is_unclaimed():
                raise Disconnected(UNCANCELLED)
            waited += POLL_SECONDS
            await asyncio.sleep(POLL_SECONDS)
        self._is_answered = self._is_over = True
        if response.warning:
            yield Report(STARTED, Warned(response.warning))
        ref = self._request.ref
        ending = protocol.make_ending(response, agent=ref.agent, primary=ref.run == 0)
        yield Report(STARTED, RunEnded.from_ending(ending, partial=response.partial))

    def _is_unclaimed(self) -> bool:
        return self._events is None and not self._box.has_entry(protocol.claim_name(self.reference))

    def _read_response(self) -> protocol.OutboxResponse | None:
        try:
            data, _ = self._box.read_message(protocol.response_name(self.reference), limit=protocol.RESPONSE_BYTES)
        except FileNotFoundError:
            return None
        except UnreadableMessage as error:
            raise protocol.RequestError(f"the response {error}") from None
        return protocol.parse_response(data, self.reference)

    def _read_piece(self) -> bytes:
        if self._events is None:
            try:
                self._events = self._box.open_message(protocol.events_name(self.reference))
            except FileNotFoundError:
                return b""
            except UnreadableMessage as error:
                raise protocol.RequestError(f"the file of events {error}") from None
            os.lseek(self._events, self._offset, os.SEEK_SET)
        return os.read(self._events, PIECE_BYTES)

    def _split(self, piece: bytes) -> Iterator[Report]:
        """Yield the reports of all complete lines."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if len(self._rest) > protocol.LINE_BYTES:
            raise protocol.RequestError("the file of events has a line that is too long")
        for line in lines:
            self._offset += len(line) + 1
            report = _read_line(line)
            if report is not None:
                yield msgspec.structs.replace(report, cursor=str(self._offset), size=len(line))

    # Commands

    async def send(self, run: str, text: str) -> None:
        """Write a message for a run to a separate file and wait for the host to remove the file, which means that the
        host has the message. After `STEER_SECONDS`, remove the file and raise Undelivered."""
        name = self._write_steer(run, text)
        waited = 0.0
        while self._box.has_entry(name) and waited < STEER_SECONDS:
            waited += POLL_SECONDS
            await asyncio.sleep(POLL_SECONDS)
        if self._box.remove_entry(name):
            raise Undelivered(UNTAKEN.format(seconds=STEER_SECONDS))

    def _write_steer(self, run: str, text: str | None) -> str:
        """Write a message or a cancel for one run to a file, and return the name of the file."""
        if self._is_over:
            raise Undelivered(OVER)
        if self._steers == protocol.MOST_STEERS:
            raise Undelivered(TOO_MANY)
        data, name = protocol.encode_steer(int(run or 0), text), protocol.steer_name(self.reference, self._steers)
        if len(data) > protocol.REQUEST_BYTES:
            raise RetinueError(f"the message is larger than the {protocol.REQUEST_BYTES} bytes that the host accepts")
        self._steers += 1
        try:
            self._box.put_message(name, data, reader=self._box.owner)
        except OSError as error:
            raise Undelivered(f"cannot write to the outbox: {error.strerror or error}") from None
        return name

    def cancel(self, run: str) -> None:
        """Cancel the whole request by its mark, or one run below by a message, which the host takes when it looks. A
        request that no watcher has picked up is given up after `CANCEL_ASK_SECONDS`."""
        if run != STARTED:
            self._write_steer(run, None)
        elif not self._is_over:
            self._give_up_at = asyncio.get_running_loop().time() + CANCEL_ASK_SECONDS
            with suppress(OSError):
                self._box.create_mark(protocol.cancel_name(self.reference))

    async def answer(self, run: str, approval_id: str, decision: Decision) -> None:
        raise Undelivered("questions are answered on the host")

    def _tidy(self) -> None:
        """Remove the files of a request that was answered or never claimed. Cancel a request that was claimed but not
        answered."""
        box, name = self._box, self.reference
        with suppress(OSError):
            if not self._is_answered:
                box.create_mark(protocol.cancel_name(name))
                if box.has_entry(protocol.claim_name(name)):
                    return
            for number in range(self._steers):
                box.remove_entry(protocol.steer_name(name, number))
            for file in (protocol.request_name, protocol.response_name, protocol.events_name, protocol.cancel_name):
                box.remove_entry(file(name))


def _read_line(line: bytes) -> Report | None:
    """Return the report in one line. Return None for the run's ending, which the response contains, and for lines that
    are not an event of a run."""
    try:
        report = make_report(decode_event(line))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Report(STARTED, Gap(1, "a line from the host is not an event"))
    is_ending = report is not None and report.run == STARTED and isinstance(report.body, RunEnded)
    return None if is_ending else report
