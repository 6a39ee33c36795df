"""Tests of the choice of the model in real processes: `--model`, the config, RETINUE_MODEL, the only provider with a
key."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from retinue.build.models import import_provider
from retinue.concurrency import SystemClock
from retinue.config.models import PROVIDERS, explain_missing_key, find_default_model, find_install_command
from retinue.models.providers import ProviderModel
from tests.models import streams
from tests.models.server import KEY, Answer, Server, environ, refusal
from tests.surfaces.cli.shell import SOURCE, Project, one_line_error

CLAUDE, GPT = PROVIDERS
NOBODY = environ(9)  # a port where nobody listens


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path / "project")


async def run(project: Project, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """`retinue run` while this process serves."""
    return await asyncio.to_thread(project.retinue, "run", "the task", *arguments, **env)


async def test_retinue_run_on_a_real_model(project: Project) -> None:
    (project.folder / "note.txt").write_text("forty-two\n")
    answers = (
        Answer(
            streams.anthropic(streams.thinking("I read.", "sig=="), streams.tool("c1", "read", '{"path": "note.txt"}'),
                           stop="tool_use")
        ),
        streams.said("It says ", "forty-two."),
    )  # fmt: skip
    async with Server(*answers) as server:
        done = await run(project, "--model", "anthropic:claude-x", **server.environ())
    assert (done.returncode, done.stdout) == (0, "It says forty-two.\n"), done.stderr
    assert "I read." in done.stderr
    assert "forty-two" in json.dumps(server.requests[1].body["messages"][-1])
    assert KEY not in done.stderr
    kept = b"".join(file.read_bytes() for file in (project.folder / ".retinue").rglob("*") if file.is_file())
    assert b"sig==" in kept and KEY.encode() not in kept


async def test_the_only_provider_with_a_key_is_the_default(project: Project) -> None:
    async with Server(streams.said("ok")) as server:
        done = await run(project, **{**server.environ(), "OPENAI_API_KEY": ""})
    assert done.returncode == 0, done.stderr
    assert [request.body["model"] for request in server.requests] == [CLAUDE.default.partition(":")[2]]


@pytest.mark.parametrize(("given", "wins"), [(1, "variable"), (2, "config"), (3, "option")])
def test_the_order(project: Project, given: int, wins: str) -> None:
    """Each is heard before those that come first here, and before a provider's key."""
    said = {name: project.script({"main": [name]}, name=f"{name}.yaml") for name in ("variable", "config", "option")}
    if given >= 2:
        (project.folder / "retinue.yaml").write_text(f"model: {said['config']}\n")
    option = ["--model", said["option"]] if given == 3 else []
    done = project.retinue("run", "the task", *option, **NOBODY, RETINUE_MODEL=said["variable"])
    assert (done.returncode, done.stdout) == (0, f"{wins}\n"), done.stderr


def test_the_environment_alone() -> None:
    assert find_default_model({}) is None
    assert find_default_model({CLAUDE.key: "k"}) == CLAUDE.default
    assert find_default_model({GPT.key: "k", CLAUDE.key: " "}) == GPT.default
    assert find_default_model({GPT.key: "k", CLAUDE.key: "k"}) is None
    assert find_default_model({GPT.key: "k", CLAUDE.key: "k", "RETINUE_MODEL": "a:b"}) == "a:b"


@pytest.mark.parametrize("keys", [{}, {CLAUDE.key: KEY, GPT.key: KEY}])
def test_no_model_names_all_four_ways(project: Project, keys: dict[str, str]) -> None:
    said = one_line_error(project.retinue("run", "x", **keys))
    for way in ("--model", "'model: MODEL' in ", "RETINUE_MODEL", CLAUDE.key, GPT.key):
        assert way in said
    assert KEY not in said
    assert ("are set, so none is the default" in said) == bool(keys)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("anthropic:", "unknown model 'anthropic:'"),
        ("nobody:x", "unknown model 'nobody:x'"),
        ("anthropic:x", "ANTHROPIC_API_KEY"),
        ("cohere:x", "needs a package that is not installed: "),
    ],
)
def test_a_model_that_cannot_be(project: Project, model: str, said: str) -> None:
    assert said in one_line_error(project.retinue("run", "x", "--model", model))


