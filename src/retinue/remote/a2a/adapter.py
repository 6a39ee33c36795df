"""The adapter for A2A agents: a run of ours is a task at the agent.

Between two Retinues, every event is sent as typed metadata, a lost stream continues where it stopped, and questions
are answered from here. A foreign agent is read through its standard fields. A task is requested once. A message is
sent again only if it cannot have arrived, or to a Retinue, which recognises the message by its id.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, TypeVar

import httpx
import msgspec
from a2a.client.errors import A2AClientError
from a2a.types import (
    CancelTaskRequest,
    GetTaskRequest,
    Message,
    Part,
    Role,
    SendMessageConfiguration,
    SendMessageRequest,
    StreamResponse,
    SubscribeToTaskRequest,
    Task,
    TaskState,
    TaskStatus,
)
from a2a.utils.errors import A2AError, MethodNotFoundError, TaskNotFoundError, UnsupportedOperationError
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.struct_pb2 import Value

from retinue.concurrency import RateLimit, TaskOwner
from retinue.core.approvals import INPUT_REQUIRED, Allow, Decision, find_answer_text
from retinue.core.errors import Disconnected, RetinueError
from retinue.core.events import ApprovalAsked, ApprovalDecided, Gap, Inbox, RunEnded, RunResumed, Warned
from retinue.core.limits import CANCEL_ASK_SECONDS, TERM_SECONDS
from retinue.core.messages import ASKER
from retinue.core.remote_agents import A2aAgent
from retinue.protocol.a2a import (
    AFTER_HEADER,
    EXTENSION,
    make_answer,
    make_command_metadata,
    make_request_metadata,
    read_event_metadata,
)
from retinue.protocol.notices import remove_plans
from retinue.remote.a2a.connection import MALFORMED, PeerConnection, Unreachable, refuse_malformed
from retinue.remote.a2a.updates import ENDINGS, UpdateFold
from retinue.remote.port import STARTED, Capabilities, RemoteRequest, Report, Undelivered, make_report
from retinue.remote.validator import ID_CHARACTERS

NAME_CHARACTERS = 300
FIRST_WAIT, LONGEST_WAIT = 0.2, 5.0
FIRST_TRIES = 3
MOST_VAIN = 50  # consecutive short streams that end without a report
MARGIN_SECONDS = 10.0
MOST_ASKED = 1000
UPDATE_RATE, UPDATE_BURST = 2000.0, 10_000  # per task: updates per second, and burst; a flood is held back at the agent
FORGOTTEN = "the agent no longer knows the task: it may have been restarted; it is not called again"
UNKNOWN_START = "the connection was lost before the agent confirmed the task; it may run there, and is not called again"
NOT_OPEN = "the question is not open any more"
UNTAKEN = "the agent has gone on and refuses the answer: {why}"
ASKED_AGAIN = "the run was resumed at the agent, which asks again"
NO_ENTRY = "the agent does not let us in (HTTP status {status}): {auth}"
NO_AUTH = "no credentials are configured; give it 'auth' in retinue.yaml, or --bearer-env or --api-key-env"
WRONG_AUTH = "check the credentials that {variables} has"
REFUSED = "the agent refuses the request with the HTTP status {status}"
GONE = "the agent was not reached again for {seconds:g} s: {why}"
UNCANCELLED = f"the agent cannot be reached, and was not told within {CANCEL_ASK_SECONDS:g} s to stop"
_NO_ENTRY = (401, 403)
_PASSING = (408, 425, 429)  # temporary refusals
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol)

T = TypeVar("T")


class Reference(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reference of a task: the id of the message that requested it, and the ids that the agent assigned. `typed`
    is True for a task of another Retinue."""

    message: str
    task: str = ""
    context: str = ""
    typed: bool = False


def read_reference(text: str) -> Reference:
    try:
        return msgspec.json.decode(text, type=Reference)
    except msgspec.MsgspecError:
        return Reference("")


class A2aAdapter:
    """The adapter for an agent, over its connection."""

    name = "a2a"
    grace = CANCEL_ASK_SECONDS + TERM_SECONDS + MARGIN_SECONDS

    def __init__(self, agent: A2aAgent) -> None:
        self._connection = PeerConnection(agent)

    def start(self, request: RemoteRequest) -> A2aRun:
        context = read_reference(request.continues).context if request.continues else ""
        reference = Reference(str(uuid.uuid4()), context=context)
        return A2aRun(self._connection, request, reference=reference, cursor="", is_new=True)

    def attach(self, request: RemoteRequest, *, reference: str, cursor: str) -> A2aRun:
        known = read_reference(reference)
        return A2aRun(self._connection, request, reference=known, cursor=cursor, is_new=False)

    async def close(self) -> None:
        await self._connection.close()


