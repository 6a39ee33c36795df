"""Prices from the price library as it was released; nothing is fetched. Loaded when a price is first needed."""

from __future__ import annotations

from decimal import Decimal

import genai_prices

from retinue.core.usage import Usage


class LibraryPrices:
    """Prices of models named `provider:model`."""

    def price(self, model: str, usage: Usage) -> Decimal | None:
        provider, _, name = model.partition(":")
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
