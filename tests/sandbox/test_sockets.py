"""Tests that a sandbox cannot reach a socket in a folder that its run may read."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from retinue.build.parts import Parts
from retinue.core.events import ToolResult
from retinue.core.profiles import RuntimeName
from tests.sandbox.places import make_image, needs_bubblewrap, needs_containers
from tests.sandbox.test_network import play
from tests.supervisor.tree.kit import bodies, call, main

CONNECT = (
    'python3 -c "import socket, sys\nfor p in sys.argv[1:]:\n s = socket.socket(socket.AF_UNIX)\n'
    " try: s.connect(p); print('reached')\n except OSError as e: print(e.strerror)\" {paths}"
)


def listen(path: str) -> socket.socket:
    """For everybody, as a run that root has started is another user."""
    made = socket.socket(socket.AF_UNIX)
    made.bind(path)
    made.listen()
    Path(path).chmod(0o777)
    return made


@pytest.mark.parametrize(
    "runtime",
    [pytest.param("isolated", marks=needs_bubblewrap), pytest.param("container", marks=needs_containers)],
)
@pytest.mark.parametrize("workspace", ["shared", "copy"])
async def test_a_socket_in_the_project_is_not_connected_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, runtime: RuntimeName, workspace: str
) -> None:
    if runtime == "container":
        make_image()
    for folder in (tmp_path, tmp_path.parent, tmp_path / "deep"):
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    with listen(f"{tmp_path}/deep/own.sock"), listen("relative.sock"):
        command = CONNECT.format(paths=f"{tmp_path}/deep/own.sock {tmp_path}/relative.sock")
        agents = {"main": [call("shell", command=command), {"text": "x"}]}
        parts = Parts(tmp_path, tmp_path / ".retinue", runtime=runtime, mode="yes")
        events = await play(parts, main(agents, workspace=workspace))
    [result] = bodies(events, ToolResult)
    refusal = "Connection refused\n" if workspace == "shared" else "No such file or directory\n"
    assert result.text == refusal * 2  # a run in a copy does not see the project at all
