"""A model call inside a budget: its worst case, reserved before and settled after."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import msgspec

from retinue.core.errors import ConfigError, Limited
from retinue.core.limits import Limits
from retinue.core.messages import Request
from retinue.core.plans import Plan
from retinue.core.ports import Prices
from retinue.core.usage import NO_USAGE, Usage
from retinue.supervisor.budgets import NOTHING, Account, Amount, Need
from retinue.supervisor.nodes import Node

BYTES_PER_TOKEN = 3  # of JSON; English has four and more, so this is rather too much than too little
_encoder = msgspec.json.Encoder(enc_hook=str)


def account_of(owner: str, *limits: Limits, parent: Account | None, plan: Plan, prices: Prices) -> Account | None:
    """The account a run spends from: its own, if limits (of several the narrowest) say so, inside its parent's; or
    its parent's, or none.

    A cost limit for a model whose price nobody knows is a ConfigError, as is a child of a parent with nothing left."""
    tokens: int | None = None
    cost: Decimal | None = None
    for each in limits:
        if isinstance(each.tokens, int) and (tokens is None or each.tokens < tokens):
            tokens = each.tokens
        if isinstance(each.cost, Decimal) and (cost is None or each.cost < cost):
            cost = each.cost
    if parent is not None and plan.model is not None:
        try:
            parent.check()
        except Limited as spent:
            raise ConfigError(f"Cannot spawn subagent {owner}: {spent}") from None
    account = parent
    if tokens is not None or cost is not None:
        account = Account(owner, tokens=tokens, cost=cost, parent=parent)
    check_price(account, plan, prices)
    return account


def check_price(account: Account | None, plan: Plan, prices: Prices) -> None:
    """Raises ConfigError when cost is limited and nobody knows what the model costs."""
    counts = account is not None and account.counts_cost and plan.model is not None
    if counts and prices.price(plan.model_name, Usage(1, 1)) is None:
        raise ConfigError(
            f"there is a cost limit, and the price of model '{plan.model_name}' is not known: "
            "limit tokens instead, or use a model with a known price"
        )


def reserve(node: Node, request: Request, prices: Prices) -> tuple[Need, asyncio.Future[None] | None]:
    """The worst case of a call, and what to `wait` for when it could not be reserved at once."""
    account = node.account
    assert account is not None
    counted = prices if account.counts_cost else None
    need = Need(request.max_output_tokens, worst_case, (request, node.plan.tools_json, counted))
    return need, account.reserve(need)


async def wait(node: Node, need: Need, place: asyncio.Future[None]) -> None:
    """Until calls in flight have settled and left room for this one, which is no stall."""
    assert node.account is not None
    await node.knowing(node.account.wait(need, place))


def settle(node: Node, need: Need, model: str, usage: Usage, prices: Prices) -> None:
    """The call is over. One that failed or was cancelled counts for what is known that it spent; the rest of what it
    had reserved is given back."""
    account = node.account
    assert account is not None
    if need.given_back:
        return
    cost = NOTHING
    if account.counts_cost and usage is not NO_USAGE:
        known = prices.price(model, usage)
        cost = need.cost if known is None else known
    spent, before = Amount(usage.input_tokens + usage.output_tokens, cost), need.paid
    need.paid = spent
    if before is not None:  # nothing comes back of what attempts before have spent
        spent = Amount(max(0, spent.tokens - before.tokens), max(NOTHING, cost - before.cost))
    account.settle(need, spent)


def paid_anew(node: Node, need: Need, request: Request, prices: Prices) -> Request:
    """The call as its model gets it: to be made once more it is settled, and reserved like another one."""

    async def again(usage: Usage) -> None:
        assert node.account is not None
        settle(node, need, request.model, usage, prices)
        need.given_back = True
        place = node.account.reserve(need)
        if place is not None:
            await wait(node, need, place)
        need.given_back = False

    return msgspec.structs.replace(request, again=again)


def worst_case(request: Request, tools: msgspec.Raw, prices: Prices | None) -> Amount:
    """Everything that is sent, estimated by the bytes of its JSON, and the longest reply; its cost as if all input
    were new to a cache."""
    sent = (_size((request.system, request.thread)) + memoryview(tools).nbytes) // BYTES_PER_TOKEN + 1
    output = request.max_output_tokens
    if prices is None:
        return Amount(sent + output)
    usages = Usage(sent, output), Usage(sent, output, cache_write_tokens=sent)
    costs: list[Decimal] = [cost for usage in usages if (cost := prices.price(request.model, usage)) is not None]
    return Amount(sent + output, max(costs, default=NOTHING))


def _size(sent: Any) -> int:
    """Bytes of JSON, or about as many where a text holds half a character."""
    try:
        return len(_encoder.encode(sent))
    except UnicodeEncodeError:
        return len(repr(sent))
