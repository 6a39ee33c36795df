"""The questions of a tree, folded from its events."""

import asyncio
from collections.abc import AsyncIterator

from retinue.core.events import ApprovalAsked, ApprovalDecided, Event, RunResumed, RunWaiting
from retinue.log.questions import Questions, find_question
from tests.surfaces.printer.facts import ANNA, MAIN, Facts

EDIT = {"path": "a.txt", "old_string": "old", "new_string": "new"}


def ask(name: str) -> ApprovalAsked:
    return ApprovalAsked(name, f"call-{name}", "edit", EDIT, "research", "-old\n+new", digest="d")


def test_a_question_is_open_until_it_is_answered_or_its_run_asks_no_more() -> None:
    facts, questions = Facts(), Questions()
    listed = []
    for who, body in [
        (ANNA, ask("one")),
        (MAIN, ask("two")),
        (ANNA, ApprovalDecided("one", "call-one", True, by="user")),
        (ANNA, ask("three")),
        (MAIN, RunWaiting()),
        (ANNA, RunResumed()),
        (ANNA, ask("three")),
    ]:
        questions.apply(facts(who, body))
        listed.append([(each.number, each.id) for each in questions.open.values()])
    questions.apply(facts.end(ANNA))
    assert listed == [
        [(1, "one")],
        [(1, "one"), (2, "two")],
        [(2, "two")],
        [(2, "two"), (3, "three")],
        [(3, "three")],
        [],
        [(4, "three")],
    ]
    assert not questions.open


def test_a_question_is_found_by_its_number_or_id_also_after_it_was_closed() -> None:
    facts = Facts()
    told = [
        facts(ANNA, ask("one")),
        facts(ANNA, ApprovalDecided("one", "call-one", True, by="user")),
        facts(MAIN, ask("two")),
    ]

    async def read() -> AsyncIterator[Event]:
        for event in told:
            yield event

    async def find(name: str) -> tuple[str, str, int] | None:
        found = await find_question(read(), name)
        return None if found is None else (found.id, found.agent, found.number)

    assert [asyncio.run(find(name)) for name in ("1", "one", "2", "3")] == [
        ("one", "anna", 1),
        ("one", "anna", 1),
        ("two", "main", 2),
        None,
    ]
