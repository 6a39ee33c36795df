"""The present of a tree, and the entries it leaves, folded from events and deltas."""

from decimal import Decimal

import pytest

from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Delta,
    Message,
    RunEnded,
    RunSpawned,
    RunStarted,
    ToolCall,
    ToolResult,
    TurnStarted,
    UsageReported,
)
from retinue.core.usage import Usage
from retinue.log.activity import Activity, Entries, ProgressLines
from retinue.log.runs import RunCounts
from tests.surfaces.printer.facts import ANNA, BERT, MAIN, Facts

EDIT = {"path": "src/lib.rs", "old_string": "old", "new_string": "new"}


def begin_tree(facts: Facts, activity: Activity) -> None:
    limits = {"max_tokens": 1000, "max_cost": Decimal("2"), "timeout_seconds": 60.0}
    activity.apply(facts(MAIN, RunSpawned(None, "main", 0, "do it", "id", "/w", model="m", **limits)))  # type: ignore[arg-type]
    activity.apply(facts(MAIN, RunStarted()))
    activity.apply(facts(MAIN, TurnStarted(1)))


def say(text: str, kind: str = "text", offset: int = 0, call_id: str = "") -> Delta:
    return Delta("t1", 0, "/main", "main", text, kind, turn=1, offset=offset, call_id=call_id)


def test_a_model_is_awaited_then_speaks_then_its_call_runs() -> None:
    facts, activity = Facts(), Activity("t1")
    begin_tree(facts, activity)
    [work] = activity.list_work()
    assert (work.kind, work.label, work.text) == ("model", None, "")
    activity.apply(say("hm", "thinking"))
    assert [(each.kind, each.text) for each in activity.list_work()] == [("thinking", "hm")]
    activity.apply(say("one "))
    activity.apply(say("two", offset=4))
    assert [(each.kind, each.text) for each in activity.list_work()] == [("text", "one two")]
    activity.apply(facts(MAIN, Message("one two")))
    call = ToolCall("c1", "shell", {"command": "make"})
    activity.apply(facts(MAIN, call))
    activity.apply(say("building", "output"))
    assert [(each.call, each.text) for each in activity.list_work()] == [(call, "building")]
    activity.apply(facts(MAIN, ToolResult("c1", "shell", "built")))
    assert [each.kind for each in activity.list_work()] == ["model"]


def test_words_that_come_before_the_event_of_their_turn_stay() -> None:
    """A delta is shown at once; the events before it are written first. So it is with the reply of an A2A agent."""
    facts, activity = Facts(), Activity("t1")
    activity.apply(facts(MAIN, RunSpawned(None, "main", 0, "do it", "id", "/w", model="m")))
    activity.apply(say("The first "))
    activity.apply(facts(MAIN, RunStarted()))
    activity.apply(facts(MAIN, Message("a step on the way", final=False)))
    activity.apply(facts(MAIN, TurnStarted(1)))
    activity.apply(say("words", offset=10))
    assert [(each.kind, each.text) for each in activity.list_work()] == [("text", "The first words")]
    activity.apply(facts(MAIN, TurnStarted(2)))
    assert [(each.kind, each.text) for each in activity.list_work()] == [("model", "")]


def test_output_stands_below_the_call_it_came_from() -> None:
    facts, activity = Facts(), Activity("t1")
    begin_tree(facts, activity)
    for number in (1, 2):
        activity.apply(facts(MAIN, ToolCall(f"c{number}", "shell", {"command": f"make {number}"})))
        activity.apply(say(f"building {number}", "output", call_id=f"c{number}"))
    activity.apply(say(" more", "output", call_id="c1"))
    assert [each.text for each in activity.list_work()] == ["building 1 more", "building 2"]
    activity.apply(facts(MAIN, ToolResult("c1", "shell", "built")))
    assert [each.text for each in activity.list_work()] == ["building 2"]


@pytest.mark.requirement("CODEY-27", "CODEY-28", "CODEY-34")
def test_questions_wait_in_their_order_and_carry_agent_and_label() -> None:
    facts, activity = Facts(), Activity("t1")
    begin_tree(facts, activity)
    activity.apply(facts.spawn(ANNA, "research codebase"))
    activity.apply(facts(ANNA, RunStarted()))
    for name in ("one", "two"):
        activity.apply(facts(ANNA, ToolCall(name, "edit", EDIT)))
        activity.apply(
            facts(ANNA, ApprovalAsked(name, name, "edit", EDIT, "research codebase", "-old\n+new", digest="d"))
        )
    activity.apply(facts(MAIN, ToolCall("three", "edit", EDIT)))
    activity.apply(facts(MAIN, ApprovalAsked("three", "three", "edit", EDIT, None, "-old\n+new", digest="d")))
    asked = [(each.number, each.run, each.agent, each.label) for each in activity.questions.values()]
    assert asked == [(1, 1, "anna", "research codebase"), (2, 1, "anna", "research codebase"), (3, 0, "main", None)]
    assert activity.list_work() == []  # a call that waits for a person does not run
    activity.apply(facts(ANNA, ApprovalDecided("one", "one", True, by="user")))
    assert [each.number for each in activity.questions.values()] == [2, 3]
    assert [work.label for work in activity.list_work()] == ["research codebase"]
    totals = activity.measure_totals(1_700_000_010.0)
    assert totals.agents == RunCounts(primary=1, running=1)
    activity.apply(facts.end(ANNA))
    assert [each.number for each in activity.questions.values()] == [3]
    assert activity.measure_totals(1_700_000_010.0).agents.finished == 1


