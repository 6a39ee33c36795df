"""The exact headers, what is no block at all, and what passes as nothing."""

import json

import pytest

from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Gap,
    Inbox,
    Message,
    Thinking,
    ToolCall,
    ToolResult,
    TurnStarted,
    Unknown,
    UsageReported,
    Warned,
)
from retinue.core.usage import Usage
from retinue.log.blocks import Blocks, format_count, make_call_spans
from tests.surfaces.printer.facts import ANNA, ANNA_TOO, BERT, MAIN, Facts

CALL = ToolCall("c1", "shell", {"command": "ls", "timeout": 10}, timeout_seconds=10)
RESULT = ToolResult("c1", "shell", "a\nb")
CODE = ToolResult("c2", "execute_python_code", "42")
THOUGHT = Thinking("hm")


def header(blocks: Blocks, facts: Facts, who: tuple[int, str, str], body: Body | Unknown) -> str:
    block = blocks.apply(facts(who, body))
    assert block is not None
    return block.header


def started(*who: tuple[tuple[int, str, str], str]) -> tuple[Blocks, Facts]:
    blocks, facts = Blocks(), Facts()
    for run, label in ((MAIN, "main"), *who):
        blocks.apply(facts.spawn(run, label))
    return blocks, facts


@pytest.mark.requirement("CPE-16")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (CALL, "#### [tool call] (timeout: 10s)"),
        (ToolCall("c", "read", {}), "#### [tool call]"),
        (ToolCall("c", "shell", {}, timeout_seconds=2.5), "#### [tool call] (timeout: 2.5s)"),
        (RESULT, '#### Tool "shell" result:'),
        (CODE, "#### Code execution output:"),
        (THOUGHT, "#### thought trace"),
        (Message("so far"), "#### message"),
    ],
)
def test_the_primary_has_no_name_in_its_headers(body: Body, expected: str) -> None:
    blocks, facts = started()
    assert header(blocks, facts, MAIN, body) == expected


@pytest.mark.requirement("CPE-5", "CPE-12", "CPE-13", "CPE-14", "CPE-15")
@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (CALL, "#### anna [tool call] (timeout: 10s)"),
        (ToolCall("c", "read", {}), "#### anna [tool call]"),
        (RESULT, '#### anna Tool "shell" result:'),
        (CODE, "#### anna Code execution output:"),
        (THOUGHT, "#### anna thought trace"),
        (Message("so far"), "#### anna message"),
        (Inbox("look here"), "#### anna inbox"),
    ],
)
def test_a_subagent_s_headers_start_with_its_name(body: Body, expected: str) -> None:
    blocks, facts = started((ANNA, "first"), (BERT, "other"))
    assert header(blocks, facts, ANNA, body) == expected


@pytest.mark.requirement("CPE-12")
def test_two_live_runs_of_one_name_show_their_labels() -> None:
    blocks, facts = started((ANNA, "first"), (ANNA_TOO, "second"))
    assert header(blocks, facts, ANNA, CALL) == "#### anna [first] [tool call] (timeout: 10s)"
    assert header(blocks, facts, ANNA_TOO, RESULT) == '#### anna [second] Tool "shell" result:'
    assert header(blocks, facts, ANNA_TOO, CODE) == "#### anna [second] Code execution output:"
    assert header(blocks, facts, ANNA_TOO, THOUGHT) == "#### anna [second] thought trace"
    blocks.apply(facts.end(ANNA_TOO))
    assert header(blocks, facts, ANNA, CALL) == "#### anna [tool call] (timeout: 10s)"


@pytest.mark.requirement("CPE-4")
def test_only_the_prefix_differs_between_the_primary_and_a_subagent() -> None:
    blocks, facts = started((ANNA, "first"))
    for body in (CALL, RESULT, CODE, THOUGHT, Message("so far")):
        own, child = blocks.apply(facts(MAIN, body)), blocks.apply(facts(ANNA, body))
        assert own is not None and child is not None
        assert child.header == own.header.replace("#### ", "#### anna ", 1)
        assert child.body == own.body


@pytest.mark.requirement("CPE-17", "CPE-18", "CPE-19")
@pytest.mark.parametrize("who", [MAIN, ANNA])
def test_the_last_words_are_no_block(who: tuple[int, str, str]) -> None:
    blocks, facts = started((ANNA, "first"))
    assert blocks.apply(facts(who, Message("the answer", final=True))) is None
    assert blocks.apply(facts(who, ToolCall("f1", "final_answer", {"file": "a.py"}))) is None
    assert blocks.apply(facts(who, ToolResult("f1", "final_answer", '{"file": "a.py"}'))) is None


