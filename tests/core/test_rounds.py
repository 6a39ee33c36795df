"""The rules by which packets, plans, checklists and improvements are read."""

from __future__ import annotations

import json
from typing import Any

import pytest

from retinue.core.errors import ConfigError
from retinue.core.rounds import (
    DEFAULT_CRITERIA,
    SECTIONS,
    Criterion,
    Rounds,
    check_improvements,
    check_scores,
    decide_verdict,
    parse_next_tasks,
    parse_packet,
)
from tests.agent.rounds.kit import PACKET, TASKS


def test_criteria_are_named_e1_to_en_and_given_verbatim() -> None:
    rounds = Rounds(3, criteria=["It runs.", Criterion(text="It is *short*.", category="could")])
    assert rounds.format_criteria() == "E1 (must): It runs.\nE2 (could): It is *short*."
    assert list(Rounds().list_criteria()) == [f"E{n}" for n in range(1, len(DEFAULT_CRITERIA) + 1)]


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"answers": 0}, "rounds must be a whole number from 1 to 20, got 0"),
        ({"answers": True}, "rounds must be a whole number from 1 to 20, got True"),
        ({"pressure": "wild"}, "rounds: unknown pressure 'wild'; available: gentle, balanced, aggressive"),
        ({"criteria": "It runs."}, "rounds: criteria must be a list"),
        ({"criteria": [" "]}, "is not a criterion: give a text, or a Criterion"),
    ],
)
def test_wrong_rounds_are_refused(fields: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=error.replace("*", ".")):
        Rounds(**fields)


@pytest.mark.requirement("MASS-35")
def test_the_seven_sections_of_a_packet_are_its_second_level_headings() -> None:
    assert SECTIONS == (
        "criteria_interpretation",
        "criterion_findings",
        "cross_answer_synthesis",
        "preserve",
        "improvement_spec",
        "verification_plan",
        "evidence_gaps",
    )
    packet = parse_packet(PACKET.encode())
    assert packet is not None and (packet.text, packet.missing) == (PACKET, ())
    spelled = (
        "## **Preserve**\n## Evidence gaps\n```\n## improvement_spec\n```\n# verification_plan\n##criterion_findings"
    )
    partial = parse_packet(spelled.encode())
    assert partial is not None
    assert partial.missing == tuple(name for name in SECTIONS if name not in ("preserve", "evidence_gaps"))
    assert parse_packet(b" \n\t") is None
    broken = parse_packet(b"## preserve\n\xff")
    assert broken is not None and broken.text == "## preserve\n�"


def plan(**changes: Any) -> bytes:
    return json.dumps({key: value for key, value in {**TASKS, **changes}.items() if value is not None}).encode()


def task(**changes: Any) -> dict[str, Any]:
    return {"id": "a", "description": "d", "verification": "v", "depends_on": [], **changes}


@pytest.mark.requirement("MASS-36")
def test_a_valid_plan_keeps_the_keys_that_we_do_not_know() -> None:
    assert parse_next_tasks(plan()).plan == TASKS
    wider = {**TASKS, "deprioritized": ["x"], "schema_version": 2, "tasks": [task(chunk="c1")]}
    assert parse_next_tasks(json.dumps(wider).encode()).plan == wider


