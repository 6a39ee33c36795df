"""Rules for source files that lint alone cannot check."""

from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
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


def test_constraints_are_pins_without_addresses() -> None:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert not [line for line in pins if "://" in line or "@ " in line or "==" not in line]
