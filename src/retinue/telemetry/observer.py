"""An observer of the log that turns the events of each tree into OpenTelemetry spans and metrics.

A run is one `invoke_agent` span. Its model calls (`chat`) and tool calls (`execute_tool`) are child spans. Tool calls
made by a program (code mode) are children of the call that runs the program. A child run is a child of the tool call
that spawned it, and is linked to the model call that requested it. No content (prompts, arguments, results, labels) is
recorded. The ids of spans come from the events, whichever provider the tracer has.

A thread makes the spans, so that a slow or broken exporter delays no run, and the end of the program by a few seconds
at most. Errors are logged as warnings and do not affect runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import PurePath
from queue import SimpleQueue
from typing import Any
from urllib.parse import quote, unquote

from msgspec import Struct
from opentelemetry.baggage import get_all as get_all_baggage
from opentelemetry.context import Context
from opentelemetry.metrics import MeterProvider
from opentelemetry.trace import (
    Link,
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    TracerProvider,
    get_current_span,
    set_span_in_context,
)

from retinue.concurrency import TaskOwner
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Event,
    RunEnded,
    RunSpawned,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
    UsageReported,
    decode_raw,
)
from retinue.core.ports import Log
from retinue.core.traces import TraceOrigin, baggage_of, span_id_of
from retinue.core.usage import NO_USAGE, Usage
from retinue.log.forwarding_log import ForwardingLog
from retinue.protocol.inherited_limits import from_environment
from retinue.telemetry.providers import Providers

FLUSH_SECONDS = 3.0
AHEAD = 4096
_LOG = logging.getLogger("retinue.telemetry")

# Names of OpenTelemetry's GenAI conventions, written out because their package no longer exports them, and names of
# Retinue for everything that the conventions do not cover.
OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT = "gen_ai.agent.name"
DESCRIPTION = "gen_ai.agent.description"
CONVERSATION = "gen_ai.conversation.id"
MODEL = "gen_ai.request.model"
INPUT = "gen_ai.usage.input_tokens"
OUTPUT = "gen_ai.usage.output_tokens"
CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE = "gen_ai.usage.cache_creation.input_tokens"
TOOL = "gen_ai.tool.name"
TOOL_CALL = "gen_ai.tool.call.id"
TOOL_TYPE = "gen_ai.tool.type"
TOKEN_TYPE = "gen_ai.token.type"
ERROR = "error.type"

INVOKE_AGENT = "invoke_agent"
CHAT = "chat"
EXECUTE_TOOL = "execute_tool"

RUN = "retinue.run"
PATH = "retinue.path"
DEPTH = "retinue.depth"
DELEGATED = "retinue.delegated"
PARENT_RUN = "retinue.parent.run"
PARENT_PATH = "retinue.parent.path"
RUN_MODE = "retinue.run.mode"
STATUS = "retinue.run.status"
OUTCOME = "retinue.outcome"
TURNS = "retinue.run.turns"
TURN = "retinue.turn"
ALLOWED = "retinue.approval.allowed"
BY = "retinue.approval.by"

TOKEN_USAGE = "gen_ai.client.token.usage"
TOKEN_BUCKETS = [4**n for n in range(14)]
INVOCATIONS = "retinue.invocations"

OTHER = "retinue"
_PROVIDERS = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gemini",
    "google-cloud": "gcp.vertex_ai",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "grok": "x_ai",
    "mistral": "mistral_ai",
    "moonshotai": "moonshot_ai",
    "openai-chat": "openai",
    "openai-responses": "openai",
    "xai": "x_ai",
}

SCOPE = "retinue"
FAILED = "subagent invocation failed"
PRIMARY_FAILED = "agent invocation failed"


def current_trace() -> TraceOrigin:
    """Return the trace of a new tree: that of the active span, else TRACEPARENT in the environment, else none.

    The baggage is the active baggage, else BAGGAGE in the environment."""
    active = ",".join(f"{key}={quote(str(value), safe='')}" for key, value in get_all_baggage().items())
    above = from_environment(os.environ)
    baggage = baggage_of(active) or above.baggage
    span = get_current_span().get_span_context()
    if span.is_valid:
        text = f"00-{span.trace_id:032x}-{span.span_id:016x}-{int(span.trace_flags) & 1:02x}"
        return TraceOrigin(text, baggage)
    return TraceOrigin(above.traceparent, baggage)


class ObservedLog(ForwardingLog):
    """A log that also sends its trees to OpenTelemetry. Closing it closes the wrapped log."""

    def __init__(self, log: Log, providers: Providers) -> None:
        super().__init__(log)
        self._finish = providers.finish
        self._where = providers.where
        self._recorder = Recorder(providers.tracers, providers.meters)
        self._queue: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._tasks = TaskOwner()
        self._watching: dict[str, asyncio.Task[None]] = {}
        threading.Thread(target=self._run_queue, name="retinue-telemetry", daemon=True).start()

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        written = self._log.append(event, wait)
        if event.tree not in self._watching:
            self._watching[event.tree] = self._tasks.start(self._watch(event.tree, event.seq))
        return written

    async def close(self) -> None:
        """Flush telemetry with a timeout of FLUSH_SECONDS, then close the wrapped log without a timeout."""
        try:
            async with asyncio.timeout(FLUSH_SECONDS):
                await self._tasks.wait()
                await self._drain_queue()
                await asyncio.gather(*(_run_in_thread(work) for work in self._finish))
        except TimeoutError:
            _LOG.warning("not all was sent: %s did not take it within %g s", self._where, FLUSH_SECONDS)
        finally:
            self._tasks.cancel()
            self._queue.put(None)
            await self._log.close()

    async def _watch(self, tree: str, first: int) -> None:
        """Queue every event of a tree. An earlier process has sent the events before `first`, so they are not new."""
        try:
            async for event in self._log.watch(tree):
                if isinstance(event, Event):
                    self._queue.put(partial(self._recorder.apply, event, is_new=event.seq >= first))
                    if event.seq % AHEAD == 0:
                        await self._drain_queue()
        except Exception as error:  # noqa: BLE001 - telemetry must not break a run
            _LOG.warning("the telemetry of tree %s ends here: %s: %s", tree, type(error).__name__, error)
        finally:
            self._watching.pop(tree, None)
            self._queue.put(partial(self._recorder.forget, tree))

    async def _drain_queue(self) -> None:
        """Wait until the thread has processed everything in the queue."""
        set_done, done = _make_signal()
        self._queue.put(set_done)
        await done.wait()

    def _run_queue(self) -> None:
        while (work := self._queue.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - the boundary to foreign span processors
                _LOG.warning("telemetry failed: %s: %s", type(error).__name__, error)


async def _run_in_thread(work: Callable[[], object]) -> None:
    """Run `work` in a daemon thread. Unlike with `asyncio.to_thread`, the exit of the program does not wait for it."""
    set_done, done = _make_signal()

    def run() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001 - the boundary to foreign exporters
            _LOG.warning("telemetry was not sent: %s: %s", type(error).__name__, error)
        set_done()

    threading.Thread(target=run, name="retinue-telemetry-end", daemon=True).start()
    await done.wait()


def _make_signal() -> tuple[Callable[[], None], asyncio.Event]:
    """Return a function that sets an event from another thread, and the event, which belongs to this event loop."""
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def set_done() -> None:
        with suppress(RuntimeError):  # the event loop is closed, so nothing waits for the event
            loop.call_soon_threadsafe(done.set)

    return set_done, done


# Events in, spans and metrics out


class MintedIds:
    """An id generator for tracers that gives the ids set in this thread, or random ids if none are set."""

    def __init__(self) -> None:
        self._next = threading.local()

    def set(self, trace_id: str, span_id: str) -> None:
        self._next.trace_id, self._next.span_id = int(trace_id, 16), int(span_id, 16)

    def generate_trace_id(self) -> int:
        return self._take("trace_id") or random.getrandbits(128)

    def generate_span_id(self) -> int:
        return self._take("span_id") or random.getrandbits(64)

    def is_trace_id_random(self) -> bool:
        return True

    def _take(self, name: str) -> int:
        return int(self._next.__dict__.pop(name, 0))


IDS = MintedIds()


class _Run(Struct, eq=False):
    """The open spans and the totals of one run."""

    spawned: RunSpawned
    span: Span
    provider: str
    model: str
    chat: Span | None = None
    last_chat: SpanContext | None = None
    tools: dict[str, Span] = {}
    turn: int | None = None
    turns: int = 0
    usage: Usage = NO_USAGE


class _Tree(Struct, eq=False):
    """The open runs of one tree, and the spans of its ended runs, which can be parents of continued runs."""

    baggage: dict[str, str] = {}
    runs: dict[int, _Run] = {}
    over: dict[int, SpanContext] = {}


class Recorder:
    """A recorder of spans and metrics. Takes the events of any number of trees in one thread, each tree in order."""

    def __init__(self, tracers: TracerProvider, meters: MeterProvider) -> None:
        version: str = sys.modules["retinue"].__version__  # an import would depend on everything that retinue exports
        self._tracer = tracers.get_tracer(SCOPE, version)
        if hasattr(self._tracer, "id_generator"):
            self._tracer.id_generator = IDS
        meter = meters.get_meter(SCOPE, version)
        self._invocations = meter.create_counter(
            INVOCATIONS, unit="{invocation}", description="Runs that have ended, by agent and outcome."
        )
        self._tokens = meter.create_histogram(
            TOKEN_USAGE,
            unit="{token}",
            description="Number of input and output tokens used.",
            explicit_bucket_boundaries_advisory=TOKEN_BUCKETS,
        )
        self._trees: dict[str, _Tree] = {}

    def apply(self, event: Event, *, is_new: bool) -> None:
        """Apply one event. If not `is_new`, an earlier process has sent it: update the state, and end no span."""
        tree = self._trees.get(event.tree)
        if tree is None:
            tree = self._trees[event.tree] = _Tree()
        body, run = event.body, tree.runs.get(event.run)
        if isinstance(body, RunSpawned):
            tree.runs[event.run] = self._start_run(event, body, tree)
        elif run is None:
            return
        elif isinstance(body, RunEnded):
            self._end_run(event, body, run, is_new=is_new)
            tree.over[event.run] = run.span.get_span_context()
            del tree.runs[event.run]
        else:
            self._apply_to_run(event, run, is_new=is_new)

    def forget(self, tree: str) -> None:
        """Drop the state of a tree. If the tree gets new events, all its events are applied again."""
        self._trees.pop(tree, None)

    def _apply_to_run(self, event: Event, run: _Run, *, is_new: bool) -> None:
        match event.body:
            case TurnStarted(turn=turn):
                run.turns = turn
                attributes = {OPERATION: CHAT, PROVIDER: run.provider, MODEL: run.model, TURN: turn}
                run.chat = self._start_span(f"{CHAT} {run.model}", event, run, attributes)
            case UsageReported(usage=usage):
                run.usage += usage
                if run.chat is not None:
                    run.chat.set_attributes(_token_attributes(usage))
                    run.last_chat, run.turn = run.chat.get_span_context(), _nanoseconds(event)
            case ToolCall() as call if not call.host or call.within in run.tools:
                if call.tier != "provider":  # the provider runs its tools inside the model call
                    self._end_chat(run, is_new=is_new)
                kind = "extension" if call.tier == "provider" else "function"
                attributes = {OPERATION: EXECUTE_TOOL, TOOL: call.name, TOOL_CALL: call.call_id, TOOL_TYPE: kind}
                above = run.tools.get(call.within, run.span)
                run.tools[call.call_id] = self._start_span(
                    f"{EXECUTE_TOOL} {call.name}", event, run, attributes, above=above
                )
            case ToolResult(call_id=call_id, success=success) if call_id in run.tools:
                _end_span(run.tools.pop(call_id), _nanoseconds(event), "" if success else "tool_error", is_new=is_new)
            case ApprovalAsked(call_id=call_id) if call_id in run.tools:
                run.tools[call_id].add_event("retinue.approval.asked", timestamp=_nanoseconds(event))
            case ApprovalDecided(call_id=call_id, allowed=allowed, by=by) if call_id in run.tools:
                decided: dict[str, Any] = {ALLOWED: allowed, BY: by.partition(":")[0]}
                run.tools[call_id].add_event("retinue.approval.decided", decided, _nanoseconds(event))
            case TurnEnded():
                self._end_chat(run, is_new=is_new)

    def _start_run(self, event: Event, body: RunSpawned, tree: _Tree) -> _Run:
        parent = None if body.parent is None else tree.runs.get(body.parent)
        provider, model = split_model_name(body.model)
        if body.parent is None:
            tree.baggage = parse_baggage(body.baggage)
        attributes: dict[str, Any] = {
            **tree.baggage,
            OPERATION: INVOKE_AGENT,
            PROVIDER: provider,
            **({MODEL: model} if model else {}),
            RUN_MODE: "loop" if model else "call",
            DEPTH: body.depth,
            DELEGATED: _is_delegated(body),
            **_run_attributes(event),
        }
        if body.parent is not None:
            attributes |= {PARENT_RUN: body.parent, PARENT_PATH: event.path.rpartition("/")[0]}
        described = decode_raw(body.profile).get("description")
        if described:
            attributes[DESCRIPTION] = str(described)
        links: Sequence[Link] = ()
        above = _parse_traceparent(body.traceparent) if body.parent is None else tree.over.get(body.parent)
        if parent is not None:
            above = parent.tools.get(body.call_id, parent.span).get_span_context()
            links = (Link(parent.last_chat),) if parent.last_chat is not None else ()
        IDS.set(body.trace_id, body.span_id)
        span = self._tracer.start_span(
            f"{INVOKE_AGENT} {event.agent}", _make_context(above), SpanKind.INTERNAL, attributes, links,
            _nanoseconds(event),
        )  # fmt: skip
        return _Run(body, span, provider, model)

    def _start_span(
        self, name: str, event: Event, run: _Run, attributes: dict[str, Any], *, above: Span | None = None
    ) -> Span:
        IDS.set(run.spawned.trace_id, span_id_of(run.spawned.span_id, event.seq))
        kind = SpanKind.CLIENT if attributes[OPERATION] == CHAT else SpanKind.INTERNAL
        below = _make_context((above or run.span).get_span_context())
        return self._tracer.start_span(name, below, kind, attributes | _run_attributes(event), (), _nanoseconds(event))

    def _end_chat(self, run: _Run, *, is_new: bool) -> None:
        """End the span of the model call if its usage is known. The event after a reply shows that it is complete."""
        if run.chat is not None and run.turn is not None:
            if is_new:
                run.chat.end(run.turn)
            run.chat = run.turn = None

    def _end_run(self, event: Event, body: RunEnded, run: _Run, *, is_new: bool) -> None:
        good = body.status == "done"
        if run.chat is not None:
            ended = _nanoseconds(event) if run.turn is None else run.turn
            _end_span(run.chat, ended, "" if body.status == "refused" else body.status, is_new=is_new)
        for tool in run.tools.values():
            _end_span(tool, _nanoseconds(event), body.status, is_new=is_new)
        outcome = "done" if good else "error"
        totals: dict[str, Any] = {OUTCOME: outcome, STATUS: body.status, TURNS: run.turns}
        run.span.set_attributes(totals | _token_attributes(run.usage))
        words = PRIMARY_FAILED if run.spawned.parent is None else FAILED
        _end_span(run.span, _nanoseconds(event), "" if good else "agent_error", words, is_new=is_new)
        if not is_new:
            return
        delegated = {DELEGATED: _is_delegated(run.spawned)}
        self._invocations.add(1, {AGENT: event.agent, OUTCOME: outcome, **delegated})
        shared = delegated | {OPERATION: INVOKE_AGENT, PROVIDER: run.provider, MODEL: run.model}
        for kind, count in (("input", run.usage.input_tokens), ("output", run.usage.output_tokens)):
            if count:
                self._tokens.record(count, shared | {TOKEN_TYPE: kind})


def parse_baggage(text: str) -> dict[str, str]:
    """Parse a `baggage` header into keys and values, without properties. Skips entries without a key or an `=`."""
    found = {}
    for member in text.split(","):
        key, equals, value = member.partition(";")[0].partition("=")
        if equals and key.strip():
            found[key.strip()] = unquote(value.strip())
    return found


def _is_delegated(spawned: RunSpawned) -> bool:
    """Return True if another run spawned this one, in the same tree or from another process."""
    return spawned.parent is not None or bool(spawned.reported)


def _run_attributes(event: Event) -> dict[str, Any]:
    return {CONVERSATION: event.tree, AGENT: event.agent, RUN: event.run, PATH: event.path}


def _token_attributes(usage: Usage) -> dict[str, Any]:
    counts = {INPUT: usage.input_tokens, OUTPUT: usage.output_tokens}
    cached = {CACHE_READ: usage.cache_read_tokens, CACHE_WRITE: usage.cache_write_tokens}
    return counts | {name: count for name, count in cached.items() if count}


def _end_span(span: Span, at: int, error: str, words: str = "", *, is_new: bool) -> None:
    if error:
        span.set_attribute(ERROR, error)
        span.set_status(StatusCode.ERROR, words or None)
    if is_new:
        span.end(at)


def _parse_traceparent(traceparent: str) -> SpanContext | None:
    if not traceparent:
        return None
    _, trace_id, span_id, flags = traceparent.split("-")
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=True, trace_flags=TraceFlags(int(flags, 16)))


def _make_context(parent: SpanContext | None) -> Context:
    """Return a context with only `parent`, regardless of the active span of this thread."""
    return Context() if parent is None else set_span_in_context(NonRecordingSpan(parent), Context())


def _nanoseconds(event: Event) -> int:
    return round(event.at * 1e9)


def split_model_name(name: str) -> tuple[str, str]:
    """Split a model name into OpenTelemetry's name of the provider and the model.

    Drops the folder of a script file, which is private."""
    provider, colon, model = name.partition(":")
    if not colon:
        return OTHER, name
    return _PROVIDERS.get(provider, provider), PurePath(model).name if provider == "scripted" else model
