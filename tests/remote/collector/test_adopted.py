"""Runs that live elsewhere, as runs of our tree: their names, events and endings, and how they look."""

import asyncio
import io
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from retinue.build.parts import Parts
from retinue.build.supervisor import make_supervisor
from retinue.core.control import ResumeOverrides, SpawnBelow
from retinue.core.errors import ConfigError
from retinue.core.events import (
    Event,
    Gap,
    RunEnded,
    RunSpawned,
    RunStarted,
    Thinking,
    ToolCall,
    ToolResult,
    UsageReported,
)
from retinue.core.limits import Limits
from retinue.core.ports import Outcome
from retinue.core.profiles import Profile, Task
from retinue.core.usage import Usage
from retinue.log.blocks import Blocks
from retinue.log.threads import fold_records
from retinue.remote import collector
from retinue.remote.port import RemoteRun, Undelivered
from retinue.remote.validator import Bounds, clean_name
from retinue.surfaces.printer.printer import Printer
from retinue.testing import scripted
from tests.remote.collector.kit import CPE, CollectorSetup, of, open_collector, runs_of

PROGRAM = "package main\n\nfunc main() {}"
STRANGE = "subagent returned an unrecognized run state"


def printed(events: list[Event], *, level: Any = "normal") -> str:
    stream = io.StringIO()
    printer = Printer(stream, level=level, color=False)
    for event in events:
        printer.show_event(event)
    return stream.getvalue()


async def written(h: CollectorSetup) -> list[Event]:
    """All events, when those that wait are written too."""
    mark = h.supervisor.trees[h.tree]
    return [event async for event in _some(h, mark.seq)]


async def _some(h: CollectorSetup, last: int) -> Any:
    async for event in h.supervisor.watch(h.tree):
        yield event
        if isinstance(event, Event) and event.seq >= last:
            return


@pytest.mark.requirement("CPE-50", "CPE-12", "CPE-13", "CPE-14", "CPE-15", "CPE-58", "CPE-64", "CPE-59")
async def test_a_cpe_process_reports_to_us_as_it_is(tmp_path: Path) -> None:
    """A real process, which knows nothing of us but the address under its own name."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        process = await server.start(CPE, run_id)
        _, complaint = await process.communicate()
        assert (process.returncode, complaint) == (0, b"")
        events = await h.until("run.ended")
        run = runs_of(events)[run_id]
        assert of(events, run)[1:] == [
            RunStarted("foreign"),
            Thinking("I should look.", "reasoning.encrypted"),
            UsageReported("mcp:reviewers", Usage(1234, 456)),
            ToolCall("call_123", "execute_go_code", {}, "foreign", timeout_seconds=10, raw=PROGRAM),
            ToolResult("call_123", "execute_go_code", "it ran", duration_ms=of(events, run)[5].duration_ms),
            ToolCall("call_124", "grep", {"pattern": "todo", "paths": ["src"]}, "foreign"),
            ToolResult("call_124", "grep", '{"hits":[{"line":1}]}', duration_ms=of(events, run)[7].duration_ms),
            RunEnded("done", "", of(events, run)[8].duration_ms),
        ]  # fmt: skip
        screen = printed([event for event in events if event.run == run])
        assert screen.split("\n\n")[1:-1] == [
            "#### code-review-agent thought trace\nI should look.",
            "#### code-review-agent [tool call] (timeout: 10s)\nexecute_go_code\npackage main",
            "func main() {}",
            "#### code-review-agent Code execution output:\nit ran",
            '#### code-review-agent [tool call]\ngrep\n{\n  "pattern": "todo",\n  "paths": [\n    "src"\n  ]\n}',
            '#### code-review-agent Tool "grep" result:\n{\n  "hits": [\n    {\n      "line": 1\n    }\n  ]\n}',
        ]


@pytest.mark.requirement("CPE-58")
async def test_a_foreign_run_is_rendered_like_one_of_ours(tmp_path: Path) -> None:
    """The same blocks, from the same fold: but for the name, a foreign run's events give what ours give."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "tool_call", toolName="shell", toolCallID="c", payload='{"command":"ls"}')
        await server.post(run_id, "tool_result", toolName="shell", toolCallID="c", payload="a.txt")
        theirs = [event for event in await h.until("tool.result") if event.run and event.kind.startswith("tool")]
        ours = [
            Event(event.seq, event.tree, 0, "/main", "main", event.at, body)
            for event, body in zip(
                theirs, [ToolCall("c", "shell", {"command": "ls"}), ToolResult("c", "shell", "a.txt")], strict=True
            )
        ]
        blocks = [Blocks().apply(event) for event in (*theirs, *ours)]
        texts = [(block.header, block.body) for block in blocks if block is not None]
        assert [(header.replace("code-review-agent ", ""), body) for header, body in texts[:2]] == texts[2:]


