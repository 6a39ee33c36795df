"""Whatever is played in a place, nothing of it is left afterwards."""

from collections.abc import Iterator

import pytest

from tests.sandbox.leftovers import nothing_left
from tests.sandbox.places import Place


@pytest.fixture(autouse=True)
def leaves_nothing(request: pytest.FixtureRequest) -> Iterator[None]:
    """For tests with a place, from the outside; what an ordinary user plays is looked at where it is played too."""
    place = request.node.callspec.params.get("place") if hasattr(request.node, "callspec") else None
    if not isinstance(place, Place):
        yield
        return
    with nothing_left("" if place.ordinary else place.runtime, own_folder=not place.ordinary):
        yield
