"""What a tree may spend, by reservation. Pure accounts: knows no model, no price and no clock.

Each model call first reserves its worst case in the account of its run and in all accounts above, and settles
afterwards for what it really spent. What does not fit waits, in order, until calls in flight have settled. A call that
does not fit even then runs when none is in flight; so an account is overdrawn by one call at most. Once an account is
spent, whatever still wants to spend from it ends. A call that spent more than its worst case makes all later ones
reserve that much more.
"""

from __future__ import annotations

import asyncio
from decimal import Decimal
from math import inf
from typing import Protocol

import msgspec

from retinue.core.errors import Limited

NOTHING = Decimal(0)


class Amount(msgspec.Struct, frozen=True, gc=False):
    """Tokens and US dollars."""

    tokens: int = 0
    cost: Decimal = NOTHING

    @property
    def least(self) -> int:
        return self.tokens


class Need(Protocol):
    """The worst case of one call, at `least` so many tokens. An amount, or what works it out when it is asked, which is
    when somebody else wants to spend beside it, so mostly never."""

    @property
    def least(self) -> int: ...
    @property
    def tokens(self) -> int: ...
    @property
    def cost(self) -> Decimal: ...


class Account:
    """What one run and everything below it may spend, inside what its parent may. `None` is no limit."""

    __slots__ = (
        "_excess", "_flying", "_line", "_most", "_owner", "_spent_cost", "_spent_tokens", "chain", "cost",
        "counts_cost", "tokens",
    )  # fmt: skip

    def __init__(
        self, owner: str, *, tokens: int | None = None, cost: Decimal | None = None, parent: Account | None = None
    ) -> None:
        self._owner = owner
        self.tokens = tokens
        self._most = -inf if cost is not None else inf if tokens is None else tokens  # a quick look says yes up to here
        self.cost = cost
        self._spent_tokens = 0
        self._spent_cost = NOTHING
        self._flying: list[Need] = []
        self.chain: tuple[Account, ...] = (self,) if parent is None else (self, *parent.chain)
        self._line: list[tuple[Account, Need, asyncio.Future[None]]] = [] if parent is None else parent._line
        self.counts_cost: bool = cost is not None or (parent is not None and parent.counts_cost)
        self._excess: Decimal | None = None

    @property
    def spent(self) -> Amount:
        return Amount(self._spent_tokens, self._spent_cost)

    @property
    def in_flight(self) -> int:
        return len(self._flying)

    @property
    def held(self) -> Amount:
        """What calls in flight have reserved."""
        return Amount(sum(need.tokens for need in self._flying), sum((n.cost for n in self._flying), NOTHING))

    def check(self) -> None:
        """Raises Limited when this account, or one above it, is spent."""
        for account in self.chain:
            tokens, cost = account.tokens, account.cost
            if tokens is not None and account._spent_tokens >= tokens:
                used = f"{account._spent_tokens} used"
                raise Limited(f"the budget of {tokens} tokens of {account._owner} is spent ({used})")
            if cost is not None and account._spent_cost >= cost:
                used = f"${account._spent_cost:f} used"
                raise Limited(f"the budget of ${cost:f} of {account._owner} is spent ({used})")

    def count(self, spent: Amount) -> None:
        """What was spent before, by another process."""
        for account in self.chain:
            account._spent_tokens += spent.tokens
            account._spent_cost += spent.cost

    def reserve(self, need: Need) -> asyncio.Future[None] | None:
        """Reserves at once and gives None, or gives what to `wait` for; raises Limited when there is nothing left."""
        chain = self.chain
        for account in chain:
            if account._flying or account._spent_tokens >= account._most or account._line:
                self.check()
                if self._line or self._obstacle(need) is not None:
                    return self._line_up(need)
                break
        for account in chain:
            account._flying.append(need)
        return None

    def _line_up(self, need: Need) -> asyncio.Future[None]:
        place = asyncio.get_running_loop().create_future()
        self._line.append((self, need, place))
        self._serve()
        return place

    async def wait(self, need: Need, place: asyncio.Future[None]) -> None:
        """Until the reservation is made; whoever is cancelled meanwhile holds nothing."""
        try:
            await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and place.exception() is None:
                self.settle(need)
            else:
                self._line[:] = [waiting for waiting in self._line if waiting[2] is not place]
            raise

    def settle(self, need: Need, tokens: int = 0, cost: Decimal = NOTHING) -> None:
        """The call is over: gives its reservation back and counts what it spent, be it nothing."""
        for account in self.chain:
            account._flying.remove(need)
            account._spent_tokens += tokens
            if cost is not NOTHING:
                account._spent_cost += cost
        if (cost is not NOTHING or tokens > need.least) and (tokens > need.tokens or cost > need.cost):
            self._learn(max(_ratio(tokens, need.tokens), _ratio(cost, need.cost)))
        if self._line:
            self._serve()

    def _learn(self, excess: Decimal) -> None:
        for account in self.chain:
            account._excess = excess if account._excess is None else max(account._excess, excess)

    def _obstacle(self, need: Need) -> Account | None:
        """The first account of the chain in which it does not fit while others are in flight."""
        for account in self.chain:
            if account._flying and not account._fits(need):
                return account
        return None

    def _fits(self, need: Need) -> bool:
        held, excess = self.held, self._excess or 1
        if self.tokens is not None and self._spent_tokens + (held.tokens + need.tokens) * excess > self.tokens:
            return False
        return self.cost is None or self._spent_cost + (held.cost + need.cost) * excess <= self.cost

    def _serve(self) -> None:
        """Lets in who fits, in order: nobody overtakes one who waits for the same account."""
        closed: set[Account] = set()
        waiting: list[tuple[Account, Need, asyncio.Future[None]]] = []
        for account, need, place in self._line:
            if place.done():
                continue
            try:
                account.check()
            except Limited as spent:
                place.set_exception(spent)
                continue
            obstacle = account._obstacle(need)
            if obstacle is not None:
                closed.add(obstacle)
            if closed.isdisjoint(account.chain):
                for each in account.chain:
                    each._flying.append(need)
                place.set_result(None)
            else:
                waiting.append((account, need, place))
        self._line[:] = waiting


def _ratio(spent: int | Decimal, need: int | Decimal) -> Decimal:
    return Decimal(spent) / Decimal(need) if need else Decimal(1)
