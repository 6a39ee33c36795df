"""Tests of changes of a run on their way back into a folder in which others work too."""

from __future__ import annotations

import asyncio
import shutil
import threading
from contextlib import suppress
from pathlib import Path

import pytest

from tests.control.outbox_watcher.test_kills import Place, stop, until
from tests.gates import until as wait_until
from tests.remote.outbox.kit import answer, ask, explorer
from tests.sandbox.hosts import host
from tests.supervisor.tree.kit import call


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


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
    work, begun, go = tmp_path / "work", tmp_path / "begun", tmp_path / "go"
    write(work, "notes", "one\n")
    write(work, "other", "one\n")
    command = f"touch {begun}; until [ -e {go} ]; do sleep 0.02; done; echo mine >> notes"
    async with host(work, profiles=[explorer([call("shell", command=command)])], runtime="inherited") as there:
        ask(there.outbox, "a", workspace=str(work))
        await wait_until(begun.exists)
        write(work, "notes", "theirs\n")
        write(work, "other", "theirs\n")
        go.touch()
        said = await answer(there.outbox, "a")
    assert said["warning"].endswith("and now as this run left them: notes")
    assert ((work / "notes").read_text(), (work / "other").read_text()) == ("one\nmine\n", "theirs\n")


def test_a_watcher_killed_while_it_brings_back_leaves_nothing_half_written(tmp_path: Path) -> None:
    place = Place(tmp_path)
    place.script({"tools": [{"name": "write", "args": {"path": "d/made", "content": "x"}}]})
    first = place.watcher("half_given")
    ask(place.outbox, "a-1", workspace=str(place.work))
    first.wait(200)
    first.communicate()
    assert [path.name for path in (place.work / "d").iterdir()] != ["made"]
    second = place.watcher()
    try:
        until((place.outbox / "response_a-1.json").exists)
    finally:
        stop(second)
    assert [path for path in place.work.rglob("*") if path.is_file()] == []
