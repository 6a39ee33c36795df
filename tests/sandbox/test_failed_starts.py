"""A sandbox that cannot be started leaves nothing behind. The folders of the self-check do not depend on the umask."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue.core.events import RunEnded, ToolResult
from retinue.core.limits import ResourceLimits
from retinue.protocol import tool_server
from retinue.sandbox import bubblewrap, builder, cgroups
from retinue.sandbox.box import Box
from retinue.sandbox.bubblewrap import Bubblewrap, probe_bubblewrap
from retinue.sandbox.builder import SandboxUnavailable, make_probe_box
from retinue.sandbox.process import PreparedSandbox, Process
from tests.gates import limit_calls
from tests.sandbox import test_hostile
from tests.sandbox.crash_scenes import remains
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import bodies, call


def list_descriptors() -> list[str]:
    return sorted(os.listdir("/proc/self/fd"))


def list_remains(before: Collection[str] = ()) -> list[str]:
    """List what was left since `before`. The monitor of a container of an earlier test may still be about to end."""
    return [line for line in remains() if line not in before]


@contextmanager
def limit_descriptors(more: int) -> Iterator[None]:
    """Let this process open only so many descriptors more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list_descriptors()) - 1 + more, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.fixture
def no_gaps() -> Iterator[None]:
    """Fill the gaps between the open descriptors, so that their number is also the lowest free one."""
    highest = max(map(int, list_descriptors()))
    filled = []
    while (fd := os.open("/dev/null", os.O_RDONLY)) < highest:
        filled.append(fd)
    os.close(fd)
    yield
    for fd in filled:
        os.close(fd)


def prepare(argv: list[str]) -> PreparedSandbox:
    reading, writing = os.pipe()
    os.close(writing)
    parents = cgroups.find_parent_groups()
    group = None if parents is None else cgroups.make_group(parents, ResourceLimits())
    return PreparedSandbox(argv, {}, fds=[reading], info=os.memfd_create("info"), group=group)


@pytest.mark.parametrize(("argv", "error"), [(["/bin/true", "a\0b"], ValueError), (["/nowhere"], OSError)])
async def test_a_command_that_cannot_be_started_leaves_nothing(
    argv: list[str], error: type[Exception], tmp_path: Path
) -> None:
    before, earlier = list_descriptors(), remains()
    process = Process(prepare(argv), tmp_path / "log")
    with pytest.raises(error):
        process.start()
    assert (list_descriptors(), list_remains(earlier)) == (before, [])


async def test_a_start_without_enough_descriptors_leaves_nothing(tmp_path: Path, no_gaps: None) -> None:
    before, earlier = list_descriptors(), remains()
    for more in range(8):  # three pipes, and the pipe of the start itself
        process = Process(prepare(["/bin/true"]), tmp_path / "log")
        with limit_descriptors(more), pytest.raises(OSError):
            process.start()
        assert (list_descriptors(), list_remains(earlier)) == (before, [])


@needs_bubblewrap
def test_preparing_without_enough_descriptors_leaves_nothing(tmp_path: Path, no_gaps: None) -> None:
    tmp_path.chmod(0o755)
    paths = [tmp_path / name for name in ("workspace", "outputs", "host_outputs", "hidden")]
    for path in paths:
        path.mkdir()
    work, outputs, host_outputs, hidden = map(str, paths)
    box = Box("t", work, True, outputs, host_outputs, (), hidden, ResourceLimits())
    builder = probe_bubblewrap()
    earlier = remains()
    builder.prepare(box).discard()
    before, prepared, failures = list_descriptors(), None, 0
    while prepared is None:
        with limit_descriptors(failures):
            try:
                prepared = builder.prepare(box)
            except OSError:
                failures += 1
        if prepared is None:
            assert (list_descriptors(), list_remains(earlier)) == (before, [])
    prepared.discard()
    assert failures >= 8  # at each file of /etc, the filter, the options and both descriptors of `info`
    assert (list_descriptors(), list_remains(earlier)) == (before, [])


