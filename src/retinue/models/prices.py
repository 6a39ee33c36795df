"""Prices from the price library as it was released; nothing is fetched."""

from __future__ import annotations

from decimal import Decimal

from retinue.core.usage import Usage


class LibraryPrices:
    """Prices of models named `provider:model`. The library is loaded at the first question about a model it could know;
    without it no price is known."""

    def price(self, model: str, usage: Usage) -> Decimal | None:
        provider, _, name = model.partition(":")
        if not name or provider == "scripted":
            return None
        try:
            import genai_prices  # noqa: PLC0415 - takes a while, and most runs need no price
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
