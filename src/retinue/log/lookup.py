"""Finding a run by what a person typed: TREE/N, a tree, a path, a label, a subagent_id, or the beginning of one.

Exact names win over beginnings. What could mean several runs is an error that lists them; nothing is guessed.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass

from retinue.core.errors import ConfigError, NotFound
from retinue.core.events import Event, RunSpawned
from retinue.log.archive import Archive, Stored

MOST_CANDIDATES = 10


@dataclass(frozen=True)
class Found:
    """A run in the archive."""

    stored: Stored
    run: int
    path: str
    label: str
    continues: str = ""

    @property
    def name(self) -> str:
        return f"{self.stored.tree}/{self.run}"


def find(archive: Archive, name: str | None, *, everything: bool = False, live: bool = False) -> Found:
    """The run of that name; without one the newest tree's primary. Trees that another process shows are looked at when
    no other has the name, or at once with `everything`. With `live` one that can be told something is meant, if any."""
    trees = archive.trees()
    shown = trees if everything else [stored for stored in trees if not stored.reported]
    if not trees and archive.problems:
        raise NotFound(f"there is no run in {archive.folder} that can be read")
    if not trees:
        raise NotFound(f"there are no runs in {archive.folder.parent} yet: start one with `retinue run TASK`")
    if not name:
        if not shown:
            raise NotFound("there are only runs that another process shows: --all takes those too")
        return _primary(shown[0])
    found = _called(archive, shown, name) or _called(archive, trees, name)
    if not found:
        raise NotFound(f"no run is called '{name}'{_near(archive, trees, name)}; `retinue ps --all` lists them")
    if live and len(found) > 1:
        found = [r for r in found if archive.is_live(r.stored) and not archive.has_ended(r.stored)] or found
    if len(found) > 1:
        raise ConfigError(f"'{name}' could be any of {_listed(found)}")
    return found[0]


def at_home(archive: Archive, agent: str, run_id: str) -> Found | None:
    """A run that an MCP server reports to us, as the server's own log has it; None where that is in another project."""
    tree, _, number = run_id.rpartition("-")
    for stored in archive.trees():
        body = stored.first.body
        if not isinstance(body, RunSpawned) or not body.reported:
            continue
        if body.reported == run_id and stored.first.agent == agent:
            return _primary(stored)
        if stored.tree == tree:
            return next((run for run in _runs(archive, stored) if str(run.run) == number), None)
    return None


def _called(archive: Archive, trees: list[Stored], name: str) -> list[Found]:
    return _by_number(archive, trees, name) or _by_tree(trees, name) or _by_words(archive, trees, name)


def _by_number(archive: Archive, trees: list[Stored], name: str) -> list[Found]:
    """TREE/N, where the beginning of TREE is enough."""
    tree, slash, number = name.rpartition("/")
    if not (slash and tree and number.isascii() and number.isdigit()):
        return []
    exact = [stored for stored in trees if stored.tree == tree]
    matching = exact or [stored for stored in trees if stored.tree.startswith(tree)]
    return [run for stored in matching for run in _runs(archive, stored) if run.run == int(number)]


def _by_tree(trees: list[Stored], name: str) -> list[Found]:
    """A whole tree id; the beginning of one is looked at together with the other beginnings."""
    return [_primary(stored) for stored in trees if stored.tree == name]


def _by_words(archive: Archive, trees: list[Stored], name: str) -> list[Found]:
    exact: list[Found] = []
    begun = [_primary(stored) for stored in trees if stored.tree.startswith(name)]
    for stored in trees:
        for event, body in _spawned(archive, stored):
            words = (event.path, body.label, body.subagent_id)
            if name in words:
                exact.append(_found(stored, event, body))
            elif _begins(name, event.path) or any(word.startswith(name) for word in words[1:]):
                begun.append(_found(stored, event, body))
    return _newest(exact) or list({run.name: run for run in begun}.values())


def _newest(found: list[Found]) -> list[Found]:
    """Without the runs that others of them continue: a subagent_id names the newest."""
    continued = {run.continues for run in found}
    return [run for run in found if run.name not in continued]


def _begins(name: str, path: str) -> bool:
    """Whether the name ends inside the path's last part: `/main/ex` means `/main/explorer-1`, not what is below it."""
    return path.startswith(name) and "/" not in path[len(name) :]


def _near(archive: Archive, trees: list[Stored], name: str) -> str:
    words: dict[str, None] = {}
    for stored in trees:
        words[stored.tree] = None
        for event, body in _spawned(archive, stored):
            words |= dict.fromkeys((f"{stored.tree}/{event.run}", event.path, body.label, body.subagent_id))
    close = difflib.get_close_matches(name, list(words)[:1000], n=3)
    return "; near are " + ", ".join(f"'{word}'" for word in close) if close else ""


def _listed(found: list[Found]) -> str:
    shown = [f"{run.name} ({run.path}, '{run.label}')" for run in found[:MOST_CANDIDATES]]
    more = len(found) - len(shown)
    return ", ".join(shown) + (f" and {more} more" if more else "")


def _runs(archive: Archive, stored: Stored) -> Iterator[Found]:
    return (_found(stored, event, body) for event, body in _spawned(archive, stored))


def _spawned(archive: Archive, stored: Stored) -> Iterator[tuple[Event, RunSpawned]]:
    for event in archive.spawned(stored):
        if isinstance(event.body, RunSpawned):
            yield event, event.body


def _found(stored: Stored, event: Event, body: RunSpawned) -> Found:
    before = "" if body.continues is None else f"{body.origin or stored.tree}/{body.continues}"
    return Found(stored, event.run, event.path, body.label, before)


def _primary(stored: Stored) -> Found:
    body = stored.first.body
    return Found(stored, 0, stored.first.path, body.label if isinstance(body, RunSpawned) else "")
