"""The runtime of a run: the profile's, or else the configured mode, and never weaker than the parent's.

A runtime is created when a profile first needs it. If a sandbox cannot be built, the run is refused. If a fallback is
configured, the run uses it and says so in its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from retinue.core.errors import ConfigError
from retinue.core.events import Warned
from retinue.core.network import FULL, Hosts
from retinue.core.plans import Plan, Runtime
from retinue.core.profiles import RUNTIMES, Profile, RuntimeName

Reach = Literal["none", "hosts", "full"]
SANDBOXED: tuple[RuntimeName, ...] = ("isolated", "container")
FELL_BACK = "'{wanted}' is not possible here, and subagent_runtime_fallback_mode is set: ran '{got}'. {why}"


class Placement:
    """Chooses and creates runtimes.

    `make` creates the runtime of a name with the given network reach, or raises ConfigError with advice. `find_remote`
    returns the runtime of a profile whose agent is elsewhere, and None for other profiles."""

    def __init__(
        self,
        make: Callable[[RuntimeName, Reach], Runtime],
        *,
        mode: RuntimeName,
        fallback: RuntimeName | None = None,
        find_remote: Callable[[Profile], Runtime | None] = lambda _: None,
    ) -> None:
        self._make = make
        self._find_remote = find_remote
        self._mode = mode
        self._fallback = fallback
        self._made: dict[tuple[RuntimeName, Reach], tuple[Runtime, tuple[Warned, ...]]] = {}

    def __call__(
        self, profile: Profile, parent: Plan | None, network: Hosts = ()
    ) -> tuple[Runtime, RuntimeName, Sequence[Warned]]:
        """Return the runtime of a run, the weakest runtime its children may get, and warnings for the user.

        A profile with a callable runs in process, because the callable is the host's own code."""
        wanted = profile.runtime or self._mode
        if wanted == "delegated" and parent is None and profile.runtime is None:
            wanted = "inherited"  # the primary delegates its children; its own sandbox is the container around it
        if parent is not None and RUNTIMES.index(parent.laxest_runtime) > RUNTIMES.index(wanted):
            wanted = parent.laxest_runtime
        if wanted == "delegated" and parent is not None and parent.laxest_runtime == "isolated":
            wanted = "isolated"  # its tools already have a sandbox here, so nothing is delegated to the host
        remote = self._find_remote(profile)
        if remote is not None:
            return remote, wanted, ()
        reach: Reach = "full" if network == FULL else "hosts" if network else "none"
        runtime, notes = self._find_runtime(wanted if profile.call is None else "inherited", reach)
        return runtime, wanted, notes

    def runtime(self, name: RuntimeName, reach: Reach = "none") -> Runtime:
        return self._find_runtime(name, reach)[0]

    def _find_runtime(self, name: RuntimeName, reach: Reach) -> tuple[Runtime, tuple[Warned, ...]]:
        if name not in SANDBOXED:
            reach = "none"
        if (name, reach) not in self._made:
            try:
                self._made[name, reach] = self._make(name, reach), ()
            except ConfigError as error:
                if self._fallback is None or RUNTIMES.index(self._fallback) >= RUNTIMES.index(name):
                    raise
                runtime = self.runtime(self._fallback)
                text = FELL_BACK.format(wanted=name, got=runtime.name, why=error)
                self._made[name, reach] = runtime, (Warned(text, code="runtime_fallback"),)
        return self._made[name, reach]
