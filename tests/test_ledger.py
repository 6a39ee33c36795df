"""Pairs the requirement ledger with the tests that cite it by `@pytest.mark.requirement("ID", ...)`.

Findings are cited the same way, by `@pytest.mark.finding("ID", ...)`.

Citations are read from the source with `ast`, not from what was collected, so the answer is the same for one
test, a part of the suite, or one xdist worker.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from tests.ledger import FINDINGS, LEDGER, OPEN_FINDINGS, PITFALLS, REQUIREMENTS, Requirement

TESTS = Path(__file__).parent
SEED_COUNTS = {"CPE": 65, "SDK": 60, "CODEY": 40, "CAIPE": 33, "MASS": 55}
PITFALL_COUNT = 39
FINDING_COUNTS = {"S": 13, "X": 9, "R": 11, "M": 8, "U": 9}


@dataclass(frozen=True)
class Citation:
    id: str
    where: str
    mark: str = "requirement"


def find_mark(node: ast.AST) -> str | None:
    match node:
        case ast.Attribute(attr="requirement" | "finding" as mark, value=ast.Attribute(attr="mark")):
            return mark
    return None


def cited_in(expression: ast.AST, where: str) -> Iterator[Citation]:
    """Marks anywhere in a decorator or `pytestmark`, `pytest.param(..., marks=...)` included."""
    for node in ast.walk(expression):
        if not isinstance(node, ast.Call) or (mark := find_mark(node.func)) is None:
            continue
        place = f"{where}:{node.lineno}"
        if not node.args:
            raise ValueError(f"{place}: a {mark} mark without an id")
        for argument in node.args:
            if not (isinstance(argument, ast.Constant) and isinstance(argument.value, str)):
                raise ValueError(f"{place}: cite {mark} ids as plain strings")
            yield Citation(argument.value, place, mark)


def has_test(tree: ast.AST) -> bool:
    return any(
        isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
        for node in ast.walk(tree)
    )


def citations(source: str, where: str) -> Iterator[Citation]:
    """Ids cited by a test, by a class that has tests, or by the `pytestmark` of a module or class that has tests."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() if node.name.startswith("test_"):
                marks = node.decorator_list
            case ast.ClassDef() if has_test(node):
                marks = [*node.decorator_list, *pytestmarks(node.body)]
            case ast.Module() if has_test(node):
                marks = pytestmarks(node.body)
            case _:
                continue
        for mark in marks:
            yield from cited_in(mark, where)


def pytestmarks(body: list[ast.stmt]) -> list[ast.expr]:
    found: list[ast.expr] = []
    for statement in body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="pytestmark")], value=value):
                found.append(value)
            case ast.AnnAssign(target=ast.Name(id="pytestmark"), value=ast.expr() as value):
                found.append(value)
    return found


@cache
def read_citations() -> list[Citation]:
    return [
        citation
        for path in sorted(TESTS.rglob("*.py"))
        for citation in citations(path.read_text(encoding="utf-8"), path.relative_to(TESTS.parent).as_posix())
    ]


def all_citations(mark: str) -> list[Citation]:
    return [citation for citation in read_citations() if citation.mark == mark]


def without_a_test(ledger: tuple[Requirement, ...], cited: list[Citation]) -> list[str]:
    known = {citation.id for citation in cited}
    return [f"{entry.id}: {entry.text}" for entry in ledger if entry.owed and entry.id not in known]


def wrongly_cited(ledger: tuple[Requirement, ...], cited: list[Citation]) -> list[str]:
    entries = {entry.id: entry for entry in ledger}
    wrong = []
    for citation in cited:
        place, entry = f"{citation.where}: {citation.id}", entries.get(citation.id)
        if entry is None:
            wrong.append(f"{place} is not in the ledger")
        elif entry.waits_for is not None:
            wrong.append(f"{place} is cited, but the ledger still says it waits for {entry.waits_for}")
        elif entry.superseded is not None:
            wrong.append(f"{place} is cited, but the ledger says it is superseded: {entry.superseded}")
    return wrong


