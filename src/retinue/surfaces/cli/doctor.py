"""`retinue doctor`: checks of the machine, the project and its models, which change nothing.

Looks for API keys and never shows them. Calls no provider, so only the first run shows whether a key is accepted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from retinue import build
from retinue.build.logs import LOG_LIBRARY, describe_log_library, describe_telemetry, open_log_reader
from retinue.build.models import LibraryPrices, check_model
from retinue.build.parts import Parts
from retinue.build.project import load_project_parts
from retinue.build.remote_agents import inspect_agent
from retinue.build.sandboxes import build_sandbox_image, plant_escape_attempts, probe_runtime, run_as_ordinary_user
from retinue.build.servers import inspect_servers
from retinue.build.supervisor import open_control
from retinue.config.files import exists
from retinue.config.models import PROVIDERS, Provider, find_default_model, find_install_command
from retinue.config.project import SETTINGS_FILE, Project, find_project_folder
from retinue.config.settings import find_unsandboxed, settings_schema
from retinue.control import address_files
from retinue.core.errors import ConfigError, LogError, RetinueError
from retinue.core.limits import Limits
from retinue.core.messages import Model
from retinue.core.ports import Prices
from retinue.core.profiles import DEFAULT_RUNTIME, LOCAL_TOOLS, SPAWN_TOOLS, WEB_TOOLS, Profile, RuntimeName, Task
from retinue.core.results import Result
from retinue.core.teams import Member
from retinue.core.usage import Usage
from retinue.files.reserved import STATE_FOLDER
from retinue.files.state_folder import LOG_FOLDER, STATE_FOLDERS
from retinue.files.state_owner import name_user, verify_state_folder
from retinue.files.user_key import check_user_key
from retinue.log.blocks import format_count
from retinue.surfaces.cli import output
from retinue.surfaces.cli.main import get_version
from retinue.surfaces.printer import safe

State = Literal["ok", "warn", "fail"]
OLDEST_PYTHON = (3, 11)
MIN_FREE_BYTES = 200 * 1024 * 1024
LOOPBACK = "127.0.0.1"
SANDBOXES: tuple[RuntimeName, ...] = ("isolated", "container")
HOSTS_SHOWN = 8
FULL_NETWORK = "full: sandboxed runs share the network of this machine, including its own services"
NO_NETWORK = "none: sandboxed commands reach nothing; `network: [HOST, ...]` in retinue.yaml names what they may"
WEB_TOOLS_OFF = "web_fetch and web_search are off: no host may be reached"
WEB_TOOLS_ON = "web_fetch, and web_search where the model's provider has one"
ALLOW_HOSTS = "name what may be reached: `network: [HOST, ...]` in retinue.yaml, then `retinue trust`"
FULL_AUTHORITY = (
    "runs without a sandbox work as you: a shell command that you allow can do whatever you can, "
    "also answer questions and change files outside the project ({settings})"
)
RESTRICT = "take that out of {file}, or read what you allow: --yes and mode `yes` allow everything"
NEEDED = frozenset({"pid", "mount", "net", "proxy", "no_capabilities", "no_new_privs"})
USER_SECONDS = 300.0
INDENT = " " * 16
WITHOUT_SANDBOX = "runs ask for it; one without a sandbox has your own authority: retinue run --runtime inherited"
HELD, ESCAPED, UNKNOWN = "held", "ESCAPED", "no answer"
WIDE = 11
_TRIES = '"$1" -m retinue doctor --build-image >/dev/null 2>&1; exec "$1" -m retinue doctor --escape --json'


@dataclass(frozen=True)
class Check:
    """One finding: `ok` works, `warn` works with a caveat, `fail` is something the project needs and lacks.

    `do` says exactly how to fix it."""

    name: str
    state: State
    text: str
    do: str = ""


@dataclass(frozen=True)
class CheckedProject:
    """The project to check, and its parts. If its files cannot be read, `project` is None and `error` says why."""

    folder: Path
    parts: Parts
    project: Project | None
    error: str = ""

    @property
    def state(self) -> Path:
        return self.folder / STATE_FOLDER


def configure_doctor(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON array with an object for each check")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--schema", action="store_true", help="only print the JSON schema of retinue.yaml")
    what.add_argument("--escape", action="store_true", help="try to break out of each sandbox that works here")
    what.add_argument(
        "--build-image", action="store_true", help="build the image of runtime container from this machine's own files"
    )


def execute_doctor(args: argparse.Namespace) -> int:
    """Check the installation and the project, and say how to fix what does not work.

    ok: works; warn: works, but read the note; fail: runs will not work. The exit code is 1 if something fails. Doctor
    calls no model and shows no key. It starts the MCP servers of a trusted retinue.yaml and stops them again, and reads
    the cards of its A2A agents.

    examples:
      retinue doctor
      retinue doctor --json | jq '.[] | select(.state != "ok")'
      retinue doctor --escape                     try to break out of the sandboxes; exit code 1 if anything does
      retinue doctor --schema > schema.json       for help in your editor; put this on top of retinue.yaml:
                                                  # yaml-language-server: $schema=schema.json
    """
    if args.schema and args.json:
        raise ConfigError("argument --json: not allowed with argument --schema, which is JSON")
    if args.schema:
        output.print_json(settings_schema(), indent=2)
        return 0
    if args.escape:
        return run_attempts(as_json=args.json)
    if args.build_image:
        print(build_sandbox_image())
        return 0
    folder = find_project_folder(Path.cwd())
    try:
        checked = CheckedProject(folder, *load_project_parts(folder, default_runtime=DEFAULT_RUNTIME))
    except RetinueError as error:
        checked = CheckedProject(folder, Parts(folder), None, str(error))
    checks = [(section, check) for section, find_checks in SECTIONS.items() for check in find_checks(checked)]
    if args.json:
        found = [{"section": section, **asdict(check)} for section, check in checks]
        output.print_json([{key: value for key, value in each.items() if value} for each in found])
    else:
        for _, check in checks:
            _print_line(f"{check.state:<5} {check.name:<9} {safe.escape_line(check.text)}")
            if check.do:
                _print_line(f"{INDENT}-> {safe.escape_line(check.do)}")
    return int(any(check.state == "fail" for _, check in checks))


def _print_line(line: str) -> None:
    print(safe.fold_line(line, sys.stdout, indent=INDENT))


def check_system(checked: CheckedProject) -> Iterator[Check]:
    """Check Python, this package, SQLite, git, the shell and the disk."""
    new_enough = sys.version_info >= OLDEST_PYTHON
    cure = "" if new_enough else f"install Python {'.'.join(map(str, OLDEST_PYTHON))} or newer"
    yield Check("python", "ok" if new_enough else "fail", f"{platform.python_version()} at {sys.executable}", cure)
    yield Check("retinue", "ok", f"{get_version()} at {Path(build.__file__).parents[1]}")
    yield _check_log_library()
    yield _check_git()
    yield _check_shell()
    yield _check_disk(checked.folder)


def check_sandboxes(checked: CheckedProject) -> Iterator[Check]:
    """Start each sandbox and check it from inside, then report the hosts that sandboxed runs may reach."""
    for name in SANDBOXES:
        try:
            working = probe_runtime(replace(checked.parts, fallback=None), name)
        except RetinueError as error:
            needed = name == checked.parts.runtime and checked.parts.fallback is None
            text = f"runtime `{name}` is not possible here: {error}"
            yield Check("sandbox", "fail" if needed else "warn", text, WITHOUT_SANDBOX if needed else "")
        else:
            yield Check("sandbox", "ok", f"runtime `{name}` works: {', '.join(working)}")
    yield _check_network(checked.parts.network or ())


def check_control(checked: CheckedProject) -> Iterator[Check]:
    """Check that other terminals can reach a run, and list the processes with a control server."""
    yield _check_loopback()
    live, stale = address_files.survey_addresses(checked.state)
    for address in live:
        yield Check("control", "ok", f"process {address.pid} can be reached from here")
    for path, user in address_files.list_files_of_others(checked.state):
        owner = name_user(user)
        yield Check("control", "ok", f"a process of {owner} serves here, and only {owner} can reach it: {path}")
    if stale:
        count = format_count(len(stale), "address file")
        left = ", ".join(str(path) for path in stale[:3])
        yield Check("control", "ok", f"{count} of dead processes, removed at the next use: {left}")


def check_telemetry(_: CheckedProject) -> Iterator[Check]:
    """Check that the packages for telemetry are installed. Settings and environment decide whether spans are sent."""
    yield Check("telemetry", "ok", describe_telemetry())


def _check_log_library() -> Check:
    try:
        return Check(LOG_LIBRARY, "ok", describe_log_library())
    except ConfigError as error:
        return Check(LOG_LIBRARY, "fail", str(error), "install Retinue again")


OLDEST_GIT = (2, 29)  # the first version with `git init --object-format`


def _check_git() -> Check:
    found = shutil.which("git")
    if found is None:
        return Check("git", "fail", "not found; sandboxed runs need it for their copies of the project", "install git")
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("git", "fail", f"{found} does not work: {error}", f"run `{found} --version` and see")
    version = re.search(r"(\d+)\.(\d+)", said)
    if version is None or (int(version[1]), int(version[2])) < OLDEST_GIT:
        needed = ".".join(map(str, OLDEST_GIT))
        return Check("git", "fail", f"{said.strip()} at {found} is too old", f"install git {needed} or newer")
    return Check("git", "ok", f"{said.strip()} at {found}")


def _check_shell() -> Check:
    """Check that the tool `shell` finds bash or sh."""
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


def check_files(checked: CheckedProject) -> Iterator[Check]:
    """Check the project folder, retinue.yaml and its trust, the profiles and the state folder."""
    marked = exists(checked.folder / SETTINGS_FILE)
    note = "" if marked else f" (no {SETTINGS_FILE}: defaults)"
    yield Check("project", "ok", f"{checked.folder}{note}", "" if marked else "retinue init")
    yield _check_state(checked.state)
    yield from _check_key()
    git = checked.folder / ".git"
    if os.path.lexists(git) and not os.access(git, os.R_OK | (os.X_OK if git.is_dir() else 0)):
        yield Check("project", "fail", f"{git} cannot be read, and worktrees need it", f"chmod -R u+rX {git}")
    if checked.project is None:
        yield Check("profiles", "fail", checked.error, "correct the file at this place")
        return
    if checked.project.ignored:
        ignored = ", ".join(map(str, checked.project.ignored))
        yield Check("trust", "warn", f"{SETTINGS_FILE} is not trusted; ignored: {ignored}", "retinue trust")
    for warning in checked.project.other_warnings:
        yield Check("profiles", "warn", warning, f"correct it in {SETTINGS_FILE}")
    active = [profile.name for profile in checked.project.profiles]
    others = [profile.name for profile in checked.project.all_profiles if profile.name not in active]
    left = f"; not active: {', '.join(others)}" if others else ""
    yield Check("profiles", "ok", f"{', '.join(active) or 'none'}{left}")


def check_tools(checked: CheckedProject) -> Iterator[Check]:
    """List the built-in tools, and check the tools that need a reachable host."""
    if checked.project is None:
        return  # `check_files` reports the error in the settings
    network = checked.parts.network
    has_network = bool(network) and network != "none"
    yield Check("tools", "ok", ", ".join((*LOCAL_TOOLS, *SPAWN_TOOLS)))
    yield Check("tools", "ok", WEB_TOOLS_ON if has_network else WEB_TOOLS_OFF)
    for profile in checked.project.all_profiles:
        wanted = [name for name in profile.tools or () if name in WEB_TOOLS]
        if wanted and not has_network:
            text = f"profile '{profile.name}' names {' and '.join(wanted)}, which cannot work: no host may be reached"
            yield Check("tools", "warn", text, ALLOW_HOSTS)


def check_servers(checked: CheckedProject) -> Iterator[Check]:
    """Connect to each MCP server of the project, list its tools, and disconnect."""
    if checked.project is None or not checked.project.settings.mcp_servers:
        return
    for report in asyncio.run(inspect_servers(checked.project.settings.mcp_servers, checked.folder)):
        if report.error:
            cure = f"correct mcp_servers.{report.name}, or try it by hand: {report.words}"
            yield Check("mcp", "fail", f"{report.name}: {report.error}", cure)
            continue
        tools = format_count(report.tools, "tool")
        yield Check("mcp", "ok", f"{report.name}: {tools}, MCP {report.revision} ({report.words})")
        for note in report.notes:
            yield Check("mcp", "warn", f"{report.name}: {note}")


def check_agents(checked: CheckedProject) -> Iterator[Check]:
    """Fetch the card of each A2A agent that the project names."""
    agents = () if checked.project is None else checked.project.settings.a2a_agents
    for agent in agents:
        name, remote = agent.name, agent.a2a
        assert remote is not None
        try:
            report = asyncio.run(inspect_agent(remote))
        except RetinueError as error:
            cure = f"start it, or correct a2a_agents.{name}; try it by hand: retinue a2a call {remote.url} TEXT"
            yield Check("a2a", "fail", f"{name}: {error}", cure)
            continue
        kind = "another retinue" if report.is_retinue else "an A2A agent"
        yield Check("a2a", "ok", f"{name}: {kind}, {', '.join(report.protocols)} ({remote.url})")
        for note in report.notes:
            yield Check("a2a", "warn", f"{name}: {note}", f"correct a2a_agents.{name} in {SETTINGS_FILE}")


def check_authority(checked: CheckedProject) -> Iterator[Check]:
    """Warn if a setting in force lets runs work with the user's own authority."""
    settings = None if checked.project is None else checked.project.settings
    found = [] if settings is None else [f"`{each}`" for each in find_unsandboxed(settings)]
    if settings is not None and found:
        text = FULL_AUTHORITY.format(settings=", ".join(found))
        yield Check("authority", "warn", text, RESTRICT.format(file=settings.file))


