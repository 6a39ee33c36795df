"""Rounds of a primary: an evaluator criticises each answer, and the next round improves it.

Values, and the rules for reading a packet, a plan, a checklist and improvements. The text of an evaluator or a model
is data: it is checked here and grants nothing. No I/O.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from retinue.core.errors import ConfigError

Category = Literal["must", "should", "could"]
Pressure = Literal["gentle", "balanced", "aggressive"]
Basis = Literal["tasks", "packet", "checklist"]
NextStep = Literal["iterate", "vote"]
Impact = Literal["incremental", "structural", "transformative"]
CATEGORIES: tuple[Category, ...] = get_args(Category)
PRESSURES: tuple[Pressure, ...] = get_args(Pressure)
IMPACTS: tuple[Impact, ...] = get_args(Impact)

ANSWERS = 3
ANSWERS_MAX = 20
GET_TASK_PLAN, SUBMIT_CHECKLIST, PROPOSE_IMPROVEMENTS = "get_task_plan", "submit_checklist", "propose_improvements"
PACKET_FILE, TASKS_FILE = "critique_packet.md", "next_tasks.json"
FILE_BYTES = 256 * 1024
TASKS_MAX = 100
NESTING_MAX = 20
SHOWN_CHARACTERS, SHOWN_NAMES = 40, 10
SCORE_MAX = 10
PASSING_SCORES: Mapping[Category, int] = {"must": 8, "should": 6, "could": 0}
SECTIONS = (
    "criteria_interpretation",
    "criterion_findings",
    "cross_answer_synthesis",
    "preserve",
    "improvement_spec",
    "verification_plan",
    "evidence_gaps",
)
_FENCE = re.compile(r" {0,3}(```+|~~~+)")


@dataclass(frozen=True, kw_only=True)
class Criterion:
    """One criterion for judging answers."""

    text: str
    category: Category = "must"


DEFAULT_CRITERIA = (
    Criterion(text="It does everything that the task asks for, and nothing that the task rules out."),
    Criterion(text="It is right: every claim holds, and whatever can be run or looked up was run or looked up."),
    Criterion(
        text="It covers the cases that its users will meet: edges, errors and limits, not only the usual one.",
        category="should",
    ),
    Criterion(text="Whoever reads or uses it first understands it: structure, words, no filler.", category="should"),
    Criterion(text="It goes beyond the obvious: an expert finds something in it to keep.", category="could"),
)


class Rounds(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """The rounds of a primary. It gives up to `answers` answers; before each but the first, a `round_evaluator` judges
    the answers so far. `criteria` are the criteria for judging, by default the built-in ones; a plain text is a
    criterion of category `must`. `pressure` is how large a change the evaluator looks for. With `refine` an evaluator
    that is a team refines its packet."""

    answers: int = ANSWERS
    criteria: Sequence[Criterion | str] = ()
    pressure: Pressure = "balanced"
    refine: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.answers, bool) or not isinstance(self.answers, int) or not 1 <= self.answers <= ANSWERS_MAX:
            raise ConfigError(f"rounds must be a whole number from 1 to {ANSWERS_MAX}, got {self.answers!r}")
        if self.pressure not in PRESSURES:
            raise ConfigError(f"rounds: unknown pressure {self.pressure!r}; available: {', '.join(PRESSURES)}")
        if isinstance(self.criteria, str):
            raise ConfigError("rounds: criteria must be a list")
        criteria = [Criterion(text=each) if isinstance(each, str) else each for each in self.criteria]
        for each in criteria:
            if not isinstance(each, Criterion) or each.category not in CATEGORIES or not each.text.strip():
                raise ConfigError(f"rounds: {each!r} is not a criterion: give a text, or a Criterion")
        msgspec.structs.force_setattr(self, "criteria", tuple(criteria))

    def list_criteria(self) -> dict[str, Criterion]:
        """Return the criteria by the names that the evaluator and its parent use: E1, E2 and so on."""
        found = [each for each in self.criteria if isinstance(each, Criterion)] or DEFAULT_CRITERIA
        return {f"E{number}": each for number, each in enumerate(found, 1)}

    def format_criteria(self) -> str:
        """Return the criteria verbatim, one per line."""
        return "\n".join(f"{name} ({each.category}): {each.text}" for name, each in self.list_criteria().items())


def check_rounds(name: str, *, is_primary: bool, speaks: bool) -> None:
    """Raise ConfigError for a run that cannot work in rounds. Only a primary can, and only a single agent with answers
    in text (`speaks`)."""
    if not is_primary:
        raise ConfigError(f"subagent '{name}' cannot work in rounds: only a primary can")
    if not speaks:
        raise ConfigError(
            f"'{name}' cannot work in rounds: they need exactly one parent agent, with a model and no output type"
        )


# The packet


class Packet(msgspec.Struct, frozen=True):
    """The packet of an evaluator. `missing` are the sections it lacks."""

    text: str
    missing: tuple[str, ...] = ()


def parse_packet(data: bytes) -> Packet | None:
    """Return the packet in a file, or None for an empty file. Its sections are its `##` headings."""
    text = data.decode("utf-8", "replace").strip()
    if not text:
        return None
    found = set(_list_headings(text))
    return Packet(text, tuple(name for name in SECTIONS if name not in found))


def _list_headings(text: str) -> Iterator[str]:
    """Yield the names of the `##` headings outside code blocks."""
    fence = ""
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if mark is not None and (not fence or mark[1].startswith(fence)):
            fence = "" if fence else mark[1]
        if not fence and line.startswith(("## ", "##\t")):  # a regex with two open repeats is too slow
            yield re.sub(r"[\s-]+", "_", line[2:].rstrip(" \t#").strip("`*_: \t").casefold())


# The plan


class NextTasks(msgspec.Struct, frozen=True):
    """The plan in `next_tasks.json`, including unknown keys. For an invalid file, `plan` is None and `problems` says
    why."""

    plan: dict[str, Any] | None
    problems: tuple[str, ...] = ()


def parse_next_tasks(data: bytes) -> NextTasks:
    """Parse and check the plan for the next round."""
    try:
        plan = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        return NextTasks(None, (f"it is not JSON: {error}",))
    if _measure_nesting(plan) > NESTING_MAX:
        return NextTasks(None, (f"it is nested deeper than {NESTING_MAX} levels",))
    problems = _check_plan(plan)
    return NextTasks(None if problems else plan, tuple(problems))


def _measure_nesting(value: object) -> int:
    deepest, level = 0, [value]
    while level:
        deepest += 1
        inner = [list(each.values()) if isinstance(each, dict) else each for each in level]
        level = [entry for each in inner if isinstance(each, list) for entry in each]
    return deepest


def _check_plan(plan: object) -> list[str]:
    if not isinstance(plan, dict):
        return ["it must be an object"]
    problems = [f"'{key}' is missing" for key in ("objective", "primary_strategy") if not _is_text(plan.get(key))]
    version = plan.get("schema_version")
    if not _is_text(version) and (isinstance(version, bool) or not isinstance(version, int)):
        problems.insert(0, "'schema_version' is missing")
    tasks = plan.get("tasks")
    if not isinstance(tasks, list) or not tasks:
        return [*problems, "'tasks' must be a list with at least one task"]
    if len(tasks) > TASKS_MAX:
        return [*problems, f"it has {len(tasks)} tasks; the maximum is {TASKS_MAX}"]
    for place, task in enumerate(tasks):
        problems += [f"tasks[{place}]: {problem}" for problem in _check_task(task)]
    return problems or _check_order(tasks)


def _check_task(task: object) -> list[str]:
    if not isinstance(task, dict):
        return ["it must be an object"]
    problems = [f"'{key}' is missing" for key in ("id", "description", "verification") if not _is_text(task.get(key))]
    needed = task.get("depends_on", [])
    if not isinstance(needed, list) or not all(isinstance(each, str) for each in needed):
        problems.append("'depends_on' must be a list of ids")
    return problems


def _check_order(tasks: Sequence[dict[str, Any]]) -> list[str]:
    """Return the problems of a plan's ids and dependencies: ids must be unique, and some order of the tasks must
    exist."""
    ids = [task["id"] for task in tasks]
    problems = [f"the id {_quote(name)} is not unique" for name in dict.fromkeys(ids) if ids.count(name) > 1]
    needs = {task["id"]: set(task.get("depends_on", [])) for task in tasks}
    for name, needed in needs.items():
        unknown = sorted(needed - needs.keys())
        problems += [f"{_quote(name)} depends on the unknown task {_quote(each)}" for each in unknown]
    if problems:
        return problems
    done: set[str] = set()
    while ready := [name for name, needed in needs.items() if name not in done and needed <= done]:
        done.update(ready)
    left = [name for name in needs if name not in done]
    return [f"these tasks wait for each other: {', '.join(map(_quote, left[:SHOWN_NAMES]))}"] if left else []


def _quote(name: str) -> str:
    """Return a name given by a model as it can appear in a message: on one line, quoted and short."""
    return repr(name if len(name) <= SHOWN_CHARACTERS else f"{name[:SHOWN_CHARACTERS]}...")


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


# The checklist and the improvements


def check_scores(scores: object, criteria: Collection[str]) -> list[str]:
    """Return the problems of a checklist's scores. Each criterion needs a score and the reasoning for it."""
    if not isinstance(scores, dict):
        return ["'scores' must be an object with an entry for each criterion"]
    problems = [f"{_quote(name)} is not a criterion" for name in scores if name not in criteria]
    for name in criteria:
        entry = scores.get(name)
        if not isinstance(entry, dict):
            problems.append(f"{name} is missing")
            continue
        score = entry.get("score")
        if isinstance(score, bool) or not isinstance(score, int | float) or not 0 <= score <= SCORE_MAX:
            problems.append(f"{name}: 'score' must be a number from 0 to {SCORE_MAX}")
        if not _is_text(entry.get("reasoning")):
            problems.append(f"{name}: 'reasoning' is missing")
    return problems


