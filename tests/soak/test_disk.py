"""A disk that is full or fails, at every write and every sync: told in clear words, nothing acknowledged is lost."""

import asyncio
import base64
import json
import random
import shutil
import subprocess
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Event
from retinue.core.errors import LogError, NotFound
from retinue.core.events import encode_event
from retinue.core.ports import Log
from retinue.log import batches, sqlite
from retinue.log.forwarding_log import ForwardingLog
from retinue.log.sqlite import SqliteLog
from retinue.log.sqlite_reader import SqliteReader
from retinue.supervisor import run_logs
from tests.soak.checks import by_run, check_calls, check_folds, check_order
from tests.soak.conftest import Note
from tests.soak.disk import Disk, Fault, faulty_disk
from tests.soak.test_cancel import parts
from tests.supervisor.tree.kit import call, main, spawn
from tests.surfaces.cli.shell import COMMAND, environment

SCRIPT = {
    "main": [spawn({"task": "a", "subagent_type": "mid"}, {"task": "b"}), call("shell", command="echo 1"), "end"],
    "mid": [spawn({"task": "deep"}), call("write", path="x", content="y"), "mid done"],
    "*": [call("shell", command="echo 2"), "leaf done"],
}
# What fails while SQLite closes a file has nobody to be raised to; it is our VFS that fails, on purpose.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
WORDS = {"full": "the disk is full: cannot ", "write": "the disk fails (", "sync": "the disk fails ("}


