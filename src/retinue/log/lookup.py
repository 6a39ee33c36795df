"""Lookup of a run by a name that a person typed: TREE/N, a tree, a path, a label, a subagent_id, or a prefix of one.

Exact names win over prefixes. A name that matches several runs is an error that lists them; the lookup never guesses.
"""

from __future__ import annotations

import difflib
import time
from collections.abc import Sequence

from retinue.core.errors import Ambiguous, LogError, NotFound
from retinue.core.events import RunSpawned
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader, OnProblem, StoredRun, ignore_problem

LAST = "last"
MOST_CANDIDATES = 10
MOST_NAMES = 1000
TASK_CHARACTERS = 60
_MOST_DIGITS = 9  # int() refuses texts of thousands of digits


def read_run_number(text: str) -> int | None:
    """Return the N of TREE/N, or None if `text` is not a run number."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


async def find_run(
    log: LogReader,
    name: str | None,
    on_problem: OnProblem = ignore_problem,
    *,
    everything: bool = False,
    live: bool = False,
) -> RunRef:
    """Find the run called `name`; without a name, the primary of the newest tree.

    Trees reported to another process count only if no other tree matches, or with `everything`. With `live`, runs of
    trees at work win over the others. Raises NotFound or Ambiguous.
    """
    if not name:
        return await _find_newest(log, on_problem, everything=everything)
    runs = await _find_by_number(log, name) or await log.find_runs(name, on_problem)
    own = runs if everything else [run for run in runs if not run.is_reported]
    found = _choose_runs(own, name) or _choose_runs(runs, name)
    if not found:
        if not await log.count_trees():
            raise NotFound(f"no run is called '{name}': {await _explain_nothing(log)}")
        hint = await _find_similar(log, name)
        raise NotFound(f"no run is called '{name}'{hint}; `retinue ps --all` lists them")
    if live and len(found) > 1:
        found = [run for run in found if (await log.read_status(run.first.tree)).is_at_work] or found
    if len(found) > 1:
        raise Ambiguous(name, _list_candidates(found))
    return found[0].ref


async def resolve_recent(
    log: LogReader, name: str, on_problem: OnProblem = ignore_problem, *, everything: bool = False
) -> str:
    """Return the run name for `last`, `@1` (the newest tree, the same as `last`), `@2` (the tree before it) and so on,
    each with an optional `/N`. Other names are returned unchanged. Raises NotFound if there are fewer trees."""
    first, slash, number = name.partition("/")
    place = 1 if first == LAST else read_run_number(first[1:]) if first.startswith("@") else None
    if place is None or (slash and read_run_number(number) is None):
        return name
    if place == 0:
        raise NotFound("there is no '@0': '@1' is the newest tree, '@2' the one before it")
    trees = await log.list_trees(on_problem, latest=place, reported=everything)
    if len(trees) < place:
        if not trees:
            raise NotFound(await _explain_nothing(log))
        count = "only one tree" if len(trees) == 1 else f"only {len(trees)} trees"
        raise NotFound(f"there is no '{first}': this project has {count}; `retinue ps --all` lists them")
    return f"{trees[-1].tree}/{number}" if slash else f"{trees[-1].tree}/0"


async def _find_newest(log: LogReader, on_problem: OnProblem, *, everything: bool) -> RunRef:
    trees = await log.list_trees(on_problem, latest=1, reported=everything)
    for run in await log.read_runs([stored.tree for stored in trees]):
        return run.ref
    if await log.count_trees():
        raise NotFound("there are only runs that were reported to another process; --all includes them")
    raise NotFound(await _explain_nothing(log))


async def _explain_nothing(log: LogReader) -> str:
    problems: list[LogError] = []
    await log.list_trees(problems.append, latest=1)
    if problems:
        return f"there is no run in {log.location} that can be read"
    return f"there are no runs in {log.location} yet: start one with `retinue run TASK`"


async def find_reported_run(log: LogReader, agent: str, run_id: str) -> RunRef | None:
    """Find a run that an MCP server reports to us in the server's own tree, or return None if that tree is in another
    project."""
    tree, _, number = run_id.rpartition("-")
    for stored in await log.list_trees():
        if not stored.is_reported or (stored.reported != run_id and stored.tree != tree):
            continue
        refs = [run.ref for run in await log.read_runs([stored.tree])]
        if stored.reported == run_id and refs[0].agent == agent:
            return refs[0]
        if stored.tree == tree:
            return next((ref for ref in refs if str(ref.run) == number), None)
    return None


async def _find_by_number(log: LogReader, name: str) -> list[StoredRun]:
    """Find the runs that match TREE/N; TREE may be a prefix."""
    tree, _, number = name.rpartition("/")
    wanted = read_run_number(number)
    if not tree or wanted is None:
        return []
    begun = [run.first.tree for run in await log.find_runs(tree) if run.first.tree.startswith(tree)]
    trees = [tree] if tree in begun else list(dict.fromkeys(begun))
    return [run for run in await log.read_runs(trees) if run.first.run == wanted]


def _choose_runs(runs: Sequence[StoredRun], name: str) -> list[StoredRun]:
    """Return the runs called `name`: TREE/N, else a tree, else runs with exactly this name, else runs with a name that
    starts with `name`."""
    tree, _, number = name.rpartition("/")
    wanted = read_run_number(number) if tree else None
    by_number = [run for run in runs if run.first.run == wanted and run.first.tree.startswith(tree)]
    trees = [run for run in runs if run.first.tree == name and run.first.run == 0]
    exact = [run for run in runs if name in (run.ref.path, run.ref.label, run.ref.subagent_id)]
    continued = {  # runs continued by another match: a subagent_id names the newest
        f"{body.origin or run.first.tree}/{body.continues}"
        for run in exact
        if isinstance(body := run.first.body, RunSpawned) and body.continues is not None
    }
    newest = [run for run in exact if run.ref.name not in continued]
    return by_number or trees or newest or [run for run in runs if _begins_name(name, run.ref)]


def _begins_name(name: str, ref: RunRef) -> bool:
    """Return True if a name of the run starts with `name`. A prefix of the path must reach into its last part:
    `/main/ex` matches `/main/explorer-1`, not a run below it."""
    others = (ref.label, ref.subagent_id, ref.tree if ref.run == 0 else "")
    is_path = ref.path.startswith(name) and "/" not in ref.path[len(name) :]
    return is_path or any(other.startswith(name) for other in others)


async def _find_similar(log: LogReader, name: str) -> str:
    trees = [stored.tree for stored in await log.list_trees(latest=MOST_NAMES)]
    words = dict.fromkeys(trees)
    for run in await log.read_runs(trees):
        words |= dict.fromkeys((run.ref.name, run.ref.path, run.ref.label, run.ref.subagent_id))
    close = difflib.get_close_matches(name, list(words)[:MOST_NAMES], n=3)
    return "; similar names: " + ", ".join(f"'{word}'" for word in close) if close else ""


def _list_candidates(found: Sequence[StoredRun]) -> list[str]:
    """Return lines that tell runs of the same name apart: number, path, label, start time and task."""
    more = len(found) - MOST_CANDIDATES
    listed = [
        f"{run.ref.name} ({run.ref.path}, '{run.ref.label}') of {describe_origin(run)}"
        for run in found[:MOST_CANDIDATES]
    ]
    return [*listed, f"and {more} more: `retinue ps --all` lists them"] if more > 0 else listed


def describe_origin(run: StoredRun) -> str:
    """Return the start time of a run and the beginning of its task."""
    body = run.first.body
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(run.first.at))
    task = " ".join(body.task.split()) if isinstance(body, RunSpawned) else ""
    return f"{began}: {task if len(task) <= TASK_CHARACTERS else f'{task[: TASK_CHARACTERS - 1]}…'}"
