"""Finding a run by what a person typed: TREE/N, a tree, a path, a label, a subagent_id, or the beginning of one.

Exact names win over beginnings. A name that could mean several runs is an error that lists them; nothing is guessed.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from retinue.core.errors import ConfigError, LogError, NotFound
from retinue.core.events import Event, RunSpawned
from retinue.core.messages import RunRef
from retinue.core.ports import LogReader, OnProblem, StoredTree, ignore_problem
from retinue.log.reading import is_at_work, iterate_events

MOST_CANDIDATES = 10
MOST_NAMES = 1000
_MOST_DIGITS = 9  # int() refuses thousands of them


def read_run_number(text: str) -> int | None:
    """Return the N of TREE/N; None for what is no number of a run."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


async def find_run(
    log: LogReader,
    name: str | None,
    on_problem: OnProblem = ignore_problem,
    *,
    everything: bool = False,
    live: bool = False,
) -> RunRef:
    """Find the run of that name; without one the newest tree's primary. Trees that another process shows are looked at
    when no other has the name, or at once with `everything`. With `live`, runs that take commands come first."""
    problems: list[LogError] = []
    trees = await log.list_trees(problems.append)
    for problem in problems:
        on_problem(problem)
    if not trees and problems:
        raise NotFound(f"there is no run in {log.location} that can be read")
    if not trees:
        raise NotFound(f"there are no runs in {log.location} yet: start one with `retinue run TASK`")
    own = trees if everything else [stored for stored in trees if not stored.is_reported]
    if not name:
        if not own:
            raise NotFound("there are only runs that another process shows: --all takes those too")
        return _make_ref(own[0].first)
    names = _Names(log)
    found = await names.find(own, name) or await names.find(trees, name)
    if not found:
        near = await names.find_similar(trees, name)
        raise NotFound(f"no run is called '{name}'{near}; `retinue ps --all` lists them")
    if live and len(found) > 1:
        found = [run for run in found if await is_at_work(log, run.tree)] or found
    if len(found) > 1:
        raise ConfigError(f"'{name}' could be any of {_list_candidates(found)}")
    return found[0]


async def find_reported_run(log: LogReader, agent: str, run_id: str) -> RunRef | None:
    """Find a run that an MCP server reports to us in the server's own tree; None if that is in another project."""
    tree, _, number = run_id.rpartition("-")
    for stored in await log.list_trees():
        body = stored.first.body
        if not isinstance(body, RunSpawned) or not body.reported:
            continue
        if body.reported == run_id and stored.first.agent == agent:
            return _make_ref(stored.first)
        if stored.tree == tree:
            return next((run for run in await _list_runs(log, tree) if str(run.run) == number), None)
    return None


class _Names:
    """The names of the runs of a log. All of them are read only if a name is no tree and no TREE/N."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._spawned: list[Event] | None = None

    async def find(self, trees: Sequence[StoredTree], name: str) -> list[RunRef]:
        return (
            await self._find_by_number(trees, name)
            or [_make_ref(stored.first) for stored in trees if stored.tree == name]
            or await self._find_by_words(trees, name)
        )

    async def find_similar(self, trees: Sequence[StoredTree], name: str) -> str:
        words = {stored.tree: None for stored in trees}
        for event in await self._list_spawned(trees):
            run = _make_ref(event)
            words |= dict.fromkeys((run.name, run.path, run.label, run.subagent_id))
        close = difflib.get_close_matches(name, list(words)[:MOST_NAMES], n=3)
        return "; near are " + ", ".join(f"'{word}'" for word in close) if close else ""

    async def _find_by_number(self, trees: Sequence[StoredTree], name: str) -> list[RunRef]:
        """Find TREE/N, where the beginning of TREE is enough."""
        tree, slash, number = name.rpartition("/")
        wanted = read_run_number(number)
        if not slash or not tree or wanted is None:
            return []
        exact = [stored.tree for stored in trees if stored.tree == tree]
        matching = exact or [stored.tree for stored in trees if stored.tree.startswith(tree)]
        return [run for each in matching for run in await _list_runs(self._log, each) if run.run == wanted]

    async def _find_by_words(self, trees: Sequence[StoredTree], name: str) -> list[RunRef]:
        exact: list[RunRef] = []
        begun = [_make_ref(stored.first) for stored in trees if stored.tree.startswith(name)]
        continued: set[str] = set()  # by runs that are found too: a subagent_id names the newest
        for event in await self._list_spawned(trees):
            run = _make_ref(event)
            if name in (run.path, run.label, run.subagent_id):
                exact.append(run)
                if isinstance(event.body, RunSpawned) and event.body.continues is not None:
                    continued.add(f"{event.body.origin or event.tree}/{event.body.continues}")
            elif _begins_path(name, run.path) or run.label.startswith(name) or run.subagent_id.startswith(name):
                begun.append(run)
        newest = [run for run in exact if run.name not in continued]
        return newest or list({run.name: run for run in begun}.values())

    async def _list_spawned(self, trees: Sequence[StoredTree]) -> list[Event]:
        """Return the first events of all runs of these trees, in the order of the trees."""
        if self._spawned is None:
            self._spawned = [event async for event in self._log.read_kind(RunSpawned.kind)]
        places = {stored.tree: place for place, stored in enumerate(trees)}
        return sorted((event for event in self._spawned if event.tree in places), key=lambda event: places[event.tree])


async def _list_runs(log: LogReader, tree: str) -> list[RunRef]:
    return [_make_ref(event) async for event in iterate_events(log, tree) if isinstance(event.body, RunSpawned)]


def _begins_path(name: str, path: str) -> bool:
    """Return whether the name ends in the path's last part: `/main/ex` is `/main/explorer-1`, not a run below it."""
    return path.startswith(name) and "/" not in path[len(name) :]


def _list_candidates(found: list[RunRef]) -> str:
    shown = [f"{run.name} ({run.path}, '{run.label}')" for run in found[:MOST_CANDIDATES]]
    more = len(found) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _make_ref(event: Event) -> RunRef:
    body = event.body
    label, subagent_id = (body.label, body.subagent_id) if isinstance(body, RunSpawned) else ("", "")
    return RunRef(event.tree, event.run, event.path, label, event.agent, subagent_id)
