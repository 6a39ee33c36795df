"""The A2A operations as commands on Control. A message spawns, continues or steers a run; the other operations read,
stream or cancel tasks.

Implements the SDK's `RequestHandler`. JSON-RPC, REST and both versions of the protocol arrive here as the same
requests. All state is in the log and in `ServedTasks`. Messages are untrusted: unusable content is refused with the
protocol's error and an explanation.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn
from weakref import WeakValueDictionary

import msgspec
from a2a.server.context import ServerCallContext
from a2a.server.request_handlers.request_handler import RequestHandler
from a2a.types import (
    AgentCard,
    CancelTaskRequest,
    GetExtendedAgentCardRequest,
    GetTaskRequest,
    ListTasksRequest,
    ListTasksResponse,
    Message,
    Part,
    Role,
    SendMessageRequest,
    SubscribeToTaskRequest,
    Task,
    TaskState,
    TaskStatus,
    TaskStatusUpdateEvent,
)
from a2a.utils.constants import DEFAULT_LIST_TASKS_PAGE_SIZE
from a2a.utils.errors import (
    ContentTypeNotSupportedError,
    ExtendedAgentCardNotConfiguredError,
    InvalidParamsError,
    PushNotificationNotSupportedError,
    TaskNotCancelableError,
    TaskNotFoundError,
    UnsupportedOperationError,
)
from a2a.utils.task import (
    ListTasksCursor,
    apply_history_length,
    decode_list_tasks_cursor,
    encode_list_tasks_cursor,
    validate_history_length,
    validate_page_size,
)
from google.protobuf.json_format import MessageToDict

from retinue.concurrency import run_until_first
from retinue.core.approvals import INPUT_REQUIRED, Allow, Approval, describe_closing
from retinue.core.caller import NOBODY, Caller, ClientRequest
from retinue.core.control import Control
from retinue.core.errors import RetinueError
from retinue.core.events import Delta, Event, RunEnded, RunSpawned
from retinue.core.limits import EVENT_BYTES
from retinue.core.messages import ASKER
from retinue.core.profiles import Task as RunTask
from retinue.core.traces import traceparent_of
from retinue.files.atomic import replace_file
from retinue.files.private import make_private_folder
from retinue.log.questions import find_closing
from retinue.protocol import inherited_limits
from retinue.protocol.a2a import (
    AFTER_HEADER,
    EXTENSION,
    RUN_KEY,
    ApprovalAnswer,
    read_approval_answer,
    read_command_metadata,
    read_number,
)
from retinue.surfaces.a2a.gate import ANONYMOUS, GONE
from retinue.surfaces.a2a.options import OperatorScreen, ServerOptions
from retinue.surfaces.a2a.streams import ServedTask, StreamFold, TaskView, Update, find_state
from retinue.surfaces.a2a.tasks import SURFACE, ServedTasks, remove_files

CANCEL_SECONDS = 40.0
FILES_NOTE = "Files of this message are in your workspace: {names}"
ENDED = "the task {task} has ended; a message with its contextId and without a taskId continues it"
REPEATED = "client '{client}' sends the message '{name}' again: it gets the task {task}, which that message began"
BUSY = "the server already works on {count} tasks, which is its limit: try again later"
NOT_ASKED = "questions of this server are answered by its host: it runs without --approve-by client"
_LOG = logging.getLogger(__name__)
ID_CHARACTERS = 200
MOST_FILES = 16
MOST_PARTS = 64
FILE_NAME_CHARACTERS = 100
NO_URI = "a file given by URL is not fetched: send its bytes"


class AcceptedMessage(NamedTuple):
    """The task of an accepted message, the sequence number up to which the client has seen the task, and the questions
    that the message answered."""

    task: ServedTask
    after: int = 0
    answers: frozenset[str] = frozenset()


class TaskHandler(RequestHandler):
    """The request handler of one profile. Each token is a client, and a client sees only its own tasks. The folder
    `files` holds the files of a message until they are copied into the workspace."""

    def __init__(
        self, control: Control, tasks: ServedTasks, options: ServerOptions, screen: OperatorScreen, files: Path
    ) -> None:
        self._control, self._tasks, self._options, self._screen = control, tasks, options, screen
        self._files = files
        self._accepting: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()  # by message
        self._beginning = asyncio.Lock()

    # Messages

    async def on_message_send(self, params: SendMessageRequest, context: ServerCallContext) -> Task:
        validate_history_length(params.configuration)
        accepted = await self._accept(params, context)
        task = accepted.task
        if params.configuration.return_immediately:
            await self._tasks.wait_until(task, lambda view: view.beginning is not None)  # the log has the task then
        else:
            await self._wait_for_pause(accepted, context)
        return apply_history_length(await self._make_task(task), params.configuration)

    def on_message_send_stream(self, params: SendMessageRequest, context: ServerCallContext) -> AsyncGenerator[Update]:
        return self._stream(partial(self._accept, params, context), context, pauses=True)

    async def _accept(self, params: SendMessageRequest, context: ServerCallContext) -> AcceptedMessage:
        """Carry out a message, unless the same message was carried out before."""
        message, client = read_message(params, context.state.get("headers", {})), _name_client(context)
        if params.configuration.HasField("task_push_notification_config"):
            raise PushNotificationNotSupportedError
        # The same message may arrive twice concurrently. Other messages do not wait: its run may be at a slow peer.
        async with self._accepting.setdefault((client, message.message_id), asyncio.Lock()):
            known = self._tasks.find_message(client, message.message_id)
            if known is not None:
                self._screen.say(REPEATED.format(client=client, name=message.message_id, task=known.tree))
                return AcceptedMessage(known)
            if message.task_id:
                return await self._address(self._find(message.task_id, context), message)
            if message.answers:
                raise InvalidParamsError("an answer needs the taskId of the task that asks")
            async with self._beginning:  # which counts the tasks, and continues the last one of a conversation
                return AcceptedMessage(await self._begin(message, client))

    async def _begin(self, message: ClientMessage, client: str) -> ServedTask:
        """Start a run for a message, in a new or a continued conversation."""
        if self._tasks.count_live() >= self._options.most_tasks:
            raise UnsupportedOperationError(BUSY.format(count=self._options.most_tasks))
        context = message.context_id or str(uuid.uuid4())
        request = ClientRequest(surface=SURFACE, client=client, context=context, message=message.message_id)
        before = [task for task in self._tasks.list_tasks(client, context) if not self._tasks.is_live(task)]
        files = await asyncio.to_thread(self._keep_files, message)
        names = ", ".join(name for name, _ in message.files)
        text = "\n\n".join(filter(None, (message.text, FILES_NOTE.format(names=names) if names else "")))
        options = self._options
        try:
            with self._control.serve_caller(message.caller):
                if before:
                    overrides = msgspec.structs.replace(options.overrides, request=request, new_files=files)
                    run = await self._control.continue_run(before[-1].tree, 0, text, overrides)
                else:
                    run = await self._control.spawn(options.profile, RunTask(text, files=files, request=request))
        except RetinueError as error:
            await remove_files(files)
            raise UnsupportedOperationError(f"the task was not begun: {error}") from None
        task = ServedTask(run.tree, request)
        self._tasks.add(task)
        self._tasks.follow(task)
        label = f"{client}: {' '.join(text.split())[:60]}"
        self._screen.show_task(run.tree, label, f"client '{client}' asks ({run.tree}): {text[:200]}")
        return task  # no await before this: a stream gets the model's first deltas only if it starts watching now

    def _keep_files(self, message: ClientMessage) -> tuple[str, ...]:
        if not message.files:
            return ()
        folder = make_private_folder(self._files / uuid.uuid4().hex)
        for name, data in message.files:
            replace_file(folder / name, data)
        return tuple(str(folder / name) for name, _ in message.files)

    async def _address(self, task: ServedTask, message: ClientMessage) -> AcceptedMessage:
        """Pass a message to a running task: answers to its questions, and text."""
        if message.context_id and message.context_id != task.request.context:
            raise InvalidParamsError(f"the task {task.tree} is in another context than {message.context_id}")
        view = await self._tasks.read_view(task)
        answers = [answer for answer in message.answers if not _is_given(view, task, answer)]
        if message.message_id in view.message_ids or (message.answers and not answers and not message.text):
            return AcceptedMessage(task)  # a repeated message, perhaps first sent to a server that was killed
        if view.ending is not None or not self._tasks.is_live(task):
            raise UnsupportedOperationError(ENDED.format(task=task.tree))
        if message.files:
            raise InvalidParamsError("files can only come with the first message of a task")
        after = view.last_seq
        for asked, answer in [(await self._find_question(task, answer), answer) for answer in answers]:
            await self._answer(task, asked, answer)
        if message.text:
            receipt = await self._control.send(
                task.tree, message.run, message.text, source=ASKER, message_id=message.message_id
            )
            if receipt.state not in ("queued", "delivered"):
                raise UnsupportedOperationError(f"the message did not reach the task: {receipt.why}")
        self._tasks.note_message(task, message.message_id)
        return AcceptedMessage(task, after, frozenset(answer.approval_id for answer in message.answers))

    async def _find_question(self, task: ServedTask, answer: ApprovalAnswer) -> Approval:
        """Return the open question that a client answers. The digest must match, so a client can allow only the call
        it was shown, as it was shown."""
        if not self._options.asks_client:
            raise UnsupportedOperationError(NOT_ASKED)
        asked = {question.id: question for question in await self._control.pending(task.tree)}.get(answer.approval_id)
        if asked is None or not asked.digest or asked.digest != answer.digest:
            raise InvalidParamsError("the answer is not to a question that is open: its approval_id and digest differ")
        if answer.answer and asked.tool != INPUT_REQUIRED:
            raise InvalidParamsError("'answer' is for free-text questions only: allow or deny the call as it is")
        return asked

    async def _answer(self, task: ServedTask, asked: Approval, answer: ApprovalAnswer) -> None:
        """Answer a question of a task for its client."""
        by = _name_answerer(task)
        given = await self._control.answer(asked.id, answer.verdict, by=by, digest=answer.digest, surface="a2a")
        if given != "taken":
            async with aclosing(self._control.watch(task.tree)) as events:
                closed = await find_closing(events, asked.id)
            told = msgspec.structs.replace(closed, by="a user of this server", reason="")  # hide the user's name
            raise InvalidParamsError(f"the question was answered meanwhile: {describe_closing(told)}")

    # Streams

    def on_subscribe_to_task(
        self, params: SubscribeToTaskRequest, context: ServerCallContext
    ) -> AsyncGenerator[Update]:
        return self._stream(partial(self._accept_subscription, params, context), context, pauses=False)

    async def _accept_subscription(self, params: SubscribeToTaskRequest, context: ServerCallContext) -> AcceptedMessage:
        """Return the task to subscribe to, and the event after which its stream begins."""
        task = self._find(params.id, context)
        view = await self._tasks.read_view(task)
        cursor = read_number(context.state.get("headers", {}).get(AFTER_HEADER.lower(), ""))
        is_typed = EXTENSION in context.requested_extensions and cursor is not None
        if view.ending is not None and not is_typed:
            raise UnsupportedOperationError(f"the task {task.tree} has ended: there is nothing more to stream")
        return AcceptedMessage(task, view.last_seq if cursor is None or not is_typed else cursor)

    async def _stream(
        self, accept: Callable[[], Awaitable[AcceptedMessage]], context: ServerCallContext, *, pauses: bool
    ) -> AsyncGenerator[Update]:
        """Accept a request, and yield its task, then the updates after the event `after`, until the task ends. If
        `pauses` is set, the stream also ends when the client is asked a question. If the generator is closed early,
        the client has disconnected."""
        task, after, _ = await accept()
        is_whole = False
        is_typed = EXTENSION in context.requested_extensions
        updates = self._stream_typed(task, after) if is_typed else self._stream_shown(task, after, pauses=pauses)
        try:
            async with aclosing(updates):
                async for update in updates:
                    yield update
            is_whole = True
        finally:
            if not is_whole:
                await asyncio.shield(self._note_disconnect(task))

    async def _make_first(self, task: ServedTask, first: Event | Delta | None, after: int) -> Task:
        """Return the task as the first item of a stream: `submitted` if the stream starts at the first event, else its
        current state."""
        if after or not isinstance(first, Event) or not isinstance(first.body, RunSpawned):
            return await self._make_task(task)
        history = [task.make_user_message(task.request.message, first.body.task)]
        status = TaskStatus(state=TaskState.TASK_STATE_SUBMITTED)
        return Task(id=task.tree, context_id=task.request.context, history=history, status=status)

    async def _stream_shown(self, task: ServedTask, after: int, *, pauses: bool) -> AsyncGenerator[Update]:
        """Yield the updates for a client of the server's pattern."""
        fold = StreamFold(task, self._options)
        async with aclosing(self._control.watch(task.tree, deltas=True)) as items:
            first = await anext(items, None)  # the log has the task now, so its id can be sent
            yield await self._make_first(task, first, after)
            open_questions = await self._list_open_questions(task) if after and pauses else []
            if open_questions:
                yield task.make_question(open_questions)
                return
            seq = 0
            async for item in _put_back(first, items):
                if not isinstance(item, Delta):
                    seq = item.seq
                for update in fold.apply(item):
                    if seq <= after:
                        continue
                    is_pause = pauses and _asks_input(update)
                    if is_pause and not await self._is_open(task, item):
                        continue  # the client has sent its message again, after it had answered
                    yield update
                    if is_pause:
                        return

    async def _is_open(self, task: ServedTask, item: Event | Delta) -> bool:
        """Return True if the question that an event asks is still open."""
        name = getattr(item.body, "approval_id", "") if isinstance(item, Event) else ""
        return any(question.id == name for question in await self._control.pending(task.tree))

    async def _list_open_questions(self, task: ServedTask) -> list[Approval]:
        if not self._options.asks_client:
            return []
        pending = {question.id for question in await self._control.pending(task.tree)}
        view = await self._tasks.read_view(task)
        return [question for question in view.questions if question.id in pending]

    async def _stream_typed(self, task: ServedTask, after: int) -> AsyncGenerator[Update]:
        """Yield the tree's events and text deltas themselves, for another Retinue."""
        ended: RunEnded | None = None
        async with aclosing(self._control.watch(task.tree, after=after, deltas=True)) as items:
            first = None if after else await anext(items, None)  # a later event may take long to arrive
            yield await self._make_first(task, first, after)
            async for item in _put_back(first, items):
                update = task.make_typed_update(item)
                if update is not None:
                    yield update
                if isinstance(item, Event) and item.run == 0 and isinstance(item.body, RunEnded):
                    ended = item.body
        ended = ended or (await self._tasks.read_view(task)).ending
        if ended is not None:
            yield task.make_ending(ended)

    async def _note_disconnect(self, task: ServedTask) -> None:
        """Log that a client has disconnected, and cancel its task if the server is configured to do so."""
        if not self._tasks.is_live(task):
            return
        is_stopped = self._options.on_disconnect == "cancel" and await self._control.cancel(task.tree)
        how = "its task is cancelled (--on-disconnect cancel)" if is_stopped else "its task continues"
        _LOG.info("Stream of task %s ended by client disconnection", task.tree)
        self._screen.say(f"client '{task.request.client}' went away from {task.tree}: {how}")

    async def _wait_for_pause(self, accepted: AcceptedMessage, context: ServerCallContext) -> None:
        """Wait until a task has ended or asks its client a new question, or until the client has disconnected."""
        task, asks = accepted.task, self._options.asks_client
        gone: asyncio.Event = context.state[GONE]

        def is_over(view: TaskView) -> bool:
            return view.ending is not None or (asks and any(each.id not in accepted.answers for each in view.questions))

        if await run_until_first([self._tasks.wait_until(task, is_over), gone.wait()]) == 1:
            await self._note_disconnect(task)

    # Tasks

    async def on_get_task(self, params: GetTaskRequest, context: ServerCallContext) -> Task:
        validate_history_length(params)
        return apply_history_length(await self._make_task(self._find(params.id, context)), params)

    async def on_list_tasks(self, params: ListTasksRequest, context: ServerCallContext) -> ListTasksResponse:
        validate_history_length(params)
        if params.HasField("page_size"):
            validate_page_size(params.page_size)
        size = params.page_size or DEFAULT_LIST_TASKS_PAGE_SIZE
        found = await self._select(params, _name_client(context))
        total = len(found)
        if params.page_token:
            cursor = decode_list_tasks_cursor(params.page_token)
            if cursor is None:
                raise InvalidParamsError("pageToken is not one that this server has given")
            found = [(key, task) for key, task in found if key < (cursor.timestamp_ns or 0, cursor.task_id)]
        page = found[:size]
        tasks = [apply_history_length(await self._make_task(task), params) for _, task in page]
        token = encode_list_tasks_cursor(ListTasksCursor(*page[-1][0])) if len(found) > size else ""
        return ListTasksResponse(tasks=tasks, next_page_token=token, page_size=size, total_size=total)

    async def _select(self, params: ListTasksRequest, client: str) -> list[tuple[tuple[int, str], ServedTask]]:
        """Return the client's tasks that match `params` with their sort keys, most recently changed first."""
        tasks = self._tasks.list_tasks(client, params.context_id)
        summaries = await self._tasks.read_summaries(tasks)
        since = params.status_timestamp_after.ToNanoseconds() if params.HasField("status_timestamp_after") else 0
        found = []
        for task in tasks:
            at, status = summaries.get(task.tree, (0.0, None))
            if self._tasks.is_live(task):
                view = await self._tasks.read_view(task)
                at, state = view.last_at, view.find_task_state(is_live=True)
            else:
                state = find_state(status)
            changed_at = round(at * 1000) * 10**6
            if (not params.status or state == params.status) and changed_at >= since:
                found.append(((changed_at, task.tree), task))
        return sorted(found, key=lambda each: each[0], reverse=True)

    async def on_cancel_task(self, params: CancelTaskRequest, context: ServerCallContext) -> Task:
        task = self._find(params.id, context)
        view = await self._tasks.read_view(task)
        run = _read_run(params.metadata)
        if view.ending is not None or not await self._control.cancel(task.tree, run):
            raise TaskNotCancelableError(f"the task {task.tree} has ended already, or is ending")
        if run == 0:
            async with asyncio.timeout(CANCEL_SECONDS):
                await self._tasks.wait_until(task, lambda view: view.ending is not None)
        return await self._make_task(task)

    def _find(self, task_id: str, context: ServerCallContext) -> ServedTask:
        found = self._tasks.find(task_id, _name_client(context))
        if found is None:
            raise TaskNotFoundError(f"there is no task '{task_id[:100]}' here")
        return found

    async def _make_task(self, task: ServedTask) -> Task:
        return (await self._tasks.read_view(task)).make_task(is_live=self._tasks.is_live(task))

    # Unsupported operations

    async def on_create_task_push_notification_config(self, params: Any, context: ServerCallContext) -> NoReturn:
        raise PushNotificationNotSupportedError

    on_get_task_push_notification_config = on_create_task_push_notification_config
    on_list_task_push_notification_configs = on_create_task_push_notification_config
    on_delete_task_push_notification_config = on_create_task_push_notification_config

    async def on_get_extended_agent_card(
        self, params: GetExtendedAgentCardRequest, context: ServerCallContext
    ) -> AgentCard:
        raise ExtendedAgentCardNotConfiguredError


