"""Nothing gets out of a wall, whoever started it."""

from __future__ import annotations

import pytest

from tests.runtime.escapes import escapes
from tests.runtime.places import PLACES, Place


@pytest.mark.parametrize("place", PLACES)
async def test_no_way_out(place: Place) -> None:
    told = await place.play("escapes")
    assert {name: text for name, text in told["said"].items() if "ESCAPED" in text or told["planted"] in text} == {}
    assert told["alive"]


async def test_the_tries_are_never_run_without_a_wall() -> None:
    with pytest.raises(AssertionError, match="walled runs only"):
        await escapes("inherited")
