"""The contract of the Runtime port: whatever happens in a run, it looks the same wherever the run lives."""

from __future__ import annotations

import asyncio
from typing import Any

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
    """But a question of the host offers no rule for the project: a rule would be about our tool of the same name."""
    there, here = await place.play(scene), await in_process(scene)
    assert find_rules(there) == []
    assert there == drop_rules(here)


def find_rules(facts: Any) -> list[str]:
    """List the rules that the questions of a scene offer."""
    if isinstance(facts, list):
        return [rule for each in facts for rule in find_rules(each)]
    if not isinstance(facts, dict):
        return []
    own = [facts["rule"]] if facts.get("kind") == "approval.asked" and "rule" in facts else []
    return own + [rule for each in facts.values() for rule in find_rules(each)]


def drop_rules(facts: Any) -> Any:
    """Return the facts of a scene without the rules that its questions offer."""
    if isinstance(facts, list):
        return [drop_rules(each) for each in facts]
    if not isinstance(facts, dict):
        return facts
    is_question = facts.get("kind") == "approval.asked"
    return {key: drop_rules(value) for key, value in facts.items() if not (is_question and key == "rule")}
