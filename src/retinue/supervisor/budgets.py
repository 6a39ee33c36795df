"""Budgets: limits on the spending of a run and all runs below it. Knows no runs and no clock.

Each model call first reserves its worst case in the account of its run and in all accounts above. Afterwards it
settles for its real spending. A call without enough room waits, in order, until calls in flight have settled. If there
is still not enough room, it runs when no other call is in flight, so an account is overdrawn by one call at most. Once
an account is spent, every further call raises Limited. If a call spends more than its worst case, all later calls
reserve more by the same factor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from decimal import Decimal
from typing import Any, TypeAlias

import msgspec

from retinue.core.errors import ConfigError, Limited
from retinue.core.events import UsageReported
from retinue.core.limits import Limits
from retinue.core.messages import Request
from retinue.core.plans import Plan
from retinue.core.ports import Prices
from retinue.core.usage import NO_USAGE, Usage

NO_COST = Decimal(0)
BYTES_PER_TOKEN = 3  # of JSON; English text has four or more, so the estimate is rather too high than too low
MOST_BYTES_PER_TOKEN = 5  # a low estimate, to refuse only requests that can never fit
TOO_SMALL = (
    "the budget of {limit} of {owner}{left} is too small for the first request{whose}: its instructions, tools and "
    "task take at least {least}; {cure}"
)
RAISE_TREE = "raise the limit '{name}' (--max-{name}) or leave it out"
RAISE_PROFILE = "raise the limit '{name}' in its profile or leave it out"
_encoder = msgspec.json.Encoder(enc_hook=str)
# The worst case of one call. A CallReservation computes its amount on demand: it is needed only if another call wants
# to spend at the same time.
Reservation: TypeAlias = "Amount | CallReservation"


class Amount(msgspec.Struct, frozen=True, gc=False):
    """Tokens and US dollars."""

    tokens: int = 0
    cost: Decimal = NO_COST

    @property
    def minimum_tokens(self) -> int:
        return self.tokens


class Account:
    """The budget of one run and all runs below it, inside the account of its parent. A limit of None means
    unlimited."""

    __slots__ = (
        "_excess",
        "_has_estimates",
        "_in_flight",
        "_owner",
        "_queue",
        "_spent_cost",
        "_spent_tokens",
        "chain",
        "cost",
        "counts_cost",
        "tokens",
    )  # fmt: skip

    def __init__(
        self, owner: str, *, tokens: int | None = None, cost: Decimal | None = None, parent: Account | None = None
    ) -> None:
        self._owner = owner
        self.tokens = tokens
        self.cost = cost
        self._spent_tokens = 0
        self._spent_cost = NO_COST
        self._in_flight: list[Reservation] = []
        self.chain: tuple[Account, ...] = (self,) if parent is None else (self, *parent.chain)
        self._queue: list[tuple[Account, Reservation, asyncio.Future[None]]] = [] if parent is None else parent._queue
        self.counts_cost: bool = cost is not None or (parent is not None and parent.counts_cost)
        self._excess: Decimal | None = None
        self._has_estimates = False

    @property
    def spent(self) -> Amount:
        return Amount(self._spent_tokens, self._spent_cost)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def reserved(self) -> Amount:
        """The sum of the reservations of calls in flight."""
        tokens = sum(each.tokens for each in self._in_flight)
        return Amount(tokens, sum((each.cost for each in self._in_flight), NO_COST))

    def check(self) -> None:
        """Raise Limited if this account, or one above it, is spent."""
        for account in self.chain:
            if account.tokens is not None and account._spent_tokens >= account.tokens:
                used = f"{account._spent_tokens:,} used{account._mark_estimates()}"
                raise Limited(f"the budget of {account.tokens:,} tokens of {account._owner} is spent ({used})")
            if account.cost is not None and account._spent_cost >= account.cost:
                used = f"${account._spent_cost:f} used{account._mark_estimates()}"
                raise Limited(f"the budget of ${account.cost:f} of {account._owner} is spent ({used})")

    def describe_excess(self) -> str:
        """Return a sentence if the account is overdrawn, else ''."""
        if self.tokens is not None and self._spent_tokens > self.tokens:
            used = f"{self._spent_tokens:,} used{self._mark_estimates()}"
            return f"the budget of {self.tokens:,} tokens of {self._owner} was exceeded: {used}"
        if self.cost is not None and self._spent_cost > self.cost:
            used = f"${self._spent_cost:f} used{self._mark_estimates()}"
            return f"the budget of ${self.cost:f} of {self._owner} was exceeded: {used}"
        return ""

    def _mark_estimates(self) -> str:
        return ", part of it estimated" if self._has_estimates else ""

    def check_room(self, least: Amount, name: str) -> None:
        """Raise ConfigError if this account, or one above it, has no room for the first request of the run `name`. An
        account of 0 is not checked: it ends its run before any request."""
        for account in self.chain:
            is_own = account is self
            if account.tokens and account._spent_tokens + least.tokens > account.tokens:
                limit, used = f"{account.tokens:,} tokens", account._spent_tokens
                left = f" has {account.tokens - used:,} left and" if used else ""
                amount, what = f"{least.tokens:,} tokens", "tokens"
            elif account.cost and account._spent_cost + least.cost > account.cost:
                limit, spent = f"${account.cost:f}", account._spent_cost
                left = f" has ${account.cost - spent:f} left and" if spent else ""
                amount, what = f"${least.cost.normalize():f}", "cost"
            else:
                continue
            cure = (RAISE_PROFILE if name and is_own else RAISE_TREE).format(name=what)
            whose = f" of '{name}'" if name else ""
            raise ConfigError(
                TOO_SMALL.format(limit=limit, owner=account._owner, left=left, whose=whose, least=amount, cure=cure)
            )

    def add_reported(self, used: UsageReported, *, below: Account | None = None) -> None:
        """Count reported spending that had no reservation here: of a peer, or in the log. It counts in this account and
        in all above it, or only in those below the account `below`."""
        for account in self.chain:
            if account is below:
                return
            account._has_estimates |= used.estimated
            account._spent_tokens += used.usage.total_tokens
            account._spent_cost += used.cost or NO_COST

    def reserve(self, reservation: Reservation) -> asyncio.Future[None] | None:
        """Reserve at once and return None, or return a request to pass to `wait`. Raises Limited if nothing is
        left."""
        self.check()
        in_flight = self.chain[-1]._in_flight  # the account at the top has the calls of all accounts below it
        if self._queue or (in_flight and self._find_full_account(reservation) is not None):
            return self._enqueue(reservation)
        for account in self.chain:
            account._in_flight.append(reservation)
        return None

    def _enqueue(self, reservation: Reservation) -> asyncio.Future[None]:
        request = asyncio.get_running_loop().create_future()
        self._queue.append((self, reservation, request))
        self._serve_queue()
        return request

    async def wait(self, reservation: Reservation, request: asyncio.Future[None]) -> None:
        """Wait until the reservation is made. If the wait is cancelled, nothing stays reserved."""
        try:
            await request
        except asyncio.CancelledError:
            if request.done() and not request.cancelled() and request.exception() is None:
                self.settle(reservation)
            else:
                self._queue[:] = [entry for entry in self._queue if entry[2] is not request]
            raise

    def settle(
        self, reservation: Reservation, tokens: int = 0, cost: Decimal = NO_COST, *, estimated: bool = False
    ) -> None:
        """Release the reservation of a finished call and count its spending. `estimated` means that the provider did
        not report all of the spending."""
        for account in self.chain:
            account._in_flight.remove(reservation)
            account._spent_tokens += tokens
            if estimated:
                account._has_estimates = True
            if cost is not NO_COST:
                account._spent_cost += cost
        may_exceed = cost is not NO_COST or tokens > reservation.minimum_tokens
        if may_exceed and (tokens > reservation.tokens or cost > reservation.cost):
            self._raise_excess(max(_ratio(tokens, reservation.tokens), _ratio(cost, reservation.cost)))
        if self._queue:
            self._serve_queue()

    def _raise_excess(self, excess: Decimal) -> None:
        for account in self.chain:
            account._excess = excess if account._excess is None else max(account._excess, excess)

    def _find_full_account(self, reservation: Reservation) -> Account | None:
        """Return the first account of the chain that has calls in flight and no room for `reservation`."""
        for account in self.chain:
            if account._in_flight and not account._fits(reservation):
                return account
        return None

    def _fits(self, reservation: Reservation) -> bool:
        reserved, excess = self.reserved, self._excess or 1
        tokens = (reserved.tokens + reservation.tokens) * excess
        if self.tokens is not None and self._spent_tokens + tokens > self.tokens:
            return False
        return self.cost is None or self._spent_cost + (reserved.cost + reservation.cost) * excess <= self.cost

    def _serve_queue(self) -> None:
        """Make the reservations that fit, in order. No reservation overtakes another for the same account."""
        closed: set[Account] = set()
        waiting: list[tuple[Account, Reservation, asyncio.Future[None]]] = []
        for account, reservation, request in self._queue:
            if request.done():
                continue
            try:
                account.check()
            except Limited as spent:
                request.set_exception(spent)
                continue
            full = account._find_full_account(reservation)
            if full is not None:
                closed.add(full)
            if closed.isdisjoint(account.chain):
                for each in account.chain:
                    each._in_flight.append(reservation)
                request.set_result(None)
            else:
                waiting.append((account, reservation, request))
        self._queue[:] = waiting


def _ratio(spent: int | Decimal, reserved: int | Decimal) -> Decimal:
    return Decimal(spent) / Decimal(reserved) if reserved else Decimal(1)


def open_total(limits: Limits) -> Account | None:
    """Return the account that all trees of a process share, or None without a limit. It counts only what this process
    spends."""
    tokens = limits.tokens if isinstance(limits.tokens, int) else None
    cost = limits.cost if isinstance(limits.cost, Decimal) else None
    return None if tokens is None and cost is None else Account("this process", tokens=tokens, cost=cost)


def open_account(
    name: str, limits: Iterable[Limits], parent: Account | None, plan: Plan, prices: Prices, words: Any
) -> Account | None:
    """Return the account that a run spends from, or None if nothing is limited. A run with limits gets its own account
    inside its parent's, with the narrowest of the limits. Any other run uses the account of its parent.

    `name` is "" for a primary. `words` is the content of the first request besides the instructions and tools of the
    plan.

    Raises ConfigError for a cost limit on a model of unknown price, for a child of a parent with nothing left, and if
    the first request cannot fit."""
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
            raise ConfigError(f"Cannot spawn subagent '{name}': {spent}" if name else str(spent)) from None
    account = parent
    if tokens is not None or cost is not None:
        account = Account(f"'{name}'" if name else "the tree", tokens=tokens, cost=cost, parent=parent)
    if account is None:
        return None
    if account.counts_cost:
        check_price(account, plan, prices)
    is_local = plan.run_job is None and plan.runtime.started is not None  # else its requests are not made here
    if plan.model is not None and is_local:
        try:
            account.check_room(_estimate_least(plan, words, prices if account.counts_cost else None), name)
        except ConfigError as error:
            raise ConfigError(f"Cannot spawn subagent '{name}': {error}" if name else str(error)) from None
    return account


def _estimate_least(plan: Plan, words: Any, prices: Prices | None) -> Amount:
    """Estimate the smallest amount that the first request of a plan can take, without any reply."""
    sent = (_json_size((plan.system, words)) + plan.tools_bytes) // MOST_BYTES_PER_TOKEN
    cost = None if prices is None else prices.price(plan.model_name, Usage(sent, 0))
    return Amount(sent, NO_COST if cost is None else cost)


def check_price(account: Account | None, plan: Plan, prices: Prices) -> None:
    """Raise ConfigError if cost is limited and the price of the model is unknown."""
    counts = account is not None and account.counts_cost and plan.model is not None
    if counts and prices.price(plan.model_name, Usage(1, 1)) is None:
        raise ConfigError(
            f"there is a cost limit, and the price of model '{plan.model_name}' is not known: "
            "limit tokens instead, or use a model with a known price"
        )


Waiter = Callable[[Awaitable[None]], Awaitable[None]]


class CallReservation(msgspec.Struct, eq=False, gc=False):
    """The reservation of one model call. Its worst case is computed on demand; without `prices` it has no cost.

    The run itself awaits a place in the account's queue, with its stall timer paused."""

    account: Account
    request: Request
    tools_bytes: int
    prices: Prices | None
    minimum_tokens: int
    worst_case: Amount | None = None
    settled: Amount | None = None  # the spending of earlier attempts of the call
    released: bool = False

    @property
    def amount(self) -> Amount:
        if self.worst_case is None:
            self.worst_case = estimate_worst_case(self.request, self.tools_bytes, self.prices)
        return self.worst_case

    @property
    def tokens(self) -> int:
        return self.amount.tokens

    @property
    def cost(self) -> Decimal:
        return self.amount.cost

    async def reserve_again(self, spent: Usage, wait: Waiter, *, estimated: bool) -> None:
        """Settle the attempts so far and reserve for one more."""
        self.settle(spent, estimated=estimated)
        self.settled = Amount(spent.total_tokens, NO_COST if self.prices is None else self._cost_of(spent, self.prices))
        self.released = True
        waiting = self.account.reserve(self)
        if waiting is not None:
            await wait(self.account.wait(self, waiting))
        self.released = False

    def settle(self, usage: Usage, *, estimated: bool = False) -> None:
        """Count the spending of the call, less the amount that earlier attempts have settled, and release the rest."""
        if self.released:
            return
        tokens, before = usage.input_tokens + usage.output_tokens, self.settled
        cost = NO_COST if self.prices is None else self._cost_of(usage, self.prices)
        if before is not None:  # the spending of earlier attempts is not refunded
            tokens, cost = max(0, tokens - before.tokens), max(NO_COST, cost - before.cost)
        self.account.settle(self, tokens, cost, estimated=estimated)

    def _cost_of(self, usage: Usage, prices: Prices) -> Decimal:
        """Return the cost of `usage`, or the reserved cost if the price is unknown."""
        if usage is NO_USAGE:
            return NO_COST
        known = prices.price(self.request.model, usage)
        return self.cost if known is None else known


def estimate_worst_case(request: Request, tools_bytes: int, prices: Prices | None) -> Amount:
    """Estimate the worst case of a request: all input, by the size of its JSON, plus the longest reply. The cost
    assumes that all input is new to the provider's cache."""
    sent = (_json_size((request.system, request.thread)) + tools_bytes) // BYTES_PER_TOKEN + 1
    output = request.max_output_tokens
    if prices is None:
        return Amount(sent + output)
    usages = Usage(sent, output), Usage(sent, output, cache_write_tokens=sent)
    costs: list[Decimal] = [cost for usage in usages if (cost := prices.price(request.model, usage)) is not None]
    return Amount(sent + output, max(costs, default=NO_COST))


def _json_size(sent: Any) -> int:
    """Return the size of `sent` as JSON in bytes. The size is approximate if a text contains a lone surrogate."""
    try:
        return len(_encoder.encode(sent))
    except UnicodeEncodeError:
        return len(repr(sent))