def _name_client(context: ServerCallContext) -> str:
    return context.user.user_name if context.user.is_authenticated else ANONYMOUS


def _asks_input(update: Update) -> bool:
    """Return True if an update asks the client for input. The stream pauses then."""
    state = update.status.state if isinstance(update, TaskStatusUpdateEvent) else None
    return bool(state == TaskState.TASK_STATE_INPUT_REQUIRED)


def _name_answerer(task: ServedTask) -> str:
    return f"a2a client {task.request.client}"


def _is_given(view: TaskView, task: ServedTask, answer: ApprovalAnswer) -> bool:
    """Return True for an answer that the same client has already given."""
    decided, verdict = view.decisions.get(answer.approval_id), answer.verdict
    if decided is None or decided.by != _name_answerer(task):
        return False
    args = verdict.args if isinstance(verdict, Allow) else None
    return (decided.allowed, decided.args) == (isinstance(verdict, Allow), args)


async def _put_back(first: Event | Delta | None, items: AsyncGenerator[Event | Delta]) -> AsyncGenerator[Event | Delta]:
    if first is not None:
        yield first
    async for item in items:
        yield item


class ClientMessage(msgspec.Struct, frozen=True, kw_only=True):
    """A message of a client. `files` holds names and bytes. `caller` holds the remaining limits of the calling run, if
    a run sent the message. `run` is the run of the task that gets the text."""

    message_id: str
    task_id: str
    context_id: str
    text: str
    files: tuple[tuple[str, bytes], ...]
    answers: tuple[ApprovalAnswer, ...]
    caller: Caller
    run: int = 0


