"""The contract of the Runtime port: whatever happens in a run, it looks the same wherever the run lives."""

from __future__ import annotations

import asyncio

import pytest

from tests.golden.kit import check_golden
from tests.sandbox.places import ELSEWHERE, PLACES, USERS_SANDBOX, Place, needs_users_sandboxes
from tests.sandbox.scenes import SCENES, in_process

PARTS = 4


@pytest.mark.parametrize("scene", SCENES)
async def test_a_scene_in_process_has_its_frozen_facts(scene: str) -> None:
    """Shows a regression that all places share, which comparing them with each other cannot."""
    check_golden(f"scenes/{scene}", await in_process(scene))


@pytest.mark.requirement("CODEY-6", "MASS-6", "MASS-19", "MASS-22")
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("place", [place for place in PLACES if USERS_SANDBOX not in place.values])
async def test_a_scene_is_the_same_as_in_process(place: Place, scene: str) -> None:
    assert await place.play(scene) == await in_process(scene)


@pytest.mark.requirement("CODEY-6", "MASS-6", "MASS-19", "MASS-22")
@pytest.mark.parametrize("scenes", [list(SCENES)[part::PARTS] for part in range(PARTS)], ids=range(PARTS))
@pytest.mark.parametrize("place", [pytest.param(USERS_SANDBOX, id="isolated", marks=needs_users_sandboxes)])
async def test_scenes_are_the_same_when_an_ordinary_user_plays_them(place: Place, scenes: list[str]) -> None:
    """Several in one process of the user: to start one takes longer than to play most scenes."""
    played = dict(zip(scenes, await asyncio.to_thread(place.play_as_user, *scenes), strict=True))
    assert played == {scene: await in_process(scene) for scene in scenes}


@pytest.mark.requirement("MASS-16")
@pytest.mark.parametrize("scene", SCENES)
@pytest.mark.parametrize("place", ELSEWHERE)
async def test_a_scene_is_the_same_through_an_outbox(place: Place, scene: str) -> None:
    assert await place.play(scene) == await in_process(scene)
