"""Cassettes: the model calls of one test, recorded once and replayed from then on. Knows neither files nor pytest.

A call is identified by its run and its turn. The path of a run is numbered below its parent, so it does not depend on
other runs at the same time. Siblings that were spawned in another order are recognized by their requests. A request
that differs from the recorded one gets no reply.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from retinue.core.errors import ModelError
from retinue.core.events import map_texts
from retinue.core.messages import (
    Model,
    OnDelta,
    Reply,
    Request,
    RunRef,
    ToolSpec,
    Turn,
    can_search_web,
    close_model,
)
from retinue.core.records import RecordedExchange, RecordedRequest
from retinue.core.secrets import HIDDEN
from retinue.core.sendable import repair_reply
from retinue.models.recorded import diff_requests, play_reply

RecordMode = Literal["none", "new", "all"]
CleanText = Callable[[str], str]
_AUTHORIZATIONS = re.compile(
    r"((?:\bauthorization|\bx-api-key)[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?)[A-Za-z0-9+/._~=-]{8,}",
    re.IGNORECASE,
)
_KEYS = re.compile(
    r"\b(?:gh[pousr]_|github_pat_)[A-Za-z0-9_]{20,}|\bxox[abeoprs]-[A-Za-z0-9-]{10,}|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b"
    r"|\bAIza[A-Za-z0-9_-]{30,}|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_VOLATILE = (
    (re.compile(r"(?<=<state>/runs/<tree>/)\d+"), "<run>"),
    (re.compile(r"(?<=[A-Za-z0-9]_)[0-9a-f]{16}\b"), "<id>"),
    (re.compile(r'(?<="execution_time_seconds":)[0-9.e-]+'), "0"),
    (re.compile(r"\bspawned \d+s ago"), "spawned <seconds> ago"),
)


@dataclass(frozen=True)
class RunNames:
    """Names that make the requests of a supervisor's runs the same on every machine. `name_run` returns the path of a
    run with each part numbered below its parent. `project` and `state` are the supervisor's folders."""

    name_run: Callable[[RunRef], str]
    project: str
    state: str

    def replace_volatile(self, ref: RunRef, text: str) -> str:
        """Replace the parts of `text` that change between machines and runs: folders, generated ids, durations."""
        for value, name in ((self.state, "<state>"), (self.project, "<project>"), (ref.tree, "<tree>")):
            if len(value) > 1:
                text = text.replace(value, name)
        for pattern, name in _VOLATILE:
            text = pattern.sub(name, text)
        return text


@dataclass(frozen=True)
class Mismatch:
    """A call without a reply from the cassette: nothing is recorded for it (`missing`), or the recorded request
    `differs`."""

    asked: RecordedExchange
    kind: Literal["missing", "differs"]
    lines: tuple[str, ...] = ()