def check_logs(checked: CheckedProject) -> Iterator[Check]:
    """Check that each log can be read, is not damaged and has a supported version."""
    try:
        log = open_log_reader(checked.state)
    except (ConfigError, ImportError):
        return  # `check_files` reports the error in the state folder, `check_system` that of the library
    problems: list[LogError] = []
    try:
        found = asyncio.run(log.check_health(problems.append))
    except RetinueError as error:
        yield Check("logs", "fail", str(error), f"see that you can read {log.location}")
        return
    for problem in problems:
        yield Check("logs", "fail", str(problem), log.cure)
    if found:
        yield Check("logs", "ok", found)


def _check_state(state: Path) -> Check:
    """Check that the state folder can be written, without creating it. The first run creates it."""
    try:
        verify_state_folder(state)
    except ConfigError as error:
        return Check("state", "fail", str(error))
    there = next(folder for folder in (state, *state.parents) if os.path.lexists(folder))
    if not there.is_dir():
        return Check("state", "fail", f"{there} is not a folder", f"move {there} away")
    for folder in (there, *(state / name for name in STATE_FOLDERS)):
        if folder.is_dir() and not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
            # The folders that exist in it can still be used.
            is_usable = folder == state and (state / LOG_FOLDER).is_dir()
            cure = f"chmod u+rwx {folder}, or work in another folder"
            return Check("state", "warn" if is_usable else "fail", f"{folder} cannot be written", cure)
    return Check("state", "ok", f"{state} " + ("can be written" if there == state else "will be made by the first run"))


