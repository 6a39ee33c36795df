"""Containers: what the host's settings may not open, which images are refused, and what a killed host leaves."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import retinue
from retinue.build.parts import Parts
from retinue.build.sandboxes import make_placement
from retinue.config.settings import load_settings
from retinue.core.errors import ConfigError
from retinue.core.events import ToolResult
from retinue.sandbox import container_image, escapes
from retinue.sandbox.builder import SandboxUnavailable
from retinue.sandbox.container import MAKER_LABEL, find_engine, name_maker, sweep_orphans
from retinue.surfaces.cli import startup
from tests.sandbox.crash_scenes import cmdline
from tests.sandbox.places import USER_SECONDS, make_image, needs_containers
from tests.supervisor.tree.kit import bodies, call, main, until
from tests.surfaces.cli.shell import until as wait_until

pytestmark = needs_containers


@pytest.fixture
def bare() -> Iterator[str]:
    """An image with nothing in it that we could use."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("file"))
    name = f"localhost/retinue-bare:{os.getpid()}"
    subprocess.run([*find_engine().argv, "import", "-", name], input=data.getvalue(), capture_output=True, check=True)
    yield name
    find_engine().call("image", "rm", name)


def test_an_image_without_our_python_is_refused(bare: str) -> None:
    with pytest.raises(ConfigError, match=rf"has no {container_image.PYTHON}.*retinue doctor --build-image"):
        make_placement(Parts(Path("/none"), image=bare)).runtime("container")


def test_an_engine_that_takes_no_image_is_ended_with_its_children(tmp_path: Path) -> None:
    script = f"sleep 300 & echo $! > '{tmp_path}/pid'; exec <&-; wait"
    with pytest.raises(SandboxUnavailable, match=r"the image cannot be made: .*Broken pipe"):
        container_image.build_image(["/bin/sh", "-c", script])
    child = int((tmp_path / "pid").read_text())
    wait_until(lambda: not cmdline(child))
    with pytest.raises(SandboxUnavailable, match="the image cannot be made: full"):
        container_image.build_image(["/bin/sh", "-c", "cat > /dev/null; echo full >&2; exit 1"])


def test_an_image_that_is_not_here_is_not_pulled() -> None:
    with pytest.raises(ConfigError, match=r"there is no image localhost/none:1 here.*retinue doctor --build-image"):
        make_placement(Parts(Path("/none"), image="localhost/none:1")).runtime("container")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become a user without subordinate user ids")
def test_missing_user_ids_are_said_before_a_missing_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """An image would not help, so nobody builds one for nothing."""
    if not find_engine().is_podman:
        pytest.skip("docker needs no subordinate user ids")
    for ids, words in (("root:1:1\n", "podman needs more user ids"), (escapes.MORE_IDS, "there is no image")):
        monkeypatch.setattr(escapes, "MORE_IDS", ids)
        done = escapes.run_as_user([sys.executable, "-m", "retinue", "doctor", "--json"], seconds=USER_SECONDS)
        [found] = [each["text"] for each in json.loads(done.stdout) if "`container`" in each["text"]]
        assert words in found, done.stderr


def test_an_image_is_built_only_where_one_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_image()
    with pytest.raises(ConfigError, match="cannot start"):
        startup._make_container_ready(Parts(tmp_path, container_flags=["--no-such-flag"]))
    assert startup.BUILDING_IMAGE not in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--privileged", "--cap-add=SYS_ADMIN", "--network=host", "--user=0", "--pid=host"])
def test_flags_of_the_host_do_not_open_the_sandbox(flag: str) -> None:
    """Refused, or without effect."""
    make_image()
    try:
        started = make_placement(Parts(Path("/none"), container_flags=[flag])).runtime("container").started
    except ConfigError as error:
        assert "protections do not work here" in str(error) or "cannot start" in str(error)
    else:
        assert {"uid", "pid", "net", "no_capabilities"} <= set(started.sandbox) or "user" in started.sandbox


async def test_a_container_is_labelled_and_its_project_may_have_any_name(tmp_path: Path) -> None:
    make_image()
    project = tmp_path / 'a, "b": c\\d'
    project.mkdir(parents=True)
    for folder in (tmp_path, tmp_path.parent, project):
        folder.chmod(0o755)
    (project / "notes").write_text("words")
    waits = call("shell", command="until [ -e go ]; do sleep 0.02; done")
    agents = {"main": [call("shell", command="pwd"), waits, {"text": "x"}]}
    async with retinue.open(mode="yes", project=project, path=project / ".retinue", runtime="container") as r:
        run = await r.spawn(main(agents, workspace="scratch"), "go")
        await until(run, ToolResult)  # the first call starts the container
        found = [
            find_engine().call("ps", "--quiet", "--filter", f"label={label}").stdout.split()
            for label in (f"retinue.tree={run.tree}", f"retinue.run={run.tree}/0", f"{MAKER_LABEL}={name_maker()}")
        ]
        (Path(r.control.trees[run.tree].runs[0].folders.path) / "go").touch()
        result = await run.result()
        events = [event async for event in run.events()]
    assert result.status == "done", result.error_details
    assert len(found[0]) == 1 and found[0] == found[1] == found[2]
    [told, _] = bodies(events, ToolResult)
    assert told.text.startswith(str(project))


def test_what_gone_processes_left_is_swept_and_nothing_else() -> None:
    make_image()
    gone = subprocess.Popen(["true"])
    gone.wait()
    numbering, _, _ = name_maker().partition(".")
    makers = {"gone": f"{numbering}.{gone.pid}.1", "ours": name_maker(), "elsewhere": f"1{numbering}.{gone.pid}.1"}
    names = {word: f"retinue-{os.getpid()}-{word}" for word in makers}
    for word, maker in makers.items():
        find_engine().call(
            "create", "--name", names[word], f"--label={MAKER_LABEL}={maker}", container_image.NAME, "sleep", "9"
        )
    try:
        sweep_orphans(find_engine())
        left = [word for word in makers if find_engine().call("container", "inspect", names[word]).returncode == 0]
        assert left == ["ours", "elsewhere"]
    finally:
        find_engine().remove(list(names.values()))


@pytest.mark.requirement("MASS-13")
def test_image_and_flags_are_settings(tmp_path: Path) -> None:
    file = tmp_path / "retinue.yaml"
    file.write_text("container_image: me/mine:1\ncontainer_flags: [--cpus=2]\n")
    settings = load_settings(file)
    assert (settings.container_image, settings.container_flags) == ("me/mine:1", ("--cpus=2",))
