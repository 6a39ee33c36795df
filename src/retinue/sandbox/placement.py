"""Which runtime a run gets: what its profile says, else the mode, and never less than what holds its parent.

Runtimes are made when a profile first wants one; a wall that cannot be built refuses the run, or, where a person has
set a fallback, the run says in its result that it had none.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from retinue.core.errors import ConfigError
from retinue.core.events import RunStarted, Warned
from retinue.core.network import Hosts
from retinue.core.plans import Job, Plan, Runtime
from retinue.core.ports import Link
from retinue.core.profiles import RUNTIMES, Profile, RuntimeName
from retinue.core.results import Ending
from retinue.sandbox.proxy_socket import Reach, reach_of

WALLED: tuple[RuntimeName, ...] = ("isolated", "container")
FELL_BACK = "'{wanted}' is not possible here, and subagent_runtime_fallback_mode is set: ran '{got}'. {why}"


class FellBack:
    """A laxer runtime in the place of one that could not be had; it says so in every run's result."""

    def __init__(self, runtime: Runtime, *, wanted: str, why: str) -> None:
        self._runtime = runtime
        self._warning = Warned(FELL_BACK.format(wanted=wanted, got=runtime.name, why=why), code="runtime_fallback")
        self.name, self.grace = runtime.name, runtime.grace
        self.started: RunStarted | None = runtime.started

    def run(self, job: Job, link: Link) -> Awaitable[Ending]:
        link.emit(self._warning)
        return self._runtime.run(job, link)


class Placement:
    """`makers` make the runtimes by name; one that cannot be made raises ConfigError with what to do about it. Those of
    walls are told how far the run may reach, where that is farther than nowhere."""

    def __init__(
        self,
        makers: Mapping[RuntimeName, Callable[..., Runtime]],
        *,
        mode: RuntimeName,
        fallback: RuntimeName | None = None,
    ) -> None:
        self._makers = makers
        self._mode = mode
        self._fallback = fallback
        self._made: dict[str, Runtime] = {}

    def __call__(self, profile: Profile, parent: Plan | None, network: Hosts = ()) -> tuple[Runtime, RuntimeName]:
        """The runtime of a run, and the least its children get. A callable is the host's own code and stays there."""
        wanted = profile.runtime or self._mode
        if wanted == "delegated" and parent is None and profile.runtime is None:
            wanted = "inherited"  # the primary is what asks; the container it is in is its wall
        if parent is not None and RUNTIMES.index(parent.floor) > RUNTIMES.index(wanted):
            wanted = parent.floor
        if wanted == "delegated" and parent is not None and parent.floor == "isolated":
            wanted = "isolated"  # it has a link and a wall here: there is nothing to ask the host for
        return self.runtime(wanted if profile.call is None else "inherited", reach_of(network)), wanted

    def runtime(self, name: RuntimeName, reach: Reach = "none") -> Runtime:
        told: tuple[Any, ...] = () if reach == "none" or name not in WALLED else (reach,)
        key = ":".join((name, *told))
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(name, told)
        return made

    def _make(self, name: RuntimeName, told: tuple[Any, ...]) -> Runtime:
        try:
            return self._makers[name](*told)
        except ConfigError as error:
            if self._fallback is None or RUNTIMES.index(self._fallback) >= RUNTIMES.index(name):
                raise
            return FellBack(self.runtime(self._fallback), wanted=name, why=str(error))