class A2aRun:
    """One task, from the message that requests it to its end. The cursor is a position in the other Retinue's log."""

    def __init__(
        self,
        connection: PeerConnection,
        request: RemoteRequest,
        *,
        reference: Reference,
        cursor: str,
        is_new: bool,
    ) -> None:
        self._connection, self._agent, self._request = connection, connection.agent, request
        self._known, self._cursor, self._is_new = reference, cursor, is_new
        self._is_asked = not is_new  # True if the message may have reached the agent
        self._can_answer = False
        self._fold = UpdateFold(reference.task)
        self._asked: dict[tuple[str, str], ApprovalAsked] = {}  # the other Retinue's open questions, by run and id
        self._inbox: asyncio.Queue[Report] = asyncio.Queue()
        self._answer = ""  # to the agent's last question that has an answer
        self._answered = ""  # the id of this question
        self._goes_on = asyncio.Event()  # set when the agent's question was answered, or withdrawn outside its streams
        self._confirmed = asyncio.Event()
        if reference.task:
            self._confirmed.set()
        self._seen_at = time.monotonic()
        self._rate = RateLimit(UPDATE_RATE, UPDATE_BURST)

    @property
    def reference(self) -> str:
        return msgspec.json.encode(self._known).decode()

    @property
    def capabilities(self) -> Capabilities:
        answer = self._can_answer or not self._known.typed
        return Capabilities(send=True, answer=answer, replay=self._known.typed or not self._known.task)

    # Reports

    async def reports(self) -> AsyncGenerator[Report]:
        """Yield the reports of the task's streams, and those put into the inbox meanwhile, until the task has ended."""
        followed = self._follow()
        async with TaskOwner() as owner:
            reading = owner.start(_next(followed))
            hearing = owner.start(self._inbox.get())
            try:
                has_ended = False
                while not has_ended:
                    await asyncio.wait({reading, hearing}, return_when=asyncio.FIRST_COMPLETED)
                    is_heard = hearing.done()
                    report = hearing.result() if is_heard else reading.result()
                    yield report
                    has_ended = report.run == STARTED and isinstance(report.body, RunEnded)
                    if is_heard:
                        hearing = owner.start(self._inbox.get())
                    else:
                        reading = owner.start(_next(followed))
            finally:
                reading.cancel()
                hearing.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await reading
                await followed.aclose()

    async def _follow(self) -> AsyncGenerator[Report]:
        """Read the task's streams until the task has ended, and connect again after a lost one."""
        self._seen_at, wait, tries, vain = time.monotonic(), FIRST_WAIT, 0, 0
        try:
            while True:
                began = time.monotonic()
                try:
                    async with aclosing(self._read_once()) as reports:
                        async for report in reports:
                            vain = tries = 0
                            yield report
                    why = "its stream ended before the task did"
                    if not self._known.task and not self._known.typed:
                        raise Disconnected(f"{UNKNOWN_START}: {why}")
                    if self._fold.needs_input:
                        continue
                except (Unreachable, A2AClientError, httpx.HTTPError) as error:
                    why = _explain(error)
                    tries = self._check_lost(error, tries)
                vain = vain + 1 if time.monotonic() - began < LONGEST_WAIT else 0
                wait = FIRST_WAIT if self._seen_at > began else min(wait * 2, LONGEST_WAIT)
                if time.monotonic() - self._seen_at + wait > self._agent.reconnect_timeout or vain > MOST_VAIN:
                    raise Disconnected(GONE.format(seconds=self._agent.reconnect_timeout, why=why))
                self._connection.forget_card()
                await asyncio.sleep(wait)
        except (A2AError, Disconnected, RetinueError) as error:
            for report in self._fold.report_rest():
                yield report
            match error:
                case TaskNotFoundError():
                    raise Disconnected(FORGOTTEN) from None
                case Disconnected():
                    raise
                case A2AError():
                    yield Report(STARTED, _fail(f"the agent refuses: {error.message}"))
                case _:
                    yield Report(STARTED, _fail(str(error)))

    def _check_lost(self, error: Exception, tries: int) -> int:
        """Return the number of failed attempts. Raises Disconnected or RetinueError if the agent cannot be asked
        again."""
        status = _find_status(error)
        if status in _NO_ENTRY or (_is_refusal(status) and not self._known.task):
            if tries == 0 and self._connection.forget_token():
                return 1
            text = self._explain_refusal(status)
            raise Disconnected(text) if self._known.task else RetinueError(text)
        if self._known.task or self._known.typed:
            return tries
        if isinstance(error, A2AClientError) and error.__cause__ is None:  # no HTTP error, but an answer
            raise RetinueError(f"the agent answers with an error: {_explain(error)}")
        if self._is_asked and not _is_unsent(error):
            raise Disconnected(f"{UNKNOWN_START}: {_explain(error)}")
        if tries + 1 >= FIRST_TRIES:
            raise Disconnected(_explain(error))
        return tries + 1

    def _explain_refusal(self, status: int | None) -> str:
        if status not in _NO_ENTRY:
            return REFUSED.format(status=status)
        variables = " and ".join(self._agent.auth.variables)
        auth = WRONG_AUTH.format(variables=variables) if variables else NO_AUTH
        return NO_ENTRY.format(status=status, auth=auth)

    async def _read_once(self) -> AsyncGenerator[Report]:
        """Read one stream of the task, of whichever kind is available, until it ends or the user answers the agent's
        question. First wait for the answer to an open question."""
        await self._wait_for_input()
        await self._connection.open()
        extension = self._connection.extension
        is_typed = extension is not None
        self._can_answer = is_typed and (extension or {}).get("approve_by") == "client"
        if is_typed != self._known.typed and not self._known.task:
            self._known = msgspec.structs.replace(self._known, typed=is_typed)
        is_heard = False
        try:
            async with (
                aclosing(self._open_stream()) as stream,
                aclosing(self._read_until_answer(stream)) as updates,
            ):
                async for update in updates:
                    self._seen_at, is_heard = time.monotonic(), True
                    await self._rate.wait()
                    self._learn_ids(update)
                    for report in self._read_typed(update) if self._known.typed else self._fold.apply(update):
                        yield report
        finally:
            if is_heard:  # the agent was connected until now, even if silent
                self._seen_at = time.monotonic()

    async def _wait_for_input(self) -> None:
        """Wait, without a timeout, while the agent's question has no answer."""
        if self._fold.needs_input and not self._fold.is_answered:
            self._goes_on.clear()
            await self._goes_on.wait()
            self._seen_at = time.monotonic()

    async def _read_until_answer(self, stream: AsyncGenerator[StreamResponse]) -> AsyncGenerator[StreamResponse]:
        """Yield the updates of a stream until it ends, or until the user answers the agent's question: some agents keep
        the stream open, and the answer must not wait for its end."""
        async with TaskOwner() as owner:
            reading = owner.start(_next(stream))
            await asyncio.wait([reading])  # without `going_on`, because the request of the stream must arrive
            going_on = owner.start(self._goes_on.wait())
            while reading.done():
                try:
                    update = reading.result()
                except StopAsyncIteration:
                    return
                yield update
                reading = owner.start(_next(stream))
                await asyncio.wait([reading, going_on], return_when=asyncio.FIRST_COMPLETED)

    async def _open_stream(self) -> AsyncGenerator[StreamResponse]:
        """Request the task, or the rest of its updates."""
        streaming = self._connection.card.capabilities.streaming
        client = await self._connection.get_client(streaming=streaming)
        self._goes_on.clear()
        if self._fold.is_answered:
            stream = self._send_answer(client)
        elif not self._known.task:
            if not self._is_new and not self._known.typed:
                raise Disconnected(UNKNOWN_START)
            stream = client.send_message(self._make_first(streaming=streaming), context=await self._make_context())
            self._is_asked = True
        elif self._known.typed:
            request = SubscribeToTaskRequest(id=self._known.task)
            stream = client.subscribe(request, context=await self._make_context(cursor=True))
        else:
            stream = self._follow_foreign(client, streaming=streaming)
        with refuse_malformed():
            async with aclosing(stream):  # type: ignore[type-var]
                async for update in stream:
                    yield update
            if not streaming and not self._fold.has_ended and not self._fold.needs_input:
                async for update in self._poll(client):
                    yield update

    async def _follow_foreign(self, client: Any, *, streaming: bool) -> AsyncIterator[StreamResponse]:
        """Fetch the state of a foreign task and follow it from there. When the task ends, fetch its state again: no
        agent says where in its updates a state stands, so the updates after it may repeat a text or lack one."""
        yield StreamResponse(task=await self._look_up(client))
        if self._fold.has_ended or self._fold.needs_input or not streaming:
            return
        try:
            async for update in client.subscribe(
                SubscribeToTaskRequest(id=self._known.task), context=await self._make_context()
            ):
                if update.HasField("status_update") and update.status_update.status.state in ENDINGS:
                    with suppress(A2AError, httpx.HTTPError, *MALFORMED):  # then the update has to do
                        yield StreamResponse(task=await self._look_up(client))
                yield update
        except (UnsupportedOperationError, MethodNotFoundError):
            async for update in self._poll(client):
                yield update

    async def _send_answer(self, client: Any) -> AsyncIterator[StreamResponse]:
        """Send the user's answer and yield the updates after it. First fetch the task: it may have ended, or the agent
        may have asked another question while nobody read its updates. An agent that has gone on at this moment may
        refuse the answer."""
        context, question, before = await self._make_context(), self._fold.question, Task()
        with suppress(TaskNotFoundError, UnsupportedOperationError):  # some agents cannot show their tasks
            before = await self._look_up(client)
            yield StreamResponse(task=before)
        if self._fold.has_ended or self._fold.question != question:
            return
        self._fold.mark_sent()
        try:
            async for update in client.send_message(self._make_message([Part(text=self._answer)]), context=context):
                if not _is_same_question(update.task.status, before.status):  # each stream may begin with the task
                    yield update
        except A2AClientError:
            raise
        except A2AError as error:
            task = Task()
            with suppress(A2AError, httpx.HTTPError):
                task = await self._look_up(client)
            if task.status.state in (TaskState.TASK_STATE_UNSPECIFIED, TaskState.TASK_STATE_INPUT_REQUIRED):
                raise
            warned = Warned(UNTAKEN.format(why=error.message), code="answer_undelivered")
            self._inbox.put_nowait(Report(STARTED, warned))
            yield StreamResponse(task=task)

    async def _poll(self, client: Any) -> AsyncIterator[StreamResponse]:
        """Poll the state of a task whose agent does not stream."""
        wait = FIRST_WAIT
        while not self._fold.has_ended and not self._fold.needs_input:
            await asyncio.sleep(wait)
            wait = min(wait * 1.5, LONGEST_WAIT)
            yield StreamResponse(task=await self._look_up(client))

    async def _look_up(self, client: Any) -> Task:
        request = GetTaskRequest(id=self._known.task)
        try:
            found: Task = await client.get_task(request, context=await self._make_context())
        except MethodNotFoundError:  # raised by the SDK for an unknown task over REST 0.3
            raise TaskNotFoundError from None
        return found

    def _read_typed(self, update: StreamResponse) -> list[Report]:
        """Return the report that an update of another Retinue carries."""
        if not update.HasField("status_update"):
            return []
        try:
            metadata = MessageToDict(update.status_update.metadata).get(EXTENSION)
            found = read_event_metadata(metadata)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            return [Report(STARTED, Gap(1, "an event of the other retinue cannot be read"))]
        if found is None:
            return []
        item, cursor = found
        self._cursor = cursor or self._cursor
        report = make_report(item)
        if report is None:
            return []
        body, size = report.body, len(metadata["event"])  # type: ignore[index]
        if isinstance(body, RunResumed):
            return self._withdraw_questions(report.run)
        if isinstance(body, ApprovalAsked):
            if len(self._asked) < MOST_ASKED:  # the first question with an id is the one that is shown
                place = report.run, body.approval_id[:ID_CHARACTERS]
                self._asked.setdefault(place, msgspec.structs.replace(body, args={}, preview=""))
        elif isinstance(body, ApprovalDecided):
            self._asked.pop((report.run, body.approval_id[:ID_CHARACTERS]), None)
        elif isinstance(body, RunEnded) and report.run == STARTED:
            self._fold.mark_ended()
            body = msgspec.structs.replace(body, final_response=remove_plans(body.final_response))
        return [msgspec.structs.replace(report, body=body, cursor=cursor, size=size)]

    def _withdraw_questions(self, run: str) -> list[Report]:
        """Return reports that withdraw the questions of a resumed run. The run asks again if it still needs an
        answer."""
        void = [self._asked.pop(place) for place in list(self._asked) if place[0] == run]
        return [
            Report(run, ApprovalDecided(asked.approval_id, asked.call_id, allowed=False, reason=ASKED_AGAIN))
            for asked in void
        ]

    def _learn_ids(self, update: StreamResponse) -> None:
        """Store the ids of the task once the agent has sent them."""
        kind = update.WhichOneof("payload")
        found: Any = getattr(update, kind) if kind else None
        if found is None or self._known.task:
            return
        task, context = (found.id if kind == "task" else found.task_id), found.context_id
        if len(task) > NAME_CHARACTERS or len(context) > NAME_CHARACTERS:
            raise RetinueError("the agent gives its task an id that is too long")
        self._known = msgspec.structs.replace(self._known, task=task, context=context or self._known.context)
        if task:
            self._confirmed.set()

    # Messages

    def _make_first(self, *, streaming: bool) -> SendMessageRequest:
        request = self._request
        text = request.text if self._known.context else "\n\n".join(filter(None, (request.before, request.text)))
        message = Message(
            message_id=self._known.message, role=Role.ROLE_USER, parts=[Part(text=text)], context_id=self._known.context
        )
        if self._known.typed:
            message.extensions.append(EXTENSION)
            message.metadata.update({EXTENSION: make_request_metadata(request.limits, request.ref.path)})
        return SendMessageRequest(
            message=message, configuration=SendMessageConfiguration(return_immediately=not streaming)
        )

    def _make_message(self, parts: list[Part]) -> SendMessageRequest:
        ids = {"message_id": str(uuid.uuid4()), "task_id": self._known.task, "context_id": self._known.context}
        return SendMessageRequest(message=Message(role=Role.ROLE_USER, parts=parts, **ids))

    async def _make_context(self, *, cursor: bool = False) -> Any:
        headers = {AFTER_HEADER: self._cursor or "0"} if cursor else {}
        if self._request.limits.traceparent:
            headers["traceparent"] = self._request.limits.traceparent
        return await self._connection.make_context(**headers)

    # Commands

    async def send(self, run: str, text: str) -> None:
        if run != STARTED and not self._known.typed:
            raise Undelivered("only the task itself can receive messages, not the runs below it")
        question = self._fold.question
        if question:
            self._give_input(question, text)
            given = ApprovalDecided(question, question, allowed=True, tool=INPUT_REQUIRED, args={"answer": text})
            self._inbox.put_nowait(Report(STARTED, given))
        else:
            await self._tell([Part(text=text)], run)
        if not self._known.typed:
            self._inbox.put_nowait(Report(STARTED, Inbox(text, source=ASKER)))

    async def answer(self, run: str, approval_id: str, decision: Decision) -> None:
        if not self._known.typed:
            self._give_input(approval_id, _format_decision(decision))
            return
        asked = self._asked.pop((run, approval_id), None)
        if asked is None:
            raise Undelivered(NOT_OPEN)
        answer = Part(data=ParseDict(make_answer(asked, decision), Value()))
        await self._tell([answer], repeats=True)

    def _give_input(self, question: str, text: str) -> None:
        """Send the answer next. It is also sent if the agent has just gone on without it, but not if the agent has
        asked another question."""
        if question == self._answered or question != self._fold.newest_question:
            raise Undelivered(NOT_OPEN)
        self._answered, self._answer = question, text
        self._fold.mark_answered()
        self._goes_on.set()

    async def _tell(self, parts: list[Part], run: str = STARTED, *, repeats: bool = False) -> None:
        """Send a message to the task, or to a run below it, during its stream. `repeats` sends it again while the
        agent cannot be reached."""
        try:
            async with asyncio.timeout(self._agent.timeout):
                await self._confirmed.wait()
        except TimeoutError:
            raise Undelivered("the agent has not confirmed the task yet") from None
        request = self._make_message(parts)
        request.configuration.return_immediately = True
        if run != STARTED:
            request.message.metadata.update({EXTENSION: make_command_metadata(run)})
        post = partial(self._post, request)
        try:
            await (self._repeat(post) if repeats else post())
        except (A2AError, RetinueError, httpx.HTTPError) as error:
            raise Undelivered(_explain(error)) from None

    async def _post(self, request: SendMessageRequest) -> None:
        client = await self._connection.get_client(streaming=False)
        with refuse_malformed():
            async for _ in client.send_message(request, context=await self._make_context()):
                return

    def cancel(self, run: str) -> None:
        if run != STARTED and not self._known.typed:
            raise Undelivered("only the whole task can be cancelled at the agent")
        self._connection.commands.start(self._send_cancel(run))

    async def _send_cancel(self, run: str) -> None:
        """Ask the agent to stop a run. If the agent cannot be reached for `CANCEL_ASK_SECONDS`, report the task as
        lost, so that nobody waits for its ending, but go on asking."""
        giving_up: asyncio.TimerHandle | None = None
        if run == STARTED:  # runs below have ended here already
            giving_up = asyncio.get_running_loop().call_later(CANCEL_ASK_SECONDS, self._give_up)
            self._connection.forget_card()  # fetched again, which shows that the agent can be reached

        async def cancel_task() -> Task:
            client = await self._connection.get_client(streaming=False)
            if giving_up is not None:
                giving_up.cancel()  # the agent may take long to answer
            request = CancelTaskRequest(id=self._known.task)
            if run != STARTED:
                request.metadata.update({EXTENSION: make_command_metadata(run)})
            with refuse_malformed():
                return await client.cancel_task(request, context=await self._make_context())

        # The task may have ended meanwhile, and some tasks cannot be cancelled or reached.
        with suppress(A2AError, RetinueError, TimeoutError):
            async with asyncio.timeout(A2aAdapter.grace):
                await self._confirmed.wait()
                task = await self._repeat(cancel_task)
            if not self._known.typed:  # an agent that waits for input may have no open stream
                was_asking = self._fold.needs_input
                for report in self._fold.apply(StreamResponse(task=task)):
                    self._inbox.put_nowait(report)
                if was_asking and not self._fold.needs_input:
                    self._goes_on.set()

    def _give_up(self) -> None:
        lost = RunEnded("disconnected", UNCANCELLED, 0, error_details=UNCANCELLED)
        for report in (*self._fold.report_rest(), Report(STARTED, lost)):
            self._inbox.put_nowait(report)

    async def _repeat(self, make: Callable[[], Awaitable[T]]) -> T:
        """Make a request, and make it again as long as the agent cannot be reached, and once with a new token."""
        wait, has_new_token = FIRST_WAIT, False
        while True:
            try:
                return await make()
            except (Unreachable, A2AClientError, httpx.HTTPError) as error:
                status = _find_status(error)
                is_lost = isinstance(error, Unreachable) or isinstance(error.__cause__ or error, httpx.HTTPError)
                if status in _NO_ENTRY and not has_new_token and self._connection.forget_token():
                    has_new_token = True
                elif not is_lost or _is_refusal(status):
                    raise
            await asyncio.sleep(wait)
            wait = min(wait * 2, LONGEST_WAIT)


