"""The events of a tree as A2A stream events, in the two patterns that A2A clients know, and tasks as clients see them.

In the `supervisor` pattern, notices and text are artifacts (`tool_notification_start`, `tool_notification_end`,
`streaming_result`). In the `subagent` pattern, notices and the answer are status updates, and an empty
`current_result` closes the stream. All classes are pure folds.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import msgspec
from a2a.types import (
    Artifact,
    Message,
    Part,
    Role,
    Task,
    TaskArtifactUpdateEvent,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from google.protobuf.json_format import ParseDict
from google.protobuf.struct_pb2 import Value
from google.protobuf.timestamp_pb2 import Timestamp

from retinue.core.approvals import Approval
from retinue.core.caller import ClientRequest
from retinue.core.events import ApprovalDecided, Delta, Event, Inbox, RunEnded, RunSpawned
from retinue.core.messages import USER_WORDS
from retinue.core.unseen import reveal_line, reveal_text
from retinue.log.blocks import format_question_body, make_call_spans
from retinue.log.questions import Questions
from retinue.log.runs import Runs
from retinue.protocol.a2a import EXTENSION, make_event_metadata, make_question
from retinue.protocol.notices import Notice, NoticeFold, TextPiece, remove_plans
from retinue.surfaces.a2a.options import ServerOptions

SUPERVISOR = "Supervisor"
START, END, ANSWER, RESULT = (
    "tool_notification_start",
    "tool_notification_end",
    "streaming_result",
    "current_result",
)
RESULT_ABOUT, ANSWER_ABOUT, PLAN_ABOUT = "Result of the request", "Answer, as it is written", "Execution plan"
INTERRUPTED = "the server was stopped while it worked on this task, and could not resume it"
STATES: dict[str, Any] = {
    "done": TaskState.TASK_STATE_COMPLETED,
    "cancelled": TaskState.TASK_STATE_CANCELED,
    "refused": TaskState.TASK_STATE_REJECTED,
}
Update: TypeAlias = Task | TaskStatusUpdateEvent | TaskArtifactUpdateEvent
_IDS = uuid.UUID("6f0c1c52-6a8f-4d7c-9d0e-3b1d8e1f2a77")


class ServedTask(msgspec.Struct, frozen=True):
    """A task: the tree whose id is the task's id, and the request that it answers. Its methods make messages for
    clients. The ids of messages and artifacts are deterministic, so repeated messages have the same ids."""

    tree: str
    request: ClientRequest

    def make_id(self, what: str) -> str:
        return str(uuid.uuid5(_IDS, f"{self.tree}/{what}"))

    def make_message(self, parts: Sequence[Part], what: str) -> Message:
        return self._make_message(self.make_id(what), Role.ROLE_AGENT, parts)

    def make_user_message(self, message_id: str, text: str) -> Message:
        return self._make_message(message_id, Role.ROLE_USER, [Part(text=text)])

    def _make_message(self, message_id: str, role: Any, parts: Sequence[Part]) -> Message:
        context = self.request.context
        return Message(message_id=message_id, task_id=self.tree, context_id=context, role=role, parts=parts)

    def make_status(self, state: Any, message: Message | None = None) -> TaskStatusUpdateEvent:
        status = TaskStatus(state=state, message=message)
        return TaskStatusUpdateEvent(task_id=self.tree, context_id=self.request.context, status=status)

    def make_chunk(
        self, name: str, what: str, text: str, *, about: str, append: bool = False, last: bool = False
    ) -> TaskArtifactUpdateEvent:
        artifact = Artifact(artifact_id=self.make_id(what), name=name, description=about, parts=[Part(text=text)])
        return TaskArtifactUpdateEvent(
            task_id=self.tree, context_id=self.request.context, artifact=artifact, append=append, last_chunk=last
        )

    def make_ending(self, ended: RunEnded) -> TaskStatusUpdateEvent:
        """Return the last update of the task. It has a message unless the run ended as `done`."""
        state = find_state(ended.status)
        if ended.status == "done":
            return self.make_status(state)
        return self.make_status(
            state, self.make_message([Part(text=ended.error_details or ended.final_response)], "ending")
        )

    def make_question(self, questions: Sequence[Approval]) -> TaskStatusUpdateEvent:
        """Return the update that asks the client `questions`, as text and as data that binds the answer to the
        question."""
        parts = []
        for asked in questions:
            parts.append(Part(text=_format_question(asked)))
            parts.append(Part(data=ParseDict(make_question(asked), Value())))
        names = "-".join(asked.id for asked in questions)
        return self.make_status(TaskState.TASK_STATE_INPUT_REQUIRED, self.make_message(parts, f"asks-{names}"))

    def make_typed_update(self, item: Event | Delta) -> TaskStatusUpdateEvent | None:
        """Return the update that carries an event or a delta to another Retinue, or None if the item is not sent."""
        metadata = make_event_metadata(item)
        if metadata is None:
            return None
        update = self.make_status(TaskState.TASK_STATE_WORKING)
        update.metadata.update({EXTENSION: metadata})
        return update


class StreamFold:
    """A fold of a task's events into updates in the server's pattern. If the server asks clients, questions become
    input that the client must provide."""

    def __init__(self, task: ServedTask, options: ServerOptions) -> None:
        self._task, self._pattern, self._asks_client = task, options.pattern, options.asks_client
        self._fold = NoticeFold(SUPERVISOR if options.pattern == "supervisor" else "")
        self._questions = Questions()
        self._count = 0

    def apply(self, item: Event | Delta) -> Iterator[Update]:
        for said in self._fold.apply(item):
            if isinstance(said, Notice):
                self._count += 1
                yield self._show_notice(said)
            elif self._pattern == "supervisor":
                yield self._show_words(said)
        if isinstance(item, Delta):
            return
        asked = self._questions.apply(item)
        if asked is not None and asked.digest and self._asks_client:
            yield self._task.make_question([asked])
        elif isinstance(item.body, RunEnded) and item.run == 0:
            if self._pattern == "subagent":
                yield from self._show_result(item.body)
            yield self._task.make_ending(item.body)

    def _show_notice(self, notice: Notice) -> Update:
        what = f"notice-{self._count}"
        if self._pattern == "subagent":
            message = self._task.make_message([Part(text=f"{notice.text}\n")], what)
            return self._task.make_status(TaskState.TASK_STATE_WORKING, message)
        name, how = (START, "started") if notice.is_start else (END, "completed" if notice.success else "failed")
        about = f"Tool call {how}: {notice.target}"
        return self._task.make_chunk(name, what, f"\n{notice.text}\n", about=about)

    def _show_words(self, words: TextPiece) -> Update:
        about = PLAN_ABOUT if words.is_plan else ANSWER_ABOUT
        return self._task.make_chunk(
            ANSWER, f"words-{words.part}", words.text, about=about, append=not words.is_new, last=words.is_last
        )

    def _show_result(self, ended: RunEnded) -> Iterator[Update]:
        if ended.status == "done":
            message = self._task.make_message([Part(text=remove_plans(ended.final_response))], "answer")
            yield self._task.make_status(TaskState.TASK_STATE_WORKING, message)
        yield self._task.make_chunk(RESULT, "result", "", about=RESULT_ABOUT, last=True)


def find_state(status: str | None) -> Any:
    """Return the state of a task whose run has ended with `status`, or stopped without a status."""
    return STATES.get(status or "", TaskState.TASK_STATE_FAILED)


def _format_question(asked: Approval) -> str:
    """Return a question as text with the whole call, for the client's user."""
    about = "".join(text for _, text in make_call_spans(asked.tool, asked.args))
    return f"{asked.agent} asks: may it call {reveal_line(about)}?\n{reveal_text(format_question_body(asked))}".rstrip()


