"""The package as users get it: installed as a tool into an environment of its own, away from the checkout."""

import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
HELLO = b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":"2025-11-25","capabilities":{}}}\n'


def test_uv_tool_install_gives_a_working_command(tmp_path: Path) -> None:
    environment = {**os.environ, "UV_TOOL_DIR": str(tmp_path / "tools"), "UV_TOOL_BIN_DIR": str(tmp_path / "bin")}
    uv = Path(sys.executable).with_name("uv")
    install = [str(uv), "tool", "install", "--quiet", "--constraints", str(ROOT / "constraints.txt"), str(ROOT)]
    subprocess.run(install, env=environment, check=True, capture_output=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    command = str(tmp_path / "bin" / "retinue")
    done = subprocess.run(
        [command, "demo", "--fast", "--quiet"],
        cwd=empty,
        env={"PATH": os.environ["PATH"], "HOME": str(empty), "TMPDIR": str(tmp_path)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "OK" in done.stdout
    assert list(empty.iterdir()) == []
    python = str(tmp_path / "tools" / "retinue" / "bin" / "python")
    nothing = min(_seconds([python, "-c", "import asyncio; print()"], b"", cwd=empty) for _ in range(5))
    answer = min(_seconds([command, "mcp", "serve", "--model", "scripted:x"], HELLO, cwd=empty) for _ in range(5))
    assert answer < 6 * nothing


def _seconds(command: list[str], given: bytes, *, cwd: Path) -> float:
    """Until the first line of its output is there."""
    begun = time.perf_counter()
    with subprocess.Popen(
        command, cwd=cwd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(given)
        process.stdin.flush()
        assert process.stdout.readline()
        took = time.perf_counter() - begun
        process.stdin.close()
    return took


def test_the_wheel_has_everything_and_no_tests(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("py.typed", "cli/demo.yaml", "subagent_types/explorer/SUBAGENT.md", "report-writing/SKILL.md"):
        assert any(name.endswith(part) for name in names), part
    assert all(name.startswith(("retinue/", "retinue-")) for name in names)