@needs_bubblewrap
def test_discarding_a_sandbox_does_not_wait_for_a_process_in_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "REMOVE_SECONDS", 1000.0)
    prepared = prepare(["/bin/true"])
    if prepared.group is None:
        pytest.skip("needs control groups")
    with subprocess.Popen(["sleep", "1000"]) as process:
        for procs in prepared.group.procs:
            Path(procs).write_text(str(process.pid))
        try:
            with limit_calls(200):  # waiting asks again and again
                prepared.discard()  # as the event loop does
            assert process.poll() is None and not prepared.group.remove()
        finally:
            process.kill()
    prepared.group.remove_soon()
    assert prepared.group.remove()


async def test_an_outputs_folder_that_vanishes_at_the_start_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Removing(test_hostile.NoProtection):
        def prepare(self, box: Box) -> PreparedSandbox:
            shutil.rmtree(box.outputs)
            return super().prepare(box)

    earlier = remains()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(test_hostile, "NoProtection", Removing)
    script = test_hostile.CALLED + "say(Accepted(call.id), ResultFrame(call.id, 'fine', True)); rest()"
    replies: list[Any] = [call("shell", command="true"), {"text": "over"}]
    events, builder = await test_hostile.play(script, replies=replies)
    assert [body.text for body in bodies(events, ToolResult)] == ["fine"]
    assert (bodies(events, RunEnded)[0].status, builder.starts, list_remains(earlier)) == ("done", 1, [])


async def test_a_start_frame_that_cannot_be_sent_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = remains()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool_server, "FRAME_BYTES", 300)  # less than any start frame has
    events, builder = await test_hostile.play(test_hostile.SERVES, replies=[test_hostile.ECHO, {"text": "over"}])
    [result] = bodies(events, ToolResult)
    assert not result.success and "a frame of" in result.text
    assert (bodies(events, RunEnded)[0].status, builder.starts, list_remains(earlier)) == ("done", 1, [])


@needs_bubblewrap
def test_the_self_check_finds_that_our_state_is_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bubblewrap, "_list_masks", lambda *_: [])
    with pytest.raises(SandboxUnavailable, match=r"these protections do not work here: mount$"):
        Bubblewrap("bwrap").check_protections()


@needs_bubblewrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes have a user of their own")
def test_a_package_that_the_user_of_a_sandbox_cannot_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = Path(shutil.copytree(Path(retinue.__file__).parent, tmp_path / "retinue"))
    closed.chmod(0o700)
    for module in (builder, bubblewrap):
        monkeypatch.setattr(module, "list_packages", lambda: [(str(closed), "retinue")])
    with pytest.raises(SandboxUnavailable, match=f"Permission denied; .*: chmod -R o\\+rX {closed}$"):
        Bubblewrap("bwrap").check_protections()


@needs_bubblewrap
def test_a_self_check_that_fails_is_not_taken_for_one_that_cannot_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its traceback names the file of the self-check too."""
    list_mounts = Bubblewrap._list_mounts

    def list_without_proc(self: Bubblewrap, box: Box) -> dict[str, list[str]]:
        return {path: options for path, options in list_mounts(self, box).items() if path != "/proc"}

    monkeypatch.setattr(Bubblewrap, "_list_mounts", list_without_proc)
    with pytest.raises(SandboxUnavailable) as raised:
        Bubblewrap("bwrap").check_protections()
    text = str(raised.value)
    assert "Traceback" in text and "self_check.py" in text and "chmod" not in text


@pytest.mark.parametrize(("uid", "reason", "advice"), [
    (0, "[Errno 13] Permission denied", "chmod -R o+rX"),
    (0, "[Errno 2] No such file or directory", ""),
    (1000, "[Errno 13] Permission denied", "user namespaces"),
])  # fmt: skip
def test_only_root_is_advised_to_open_the_package_and_only_if_it_is_closed(
    uid: int, reason: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    said = f"python3: can't open file '{builder.LIBRARY}/retinue/sandbox/self_check.py': {reason}\n"
    text = bubblewrap._explain_failure(said)
    assert advice in text and ("chmod" in text) == ("chmod" in advice)


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o277])
def test_the_folders_of_the_self_check_do_not_depend_on_the_umask(mask: int) -> None:
    before = os.umask(mask)
    try:
        with make_probe_box() as (box, secret):
            shown = [Path(secret).parents[1], Path(secret).parent, Path(box.workspace), Path(box.outputs)]
            assert [path.stat().st_mode & 0o777 for path in shown] == [0o755] * 4
    finally:
        os.umask(before)