class TaskView:
    """A view of a task, folded from its events, that answers requests for the task's state."""

    def __init__(self, task: ServedTask, options: ServerOptions) -> None:
        self._task, self._options = task, options
        self._runs = Runs(task.tree)
        self._steers: list[tuple[str, str]] = []
        self.message_ids: set[str] = set()
        self.decisions: dict[str, ApprovalDecided] = {}
        self._questions = Questions()
        self.last_at = 0.0
        self.last_seq = 0

    def apply(self, event: Event) -> None:
        self._runs.apply(event)
        self._questions.apply(event)
        self.last_at, self.last_seq = event.at, event.seq
        match event.body:
            case Inbox(source=source, message_id=message_id, text=text) if source in USER_WORDS:
                self.message_ids.add(message_id)
                if event.run == 0:
                    self._steers.append((message_id or f"steer-{event.seq}", text))
            case ApprovalDecided(approval_id=name) as body:
                self.decisions[name] = body

    @property
    def ending(self) -> RunEnded | None:
        return self._runs.runs[0].ended if 0 in self._runs.runs else None

    @property
    def beginning(self) -> RunSpawned | None:
        return self._runs.runs[0].spawned if 0 in self._runs.runs else None

    @property
    def questions(self) -> list[Approval]:
        """Return the unanswered questions."""
        return list(self._questions.open.values())

    def find_task_state(self, *, is_live: bool) -> Any:
        if self.ending is not None:
            return find_state(self.ending.status)
        if not is_live:
            return TaskState.TASK_STATE_FAILED
        if self._options.asks_client and self.questions:
            return TaskState.TASK_STATE_INPUT_REQUIRED
        is_started = 0 in self._runs.runs and self._runs.runs[0].started_at is not None
        return TaskState.TASK_STATE_WORKING if is_started else TaskState.TASK_STATE_SUBMITTED

    def make_task(self, *, is_live: bool) -> Task:
        """Return the task with its current state, the messages in both directions and its result."""
        served, ended = self._task, self.ending
        state = self.find_task_state(is_live=is_live)
        at = Timestamp()
        at.FromMilliseconds(round(self.last_at * 1000))
        task = Task(id=served.tree, context_id=served.request.context, history=self._make_history())
        task.status.CopyFrom(TaskStatus(state=state, timestamp=at))
        if ended is not None and ended.status == "done":
            is_supervisor = self._options.pattern == "supervisor"
            name, about = (ANSWER, ANSWER_ABOUT) if is_supervisor else (RESULT, RESULT_ABOUT)
            result = Artifact(artifact_id=served.make_id("result"), name=name, description=about)
            result.parts.append(_make_result_part(ended))
            task.artifacts.append(result)
        elif ended is not None:
            task.status.message.CopyFrom(served.make_ending(ended).status.message)
        elif state == TaskState.TASK_STATE_INPUT_REQUIRED:
            task.status.CopyFrom(served.make_question(self.questions).status)
        elif state == TaskState.TASK_STATE_FAILED:
            task.status.message.CopyFrom(served.make_message([Part(text=INTERRUPTED)], "interrupted"))
        return task

    def _make_history(self) -> list[Message]:
        """Return the client's messages with the ids that the client chose, and the messages from the host's user."""
        spawned = self.beginning
        if spawned is None or spawned.request is None:
            return []
        words = [(spawned.request.message, spawned.task), *self._steers]
        return [self._task.make_user_message(name, text) for name, text in words]


def _make_result_part(ended: RunEnded) -> Part:
    """Return the result of a run: data if the profile has an output type, else text."""
    if ended.structured is None:
        return Part(text=remove_plans(ended.final_response))
    return Part(data=ParseDict(msgspec.to_builtins(ended.structured, enc_hook=str), Value()))
