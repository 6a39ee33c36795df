"""Budgets: reserved before each call, settled after it, overdrawn by one call at most, whatever runs at once."""

import asyncio
import random
import re
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import ConfigError, Limits, Profile, Task
from retinue.core.control import ResumeOverrides
from retinue.core.errors import Limited
from retinue.core.events import RunEnded, RunSpawned, ToolResult, UsageReported, Warned
from retinue.core.limits import OUTPUT_TOKENS
from retinue.supervisor.budgets import Account, Amount
from retinue.testing import FixedPrices, scripted
from tests.control.loopback.kit import serve_supervisor
from tests.supervisor.accounts.kit import Spender, spent, wide_tree
from tests.supervisor.tree.kit import bodies, call, main, spawn

PRICES = FixedPrices({"*": ("3", "15")})
LOOK = call("list_agents")


def usage(tokens: int, **more: Any) -> dict[str, Any]:
    return {"usage": {"input_tokens": tokens}, **more}


async def run_tree(
    agents: dict[str, Any], limits: Limits, *, profiles: list[Profile] | None = None, **options: Any
) -> tuple[retinue.Result[Any], list[retinue.Event]]:
    async with retinue.open(mode="yes", profiles=profiles or [], **options) as r:
        run = await r.spawn(Profile("main", model=scripted(agents)), "go", limits=limits)
        result = await run.result()
        return result, await r.control.log.read(run.tree)


@pytest.mark.parametrize("times", [1.0, 1.5, 0.3])
@pytest.mark.parametrize("calls", [8, 13, 22])
@pytest.mark.parametrize("unit", ["tokens", "cost"])
async def test_a_tree_never_spends_more_than_one_call_over_its_budget(unit: str, calls: int, times: float) -> None:
    model = Spender(scripted(wide_tree(turns=4)), times=times)
    budget = calls * OUTPUT_TOKENS
    prices = FixedPrices({"*": ("1", "1")})
    limits = Limits(
        concurrent=None, **{"tokens": budget} if unit == "tokens" else {"cost": Decimal(budget) / 1_000_000}
    )
    kids = [Profile(name) for name in ("lead", "half", "leaf")]
    async with retinue.open(mode="yes", profiles=kids, prices=prices, limits=limits) as r:
        run = await r.spawn(Profile("main", model=model), "go")
        account = r.control.trees[run.tree].runs[0].account
        await run.result()
        events = await r.control.log.read(run.tree)
    total = spent(events)
    assert account is not None
    assert (account.reserved, account.in_flight, account.spent.tokens) == (Amount(), 0, total)
    assert model.most_at_once > 1
    assert budget - 2 * model.largest <= total <= budget + model.largest
    endings = bodies(events, RunEnded)
    assert {ending.status for ending in endings} <= {"done", "limited"}
    told = [ending.error_details for ending in endings if ending.status == "limited"]
    assert told and all("of the tree is spent" in text for text in told)


async def test_a_tree_with_enough_is_not_hindered() -> None:
    model = Spender(scripted(wide_tree(turns=2)))
    kids = [Profile(name) for name in ("lead", "half", "leaf")]
    async with retinue.open(mode="yes", profiles=kids, limits=Limits(concurrent=None, tokens=10**9)) as r:
        result = await r.run(Profile("main", model=model), "go")
    assert result.status == "done"


@pytest.mark.requirement("P28")
@pytest.mark.parametrize("limits", [Limits(tokens=0), Limits(cost=Decimal(0))])
async def test_zero_means_zero(limits: Limits) -> None:
    result, events = await run_tree({"main": ["never said"]}, limits, prices=PRICES)
    assert result.status == "limited"
    assert result.error_details is not None and "is spent" in result.error_details
    assert bodies(events, UsageReported) == []


@pytest.mark.requirement("P28")
@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": -1},
        {"tokens": 1.5},
        {"cost": Decimal("-0.01")},
        {"cost": Decimal("NaN")},
        {"cost": float("nan")},
        {"cost": float("inf")},
        {"cost": True},
        {"cost": "much"},
        {"stall": -1},
        {"stall": float("nan")},
    ],
)
def test_a_wrong_budget_is_an_error(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"limit {next(iter(wrong))!r}"):
        Limits(**wrong)


def test_money_is_exact() -> None:
    assert Limits(cost=0.1).cost == Decimal("0.1")  # type: ignore[arg-type]
    assert sum([Decimal("0.1")] * 10) == Decimal(1)