@dataclass
class Cassette:
    """The model calls of one test. `recorded` are the exchanges of the file, `played` those recorded or replayed in
    this session. `failures` describe calls that could not be recorded because the model failed."""

    recorded: list[RecordedExchange]
    mode: RecordMode
    clean_text: CleanText
    played: dict[tuple[int, str, int], RecordedExchange] = field(default_factory=dict)
    mismatches: list[Mismatch] = field(default_factory=list)
    new_count: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {} if self.mode == "all" else {exchange.key: exchange for exchange in self.recorded}
        self._trees: dict[str, int] = {}
        self._runs: dict[tuple[str, str], str] = {}

    def list_unused(self) -> list[RecordedExchange]:
        return [exchange for key, exchange in self._known.items() if key not in self.played]

    def list_kept(self) -> list[RecordedExchange]:
        """Return the exchanges that the file should contain now, in a fixed order."""
        return sort_exchanges([*self.played.values(), *([] if self.mode == "all" else self.list_unused())])

    def look_up(self, request: Request, names: RunNames) -> tuple[RecordedExchange, RecordedExchange | None]:
        """Return the cleaned request under its run's name on the cassette, and the exchange recorded for it, if
        any."""
        asked = self._clean_request(request, names)
        tree = self._find_tree(request.ref, asked)
        asked = replace(asked, tree=tree, run=self._find_run(request.ref, tree, asked))
        recorded = self._known.get(asked.key)
        if recorded is not None:
            self.played[recorded.key] = recorded
        return asked, recorded

    def add_reply(self, asked: RecordedExchange, reply: Reply) -> None:
        clean = msgspec.convert(map_texts(msgspec.to_builtins(reply), self.clean_text), Reply)
        self.played[asked.key] = replace(asked, reply=clean)
        self.new_count += 1

    def refuse(self, mismatch: Mismatch) -> ModelError:
        """Record a mismatch and return the error for its run."""
        self.mismatches.append(mismatch)
        asked = mismatch.asked
        return ModelError(f"retinue_cassette: the call of {asked.run} in turn {asked.turn} is not on the cassette")

    def find_web_search(self, model: str, *, domains: bool) -> bool | None:
        """Return True if the provider of a recorded model searched the web by itself, or None if the real model must
        be asked."""
        known = [exchange.request for exchange in self._known.values() if exchange.request.model == model]
        if not known and self.mode != "none":
            return None
        return any(tool.tier == "provider" and bool(tool.schema) == domains for each in known for tool in each.tools)

    def _clean_request(self, request: Request, names: RunNames) -> RecordedExchange:
        ref, plain = request.ref, RecordedRequest.from_request(request)

        def clean(text: str) -> str:
            return self.clean_text(names.replace_volatile(ref, text))

        cleaned = RecordedRequest(
            model=clean(plain.model),
            system=clean(plain.system),
            thread=msgspec.convert(map_texts(msgspec.to_builtins(plain.thread), clean), tuple[Turn, ...]),
            tools=msgspec.convert(map_texts(msgspec.to_builtins(plain.tools), clean), tuple[ToolSpec, ...]),
        )
        return RecordedExchange(run=names.name_run(ref), turn=request.turn, agent=ref.agent, request=cleaned)

    def _find_tree(self, ref: RunRef, asked: RecordedExchange) -> int:
        """Return the number of a tree on the cassette. A recorded tree is recognized by its first request; other trees
        are numbered in the order they come."""
        if ref.tree not in self._trees:
            taken = set(self._trees.values())
            free = sorted({key[0] for key in self._known} - taken)
            same = [tree for tree in free if self._is_same((tree, asked.run, asked.turn), asked)]
            highest = max([0, *taken, *(key[0] for key in self._known)])
            self._trees[ref.tree] = (same or free or [highest + 1])[0]
        return self._trees[ref.tree]

    def _find_run(self, ref: RunRef, tree: int, asked: RecordedExchange) -> str:
        """Return the name of a run on the cassette: its own path if the request there is the same, else that of a
        sibling with the same request."""
        above, _, own = asked.run.rpartition("/")
        parent = self._runs.get((ref.tree, above), above)
        place = f"{parent}/{own}"
        if (ref.tree, asked.run) not in self._runs:
            taken = {run for (of, _), run in self._runs.items() if of == ref.tree}
            siblings = [
                run for of, run, turn in self._known
                if (of, turn) == (tree, asked.turn) and run.rpartition("/")[0] == parent and run not in taken
            ]  # fmt: skip
            same = [run for run in siblings if self._is_same((tree, run, asked.turn), asked)]
            self._runs[ref.tree, asked.run] = place if place in same or not same else same[0]
        return self._runs[ref.tree, asked.run]

    def _is_same(self, key: tuple[int, str, int], asked: RecordedExchange) -> bool:
        found = self._known.get(key)
        if found is None or found.agent != asked.agent:
            return False
        return found.request.format_lines() == asked.request.format_lines()


class CassetteModel:
    """A model in front of a real one, which `make` creates when first needed. It replays calls from the cassette and
    records the others."""

    def __init__(self, name: str, make: Callable[[], Model], names: RunNames, cassette: Cassette) -> None:
        self.name = name
        self._make = make
        self._names = names
        self._cassette = cassette
        self._inner: Model | None = None

    async def complete(self, request: Request, on_delta: OnDelta) -> Reply:
        cassette = self._cassette
        asked, recorded = cassette.look_up(request, self._names)
        if recorded is not None:
            lines = diff_requests(recorded.request, asked.request)
            if lines:
                raise cassette.refuse(Mismatch(asked, "differs", lines))
            return play_reply(recorded, on_delta)
        if cassette.mode == "none":
            raise cassette.refuse(Mismatch(asked, "missing"))
        try:
            reply = repair_reply(await self._open().complete(request, on_delta))
        except Exception as error:
            cassette.failures.append(f"{asked.run} ({asked.agent}), turn {asked.turn}: {error}")
            raise
        cassette.add_reply(asked, reply)
        return reply

    def can_search_web(self, *, domains: bool) -> bool:
        recorded = self._cassette.find_web_search(self.name, domains=domains)
        return can_search_web(self._open(), domains=domains) if recorded is None else recorded

    async def aclose(self) -> None:
        if self._inner is not None:
            await close_model(self._inner)

    def _open(self) -> Model:
        if self._inner is None:
            self._inner = self._make()
        return self._inner


def redact_keys(text: str) -> str:
    """Hide the values of authorization headers and well-known kinds of keys. A cassette is committed to a repository,
    where a secret would stay forever."""
    return _KEYS.sub(HIDDEN, _AUTHORIZATIONS.sub(rf"\1{HIDDEN}", text))


def sort_exchanges(exchanges: Iterable[RecordedExchange]) -> list[RecordedExchange]:
    """Sort by tree, then by run in the order the runs were spawned (2 before 10), then by turn."""

    def rank_path(path: str) -> list[tuple[int, str]]:
        parts = (part.rpartition("-") for part in path.split("/"))
        return [(int(number) if number.isdigit() else 0, name) for name, _, number in parts]

    return sorted(exchanges, key=lambda each: (each.tree, rank_path(each.run), each.turn))
