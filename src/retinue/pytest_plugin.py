"""The fixture `retinue_cassette`, which records the model calls of a test once and replays them from then on.

In a test with this fixture, every Retinue (`retinue.open`, `run_sync`, a `SubagentFactory`) gets its model replies from
a file next to the test, `cassettes/<module>/<test>.yaml`. pytest loads this module in every session, so it imports
Retinue only when a test uses the fixture.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from retinue.models.cassettes import Mismatch, RecordMode

SHOWN = 3
_HELP = (
    "none: play the recorded model calls, and fail on any other (the default); new: record those that are missing; "
    "all: record all again"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("retinue", "agents in tests")
    group.addoption("--retinue-record", choices=("none", "new", "all"), default="none", help=_HELP)


class RetinueCassette:
    """The value of the fixture. `path` is the cassette file of the test."""

    def __init__(self, nodeid: str, path: Path, mode: RecordMode) -> None:
        from retinue.config.cassettes import read_cassette
        from retinue.models.cassettes import Cassette

        self.path = path
        self._nodeid = nodeid
        self._ignored: list[tuple[re.Pattern[str], str]] = []
        self.cassette = Cassette(recorded=read_cassette(path), mode=mode, clean_text=self._clean_text)

    def ignore(self, pattern: str, put: str = "<ignored>") -> None:
        """Replace text that matches `pattern`, such as a date, by `put` before a request is compared or stored."""
        self._ignored.append((re.compile(pattern), put))

    def close(self, *, passed: bool) -> str:
        """Write the cassette file, and return a description of all problems, or an empty text."""
        cassette = self.cassette
        self._write_file()
        problems = [self._describe_mismatch(mismatch) for mismatch in cassette.mismatches[:SHOWN]]
        if len(cassette.mismatches) > SHOWN:
            problems.append(f"and {len(cassette.mismatches) - SHOWN} more calls that the cassette does not have")
        problems += [
            f"the model failed, so this call is not recorded: {self._clean_text(failure)}"
            for failure in cassette.failures[:SHOWN]
        ]
        unused = cassette.list_unused() if passed and not cassette.mismatches else []
        if unused:
            names = "\n".join(f"  {call.run} ({call.agent}), turn {call.turn}" for call in unused)
            problems.append(f"these recorded calls were not made:\n{names}\n{self._suggest('all', 'record again')}")
        return "\n\n".join(f"retinue_cassette: {problem}" for problem in problems)

    def _write_file(self) -> None:
        """Write new and earlier recordings to the file. Mode `all` writes nothing if a model call failed."""
        from retinue.config.cassettes import write_cassette

        cassette = self.cassette
        if cassette.new_count and not (cassette.mode == "all" and cassette.failures):
            write_cassette(self.path, cassette.list_kept())

    def _clean_text(self, text: str) -> str:
        from retinue.core import secrets
        from retinue.models.cassettes import redact_keys

        for pattern, put in self._ignored:
            text = pattern.sub(put, text)
        secrets.learn_secrets(os.environ)  # each time, because a test may set variables
        return redact_keys(secrets.scrub_text(text)).encode("utf-8", "replace").decode()

    def _describe_mismatch(self, mismatch: Mismatch) -> str:
        asked = mismatch.asked
        who = f"{asked.run} ({asked.agent}), turn {asked.turn}"
        if mismatch.kind == "differs":
            diff = "\n".join(mismatch.lines)
            return f"{who}: the request is not the recorded one\n{diff}\n{self._suggest('all', 'record again')}"
        where = "" if self.path.exists() else f"\nthere is no file {self.path}"
        return f"{who}: this call is not recorded{where}\n{self._suggest('new', 'record it')}"

    def _suggest(self, mode: RecordMode, what: str) -> str:
        return f"{what}: pytest {shlex.quote(self._nodeid)} --retinue-record={mode}"


_KEY = pytest.StashKey[RetinueCassette]()


@pytest.fixture
def retinue_cassette(request: pytest.FixtureRequest) -> Iterator[RetinueCassette]:
    """Record the model calls of this test to a file next to it, or replay them from there (see --retinue-record)."""
    from retinue.build.models import use_cassette

    node = request.node
    fixture = RetinueCassette(node.nodeid, _cassette_path(node), request.config.getoption("--retinue-record"))
    node.stash[_KEY] = fixture
    with use_cassette(fixture.cassette):
        yield fixture


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    passed = False
    try:
        yield
        passed = True
    finally:
        fixture = item.stash.get(_KEY, None)
        problems = "" if fixture is None else fixture.close(passed=passed)
        if problems:
            pytest.fail(problems, pytrace=False)


def _cassette_path(node: Any) -> Path:
    """Return `cassettes/<module>/<test>.yaml` next to the module. The test name includes its class and parameters."""
    name = ".".join(node.nodeid.split("::")[1:])
    plain = re.sub(r"[^A-Za-z0-9_.=,-]+", "-", name).strip("-")[:100]
    if plain != name:  # so that two names never share a file
        plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    module: Path = node.path
    return module.parent / "cassettes" / module.stem / f"{plain}.yaml"