def test_bodies_are_json_with_two_spaces_or_the_text_as_it_is() -> None:
    blocks, facts = started()
    call = blocks.apply(facts(MAIN, CALL))
    assert call is not None
    assert call.body == 'shell\n{\n  "command": "ls",\n  "timeout": 10\n}'
    for text in ('{"a":[1,2]}', "[{}]", " [1.10, 1e400]"):
        block = blocks.apply(facts(MAIN, ToolResult("x", "t", text)))
        assert block is not None
        assert "\n  " in block.body
        assert json.loads(block.body) == json.loads(text)
    for text in ("plain", "{not json", "[1] and more", '"a string"', "12", "", "{\ud800}", "[" * 100_000):
        block = blocks.apply(facts(MAIN, ToolResult("x", "t", text)))
        assert block is not None
        assert block.body == text


@pytest.mark.requirement("P9")
def test_unknown_kinds_and_unknown_runs_give_nothing_and_break_nothing() -> None:
    blocks, facts = Blocks(), Facts()
    assert blocks.apply(facts(ANNA, Unknown("run.teleported", {"to": "mars"}))) is None
    assert blocks.apply(facts(MAIN, TurnStarted(1))) is None
    assert header(blocks, facts, BERT, CALL) == "#### bert [tool call] (timeout: 10s)"
    assert header(blocks, facts, BERT, ApprovalDecided("never asked", "c9", True)) == "✓ approved"
    ended = blocks.apply(facts.end(BERT, "beamed_up", "a status of the future"))
    assert ended is not None
    assert "beamed_up" in ended.header


@pytest.mark.requirement("CODEY-2")
def test_a_child_s_life_is_told_in_lines() -> None:
    blocks, facts = started()
    task = "\n  look " + "very " * 30 + "closely\nand more"
    spawned = blocks.apply(facts.spawn(ANNA, "first", task=task, queued=True))
    assert spawned is not None and spawned.line and spawned.label == "first"
    assert spawned.header.startswith("○ anna [first] spawned (queued): look very very")
    assert len(spawned.header.partition(": ")[2]) == 80
    for body in (TurnStarted(3), CALL, UsageReported("m", Usage(100, 20))):
        blocks.apply(facts(ANNA, body))
    ended = blocks.apply(facts.end(ANNA))
    assert ended is not None
    assert ended.header == "● anna [first] done (3 turns, 1 tool, 120 tokens, 0.4s)"
    blocks.apply(facts.spawn(BERT, "other"))
    failed = blocks.apply(facts.end(BERT, "failed", "it\nbroke"))
    assert failed is not None and ("bad", "failed") in failed.spans
    assert failed.header == "● bert [other] failed (0 turns, 0 tools, 0 tokens, 0.4s): it broke"


def test_the_primary_s_life_is_its_surface_s_to_tell() -> None:
    blocks, facts = Blocks(), Facts()
    assert blocks.apply(facts.spawn(MAIN, "main")) is None
    assert blocks.apply(facts.end(MAIN)) is None


def test_a_question_shows_label_call_and_preview() -> None:
    blocks, facts = started((ANNA, "research codebase"))
    preview = "-old\n+new"
    args = {"path": "src/lib.rs", "old_string": "old", "new_string": "new"}
    asked = blocks.apply(facts(ANNA, ApprovalAsked("a1", "c1", "edit", args, "research codebase", preview)))
    assert asked is not None
    assert (asked.header, asked.body) == ("◐ [research codebase] edit(src/lib.rs)", preview)
    yes = header(blocks, facts, ANNA, ApprovalDecided("a1", "c1", True))
    assert yes == "✓ approved [research codebase] edit(src/lib.rs)"
    own = blocks.apply(facts(MAIN, ApprovalAsked("a2", "c2", "page_oncall", {"reason": "fire", "level": 3})))
    assert own is not None
    assert own.header == "◐ page_oncall(fire)"
    assert json.loads(own.body) == {"reason": "fire", "level": 3}
    no = header(blocks, facts, MAIN, ApprovalDecided("a2", "c2", False, "not now"))
    assert no == "✗ denied page_oncall(fire): not now"


def test_warnings_and_gaps_are_lines() -> None:
    blocks, facts = started((ANNA, "first"))
    assert header(blocks, facts, MAIN, Warned("low on disk")) == "⚠ low on disk"
    assert header(blocks, facts, ANNA, Warned("low on disk")) == "⚠ anna low on disk"
    assert header(blocks, facts, ANNA, Gap(3, "a slow peer")) == "⚠ 3 events are missing: a slow peer"
    assert header(blocks, facts, ANNA, Gap(1, "a slow peer")) == "⚠ 1 event is missing: a slow peer"


def test_arguments_of_any_shape_can_be_shown() -> None:
    blocks, facts = started()
    deep: object = 1
    for _ in range(5000):
        deep = [deep]
    for value in (deep, "\ud800", float("nan"), {1, 2}, {"a": object()}):
        assert blocks.apply(facts(MAIN, ToolCall("c", "t", {"value": value}))) is not None


def test_counts_are_in_words_and_digits_for_people() -> None:
    assert [format_count(number, "token") for number in (0, 1, 6409)] == ["0 tokens", "1 token", "6,409 tokens"]
    said = ["".join(text for _, text in make_call_spans("f", {"tasks": [{}] * number})) for number in (1, 2)]
    assert said == ["f(1 task)", "f(2 tasks)"]
