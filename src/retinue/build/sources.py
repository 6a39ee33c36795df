"""Where models, prices, walls, the tools of MCP servers and the two ends of reporting come from; loaded when first
asked for. Part of the composition root (`build`)."""

from __future__ import annotations

import importlib
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retinue.core.errors import ConfigError, NotFound
from retinue.core.limits import Caps, Limits
from retinue.core.plans import Runtime
from retinue.core.ports import Clock, Collector, Log, Model, Prices, ToolServers
from retinue.core.servers import McpServer
from retinue.core.usage import NoPrices, Usage
from retinue.protocol import inherited_limits as travel
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS
from retinue.supervisor.supervisor import Supervisor
from retinue.tools.dialer import Dialer

if TYPE_CHECKING:
    from retinue.control.reporting import Reporting

WALLS = {
    "isolated": ("retinue.sandbox.bubblewrap", "retinue.sandbox.isolated", "Isolated"),
    "container": ("retinue.sandbox.container", "retinue.sandbox.container_runtime", "Container"),
}


class ModelSource:
    """Finds models by name: `scripted:FILE`, relative to the project, or PROVIDER:NAME. Each is made once, so that all
    runs on it share its connections and its back-off; `close` ends the connections. `wrap` puts something before every
    model, also one that is given as it is."""

    def __init__(self, project: Path, clock: Clock) -> None:
        self._project = project
        self._clock = clock
        self._made: dict[str, Model] = {}
        self.wrap: Callable[[str, Callable[[], Model]], Model] | None = None

    def __call__(self, wanted: str | Model) -> Model:
        if not isinstance(wanted, str):
            return wanted if self.wrap is None else self.wrap(type(wanted).__name__, lambda: wanted)
        if wanted not in self._made:
            make = partial(_make_model, wanted, self._project, self._clock)
            self._made[wanted] = make() if self.wrap is None else self.wrap(wanted, make)
        return self._made[wanted]

    async def close(self) -> None:
        made, self._made = self._made, {}
        for model in made.values():
            if hasattr(model, "aclose"):
                await model.aclose()


def _make_model(name: str, project: Path, clock: Clock) -> Model:
    provider, _, rest = name.partition(":")
    if provider != "scripted":
        return _provider_model(name, clock)
    if not rest:
        raise ConfigError("model 'scripted:' names no file: write scripted:FILE")
    script = importlib.import_module("retinue.config.scripts").load_script(project / Path(rest).expanduser())
    model: Model = importlib.import_module("retinue.models.scripted").ScriptedModel(script, clock)
    return model


class LatePrices:
    """The price library, loaded when a model that could be in it is first asked about; without it no price is known."""

    def __init__(self) -> None:
        self._prices: Prices | None = None

    def price(self, model: str, usage: Usage) -> Decimal | None:
        if ":" not in model or model.startswith("scripted:"):
            return None
        if self._prices is None:
            try:
                self._prices = importlib.import_module("retinue.models.prices").LibraryPrices()
            except ModuleNotFoundError:
                self._prices = NoPrices()
        return self._prices.price(model, usage)


def _provider_model(name: str, clock: Clock) -> Model:
    """Loads the provider's library, which takes a second or two, when the first run wants it."""
    provider, _, rest = name.partition(":")
    if not provider or not rest:
        raise NotFound(
            f"unknown model {name!r}: write anthropic:NAME, openai:NAME, another PROVIDER:NAME, or scripted:FILE"
        )
    command = importlib.import_module("retinue.config.models").install_command(name)
    if command:
        raise ConfigError(f"model {name!r} needs a package that is not installed: {command}")
    made = importlib.import_module("retinue.models.providers").ProviderModel(name, clock=clock)
    model: Model = importlib.import_module("retinue.models.retries").Retrying(made, clock)
    return model


def walled_runtime(name: str, reach: str, *, dialer: Dialer, caps: Caps, **options: Any) -> Runtime:
    """The runtime of a wall, which is built and looked at first; raises ConfigError with what to install or set.
    `reach` says what of the network its runs have: none, some hosts through a proxy, or the full network."""
    wall, module, kind = WALLS[name]
    folder = Path(tempfile.mkdtemp(prefix="retinue-probe-"))
    try:
        stands = importlib.import_module(wall).probe(folder / "wall", full_network=reach == "full", **options)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    proxy = importlib.import_module("retinue.tools.proxy").Proxy if reach == "hosts" else None
    proxies = None if proxy is None else partial(proxy, dialer=dialer)
    made: Runtime = getattr(importlib.import_module(module), kind)(stands, caps=caps, proxies=proxies)
    return made


def servers_from(given: Mapping[str, Mapping[str, Any]]) -> tuple[McpServer, ...]:
    """MCP servers as a program names them, in the words of retinue.yaml; raises ConfigError."""
    made: tuple[McpServer, ...] = importlib.import_module("retinue.config.servers").servers_from(given)
    return made


def servers_of(
    servers: Sequence[McpServer], project: Path, state: Path | None, collector: Collector | None = None
) -> ToolServers | None:
    """The MCP servers, none of them started yet; their library is loaded only where there are some."""
    if not servers:
        return None
    made: ToolServers = importlib.import_module("retinue.tools.mcp.servers").Servers(
        servers,
        project=str(project),
        folder=None if state is None else state / "mcp",
        hosting=importlib.import_module("retinue.supervisor.host_tool_services").Hosted(),
        collector=collector,
    )
    return made


class Unreported:
    """For a process that neither starts servers that report nor is one: it only keeps within what it inherited."""

    collector: Collector | None = None

    def over(self, log: Log) -> Log:
        return log

    def attach(self, supervisor: Supervisor) -> None:
        supervisor.caller = travel.inherited(os.environ)

    async def close(self) -> None:
        """Nothing was opened."""


def reporting(*, collects: bool, strict: bool, limits: Limits, clock: Clock) -> Unreported | Reporting:
    """An MCP server of ours reports to the address it found, and passes that on; a process that starts servers and
    found none has a collector of its own; any other has neither."""
    address = os.environ.get(ADDRESS) or os.environ.get(CPE_ADDRESS)
    if not address and not collects:
        return Unreported()
    module = importlib.import_module("retinue.control.reporting")
    made: Reporting = module.Reporting(address, strict=strict, limits=limits, clock=clock)
    return made
