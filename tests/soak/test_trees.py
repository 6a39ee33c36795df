"""Random trees, in memory and on disk: whatever a model asks for, the invariants hold."""

from pathlib import Path

import pytest

from tests.soak.checks import by_run, check_all, check_files, plain
from tests.soak.conftest import Note
from tests.soak.play import Played, play
from tests.soak.wild import wild

SAMPLE = range(10)
SWEEP = range(1000, 1400)
LARGE = range(5000, 5040)


def check(played: Played) -> None:
    check_all(played.held, played.witness, played.result)
    assert plain(played.seen) == plain(played.held) == plain(played.given)


def shape(played: Played) -> dict[str, object]:
    """Return the outcome of a case that is independent of time: kinds, status and error of each run, by label."""
    shapes = {}
    for own in by_run(played.held).values():
        spawned, ended = own[0].body, own[-1].body
        kinds = sorted(event.kind for event in own)
        shapes[spawned.label] = (kinds, ended.status, ended.error_details)  # type: ignore[union-attr]
    return shapes


async def both(seed: int, folder: Path, note: Note, *, size: int) -> None:
    case = wild(seed, size=size)
    in_memory = await play(case, folder / "memory", durable=False)
    on_disk = await play(case, folder / "disk", durable=True)
    check(in_memory)
    check(on_disk)
    files = check_files(on_disk.held, folder / "disk" / ".retinue")
    if not case.timing_matters:
        assert shape(in_memory) == shape(on_disk)
    runs = sum(len(by_run(played.held)) for played in (in_memory, on_disk))
    note(trees=2, runs=runs, events=len(in_memory.held) + len(on_disk.held), runs_with_files=files)


@pytest.mark.parametrize("seed", SAMPLE)
async def test_a_random_tree_keeps_the_invariants(seed: int, tmp_path: Path, note: Note) -> None:
    await both(seed, tmp_path, note, size=20)


@pytest.mark.soak
@pytest.mark.parametrize("seed", SWEEP)
async def test_random_trees_keep_the_invariants(seed: int, tmp_path: Path, note: Note) -> None:
    await both(seed, tmp_path, note, size=40)


@pytest.mark.soak
@pytest.mark.parametrize("seed", LARGE)
async def test_large_random_trees_keep_the_invariants(seed: int, tmp_path: Path, note: Note) -> None:
    await both(seed, tmp_path, note, size=400)
