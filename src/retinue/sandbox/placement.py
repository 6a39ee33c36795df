"""The runtime of a run: what its profile says, else the mode, and never less than what holds its parent.

Runtimes are made when a profile first wants one. A sandbox that cannot be built refuses the run, or, where a person has
set a fallback, the run says in its result that it had none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from retinue.core.errors import ConfigError
from retinue.core.events import Warned
from retinue.core.network import FULL, Hosts
from retinue.core.plans import Plan, Runtime
from retinue.core.profiles import RUNTIMES, Profile, RuntimeName
from retinue.core.remote_agents import A2aAgent

Reach = Literal["none", "hosts", "full"]
SANDBOXED: tuple[RuntimeName, ...] = ("isolated", "container")
FELL_BACK = "'{wanted}' is not possible here, and subagent_runtime_fallback_mode is set: ran '{got}'. {why}"


class Placement:
    """Chooses and makes runtimes. `makers` make them by name, for runs that may reach so much of the network; one that
    cannot be made raises ConfigError with what to do about it. `find_remote` finds that of an agent elsewhere."""

    def __init__(
        self,
        makers: Mapping[RuntimeName, Callable[[Reach], Runtime]],
        *,
        mode: RuntimeName,
        fallback: RuntimeName | None = None,
        find_remote: Callable[[A2aAgent], Runtime] | None = None,
    ) -> None:
        self._makers = makers
        self._find_remote = find_remote
        self._mode = mode
        self._fallback = fallback
        self._made: dict[tuple[RuntimeName, Reach], tuple[Runtime, tuple[Warned, ...]]] = {}

    def __call__(
        self, profile: Profile, parent: Plan | None, network: Hosts = ()
    ) -> tuple[Runtime, RuntimeName, Sequence[Warned]]:
        """Return the runtime of a run, the least its children get, and what a person should know of it. A callable is
        the host's own code and stays there."""
        wanted = profile.runtime or self._mode
        if wanted == "delegated" and parent is None and profile.runtime is None:
            wanted = "inherited"  # the primary is what asks; the container it is in is its sandbox
        if parent is not None and RUNTIMES.index(parent.floor) > RUNTIMES.index(wanted):
            wanted = parent.floor
        if wanted == "delegated" and parent is not None and parent.floor == "isolated":
            wanted = "isolated"  # its tools have a sandbox here: there is nothing to ask the host for
        if profile.a2a is not None:
            if self._find_remote is None:
                raise ConfigError(f"the agent '{profile.name}' is elsewhere, and is not called from here")
            return self._find_remote(profile.a2a), wanted, ()
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
                self._made[name, reach] = self._makers[name](reach), ()
            except ConfigError as error:
                if self._fallback is None or RUNTIMES.index(self._fallback) >= RUNTIMES.index(name):
                    raise
                runtime = self.runtime(self._fallback)
                text = FELL_BACK.format(wanted=name, got=runtime.name, why=error)
                self._made[name, reach] = runtime, (Warned(text, code="runtime_fallback"),)
        return self._made[name, reach]
