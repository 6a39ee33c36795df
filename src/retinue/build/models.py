"""Models and prices by name. A provider's library is imported when the first run needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from retinue.concurrency import SystemClock
from retinue.config.models import PROVIDERS
from retinue.core.errors import ConfigError, NotFound
from retinue.core.messages import Model, RunRef, close_model
from retinue.core.ports import Clock
from retinue.core.usage import Usage

if TYPE_CHECKING:
    from retinue.models.cassettes import Cassette

WrapModel = Callable[[str, Callable[[], Model]], Model]  # takes the name of a model and a function that makes it
_cassette: Cassette | None = None


def list_known_models() -> list[str]:
    """Return the model names that the installed provider library knows, or an empty list without the library."""
    try:
        from retinue.models.providers import KNOWN_MODELS
    except ImportError:
        return []
    return list(KNOWN_MODELS)


def suggest_model(name: str) -> str:
    """Return a hint about how to write the model `name` with its provider."""
    if name and ":" not in name:
        for known in (*(provider.default for provider in PROVIDERS), *list_known_models()):
            if known.partition(":")[2] == name:
                return f"did you mean '{known}'?"
    return "write anthropic:NAME, openai:NAME, another PROVIDER:NAME, or scripted:FILE"


class ModelSource:
    """Models by name: `scripted:FILE`, relative to the project, or `PROVIDER:NAME`.

    Each model is made once, so that all its runs share its connections and its back-off. `close` closes the
    connections. `wrap` is put in front of every model, also of a model passed as a value."""

    def __init__(self, project: Path, clock: Clock, wrap: WrapModel | None = None) -> None:
        self._project = project
        self._clock = clock
        self._made: dict[str, Model] = {}
        self._wrap = wrap

    def __call__(self, wanted: str | Model) -> Model:
        if not isinstance(wanted, str):
            return wanted if self._wrap is None else self._wrap(type(wanted).__name__, lambda: wanted)
        if wanted not in self._made:
            make = partial(_make_model, wanted, self._project, self._clock)
            self._made[wanted] = make() if self._wrap is None else self._wrap(wanted, make)
        return self._made[wanted]

    async def close(self) -> None:
        made, self._made = self._made, {}
        for model in made.values():
            await close_model(model)


def check_model(name: str, project: Path) -> None:
    """Make a model and forget it. Raises RetinueError if it cannot be made."""
    _make_model(name, project, SystemClock())


def import_provider(model: str) -> None:
    """Import the library of a model, which takes a second or two. If the import fails, the run reports the error."""
    if model.partition(":")[0] != "scripted":
        with suppress(ImportError):
            from retinue.models.providers import import_adapter

            import_adapter(model)


class LibraryPrices:
    """Prices of models named `provider:model`, from the installed price library. Nothing is fetched.

    The library is imported at the first question about such a model. Without the library no price is known."""

    def price(self, model: str, usage: Usage) -> Decimal | None:
        if ":" not in model or model.startswith("scripted:"):
            return None
        provider, _, name = model.partition(":")
        try:
            import genai_prices  # takes a while, and most runs need no price
        except ModuleNotFoundError:
            return None
        cached = usage.cache_read_tokens + usage.cache_write_tokens
        spent = genai_prices.Usage(
            input_tokens=max(usage.input_tokens, cached),
            output_tokens=usage.output_tokens,
            cache_read_tokens=usage.cache_read_tokens,
            cache_write_tokens=usage.cache_write_tokens,
        )
        try:
            found = genai_prices.calc_price(spent, name, provider_id=provider)
        except (LookupError, ValueError):
            return None
        if getattr(found.model_price, "input_mtok", None) is None:  # listed without a price
            return None
        return found.total_price


@contextmanager
def use_cassette(cassette: Cassette) -> Iterator[None]:
    """Record or play back the model calls of every supervisor built within this context. For the pytest plugin."""
    global _cassette  # noqa: PLW0603 - a test cannot pass it to the supervisors that the code under test builds
    before, _cassette = _cassette, cassette
    try:
        yield
    finally:
        _cassette = before


def find_cassette_wrapper(*, name_run: Callable[[RunRef], str], project: str, state: str) -> WrapModel | None:
    """Return the function that puts the cassette in use in front of a model, or None if no cassette is in use.

    `name_run` returns a lasting name of a run."""
    if _cassette is None:
        return None
    from retinue.models.cassettes import CassetteModel, RunNames

    return partial(CassetteModel, names=RunNames(name_run, project, state), cassette=_cassette)


def _make_model(name: str, project: Path, clock: Clock) -> Model:
    """Return a scripted model, or a provider's model with retries. Importing a provider's library takes a second or
    two."""
    provider, _, rest = name.partition(":")
    if provider == "scripted":
        if not rest:
            raise ConfigError("model 'scripted:' names no file: write scripted:FILE")
        from retinue.config.scripts import load_script
        from retinue.models.scripted import ScriptedModel

        return ScriptedModel(load_script(project / Path(rest).expanduser()), clock)
    if not provider or not rest:
        raise NotFound(f"unknown model {name!r}: {suggest_model(name)}")
    from retinue.config.models import find_install_command

    command = find_install_command(name)
    if command:
        raise ConfigError(f"model {name!r} needs a package that is not installed: {command}")
    from retinue.models.providers import ProviderModel
    from retinue.models.retrying import RetryingModel

    return RetryingModel(ProviderModel(name, clock=clock), clock)
