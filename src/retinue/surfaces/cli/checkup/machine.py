"""Checks of the machine: Python, packages, git, a shell, the disk, sandboxes, loopback and telemetry."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from retinue import build
from retinue.control import address_files
from retinue.core.errors import RetinueError
from retinue.core.profiles import RuntimeName
from retinue.surfaces.cli.checkup.check import Check, Look
from retinue.surfaces.cli.main import get_version
from retinue.telemetry import providers

OLDEST_PYTHON = (3, 11)
MIN_FREE_BYTES = 200 * 1024 * 1024
LOOPBACK = "127.0.0.1"
SANDBOXES: tuple[RuntimeName, ...] = ("isolated", "container")
HOSTS_SHOWN = 8
FULL_NETWORK = "full: sandboxed runs have the network as this machine has it, including its own services"
NO_NETWORK = "none: sandboxed commands reach nothing; `network: [HOST, ...]` in retinue.yaml names what they may"


def check_system(look: Look) -> Iterator[Check]:
    """Check Python, this package, SQLite, git, the shell and the disk."""
    new_enough = sys.version_info >= OLDEST_PYTHON
    cure = "" if new_enough else f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    yield Check("python", "ok" if new_enough else "fail", f"{platform.python_version()} at {sys.executable}", cure)
    yield Check("retinue", "ok", f"{get_version()} at {Path(build.__file__).parents[1]}")
    yield _check_sqlite()
    yield _check_git()
    yield _check_shell()
    yield _check_disk(look.folder)


def check_sandboxes(look: Look) -> Iterator[Check]:
    """Start each sandbox and check it from inside; then say what sandboxed runs may reach."""
    try:
        parts, _ = build.load_project_parts(look.folder)
    except RetinueError:
        parts = build.Parts(look.folder)  # another check reports what is wrong with the settings
    runtimes = build.make_placement(replace(parts, fallback=None))
    for name in SANDBOXES:
        try:
            started = runtimes.runtime(name).started
        except RetinueError as error:
            yield Check("sandbox", "warn", f"runtime `{name}` is not possible here: {error}")
        else:
            yield Check("sandbox", "ok", f"runtime `{name}` works: {', '.join(started.sandbox if started else ())}")
    yield _check_network(parts.network or ())


def check_control(look: Look) -> Iterator[Check]:
    """Check that other terminals can reach a run, and list the processes that can be reached."""
    yield _check_loopback()
    live, stale = address_files.survey_addresses(look.state / "control")
    for pid in live:
        yield Check("control", "ok", f"process {pid} can be reached from here")
    if stale:
        count = f"{len(stale)} address file{'' if len(stale) == 1 else 's'}"
        left = ", ".join(str(path) for path in stale[:3])
        yield Check("control", "ok", f"{count} of dead processes, removed at the next use: {left}")


def check_telemetry(_: Look) -> Iterator[Check]:
    """Check that spans can be sent. Settings and the environment decide whether they are."""
    if not providers.is_installed():
        yield Check("telemetry", "ok", f"not installed: {providers.INSTALL}")
        return
    named = "OTEL_EXPORTER_OTLP_ENDPOINT is set" if providers.is_requested(os.environ) else "no collector is named"
    yield Check("telemetry", "ok", f"installed; {named}")


def _check_sqlite() -> Check:
    try:
        import apsw
    except ImportError as error:
        return Check("sqlite", "fail", f"apsw cannot be loaded: {error}", "pip install --force-reinstall apsw")
    return Check("sqlite", "ok", f"{apsw.sqlite_lib_version()} in apsw {apsw.apsw_version()}")


def _check_git() -> Check:
    found = shutil.which("git")
    if found is None:
        return Check("git", "warn", "not found; runs work, but there is no history to go back to", "install git")
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("git", "warn", f"{found} does not work: {error}", f"run `{found} --version` and see")
    return Check("git", "ok", f"{said.strip()} at {found}")


def _check_shell() -> Check:
    """Check the program that the tool `shell` starts."""
    found = shutil.which("bash") or shutil.which("sh")
    if found is None:
        return Check("shell", "warn", "there is no bash and no sh: the tool `shell` will fail", "install bash")
    return Check("shell", "ok", found)


def _check_disk(folder: Path) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return Check("disk", "warn", f"{folder}: {error.strerror or error}")
    text = f"{free / 1e9:.1f} GB free" if free > 1e9 else f"{free / 1e6:.0f} MB free"
    if free < MIN_FREE_BYTES:
        return Check("disk", "warn", f"{text}: a run stops when its log cannot be written", "free space; `retinue gc`")
    return Check("disk", "ok", text)


def _check_network(network: Sequence[str]) -> Check:
    if network == "full":
        return Check("network", "warn", FULL_NETWORK, "name the hosts that are needed: `network: [HOST, ...]`")
    if not network or network == "none":
        return Check("network", "ok", NO_NETWORK)
    more = f" and {len(network) - HOSTS_SHOWN} more" if len(network) > HOSTS_SHOWN else ""
    hosts = f"{', '.join(network[:HOSTS_SHOWN])}{more}"
    return Check("network", "ok", f"sandboxed commands reach these hosts through a proxy: {hosts}")


def _check_loopback() -> Check:
    """Listen on a loopback port as the control server does, and close it at once."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind((LOOPBACK, 0))
            listener.listen(1)
    except OSError as error:
        text = f"cannot listen on {LOOPBACK}: {error.strerror or error}: other terminals cannot reach runs"
        return Check("loopback", "warn", text, "runs work without it; `retinue run --no-control` drops the warning")
    return Check("loopback", "ok", f"can listen on {LOOPBACK}, so other terminals can reach a run")