async def test_the_ending_names_the_budget_what_is_spent_and_the_limit() -> None:
    agents = {"main": [usage(6000, **LOOK), usage(6000, **LOOK), {"text": "never"}]}
    result, _ = await run_tree(agents, Limits(tokens=10_000))
    assert (result.status, result.usage.total_tokens) == ("limited", 12_000)
    assert result.error_details == "Run 'main' stopped: the budget of 10,000 tokens of the tree is spent (12,000 used)"
    result, _ = await run_tree(agents, Limits(cost=Decimal("0.036")), prices=PRICES)
    assert result.error_details == "Run 'main' stopped: the budget of $0.036 of the tree is spent ($0.036 used)"
    assert (result.cost, result.to_json()["cost"]) == (Decimal("0.036"), "0.036")


async def test_a_profile_s_budget_bounds_its_run_and_all_below_it() -> None:
    agents = {
        "main": [usage(10, **spawn({"task": "x", "subagent_type": "lead"})), usage(10, text="end")],
        "lead": [usage(5000, **spawn({"task": "y", "subagent_type": "kid"})), usage(5000, text="lead done")],
        "kid": [usage(6000, **LOOK), usage(6000, text="never")],
    }
    lead, kid = Profile("lead", limits=Limits(tokens=10_000)), Profile("kid", limits=Limits(tokens=10**6))
    result, _ = await run_tree(agents, Limits(tokens=10**6), profiles=[lead, kid])
    assert result.status == "done"
    [lead_run] = result.children
    assert lead_run.status == "limited"
    assert (
        lead_run.error_details is not None
        and "10,000 tokens of 'lead' is spent (11,000 used)" in lead_run.error_details
    )
    assert lead_run.children[0].status == "limited"
    assert lead_run.total_usage.total_tokens == 11_000


async def test_a_parent_with_nothing_left_makes_no_child() -> None:
    agents = {"main": [usage(10_000, **spawn({"task": "x"})), {"text": "never"}]}
    result, events = await run_tree(agents, Limits(tokens=10_000))
    assert result.status == "limited" and result.children == ()
    [told] = bodies(events, ToolResult)
    assert "the budget of 10,000 tokens of the tree is spent" in told.text


async def test_a_cost_limit_without_a_price_refuses_at_the_start() -> None:
    async with retinue.open() as r:
        with pytest.raises(ConfigError, match="the price of model 'ScriptedModel' is not known"):
            await r.spawn(Profile("main", model=scripted({})), "go", limits=Limits(cost=Decimal(1)))
        assert [each.tree for each in await r.control.log.list_trees()] == []
    kid = Profile("kid", model=scripted({}), limits=Limits(cost=Decimal(1)))
    agents = {"main": [spawn({"task": "x", "subagent_type": "kid"}), {"text": "{{last_result}}"}]}
    result, _ = await run_tree(agents, Limits(), profiles=[kid])
    assert result.children == ()
    assert "the price of model 'ScriptedModel' is not known" in result.final_response


async def test_what_a_failed_call_spent_counts_and_the_rest_is_given_back() -> None:
    agents = {
        "main": [spawn({"task": "a", "subagent_id": "a"}), spawn({"task": "b", "subagent_id": "b"}), {"text": "end"}],
        "a": [{"error": "overloaded", "status": 529, "usage": {"input_tokens": 70}}],
        "b": [{"crash": "bug"}],
    }
    result, _ = await run_tree(agents, Limits(tokens=OUTPUT_TOKENS * 2), prices=PRICES)
    assert result.status == "done"
    assert [child.status for child in result.children] == ["failed", "failed"]
    assert result.total_usage.total_tokens == 70
    assert result.total_cost == Decimal("0.00021")


async def test_who_is_cancelled_in_the_line_or_in_the_call_holds_nothing() -> None:
    whole = Account("the tree", tokens=100)
    first, second = Amount(80), Amount(50)
    assert whole.reserve(first) is None
    place = whole.reserve(second)
    assert place is not None
    waiting = asyncio.create_task(whole.wait(second, place))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    place = whole.reserve(second)
    assert place is not None
    waiting = asyncio.create_task(whole.wait(second, place))
    await asyncio.sleep(0)
    whole.settle(first, 10)
    waiting.cancel()  # at the very moment it got in
    await asyncio.gather(waiting, return_exceptions=True)
    assert (whole.reserved, whole.in_flight, whole.spent) == (Amount(), 0, Amount(10))


