"""Rules for source files that lint alone cannot check.

Exceptions are counted in allowed_places.json, which may only get shorter: `python -m tests.test_repo` drops from the
list what is no longer an exception.
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
ALLOWED = Path(__file__).with_name("allowed_places.json")
BANNED = {
    "unittest" + ".mock": "write a real in-memory implementation instead",
    "time" + ".sleep(": "the test owns time; in async code it blocks the loop",
}


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((REPO / folder).rglob("*.py"))


@pytest.mark.parametrize("banned", BANNED)
def test_no_source_file_uses_what_is_banned(banned: str) -> None:
    users = [
        path.relative_to(REPO).as_posix()
        for path in python_files("src", "tests", "bench")
        if banned in path.read_text(encoding="utf-8")
    ]
    assert not users, f"{banned} in {users}: {BANNED[banned]}"


@pytest.mark.finding("R11")
def test_a_shared_temporary_folder_gets_only_names_of_this_user() -> None:
    """A fixed name belongs to whoever ran the suite first, and every later user fails. The whole suite as an ordinary
    user is run by hand (CONTRIBUTING.md)."""
    named = "|".join(
        ("gettemp" + r"dir\(\)", r"""["']/(?:tmp|var/tmp|dev/shm)/[^"']*["'][^\n]*(?:open|write|mkdir|touch)""")
    )
    shared = {
        f"{path.relative_to(REPO)}:{number}": line
        for path in python_files("tests", "bench")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(named, line) and " != " not in line
    }
    assert shared and all("geteuid()" in line for line in shared.values()), shared


# Mechanisms that are written once: the package or module that holds each of them, and what shows a second one. Some
# uses elsewhere are right: the task of a run belongs to its driver, a live view stops its own process on Ctrl-Z, and
# `retinue run --detach` leaves its terminal. The list of places says how many, and a new one goes through the home.
MECHANISMS = {
    "files/": r"O_NOFOLLOW|O_EXCL|os\.replace\(|os\.link\(|\.rename\(|mkstemp|fsync\(|rmtree\(|0o700",
    "processes/": r"os\.kill\(|killpg|\.terminate\(|start_new_session|setsid\(",
    "concurrency.py": r"\bcreate_task\(|ensure_future\(",
}
ADVICE = {home: f"use retinue/{home} instead" for home in MECHANISMS}


@cache
def load_source() -> dict[str, str]:
    """Read the source files of the package, by their path below it."""
    package = REPO / "src" / "retinue"
    return {path.relative_to(package).as_posix(): path.read_text(encoding="utf-8") for path in python_files("src")}


def find_second_mechanisms(home: str) -> Iterator[str]:
    """Yield the file of each use of the mechanism outside its home."""
    for name, text in load_source().items():
        if not name.startswith(home):
            yield from [name] * len(re.findall(MECHANISMS[home], text))


@cache
def count_exceptions() -> dict[str, Counter[str]]:
    """Count the places that break each rule now."""
    return {home: Counter(find_second_mechanisms(home)) for home in MECHANISMS}


@pytest.mark.parametrize("rule", ADVICE)
def test_no_place_breaks_a_rule_but_the_listed_ones(rule: str) -> None:
    """The counts must be equal, so that the list gets shorter with each place that is mended."""
    allowed, found = Counter(json.loads(ALLOWED.read_text())[rule]), count_exceptions()[rule]
    assert not found - allowed, f"{rule}: {ADVICE[rule]}: {dict(found - allowed)}"
    assert not allowed - found, f"no exception any more, run `python -m tests.test_repo`: {dict(allowed - found)}"


def test_constraints_are_pins_without_addresses() -> None:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert not [line for line in pins if "://" in line or "@ " in line or "==" not in line]


if __name__ == "__main__":
    before = json.loads(ALLOWED.read_text())
    kept = {rule: dict(sorted((Counter(before[rule]) & count_exceptions()[rule]).items())) for rule in ADVICE}
    ALLOWED.write_text(json.dumps(kept, indent=1) + "\n")