def decide_verdict(
    scores: Mapping[str, Mapping[str, Any]], criteria: Mapping[str, Criterion]
) -> tuple[NextStep, list[str]]:
    """Return the verdict on valid scores, and the criteria that score below the minimum of their category."""
    below = [name for name, each in criteria.items() if scores[name]["score"] < PASSING_SCORES[each.category]]
    return "iterate" if below else "vote", below


def check_improvements(improvements: object, criteria: Collection[str]) -> list[str]:
    """Return the problems of proposed improvements."""
    if not isinstance(improvements, list) or not improvements:
        return ["'improvements' must be a list with at least one improvement"]
    if len(improvements) > TASKS_MAX:
        return [f"there are {len(improvements)} improvements; the maximum is {TASKS_MAX}"]
    problems = []
    for place, entry in enumerate(improvements):
        if not isinstance(entry, dict):
            problems.append(f"improvements[{place}]: it must be an object")
            continue
        if not _is_text(entry.get("description")):
            problems.append(f"improvements[{place}]: 'description' is missing")
        if entry.get("impact") not in IMPACTS:
            problems.append(f"improvements[{place}]: 'impact' must be one of {', '.join(IMPACTS)}")
        if entry.get("criterion") is not None and entry["criterion"] not in criteria:
            problems.append(f"improvements[{place}]: 'criterion' must be one of {', '.join(criteria)}")
    return problems


def make_own_plan(improvements: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plan made of accepted improvements, in the format of `next_tasks.json`."""
    tasks = [{"id": f"improvement_{number}", **each, "depends_on": []} for number, each in enumerate(improvements, 1)]
    return {"objective": "the improvements you proposed", "tasks": tasks}
