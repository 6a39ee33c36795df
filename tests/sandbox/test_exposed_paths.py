"""Tests of the paths shown to a program in a sandbox, and of the errors about paths that are not."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from retinue import Profile
from retinue.build.parts import Parts
from retinue.core.events import ToolResult
from retinue.core.messages import Call, Reply
from retinue.core.profiles import RuntimeName
from retinue.sandbox.exposed_paths import find_needed_paths
from retinue.sandbox.hints import find_image_hint, find_offline_hint, find_program_hint
from tests.sandbox.places import make_image, needs_bubblewrap, needs_containers
from tests.sandbox.test_network import play
from tests.supervisor.tree.kit import bodies, call, main, spawn


def program(path: Path, text: str = "#!/bin/sh\necho made\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("there", "shown"),
    [
        ({"home/.nvm/versions/node/v22/bin/node": ""}, ["home/.nvm/versions/node/v22"]),
        ({"opt/go/bin/node": ""}, ["opt/go"]),
        ({"opt/tools/node": ""}, ["opt/tools"]),
        ({"home/.local/bin/node": ""}, ["home/.local/bin/node"]),
        ({"home/.local/share/uv/tools/x/bin/node": "", "home/.local/bin/node": "../share/uv/tools/x/bin/node"},
         ["home/.local/share/uv/tools/x"]),
        ({"home/.cargo/bin/node": ""}, ["home/.cargo/bin/node"]),
        ({"home/bin/node": ""}, ["home/bin/node"]),
        ({"home/miniconda3/bin/node": ""}, ["home/miniconda3"]),
        ({"home/node": ""}, ["home/node"]),
        ({"home/.pyenv/shims/node": "", "home/.pyenv/version": "2.1\n", "home/.pyenv/versions/2.1/bin/node": "",
          "home/.pyenv/versions/3/bin/node": ""}, ["home/.pyenv/versions/2.1"]),
        ({"home/.pyenv/shims/node": "", "home/.pyenv/version": "2.1\n", "home/.pyenv/versions/2.1/bin/node": "",
          "home/.pyenv/versions/3/bin/node": "", "project/.python-version": "3\n"}, ["home/.pyenv/versions/3"]),
        ({"home/.cargo/bin/rustup": "", "home/.cargo/bin/node": "rustup", "home/.rustup/toolchains/x/bin/node": "",
          "home/.rustup/settings.toml": 'default_toolchain = "x"\n'}, ["home/.rustup/toolchains/x"]),
        ({"home/.cargo/bin/rustup": "", "home/.cargo/bin/node": "rustup"}, ["home/.cargo/bin/rustup"]),
        ({"project/.venv/pyvenv.cfg": "home = BASE/opt/python/bin\nversion = 3\n", "opt/python/bin/python": ""},
         ["project/.venv", "opt/python"]),
        ({"project/.venv/pyvenv.cfg": "home = BASE/home/secrets/bin\n", "home/secrets/bin/key": ""}, []),
        ({}, []),
    ],
)  # fmt: skip
def test_what_shows_a_program(tmp_path: Path, there: dict[str, str], shown: list[str]) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "home").mkdir()
    folders = []
    for name, text in there.items():
        path = tmp_path / name
        if path.name == "node" and text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.symlink_to(text)
        else:
            program(path, text.replace("BASE", str(tmp_path)))
        folders.append(str(path.parent))
    first = (".pyenv/shims", ".local/bin", ".cargo/bin")  # as a manager sets the PATH
    folders.sort(key=lambda folder: not folder.endswith(first))
    env = {"HOME": str(tmp_path / "home"), "PATH": ":".join([*folders, "/usr/bin"])}
    assert find_needed_paths(["node", "sh", "no-such"], tmp_path / "project", env) == [
        f"{tmp_path}/{path}" for path in shown
    ]


@pytest.mark.parametrize("target", ["home/.ssh", "home/work/run.sh"])
def test_a_link_of_the_project_that_poses_as_a_python_shows_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str
) -> None:
    """A clone may write `/proc/self/cwd` for where it is; and a folder may be entered, as a program may be run."""
    project = tmp_path / "project"
    (tmp_path / "home/.ssh").mkdir(parents=True)
    program(tmp_path / "home/work/run.sh")
    program(project / ".venv/pyvenv.cfg", "home = /proc/self/cwd/bin\n")
    (project / "bin").mkdir()
    (project / "bin/python3").symlink_to(tmp_path / target)
    monkeypatch.chdir(project)
    assert find_needed_paths([], project, {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}) == []


@pytest.mark.parametrize("target", [".", "..", ".retinue", ".retinue/runs"])
def test_an_environment_that_is_the_project_itself_or_our_state_shows_nothing(tmp_path: Path, target: str) -> None:
    project = tmp_path / "above/project"
    python = program(tmp_path / "opt/python/bin/python3")
    program(project / target / "pyvenv.cfg", f"home = {python.parent}\n")
    (project / ".venv").symlink_to(target)
    assert find_needed_paths([], project, {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin"}) == []


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("isolated", marks=needs_bubblewrap), pytest.param("container", marks=needs_containers)],
)
@pytest.mark.parametrize("exposed", [".", ".retinue"])
async def test_our_state_is_not_shown_by_a_folder_that_it_is_in(
    tmp_path: Path, runtime: RuntimeName, exposed: str
) -> None:
    if runtime == "container":
        make_image()
    tmp_path.chmod(0o755)
    (tmp_path / ".retinue").mkdir(mode=0o700)
    look = call("shell", command=f"ls '{tmp_path}/.retinue'")
    agents = {"main": [spawn({"task": "x", "subagent_type": "kid"}), {"text": "x"}], "kid": [look, {"text": "x"}]}
    parts = Parts(
        tmp_path,
        tmp_path / ".retinue",
        runtime=runtime,
        mode="yes",
        expose=[str(tmp_path / exposed)],
        profiles=[Profile("kid")],
    )
    events = await play(parts, main(agents, workspace="copy"))
    [result] = [body for body in bodies(events, ToolResult) if body.name == "shell"]
    assert result.text == "runs\n"


def test_a_file_that_never_ends_is_none(tmp_path: Path) -> None:
    (tmp_path / ".venv").mkdir()
    os.mkfifo(tmp_path / ".venv/pyvenv.cfg")
    os.mkfifo(tmp_path / ".python-version")
    assert find_needed_paths(["sh"], tmp_path, {"PATH": "/usr/bin", "HOME": str(tmp_path)}) == []


@pytest.mark.parametrize(
    "said",
    [
        "bash: line 1: {name}: command not found\n[exit code 127]",
        "sh: 1: {name}: not found",
        "/usr/bin/env: \u2018{name}\u2019: No such file or directory",
        "env: '{name}': No such file or directory",
        "make: {name}: No such file or directory\nmake: *** [Makefile:2: test] Error 127",
        "bash: ./x: {path}: bad interpreter: No such file or directory",
    ],
)
def test_a_missing_program_is_recognised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    if "interpreter" in said and " " in str(tmp_path):
        pytest.skip("the first line of a script cannot name a path with a space")
    path = program(tmp_path / "opt/bin/turner")
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin")
    text = said.format(name="turner", path=path)
    assert find_program_hint(text).startswith(f"[turner is on this machine, at {path}, but not in the sandbox")
    assert f"`expose_paths: [{tmp_path}/opt]`" in find_program_hint(text)
    assert "container_image" in find_image_hint(text)
    monkeypatch.setenv("PATH", "/usr/bin")
    assert find_program_hint(said.format(name="turner", path="/nowhere/turner")) == ""
    assert (
        find_program_hint(said.format(name="sh", path="/usr/bin/sh")) == ""
    )  # is seen in the sandbox: something else is wrong


@pytest.mark.parametrize(
    ("runtime", "words"),
    [
        pytest.param("isolated", "would show it]", marks=needs_bubblewrap),
        pytest.param("container", "but not in the image", marks=needs_containers),
    ],
)
async def test_the_model_and_the_user_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: str, words: str
) -> None:
    if runtime == "container":
        make_image()
    path = program(tmp_path / "opt/bin/turner")
    monkeypatch.setenv("PATH", f"{path.parent}:/usr/bin:/bin")
    seen: list[str] = []

    commands = ["turner", "exec 3<>/dev/tcp/example.com/443"]

    class Listening:
        name = "listening"

        async def complete(self, request: Any, on_delta: Any) -> Reply:
            seen.append(request.thread[-1].text)
            if request.turn > len(commands):
                return Reply("x")
            return Reply("", (Call(f"c{request.turn}", "shell", {"command": commands[request.turn - 1]}),))

    profile = Profile("main", model=Listening(), workspace="scratch")
    project = tmp_path / "project"
    project.mkdir()
    parts = Parts(project, mode="yes", runtime=runtime)  # type: ignore[arg-type]
    events = await play(parts, profile)
    told = [body.text for body in bodies(events, ToolResult)]
    assert words in told[0] and "[this run has no network" in told[1]
    assert seen[1:] == told
    shown = Parts(project, mode="yes", runtime=runtime, expose=[str(tmp_path / "opt")])  # type: ignore[arg-type]
    if runtime == "isolated":
        [made, _] = bodies(await play(shown, profile), ToolResult)
        assert made.text == "made\n"


def test_words_of_programs_that_have_no_network() -> None:
    for said in ("curl: (6) Could not resolve host: x", "getaddrinfo EAI_AGAIN x", "dial tcp: lookup x on 1.1.1.1:53"):
        assert find_offline_hint(f"before\n{said}\nafter")
    assert find_offline_hint("all is well") == ""


@pytest.mark.finding("X8")
def test_the_environment_of_a_project_is_read_in_one_pass(tmp_path: Path) -> None:
    program(tmp_path / ".venv/pyvenv.cfg", "home = /\0\nhome = /" + " " * 65_000 + "x")
    assert find_needed_paths([], tmp_path, {"HOME": str(tmp_path)}) == []
