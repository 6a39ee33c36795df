"""The updates of a foreign A2A agent as reports of a run. They are read from the standard fields and from notices.

The answer is the text of the artifacts or, if they are empty, the text of the status messages without notices. A
chunked artifact is shown as it grows. The history of a fetched task supplies missed messages; messages seen before
count once. Updates without a status, message, parts or text are skipped. A pure fold.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from hashlib import sha256
from typing import Any

import msgspec
from a2a.types import Artifact, Message, Part, Role, StreamResponse, Task, TaskState, TaskStatus
from google.protobuf.json_format import MessageToDict

from retinue.core.approvals import INPUT_REQUIRED
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Gap,
    RunEnded,
    RunStarted,
    ToolCall,
    ToolResult,
    TurnStarted,
    Warned,
)
from retinue.core.events import Message as Said
from retinue.core.limits import EVENT_BYTES
from retinue.protocol.notices import PLAN_OPENS, Notice, parse_notice, remove_plans
from retinue.remote.port import STARTED, RemoteDelta, RemoteSpawned, Report

NOTICE_ARTIFACTS = ("tool_notification_start", "tool_notification_end")
MOST_ARTIFACTS = 1000
MOST_OPEN = 1000
MOST_HEARD = 10_000
NAME_CHARACTERS = 300
ENDINGS: dict[Any, str] = {
    TaskState.TASK_STATE_COMPLETED: "done",
    TaskState.TASK_STATE_CANCELED: "cancelled",
    TaskState.TASK_STATE_REJECTED: "refused",
    TaskState.TASK_STATE_FAILED: "failed",
}
_TOLD_AGAIN = (TaskState.TASK_STATE_INPUT_REQUIRED, *ENDINGS.keys() - {TaskState.TASK_STATE_COMPLETED})
NEEDS_LOGIN = "the agent asks its user to log in, which is not possible from here"
BETWEEN_ARTIFACTS = "\n\n"
UNASKED = "the agent asks for input without saying what"
WENT_ON = "the agent went on without an answer"
UNSENT = "the answer was not sent: the agent asked another question before it got the answer"
_LOG = logging.getLogger(__name__)


class UpdateFold:
    """The fold of one task's updates. `question` is the id of the agent's open question, or empty. `newest_question`
    is the id of its last question, open or not. `is_answered` is True while the open question has an answer that is not
    sent yet. A task with a `task_id` was followed by an earlier process."""

    def __init__(self, task_id: str = "") -> None:
        self.task_id = task_id
        self.question = self.newest_question = ""
        self.is_answered = False
        self._question_text = ""
        self.has_ended = False
        self._has_started = bool(task_id)
        self._questions = 0
        self._heard: set[str] = set()  # ids of messages and artifacts seen so far
        self._artifacts: dict[str, str] = {}
        self._told = 0  # characters of the answer already shown as deltas
        self._is_told_in_order = True
        self._said: list[str] = []
        self._held = ""  # text that is either the answer or an intermediate message
        self._size = 0
        self._calls: list[tuple[str, str, str]] = []  # run, call id and name of open calls
        self._agents: list[tuple[str, str]] = []  # run and name of open runs below ours
        self._count = 0

    def mark_ended(self) -> None:
        """Record the end of the task, for an ending read by the adapter."""
        self.has_ended = True

    @property
    def needs_input(self) -> bool:
        """Return True while the agent waits for an answer."""
        return bool(self.question)

    def mark_answered(self) -> None:
        """Record that the newest question has an answer. The question is open until the answer is sent, even if the
        agent goes on meanwhile."""
        self.question, self.is_answered = self.newest_question, True

    def mark_sent(self) -> None:
        """Record that the answer is sent."""
        self.question, self.is_answered = "", False

    def apply(self, update: StreamResponse) -> list[Report]:
        """Return the reports for an update."""
        return [] if self.has_ended else list(self._apply(update))

    def _apply(self, update: StreamResponse) -> Iterator[Report]:
        kind = update.WhichOneof("payload")
        found: Any = getattr(update, kind) if kind else None
        if found is None or not self._is_ours(found, kind):
            if kind:
                yield Report(STARTED, Gap(1, "the agent sent an update about another task"))
            return
        if not self._has_started:
            self._has_started = True
            yield Report(STARTED, RunStarted())
        if kind == "message":
            yield from self._end("done", _join_texts(found.parts))
        elif kind == "task":
            yield from self._apply_task(found)
        elif kind == "status_update":
            message, state = found.status.message, found.status.state
            is_new = self._hear_message(message) or not message.message_id or state in _TOLD_AGAIN
            yield from self._apply_status(found.status, _list_texts(message) if is_new else [])
        else:
            self._hear(found.artifact.artifact_id)
            yield from self._apply_artifact(found.artifact, append=found.append)

    def _is_ours(self, found: Any, kind: str) -> bool:
        """Return True if an update is about this fold's task. The first update sets the task's id."""
        task_id = found.id if kind == "task" else found.task_id
        self.task_id = self.task_id or task_id
        return kind == "message" or not task_id or task_id == self.task_id

    def _apply_task(self, task: Task) -> Iterator[Report]:
        """Apply a snapshot of the task: the first event of a stream, or the result of a lookup."""
        for message in task.history:
            if message.role == Role.ROLE_AGENT and message.message_id and self._hear_message(message):
                for text in _list_texts(message):
                    yield from self._take_text(text)
        for artifact in task.artifacts:
            if self._hear(artifact.artifact_id) or artifact.name not in NOTICE_ARTIFACTS:
                yield from self._apply_artifact(artifact, append=False)
        is_new = self._hear_message(task.status.message) or task.status.state in _TOLD_AGAIN
        yield from self._apply_status(task.status, _list_texts(task.status.message) if is_new else [])

    def _hear_message(self, message: Message) -> bool:
        """Record a message. Return True if it is new. Messages with one id and different texts are different, because
        some agents reuse an id."""
        text = "\n".join(_list_texts(message))
        return self._hear(f"{message.message_id}\n{text}")

    def _hear(self, name: str) -> bool:
        """Record a message or artifact that may arrive again. Return True if it is new."""
        name = _shorten_name(name)
        is_new = name not in self._heard and len(self._heard) < MOST_HEARD
        if is_new:
            self._heard.add(name)
        return is_new

    def _apply_status(self, status: TaskStatus, texts: list[str]) -> Iterator[Report]:
        state = status.state
        if state == TaskState.TASK_STATE_INPUT_REQUIRED:
            yield from self._ask("\n".join(texts) or UNASKED)
        elif state == TaskState.TASK_STATE_AUTH_REQUIRED:
            yield from self._end("failed", NEEDS_LOGIN)
        elif state in ENDINGS and state != TaskState.TASK_STATE_COMPLETED:
            yield from self._end(ENDINGS[state], "\n".join(texts))
        else:
            if not self.is_answered:
                yield from self._withdraw_question()
            for text in texts:
                yield from self._take_text(text)
            if state == TaskState.TASK_STATE_COMPLETED:
                yield from self._end("done", "")

    def _ask(self, text: str) -> Iterator[Report]:
        """Report the agent's question in place of an earlier question, unless the question is already open."""
        if self.question and text in (self._question_text, UNASKED):
            return
        yield from self._withdraw_question()
        self._questions += 1
        name = self.question = self.newest_question = f"input-{self._questions}"
        self._question_text = text
        yield Report(STARTED, ApprovalAsked(name, name, INPUT_REQUIRED, {"question": text}, preview=text))

    def _withdraw_question(self) -> Iterator[Report]:
        """Close the open question of an agent, because the agent has gone on without an answer."""
        name, is_answered = self.question, self.is_answered
        self.mark_sent()
        if is_answered:
            yield Report(STARTED, Warned(UNSENT, code="answer_undelivered"))
        elif name:
            yield Report(STARTED, ApprovalDecided(name, name, allowed=False, reason=WENT_ON))

    def _take_text(self, text: str) -> Iterator[Report]:
        notice = self._parse_notice(text)
        _LOG.info("Streamed + accumulated text from status-update: %d chars", len(text))
        if notice is not None:
            yield from self._show_notice(notice)
        elif self._add_size(len(text)):
            yield from self._flush()
            self._said.append(text)
            self._held = text

    def _flush(self) -> Iterator[Report]:
        """Report the held text as an intermediate message, because something follows it."""
        if self._held:
            held, self._held = self._held, ""
            yield Report(STARTED, Said(held))

    def _apply_artifact(self, artifact: Artifact, *, append: bool) -> Iterator[Report]:
        text = _join_texts(artifact.parts)
        if artifact.name in NOTICE_ARTIFACTS:
            notice = self._parse_notice(text)
            if notice is not None:
                yield from self._show_notice(notice)
            return
        name = _shorten_name(artifact.artifact_id)
        if name not in self._artifacts and len(self._artifacts) >= MOST_ARTIFACTS:
            return
        before = self._artifacts.get(name, "")
        whole = before + text if append else text
        if self._add_size(len(whole) - len(before)):
            self._artifacts[name] = whole
            if append or self._told:
                yield from self._show_growth(name, before, whole)

    def _show_growth(self, name: str, before: str, whole: str) -> Iterator[Report]:
        """Report the text that a chunk adds to the end of the answer. Other changes become visible with the ending."""
        is_last = name == next(reversed(self._artifacts))
        if PLAN_OPENS in whole and not (self._told and before):
            return
        self._is_told_in_order &= is_last and whole.startswith(before) and PLAN_OPENS not in whole
        added = whole[len(before) :]
        if not self._is_told_in_order or not added:
            return
        if not self._told:
            yield from self._flush()
            yield Report(STARTED, TurnStarted(1))
            added = self._join_artifacts()
        elif not before:
            added = BETWEEN_ARTIFACTS + added
        yield Report(STARTED, RemoteDelta(added, turn=1, offset=self._told))
        self._told += len(added)

    def _join_artifacts(self) -> str:
        return BETWEEN_ARTIFACTS.join(part for part in map(remove_plans, self._artifacts.values()) if part)

    def _add_size(self, count: int) -> bool:
        """Count more characters. Return True if the total is within the limit."""
        self._size += count
        return self._size <= EVENT_BYTES

    # Notices

    def _parse_notice(self, text: str) -> Notice | None:
        """Return the notice in a text, or None. The end of a call that never started is part of an answer, not a
        notice."""
        notice = parse_notice(text)
        if notice is None or notice.is_start:
            return notice
        name = notice.target.casefold()
        if notice.is_agent:
            return notice if any(agent == name for _, agent in self._agents) else None
        return notice if any(call == name for _, _, call in self._calls) else None

    def _show_notice(self, notice: Notice) -> Iterator[Report]:
        yield from self._flush()
        name = notice.target.casefold()
        run = next((run for run, agent in self._agents if agent == notice.agent.casefold()), STARTED)
        if notice.is_start:
            if len(self._calls) + len(self._agents) >= MOST_OPEN:
                return
            self._count += 1
            own = f"notice-{self._count}"
            if notice.is_agent:
                self._agents.append((own, name))
                yield Report(own, RemoteSpawned(parent=run, agent=notice.target, is_at_work=True))
            else:
                self._calls.append((run, own, name))
                yield Report(run, ToolCall(own, notice.target, {}, tier="observe"))
        elif notice.is_agent:
            key = next(each for each in self._agents if each[1] == name)
            self._agents.remove(key)
            yield Report(key[0], RunEnded("done" if notice.success else "failed", "", 0))
        else:
            call = next((each for each in self._calls if each[2] == name and each[0] == run), None)
            call = call or next(each for each in self._calls if each[2] == name)
            self._calls.remove(call)
            yield Report(call[0], ToolResult(call[1], notice.target, "", success=notice.success))

    # The ending

    def report_rest(self) -> list[Report]:
        """Return messages with all text that is in no report yet, for a task whose updates end without an ending."""
        written = self._join_artifacts()
        return [*self._flush(), *([Report(STARTED, Said(written))] if written else [])]

    def _end(self, status: str, text: str) -> Iterator[Report]:
        self.has_ended = True
        written = self._join_artifacts()
        if status == "done":
            if written:
                yield from self._flush()
            answer = text or written or remove_plans("\n".join(self._said))
            if self._told:
                yield Report(STARTED, Said(answer, final=True))
            yield Report(STARTED, RunEnded("done", answer, 0))
            return
        partial = written or "\n".join(self._said)
        yield Report(STARTED, RunEnded(status, text, 0, error_details=text or None, partial=partial))


def _shorten_name(name: str) -> str:
    """Return a short name in place of a long name. Different names stay different."""
    return name if len(name) <= NAME_CHARACTERS else sha256(name.encode("utf-8", "replace")).hexdigest()


def _list_texts(message: Message) -> list[str]:
    return [part.text for part in message.parts if part.WhichOneof("content") == "text" and part.text]


def _join_texts(parts: Iterable[Part]) -> str:
    """Return the texts and data of all parts. Files are named, not fetched. Consecutive texts are joined directly,
    because the chunks of an artifact become its parts."""
    found = ""
    was_text = True
    for part in parts:
        kind = part.WhichOneof("content")
        match kind:
            case "text":
                piece = part.text
            case "data":
                try:
                    piece = msgspec.json.encode(MessageToDict(part.data), order="sorted").decode()
                except ValueError:  # NaN or Infinity
                    piece = "[data that is not JSON]"
            case "raw" | "url":
                piece = f"[a file: {part.filename or part.media_type or 'unnamed'}]"
            case _:
                continue
        is_apart = bool(found) and not (was_text and kind == "text")
        found += f"\n{piece}" if is_apart else piece
        was_text = kind == "text"
    return found