def test_a_missing_package_is_one_line_with_its_command(project: Project, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['anthropic'] = None\n")
    env = {**NOBODY, "PYTHONPATH": f"{tmp_path}:{SOURCE}"}
    said = one_line_error(project.retinue("run", "x", "--model", "anthropic:x", **env))
    command = f"{sys.executable} -m pip install 'pydantic-ai-slim[anthropic]'"
    assert said == f"model 'anthropic:x' needs a package that is not installed: {command}"
    checked = project.retinue("doctor", **env).stdout
    assert re.search("anthropic: ANTHROPIC_API_KEY is set; .*not installed; to add it: " + re.escape(command), checked)


def test_doctor_says_which_providers_work_here(project: Project) -> None:
    done = project.doctor(**{**NOBODY, "OPENAI_API_KEY": ""})
    assert re.search("ok    provider  anthropic: ANTHROPIC_API_KEY is set; .*; default anthropic:", done.stdout)
    assert re.search("ok    provider  openai: OPENAI_API_KEY is not set; .*; default openai:", done.stdout)
    assert f"ok    model     {CLAUDE.default}" in done.stdout
    assert KEY not in done.stdout + done.stderr


def test_what_needs_nothing_more() -> None:
    assert (
        find_install_command("anthropic:x")
        == find_install_command("openai-chat:x")
        == find_install_command("groq:x")
        == ""
    )


def test_a_scripted_run_loads_no_provider(project: Project, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['pydantic_ai'] = None\n")
    done = project.run(agents={"main": ["ok"]}, PYTHONPATH=f"{tmp_path}:{SOURCE}")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.finding("U1")
def test_openrouter_needs_only_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENROUTER_API_KEY", KEY)
    assert ProviderModel("openrouter:qwen/qwen3", clock=SystemClock()).name == "openrouter:qwen/qwen3"


@pytest.mark.finding("U1")
def test_starting_the_command_loads_no_provider() -> None:
    code = "import sys, retinue.surfaces.cli.main; print([m for m in ('pydantic_ai', 'openai') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.finding("U7")
def test_a_missing_key_is_known_without_the_library() -> None:
    said = "model 'openai-chat:x': Set the `OPENAI_API_KEY` environment variable"
    assert explain_missing_key("openai-chat:x", {}) == said
    for model, environment in (
        ("openai-chat:x", {"OPENAI_API_KEY": KEY}),
        ("openai:x", {"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}),
        ("groq:x", {}),
        ("scripted:x.yaml", {}),
    ):
        assert explain_missing_key(model, environment) == ""


@pytest.mark.finding("U9")
def test_the_library_of_a_provider_is_imported_ahead_and_errors_are_left_to_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", KEY)
    for model in ("nobody:x", "nothing", "scripted:missing.yaml", "groq:x", "anthropic:claude-x"):
        import_provider(model)
    assert "pydantic_ai.models.anthropic" in sys.modules


@pytest.mark.finding("U7")
def test_a_misspelt_provider_suggests_the_right_one(project: Project) -> None:
    said = one_line_error(project.retinue("run", "x", "--model", "antropic:claude-x"))
    assert said == "unknown model 'antropic:claude-x': did you mean 'anthropic:claude-x'?"


@pytest.mark.finding("U7")
@pytest.mark.parametrize(
    ("model", "status", "words"),
    [
        ("anthropic:claude-x", 401, ("anthropic", "ANTHROPIC_API_KEY")),
        ("openai-chat:gpt-x", 401, ("openai", "OPENAI_API_KEY")),
        ("anthropic:claude-x", 403, ("anthropic", "ANTHROPIC_API_KEY")),
        ("anthropic:claude-x", 404, ("claude-x", "ANTHROPIC_BASE_URL")),
    ],
)
async def test_a_refused_key_or_model_names_provider_and_variable(
    project: Project, model: str, status: int, words: tuple[str, str]
) -> None:
    async with Server(refusal(status, "no")) as server:
        done = await run(project, "--model", model, **server.environ())
    assert done.returncode == 1
    assert all(word in done.stderr.splitlines()[-2] for word in words), done.stderr


@pytest.mark.finding("U7")
@pytest.mark.parametrize(("version", "code"), [("1.8.3", 1), ("2.28.0", 1), ("2.29.0", 0)])
def test_doctor_refuses_a_git_that_is_too_old(project: Project, tmp_path: Path, version: str, code: int) -> None:
    git = tmp_path / "bin/git"
    git.parent.mkdir()
    git.write_text(f"#!/bin/sh\necho git version {version}\n")
    git.chmod(0o755)
    done = project.retinue("doctor", PATH=f"{git.parent}:/usr/bin:/bin")
    assert (f"fail  git       git version {version}" in done.stdout) is bool(code), done.stdout


@pytest.mark.finding("U7")
def test_a_run_with_a_git_that_is_too_old_says_so(project: Project, tmp_path: Path) -> None:
    git = tmp_path / "bin/git"
    git.parent.mkdir()
    git.write_text('#!/bin/sh\necho "error: unknown option \\`object-format\'" >&2\nexit 129\n')
    git.chmod(0o755)
    model = project.script({"main": [{"tools": [{"name": "shell", "args": {"command": "ls"}}]}, {"text": "end"}]})
    words = ("run", "x", "--model", model, "--yes", "--workspace", "copy")
    done = project.retinue(*words, PATH=f"{git.parent}:/usr/bin:/bin")
    assert done.returncode == 1
    assert "; this git may be too old: `retinue doctor` checks its version" in done.stderr.splitlines()[-2]


@pytest.mark.finding("U7")
def test_doctor_fails_without_git_and_an_unknown_provider_lists_those_there_are(
    project: Project, tmp_path: Path
) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("sh", "bash"):
        (programs / name).symlink_to(f"/bin/{name}")
    done = project.retinue("doctor", PATH=str(programs))
    assert done.returncode == 1
    assert "fail  git       not found; sandboxed runs need it" in done.stdout and "-> install git" in done.stdout
    said = one_line_error(project.retinue("run", "x", "--model", "nobody:model"))
    assert said.startswith("unknown model 'nobody:model': there is no provider 'nobody'; there is anthropic, ")
    assert "ollama" in said and "openai" in said
    for wrong, meant in (("Anthropic", "anthropic"), ("olama", "ollama"), ("openia", "openai")):
        said = one_line_error(project.retinue("run", "x", "--model", f"{wrong}:m"))
        assert said == f"unknown model '{wrong}:m': did you mean '{meant}:m'?"
