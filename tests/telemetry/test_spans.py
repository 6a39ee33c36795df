"""Tests of a tree as spans and metrics: parents, ids, and the status of each ending."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from opentelemetry.baggage import set_baggage
from opentelemetry.context import attach, detach
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

import retinue
from retinue import Allow, Event, Limits, Profile, Result, Task, tool
from retinue.core.caller import Caller
from retinue.core.events import RunSpawned, ToolCall, TurnStarted
from retinue.core.traces import baggage_of, span_id_of, traceparent_of
from retinue.protocol.inherited_limits import from_environment, from_meta, to_environment, to_meta
from retinue.telemetry.observer import Recorder, parse_baggage
from retinue.testing import ManualClock, scripted
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree, until
from tests.telemetry.kit import Memory, ids, links, parent
from tests.tools.code_mode import kit as code_mode

DEEP = {
    "/main": [spawn({"task": "one", "subagent_id": "one"}), {"text": "all"}],
    "one": [{**spawn({"task": "two", "subagent_id": "two"}), "usage": {"input_tokens": 10, "output_tokens": 3}}],
    "two": [spawn({"task": "three", "subagent_id": "three"}), {"text": "2"}],
    "three": [call("glob", pattern="*"), {"text": "3", "usage": {"input_tokens": 7}}],
}


def event_of(events: list[Event], kind: type[Any], run: int) -> Event:
    return next(event for event in events if event.run == run and isinstance(event.body, kind))


@pytest.mark.requirement("SDK-55")
async def test_a_tree_of_depth_three_has_the_ids_of_its_events_and_the_right_parents() -> None:
    memory = Memory()
    result, events = await tree(DEEP, telemetry=memory.telemetry)
    assert result.status == "done"
    spawned = {event.run: event.body for event in events if isinstance(event.body, RunSpawned)}
    for run in (0, 1, 2, 3):
        agent = memory.span(f"invoke_agent {'main' if run == 0 else 'subagent'}", run)
        assert ids(agent) == (spawned[run].trace_id, spawned[run].span_id)
        chat = memory.span("chat ScriptedModel", run, retinue__turn=1)
        assert ids(chat)[1] == span_id_of(spawned[run].span_id, event_of(events, TurnStarted, run).seq)
        assert (parent(chat), chat.kind) == (spawned[run].span_id, SpanKind.CLIENT)
        name = "execute_tool glob" if run == 3 else "execute_tool spawn_subagents"
        called = memory.span(name, run)
        assert ids(called)[1] == span_id_of(spawned[run].span_id, event_of(events, ToolCall, run).seq)
        assert parent(called) == spawned[run].span_id
        if run:
            asked = memory.span("chat ScriptedModel", run - 1, retinue__turn=1)
            assert parent(agent) == ids(memory.span("execute_tool spawn_subagents", run - 1))[1]
            assert links(agent) == [ids(asked)[1]]
    assert len({ids(span)[0] for span in memory.spans}) == 1
    assert len({ids(span)[1] for span in memory.spans}) == len(memory.spans) == 4 + 8 + 4


async def test_the_calls_of_a_program_are_below_the_call_that_runs_it() -> None:
    memory = Memory()
    code = "from tools import weather\nawait weather.report('Rome')"
    await code_mode.run(code, telemetry=memory.telemetry)
    outer, inner = memory.span(f"execute_tool {code_mode.NAME}", 0), memory.span("execute_tool mcp__weather__report", 0)
    assert parent(inner) == ids(outer)[1]
    assert outer.end_time is not None and inner.end_time is not None
    assert inner.end_time <= outer.end_time


@pytest.mark.requirement("SDK-55")
async def test_what_an_invoke_agent_span_says() -> None:
    memory = Memory()
    _, events = await tree(DEEP, telemetry=memory.telemetry)
    one = memory.span("invoke_agent subagent", 1)
    assert one.kind is SpanKind.INTERNAL
    assert dict(one.attributes or {}) == {
        "gen_ai.operation.name": "invoke_agent",
        "gen_ai.agent.name": "subagent",
        "gen_ai.provider.name": "retinue",
        "gen_ai.request.model": "ScriptedModel",
        "gen_ai.conversation.id": events[0].tree,
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 3,
        "retinue.run.mode": "loop",
        "retinue.outcome": "done",
        "retinue.run.status": "done",
        "retinue.run.turns": 2,
        "retinue.run": 1,
        "retinue.path": "/main/subagent-1",
        "retinue.depth": 1,
        "retinue.delegated": True,
        "retinue.parent.run": 0,
        "retinue.parent.path": "/main",
    }
    assert one.status.status_code is StatusCode.UNSET
    assert one.start_time == round(event_of(events, RunSpawned, 1).at * 1e9)


async def test_no_content_is_exported() -> None:
    memory = Memory()
    secret = "PLANTED-SECRET"
    agents = {
        "/main": [{**call("glob", pattern=secret), "thinking": secret}, spawn({"task": secret}), {"text": secret}]
    }
    await tree({**agents, "subagent": [{"text": secret}]}, task=secret, telemetry=memory.telemetry)
    assert memory.spans
    assert secret not in "".join(span.to_json() for span in memory.spans)


@pytest.mark.finding("S9")
@pytest.mark.requirement("SDK-56")
async def test_a_counter_by_agent_and_outcome_and_a_histogram_by_direction_without_zeroes() -> None:
    memory = Memory()
    step = spawn({"task": "bad", "subagent_id": "bad"}, {"task": "good", "subagent_id": "good"})
    agents = {"/main": [{**step, "usage": {"input_tokens": 100}}]}
    await tree(
        {
            **agents,
            "bad": [{"error": "no", "usage": {"input_tokens": 5}}],
            "good": [{"text": "yes", "usage": {"input_tokens": 7, "output_tokens": 2}}],
        },
        telemetry=memory.telemetry,
    )
    counted = {
        (a["gen_ai.agent.name"], a["retinue.outcome"], a["retinue.delegated"]): n
        for a, n in memory.points("retinue.invocations")
    }
    assert counted == {
        ("main", "done", False): 1, ("subagent", "error", True): 1, ("subagent", "done", True): 1,
    }  # fmt: skip
    shared = {"gen_ai.operation.name": "invoke_agent", "gen_ai.provider.name": "retinue"}
    shared["gen_ai.request.model"] = "ScriptedModel"
    points = memory.points("gen_ai.client.token.usage")
    assert sorted(points, key=str) == [
        ({"retinue.delegated": False, **shared, "gen_ai.token.type": "input"}, 100),
        ({"retinue.delegated": True, **shared, "gen_ai.token.type": "input"}, 12),
        ({"retinue.delegated": True, **shared, "gen_ai.token.type": "output"}, 2),
    ]
    assert memory.span("invoke_agent main").attributes["retinue.delegated"] is False
    assert {s.attributes["retinue.delegated"] for s in memory.spans if s.name == "invoke_agent subagent"} == {True}


@pytest.mark.finding("S9")
async def test_baggage_is_on_every_run_and_goes_down_with_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = Memory()
    agents = {"/main": [spawn({"task": "x"}), "end"], "subagent": ["end"]}
    monkeypatch.setenv("BAGGAGE", "team=infra")
    token = attach(set_baggage("customer", "a b"))
    try:
        async with retinue.open(mode="yes", telemetry=memory.telemetry) as r:
            run = await r.spawn(main(agents), "go")
            await run.result()
            [spawned, *_] = bodies(await r.control.log.read(run.tree), RunSpawned)
    finally:
        detach(token)
    assert spawned.baggage == "customer=a%20b"
    runs = [span for span in memory.spans if span.name.startswith("invoke_agent")]
    assert [dict(span.attributes or {}).get("customer") for span in runs] == ["a b", "a b"]
    await tree(agents, telemetry=memory.telemetry)
    assert memory.span("invoke_agent main", team="infra")


@pytest.mark.finding("S9")
@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("a=1", {"a": "1"}),
        (" a = 1 ; p=2 , b=x%20y", {"a": "1", "b": "x y"}),
        ("a=1,,=2,b", {"a": "1"}),
        ("", {}),
        ("nothing", {}),
        ("a=x\ny", {}),
        ("a=\u00e9", {}),
        (f"a={'x' * 9000}", {}),
    ],
)
def test_baggage_that_cannot_be_passed_on_counts_as_none(text: str, entries: dict[str, str]) -> None:
    assert parse_baggage(baggage_of(text)) == entries
    caller = from_meta(to_meta(Caller(baggage=baggage_of(text))))
    assert parse_baggage(from_environment(to_environment(caller)).baggage) == entries


def failed(span: ReadableSpan) -> tuple[StatusCode, str | None, Any]:
    return span.status.status_code, span.status.description, (span.attributes or {}).get("error.type")


@pytest.mark.requirement("SDK-55")
async def test_a_failed_child_is_an_error_and_so_is_its_model_call() -> None:
    memory = Memory()
    agents = {"/main": [spawn({"task": "bad", "subagent_id": "bad"}), {"text": "ok"}], "bad": [{"error": "no"}]}
    await tree(agents, telemetry=memory.telemetry)
    child = memory.span("invoke_agent subagent", 1, retinue__outcome="error", retinue__run__status="failed")
    assert failed(child) == (StatusCode.ERROR, "subagent invocation failed", "agent_error")
    assert failed(memory.span("chat ScriptedModel", 1)) == (StatusCode.ERROR, None, "failed")
    assert memory.span("invoke_agent main", 0).status.status_code is StatusCode.UNSET


async def test_a_cut_stream_counts_its_tokens_and_is_an_error() -> None:
    memory = Memory()
    await tree({"/main": [{"cut": "half a", "usage": {"output_tokens": 4}}]}, telemetry=memory.telemetry)
    chat = memory.span("chat ScriptedModel", 0)
    assert failed(chat) == (StatusCode.ERROR, None, "disconnected")
    assert (chat.attributes or {})["gen_ai.usage.output_tokens"] == 4
    assert failed(memory.span("invoke_agent main", 0)) == (StatusCode.ERROR, "agent invocation failed", "agent_error")


async def test_a_refusal_is_an_answer_of_the_model_and_an_error_of_the_run() -> None:
    memory = Memory()
    await tree({"/main": [{"refuse": "I will not"}]}, telemetry=memory.telemetry)
    assert memory.span("chat ScriptedModel", 0).status.status_code is StatusCode.UNSET
    assert failed(memory.span("invoke_agent main", 0, retinue__run__status="refused"))[2] == "agent_error"


async def test_a_cancelled_tree_ends_all_that_was_open() -> None:
    memory = Memory()
    agents = {"/main": [spawn({"task": "x", "subagent_id": "x"})], "x": [{"hang": True}]}
    async with retinue.open(mode="yes", telemetry=memory.telemetry) as r:
        run = await r.spawn(main(agents), "go")
        await until(run, TurnStarted, number=1)
        await run.cancel()
        assert (await run.result()).status == "cancelled"
    for name, number in (("invoke_agent main", 0), ("invoke_agent subagent", 1)):
        assert failed(memory.span(name, number, retinue__run__status="cancelled"))[2] == "agent_error"
    assert failed(memory.span("execute_tool spawn_subagents", 0))[2] == "cancelled"
    assert failed(memory.span("chat ScriptedModel", 1))[2] == "cancelled"


async def test_a_run_that_timed_out() -> None:
    memory, clock = Memory(), ManualClock()
    async with retinue.open(mode="yes", telemetry=memory.telemetry, clock=clock) as r:
        run = await r.spawn(main({"/main": [{"hang": True}]}), Task("go", timeout_seconds=60))
        await until(run, TurnStarted)
        await clock.advance(60)
        assert (await run.result()).status == "timed_out"
    assert failed(memory.span("invoke_agent main", 0, retinue__run__status="timed_out"))[2] == "agent_error"
    assert failed(memory.span("chat ScriptedModel", 0))[2] == "timed_out"


async def test_a_run_that_reached_its_limit() -> None:
    memory = Memory()
    agents = {"/main": [call("glob", pattern="*")] * 3}
    await tree(agents, limits=Limits(turns=2), telemetry=memory.telemetry)
    assert failed(memory.span("invoke_agent main", 0, retinue__run__status="limited"))[2] == "agent_error"
    assert [s.status.status_code for s in memory.spans if s.name.startswith("chat")] == [StatusCode.UNSET] * 2


async def test_a_tool_that_fails_and_one_that_is_asked_about() -> None:
    memory = Memory()

    async def yes(_: object) -> Allow:
        return Allow()

    @tool
    async def deploy() -> str:
        raise ValueError("PLANTED-SECRET")

    agents = {"/main": [call("deploy"), {"text": "ok"}]}
    async with retinue.open(telemetry=memory.telemetry, approver=yes) as r:
        await r.run(Profile("main", model=scripted(agents), tools=[deploy]), "go")
    span = memory.span("execute_tool deploy", 0)
    assert failed(span) == (StatusCode.ERROR, None, "tool_error")
    asked, decided = span.events
    assert (asked.name, decided.name) == ("retinue.approval.asked", "retinue.approval.decided")
    assert dict(decided.attributes or {}) == {"retinue.approval.allowed": True, "retinue.approval.by": "function"}


async def test_a_callable_is_an_agent_without_model_calls() -> None:
    memory = Memory()

    async def work(task: str, ctx: retinue.Context) -> str:
        child = await ctx.spawn(Profile("child", model=scripted({"child": [{"text": "c"}]})), "x")
        return (await child.result()).final_response

    async with retinue.open(telemetry=memory.telemetry) as r:
        assert (await r.run(Profile("caller", call=work), "go")).final_response == "c"
    caller = memory.span("invoke_agent caller", 0, retinue__run__mode="call")
    child = memory.span("invoke_agent child", 1)
    assert (parent(child), links(child)) == (ids(caller)[1], [])


async def test_a_tree_belongs_to_the_span_that_is_active_where_it_is_spawned() -> None:
    memory = Memory()
    with memory.tracers.get_tracer("app").start_as_current_span("request") as request:
        _, events = await tree({"/main": [{"text": "x"}]}, telemetry=memory.telemetry)
    context = request.get_span_context()
    agent = memory.span("invoke_agent main", 0)
    assert ids(agent)[0] == f"{context.trace_id:032x}"
    assert parent(agent) == f"{context.span_id:016x}"
    spawned = events[0].body
    assert isinstance(spawned, RunSpawned)
    assert ids(agent) == (spawned.trace_id, spawned.span_id)
    assert spawned.traceparent == f"00-{context.trace_id:032x}-{context.span_id:016x}-01"
    memory.tracers.get_tracer("app").start_span("later").end()
    assert ids(memory.span("later")) != ids(agent)  # ids of others are their own


async def test_what_is_not_sampled_is_not_exported() -> None:
    memory = Memory(sampler=ALWAYS_OFF)
    result, _ = await tree(DEEP, telemetry=memory.telemetry)
    assert (result.status, list(memory.spans)) == ("done", [])


async def test_events_told_by_an_earlier_process_are_remembered_and_not_told_again() -> None:
    first, second = Memory(), Memory()
    _, events = await tree(DEEP, telemetry=first.telemetry)
    recorder = Recorder(second.tracers, second.meters)
    began = event_of(events, ToolCall, 2).seq
    for event in events:
        recorder.apply(event, is_new=event.seq >= began)
    told = {ids(span)[1] for span in second.spans}
    before = {ids(span)[1] for span in first.spans} - told
    assert len(before) == 2  # the model calls of runs 0 and 1, which were over
    assert {parent(s) for s in second.spans} == {parent(s) for s in first.spans}


@pytest.mark.parametrize(
    "text",
    [
        "", "nonsense", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b71",
        "ff-" + "a" * 32 + "-" + "b" * 16 + "-01",
        "00-" + "0" * 32 + "-" + "b" * 16 + "-01", "00-" + "a" * 32 + "-" + "0" * 16 + "-01",
        "00-" + "A" * 32 + "-" + "b" * 16 + "-01", "00-" + "a" * 32 + "-" + "b" * 16 + "-01-more",
    ],
)  # fmt: skip
def test_what_is_no_traceparent_counts_as_none(text: str) -> None:
    assert traceparent_of(text) == ""
    assert traceparent_of(f" 00-{'a' * 32}-{'b' * 16}-01\n") == f"00-{'a' * 32}-{'b' * 16}-01"


@pytest.mark.parametrize("run", [1, 2])
async def test_a_run_that_is_continued_is_below_the_parent_of_the_first_one(run: int) -> None:
    memory = Memory()
    agents = {
        "main": [spawn({"task": "one"}), {"text": "all"}],
        "/main/subagent-1": [spawn({"task": "two"}), {"text": "1"}],
        "subagent": [{"text": "x"}],
    }
    async with retinue.open(telemetry=memory.telemetry, mode="yes") as r:
        profile = main(agents)
        first = await r.spawn(profile, "go")
        await first.result()
        again = await r.continue_run(f"{first.tree}/{run}", "go on", profiles=[profile])
        await again.result()
        recorder = r.control.log._recorder  # type: ignore[attr-defined]
    assert recorder._trees == {}
    spans = {(span.attributes or {})["retinue.run"]: span for span in memory.spans if "invoke_agent" in span.name}
    assert parent(spans[again.number]) == ids(spans[run - 1])[1]
    assert len({ids(span)[0] for span in spans.values()}) == 1


async def test_many_trees_at_once_keep_their_spans_apart() -> None:
    memory = Memory()
    async with retinue.open(mode="yes", telemetry=memory.telemetry) as r:
        results: list[Result[Any]] = await asyncio.gather(*(r.run(main(DEEP), "go") for _ in range(20)))
    assert {result.status for result in results} == {"done"}
    assert len(memory.spans) == 20 * 16
    by_trace: dict[str, set[Any]] = {}
    for span in memory.spans:
        by_trace.setdefault(ids(span)[0], set()).add((span.attributes or {})["gen_ai.conversation.id"])
    assert len(by_trace) == 20 and all(len(trees) == 1 for trees in by_trace.values())