async def _next(items: AsyncGenerator[T]) -> T:
    return await anext(items)  # a coroutine, as a task needs


def _is_same_question(status: TaskStatus, other: TaskStatus) -> bool:
    return bool(status.state == TaskState.TASK_STATE_INPUT_REQUIRED and status == other)


def _is_unsent(error: Exception) -> bool:
    is_sent = not isinstance(error.__cause__ or error, _NOT_SENT)
    return isinstance(error, Unreachable) or not is_sent or _find_status(error) in _PASSING


def _find_status(error: Exception) -> int | None:
    """Return the HTTP status behind an error, or None."""
    cause = error.__cause__ or error
    return cause.response.status_code if isinstance(cause, httpx.HTTPStatusError) else None


def _is_refusal(status: int | None) -> bool:
    """Return True if a status means that the request was refused for good. Redirects count, because they are not
    followed."""
    return status is not None and 300 <= status < 500 and status not in _PASSING


def _explain(error: Exception) -> str:
    status = _find_status(error)
    if status is not None:
        return f"the agent answers with the HTTP status {status}"
    cause = error.__cause__ if isinstance(error.__cause__, httpx.HTTPError) else error
    return " ".join(f"{cause}".split())[:NAME_CHARACTERS] or type(cause).__name__


def _fail(text: str) -> RunEnded:
    return RunEnded("failed", text, 0, error_details=text)


def _format_decision(decision: Decision) -> str:
    """Return the text for an agent that asks in words: the user's own answer or reason, else "yes" or "no"."""
    if isinstance(decision, Allow):
        return find_answer_text(decision) or "yes"
    return decision.reason or "no"