def _check_key() -> Iterator[Check]:
    """Report a problem with the user's key file, without which no state folder can be used."""
    try:
        check_user_key()
    except ConfigError as error:
        yield Check("key", "fail", str(error))


def check_models(checked: CheckedProject) -> Iterator[Check]:
    prices = LibraryPrices()
    for provider in PROVIDERS:
        yield _check_provider(provider)
    if checked.project is None:
        return
    chosen = checked.project.settings.model or find_default_model(os.environ)
    if chosen is None:
        yield _check_missing()
    for model, limits in _list_models(checked.project, chosen).items():
        yield from _check_model(checked, model, limits, prices)


def _check_provider(provider: Provider) -> Check:
    key = f"{provider.key} is {'set' if provider.has_key(os.environ) else 'not set'}"
    if address := os.environ.get(provider.address):
        key += f"; {provider.address} is set, so requests go to {_hide_login(address)}"
    if not provider.is_installed():
        command = find_install_command(provider.default)
        wanted = provider.has_key(os.environ)
        text = f"{provider.name}: {key}; not installed; to add it: {command}"
        return Check("provider", "warn" if wanted else "ok", text, command if wanted else "")
    return Check("provider", "ok", f"{provider.name}: {key}; default {provider.default}")


def _hide_login(address: str) -> str:
    """Return an address without a user, a password and a query."""
    return re.sub(r"(?<=//)[^/@]*@|[?#].*", "", address)