async def test_nobody_overtakes_in_the_same_account_but_others_go_on() -> None:
    whole = Account("the tree", tokens=1000)
    narrow, other = (Account(name, tokens=100, parent=whole) for name in ("a", "b"))
    assert narrow.reserve(Amount(90)) is None
    large, small = narrow.reserve(Amount(95)), narrow.reserve(Amount(5))
    assert large is not None and small is not None and not large.done() and not small.done()
    beside = other.reserve(Amount(90))
    assert beside is None or beside.done()
    narrow.settle(Amount(90), 10)
    assert large.done() and not small.done()  # alone, though 10 + 95 do not fit
    narrow.settle(Amount(95), 95)
    assert isinstance(small.exception(), Limited)
    assert (narrow.spent.tokens, whole.spent.tokens, whole.in_flight) == (105, 105, 1)


@pytest.mark.parametrize("seed", range(40))
async def test_whatever_the_order_no_account_is_overdrawn_by_more_than_one_call(seed: int) -> None:
    chance = random.Random(seed)
    whole = Account("the tree", tokens=chance.randrange(0, 2000), cost=Decimal(chance.randrange(1, 20)))
    lead = Account("lead", tokens=chance.randrange(0, 1000), parent=whole)
    accounts = [whole, lead, Account("kid", tokens=chance.randrange(0, 500), parent=lead)]
    flying: list[tuple[Account, Amount]] = []
    line: list[tuple[Account, Amount, asyncio.Future[None]]] = []
    largest = Amount()
    for _ in range(300):
        account = chance.choice(accounts)
        need = Amount(chance.randrange(1, 300), Decimal(chance.randrange(1, 300)) / 100)
        if flying and chance.random() < 0.5:
            account, need = flying.pop(chance.randrange(len(flying)))
            spent = Amount(chance.randrange(need.tokens + 1), need.cost * chance.randrange(101) / 100)
            largest = Amount(max(largest.tokens, spent.tokens), max(largest.cost, spent.cost))
            account.settle(need, spent.tokens, spent.cost)
        else:
            try:
                place = account.reserve(need)
            except Limited:
                continue
            line += [(account, need, place)] if place is not None else []
            flying += [(account, need)] if place is None else []
        for waiting in [each for each in line if each[2].done()]:
            line.remove(waiting)
            flying += [waiting[:2]] if waiting[2].exception() is None else []
        for each in accounts:
            assert each.tokens is not None and each.spent.tokens <= each.tokens + largest.tokens
            assert each.cost is None or each.spent.cost <= each.cost + largest.cost
            assert each.in_flight == sum(each in account.chain for account, _ in flying)
    for account, need in flying:
        account.settle(need)
    assert all(account.reserved == Amount() for account in accounts) or line  # who waited last is in flight now


async def test_half_a_character_in_a_thread_is_no_reason_to_fail() -> None:
    async with retinue.open() as r:
        run = await r.spawn(
            Profile("main", model=scripted({"main": ["ok"]})), "half \ud800", limits=Limits(tokens=9000)
        )
        assert (await run.result()).final_response == "ok"


@pytest.mark.finding("U4")
@pytest.mark.parametrize(
    ("limits", "words"),
    [
        (Limits(tokens=10), ("the budget of 10 tokens of the tree is too small", "tokens; raise the limit 'tokens'")),
        (Limits(cost=Decimal("0.0001")), ("the budget of $0.0001 of the tree is too small", "raise the limit 'cost'")),
    ],
)
async def test_a_budget_that_cannot_hold_the_first_request_is_refused_before_it(
    limits: Limits, words: tuple[str, str]
) -> None:
    model = scripted({"main": ["never said"]})
    async with retinue.open(prices=PRICES) as r:
        with pytest.raises(ConfigError) as refused:
            await r.spawn(Profile("main", model=model), "go", limits=limits)
        assert [each.tree for each in await r.control.log.list_trees()] == []
        small = Profile("main", model=model, tools=[])
        assert (await r.run(small, "go", limits=Limits(tokens=100))).status == "done"
        with pytest.raises(ConfigError, match="is too small for the first request"):
            await r.spawn(small, "long " * 1000, limits=Limits(tokens=100))
    assert all(each in str(refused.value) for each in words)
    least = re.search(r"take at least \$?([\d.,]+)", str(refused.value))
    assert least is not None and float(least[1].replace(",", "")) > (
        limits.tokens if isinstance(limits.tokens, int) else 0.0001
    )


@pytest.mark.finding("U4")
async def test_a_model_reads_why_a_subagent_s_budget_is_too_small() -> None:
    agents = {"main": [spawn({"task": "x", "subagent_type": "kid"}), {"text": "{{last_result}}"}]}
    result, _ = await run_tree(agents, Limits(), profiles=[Profile("kid", limits=Limits(tokens=10))])
    assert result.children == ()
    assert "Cannot spawn subagent 'kid': the budget of 10 tokens of 'kid' is too small" in result.final_response
    assert "raise the limit 'tokens' in its profile" in result.final_response
    agents = {"main": [usage(49_900, **spawn({"task": "x"})), {"text": "{{last_result}}"}]}
    result, _ = await run_tree(agents, Limits(tokens=50_000))
    assert "the budget of 50,000 tokens of the tree has 100 left and is too small" in result.final_response


