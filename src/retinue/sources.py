"""Where models, prices and the two ends of reporting come from; loaded when first asked for. Part of the composition
root (`build`)."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from retinue.core.errors import ConfigError, NotFound
from retinue.core.limits import Limits
from retinue.core.ports import Clock, Collector, Log, Model, Prices
from retinue.core.usage import NoPrices, Usage
from retinue.supervisor.supervisor import Supervisor
from retinue.wire import travel
from retinue.wire.collected import ADDRESS, CPE_ADDRESS

if TYPE_CHECKING:
    from retinue.door.reporting import Reporting


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
    module = importlib.import_module("retinue.door.reporting")
    made: Reporting = module.Reporting(address, strict=strict, limits=limits, clock=clock)
    return made
