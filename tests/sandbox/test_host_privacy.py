"""Without a sandbox a command is the same user as the host; it still cannot read the host's environment. In a sandbox
it does not learn from the list of processes how the sandbox was made."""

import os
import subprocess
from pathlib import Path

import pytest

from retinue.sandbox.bubblewrap import probe_bubblewrap
from retinue.sandbox.builder import make_probe_box
from tests.sandbox.places import needs_bubblewrap
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


@needs_bubblewrap
def test_the_command_lines_inside_bubblewrap_name_no_mount_of_the_host() -> None:
    with make_probe_box() as (box, secret):
        prepared = probe_bubblewrap().prepare(box, ["/bin/sh", "-c", "cat /proc/[0-9]*/cmdline"])
        seen = subprocess.check_output(prepared.argv, env=dict(prepared.env), pass_fds=prepared.fds)
        prepared.discard()
    assert b"bwrap" in seen
    assert b"bind" not in seen
    assert os.fsencode(Path(secret).parent) not in seen
