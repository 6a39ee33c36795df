"""The contract of the Runtime port: whatever happens in a run, it looks the same wherever the run lives."""

from __future__ import annotations

import pytest

from tests.golden.kit import check_golden
from tests.sandbox.places import ELSEWHERE, PLACES, Place
from tests.sandbox.scenes import SCENES, in_process


@pytest.mark.parametrize("scene", SCENES)
async def test_a_scene_in_process_has_its_frozen_facts(scene: str) -> None:
    """Shows a regression that all places share, which comparing them with each other cannot."""
    check_golden(f"scenes/{scene}", await in_process(scene))


@pytest.mark.requirement("CODEY-6", "MASS-6", "MASS-19", "MASS-22")
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("place", PLACES)
async def test_a_scene_is_the_same_as_in_process(place: Place, scene: str) -> None:
    assert await place.play(scene) == await in_process(scene)


@pytest.mark.requirement("MASS-16")
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("place", ELSEWHERE)
async def test_a_scene_is_the_same_through_an_outbox(place: Place, scene: str) -> None:
    assert await place.play(scene) == await in_process(scene)
