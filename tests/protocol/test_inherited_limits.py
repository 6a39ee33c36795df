"""The limits that travel down to servers: written, read with distrust, and only ever making things narrower."""

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retinue.core.caller import NOBODY, Caller
from retinue.core.limits import Limits
from retinue.protocol import inherited_limits

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
FULL = Caller(
    depth=2,
    deadline=1_800_000_000.5,
    tokens=1000,
    cost=Decimal("0.125"),
    traceparent=TRACE,
    baggage="team=infra",
    parent_id="p",
    root_id="r",
)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.decimals()
VALUES = st.recursive(PLAIN, st.lists, max_leaves=3)


def test_there_and_back() -> None:
    assert inherited_limits.from_meta(inherited_limits.to_meta(FULL)) == FULL
    meta = inherited_limits.to_meta(FULL)
    assert meta == {
        "retinue/depth": 2, "retinue/deadline": 1_800_000_000.5, "retinue/tokens": 1000, "retinue/cost": "0.125",
        "traceparent": TRACE, "baggage": "team=infra", "retinue/parentRunID": "p", "retinue/rootRunID": "r",
    }  # fmt: skip
    environ = inherited_limits.to_environment(FULL)
    assert environ == {
        "RETINUE_SUBAGENT_DEPTH": "2", "RETINUE_SUBAGENT_DEADLINE": "1800000000.500000",
        "RETINUE_SUBAGENT_TOKENS": "1000", "RETINUE_SUBAGENT_COST": "0.125", "TRACEPARENT": TRACE,
        "BAGGAGE": "team=infra",
    }  # fmt: skip
    back = inherited_limits.from_environment(environ)
    assert (back.depth, back.deadline, back.tokens, back.cost) == (2, 1_800_000_000.5, 1000, Decimal("0.125"))
    assert inherited_limits.to_meta(NOBODY) == {} == inherited_limits.to_environment(NOBODY)
    assert inherited_limits.read_process_limits({}) is NOBODY


@pytest.mark.parametrize("value", ["", "x", "-1", "1e9", "٣", " 2", True, -5, 2.5, [], {}, "9" * 19])
def test_nonsense_is_nothing_left_and_never_no_limit(value: Any) -> None:
    caller = inherited_limits.from_meta(dict.fromkeys(("retinue/depth", "retinue/tokens"), value))
    assert (caller.depth, caller.tokens) == (0, 0)
    money = inherited_limits.from_meta({"retinue/cost": value if value != 2.5 else "nan", "retinue/deadline": value})
    assert money.cost is not None and money.deadline is not None


@pytest.mark.parametrize("value", ["1e999999", "1e-999999", 1e300])
def test_an_amount_that_has_endless_digits_is_nothing_left(value: Any) -> None:
    caller = inherited_limits.from_meta({"retinue/cost": value})
    assert (caller.cost, inherited_limits.to_environment(caller)) == (0, {"RETINUE_SUBAGENT_COST": "0"})


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.sampled_from([*inherited_limits.to_meta(FULL), "x"]), VALUES))
def test_whatever_a_peer_sends_narrows_at_most(meta: dict[str, Any]) -> None:
    own = Limits(depth=3, tokens=500, cost=Decimal(2), seconds=60.0)
    caller = inherited_limits.from_meta(meta)
    narrowed = caller.narrow(own)
    assert isinstance(narrowed.depth, int) and 0 <= narrowed.depth <= 3
    assert isinstance(narrowed.tokens, int) and 0 <= narrowed.tokens <= 500
    assert isinstance(narrowed.cost, Decimal) and 0 <= narrowed.cost <= 2
    remaining = caller.limit_seconds(60.0, 1_700_000_000.0)
    assert remaining is not None and 0 <= remaining <= 60
    inherited_limits.to_meta(caller)
    assert inherited_limits.from_meta(None) is NOBODY
