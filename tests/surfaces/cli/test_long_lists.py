"""Lists of many trees: the work for each tree, and tables of cells that are wide, long or empty."""

import asyncio
import gc
import sys
import threading
from pathlib import Path

import pytest

from retinue.files.state_owner import claim_state_folder
from retinue.log.sqlite import SqliteLog
from retinue.surfaces.cli.main import main
from retinue.surfaces.cli.output import format_columns, format_table
from tests.log.kit import make_ended, make_spawned

CALLS_PER_TREE = 130  # 86 now; with 300, 10,000 trees took more than 3 times as long as 100


async def write_trees(state: Path, first: int, last: int) -> None:
    claim_state_folder(state)
    log = SqliteLog(state / "logs")
    for number in range(first, last):
        log.append(make_spawned(tree=f"t{number}", label=f"label-{number}", at=float(number)))
        log.append(make_ended(2, tree=f"t{number}"))
    await log.close()


def count_calls(*words: str) -> int:
    """Count the calls, of Python and of C functions, that a command makes in all its threads."""
    counts = {"call": 0, "c_call": 0}

    def count(frame: object, what: str, argument: object) -> None:
        if what in counts:
            counts[what] += 1

    threading.setprofile(count)
    sys.setprofile(count)
    try:
        assert main(list(words)) == 0
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    return sum(counts.values())


@pytest.mark.finding("R1")
def test_a_tree_more_costs_a_long_list_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    asyncio.run(write_trees(tmp_path / ".retinue", 0, 20))
    main(["ps", "--all"])  # imports and caches
    short = count_calls("ps", "--all")
    asyncio.run(write_trees(tmp_path / ".retinue", 20, 220))
    capsys.readouterr()
    long = count_calls("ps", "--all")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [f"t{number}/0" for number in reversed(range(220))]
    assert (long - short) / 200 < CALLS_PER_TREE
    assert gc.isenabled()


def test_columns_align_whatever_is_in_their_cells() -> None:
    columns = {"NAME": ["a", "日本", ""], "COUNT": ["1", "22", "333"]}
    right = frozenset({"COUNT"})
    assert format_columns(columns, right=right) == ["NAME  COUNT", "a         1", "日本     22", "        333"]
    assert format_table(("NAME", "COUNT"), [("a%s", "1")], right=right) == ["NAME  COUNT", "a%s       1"]
    assert format_table(("NAME", "COUNT"), []) == ["NAME  COUNT"]
    marked = format_columns(columns, right=right, paint=lambda head, cell, text: f"<{text}>")
    assert marked == ["<NAME>  <COUNT>", "<a>         <1>", "<日本>     <22>", "        <333>"]