def _check_missing() -> Check:
    keys = [provider.key for provider in PROVIDERS if provider.has_key(os.environ)]
    why = f"{' and '.join(keys)} are set, so none is the default" if keys else "no key is set"
    do = f"give --model MODEL, or write 'model: MODEL' in {SETTINGS_FILE}" + ("" if keys else ", or set a key")
    return Check("model", "warn", f"none is set ({why}); scripted:FILE is available without a key", do)


def _list_models(project: Project, chosen: str | None) -> dict[str, list[Limits]]:
    """Return the models that this project uses, each with the limits that apply to it."""
    found: dict[str, list[Limits]] = {} if chosen is None else {chosen: [project.settings.limits]}
    for profile in project.profiles:
        model = profile.model or chosen
        if isinstance(model, str):
            found.setdefault(model, []).extend((project.settings.limits, profile.limits))
    for member in _list_members(project):
        found.setdefault(str(member.model), []).append(project.settings.limits)
    return found


def _list_members(project: Project) -> Iterator[Member]:
    """Yield the members of all teams."""
    teams = project.settings.coordination.subagent_orchestrator
    if teams.enabled:
        yield from (*teams.agents, *project.settings.subagent_agents)
        yield from (member for profile in project.profiles for member in profile.subagent_agents)


def _check_model(checked: CheckedProject, model: str, limits: list[Limits], prices: Prices) -> Iterator[Check]:
    try:
        check_model(model, checked.folder)
    except RetinueError as error:
        yield Check("model", "fail", str(error), _find_cure(model))
        return
    yield Check("model", "ok", model)
    if model.startswith("scripted:"):
        known = True
    else:
        known = prices.price(model, Usage(input_tokens=1, output_tokens=1)) is not None
        yield Check("price", "ok", f"of {model}: {'known' if known else 'unknown, so its cost is not counted'}")
    if not known and any(isinstance(limit.cost, Decimal) for limit in limits):
        do = f"limit tokens instead, or take a model whose price is known: {PROVIDERS[0].default}"
        yield Check("price", "fail", f"a cost limit is set, and the price of {model} is unknown: runs are refused", do)


