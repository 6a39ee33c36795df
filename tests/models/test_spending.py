"""What real models cost, and that none says more than was reserved for it."""

from __future__ import annotations

from decimal import Decimal

import pytest

import retinue
from retinue import ConfigError, Limits, Profile
from retinue.core.limits import OUTPUT_TOKENS
from tests.models import wire
from tests.models.kit import CHAT, CLAUDE, GPT, ask, serving
from tests.models.server import Answer
from tests.models.test_providers import SAID

PRICED = "anthropic:claude-opus-4-6"
KEYS = {CLAUDE: "max_tokens", CHAT: "max_completion_tokens", GPT: "max_output_tokens"}


@pytest.mark.parametrize("name", KEYS)
async def test_no_reply_is_longer_than_was_reserved(name: str) -> None:
    async with serving(Answer(SAID[name])) as server:
        await ask(name)
    assert server.requests[0].body[KEYS[name]] == OUTPUT_TOKENS


async def test_a_real_model_has_a_cost_and_a_cost_limit_holds() -> None:
    profile = Profile("main", model=PRICED, tools=[])
    async with serving(wire.said("Hello.")), retinue.open() as r:
        result = await r.run(profile, "go", limits=Limits(cost=Decimal("0.01")))
        none = await r.run(profile, "go", limits=Limits(cost=Decimal(0)))
    assert (result.error_details, result.final_response) == (None, "Hello.")
    assert result.cost is not None and 0 < result.cost < Decimal("0.01")
    assert none.status == "limited"
    async with serving(), retinue.open() as r:
        with pytest.raises(ConfigError, match="the price of model 'anthropic:claude-x' is not known"):
            await r.run(Profile("main", model=CLAUDE), "go", limits=Limits(cost=Decimal(1)))
