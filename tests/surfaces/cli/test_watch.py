"""`retinue watch`, and `retinue run` in a container, as people use them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from retinue.build.parts import Parts, adapt_to_watcher
from retinue.build.project import load_project_parts
from retinue.core.profiles import Profile
from retinue.files.state_owner import claim_state_folder
from tests.control.outbox_watcher.test_kills import Place, stop
from tests.remote.outbox.kit import ask
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import call
from tests.surfaces.cli.shell import Project, one_line_error, read_until, until
from tests.surfaces.cli.test_terminal import Terminal

SPAWN = {"tools": [{"name": "spawn_subagents", "args": {"tasks": [{"task": "look", "subagent_type": "explorer"}]}}]}


@pytest.fixture
def place(tmp_path: Path) -> Place:
    tmp_path.chmod(0o755)
    return Place(tmp_path)


def container(place: Place, **settings: Any) -> Project:
    """A project in the folder that is shared."""
    project = Project(place.work / "project")
    model = project.script({"main": [SPAWN, {"text": "{{last_result}}"}]})
    (project.folder / "retinue.yaml").write_text(json.dumps({"model": model, **settings}))
    project.runtime = ""
    return project


def parts_of(project: Project, **given: Any) -> Parts:
    """Load the parts of the project with its file trusted."""
    return load_project_parts(project.folder, config=project.folder / "retinue.yaml", **given)[0]


@needs_bubblewrap
@pytest.mark.requirement("MASS-7", "MASS-52")
def test_in_a_container_with_a_folder_subagents_go_to_the_host_and_it_says_so(place: Place) -> None:
    place.script()
    (place.project.folder / "retinue.yaml").write_text("model: scripted:w.yaml\n")
    made = {"tools": [{"name": "write", "args": {"path": "made.txt", "content": "x"}}]}
    place.project.script({"explorer": [made, {"text": "found it"}]}, name="w.yaml")
    project = container(place)
    watcher = place.watcher("", "--runtime", "isolated")
    try:
        done = project.retinue("run", "go", "--yes", container="podman", RETINUE_DELEGATION_DIRECTORY=str(place.outbox))
    finally:
        code, said = stop(watcher)
    assert done.returncode == 0, done.stderr
    assert f"subagents are requested from the host through {place.outbox} (delegated)" in done.stderr
    assert '"answer":"found it"' in done.stdout and "explorer" in done.stderr
    [main, child] = [event for event in project.events() if event["kind"] == "run.started"]
    assert (main.get("runtime", "inherited"), child["runtime"]) == ("inherited", "delegated")
    assert "net" in child["sandbox"]
    assert code == 0 and "watching" in said and "made.txt" in said
    assert place.project.rows()[0]["state"] == "done" and os.listdir(place.outbox) == []


@needs_bubblewrap
@pytest.mark.requirement("MASS-2")
@pytest.mark.parametrize(
    ("mode", "primary", "child"),
    [
        (None, "isolated", "isolated"),
        ("isolated", "isolated", "isolated"),
        ("inherited", "inherited", "inherited"),
        ("delegated", "inherited", "delegated"),
    ],
)
def test_the_mode_is_one_of_three_and_a_sandbox_when_nobody_says_it(
    place: Place, mode: str | None, primary: str, child: str
) -> None:
    coordination = {"subagent_runtime_mode": mode, "subagent_delegation_directory": str(place.outbox)}
    project = container(place, orchestrator={"coordination": coordination} if mode else {})
    (project.folder / "script.yaml").write_text(
        json.dumps({"agents": {"main": [SPAWN, {"text": "over"}], "explorer": [{"text": "seen"}]}})
    )
    assert project.retinue("trust", "--yes").returncode == 0
    place.script()
    with contextlib.ExitStack() as watching:
        if mode == "delegated":
            watching.callback(stop, place.watcher("", "--runtime", "isolated"))
        done = project.retinue("run", "go", "--yes")
    assert (done.returncode, done.stdout) == (0, "over\n"), done.stderr
    started = [event for event in project.events() if event["kind"] == "run.started"]
    assert [event.get("runtime", "inherited") for event in started] == [primary, child]
    assert [bool(event.get("sandbox")) for event in started] == [primary != "inherited", child != "inherited"]


@pytest.mark.finding("S13")
@pytest.mark.requirement("MASS-7")
def test_what_a_person_has_set_goes_before_what_is_found_out(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    project = container(place)
    monkeypatch.setenv("container", "podman")
    monkeypatch.setenv("RETINUE_DELEGATION_DIRECTORY", str(place.outbox))
    assert parts_of(project).runtime == "delegated"
    for coordination in (
        {"subagent_runtime_fallback_mode": "inherited"},
        {"subagent_host_launch_prefix": ["nice"]},
        {"subagent_runtime_mode": "inherited"},
    ):
        project = container(place, orchestrator={"coordination": coordination})
        assert parts_of(project).runtime == "inherited"
    with monkeypatch.context() as elsewhere:
        elsewhere.delenv("container")
        for mark, runtime in ((place.outbox, "delegated"), (place.outbox / "none", "inherited")):  # the file of podman
            elsewhere.setattr("retinue.build.project.CONTAINER_MARKS", (str(mark),))
            assert parts_of(container(place)).runtime == runtime
    monkeypatch.delenv("RETINUE_DELEGATION_DIRECTORY")
    assert parts_of(container(place)).runtime == "inherited"
    named = container(place, orchestrator={"coordination": {"subagent_delegation_directory": "../box"}})
    parts = parts_of(named)
    assert (parts.runtime, parts.outbox) == ("delegated", named.folder / "../box")


@pytest.mark.requirement("MASS-52")
def test_the_mode_and_the_folder_are_settings_and_an_option(place: Place) -> None:
    settings = {"subagent_runtime_mode": "delegated"}
    project = container(place, orchestrator={"coordination": settings})
    assert project.retinue("trust", "--yes").returncode == 0
    assert "--delegation-directory" in one_line_error(project.retinue("run", "go", "--yes"))
    gone = project.retinue("run", "go", "--yes", "--delegation-directory", "nowhere")
    assert "cannot open the outbox" in one_line_error(gone)
    settings["subagent_delegation_directory"] = str(place.outbox)
    project = container(place, orchestrator={"coordination": settings})
    parts = parts_of(project)
    assert (parts.runtime, parts.outbox) == ("delegated", place.outbox)
    other = parts_of(project, outbox=place.work)
    assert other.outbox == place.work


@pytest.mark.requirement("MASS-8")
def test_on_the_host_what_would_be_delegated_is_isolated(tmp_path: Path) -> None:
    profiles = [Profile("a", runtime="delegated"), Profile("b", runtime="inherited"), Profile("c")]
    parts = adapt_to_watcher(Parts(tmp_path, profiles=profiles, runtime="delegated", outbox=tmp_path))
    assert (parts.runtime, parts.outbox) == ("isolated", None)
    assert [profile.runtime for profile in parts.profiles] == ["isolated", "isolated", None]


@needs_bubblewrap
@pytest.mark.requirement("MASS-8")
def test_a_profile_that_needs_no_sandbox_has_one_when_a_container_names_it(place: Place) -> None:
    place.script()
    file = place.project.folder / "retinue.yaml"
    file.write_text(f"{file.read_text()}profiles: {{explorer: {{runtime: inherited}}}}\n")
    watcher = place.watcher("", "--runtime", "isolated", "--config", str(file))
    ask(place.outbox, "a-1", workspace=str(place.work))
    try:
        until((place.outbox / "response_a-1.json").exists)
    finally:
        stop(watcher)
    [started] = [event for event in place.project.events() if event["kind"] == "run.started"]
    assert started["runtime"] == "isolated" and place.times() == 0


def test_questions_of_a_delegated_run_are_answered_on_the_host(place: Place) -> None:
    place.script()
    argv = ("watch", "--outbox", str(place.outbox), "--allow-root", str(place.work), "--runtime", "inherited")
    with place.project.running(*argv, "--wait-approvals", "200") as watcher:
        ask(place.outbox, "a-1", workspace=str(place.work))
        read_until(watcher.stderr, "◐ shell(echo once")
        until(lambda: "echo once" in place.project.retinue("approvals").stdout)
        assert place.project.rows()[0]["label"] == "a-1"
        assert place.project.retinue("approve", "--yes", "1").returncode == 0
        until((place.outbox / "response_a-1.json").exists)
    assert place.times() == 1
    assert json.loads((place.outbox / "response_a-1.json").read_bytes())["status"] == "done"


def test_questions_name_their_trees_and_each_end_is_said_once(place: Place) -> None:
    place.script()
    argv = ("watch", "--outbox", str(place.outbox), "--allow-root", str(place.work), "--runtime", "inherited")
    terminal = Terminal(place.project, *argv)
    for name in ("a-1", "b-1"):
        ask(place.outbox, name, workspace=str(place.work))
    terminal.read_until("1 more question waiting")
    terminal.read_until("[n]o > ")
    trees = {row["tree"] for row in place.project.rows()}
    [shown] = [tree for tree in trees if f"explorer · question 1 of {tree}/0" in terminal.text]
    terminal.text = ""
    terminal.type("1\n")
    terminal.read_until("[n]o > ")
    assert f"question 1 of {(trees - {shown}).pop()}/0" in terminal.text and f") of {shown}/0" in terminal.text
    terminal.type("t\n")
    terminal.read_until(f"question 1 of {shown}/0")
    terminal.read_until("has the answer")
    said = [line for line in terminal.text.splitlines() if re.search(r"\bdone(;|$)", line)]
    assert len(said) == 1 and re.fullmatch(r"[ab]-1: done; `retinue show \w+` has the answer", said[0]), said
    os.killpg(terminal.process.pid, signal.SIGINT)
    terminal.read_until(None)
    assert terminal.end() == 0


def test_words_sent_in_the_container_are_read_on_the_host(place: Place) -> None:
    go = place.outbox.parent / "go"
    model = place.project.script(
        {"explorer": [call("shell", command=f"until [ -e {go} ]; do sleep 0.05; done"), {"text": "over"}]}
    )
    (place.project.folder / "retinue.yaml").write_text(f"model: {model}\n")
    project = container(place)
    watcher = place.watcher()
    argv = ("run", "go", "--yes", "--runtime", "delegated", "--delegation-directory", str(place.outbox))
    try:
        with project.running(*argv):
            until(lambda: any(event["kind"] == "tool.call" and event["run"] == 1 for event in project.events()))
            with project.running("send", "/main/explorer-1", "left, not right", "--wait", "150") as sending:
                until(lambda: any(event["kind"] == "inbox" for event in place.project.events()))
                go.touch()
                assert sending.stdout is not None and sending.stdout.read() == "delivered at turn 2\n"
    finally:
        _, said = stop(watcher)
    assert "inbox of the side that asked" in said and "left, not right" in said
    words = [event for event in [*project.events(), *place.project.events()] if event["kind"] == "inbox"]
    assert [(each["text"], each["source"]) for each in words] == [
        ("left, not right", "user"),
        ("left, not right", "asker"),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--outbox, --allow-root"),
        (["--outbox", "."], "--allow-root"),
        (["--outbox", "nowhere", "--allow-root", "."], "cannot open the outbox nowhere"),
        (["--outbox", "box", "--allow-root", "nowhere"], "--allow-root nowhere"),
        (["--outbox", "box", "--allow-root", "/"], "not the whole machine"),
        (["--outbox", "box", "--allow-root", "."], "the container could change the settings and logs there"),
        (["--outbox", "box", "--allow-root", ".."], "run `retinue watch` in a folder that is not shared"),
        (["--outbox", ".retinue/logs", "--allow-root", "box"], "may not be in the watcher's own"),
    ],
)
def test_a_wrong_use_is_one_line(place: Place, arguments: list[str], said: str) -> None:
    place.script()
    (place.project.folder / "box").mkdir()
    claim_state_folder(place.project.folder / ".retinue")
    (place.project.folder / ".retinue" / "logs").mkdir(mode=0o700)
    runtime = ["--runtime", "inherited"] if arguments else []
    assert said in one_line_error(place.project.retinue("watch", *arguments, *runtime))


def test_without_a_model_nothing_is_watched(place: Place) -> None:
    done = place.project.retinue("watch", "--outbox", str(place.outbox), "--allow-root", str(place.work))
    assert "model" in one_line_error(done)


def test_of_runs_at_once_the_label_stands_above_what_one_of_them_says_and_nowhere_else(place: Place) -> None:
    waits = call("shell", command=f"until [ -e '{place.done}' ]; do sleep 0.02; done; echo found")
    model = place.project.script({"explorer": [waits, {"text": "over"}], "subagent": [{"hang": True}]})
    (place.project.folder / "retinue.yaml").write_text(f"model: {model}\n")
    watcher = place.watcher()
    try:
        ask(place.outbox, "a-1", workspace=str(place.work))
        read_until(watcher.stderr, "echo found")
        ask(place.outbox, "b-1", profile="subagent", workspace=str(place.work))
        read_until(watcher.stderr, "b-1: subagent runs as")
        read_until(watcher.stderr, "⚠ the network setting does not hold")  # and then it has nothing to say
        place.done.touch()
        until((place.outbox / "response_a-1.json").exists)
    finally:
        _, said = stop(watcher)
    assert said.startswith('-- a-1\n\n#### Tool "shell" result:\nfound\n') and "-- b-1" not in said
