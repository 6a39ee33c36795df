"""The container sandbox, run by the command line of podman or docker. Image and flags are settings of the host.

The tool server is mounted read-only next to the image's own Python, which must match our minor version and machine. The
host's flags come before ours, so that ours win. The result is checked from inside as well.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import msgspec

from retinue.concurrency import start_task
from retinue.core.limits import ResourceLimits
from retinue.processes.group import is_alive
from retinue.sandbox.box import Box
from retinue.sandbox.builder import (
    BOOT,
    SERVE,
    SHARED_BYTES,
    TEMPORARY_BYTES,
    Bind,
    SandboxBuilder,
    SandboxUnavailable,
    SelfCheck,
    find_system_program,
    make_environment,
    make_probe_box,
)
from retinue.sandbox.cgroups import OUT_OF_MEMORY_CODE
from retinue.sandbox.container_image import NAME, PYTHON
from retinue.sandbox.hints import find_image_hint
from retinue.sandbox.process import REAP_SECONDS, PreparedSandbox, Process

ENGINES = ("podman", "docker")
BUILD = "`retinue doctor --build-image` makes one of this machine's own files"
NEEDS_IDS = (
    "podman needs more user ids for you: "
    "sudo usermod --add-subuids 100000-165535 --add-subgids 100000-165535 $USER; podman system migrate"
)
TUN = "/dev/net/tun"
PROBE_SECONDS = 60.0
# Labels identify our containers, so that exactly these can be ended, even after the process that started them died.
TREE_LABEL, RUN_LABEL, MAKER_LABEL = "retinue.tree", "retinue.run", "retinue.maker"
REMOVE_SECONDS = 10.0
KILL_AGAIN_SECONDS = 0.2
# The environment variables for the engine's own program. None of them is passed inside.
CLIENT = ("PATH", "HOME", "USER", "LANG", "TMPDIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME", "XDG_DATA_HOME")
CLIENT_PREFIXES = ("DOCKER_", "CONTAINER_", "CONTAINERS_", "LC_")
PROXIES = ("http_proxy", "https_proxy", "ftp_proxy", "all_proxy", "no_proxy")
# The import of the tool server fails in an image that does not fit.
_CHECK = "import retinue.sandbox.tool_server, retinue.sandbox.self_check as check; check.print_findings()"
_ENTER = BOOT + "from retinue.sandbox.container_init import run_first_process; run_first_process(); "


@dataclass(frozen=True)
class Engine:
    """The podman or docker program, with the options that precede every command."""

    argv: tuple[str, ...]

    @property
    def is_podman(self) -> bool:
        return Path(self.argv[0]).name == "podman"

    def lacks_user_ids(self) -> bool:
        """Return True if podman has one user id only: that of an ordinary user without subordinate ids."""
        done = self.call("unshare", "cat", "/proc/self/uid_map") if self.is_podman and os.geteuid() else None
        return done is not None and done.returncode == 0 and len(done.stdout.splitlines()) == 1

    def remove(self, names: Sequence[str]) -> None:
        """End these containers at once, in any state. Uses one call per container, so that a missing name has no
        effect."""
        for name in names:
            self.call("rm", "--force", *(["--time=0"] if self.is_podman else []), name, seconds=REMOVE_SECONDS)

    def call(self, *arguments: str, seconds: float = PROBE_SECONDS) -> subprocess.CompletedProcess[str]:
        """Run an engine command and return its output. Raises SandboxUnavailable if the command cannot run or times
        out."""
        try:
            return subprocess.run(
                [*self.argv, *arguments],
                env=make_client_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SandboxUnavailable(f"{self.argv[0]} cannot be used: {error}") from None


def make_client_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in CLIENT or name.startswith(CLIENT_PREFIXES)}


class ContainerProcess(Process):
    """The engine's program, which lives as long as its container.

    It forwards a SIGTERM to all processes inside, but only the engine can kill them."""

    _killing: asyncio.Task[None] | None = None

    def _has_used_up_memory(self) -> bool:
        return self._group.process.poll() == OUT_OF_MEMORY_CODE

    def _list_processes(self) -> Iterator[int]:
        yield self._group.pid

    def _kill(self) -> None:
        if self._killing is None and not self._has_exited:
            self._killing = start_task(self._kill_all())

    async def _kill_all(self) -> None:
        """Kill the container repeatedly until it is gone. A container that is just being created is not found at
        first."""
        assert self._prepared.kill is not None
        deadline = self._loop.time() + REAP_SECONDS
        while self._loop.time() < deadline:
            with suppress(SandboxUnavailable):  # retry if the engine does not answer
                await asyncio.to_thread(self._prepared.kill)
            if await self._is_gone_within(KILL_AGAIN_SECONDS):
                return
        self._group.process.kill()

    async def _release_resources(self) -> None:
        if self._killing is not None:
            await self._killing
        await super()._release_resources()


class Containers(SandboxBuilder):
    """The builder of `container` sandboxes, all from one image. `probe_containers` creates it."""

    name = "container"
    process = ContainerProcess
    find_hint = staticmethod(find_image_hint)

    def __init__(
        self,
        engine: Engine,
        image: str,
        *,
        flags: Sequence[str] = (),
        expose: Sequence[str] = (),
        full_network: bool = False,
    ) -> None:
        super().__init__(expose=expose, full_network=full_network)
        self._engine, self._image, self._flags = engine, image, tuple(flags)

    def prepare(self, box: Box) -> PreparedSandbox:
        return self._prepare_program(box, [_ENTER + SERVE], "--interactive")

    def _prepare_program(self, box: Box, code: Sequence[str], *options: str) -> PreparedSandbox:
        user = self._give_to_user(box)
        environment = make_environment(box)
        labels = [f"{RUN_LABEL}={box.tree}/{box.run}", f"{MAKER_LABEL}={name_maker()}"]
        argv = [
            *[*self._engine.argv, "run", *self._flags, *options],
            *["--name", f"retinue-{os.getpid()}-{secrets.token_hex(6)}"],
            *[f"--label={label}" for label in (f"{TREE_LABEL}={box.tree}", *labels)],
            *_CLOSED,
            *([] if self._full_network else ["--network=none"]),
            *(_PODMAN if self._engine.is_podman else _DOCKER),
            *self._list_user_options(user),
            *_list_limits(box.resource_limits),
            *[f"--env={key}={value}" for key, value in environment.items() if key != "PATH"],
            *self._list_mounts(box),
            *["--entrypoint", PYTHON, self._image, "-I", "-S", "-c", *code],
        ]
        return PreparedSandbox(
            argv,
            make_client_environment(),
            user=user,
            kill=lambda: self._engine.remove(_find_containers(self._engine, *labels)),
            cwd=str(Path(box.outputs).parent),  # podman's monitor writes a file there when memory runs out
        )

    def _list_user_options(self, user: tuple[int, int] | None) -> list[str]:
        if user is not None:
            return [f"--user={user[0]}:{user[1]}"]
        own = [f"--user={os.getuid()}:{os.getgid()}"]
        return ["--userns=keep-id", *own] if self._engine.is_podman else own

    def _list_mounts(self, box: Box) -> list[str]:
        binds = self._list_binds(box)
        for number, mask in enumerate(self._list_masks(box)):
            folder = Path(box.outputs).parent / "masks" / str(number)
            _make_mask(folder, mask, binds)
            binds[mask] = Bind(str(folder))
        return [
            word
            for path in sorted(binds, key=lambda path: path.count("/"))
            for word in ("--mount", self._format_bind(path, binds[path]))
        ]

    def _format_bind(self, path: str, bind: Bind) -> str:
        """Return the option for one mount. Quotes a field with a comma or a quote in it.

        The mount is not recursive, because mounts below it would stay writable."""
        fields = ["type=bind", f"src={bind.source}", f"dst={path}"]
        fields += [] if bind.writable else ["readonly"]
        fields += ["bind-nonrecursive=true"] if self._engine.is_podman else []
        return ",".join('"{}"'.format(each.replace('"', '""')) if set(each) & set(',"\n') else each for each in fields)

    def check_protections(self) -> None:
        """Run the self-check inside a container and set `protections`. Raises SandboxUnavailable if one fails."""
        with make_probe_box() as (box, secret):
            prepared = self._prepare_program(box, [_ENTER + _CHECK, secret, box.host_outputs])
            seen = self._run_self_check(prepared)
        if seen.machine != platform.machine():
            raise ImageUnusable(
                f"{self._image} is for {seen.machine}, and this machine is {platform.machine()}; {BUILD}"
            )
        missing = [] if seen.filters_calls else ["seccomp"]
        self.counts_memory = 0 < seen.memory_limit <= box.resource_limits.memory
        engine = self._engine.argv[0]
        whose = ["uid"] if prepared.user else ["user"] if self._engine.is_podman else []
        first = [Path(engine).name, *whose]
        self._set_protections(seen, prepared.user, program=engine, first=first, missing=missing)

    def _run_self_check(self, prepared: PreparedSandbox) -> SelfCheck:
        done = self._engine.call(*prepared.argv[len(self._engine.argv) :])
        said = " ".join(done.stderr.split())[-300:]
        if done.returncode:  # decided by the engine's text: no code exists
            if PYTHON in said and ("not found" in said or "no such file" in said.lower()):
                raise ImageUnusable(f"{self._image} has no {PYTHON}, which the tool server is compiled for; {BUILD}")
            if "ImportError" in said or "ModuleNotFoundError" in said:
                raise ImageUnusable(f"the tool server cannot be loaded in {self._image} ({said}); {BUILD}")
            if "subuid" in said:
                raise SandboxUnavailable(NEEDS_IDS)
            if self._full_network and TUN in said:
                raise SandboxUnavailable(
                    f"podman cannot give containers the full network: without root it needs {TUN}, which you may not "
                    "open; allow it, or set 'network' to a list of hosts or to none"
                )
            raise _EngineFailed(f"{self._engine.argv[0]} cannot start {self._image}: {said or 'it said nothing'}")
        try:
            return msgspec.json.decode(done.stdout, type=SelfCheck)
        except msgspec.MsgspecError:
            raise SandboxUnavailable(f"what runs in {self._image} cannot be read") from None


class ImageUnusable(SandboxUnavailable):
    """The image is missing or does not fit this machine. A new one would help."""


class _EngineFailed(SandboxUnavailable):
    """The engine itself could not start the container."""


_CLOSED = (
    "--rm", "--pull=never", "--log-driver=none", "--ipc=private", "--cgroupns=private",
    "--cap-drop=ALL", "--security-opt=no-new-privileges", "--read-only", "--hostname=retinue", "--workdir=/",
    f"--tmpfs=/tmp:rw,exec,nosuid,nodev,mode=1777,size={TEMPORARY_BYTES}", f"--shm-size={SHARED_BYTES}",
)  # fmt: skip
_PODMAN = ("--read-only-tmpfs=false", "--http-proxy=false", "--image-volume=ignore", "--no-hosts", "--pid=private")
_DOCKER = tuple(f"--env={name}=" for proxy in PROXIES for name in (proxy, proxy.upper()))


def _make_mask(folder: Path, mask: str, binds: Mapping[str, Bind]) -> None:
    """Create an empty folder to mount over the folder `mask`, with mount points for the binds below `mask`.

    A tmpfs is not an alternative: the engine gives it the permissions of the folder it hides, and podman also copies
    the files."""
    folders = {folder.parent, folder}
    for path in binds:
        if path.startswith(f"{mask}/"):
            place = folder / path.removeprefix(f"{mask}/")
            folders |= {parent for parent in place.parents if parent.is_relative_to(folder)}
            if Path(path).is_dir():
                folders.add(place)
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                place.touch()
    for made in sorted(folders):
        made.mkdir(parents=True, exist_ok=True)
        made.chmod(0o755)


def _list_limits(resource_limits: ResourceLimits) -> list[str]:
    return [
        f"--pids-limit={resource_limits.processes}",
        f"--memory={resource_limits.memory}",
        f"--memory-swap={resource_limits.memory}",
        f"--ulimit=nofile={resource_limits.open_files}:{resource_limits.open_files}",
        f"--ulimit=nproc={resource_limits.processes}:{resource_limits.processes}",
        "--ulimit=core=0:0",
    ]


def find_engine() -> Engine:
    """Return podman, or docker if there is no podman. Raises SandboxUnavailable if neither is installed."""
    for name in ENGINES:
        program = find_system_program(name)
        if program is not None:
            return Engine((program,))
    raise SandboxUnavailable(
        "neither podman nor docker is installed: apt-get install podman (or dnf, pacman, zypper, brew)"
    )


@cache
def probe_containers(
    *, image: str = NAME, flags: tuple[str, ...] = (), expose: tuple[str, ...] = (), full_network: bool = False
) -> Containers:
    """Return a builder after a self-check inside a container. Runs once per process.

    Removes the containers that ended processes left first. Raises SandboxUnavailable with the package to install or
    the setting to change."""
    found = find_engine()
    sweep_orphans(found)
    if found.call("image", "inspect", image).returncode:
        if found.lacks_user_ids():  # the self-check would find it, but only with an image
            raise SandboxUnavailable(NEEDS_IDS)
        pull = f"; {found.argv[0]} pull {image}, or leave out container_image" if image != NAME else ""
        raise ImageUnusable(f"there is no image {image} here{pull}; {BUILD}")
    make_builder = partial(Containers, image=image, flags=flags, expose=expose, full_network=full_network)
    builder = make_builder(found)
    try:
        builder.check_protections()
    except _EngineFailed:
        runc = find_system_program("runc")
        if not found.is_podman or runc is None:
            raise
        builder = make_builder(Engine((*found.argv, "--runtime", runc)))
        builder.check_protections()
    return builder


def name_maker() -> str:
    """Return a unique name of this process: its pid namespace, pid and start time."""
    return f"{_read_pid_namespace()}.{os.getpid()}.{_read_start_time(os.getpid())}"


def sweep_orphans(engine: Engine) -> None:
    """End the containers whose creators have exited. Skips creators in another pid namespace, which is not visible."""
    for container in _find_containers(engine, MAKER_LABEL):
        said = engine.call("inspect", "--format", f'{{{{index .Config.Labels "{MAKER_LABEL}"}}}}', container).stdout
        numbering, _, process = said.strip().partition(".")
        pid, _, began = process.partition(".")
        if numbering == _read_pid_namespace() and pid.isdigit() and _read_start_time(int(pid)) != began:
            engine.remove([container])


def _find_containers(engine: Engine, *labels: str) -> list[str]:
    filters = [word for label in labels for word in ("--filter", f"label={label}")]
    return engine.call("ps", "--all", "--quiet", "--no-trunc", *filters).stdout.split()


def _read_pid_namespace() -> str:
    """Return the pid namespace, or "host" on systems without one."""
    try:
        return str(Path("/proc/self/ns/pid").stat().st_ino)
    except OSError:
        return "host"


def _read_start_time(pid: int) -> str:
    """Return the start time of a process, or "gone" if the process does not exist."""
    try:
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return "" if not Path("/proc/self").exists() and is_alive(pid) else "gone"
