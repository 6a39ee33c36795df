"""The package as users get it: installed as a tool into an environment of its own, away from the checkout."""

import ast
import asyncio
import os
import re
import shlex
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from retinue.installation import make_install_command
from tests.models import streams
from tests.models.server import Answer, Server

ROOT = Path(__file__).parents[2]
HELLO = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{}}}\n'


PROVIDERS = [("anthropic:claude-x", streams.said("from Anthropic"))]
MORE_PROVIDERS = [  # in the soak: a new environment compiles the SDK of each first
    ("openai-chat:gpt-x", Answer(streams.chat(content=["from OpenAI"]))),
    ("ollama:qwen3", Answer(streams.chat(content=["from Ollama"]))),
]


@pytest.mark.finding("U1")
@pytest.mark.parametrize(
    "providers", [PROVIDERS, pytest.param(MORE_PROVIDERS, marks=pytest.mark.soak)], ids=["anthropic", "openai"]
)
async def test_uv_tool_install_gives_a_working_command(tmp_path: Path, providers: list[tuple[str, Answer]]) -> None:
    environment = {**os.environ, "UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    uv = Path(sys.executable).with_name("uv")
    install = [str(uv), "tool", "install", "--quiet", "--constraints", str(ROOT / "constraints.txt"), str(ROOT)]
    subprocess.run(install, env=environment, check=True, capture_output=True)
    empty, home = tmp_path / "empty", tmp_path / "home"
    empty.mkdir()
    home.mkdir()
    command = str(tmp_path / "bin" / "retinue")
    done = subprocess.run(
        [command, "demo", "--fast", "--quiet"],
        cwd=empty,
        env={"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout
    assert list(empty.iterdir()) == []
    python = str(tmp_path / "tools" / "retinue" / "bin" / "python")
    for model, answer in providers:
        async with Server(answer) as server:
            asked = await asyncio.create_subprocess_exec(
                command, "run", "hello", "--model", model, "--runtime", "inherited", "--quiet",
                cwd=empty, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(tmp_path), **server.environ()},
            )  # fmt: skip
            said, errors = await asked.communicate()
        assert (asked.returncode, said.startswith(b"from ")) == (0, True), errors.decode()
    hint = "from retinue.installation import *; print(make_install_command('some-package'))"
    done = subprocess.run([python, "-c", hint], capture_output=True, text=True, check=True)
    assert done.stdout == f"uv pip install --python {python} some-package\n"
    nothing = min(_measure_cpu([python, "-c", "import asyncio; print()"], b"", cwd=empty) for _ in range(5))
    answer = min(_measure_cpu([command, "mcp", "serve", "--model", "scripted:x"], HELLO, cwd=empty) for _ in range(5))
    assert answer < 6 * nothing


def _measure_cpu(command: list[str], given: bytes, *, cwd: Path) -> int:
    """The processor time until the first line of its output is there, however busy others keep the machine."""
    with subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(given)
        process.stdin.flush()
        assert process.stdout.readline()
        threads = Path(f"/proc/{process.pid}/task").glob("*/schedstat")
        used = sum(int(thread.read_text().split()[0]) for thread in threads)
        process.stdin.close()
    return used


def test_the_wheel_has_everything_and_no_tests(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("py.typed", "cli/demo.yaml", "subagent_types/explorer/SUBAGENT.md", "report-writing/SKILL.md"):
        assert any(name.endswith(part) for name in names), part
    assert all(name.startswith(("retinue/", "retinue-")) for name in names)


OPTIONAL = {"opentelemetry", "pytest"}  # asked for before they are imported; ours only inside pytest
SAMPLE = "till"  # the demo's project


@pytest.mark.finding("U1")
def test_every_imported_library_comes_with_the_documented_install() -> None:
    """A lazy import, such as Markdown for the first answer on a terminal, fails only when it is reached."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    installed: set[tuple[str, str]] = set()
    for line in declared:
        _collect_requirements(Requirement(line), installed)
    names = {name for name, _ in installed}
    homes = metadata.packages_distributions()
    imported = {name for path in ROOT.glob("src/retinue/**/*.py") for name in _read_imports(path)}
    foreign = imported - sys.stdlib_module_names - OPTIONAL - {"retinue", SAMPLE}
    assert {"rich", "markdown_it", "msgspec"} < foreign
    assert [name for name in sorted(foreign) if not names & {canonicalize_name(home) for home in homes[name]}] == []


def _collect_requirements(wanted: Requirement, found: set[tuple[str, str]]) -> None:
    """Add a requirement with its extras, and everything that it requires, as (distribution, extra)."""
    name = canonicalize_name(wanted.name)
    for extra in {"", *wanted.extras} - {extra for each, extra in found if each == name}:
        found.add((name, extra))
        for line in metadata.requires(name) or ():
            inner = Requirement(line)
            if inner.marker is None or inner.marker.evaluate({"extra": extra}):
                _collect_requirements(inner, found)


def _read_imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (each.name.partition(".")[0] for each in names)
            case ast.ImportFrom(module=str(module), level=0):
                yield module.partition(".")[0]


@pytest.mark.finding("U1")
def test_hints_fit_the_installer_and_never_name_our_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = shlex.quote(sys.executable)
    assert make_install_command("a[b]>=1", "c") == f"{python} -m pip install 'a[b]>=1' c"
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "retinue"))
    (tmp_path / "retinue").mkdir()
    (tmp_path / "retinue" / "uv-receipt.toml").touch()
    assert make_install_command("c") == f"uv pip install --python {python} c"
    (tmp_path / "retinue" / "uv-receipt.toml").unlink()
    (tmp_path / "retinue" / "pipx_metadata.json").touch()
    assert make_install_command("c") == "pipx inject retinue c"  # the name of the environment, not of a package


@pytest.mark.finding("U1")
def test_no_text_tells_anybody_to_install_us_from_the_index() -> None:
    """The name is not ours there. Installs are from a checkout: `.` or a path."""
    texts = [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]
    pattern = re.compile(r"(?:pip|pipx|uv|uvx)\b[^\n]*\b(?:install|add|run|uvx)\s+(?:--?\S+\s+)*['\"]?retinue\b")
    assert [path.name for path in texts if pattern.search(path.read_text())] == []
