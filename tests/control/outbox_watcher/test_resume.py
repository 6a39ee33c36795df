"""Tests of runs requested by a container after a crash: the host resumes the run of a killed watcher without more
rights, and keeps the answer for a killed asker."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.control.outbox_watcher.test_kills import Place, stop
from tests.gates import Gate
from tests.remote.outbox.kit import ask
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import spawn
from tests.surfaces.cli.shell import Project, read_until


@needs_bubblewrap
@pytest.mark.requirement("P32", "MASS-8")
def test_what_goes_on_reaches_no_more_and_is_sandboxed_no_less_and_has_no_more_levels(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    place = Place(tmp_path)
    more = spawn({"task": "x", "subagent_type": "explorer"})
    model = place.project.script({"explorer": [more, {"text": "{{last_result}}"}]})
    file = place.project.folder / "retinue.yaml"
    file.write_text(f"model: {model}\nnetwork: [a.com]\nprofiles: {{explorer: {{runtime: inherited}}}}\n")
    watcher = place.watcher("event_written", "--runtime", "isolated", "--config", str(file))
    ask(place.outbox, "a-1", workspace=str(place.work))
    assert watcher.wait(200) == -signal.SIGKILL
    watcher.communicate()
    place.project.runtime = ""
    done = place.project.retinue("resume", "--yes", "--config", str(file))
    assert done.returncode == 0, done.stderr
    started = [event for event in place.project.events() if event["kind"] == "run.started"]
    assert {(event.get("runtime"), "proxy" in event.get("sandbox", ())) for event in started} == {("isolated", False)}
    assert "depth limit exceeded (0/0)" in done.stdout


@pytest.mark.parametrize("last", ["[deep]", "outbox_request_renamed"])
def test_who_asked_and_was_killed_gets_the_answer_and_nothing_is_done_twice(tmp_path: Path, last: str) -> None:
    tmp_path.chmod(0o755)
    place = Place(tmp_path)
    gate = Gate(tmp_path / "gate")
    place.script(spawn({"task": "x", "subagent_id": "deep"}), deep=[gate.reply, {"text": "deep said"}])
    container = Project(place.work / "project")
    container.script({"main": [spawn({"task": "x", "subagent_type": "explorer"}), {"text": "{{last_result}}"}]})
    container.runtime = ""
    words, inside = ["--yes"], {"container": "podman", "RETINUE_DELEGATION_DIRECTORY": str(place.outbox)}
    if last != "[deep]":  # the same, said by a person
        words, inside = [*words, "--runtime", "delegated", "--delegation-directory", str(place.outbox)], {}
    armed = {} if last == "[deep]" else {"RETINUE_FAILPOINT": last}
    watcher = place.watcher()
    try:
        with container.running(
            "run", "go", "--model", "scripted:script.yaml", *words, quick=False, **inside, **armed
        ) as process:
            if not armed:
                read_until(process.stderr, last)
                process.kill()
            assert process.wait() == -signal.SIGKILL
        gate.open()
        done = container.retinue("resume", *words, **inside)
    finally:
        stop(watcher)
    assert done.returncode == 0, done.stderr
    assert '"answer":"over"' in done.stdout
    assert place.times() == 1 and {row["run"] for row in place.project.rows()} == {0, 1}
    assert os.listdir(place.outbox) == []
    endings = Counter(event["run"] for event in container.events() if event["kind"] == "run.ended")
    assert endings == {event["run"]: 1 for event in container.events() if event["kind"] == "run.spawned"}
