"""The package as users get it: installed as a tool into an environment of its own, away from the checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


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


def test_the_wheel_has_everything_and_no_tests(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for part in ("py.typed", "cli/demo.yaml", "subagent_types/explorer/SUBAGENT.md", "report-writing/SKILL.md"):
        assert any(name.endswith(part) for name in names), part
    assert all(name.startswith(("retinue/", "retinue-")) for name in names)