def _find_cure(model: str) -> str:
    provider = next((one for one in PROVIDERS if model.partition(":")[0].startswith(one.name)), None)
    if provider is None or provider.has_key(os.environ):
        return find_install_command(model) or f"correct 'model:' in {SETTINGS_FILE}"
    return find_install_command(model) or f"export {provider.key}=..."


# `--escape`: try to break out of each sandbox that works here, and show which attempts were stopped. A scripted model
# gives a sandboxed run the commands. The first command checks that the sandbox works. If it does not, the model stops
# there, so no attempt ever runs without a sandbox.


class NotTried(RetinueError):
    """The error for a sandbox that does not work, in which nothing was tried."""


def run_attempts(*, as_json: bool) -> int:
    """Try to escape from each sandbox and print the table. Return 1 if an attempt succeeded or no sandbox works."""
    columns, reasons = try_sandboxes()
    if os.geteuid() == 0:
        told, why = _try_as_ordinary_user()
        columns |= told
        reasons += why
    if as_json:
        output.print_json({"tries": columns, "not_tried": reasons})
    else:
        print_table(columns, reasons)
    found = [told for column in columns.values() for told in column.values()]
    return int(not found or any(told != HELD for told in found))


def try_sandboxes() -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the outcome of each attempt by sandbox, and the reasons why other sandboxes were not tried."""
    who = "root" if os.geteuid() == 0 else "user"
    columns: dict[str, dict[str, str]] = {}
    reasons = []
    for runtime in SANDBOXES:
        try:
            escaped = asyncio.run(try_all(runtime))
        except RetinueError as error:
            reasons.append(f"{runtime}, by {who}: {error}")
            continue
        columns[f"{runtime}, by {who}"] = {
            name: UNKNOWN if out is None else ESCAPED if out else HELD for name, out in escaped.items()
        }
    return columns, reasons


def _try_as_ordinary_user() -> tuple[dict[str, dict[str, str]], list[str]]:
    """Return the results of `try_sandboxes`, run as an ordinary user."""
    try:
        done = run_as_ordinary_user(["/bin/sh", "-c", _TRIES, "sh", sys.executable], seconds=USER_SECONDS)
        told = json.loads(done.stdout)
        return told["tries"], told["not_tried"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        return {}, [f"by an ordinary user: {type(error).__name__}: {error}"]


def print_table(columns: Mapping[str, Mapping[str, str]], reasons: list[str]) -> None:
    tries = list(dict.fromkeys(name for column in columns.values() for name in column))
    wide = max(map(len, tries), default=0)
    if columns:
        for row in zip(*(title.split(", ") for title in columns), strict=True):
            print(f"{'':<{wide}}  " + "".join(f"{word:<{WIDE}}" for word in row).rstrip())
        for name in tries:
            told = (column.get(name, UNKNOWN) for column in columns.values())
            print(f"{name:<{wide}}  " + "".join(f"{word:<{WIDE}}" for word in told).rstrip())
        answers = [told for column in columns.values() for told in column.values()]
        counts = ", ".join(f"{answers.count(word)} {word}" for word in (HELD, ESCAPED, UNKNOWN) if word in answers)
        print(f"{len(answers)} tries from inside {len(columns)} sandboxes: {counts}")
    for reason in reasons:
        print(f"not tried: {safe.escape_line(reason)}")


async def try_all(runtime: RuntimeName) -> dict[str, bool | None]:
    """Return for each attempt whether it escaped from the sandbox `runtime`; None if it gave no answer.

    Raises NotTried if the sandbox does not work, and ConfigError if it cannot be built here."""
    if runtime not in SANDBOXES:
        raise NotTried(f"runtime {runtime!r} is not a sandbox")
    with plant_escape_attempts(runtime) as (made, parts):
        sandbox = probe_runtime(parts, runtime, proxied=True)
        if not set(sandbox) >= NEEDED:
            raise NotTried(f"only these of its parts work: {', '.join(sandbox)}")
        result = await play(parts, made.model)
        if not made.model.stands:
            raise NotTried(f"the check inside the sandbox failed ({result.error_details or made.model.said})")
        escaped: dict[str, bool | None] = made.list_escapes(result.status)
        return escaped


async def play(parts: Parts, model: Model) -> Result[Any]:
    control = open_control(parts)
    try:
        profile = Profile("escape", "", model=model, tools=["shell"], workspace="scratch")
        run = await control.spawn(profile, Task("Get out."))
        return await run.result()
    finally:
        await control.close()


SECTIONS: dict[str, Callable[[CheckedProject], Iterator[Check]]] = {
    "system": check_system,
    "sandboxes": check_sandboxes,
    "files": check_files,
    "tools": check_tools,
    "models": check_models,
    "servers": check_servers,
    "agents": check_agents,
    "telemetry": check_telemetry,
    "control": check_control,
    "logs": check_logs,
    "authority": check_authority,
}