def read_message(params: SendMessageRequest, headers: Mapping[str, str]) -> ClientMessage:
    """Return the message of a request. Raises the protocol's errors."""
    message = params.message
    if not params.HasField("message") or not message.parts:
        raise InvalidParamsError("params.message must have a messageId, a role and at least one part")
    if message.role == Role.ROLE_AGENT:
        raise InvalidParamsError("params.message.role must be 'user': the agent here speaks for itself")
    if len(message.parts) > MOST_PARTS:
        raise InvalidParamsError(f"params.message.parts has more than {MOST_PARTS} parts")
    words: list[str] = []
    files: list[tuple[str, bytes]] = []
    answers: list[ApprovalAnswer] = []
    for number, part in enumerate(message.parts):
        _read_part(part, f"params.message.parts[{number}]", words, files, answers)
    text = "\n\n".join(word for word in words if word.strip())
    if len(text.encode("utf-8", "replace")) > EVENT_BYTES // 2:
        raise InvalidParamsError(f"the text is larger than {EVENT_BYTES // 2} bytes: send it as a file")
    if not (text or files or answers):
        raise InvalidParamsError("the message is empty: say what to do")
    if len({answer.approval_id for answer in answers}) < len(answers):
        raise InvalidParamsError("the message answers a question twice")
    return ClientMessage(
        message_id=_check_id(message.message_id, "messageId", required=True),
        task_id=_check_id(message.task_id, "taskId"),
        context_id=_check_id(message.context_id, "contextId"),
        text=text,
        files=tuple(files),
        answers=tuple(answers),
        caller=_read_caller(params, message, headers),
        run=_read_run(message.metadata),
    )