@pytest.mark.finding("U4")
async def test_a_continued_run_counts_its_whole_thread_as_the_first_request() -> None:
    profile = Profile("main", model=scripted({"main": ["a long answer " * 1000]}), tools=[])
    async with retinue.open() as r:
        result = await r.run(profile, "go")
        with pytest.raises(ConfigError, match="the budget of 1,000 tokens of the tree is too small"):
            await r.continue_run(result, "more", profiles=[profile], limits=Limits(tokens=1000))


@pytest.mark.finding("U4")
async def test_a_run_whose_last_call_exceeded_the_budget_says_so() -> None:
    agents = {"main": [usage(6000, text="the answer")]}
    result, events = await run_tree(agents, Limits(tokens=5000), prices=PRICES)
    assert (result.status, result.final_response) == ("done", "the answer")
    [warning] = bodies(events, Warned)
    assert (warning.code, warning.text) == (
        "budget", "the budget of 5,000 tokens of the tree was exceeded: 6,000 used"
    )  # fmt: skip
    result, events = await run_tree(agents, Limits(cost=Decimal("0.01")), prices=PRICES)
    assert [warning.text for warning in bodies(events, Warned)] == [
        "the budget of $0.01 of the tree was exceeded: $0.018 used"
    ]
    _, events = await run_tree(agents, Limits(tokens=6000))
    assert bodies(events, Warned) == []


async def test_the_log_of_a_tree_does_not_call_the_budget_of_the_process_its_own(tmp_path: Path) -> None:
    async with serve_supervisor(tmp_path, script={"*": ["the answer"]}, total=Limits(tokens=100_000)) as h:
        run = await h.supervisor.spawn("explorer", Task("look"))
        own = await h.supervisor.spawn("explorer", Task("look"), limits=Limits(tokens=50_000))
        limits = []
        for each in (run, own):
            await each.result()
            [spawned] = bodies(await h.supervisor.log.read(each.tree), RunSpawned)
            limits.append(spawned.max_tokens)
        assert limits == [None, 50_000]


def make_family(profile: Profile, **child: Any) -> tuple[Profile, Profile]:
    """Return a primary with one subagent, and the subagent."""
    below = Profile("child", "c", **child)
    return replace(profile, tools=[below]), below


async def test_the_process_counts_no_token_of_a_stored_tree_again(tmp_path: Path) -> None:
    """Neither a continued run, nor one that is refused, adds to the budget of the process what its tree had spent."""
    script = {
        "main": [usage(1000, **call("subagent_child", task="x")), usage(1000, text="end")],
        "child": [usage(1000, text="done")],
    }
    family = make_family(main(script))
    refused = make_family(main(script), model=family[0].model, limits=Limits(cost=Decimal(1)))
    async with serve_supervisor(tmp_path, total=Limits(tokens=100_000)) as h:
        total = h.supervisor.spawner.total
        assert total is not None
        run = await h.supervisor.spawn(family[0], Task("go"))
        await run.result()
        assert total.spent.tokens == 3000
        for _ in range(3):
            with pytest.raises(ConfigError, match="the price of model"):
                await h.supervisor.continue_run(run.tree, 1, "more", ResumeOverrides(profiles=refused))
        assert total.spent.tokens == 3000
        again = await h.supervisor.continue_run(run.tree, 1, "more", ResumeOverrides(profiles=family))
        await again.result()
        assert total.spent.tokens == 4000


async def test_what_an_earlier_process_spent_counts_for_the_tree_alone(tmp_path: Path) -> None:
    script = {
        "main": [usage(1000, **call("subagent_child", task="x")), usage(1000, text="end")],
        "child": [usage(1000, text="done")],
    }
    family = make_family(main(script))
    async with serve_supervisor(tmp_path) as h:
        run = await h.supervisor.spawn(family[0], Task("go"), limits=Limits(tokens=3000))
        await run.result()
    async with serve_supervisor(tmp_path, total=Limits(tokens=100_000)) as h:
        total = h.supervisor.spawner.total
        assert total is not None
        with pytest.raises(ConfigError, match="the budget of 3,000 tokens of the tree is spent"):
            await h.supervisor.continue_run(run.tree, 1, "more", ResumeOverrides(profiles=family))
        assert total.spent.tokens == 0