@pytest.mark.requirement("CPE-12")
async def test_two_of_one_name_are_told_apart_by_their_run_ids(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        first, second = server.call(), server.call()
        await server.post(first, "subagent_start")
        await server.post(first, "tool_call", toolName="a", executionTimeoutSeconds=10)
        await server.post(second, "subagent_start")
        await server.post(first, "tool_call", toolName="b")
        await server.post(second, "tool_result", toolName="c", payload="x")
        await server.post(second, "thought_trace", payload="y")
        await server.post(second, "subagent_end")
        await server.post(first, "tool_call", toolName="d")
        screen = printed(await written(h))
        headers = [line for line in screen.splitlines() if line.startswith("####")]
        assert headers == [
            "#### code-review-agent [tool call] (timeout: 10s)",
            f"#### code-review-agent [{first}] [tool call]",
            f'#### code-review-agent [{second}] Tool "c" result:',
            f"#### code-review-agent [{second}] thought trace",
            "#### code-review-agent [tool call]",
        ]


@pytest.mark.requirement("CPE-54", "CPE-61", "CPE-9")
async def test_each_event_is_in_the_tree_before_the_next_is_posted(tmp_path: Path) -> None:
    """Nothing waits to be more, and the collector itself keeps nothing: not on disk, not in memory."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        for number in range(5):
            await server.post(run_id, "thought_trace", payload=f"thought {number}")
            events = await h.until("thinking", number + 1)
            assert events[-1].body == Thinking(f"thought {number}")
            assert f"thought {number}" in printed(events)
        assert "thought" not in repr(vars(h.collector))
        assert (await server.send({}, method="GET")).status == 405  # nothing can be read from it
    assert list(tmp_path.iterdir()) == []


@pytest.mark.requirement("CPE-17", "CPE-18", "CPE-19")
async def test_what_the_parent_gets_anyway_is_not_printed(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "subagent_start")
        await server.post(run_id, "tool_call", toolName="final_answer", payload='{"answer":"xyz"}')
        await server.post(run_id, "tool_result", toolName="final_answer", payload="xyz")
        await server.post(run_id, "subagent_end", status="done", payload="the answer is xyz")
        screen = printed(await h.until("run.ended"), level="verbose")
        assert "xyz" not in screen and "final_answer" not in screen


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        ({}, RunEnded("done", "", 0)),
        ({"payload": "the model is gone"}, RunEnded("failed", "the model is gone", 0, "the model is gone")),
        ({"status": "done", "payload": "the answer"}, RunEnded("done", "the answer", 0)),
        ({"status": "limited", "payload": "dear"}, RunEnded("limited", "Subagent reached its limit", 0, "dear")),
        ({"status": "happy"}, RunEnded("failed", STRANGE, 0, STRANGE)),
    ],
)
async def test_how_a_server_says_it_ended(tmp_path: Path, end: dict[str, str], ending: RunEnded) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "subagent_start")
        await server.post(run_id, "subagent_end", **end)
        body = (await h.until("run.ended"))[-1].body
        assert isinstance(body, RunEnded)
        assert (body.status, body.final_response, body.error_details) == (
            ending.status, ending.final_response, ending.error_details,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("outcome", "status", "text", "below"),
    [
        (Outcome("the answer"), "done", "the answer", "disconnected"),
        (Outcome("it broke", success=False), "failed", "it broke", "disconnected"),
        (Outcome("", success=False), "failed", "subagent returned an unrecognized run state", "disconnected"),
        (None, "cancelled", "Subagent cancelled", "cancelled"),
    ],
)
async def test_the_return_of_the_call_ends_what_has_not_ended(
    tmp_path: Path, outcome: Outcome | None, status: str, text: str, below: str
) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "subagent_start")
        await server.post("deeper", "subagent_start", parentRunID=run_id)
        h.collector.end_call(run_id, outcome)
        h.collector.end_call(run_id, Outcome("again"))
        assert (await server.post(run_id, "subagent_end")).status == 200  # late, and no second ending
        late = await server.post(run_id, "tool_call", toolName="x")
        assert late.status == 409
        assert late.error == f"run '{run_id}' has ended ({status}): its reports are no longer accepted"
        events = await h.until("run.ended", 2)
        runs = runs_of(events)
        endings = {event.run: event.body for event in events if isinstance(event.body, RunEnded)}
        assert (endings[runs[run_id]].status, endings[runs[run_id]].final_response) == (status, text)
        assert endings[runs["deeper"]].status == below
        h.main.stop("cancelled")
        await h.main.join()
        assert sum(event.kind == "run.ended" for event in await h.events()) == 3


async def test_a_run_that_is_cancelled_here_is_refused_from_then_on(tmp_path: Path) -> None:
    """A reporter in strict mode aborts at the refusal, so the run ends there too."""
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "subagent_start")
        run = runs_of(await h.until("run.started", 2))[run_id]
        assert await h.supervisor.cancel(h.tree, run)
        assert not await h.supervisor.cancel(h.tree, run)
        refused = await server.post(run_id, "thought_trace", payload="still here")
        assert refused.status == 409 and "(cancelled)" in refused.error
        told = await h.supervisor.send(h.tree, run, "hello")
        assert (told.state, told.why) == ("too_late", "the run has ended: cancelled")


async def test_words_for_a_run_elsewhere_do_not_reach_it_and_it_cannot_be_continued(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "subagent_start")
        run = runs_of(await h.until("run.started", 2))[run_id]
        told = await h.supervisor.send(h.tree, run, "hello")
        assert told.state == "elsewhere" and "in the MCP server 'reviewers'" in told.why
        await server.post(run_id, "subagent_end")
        await h.until("run.ended")
        with pytest.raises(ConfigError, match="ran in the MCP server 'reviewers': it cannot be continued"):
            await h.supervisor.continue_run(h.tree, run, "go on")


async def test_a_server_reports_to_a_run_that_continues_another_of_an_ended_tree(tmp_path: Path) -> None:
    """The continued tree has the id of the one that has ended, and the server is the same."""
    script = {"/main/child-1": ["one"], "*": [{"hang": True}]}
    child = Profile("child", "You look.", model=scripted(script))
    async with open_collector(tmp_path) as h:
        first = await h.supervisor.spawn(child, Task("look"), below=SpawnBelow(tree=h.tree, run=0))
        await first.result()
        server = h.server()
        await server.post(server.call(), "subagent_start")
        h.main.stop("cancelled")
        await h.main.join()
        overrides = ResumeOverrides(profiles=[Profile("main", model=scripted(script)), child])
        again = await h.supervisor.continue_run(h.tree, first.number, "go on", overrides)
        caller = h.supervisor.trees[h.tree].runs[again.number]
        answered = await server.post(server.call(by=caller), "subagent_start")
        assert answered.status == 200, answered
        [*_, spawned] = [event for event in await h.events() if isinstance(event.body, RunSpawned)]
        assert spawned.body.parent == again.number and spawned.path.startswith(f"{caller.ref.path}/")


async def test_the_end_of_the_caller_ends_all_below_it(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "subagent_start")
        h.main.stop("cancelled")
        await h.main.join()
        events = await h.events()
        assert [event.run for event in events if isinstance(event.body, RunEnded)] == [1, 0]
        assert (await server.post(run_id, "thought_trace", payload="x")).status == 409
        assert (await server.post(server.call(), "subagent_start")).status == 409


async def test_a_foreign_run_takes_no_slot_and_no_budget(tmp_path: Path) -> None:
    async with open_collector(tmp_path, limits=Limits(concurrent=1, tokens=10_000)) as h:
        server = h.server()
        for _ in range(3):
            run_id = server.call()
            tokens = {"inputTokens": 10**9, "outputTokens": 1}
            await server.post(run_id, "tool_call", toolName="x", tokenUsage=tokens, cost="99.5")
        events = await h.until("usage", 3)
        tree = h.supervisor.trees[h.tree]
        assert tree.slots.try_acquire()
        assert h.main.account is not None and h.main.account.spent.tokens == 0
        spent = [event.body.cost for event in events if isinstance(event.body, UsageReported)]
        assert spent == [Decimal("99.5")] * 3
        assert [view.cost for view in tree.view.runs.values()][1:] == [Decimal("99.5")] * 3


async def test_names_are_cleaned_and_labels_are_unique(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        above = h.collector.meta(h.main.ref)["retinue/parentRunID"]
        for number, name in enumerate(["../../etc", "a b/c", "main", "…", "Prüfer.2", "x" * 200]):
            await server.post(f"id/{number}", "subagent_start", name=name, parentRunID=above)
        await server.post("id-0", "subagent_start", name="same label", parentRunID=above)
        events = await h.until("run.started", 8)
        spawned = [event for event in events if isinstance(event.body, RunSpawned)][1:]
        names = ["etc", "a-b-c", "main", "subagent", "Prüfer.2", "x" * 64, "same-label"]
        assert [event.agent for event in spawned] == names
        assert [event.path.rpartition("/")[2] for event in spawned] == [
            f"{name}-{number}" for number, name in enumerate(names, 1)
        ]
        labels = [event.body.label for event in spawned]  # type: ignore[union-attr]
        assert len(set(labels)) == 7 and labels[0] == "id-0" and labels[-1] == "id-0-2"


def test_a_word_is_safe_in_paths_and_headers() -> None:
    for text in ("a\x1b[31mb", "a\u202eb", "a\nb", "/..", "a b", "𝐛"):
        found = clean_name(text)
        assert found.isprintable() and "/" not in found and " " not in found and found != ".."


async def test_results_find_their_calls_without_ids(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        for kind, tool in (("tool_call", "a"), ("tool_call", "b"), ("tool_result", "b"), ("tool_result", "a")):
            await server.post(run_id, kind, toolName=tool, payload="{}")
        events = await h.until("tool.result", 2)
        ids = [
            (event.body.name, event.body.call_id) for event in events if isinstance(event.body, ToolCall | ToolResult)
        ]
        assert ids == [("a", "call-1"), ("b", "call-2"), ("b", "call-2"), ("a", "call-1")]
        assert h.supervisor.trees[h.tree].view.runs[1].calls == ()


async def test_what_comes_twice_counts_once_and_what_is_missing_leaves_a_gap(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        for seq in (1, 2, 2, 1, 5, 6):
            answer = await server.post(run_id, "thought_trace", payload=str(seq), seq=seq)
            assert answer.status == 200
        bodies = of(await h.until("thinking", 4), 1)[2:]
        gap = Gap(2, "server 'reviewers' did not report them")
        assert bodies == [Thinking("1"), Thinking("2"), gap, Thinking("5"), Thinking("6")]


async def test_floods_end_in_a_gap_that_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "BOUNDS", Bounds(runs=3, reports=10))
    async with open_collector(tmp_path) as h:
        server = h.server()
        above = h.collector.meta(h.main.ref)["retinue/parentRunID"]
        for number in range(6):
            assert (await server.post(f"r{number}", "subagent_start", parentRunID=above)).status == 200
        for _ in range(20):
            assert (await server.post("r0", "thought_trace", payload="on and on")).status == 200
        assert (await server.post("r0", "subagent_end")).status == 200  # that one is always heard
        events = await written(h)
        assert set(runs_of(events)) == {"main", "r0", "r1", "r2"}
        gaps = {event.run: event.body.reason for event in events if isinstance(event.body, Gap)}
        assert gaps == {
            0: "server 'reviewers' reports more than 3 runs; the rest is not shown",
            1: "server 'reviewers' reports more than 10 events or 256 MiB; the rest is not shown",
        }
        assert sum(event.kind == "thinking" for event in events) == 4
        assert events[-1].kind == "run.ended"
        other = h.server("another")
        assert (await other.post(other.call(), "thought_trace", payload="fine")).status == 200
        assert (await h.until("thinking", 5))[-1].body == Thinking("fine")


async def test_a_flood_of_bytes_ends_in_a_gap_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "BOUNDS", Bounds(mib=1))
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        for _ in range(4):
            assert (await server.post(run_id, "thought_trace", payload="x" * 400_000)).status == 200
        await server.post(run_id, "subagent_end")
        kinds = [event.kind for event in await h.until("run.ended") if event.run]
        assert kinds == ["run.spawned", "run.started", "thinking", "thinking", "gap", "run.ended"]


async def test_calls_without_results_take_little_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector, "MOST_OPEN_CALLS", 3)
    async with open_collector(tmp_path) as h:
        server = h.server()
        run_id = server.call()
        for number in range(5):
            await server.post(run_id, "tool_call", toolName="grep", toolCallID=f"c{number}", payload="{}")
        assert len(h.collector._runs[run_id].open_calls) == 3
        for number in (4, 0):
            await server.post(run_id, "tool_result", toolName="grep", toolCallID=f"c{number}", payload="x")
        results = [event.body for event in await h.until("tool.result", 2) if isinstance(event.body, ToolResult)]
        assert [(result.call_id, result.name) for result in results] == [("c4", "grep"), ("c0", "grep")]


async def test_runs_are_not_nested_without_end(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        above = server.call()
        await server.post(above, "subagent_start")
        statuses = []
        for number in range(40):
            answer = await server.post(f"r{number}", "subagent_start", parentRunID=above)
            statuses.append(answer.status)
            above = f"r{number}"
        assert statuses == [200] * (collector.BOUNDS.depth - 1) + [403] * (41 - collector.BOUNDS.depth)


async def test_what_is_reported_keeps_a_stalled_parent_alive(tmp_path: Path) -> None:
    async with open_collector(tmp_path, limits=Limits(stall=1000)) as h:
        stall = h.main.stall_timer
        assert stall is not None
        before = stall._last
        server = h.server()
        await server.post(server.call(), "thought_trace", payload="alive")
        assert stall._last > before


async def test_a_dead_tree_goes_on_without_the_runs_elsewhere(tmp_path: Path) -> None:
    """Their servers died with the process: they end `disconnected`, and what they spent is nobody's budget."""
    async with open_collector(tmp_path, durable=True) as h:
        server = h.server()
        run_id = server.call()
        await server.post(run_id, "tool_call", toolName="x", tokenUsage={"inputTokens": 1000})
        await h.until("tool.call")
        tree, before = h.tree, await h.events()
    parts = Parts(project=tmp_path, mode="yes")
    supervisor = make_supervisor(parts)
    for event in before:  # as they stood when the process died
        supervisor.log.append(event)
    await supervisor.resume(tree, ResumeOverrides(profiles=[h.main.plan.profile], limits=Limits(tokens=500)))
    run = supervisor.trees[tree].runs[0]
    try:
        events = await supervisor.log.read(tree)
        assert of(events, 1)[-1].status == "disconnected"
        at = {event.kind: event.seq for event in events if event.kind == "run.resumed" or event.run == 1}
        assert at["run.resumed"] < at["run.ended"]  # or the time without a process would be taken for work
        assert run.account is not None and run.account.spent.tokens == 0
        assert run is supervisor.trees[tree].root and not run.ending
    finally:
        await supervisor.close()


async def test_a_replay_plays_the_call_and_not_the_run_elsewhere(tmp_path: Path) -> None:
    async with open_collector(tmp_path) as h:
        server = h.server()
        await server.post(server.call(), "subagent_start")
        events = await h.until("run.started", 2)
        assert list(fold_records(events)) == [0]


async def test_a_cancel_reaches_the_server_only_for_the_run_of_a_call(tmp_path: Path) -> None:
    """The port says so of every command that does not reach the peer. Stopping the run here works all the same."""
    async with open_collector(tmp_path) as h:
        server, given_up = h.server(), asyncio.Event()
        called = h.collector.call(server.name, h.main.ref, "review", given_up.set)
        await server.post(called, "subagent_start")
        await server.post("below", "subagent_start", parentRunID=called)
        runs = runs_of(await h.until("run.started", 3))
        [adoption] = h.collector._adoptions.values()
        commands: RemoteRun = adoption._remote  # type: ignore[attr-defined]
        for run_id in ("below", "nobody"):
            with pytest.raises(Undelivered, match="only the run of a call"):
                commands.cancel(run_id)
        assert await h.supervisor.cancel(h.tree, runs["below"])
        assert not given_up.is_set()
        commands.cancel(called)
        assert given_up.is_set()
