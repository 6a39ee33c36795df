"""Without a sandbox a command is the same user as the host; it still cannot read the host's environment."""

import os
from pathlib import Path

import pytest

from tests.surfaces.cli.shell import Project
from tests.workspaces.kit import shell

# Root may look into every process; without capabilities it is bound like everybody.
_POWERS = "-all"
BOUND = ["setpriv", "--bounding-set", _POWERS, "--inh-caps", _POWERS] if os.geteuid() == 0 else []
LOOK = 'p=$PPID; cat "/proc/$p/environ" > seen; ls -l "/proc/$p/fd" > files; head -c 1 "/proc/$p/mem" > memory; true'


@pytest.mark.finding("X7")
def test_a_command_of_an_inherited_run_cannot_read_the_host_s_environment(tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    project.prefix = BOUND
    done = project.run("--yes", agents={"main": [shell(LOOK), "end"]}, ANTHROPIC_API_KEY="the-key-of-the-user")
    assert done.returncode == 0, done.stderr
    assert (project.folder / "seen").read_bytes() == b""
    assert (project.folder / "memory").read_bytes() == b""
    assert "->" not in (project.folder / "files").read_text()