def test_the_totals_tell_what_is_spent_and_left() -> None:
    facts, activity = Facts(), Activity("t1")
    begin_tree(facts, activity)
    used = UsageReported("m", Usage(input_tokens=300, output_tokens=100), Decimal("0.5"))
    activity.apply(facts(MAIN, used))
    totals = activity.measure_totals(1_700_000_012.0)
    assert (totals.tokens, totals.tokens_left) == (400, 600)
    assert (totals.cost, totals.cost_left) == (Decimal("0.5"), Decimal("1.5"))
    assert (totals.seconds, totals.seconds_left) == (10.0, 50.0)


@pytest.mark.requirement("CODEY-32", "CODEY-33")
def test_a_call_is_one_entry_with_its_change_and_label() -> None:
    facts, entries = Facts(), Entries()
    assert entries.apply(facts.spawn(MAIN, "main")) is None
    entries.apply(facts.spawn(ANNA, "research codebase"))
    assert entries.apply(facts(ANNA, ToolCall("c1", "edit", EDIT))) is None
    assert entries.apply(facts(ANNA, ApprovalAsked("a1", "c1", "edit", EDIT, "research codebase", digest="d"))) is None
    assert entries.apply(facts(ANNA, ApprovalDecided("a1", "c1", True, by="user"))) is None
    entry = entries.apply(facts(ANNA, ToolResult("c1", "edit", "edited src/lib.rs")))
    assert entry is not None
    assert "".join(text for _, text in entry.spans) == "✓ [research codebase] edit(src/lib.rs) → edited"
    assert ("label", "[research codebase] ") in entry.spans
    assert entry.body == "- old\n+ new"
    entries.apply(facts(MAIN, ToolCall("c2", "edit", EDIT)))
    own = entries.apply(facts(MAIN, ToolResult("c2", "edit", "edited src/lib.rs")))
    assert own is not None and "".join(text for _, text in own.spans) == "✓ edit(src/lib.rs) → edited"


def test_a_denial_is_told_once_and_an_answer_of_a_child_below_its_line() -> None:
    facts, entries = Facts(), Entries()
    entries.apply(facts.spawn(MAIN, "main"))
    entries.apply(facts.spawn(ANNA, "look"))
    entries.apply(facts(ANNA, ToolCall("c1", "edit", EDIT)))
    entries.apply(facts(ANNA, ApprovalAsked("a1", "c1", "edit", EDIT, "look", digest="d")))
    denied = entries.apply(facts(ANNA, ApprovalDecided("a1", "c1", False, "too risky", "user")))
    assert denied is not None and "✗ denied [look] edit(src/lib.rs): too risky" in "".join(t for _, t in denied.spans)
    assert entries.apply(facts(ANNA, ToolResult("c1", "edit", "The user denied this call", False))) is None
    ended = entries.apply(facts(ANNA, RunEnded("done", "**found** it", 400)))
    assert ended is not None and ended.body == "**found** it"
    assert "".join(text for _, text in ended.spans).startswith("● anna [look] done (")


def test_an_answer_that_nobody_fetched_is_told_once() -> None:
    facts, entries = Facts(), Entries()
    told = [facts.spawn(MAIN, "main"), facts(MAIN, RunStarted())]
    told.append(facts(ANNA, RunSpawned(0, "slow", 1, "do it", "id_1", "/w", background=True)))
    told += [facts.end(ANNA), facts.end(MAIN, "cancelled")]
    shown = [entry for entry in map(entries.apply, told) if entry is not None]
    assert [entry.body for entry in shown if "the last words" in entry.body] == ["the last words"]
    assert shown[-1].run == 1


def test_a_waiting_client_gets_the_latest_line_of_each_run_but_none_of_its_own() -> None:
    facts, lines = Facts(), ProgressLines("t1")
    lines.apply(facts(MAIN, RunSpawned(None, "client", 0, "an MCP client", "id", "/w", client=True)))
    lines.apply(facts(MAIN, ToolCall("c0", "spawn_subagents", {})))
    assert (lines.latest, lines.by_run, lines.count_runs()) == ("", {}, (0, 0))
    lines.apply(facts.spawn(ANNA, "look", task="look at src"))
    lines.apply(facts.spawn(BERT, "test", task="x" * 100))
    assert lines.by_run == {1: "[look] look at src", 3: f"[test] {'x' * 60}"}
    lines.apply(facts(ANNA, ToolCall("c1", "read", {"path": "src/lib.rs"})))
    lines.apply(facts(ANNA, ToolResult("c1", "read", "text")))
    assert lines.latest == lines.by_run[1] == "[look] read(src/lib.rs)"
    lines.apply(facts.end(BERT))
    assert (lines.latest, lines.count_runs()) == ("[test] ended: done", (1, 1))