def _read_part(
    part: Part, place: str, words: list[str], files: list[tuple[str, bytes]], answers: list[ApprovalAnswer]
) -> None:
    match part.WhichOneof("content"):
        case "text":
            words.append(part.text)
        case "raw":
            if len(files) == MOST_FILES:
                raise InvalidParamsError(f"a message may have at most {MOST_FILES} files")
            if len(part.raw) > EVENT_BYTES:
                raise InvalidParamsError(f"{place}: a file may have at most {EVENT_BYTES} bytes")
            files.append((_clean_file_name(part.filename, {name for name, _ in files}), part.raw))
        case "url":
            raise ContentTypeNotSupportedError(f"{place}: {NO_URI}")
        case "data":
            data = MessageToDict(part.data)
            try:
                answer = read_approval_answer(data)
            except msgspec.ValidationError as error:
                raise InvalidParamsError(f"{place}: not a well formed answer: {error}") from None
            if answer is None:
                words.append(msgspec.json.encode(data).decode())
            else:
                answers.append(answer)
        case _:
            raise InvalidParamsError(f"{place} has no content: give it text, data or the bytes of a file")


def _clean_file_name(name: str, taken: set[str]) -> str:
    """Return a file name that is a single plain path component and not in `taken`."""
    last = name.replace("\\", "/").rpartition("/")[2]
    kept = "".join(c if c.isalnum() or c in "-_. " else "_" for c in last).strip(". ")[:FILE_NAME_CHARACTERS]
    found = kept = kept or "file"
    number = 1
    while found in taken:
        number += 1
        found = f"{number}-{kept}"
    return found


def _check_id(value: str, name: str, *, required: bool = False) -> str:
    if required and not value:
        raise InvalidParamsError(f"params.message.{name} is missing")
    if len(value) > ID_CHARACTERS or not value.isprintable():
        raise InvalidParamsError(f"params.message.{name} must be at most {ID_CHARACTERS} printable characters")
    return value


def _read_run(metadata: Any) -> int:
    """Return the number of the run that a message or a cancel is for. An invalid number must not mean the whole
    task."""
    run = read_command_metadata(MessageToDict(metadata).get(EXTENSION))
    if run is None:
        raise InvalidParamsError(f"'{RUN_KEY}' must be the number of a run, as text")
    return run


def _read_caller(params: SendMessageRequest, message: Message, headers: Mapping[str, str]) -> Caller:
    """Return the remaining limits of the calling run from our extension, or at least its trace from the `traceparent`
    header."""
    for metadata in (message.metadata, params.metadata):
        found: Any = MessageToDict(metadata).get(EXTENSION)
        if isinstance(found, dict):
            return inherited_limits.from_meta(found).as_client()
    trace = traceparent_of(headers.get("traceparent", ""))
    return Caller(traceparent=trace) if trace else NOBODY
