"""Prices: from the library, offline, loaded when one is needed; unknown is never nothing."""

import asyncio
import subprocess
import sys
from decimal import Decimal

import pytest

import retinue
from retinue import Limits, Profile
from retinue.build.models import LibraryPrices
from retinue.core.events import UsageReported, decode_event, encode_event
from retinue.core.ports import Prices
from retinue.core.usage import Usage
from retinue.testing import FixedPrices, scripted
from tests.supervisor.tree.kit import bodies, call
from tests.surfaces.cli.shell import environment

MILLION = Usage(1_000_000, 1_000_000)


@pytest.mark.parametrize("name", ["anthropic:claude-sonnet-4-5", "openai:gpt-5", "google-gla:gemini-2.5-pro"])
def test_the_library_knows_what_real_models_cost(name: str) -> None:
    price = LibraryPrices().price(name, MILLION)
    assert isinstance(price, Decimal) and price > 1


def test_cached_input_is_cheaper_and_counts_that_do_not_add_up_are_no_error() -> None:
    prices, name = LibraryPrices(), "anthropic:claude-sonnet-4-5"
    plain, read = prices.price(name, Usage(1000, 0)), prices.price(name, Usage(1000, 0, cache_read_tokens=1000))
    assert plain is not None and read is not None and read < plain
    assert prices.price(name, Usage(10, 0, cache_read_tokens=1000)) == read


@pytest.mark.parametrize("prices", [LibraryPrices(), FixedPrices({"a:b": ("1", "2")})])
@pytest.mark.parametrize("name", ["openai:nonsense", "nobody:model", "nonsense", "", ":", "openai:"])
def test_what_nobody_knows_is_none(prices: Prices, name: str) -> None:
    assert prices.price(name, MILLION) is None


def test_a_table_multiplies_exactly() -> None:
    assert FixedPrices({"m": ("0.1", "0.2")}).price("m", Usage(3, 0)) == Decimal("0.0000003")


def test_the_library_is_loaded_when_a_price_is_needed_and_not_before() -> None:
    code = """
import sys, retinue
from retinue.testing import scripted
model = scripted({"main": [{"text": "x", "usage": {"input_tokens": 5}}]})
result = retinue.run_sync(retinue.Profile("main", model=model), "go")
assert result.cost is None, result.cost
assert "genai_prices" not in sys.modules
from retinue.build.models import LibraryPrices
from retinue.core.usage import Usage
assert LibraryPrices().price("openai:gpt-5", Usage(5, 5)) > 0
assert "genai_prices" in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr


async def test_events_and_results_carry_the_cost_when_it_is_known() -> None:
    agents = {"main": [{**call("list_agents"), "usage": {"input_tokens": 7}}, {"text": "end"}]}
    async with retinue.open(mode="yes", prices=FixedPrices({"*": ("1", "1")})) as r:
        run = await r.spawn(Profile("main", model=scripted(agents)), "go", limits=Limits())
        result = await run.result()
        events = await r.control.log.read(run.tree)
    [event, _] = [event for event in events if isinstance(event.body, UsageReported)]
    assert b'"cost":"0.000007"' in encode_event(event)
    assert decode_event(encode_event(event)).body == event.body
    assert result.cost == result.total_cost == Decimal("0.000007")
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", model=scripted(agents)), "go")
        result = await run.result()
        events = await r.control.log.read(run.tree)
    assert (result.cost, result.to_json()["cost"]) == (None, None)
    assert all(body.cost is None for body in bodies(events, UsageReported))
    assert b"cost" not in b"".join(encode_event(event) for event in events if event.kind == "usage")


def test_a_run_that_called_no_model_cost_nothing() -> None:
    async def host(task: str, ctx: retinue.Context) -> str:
        await asyncio.sleep(0)
        return "ok"

    assert retinue.run_sync(Profile("main", call=host), "go").cost == 0
