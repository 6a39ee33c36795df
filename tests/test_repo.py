"""Rules for source files that lint alone cannot check."""

import re
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


# Mechanisms that are written once: what shows a second one, and where else it may stand, how often. These lists only
# get shorter: a new use goes through the module named first.
MECHANISMS = {
    "files/": (
        r"O_NOFOLLOW|O_EXCL|os\.replace\(|mkstemp|fsync\(|rmtree\(",
        {
            "log/retention.py": 1,
            "sandbox/escapes.py": 1,
            "processes/ordinary_user.py": 1,
            "surfaces/mcp/install.py": 1,
            "surfaces/printer/edit_call.py": 1,
            "workspaces/atomic_apply.py": 1,
            "workspaces/copy_tree.py": 1,
        },
    ),
    "processes/": (
        r"killpg|start_new_session|setsid\(",
        {"surfaces/cli/foreground.py": 1},  # leaves the terminal and ends nothing
    ),
    "concurrency.py": (
        r"\bcreate_task\(|ensure_future\(",
        {
            "supervisor/driver.py": 2,  # the task of a run
            "supervisor/run.py": 1,  # an awaitable of the log that is awaited twice
        },
    ),
}


@pytest.mark.parametrize("home", MECHANISMS)
def test_each_mechanism_is_written_once(home: str) -> None:
    pattern, allowed = MECHANISMS[home]
    source = REPO / "src" / "retinue"
    found = {
        path.relative_to(source).as_posix(): len(re.findall(pattern, path.read_text(encoding="utf-8")))
        for path in python_files("src")
    }
    more = {name: count for name, count in found.items() if not name.startswith(home) and count > allowed.get(name, 0)}
    assert not more, f"use retinue/{home} instead: {more}"


def test_constraints_are_pins_without_addresses() -> None:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert not [line for line in pins if "://" in line or "@ " in line or "==" not in line]
