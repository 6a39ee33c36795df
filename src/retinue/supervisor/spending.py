"""A model call inside a budget: its worst case, reserved before and settled after."""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import msgspec

from retinue.core.errors import ConfigError, Limited
from retinue.core.limits import Limits
from retinue.core.messages import Request
from retinue.core.plans import Plan
from retinue.core.ports import Prices
from retinue.core.usage import NO_USAGE, Usage
from retinue.supervisor.budgets import NOTHING, Account, Amount
from retinue.supervisor.nodes import Node

BYTES_PER_TOKEN = 3  # of JSON; English has four and more, so this is rather too much than too little
_encoder = msgspec.json.Encoder(enc_hook=str)


def account_of(
    name: str, limits: Iterable[Limits], parent: Account | None, plan: Plan, prices: Prices
) -> Account | None:
    """The account a run of that name spends from, the primary of none: its own, if limits (of several the narrowest)
    say so, inside its parent's; or its parent's, or none.

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
            raise ConfigError(f"Cannot spawn subagent '{name}': {spent}") from None
    account = parent
    if tokens is not None or cost is not None:
        account = Account(f"'{name}'" if name else "the tree", tokens=tokens, cost=cost, parent=parent)
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


class CallNeed(msgspec.Struct, eq=False, gc=False):
    """The worst case of one call, worked out when it is asked; without prices nothing is known of its cost."""

    least: int
    request: Request
    tools: msgspec.Raw
    prices: Prices | None
    made: Amount | None = None
    paid: Amount | None = None  # for attempts that were settled before
    given_back: bool = False

    @property
    def amount(self) -> Amount:
        if self.made is None:
            self.made = worst_case(self.request, self.tools, self.prices)
        return self.made

    @property
    def tokens(self) -> int:
        return self.amount.tokens

    @property
    def cost(self) -> Decimal:
        return self.amount.cost


def _cost(need: CallNeed, usage: Usage) -> Decimal:
    """What a call is counted for: one that failed or was cancelled for what is known that it spent."""
    if need.prices is None or usage is NO_USAGE:
        return NOTHING
    known = need.prices.price(need.request.model, usage)
    return need.cost if known is None else known


def settle(account: Account, need: CallNeed, usage: Usage) -> None:
    """The call is over: what it spent is counted, of which attempts before may have been; the rest is given back."""
    if need.given_back:
        return
    tokens, cost = usage.input_tokens + usage.output_tokens, _cost(need, usage)
    before, need.paid = need.paid, Amount(tokens, cost)
    if before is not None:  # nothing comes back of what attempts before have spent
        tokens, cost = max(0, tokens - before.tokens), max(NOTHING, cost - before.cost)
    account.settle(need, tokens, cost)


async def reserve_again(node: Node, account: Account, need: CallNeed, spent: Usage) -> None:
    """Settles the attempts of a call so far, and reserves for one more: Limited when nothing is left."""
    settle(account, need, spent)
    need.given_back = True
    place = account.reserve(need)
    if place is not None:
        await node.knowing(account.wait(need, place))
    need.given_back = False


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
