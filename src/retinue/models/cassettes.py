"""Model calls, recorded and played: a Model around a Model, for tests. Knows neither files nor pytest.

A call is found again by its run (whose place below its parent is the same each time, whatever ran beside it) and its
turn; runs that were made in another order are known by what they ask. A request that is not the recorded one is not
answered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec

from retinue.core.errors import ModelError
from retinue.core.messages import Reply, Request, RunRef, ToolSpec, Turn
from retinue.core.ports import Model
from retinue.core.records import difference_lines, request_lines, words_of
from retinue.core.secrets import HIDDEN

Record = Literal["none", "new", "all"]
Clean = Callable[[str], str]
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
_MOMENT = (
    (re.compile(r"(?<=<state>/runs/<tree>/)\d+"), "<run>"),
    (re.compile(r"(?<=[A-Za-z0-9]_)[0-9a-f]{16}\b"), "<id>"),
    (re.compile(r'(?<="execution_time_seconds":)[0-9.e-]+'), "0"),
    (re.compile(r"\bspawned \d+s ago"), "spawned <seconds> ago"),
)


@dataclass(frozen=True)
class Taped:
    """One call: who asked what, and the reply. `run` is the path of the run, each part numbered below its parent."""

    tree: int
    run: str
    turn: int
    agent: str
    model: str
    system: str
    thread: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...]
    reply: Reply

    @property
    def key(self) -> tuple[int, str, int]:
        return self.tree, self.run, self.turn

    def lines(self) -> list[str]:
        """What must be the same: who is asked, and all that it sees."""
        return [f"model: {self.model}", *request_lines(self.system, self.thread, self.tools)]


@dataclass(frozen=True)
class Where:
    """What a cassette has to know of the supervisor whose runs call: the lasting path of each, and its folders."""

    place: Callable[[RunRef], str]
    project: str
    state: str

    def clean(self, ref: RunRef, text: str) -> str:
        """The text without what is of this machine and this moment: folders, ids that were minted, durations."""
        for value, name in ((self.state, "<state>"), (self.project, "<project>"), (ref.tree, "<tree>")):
            if len(value) > 1:
                text = text.replace(value, name)
        for look, word in _MOMENT:
            text = look.sub(word, text)
        return text


@dataclass
class Problem:
    """A call that was not answered, or was recorded and not made."""

    run: str
    agent: str
    turn: int
    what: Literal["missing", "departs"]
    lines: tuple[str, ...] = ()


@dataclass
class Cassette:
    """The calls of one test. `taped` is what was recorded before; `calls` what was recorded or played now, `failed`
    what could not be recorded, and why."""

    taped: list[Taped]
    record: Record
    clean: Clean
    calls: dict[tuple[int, str, int], Taped] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    recorded: int = 0
    failed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._known = {} if self.record == "all" else {call.key: call for call in self.taped}
        self._trees: dict[str, int] = {}
        self._runs: dict[tuple[str, str], str] = {}

    def model(self, name: str, make: Callable[[], Model], where: Where) -> Model:
        """A model to stand before that one, which is made only when it is needed."""
        return CassetteModel(name, make, where, self)

    def unused(self) -> list[Taped]:
        return [call for key, call in self._known.items() if key not in self.calls]

    def searches(self, model: str, inner: Callable[[], Model], *, domains: bool) -> bool:
        """Whether the model's provider searches by itself: as it did when this model was recorded."""
        known = [call for call in self._known.values() if call.model == model]
        if known or self.record == "none":
            return any(
                tool.tier == "provider" and bool(tool.schema) == domains for call in known for tool in call.tools
            )
        searches = getattr(inner(), "searches", None)
        return searches is not None and bool(searches(domains=domains))

    async def answer(
        self, request: Request, on_delta: Callable[[str, str], None], where: Where, inner: Callable[[], Model]
    ) -> Reply:
        asked = self._asked(request, where)
        found = self._known.get(asked.key)
        if found is None and self.record == "none":
            self._fail(Problem(asked.run, asked.agent, asked.turn, "missing"))
        if found is None:
            return await self._tape(asked, request, on_delta, inner)
        lines = difference_lines(found.lines(), asked.lines(), now="now")
        if lines:
            self._fail(Problem(asked.run, asked.agent, asked.turn, "departs", lines))
        self.calls[found.key] = found
        for thought in found.reply.thoughts:
            on_delta("thinking", thought.text)
        if found.reply.text:
            on_delta("text", found.reply.text)
        return found.reply

    def _fail(self, problem: Problem) -> None:
        self.problems.append(problem)
        raise ModelError(f"retinue_cassette: the call of {problem.run} in turn {problem.turn} is not on the cassette")

    async def _tape(
        self, asked: Taped, request: Request, on_delta: Callable[[str, str], None], inner: Callable[[], Model]
    ) -> Reply:
        try:
            reply = await inner().complete(request, on_delta)
        except Exception as error:
            self.failed.append(f"{asked.run} ({asked.agent}), turn {asked.turn}: {error}")
            raise
        kept = msgspec.convert(cleaned(msgspec.to_builtins(reply), self.clean), Reply)
        self.calls[asked.key] = replace(asked, reply=kept)
        self.recorded += 1
        return reply

    def _asked(self, request: Request, where: Where) -> Taped:
        """The request as it stands on a cassette, under the name its run has there."""
        ref, place = request.ref, where.place(request.ref)

        def all_clean(text: str) -> str:
            return self.clean(where.clean(ref, text))

        system = all_clean(words_of(request.system))
        thread = tuple(msgspec.convert(cleaned(msgspec.to_builtins(request.thread), all_clean), list[Turn]))
        tools = msgspec.convert(cleaned(msgspec.to_builtins(request.tools), all_clean), tuple[ToolSpec, ...])
        model = all_clean(request.model)
        asked = Taped(0, place, request.turn, ref.agent, model, system, thread, tools, Reply())
        tree = self._tree(ref, asked)
        return replace(asked, tree=tree, run=self._run(ref, tree, asked))

    def _tree(self, ref: RunRef, asked: Taped) -> int:
        """Trees are numbered as they come; one that was recorded is known by what its first call asks."""
        if ref.tree not in self._trees:
            taken = set(self._trees.values())
            free = sorted({key[0] for key in self._known} - taken)
            same = [tree for tree in free if self._same((tree, asked.run, asked.turn), asked)]
            highest = max([0, *taken, *(key[0] for key in self._known)])
            self._trees[ref.tree] = (same or free or [highest + 1])[0]
        return self._trees[ref.tree]

    def _run(self, ref: RunRef, tree: int, asked: Taped) -> str:
        """The name on the cassette: that of the same place, if it asks the same; else of a sibling that does."""
        above, _, own = asked.run.rpartition("/")
        parent = self._runs.get((ref.tree, above), above)
        place = f"{parent}/{own}"
        if (ref.tree, asked.run) not in self._runs:
            taken = {run for (of, _), run in self._runs.items() if of == ref.tree}
            siblings = [
                run for of, run, turn in self._known
                if (of, turn) == (tree, asked.turn) and run.rpartition("/")[0] == parent and run not in taken
            ]  # fmt: skip
            same = [run for run in siblings if self._same((tree, run, asked.turn), asked)]
            self._runs[ref.tree, asked.run] = place if place in same or not same else same[0]
        return self._runs[ref.tree, asked.run]

    def _same(self, key: tuple[int, str, int], asked: Taped) -> bool:
        found = self._known.get(key)
        return found is not None and found.agent == asked.agent and found.lines() == asked.lines()