@pytest.mark.requirement("MASS-36")
@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "it is not JSON: "),
        (b"{", "it is not JSON: "),
        (b'{"a": "\xff"}', "it is not JSON: "),
        (b"[" * 100_000, "it is not JSON: "),
        (b"[" * 100 + b"]" * 100, "it is nested deeper than 20 levels"),
        (b"[]", "it must be an object"),
        (plan(schema_version=None), "'schema_version' is missing"),
        (plan(schema_version=True), "'schema_version' is missing"),
        (plan(objective=" "), "'objective' is missing"),
        (plan(primary_strategy=None), "'primary_strategy' is missing"),
        (plan(tasks=[]), "'tasks' must be a list with at least one task"),
        (plan(tasks=[task(id=str(n)) for n in range(101)]), "it has 101 tasks; the maximum is 100"),
        (plan(tasks=["x"]), "tasks[0]: it must be an object"),
        (plan(tasks=[task(verification="")]), "tasks[0]: 'verification' is missing"),
        (plan(tasks=[task(depends_on="a")]), "tasks[0]: 'depends_on' must be a list of ids"),
        (plan(tasks=[task(), task()]), "the id 'a' is not unique"),
        (plan(tasks=[task(depends_on=["b"])]), "'a' depends on the unknown task 'b'"),
        (plan(tasks=[task(depends_on=["x\n" * 99])]), r"'a' depends on the unknown task 'x\nx\nx\n"),
        (plan(tasks=[task(depends_on=["a"])]), "these tasks wait for each other: 'a'"),
        (
            plan(tasks=[task(depends_on=["c"]), task(id="b"), task(id="c", depends_on=["a", "b"])]),
            "these tasks wait for each other: 'a', 'c'",
        ),
    ],
)
def test_an_invalid_plan_says_why(data: bytes, problem: str) -> None:
    found = parse_next_tasks(data)
    assert found.plan is None
    assert found.problems[0].startswith(problem)


def test_a_checklist_needs_a_score_and_a_reason_for_each_criterion() -> None:
    good = {"score": 9, "reasoning": "seen"}
    assert check_scores({"E1": good, "E2": {**good, "note": "more"}}, ("E1", "E2")) == []
    assert check_scores([good], ("E1",)) == ["'scores' must be an object with an entry for each criterion"]
    assert check_scores({"E3": good}, ("E1", "E2")) == ["'E3' is not a criterion", "E1 is missing", "E2 is missing"]
    for score in (-1, 11, "9", True, float("nan"), None):
        assert check_scores({"E1": {**good, "score": score}}, ("E1",)) == ["E1: 'score' must be a number from 0 to 10"]
    assert check_scores({"E1": {"score": 1, "reasoning": " "}}, ("E1",)) == ["E1: 'reasoning' is missing"]


def test_the_verdict_is_iterate_while_a_must_or_should_is_not_met() -> None:
    criteria = {
        "E1": Criterion(text="a"),
        "E2": Criterion(text="b", category="should"),
        "E3": Criterion(text="c", category="could"),
    }

    def decide(*scores: float) -> tuple[str, list[str]]:
        return decide_verdict({name: {"score": each} for name, each in zip(criteria, scores, strict=True)}, criteria)

    assert decide(8, 6, 0) == ("vote", [])
    assert decide(7.9, 6, 10) == ("iterate", ["E1"])
    assert decide(10, 5, 10) == ("iterate", ["E2"])


def test_an_improvement_has_a_description_and_an_impact() -> None:
    good = {"description": "shorter", "impact": "structural", "criterion": "E1", "source": "agent1.1"}
    assert check_improvements([good], ("E1",)) == []
    assert check_improvements([], ("E1",)) == ["'improvements' must be a list with at least one improvement"]
    assert check_improvements([good] * 101, ("E1",)) == ["there are 101 improvements; the maximum is 100"]
    assert check_improvements(
        ["x", {**good, "impact": "huge", "criterion": "E9"}, {"impact": "structural"}], ["E1"]
    ) == [
        "improvements[0]: it must be an object",
        "improvements[1]: 'impact' must be one of incremental, structural, transformative",
        "improvements[1]: 'criterion' must be one of E1",
        "improvements[2]: 'description' is missing",
    ]


@pytest.mark.finding("X8")
def test_a_packet_is_read_in_one_pass() -> None:
    lines = ["## " + "# " * 60_000 + "x", "##" + " \t" * 60_000 + "preserve ##", "## a" + " #" * 5000]
    found = parse_packet("\n".join(lines).encode())
    assert found is not None and found.missing == tuple(name for name in SECTIONS if name != "preserve")
