"""The fixture `retinue_cassette`: a test's model calls, recorded once and played ever after. Loaded by pytest itself.

While a test has the fixture, whatever opens a Retinue in it (`retinue.open`, `run_sync`, a `SubagentFactory`) gets its
models' replies from a file beside the test, `cassettes/<module>/<test>.yaml`. Nothing of retinue is imported before.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SHOWN = 3
_HELP = (
    "none: play the recorded model calls, and fail on any other (the default); new: record those that are missing; "
    "all: record all anew"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("retinue", "agents in tests")
    group.addoption("--retinue-record", choices=("none", "new", "all"), default="none", help=_HELP)


class RetinueCassette:
    """What a test gets. `path` is its file."""

    def __init__(self, nodeid: str, path: Path, record: str) -> None:
        self.path = path
        self._nodeid = nodeid
        self._record: Any = record
        self._ignored: list[tuple[re.Pattern[str], str]] = []
        self._files = importlib.import_module("retinue.config.cassettes")
        self._models = importlib.import_module("retinue.models.cassettes")
        self._secrets = importlib.import_module("retinue.core.secrets")
        self.tape = self._models.Cassette(self._read(), record, self._clean)

    def ignore(self, pattern: str, put: str = "<ignored>") -> None:
        """Text that matches is of the moment, a date or an id: it is not compared and not kept."""
        self._ignored.append((re.compile(pattern), put))

    def _clean(self, text: str) -> str:
        for pattern, put in self._ignored:
            text = pattern.sub(put, text)
        self._secrets.learn(os.environ)  # again each time: a test sets variables of its own
        clean: str = self._models.without_keys(self._secrets.scrub(text))
        return clean.encode("utf-8", "replace").decode()

    def _read(self) -> list[Any]:
        return [
            self._models.Taped(e.tree, e.run, e.turn, e.agent, e.model, r.system, r.thread, r.tools, e.reply)
            for e, r in self._files.read_cassette(self.path)
        ]

    def _write(self) -> None:
        """What was recorded, and what was there and is still wanted. A recording that broke off replaces nothing."""
        tape = self.tape
        if not tape.recorded or (tape.record == "all" and tape.failed):
            return
        kept = list(tape.calls.values()) + ([] if tape.record == "all" else tape.unused())
        entry, request = self._files.Entry, self._files.Request
        calls = [
            (entry(c.run, c.turn, c.agent, c.model, c.reply, c.tree), request(c.system, c.thread, c.tools))
            for c in self._models.in_order(kept)
        ]
        self._files.write_cassette(self.path, calls)

    def close(self, *, passed: bool) -> str:
        """Writes the file; gives what is wrong, in words."""
        self._write()
        tape = self.tape
        said = [self._problem(problem) for problem in tape.problems[:SHOWN]]
        if len(tape.problems) > SHOWN:
            said.append(f"and {len(tape.problems) - SHOWN} more calls that the cassette does not have")
        said += [
            f"the model failed, so this call is not recorded: {self._clean(words)}" for words in tape.failed[:SHOWN]
        ]
        unused = tape.unused() if passed and not tape.problems else []
        if unused:
            names = "\n".join(f"  {call.run} ({call.agent}), turn {call.turn}" for call in unused)
            said.append(f"these recorded calls were not made:\n{names}\n{self._command('all', 'record anew')}")
        return "\n\n".join(f"retinue_cassette: {words}" for words in said)

    def _problem(self, problem: Any) -> str:
        who = f"{problem.run} ({problem.agent}), turn {problem.turn}"
        if problem.what == "departs":
            diff = "\n".join(problem.lines)
            return f"{who}: the request is not the recorded one\n{diff}\n{self._command('all', 'record anew')}"
        where = "" if self.path.exists() else f"\nthere is no file {self.path}"
        return f"{who}: this call is not recorded{where}\n{self._command('new', 'record it')}"

    def _command(self, record: str, what: str) -> str:
        return f"{what}: pytest {shlex.quote(self._nodeid)} --retinue-record={record}"


_KEY = pytest.StashKey[RetinueCassette]()


@pytest.fixture
def retinue_cassette(request: pytest.FixtureRequest) -> Iterator[RetinueCassette]:
    """Records this test's model calls to a file beside it, or plays them from there (see --retinue-record)."""
    use_cassette = importlib.import_module("retinue.build.models").use_cassette
    node = request.node
    made = RetinueCassette(node.nodeid, _path(node), request.config.getoption("--retinue-record"))
    node.stash[_KEY] = made
    with use_cassette(made.tape):
        yield made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    passed = False
    try:
        yield
        passed = True
    finally:
        cassette = item.stash.get(_KEY, None)
        words = "" if cassette is None else cassette.close(passed=passed)
        if words:
            pytest.fail(words, pytrace=False)


def _path(node: Any) -> Path:
    """`cassettes/<module>/<test>.yaml` beside the module; a class and parameters are part of the test's name."""
    name = ".".join(node.nodeid.split("::")[1:])
    plain = re.sub(r"[^A-Za-z0-9_.=,-]+", "-", name).strip("-")[:100]
    if plain != name:  # two names must not share a file
        plain += f"-{hashlib.sha256(name.encode()).hexdigest()[:6]}"
    module: Path = node.path
    return module.parent / "cassettes" / module.stem / f"{plain}.yaml"
