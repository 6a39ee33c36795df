"""The Python library: `open`, `run_sync` and `Retinue`.

Installs no signal handlers, prints nothing, and reads no settings file unless `config` names one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from retinue.build.parts import Parts, add_profiles
from retinue.build.project import find_built_in_profiles, load_project_parts, render_built_in_skills
from retinue.build.servers import parse_mcp_servers
from retinue.build.supervisor import open_control
from retinue.concurrency import finish_despite_cancel
from retinue.core.approvals import check_approver
from retinue.core.context import CURRENT
from retinue.core.control import Control, ResumeOverrides, RunHandle
from retinue.core.errors import ConfigError, RetinueError, SpawnRefused
from retinue.core.limits import Limits
from retinue.core.messages import Model
from retinue.core.ports import Approver, AttachedApprover, Clock, Prices
from retinue.core.profiles import RUNTIMES, Profile, RuntimeName, Task, explain_useless_fallback
from retinue.core.results import OutputT, Result
from retinue.core.rounds import Rounds
from retinue.core.rules import Mode, Rules, parse_rule
from retinue.core.traces import Telemetry


class OpenOptions(TypedDict, total=False):
    """The options of `open` besides `path` and `model`."""

    approver: Approver | None
    mode: Mode | None
    allow: Sequence[str]
    ask: Sequence[str]
    deny: Sequence[str]
    approval_timeout: float | None
    wait_approvals: float | None
    limits: Limits | None
    context_paths: Sequence[str | Path]
    profiles: Sequence[Profile]
    project: str | Path | None
    config: str | Path | None
    clock: Clock | None
    prices: Prices | None
    telemetry: bool | Telemetry
    network: Sequence[str] | None
    runtime: RuntimeName | None
    fallback: RuntimeName | None
    outbox: str | Path | None
    mcp_servers: Mapping[str, Mapping[str, Any]] | None


class Retinue:
    """A session that runs any number of trees on one log.

    Created by `open` and entered with `async with`. Leaving it cancels all runs that have not ended."""

    def __init__(self, parts: Callable[[], Parts]) -> None:
        self._parts = parts
        self._control: Control | None = None
        self._known: frozenset[str] = frozenset()

    async def __aenter__(self) -> Self:
        parts = self._parts()
        self._known = frozenset(profile.name.casefold() for profile in parts.profiles)
        self._control = open_control(parts)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._control is not None:
            await finish_despite_cancel(self._control.close())

    @property
    def control(self) -> Control:
        """Return the Control, with every command on runs: send, cancel, pending, answer, watch and more."""
        if self._control is None:
            raise RetinueError("this Retinue is not open: use `async with retinue.open(...) as r:`")
        return self._control

    async def spawn(
        self,
        profile: Profile[OutputT] | str,
        task: str | Task,
        *,
        context_paths: Sequence[str] = (),
        limits: Limits | None = None,
        rounds: Rounds | None = None,
    ) -> RunHandle[OutputT]:
        """Start a primary run in a new tree.

        `profile` may be the name of a profile of the project, of `open(profiles=...)`, or of a built-in one. With
        `rounds` the run answers several times; before each answer but the first, an evaluator judges those so far.
        Raises ConfigError for a wrong profile, model or path."""
        if isinstance(task, Task) and (context_paths or rounds is not None):
            raise ConfigError(f"give {'context_paths' if context_paths else 'rounds'} in the Task")
        wanted = task if isinstance(task, Task) else Task(task, context_paths=context_paths, rounds=rounds)
        control = self.control
        chosen: Profile | str = profile
        if isinstance(chosen, str) and chosen.casefold() not in self._known:
            chosen = find_built_in_profiles().get(chosen.casefold(), chosen)
        return await control.spawn(chosen, wanted, limits=limits)

    async def run(
        self,
        profile: Profile[OutputT] | str,
        task: str | Task,
        *,
        context_paths: Sequence[str] = (),
        limits: Limits | None = None,
        rounds: Rounds | None = None,
    ) -> Result[OutputT]:
        """Start a primary run and wait until it has ended.

        `Result.output()` has the output type of the profile, or is a text if the profile has none."""
        run = await self.spawn(profile, task, context_paths=context_paths, limits=limits, rounds=rounds)
        return await run.result()

    async def resume(
        self,
        tree: str,
        *,
        profiles: Sequence[Profile] = (),
        limits: Limits | None = None,
        model: str | None = None,
    ) -> RunHandle:
        """Resume a tree whose process is gone, and return its primary.

        Pass all profiles of the tree that were made in Python as `profiles`, because the log has only their names, not
        their functions and models. `limits` and `model` replace those of the tree."""
        overrides = ResumeOverrides(profiles=profiles, limits=limits or Limits(), model=model)
        return await self.control.resume(tree, overrides)

    async def continue_run(
        self,
        run: RunHandle[OutputT] | Result[OutputT] | str,
        text: str,
        *,
        profiles: Sequence[Profile] = (),
        limits: Limits | None = None,
        model: str | None = None,
    ) -> RunHandle[OutputT]:
        """Start a run that continues the conversation of an ended run with the message `text`.

        `run` may also be `TREE/N`, or `TREE` for its primary. The other parameters are those of `resume`."""
        tree, number = _parse_run(run)
        overrides = ResumeOverrides(profiles=profiles, limits=limits or Limits(), model=model)
        return await self.control.continue_run(tree, number, text, overrides)

    def as_tool(self, profile: Profile) -> Callable[[str], Awaitable[str]]:
        """Return an async function that runs `profile` on a task, as a tool for agents of any framework.

        Called inside a run of Retinue, the subagent is a child of that run. Otherwise it is a primary of its own."""

        async def subagent(task: str) -> str:
            current = CURRENT.get()
            if current is not None:
                try:
                    child = await current.spawn(profile, task)
                except SpawnRefused as refused:
                    return str(refused)
                return (await child.result()).final_response
            return (await self.run(profile, task)).final_response

        subagent.__name__ = subagent.__qualname__ = f"subagent_{profile.name}"
        subagent.__doc__ = (
            f"{profile.description or f'Hand a task to the subagent {profile.name}.'}\n\n"
            "Args:\n    task: The task or question for the subagent to handle.\n\n"
            "Returns:\n    The subagent's final response.\n"
        )
        subagent.__annotations__ = {"task": str, "return": str}
        return subagent


def _parse_run(run: RunHandle | Result | str) -> tuple[str, int]:
    if isinstance(run, RunHandle):
        return run.tree, run.number
    if isinstance(run, Result):
        return run.tree, run.run
    tree, _, number = run.partition("/")
    if not (number.isascii() and number.isdigit()) and number:
        raise ConfigError(f"{run!r} is not a run: write TREE, or TREE/N")
    return tree, int(number or 0)


def open(  # noqa: PLR0913 - the main entry point
    path: str | Path | None = None,
    *,
    approver: Approver | None = None,
    mode: Mode | None = None,
    allow: Sequence[str] = (),
    ask: Sequence[str] = (),
    deny: Sequence[str] = (),
    approval_timeout: float | None = None,
    wait_approvals: float | None = None,
    limits: Limits | None = None,
    context_paths: Sequence[str | Path] = (),
    model: str | Model | None = None,
    profiles: Sequence[Profile] = (),
    project: str | Path | None = None,
    config: str | Path | None = None,
    clock: Clock | None = None,
    prices: Prices | None = None,
    telemetry: bool | Telemetry = False,
    network: Sequence[str] | None = None,
    runtime: RuntimeName | None = None,
    fallback: RuntimeName | None = None,
    outbox: str | Path | None = None,
    mcp_servers: Mapping[str, Mapping[str, Any]] | None = None,
) -> Retinue:
    """Return a Retinue with its log in the state folder `path`, or in memory if `path` is None.

    `project` is the folder that primaries work in (default: the folder that holds `path`, else the current folder).
    `config` names a retinue.yaml to read; without it, no settings file is read. `profiles` can be spawned by name, and
    `model` is the default for profiles without a model. `limits` apply to each primary and its tree.

    Approvals: `mode` `yes` runs every tool without asking, `strict` asks for every tool of a primary, and `ask` (the
    default) asks for tools that change something. `sandboxed` is like `ask`, but does not ask about edits and commands
    of a run in its own sandboxed workspace. `allow`, `ask` and `deny` are rules such as `shell(git status*)`: a deny
    rule wins over an ask rule, that over an allow rule, and that over the mode. A question without an answer for
    `approval_timeout` seconds is denied. Without an `approver`, a run that must ask ends, unless `wait_approvals` lets
    it wait that many seconds for a call of `control.answer`.

    `prices` replaces the price library, and `clock` the system's clock, for tests. `telemetry` sends spans and metrics
    to the OpenTelemetry providers of your program or of a `Telemetry`, or without any to the collector in
    OTEL_EXPORTER_OTLP_ENDPOINT. `context_paths` are files and folders outside the project that every primary may read
    and pass on to its subagents. `network` limits the hosts that runs may reach: names such as `docs.python.org` or
    `*.example.com` (for `web_fetch`, and through a proxy for commands in a sandbox), "full", or "none" (the default).

    `runtime` is the runtime of profiles that set none: `inherited` (in this process, with your authority), `isolated`
    (a sandbox for each run), `container` (a container for each run) or `delegated` (subagents are requested from the
    host of this container, through the folder `outbox`, which `retinue watch` serves). A run whose runtime does not
    work here is refused, unless `fallback` names a laxer one. `mcp_servers` are servers whose tools runs may use, by
    name, as in retinue.yaml: `{"files": {"command": "npx", "args": [...]}}`.

    Raises ConfigError for an approver that is not `async def decide(question: Approval) -> Allow | Deny`, and for an
    unknown `runtime` or `fallback`."""
    if approver is not None:
        check_approver(approver)
    for profile in profiles:
        if not isinstance(profile, Profile):
            raise ConfigError(f"profiles: {profile!r} is not a Profile; load_profile(NAME) gives a built-in one")
    for what, name in (("runtime", runtime), ("fallback", fallback)):
        if name is not None and name not in RUNTIMES:
            raise ConfigError(f"{what}: unknown runtime {name!r}; available: {', '.join(RUNTIMES)}")

    def parts() -> Parts:
        state = None if path is None else Path(path).resolve()
        base = Path(project).resolve() if project is not None else state.parent if state is not None else Path.cwd()
        rules = Rules(None, *(tuple(map(parse_rule, texts)) for texts in (allow, ask, deny)))
        given: dict[str, Any] = {
            "state": state,
            "approver": None if approver is None else AttachedApprover(approver),
            "model": model,
            "clock": clock,
            "limits": limits,
            "prices": prices,
            "mode": mode,
            "context_paths": [str(base / path) for path in context_paths] or None,
            "telemetry": telemetry or None,
            "network": network,
            "rules": rules,
            "approval_timeout": approval_timeout,
            "wait_approvals": wait_approvals,
            "runtime": runtime,
            "fallback": fallback,
            "outbox": None if outbox is None else Path(outbox),
        }
        if fallback is not None and runtime is not None:
            own = [profile.runtime for profile in profiles if profile.runtime is not None]
            why = explain_useless_fallback(fallback, [runtime, *own])
            if why:
                raise ConfigError(f"fallback: {why}")
        servers = () if mcp_servers is None else parse_mcp_servers(mcp_servers)
        if config is not None:
            found, _ = load_project_parts(base, config=Path(config), **given)
            found = replace(found, state=state, mcp_servers=(*found.mcp_servers, *servers))
            return found if not profiles else add_profiles(found, profiles)
        set_values = {name: value for name, value in given.items() if value is not None}
        skills = render_built_in_skills
        return Parts(project=base, profiles=profiles, skills=skills, mcp_servers=servers, **set_values)

    return Retinue(parts)


def run_sync(
    profile: Profile[OutputT] | str,
    task: str | Task,
    *,
    path: str | Path | None = None,
    model: str | Model | None = None,
    **options: Unpack[OpenOptions],
) -> Result[OutputT]:
    """Run `profile` on `task` and return the result, without `async`. Also works while an event loop is running.

    `path`, `model` and `options` are those of `open`."""

    async def once() -> Result[OutputT]:
        async with open(path, model=model, **options) as r:
            return await r.run(profile, task)

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(once())
    thread = ThreadPoolExecutor(1, "retinue-run-sync")  # with an event loop of its own, because this thread has one
    try:
        return thread.submit(lambda: asyncio.run(once())).result()
    finally:
        thread.shutdown(wait=False)  # Ctrl-C does not wait for the run