def test_every_owed_requirement_is_cited_by_a_test() -> None:
    missing = without_a_test(LEDGER, all_citations("requirement"))
    assert not missing, f"{len(missing)} requirements without a test:\n" + "\n".join(missing)


def test_every_cited_id_is_an_owed_entry_of_the_ledger() -> None:
    wrong = wrongly_cited(LEDGER, all_citations("requirement"))
    assert not wrong, "\n".join(wrong)


def test_every_closed_finding_is_cited_by_a_test() -> None:
    closed = tuple(entry for entry in FINDINGS if entry.id not in OPEN_FINDINGS)
    missing = without_a_test(closed, all_citations("finding"))
    assert not missing, f"{len(missing)} findings neither open nor with a test:\n" + "\n".join(missing)


def test_every_cited_finding_is_in_the_ledger() -> None:
    wrong = wrongly_cited(FINDINGS, all_citations("finding"))
    assert not wrong, "\n".join(wrong)


def test_the_findings_are_complete() -> None:
    expected = {f"{group}{n}" for group, count in FINDING_COUNTS.items() for n in range(1, count + 1)}
    assert {entry.id for entry in FINDINGS} == expected
    assert expected >= OPEN_FINDINGS


def test_ids_are_unique() -> None:
    twice = [name for name, count in Counter(entry.id for entry in (*LEDGER, *FINDINGS)).items() if count > 1]
    assert not twice


def test_the_ledger_is_complete() -> None:
    expected = {f"{seed}-{n}" for seed, count in SEED_COUNTS.items() for n in range(1, count + 1)}
    assert {entry.id for entry in REQUIREMENTS} == expected
    assert {entry.id for entry in PITFALLS} == {f"P{n}" for n in range(1, PITFALL_COUNT + 1)}


def test_an_entry_says_what_and_whence() -> None:
    for entry in (*LEDGER, *FINDINGS):
        assert entry.text.endswith((".", "`")), entry.id
        assert entry.source, entry.id
        assert entry.waits_for != "", entry.id
        assert entry.superseded != "", entry.id
        assert not (entry.waits_for and entry.superseded), entry.id


SAMPLE = """
import pytest
pytestmark = [pytest.mark.requirement("A-1")]

@pytest.mark.requirement("A-2", "A-3")
async def test_one(): ...

class TestTwo:
    pytestmark = pytest.mark.requirement("A-4")

    @pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.requirement("A-5"))])
    def test_two(self, x): ...

@pytest.mark.requirement("A-6")
def helper(): ...

@pytest.mark.finding("B-1")
def test_three(): ...
"""


def test_citations_are_read_from_tests_classes_and_modules() -> None:
    found = list(citations(SAMPLE, "sample"))
    assert sorted(c.id for c in found if c.mark == "requirement") == ["A-1", "A-2", "A-3", "A-4", "A-5"]
    assert [c.id for c in found if c.mark == "finding"] == ["B-1"]
    assert not list(citations('import pytest\npytestmark = pytest.mark.requirement("A-1")\n', "no tests here"))


def test_a_citation_must_be_a_plain_string() -> None:
    with pytest.raises(ValueError, match="sample:2: cite requirement ids as plain strings"):
        list(citations("import pytest\n@pytest.mark.requirement(NAME)\ndef test_one(): ...\n", "sample"))


def test_the_pairing_reports_every_kind_of_mistake() -> None:
    ledger = (
        Requirement("A-1", "Owed.", "here"),
        Requirement("A-2", "Waiting.", "here", waits_for="sandboxes"),
        Requirement("A-3", "Gone.", "here", superseded="nobody wants it"),
    )
    cited = [Citation("A-2", "t.py:1"), Citation("A-3", "t.py:2"), Citation("A-4", "t.py:3")]
    assert without_a_test(ledger, cited) == ["A-1: Owed."]
    assert wrongly_cited(ledger, cited) == [
        "t.py:1: A-2 is cited, but the ledger still says it waits for sandboxes",
        "t.py:2: A-3 is cited, but the ledger says it is superseded: nobody wants it",
        "t.py:3: A-4 is not in the ledger",
    ]
