"""Checks of models: the providers at hand, the models this project runs on, and whether their prices are known.

Looks for keys and never shows them. Calls no provider: the first run shows whether a key is accepted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from decimal import Decimal

from retinue.build.models import LatePrices, ModelSource
from retinue.build.supervisor import make_clock
from retinue.config.models import PROVIDERS, Provider, find_default_model, find_install_command
from retinue.config.project import SETTINGS_FILE, Project
from retinue.core.errors import RetinueError
from retinue.core.limits import Limits
from retinue.core.usage import Usage
from retinue.surfaces.cli.checkup.check import Check, Look


def check_models(look: Look) -> Iterator[Check]:
    prices = LatePrices()
    for provider in PROVIDERS:
        yield _check_provider(provider)
    if look.project is None:
        return
    chosen = look.project.settings.model or find_default_model(os.environ)
    if chosen is None:
        yield _check_missing()
    for model, limits in _list_models(look.project, chosen).items():
        yield from _check_model(look, model, limits, prices)


def _check_provider(provider: Provider) -> Check:
    key = f"{provider.key} is {'set' if provider.has_key(os.environ) else 'not set'}"
    if not provider.installed():
        command = find_install_command(provider.default)
        wanted = provider.has_key(os.environ)
        return Check("provider", "warn" if wanted else "ok", f"{provider.name}: {key}; not installed: {command}",
                     command if wanted else "")  # fmt: skip
    return Check("provider", "ok", f"{provider.name}: {key}; default {provider.default}")


def _check_missing() -> Check:
    keys = [provider.key for provider in PROVIDERS if provider.has_key(os.environ)]
    why = f"{' and '.join(keys)} are set, so none is the default" if keys else "no key is set"
    do = f"give --model MODEL, or write 'model: MODEL' in {SETTINGS_FILE}" + ("" if keys else ", or set a key")
    return Check("model", "warn", f"none is set ({why}); scripted:FILE is available without a key", do)


def _list_models(project: Project, chosen: str | None) -> dict[str, list[Limits]]:
    """Return the models this project runs on, with the limits that hold for each."""
    found: dict[str, list[Limits]] = {} if chosen is None else {chosen: [project.settings.limits]}
    for profile in project.profiles:
        model = profile.model or chosen
        if isinstance(model, str):
            found.setdefault(model, []).extend((project.settings.limits, profile.limits))
    return found


def _check_model(look: Look, model: str, limits: list[Limits], prices: LatePrices) -> Iterator[Check]:
    try:
        ModelSource(look.folder, make_clock())(model)
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