class Told(ForwardingLog):
    """A log in front of the real one that records the events whose commit was acknowledged to a waiter."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.acknowledged: list[Event] = []
        self.refusals: list[str] = []

    def append(self, event: Event, wait: bool = False, /) -> Awaitable[None] | None:
        written = self._log.append(event, wait)
        return None if written is None else asyncio.ensure_future(self._told(event, written))

    async def _told(self, event: Event, written: Awaitable[None]) -> None:
        try:
            await written
        except LogError as error:
            self.refusals.append(str(error))
            raise
        self.acknowledged.append(event)


async def one_tree(folder: Path, *, wait: bool = True) -> tuple[retinue.Result[Any] | None, Told | None, str]:
    """Play a depth-2 tree on the durable log. Return its result, the log with its notes, and the error of opening or
    closing."""
    told: Told | None = None
    result = None
    try:
        kids = [retinue.Profile("mid")]
        async with retinue.open(folder / ".retinue", project=folder, mode="yes", profiles=kids) as r:
            r.control.trees.log = told = Told(r.control.log)
            run = await r.spawn(main(SCRIPT), "go")
            result = await run.result()
    except LogError as error:
        return result, told, str(error)
    return result, told, ""


async def stored(folder: Path) -> list[list[Event]]:
    """Every tree in the file as another process would read it after a crash here: from a copy, with its journal."""
    copy = folder / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder / ".retinue" / "logs", copy / "logs")
    problems: list[LogError] = []
    log = SqliteReader(copy / "logs")
    found = [await log.read(each.tree) for each in await log.list_trees(problems.append)]
    assert all("empty" in str(problem) for problem in problems), problems
    return found


async def faulty_tree(folder: Path, disk: Disk, fault: Fault, at: int, times: int) -> int:
    """A tree whose disk fails from there on, then one on the same file with the disk well again."""
    folder.mkdir()
    disk.arm(fault, at, times)
    result, told, closing = await one_tree(folder)
    failed, seen = disk.failed, disk.count
    disk.heal()
    try:
        words = [*(told.refusals if told else ()), *([closing] if closing else ())]
        assert all(text.startswith(WORDS[fault]) and "0001.db" in text and "\n" not in text for text in words), words
        if result is not None and result.status != "done":
            assert result.status == "failed" and WORDS[fault] in (result.error_details or ""), result
        for events in await stored(folder):
            assert [event.seq for event in events] == list(range(1, len(events) + 1))
            held = {event.seq: encode_event(event) for event in events}
            assert told is not None
            assert all(held.get(event.seq) == encode_event(event) for event in told.acknowledged)  # I1
            if not closing:
                check_order(events)
                check_calls(events)
                assert result is not None
                check_folds(events, result)
        if told is not None and told.acknowledged:
            assert await stored(folder)
        again, told, closing = await one_tree(folder)
        assert (again is not None and again.status, closing) == ("done", "")
        assert told is not None and told.acknowledged, "the witness saw nothing"
        newest = (await stored(folder))[0]
        check_order(newest)
        assert len(by_run(newest)) == 4
    except BaseException as error:
        error.add_note(f"{fault} at {at}, {times} times; {failed} failed of {seen}; closing: {closing}")
        raise
    return seen


async def sweep(folder: Path, note: Note, fault: Fault, part: range, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (batches, sqlite):
        monkeypatch.setattr(module, "RETRY_SECONDS", 0.001)
    monkeypatch.setattr(run_logs, "WAIT_SECONDS", 0.01)
    with faulty_disk() as disk:
        for number, at in enumerate(part):
            times = (1, 3, 10**9)[number % 3]
            if await faulty_tree(folder / f"{at}", disk, fault, at, times) < at:
                break
    note(faults=number)
    assert number >= 1


@pytest.mark.parametrize("fault", ["full", "write", "sync"])
async def test_a_disk_that_fails_anywhere_loses_nothing_it_took(
    fault: Fault, tmp_path: Path, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = 4 if fault == "sync" else 19
    await sweep(tmp_path, note, fault, range(1, 10_000, step), monkeypatch)


@pytest.mark.soak
@pytest.mark.parametrize("part", parts(9), ids=lambda part: f"from {part[0]}")
@pytest.mark.parametrize("fault", ["full", "write", "sync"])
async def test_a_disk_that_fails_at_every_write_loses_nothing_it_took(
    fault: Fault, part: range, tmp_path: Path, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    await sweep(tmp_path, note, fault, part, monkeypatch)


async def test_a_log_that_cannot_be_opened_is_let_go_at_once(tmp_path: Path) -> None:
    """A connection that waited for the garbage collector tidied the journal up while the next process read it."""
    failures = 0
    with faulty_disk() as disk:
        for at in range(1, 20):
            logs = tmp_path / f"{at}"
            logs.mkdir()
            disk.arm("sync", at, 10**9)
            try:
                log = SqliteLog(logs)
            except LogError as error:
                failures += 1
                held = [fd.readlink() for fd in Path("/proc/self/fd").iterdir() if fd.is_symlink()]
                assert not [each for each in held if each.is_relative_to(logs)], str(error)
            else:
                disk.heal()
                await log.close()
                break
    assert failures >= 2


def make_text(size: int, seed: int) -> str:
    """Return a text that the log cannot make much smaller."""
    return base64.b85encode(random.Random(seed).randbytes(size * 4 // 5)).decode()


TINY = """
mount -t tmpfs -o size=1500k tmpfs "$1" && cd "$1" && cp "$2" script.yaml || exit 99
shift 2
head -c 1150000 /dev/zero > fill
"$@" run go --runtime inherited --yes --quiet --model scripted:script.yaml; echo "first: $?"
rm fill
"$@" ps | cat; echo "ps: $?"
"$@" run go --runtime inherited --yes --quiet --model scripted:script.yaml; echo "second: $?"
"""


def test_a_full_file_system_is_told_and_work_goes_on_when_there_is_space(tmp_path: Path) -> None:
    """On a real one, of 1.5 MB. Needs unshare(1) and a user namespace that may mount."""
    if subprocess.run(["unshare", "-rm", "true"], capture_output=True, check=False).returncode:
        pytest.skip("NOT SHOWN HERE: a full file system. `unshare -rm` does not work on this machine")
    script = tmp_path / "script.yaml"
    turns = [{"text": make_text(3000, seed), **call("glob", pattern="*")} for seed in range(40)]
    script.write_text(json.dumps({"agents": {"main": [*turns, call("shell", command="true"), {"text": "answer"}]}}))
    (tmp_path / "disk").mkdir()
    shell = ["unshare", "-rm", "sh", "-c", TINY, "sh", str(tmp_path / "disk"), str(script), *COMMAND]
    done = subprocess.run(shell, capture_output=True, text=True, env=environment(), timeout=50, check=False)
    assert "first: 1" in done.stdout and "second: 0" in done.stdout and "answer" in done.stdout, done
    assert "the disk is full: cannot write the log " in done.stderr, done.stderr
    assert "events are lost" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_that_may_not_grow_is_told(tmp_path: Path) -> None:
    """A quota or `ulimit -f` limits the size of a file; neither needs privileges."""
    turns = [{"text": make_text(30_000, seed), **call("glob", pattern="*")} for seed in range(20)]
    script = tmp_path / "script.yaml"
    script.write_text(json.dumps({"agents": {"main": [*turns, call("list_agents"), {"text": "answer"}]}}))
    limited = ["sh", "-c", 'trap "" XFSZ; ulimit -f 300; exec "$@"', "sh", *COMMAND]
    done = subprocess.run(
        [*limited, "run", "go", "--runtime", "inherited", "--model", f"scripted:{script}"],
        capture_output=True, text=True, env=environment(), timeout=50, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 1
    assert "retinue: the disk is full: cannot write the log " in done.stderr and "Traceback" not in done.stderr
    assert "\nmain   running" not in done.stderr  # it is not, and what there was of it is not known


@pytest.mark.parametrize("seed", range(3))
async def test_a_damaged_file_is_told_in_one_line_and_hides_no_other(seed: int, tmp_path: Path) -> None:
    """Bytes flipped, cut off and overwritten with nothing, anywhere in one file of two."""
    chance = random.Random(seed)
    async with retinue.open(tmp_path / ".retinue", project=tmp_path, mode="yes") as first:
        await first.run(main(SCRIPT), "go")
        async with retinue.open(tmp_path / ".retinue", project=tmp_path, mode="yes") as second:
            await second.run(main(SCRIPT), "go")
    file, other = (tmp_path / ".retinue" / "logs" / name for name in ("0001.db", "0002.db"))
    sound, told = file.read_bytes(), 0
    for _ in range(150):
        data, at = bytearray(sound), chance.randrange(len(sound))
        match chance.choice(("flip", "cut", "nothing")):
            case "flip":
                data[at] ^= 1 << chance.randrange(8)
            case "cut":
                del data[at:]
            case "nothing":
                data[at : at + 4096] = bytes(len(data[at : at + 4096]))
        file.write_bytes(data)
        log = SqliteReader(tmp_path / ".retinue" / "logs")
        problems: list[LogError] = []
        found = await log.list_trees(problems.append)
        assert [each for each in found if log.find_file(each.tree) == other], "the other file is hidden"
        for each in found:
            try:
                await log.read(each.tree)
                await log.read_status(each.tree)
            except LogError as error:
                problems.append(error)
            except NotFound as error:  # its index is damaged
                problems.append(LogError(f"0001.db: {error}"))
        spent = [event async for event in log.read_kind("usage", problems.append)]
        assert {event.kind for event in spent} <= {"usage"}
        assert all("0001.db" in str(problem) and "\n" not in str(problem) for problem in problems), problems
        told += bool(problems)
    assert told > 30
    shell = [*COMMAND, "ps", "--all"]
    file.write_bytes(sound[:5000])
    done = subprocess.run(shell, capture_output=True, text=True, env=environment(), cwd=tmp_path, check=False)
    assert done.returncode == 0 and "done" in done.stdout
    assert done.stderr.startswith("retinue: warning: ") and "0001.db" in done.stderr and done.stderr.count("\n") == 1
