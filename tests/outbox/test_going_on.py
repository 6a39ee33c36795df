"""A run that a container asked for and whose watcher was killed goes on in the host's project, no wider than it was."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.outbox.kit import ask
from tests.outbox.test_kills import Place
from tests.runtime.places import needs_bubblewrap
from tests.tree.kit import spawn


@needs_bubblewrap
@pytest.mark.requirement("P32", "MASS-8")
def test_what_goes_on_reaches_no_more_and_has_no_less_of_a_wall_and_no_more_levels(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    place = Place(tmp_path)
    more = spawn({"task": "x", "subagent_type": "explorer"})
    model = place.project.script({"explorer": [more, {"text": "{{last_result}}"}]})
    file = place.project.folder / "retinue.yaml"
    file.write_text(f"model: {model}\nnetwork: [a.com]\nprofiles: {{explorer: {{runtime: inherited}}}}\n")
    watcher = place.watcher("event_written", "--runtime", "isolated", "--config", str(file))
    ask(place.outbox, "a-1", workspace=str(place.work))
    assert watcher.wait(30) == -signal.SIGKILL
    watcher.communicate()
    done = place.project.retinue("resume", "--yes", "--config", str(file))
    assert done.returncode == 0, done.stderr
    started = [event for event in place.project.events() if event["kind"] == "run.started"]
    assert {(event.get("runtime"), "proxy" in event.get("walls", ())) for event in started} == {("isolated", False)}
    assert "depth limit exceeded (0/0)" in done.stdout
