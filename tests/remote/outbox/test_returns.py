"""What a run has changed, on its way back into a folder in which others work too."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from retinue.workspaces.copy_back import Return
from retinue.workspaces.copy_in import FOLDER, Copier, Outside, Roots, Taken
from tests.remote.outbox.kit import answer, ask, explorer
from tests.remote.outbox.test_kills import Place, stop, until
from tests.sandbox.hosts import host
from tests.supervisor.tree.kit import call


class Both:
    """A folder of theirs and the copy of it that a run works in."""

    def __init__(self, folder: Path, files: dict[str, str], copier: Copier | None = None) -> None:
        self.theirs, self.ours = folder / "theirs", folder / "ours"
        for name, text in files.items():
            write(self.theirs, name, text)
        with opened(self.theirs) as fd:
            self.taken: Taken = (copier or Copier()).take(fd, self.ours, what="workspace")

    def back(self, copier: Copier | None = None) -> str:
        """Brings it back; what is told of it."""
        bringing = Return(self.taken, copier=copier or Copier(), owner=None)
        with opened(self.ours) as source, opened(self.theirs) as target:
            bringing.give(source, target)
        return "; ".join(bringing.notes())

    def there(self) -> dict[str, str]:
        return {
            str(path.relative_to(self.theirs)): path.read_text() if path.is_file() else "folder"
            for path in sorted(self.theirs.rglob("*"))
        }


@contextmanager
def opened(folder: Path) -> Iterator[int]:
    fd = os.open(folder, FOLDER)
    try:
        yield fd
    finally:
        os.close(fd)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


@pytest.fixture
def both(tmp_path: Path) -> Both:
    return Both(tmp_path, {"a": "a", "b": "b", "d/e": "e", "d/f": "f", "g/h": "h"})


def test_what_only_others_have_changed_stays_as_they_left_it(both: Both) -> None:
    write(both.theirs, "a", "theirs")
    (both.theirs / "d" / "e").unlink()
    shutil.rmtree(both.theirs / "g")
    write(both.theirs, "new", "theirs")
    write(both.ours, "b", "ours")
    assert both.back() == ""
    assert both.there() == {"a": "theirs", "b": "ours", "d": "folder", "d/f": "f", "new": "theirs"}


def test_what_both_have_changed_is_as_the_run_left_it_and_told(both: Both) -> None:
    write(both.theirs, "a", "theirs")
    write(both.ours, "a", "ours")
    shutil.rmtree(both.theirs / "g")
    write(both.ours, "g/h", "ours")
    write(both.theirs, "new", "theirs")
    write(both.ours, "new", "ours")
    write(both.ours, "d/e", "ours")
    told = both.back()
    assert told.endswith("by somebody else meanwhile, and now as this run left them: a, g/h, new")
    assert both.there() | {"b": "b", "d/f": "f"} == both.there()
    assert [both.there()[name] for name in ("a", "d/e", "g/h", "new")] == ["ours"] * 4


def test_what_the_run_has_removed_and_others_have_changed_is_kept_and_told(both: Both) -> None:
    write(both.theirs, "a", "theirs")
    shutil.rmtree(both.ours / "d")
    (both.ours / "a").unlink()
    write(both.theirs, "d/new", "theirs")
    assert "and so kept: a" in both.back()
    assert both.there() == {"a": "theirs", "b": "b", "d": "folder", "d/new": "theirs", "g": "folder", "g/h": "h"}


def test_a_file_that_became_a_folder_and_the_other_way_round(both: Both) -> None:
    (both.ours / "a").unlink()
    write(both.ours, "a/inner", "x")
    shutil.rmtree(both.ours / "d")
    write(both.ours, "d", "x")
    (both.ours / "empty").mkdir()
    (both.ours / "b").chmod(0o755)
    assert both.back() == ""
    assert both.there() == {
        "a": "folder", "a/inner": "x", "b": "b", "d": "x", "empty": "folder", "g": "folder", "g/h": "h"
    }  # fmt: skip
    assert (both.theirs / "b").stat().st_mode & 0o777 == 0o755


def test_what_stands_in_the_way_is_left_and_told(both: Both, tmp_path: Path) -> None:
    (tmp_path / "secret").mkdir()
    (both.theirs / "new").symlink_to(tmp_path / "secret")
    write(both.ours, "new/x", "ours")
    (both.theirs / "other").mkdir()
    write(both.ours, "other", "ours")
    (both.ours / "a").unlink()
    (both.ours / "a").symlink_to("/etc/passwd")
    told = both.back()
    assert "not brought back" in told and "new, new/x, other" in told and "1 links" in told
    assert list((tmp_path / "secret").iterdir()) == [] and both.there()["a"] == "a"


@pytest.mark.parametrize("copier", [Copier(most_files=3), Copier(most_bytes=10)])
def test_when_it_is_too_much_nothing_is_done(both: Both, copier: Copier) -> None:
    before = both.there()
    (both.ours / "a").unlink()
    for number in range(4):
        write(both.ours, f"n/{number}", "three")
    with pytest.raises(Outside, match="what the run has written"):
        both.back(copier)
    assert both.there() == before


def test_what_is_half_written_by_us_is_never_copied(tmp_path: Path) -> None:
    half = ".retinue-0123456789abcdef"
    both = Both(tmp_path, {"a": "a", half: "half", f"d/{half}": "half"})
    assert sorted(path.name for path in both.ours.rglob("*")) == ["a", "d"]
    write(both.ours, half, "ours")
    assert both.back() == "" and both.there()[half] == "half"


def churn(folder: Path, stop: threading.Event) -> None:
    """Somebody who makes, replaces and removes files and folders all the time."""
    number = 0
    while not stop.is_set():
        number += 1
        write(folder, "deep/er/.x", str(number))
        with suppress(OSError):
            (folder / "deep" / "er" / ".x").rename(folder / f"c-{number % 7}")
        with suppress(OSError):
            (folder / f"c-{(number + 3) % 7}").unlink()
        shutil.rmtree(folder / "deep", ignore_errors=True)


@pytest.mark.requirement("P33")
async def test_two_hosts_and_a_container_that_work_in_one_folder_at_once(tmp_path: Path) -> None:
    work = tmp_path / "work"
    write(work, "kept", "kept")
    command = "mkdir -p deep/er; date > deep/er/mine; date > shared; rm -f c-*; cat kept"
    profile = explorer([call("shell", command=command), {"text": "{{last_result}}"}])
    over = threading.Event()
    churning = asyncio.create_task(asyncio.to_thread(churn, work, over))
    try:
        async with (
            host(work, profiles=[profile], runtime="inherited") as one,
            host(work, profiles=[profile], runtime="inherited") as two,
        ):
            for number in range(12):
                ask(one.outbox, f"a-{number}", workspace=str(work))
                ask(two.outbox, f"a-{number}", workspace=str(work))
            for there in (one, two):
                for number in range(12):
                    said = await answer(there.outbox, f"a-{number}")
                    assert (said["status"], said["final_response"]) == ("done", "kept"), said
                    assert "could not all be brought back" not in said.get("warning", ""), said
    finally:
        over.set()
        await churning
    assert list(work.rglob(".retinue-*")) == []
    assert (work / "shared").read_text().endswith("\n") and (work / "kept").read_text() == "kept"


async def test_the_response_names_what_somebody_else_had_changed(tmp_path: Path) -> None:
    work, go = tmp_path / "work", tmp_path / "go"
    write(work, "notes", "one\n")
    write(work, "other", "one\n")
    command = f"until [ -e {go} ]; do sleep 0.02; done; echo mine >> notes"
    async with host(work, profiles=[explorer([call("shell", command=command)])], runtime="inherited") as there:
        ask(there.outbox, "a", workspace=str(work))
        async with asyncio.timeout(20):
            while not there.trees:
                await asyncio.sleep(0.01)
        write(work, "notes", "theirs\n")
        write(work, "other", "theirs\n")
        go.touch()
        said = await answer(there.outbox, "a")
    assert said["warning"].endswith("and now as this run left them: notes")
    assert ((work / "notes").read_text(), (work / "other").read_text()) == ("one\nmine\n", "theirs\n")


def test_the_outbox_itself_is_shown_to_no_run_and_written_by_none(tmp_path: Path) -> None:
    write(tmp_path, "theirs/box/response_a.json", "real")
    write(tmp_path, "theirs/f", "f")
    with opened(tmp_path / "theirs" / "box") as box:
        roots = Roots([tmp_path / "theirs"], ours=[], never=[box])
        for path in ("box", "box/inner"):
            with pytest.raises(Outside, match="is the outbox"), roots.opened(f"{tmp_path}/theirs/{path}", what="it"):
                raise AssertionError
        both = Both(tmp_path, {}, Copier(never=roots.never))
        assert [path.name for path in both.ours.iterdir()] == ["f"]
        write(both.ours, "box/response_a.json", "forged")
        assert "not brought back" in both.back(Copier(never=roots.never))
        assert both.there()["box/response_a.json"] == "real"
        roots.close()


def test_a_watcher_killed_while_it_brings_back_leaves_nothing_half_written(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.script({"tools": [{"name": "write", "args": {"path": "d/made", "content": "x"}}]})
    first = place.watcher("half_given")
    ask(place.outbox, "a-1", workspace=str(place.work))
    first.wait(30)
    first.communicate()
    assert [path.name for path in (place.work / "d").iterdir()] != ["made"]
    second = place.watcher()
    try:
        until((place.outbox / "response_a-1.json").exists)
    finally:
        stop(second)
    assert [path for path in place.work.rglob("*") if path.is_file()] == []
