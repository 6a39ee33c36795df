"""A watcher that is killed at any point: the next one answers, once, and nothing is done twice."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.remote.outbox.kit import ask, hashes
from tests.sandbox.crash_scenes import cmdline
from tests.sandbox.places import make_image, needs_bubblewrap, needs_containers
from tests.supervisor.tree.kit import call
from tests.surfaces.cli.shell import Project, environment, until

POINTS = [
    "claimed", "marked", "checked", "spawned", "event_written", "copied_back", "answer_kept", "response_half_written",
    "response_written", "request_removed", "cancel_seen",
]  # fmt: skip
DONE_ALREADY = ("answer_kept", "response_half_written", "response_written", "request_removed")


class Place:
    """A project on the host, an outbox, a folder that is shared, and a file that tells how often something was done."""

    def __init__(self, folder: Path) -> None:
        self.project = Project(folder / "host")
        self.outbox, self.work, self.done = folder / "outbox", folder / "work", folder / "done"
        self.outbox.mkdir()
        self.work.mkdir()

    def script(self, *replies: Any, **more: Any) -> None:
        effect = {"tools": [{"name": "shell", "args": {"command": f"echo once >> '{self.done}'"}}]}
        model = self.project.script({**more, "explorer": [effect, *replies, {"text": "over"}]})
        (self.project.folder / "retinue.yaml").write_text(f"model: {model}\n")

    def watcher(self, point: str = "", *arguments: str) -> subprocess.Popen[str]:
        more = {"RETINUE_FAILPOINT": f"outbox_{point}"} if point else {}
        argv = [sys.executable, "-m", "retinue", "watch", "--outbox", str(self.outbox), "--allow-root", str(self.work)]
        return subprocess.Popen(
            [*argv, "--yes", "--runtime", "inherited", *arguments],
            cwd=self.project.folder,
            env=environment(**more),
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    def times(self) -> int:
        return len(self.done.read_text().splitlines()) if self.done.exists() else 0


def stop(watcher: subprocess.Popen[str], how: int = signal.SIGINT) -> tuple[int, str]:
    watcher.send_signal(how)
    try:
        _, said = watcher.communicate(timeout=200)
    finally:
        watcher.kill()
    return watcher.returncode, said


@pytest.fixture
def place(tmp_path: Path) -> Place:
    tmp_path.chmod(0o755)
    return Place(tmp_path)


@pytest.mark.requirement("P33")
@pytest.mark.parametrize("point", POINTS)
def test_a_watcher_killed_at_this_point_leaves_one_answer_to_the_next(place: Place, point: str) -> None:
    cancelled = point == "cancel_seen"
    place.script(*([{"hang": True}] if cancelled else []))
    first = place.watcher(point)
    ask(place.outbox, "a-1", workspace=str(place.work))
    if cancelled:
        until(lambda: place.times() == 1)
        (place.outbox / "cancel_a-1").touch()
    assert first.wait(200) == -signal.SIGKILL
    first.communicate()
    second = place.watcher()
    try:
        until(lambda: _settled(place))
        answer = (place.outbox / "response_a-1.json").read_bytes()
        (place.outbox / "response_a-1.json").unlink()
        ask(place.outbox, "a-1", workspace=str(place.work))  # and asked again, it is the same answer
        until(lambda: _settled(place))
        assert (place.outbox / "response_a-1.json").read_bytes() == answer
    finally:
        code, _ = stop(second)
    assert code == 0
    assert json.loads(answer)["status"] == ("done" if point in DONE_ALREADY else "disconnected")
    assert place.times() <= 1
    left = [name for name in os.listdir(place.outbox) if name not in ("response_a-1.json", "events_a-1.ndjson")]
    assert left == []
    assert list((place.project.folder / ".retinue" / "outbox").glob("*.copies/*")) == []


def _settled(place: Place) -> bool:
    return (place.outbox / "response_a-1.json").exists() and not (place.outbox / "request_a-1.json").exists()


def test_one_who_asks_and_is_killed_right_after_is_answered_all_the_same(place: Place) -> None:
    place.script()
    container = Project(place.work / "project")
    spawn = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "x", "subagent_type": "explorer"}]}}]}
    container.script({"main": [spawn, {"text": "x"}]})
    done = container.retinue(
        "run", "go", "--yes", "--model", "scripted:script.yaml", "--runtime", "delegated",
        "--delegation-directory", str(place.outbox), RETINUE_FAILPOINT="outbox_request_renamed",
    )  # fmt: skip
    assert done.returncode == -signal.SIGKILL
    [request] = os.listdir(place.outbox)
    watcher = place.watcher()
    try:
        until(lambda: any(name.startswith("response_") for name in os.listdir(place.outbox)))
    finally:
        stop(watcher)
    assert request not in os.listdir(place.outbox) and place.times() == 1


@pytest.mark.requirement("P19")
@pytest.mark.parametrize(
    "runtime",
    [pytest.param("isolated", marks=needs_bubblewrap), pytest.param("container", marks=needs_containers)],
)
def test_nothing_outlives_a_watcher_that_is_killed_and_its_tree_can_go_on(place: Place, runtime: str) -> None:
    if runtime == "container":
        make_image()
    mark = f"9{secrets.randbelow(10**6):06}"
    sleeps = f"[ -e on ] || {{ touch on; setsid sleep {mark} & sleep {mark}; }}"
    model = place.project.script({"explorer": [call("shell", command=sleeps), {"text": "over"}]})
    (place.project.folder / "retinue.yaml").write_text(f"model: {model}\n")
    watcher = place.watcher("", "--runtime", runtime)
    ask(place.outbox, "a-1", workspace=str(place.work))
    until(lambda: len(running(mark)) >= 2)
    watcher.kill()
    watcher.communicate()
    until(lambda: running(mark) == [])
    second = place.watcher("", "--runtime", runtime)
    try:
        until(lambda: _settled(place))
    finally:
        stop(second)
    assert json.loads((place.outbox / "response_a-1.json").read_bytes())["status"] == "disconnected"
    assert place.project.rows()[0]["state"] == "interrupted"
    done = place.project.retinue("resume", "--yes", "--runtime", runtime)
    assert (done.returncode, done.stdout.strip()) == (0, "over"), done.stderr
    assert "the request a-1 was answered `disconnected`" in done.stderr
    assert list(place.work.iterdir()) == [] and "unknown_after_crash" in json.dumps(place.project.events())


def running(mark: str) -> list[int]:
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [pid for pid in found if cmdline(pid).startswith(f"sleep {mark} ")]


def test_two_watchers_of_two_projects_and_the_first_is_killed(place: Place, tmp_path: Path) -> None:
    place.script({"hang": True})
    first = place.watcher()
    ask(place.outbox, "a-1", workspace=str(place.work))
    until(lambda: place.times() == 1)
    other = Place.__new__(Place)
    other.project, other.outbox, other.work, other.done = Project(tmp_path / "b"), place.outbox, place.work, place.done
    other.script()
    second = other.watcher()
    ask(place.outbox, "b-1", workspace=str(place.work))
    try:
        until(lambda: place.times() == 2)  # the first has taken it: the second only waits
        assert not (other.project.folder / ".retinue" / "logs").exists() or not other.project.rows()
        first.kill()
        first.communicate()
        until(lambda: _settled(place))
        assert json.loads((place.outbox / "response_a-1.json").read_bytes())["status"] == "disconnected"
        ask(place.outbox, "c-1", workspace=str(place.work))
        until((place.outbox / "response_c-1.json").exists)
    finally:
        stop(second)
    assert place.times() == 3


def test_nothing_outside_is_touched_by_a_watcher_that_is_stopped_in_the_middle(place: Place, tmp_path: Path) -> None:
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "f").write_text("x")
    before = hashes(tmp_path / "beside")
    place.script({"hang": True})
    watcher = place.watcher()
    ask(place.outbox, "a-1", workspace=str(place.work))
    until(lambda: place.times() == 1)
    code, said = stop(watcher)
    assert code == 0
    answer = json.loads((place.outbox / "response_a-1.json").read_bytes())
    assert answer["status"] == "cancelled" and "a-1: cancelled" in said
    assert place.project.rows()[0]["state"] == "cancelled"
    assert hashes(tmp_path / "beside") == before
