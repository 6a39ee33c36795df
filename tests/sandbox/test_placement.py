"""Tests of the choice of a run's runtime, and of runtimes that are missing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import ConfigError, Profile
from retinue.build.parts import Parts
from retinue.build.project import load_project_parts
from retinue.build.sandboxes import make_placement
from retinue.core.events import RunStarted, ToolResult
from retinue.core.plans import Plan, Runtime
from retinue.core.profiles import RuntimeName
from retinue.sandbox.builder import SandboxUnavailable, find_system_program
from retinue.sandbox.in_process import IN_PROCESS, InProcess
from retinue.sandbox.placement import Placement
from retinue.testing import scripted
from tests.sandbox.places import ROOT, needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree

SCRIPT = "agents: {main: [{text: hello}]}\n"
WITHOUT = [
    "bwrap",
    "--dev-bind",
    "/",
    "/",
    "--ro-bind",
    "/dev/null",
    find_system_program("bwrap") or "/usr/bin/bwrap",
    "--",
]
without_bubblewrap = pytest.mark.skipif(
    not ROOT or find_system_program("bwrap") is None, reason="root hides bubblewrap from it"
)


class Sandboxed(InProcess):
    """Stands for a stricter runtime."""

    name = "isolated"
    started = RunStarted("isolated", ("paper",))


def placed(mode: RuntimeName = "inherited", fallback: RuntimeName | None = None, *, sandbox: bool = True) -> Placement:
    def make(name: RuntimeName, _: object) -> Runtime:
        if name == "isolated" and not sandbox:
            raise SandboxUnavailable("install paper")
        return Sandboxed() if name == "isolated" else InProcess()

    return Placement(make, mode=mode, fallback=fallback)


@pytest.mark.requirement("MASS-6", "P32")
def test_a_child_is_never_sandboxed_less_than_its_parent() -> None:
    place = placed()
    strict, laxest_runtime, _ = place(Profile("a", runtime="isolated"), None)
    parent = Plan(profile=Profile("main"), runtime=IN_PROCESS, laxest_runtime=laxest_runtime)
    assert strict.name == "isolated"
    for asked in (None, "inherited", "isolated"):
        runtime, below, _ = place(Profile("b", runtime=asked), parent)  # type: ignore[arg-type]
        assert (runtime.name, below) == ("isolated", "isolated")


@pytest.mark.parametrize("asked", [None, "inherited", "isolated"])
def test_a_profile_whose_agent_is_elsewhere_is_placed_there(asked: Any) -> None:
    there = Sandboxed()
    place = Placement(
        lambda *_: IN_PROCESS, mode="inherited", find_remote=lambda profile: there if profile.name == "away" else None
    )
    runtime, below, notes = place(Profile("away", runtime=asked), None)
    assert runtime is there and (below, notes) == (asked or "inherited", ())


@pytest.mark.finding("S13")
@pytest.mark.requirement("MASS-6")
async def test_an_inherited_child_runs_where_its_parent_does(tmp_path: Path) -> None:
    look = call("shell", command="echo $PPID; readlink /proc/self/ns/mnt")
    script = {"main": [look, spawn({"task": "x", "subagent_id": "x"}), "end"], "x": [look, "end"]}
    _, events = await tree(script, path=tmp_path / ".retinue", runtime="inherited")
    [own, *_], [child] = bodies(events, ToolResult, run=0), bodies(events, ToolResult, run=1)
    assert own.text == child.text == f"{os.getpid()}\n{os.readlink('/proc/self/ns/mnt')}\n"


def test_a_callable_stays_with_the_host_and_its_children_do_not() -> None:
    async def work(task: str, ctx: object) -> str:
        return task

    runtime, laxest_runtime, _ = placed("isolated")(Profile("a", call=work), None)
    assert (runtime.name, laxest_runtime) == ("inherited", "isolated")


@pytest.mark.requirement("MASS-4")
def test_a_sandbox_that_cannot_be_built_refuses() -> None:
    with pytest.raises(ConfigError, match="install paper"):
        placed("isolated", sandbox=False)(Profile("a"), None)


def test_a_fallback_is_laxer_or_none() -> None:
    with pytest.raises(ConfigError, match="install paper"):
        placed("isolated", "isolated", sandbox=False)(Profile("a"), None)


@pytest.mark.requirement("MASS-5", "MASS-55")
def test_a_fallback_is_told_in_the_result_and_in_what_a_parent_reads_of_its_subagent(tmp_path: Path) -> None:
    script = tmp_path / "play.py"
    script.write_text(
        "import json, retinue\nfrom retinue.testing import scripted\n"
        "step = {'tools': [{'name': 'spawn_subagents', 'args': {'tasks': [{'task': 'x'}]}}]}\n"
        "model = scripted({'main': [step, {'text': '{{last_result}}'}], '*': [{'text': 'hello'}]})\n"
        "profile = retinue.Profile('main', model=model)\n"
        "result = retinue.run_sync(profile, 'go', runtime='isolated', fallback='inherited')\n"
        "facts = result.status, result.runtime, result.sandbox, result.warning, result.final_response\n"
        "print(json.dumps(facts))\n"
    )
    if not ROOT or find_system_program("bwrap") is None:
        pytest.skip("root hides bubblewrap from it")
    done = subprocess.run([*WITHOUT, sys.executable, str(script)], capture_output=True, text=True, check=True)
    *place, warning, reply = json.loads(done.stdout)
    assert place == ["done", "inherited", []]
    [subagent] = json.loads(reply)["results"]
    for text in (warning, subagent["warning"]):
        assert text.startswith("'isolated' is not possible here") and "apt-get install bubblewrap" in text


@without_bubblewrap
@pytest.mark.requirement("MASS-4")
def test_run_says_what_to_install_and_calls_no_model(tmp_path: Path) -> None:
    (tmp_path / "s.yaml").write_text(SCRIPT)
    argv = [sys.executable, "-m", "retinue", "run", "go", "--model", "scripted:s.yaml", "--runtime", "isolated"]
    done = subprocess.run([*WITHOUT, *argv], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "bubblewrap is not installed: apt-get install bubblewrap" in done.stderr
    assert "--runtime inherited" in done.stderr and "Traceback" not in done.stderr
    assert not list((tmp_path / ".retinue" / "logs").glob("*.db"))


@without_bubblewrap
@pytest.mark.finding("U7")
def test_doctor_fails_if_the_sandbox_that_runs_ask_for_cannot_be_built(tmp_path: Path) -> None:
    argv = [*WITHOUT, sys.executable, "-m", "retinue", "doctor", "--json"]
    (tmp_path / "s.yaml").write_text(SCRIPT)
    for settings, state in (("", "fail"), ("orchestrator: {coordination: {subagent_runtime_mode: inherited}}", "warn")):
        (tmp_path / "retinue.yaml").write_text(f"model: scripted:s.yaml\n{settings}\n")
        subprocess.run(
            [sys.executable, "-m", "retinue", "trust", "--yes"], cwd=tmp_path, capture_output=True, check=True
        )
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        first = next(check for check in json.loads(done.stdout) if check["name"] == "sandbox")
        assert (first["state"], done.returncode) == (state, int(state == "fail")), done.stdout


@needs_bubblewrap
async def test_the_mode_is_a_setting_and_the_result_says_which_sandbox_stood(tmp_path: Path) -> None:
    """A run that only talks starts no sandbox: none stood."""
    tmp_path.chmod(0o755)
    (tmp_path / "s.yaml").write_text("agents: {main: [{text: hello}]}\n")
    look = scripted({"main": [call("glob", pattern="*"), "hello"]})
    config = tmp_path / "retinue.yaml"
    config.write_text("model: scripted:s.yaml\norchestrator: {coordination: {subagent_runtime_mode: isolated}}\n")
    async with retinue.open(project=tmp_path, config=config) as r:
        run = await r.spawn(Profile("main"), "go")
        talked, result = await run.result(), await r.run(Profile("main", model=look), "go")
        [started] = [event.body async for event in run.events() if isinstance(event.body, RunStarted)]
    assert (talked.status, talked.runtime, talked.sandbox) == ("done", "isolated", ())
    assert (result.status, result.runtime, result.sandbox) == ("done", "isolated", started.sandbox)
    assert {"pid", "mount", "net", "seccomp", "rlimits"} <= set(result.sandbox)
    assert result.to_json()["sandbox"] == result.sandbox


@pytest.mark.finding("S12")
@pytest.mark.requirement("MASS-3")
@pytest.mark.parametrize(
    ("mode", "fallback", "said"),
    [
        ("inherited", "inherited", "it has no effect with runtime 'inherited', which needs no sandbox: leave it out"),
        ("inherited", "isolated", "it has no effect with runtime 'inherited', which needs no sandbox: leave it out"),
        (
            "isolated",
            "isolated",
            "'isolated' is not laxer than the runtime 'isolated', so it has no effect: use inherited",
        ),
        ("isolated", "container", "'container' is not laxer than the runtime 'isolated'"),
        ("null", "isolated", "'isolated' is not laxer than the runtime 'isolated'"),
        ("container", "delegated", "subagent_runtime_fallback_mode"),
        ("isolated", "inherited", ""),
        ("null", "inherited", ""),
        ("container", "isolated", ""),
    ],
)
def test_a_fallback_is_accepted_only_where_it_can_take_effect(
    tmp_path: Path, mode: str, fallback: str, said: str
) -> None:
    keys = f"subagent_runtime_mode: {mode}, subagent_runtime_fallback_mode: {fallback}"
    (tmp_path / "retinue.yaml").write_text(f"orchestrator: {{coordination: {{{keys}}}}}\n")
    if not said:
        parts, _ = load_project_parts(tmp_path, config=tmp_path / "retinue.yaml")
        assert parts.fallback == fallback
        return
    with pytest.raises(ConfigError) as caught:
        load_project_parts(tmp_path, config=tmp_path / "retinue.yaml")
    assert said in str(caught.value) and "retinue.yaml:1" in str(caught.value)


@pytest.mark.finding("S12")
def test_a_fallback_of_the_library_is_accepted_only_where_it_can_take_effect() -> None:
    with pytest.raises(ConfigError, match="it has no effect with runtime 'inherited'"):
        retinue.run_sync(Profile("main"), "go", runtime="inherited", fallback="inherited")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("orchestrator: {coordination: {subagent_runtime_mode: moon}}", "subagent_runtime_mode"),
        ("orchestrator: {coordination: {subagent_runtime_fallback_mode: 3}}", "got a number"),
        ("expose_paths: [relative]", "must be an absolute path"),
        ("expose_paths: [/]", "it has everything in it"),
    ],
)
def test_wrong_settings_are_named(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "retinue.yaml").write_text(text + "\n")
    with pytest.raises(ConfigError, match="retinue") as caught:
        load_project_parts(tmp_path, config=tmp_path / "retinue.yaml")
    assert said in str(caught.value)


@needs_bubblewrap
async def test_an_exposed_path_is_read_and_not_written(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path.parent):
        folder.chmod(0o755)
    shown = tmp_path / "toolchain"
    shown.mkdir()
    (shown / "hello").write_text("#!/bin/sh\necho tool\n")
    (shown / "hello").chmod(0o755)
    parts = Parts(tmp_path / "none", expose=[str(shown)])
    assert make_placement(parts).runtime("isolated").started.sandbox
    agents = {"main": [call("shell", command=f"'{shown}/hello'; : >> '{shown}/hello'"), {"text": "x"}]}
    (tmp_path / "retinue.yaml").write_text(f"expose_paths: [{shown}]\n")
    _, events = await tree(agents, runtime="isolated", config=tmp_path / "retinue.yaml", project=tmp_path)
    [result] = bodies(events, ToolResult)
    assert result.text.startswith("tool\n") and ("Read-only" in result.text or "Permission denied" in result.text)


@needs_bubblewrap
async def test_a_command_that_the_sandbox_does_not_show_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mytool").write_text("#!/bin/sh\necho here\n")
    (tmp_path / "mytool").chmod(0o755)
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{tmp_path}")
    agents = {"main": [call("shell", command="mytool"), call("shell", command="no-such-tool"), {"text": "x"}]}
    _, events = await tree(agents, runtime="isolated")
    ours, nobodys = (result.text for result in bodies(events, ToolResult))
    assert f"`expose_paths: [{tmp_path}]` in the user's retinue.yaml would show it" in ours
    assert "not found" in nobodys and "expose_paths" not in nobodys


@needs_bubblewrap
@pytest.mark.requirement("MASS-3")
async def test_a_launch_prefix_stands_before_the_command_of_every_sandboxed_run(tmp_path: Path) -> None:
    config = tmp_path / "retinue.yaml"
    config.write_text("orchestrator: {coordination: {subagent_host_launch_prefix: [nice, -n, '7']}}\n")
    agents = {"main": [call("shell", command="nice"), {"text": "x"}]}
    _, events = await tree(agents, runtime="isolated", config=config, project=tmp_path)
    [result] = bodies(events, ToolResult)
    assert result.text == f"{min(19, os.nice(0) + 7)}\n"
    config.write_text("orchestrator: {coordination: {subagent_host_launch_prefix: [/no/such/program]}}\n")
    with pytest.raises(ConfigError, match="bubblewrap"):
        await tree(agents, runtime="isolated", config=config, project=tmp_path)


@needs_bubblewrap
async def test_an_inherited_parent_may_have_a_sandboxed_child() -> None:
    child = Profile("child", model=scripted({"child": [{"text": "in"}]}), runtime="isolated")
    result, events = await _with_child(child)
    started = {event.run: event.body.runtime for event in events if isinstance(event.body, RunStarted)}
    assert started == {0: "inherited", 1: "isolated"}
    assert result.children[0].final_response == "in"


async def _with_child(child: Profile) -> tuple[retinue.Result[object], list[retinue.Event]]:
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main({"main": [call("subagent_child", task="go"), {"text": "out"}]}, tools=[child]), "go")
        events = [event async for event in run.events()]
        return await run.result(), events


@pytest.mark.skipif(not ROOT, reason="others are not another user's affair")
@needs_bubblewrap
async def test_a_folder_that_only_root_may_read_is_told_and_stays_closed(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    (tmp_path / "notes.txt").write_text("private")
    agents = {"main": [call("shell", command=f"cat '{tmp_path}/notes.txt'"), {"text": "x"}]}
    async with retinue.open(mode="yes", project=tmp_path, runtime="isolated") as r:
        run = await r.spawn(main(agents, workspace="scratch"), "go")
        events = [event async for event in run.events()]
        result = await run.result()
    [told] = bodies(events, ToolResult)
    assert "Permission denied" in told.text and "private" not in told.text
    assert result.warning is not None and f"may not read {tmp_path}" in result.warning
    assert tmp_path.stat().st_mode & 0o777 == 0o700