class CassetteModel:
    """What runs call while a cassette is in."""

    def __init__(self, name: str, make: Callable[[], Model], where: Where, cassette: Cassette) -> None:
        self.name = name
        self._make = make
        self._where = where
        self._cassette = cassette
        self._inner: Model | None = None

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        return await self._cassette.answer(request, on_delta, self._where, self._real)

    def searches(self, *, domains: bool) -> bool:
        return self._cassette.searches(self.name, self._real, domains=domains)

    async def aclose(self) -> None:
        close = getattr(self._inner, "aclose", None)
        if close is not None:
            await close()

    def _real(self) -> Model:
        if self._inner is None:
            self._inner = self._make()
        return self._inner


def without_keys(text: str) -> str:
    """The text without what follows the name of an authorization, and keys of kinds that everybody knows: a cassette
    stands in a repository, where a secret stays for good."""
    return _KEYS.sub(HIDDEN, _AUTHORIZATIONS.sub(rf"\1{HIDDEN}", text))


def cleaned(value: Any, clean: Clean) -> Any:
    """Plain values with every text in them cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {key: cleaned(inner, clean) for key, inner in value.items()}
    return [cleaned(inner, clean) for inner in value] if isinstance(value, list | tuple) else value


def in_order(calls: Iterable[Taped]) -> list[Taped]:
    """By tree, then by run as they were made (2 before 10), then by turn: the same whatever ran beside what."""

    def place(path: str) -> list[tuple[int, str]]:
        parts = (part.rpartition("-") for part in path.split("/"))
        return [(int(number) if number.isdigit() else 0, name) for name, _, number in parts]

    return sorted(calls, key=lambda call: (call.tree, place(call.run), call.turn))
