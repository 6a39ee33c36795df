"""The members of a subagent: the six steps of the order, the inherit flag, and models that a task may not name."""

from __future__ import annotations

from typing import Any

import pytest

from retinue.core.errors import ConfigError
from retinue.core.team_members import MemberChoice, TeamSettings, check_task_model, resolve_members
from retinue.core.teams import Member

POOL = (Member(id="pool1", model="a:pool"), Member(id="pool2", model="b:pool"))
LOCAL = (Member(id="local1", model="a:local"), Member(id="local2", model="b:local"))


def resolve(
    type_name: str,
    *,
    pool: tuple[Member, ...] = (),
    local: tuple[Member, ...] = (),
    spawner: str | None = "a:spawner",
    **settings: Any,
) -> MemberChoice:
    given = TeamSettings(**{"enabled": True, "agents": pool, **settings})
    return resolve_members(given, type_name, local_members=local, spawner_model=spawner, primary_model="a:primary")


def models(resolution: MemberChoice) -> list[object]:
    return [member.model for member in resolution.members]


def test_nothing_resolves_while_teams_are_off() -> None:
    found = resolve("explorer", pool=POOL, local=LOCAL, enabled=False)
    assert (found.members, found.step) == ((), 0)
    assert "enabled is false" in found.reason


@pytest.mark.requirement("MASS-25")
def test_a_round_evaluator_takes_the_pool_then_local_agents_then_the_spawner_if_inheriting() -> None:
    flag = {"inherit_spawning_agent_backend": True}
    steps = [
        (resolve("round_evaluator", pool=POOL, local=LOCAL, **flag), 1, ["a:pool", "b:pool"]),
        (resolve("round_evaluator", local=LOCAL, **flag), 4, ["a:local", "b:local"]),
        (resolve("round_evaluator", **flag), 3, ["a:spawner"]),
        (resolve("round_evaluator"), 6, ["a:primary"]),
        (resolve("round_evaluator", spawner=None, **flag), 6, ["a:primary"]),
    ]
    assert [(found.step, models(found)) for found, _, _ in steps] == [(step, names) for _, step, names in steps]


@pytest.mark.requirement("MASS-26")
@pytest.mark.parametrize("inherit", [False, True])
def test_other_types_take_local_agents_then_the_spawner_then_the_pool_then_the_primary(*, inherit: bool) -> None:
    flag = {"inherit_spawning_agent_backend": inherit}
    steps = [
        (resolve("explorer", pool=POOL, local=LOCAL, **flag), 2, ["a:local", "b:local"]),
        (resolve("explorer", pool=POOL, **flag), 3, ["a:spawner"]),
        (resolve("explorer", pool=POOL, spawner=None, **flag), 5, ["a:pool", "b:pool"]),
        (resolve("explorer", spawner=None, **flag), 6, ["a:primary"]),
    ]
    assert [(found.step, models(found)) for found, _, _ in steps] == [(step, names) for _, step, names in steps]


@pytest.mark.requirement("MASS-24")
def test_the_types_that_share_the_pool_are_round_evaluator_unless_set_and_a_star_is_all() -> None:
    assert TeamSettings().shared_child_team_types == ("round_evaluator",)
    assert (resolve("Round_Evaluator", pool=POOL).step, resolve("explorer", pool=POOL).step) == (1, 3)
    for name in ("explorer", "round_evaluator", "subagent"):
        assert resolve(name, pool=POOL, local=LOCAL, shared_child_team_types=("*",)).step == 1


@pytest.mark.requirement("MASS-27")
def test_a_type_that_is_listed_takes_the_pool_first() -> None:
    listed = {"shared_child_team_types": ("round_evaluator", "Builder")}
    assert models(resolve("builder", pool=POOL, local=LOCAL, **listed)) == ["a:pool", "b:pool"]
    assert resolve("BUILDER", pool=POOL, **listed).step == 1
    assert resolve("explorer", pool=POOL, local=LOCAL, **listed).step == 2
    assert [resolve("builder", local=local, **listed).step for local in (LOCAL, ())] == [2, 3]


@pytest.mark.requirement("MASS-25", "MASS-27")
def test_a_round_evaluator_that_the_list_leaves_out_never_takes_the_pool() -> None:
    listed = {"shared_child_team_types": ("builder",)}
    assert resolve("round_evaluator", pool=POOL, local=LOCAL, **listed).step == 4
    assert resolve("round_evaluator", pool=POOL, **listed).step == 6


@pytest.mark.requirement("MASS-28")
@pytest.mark.parametrize("name", ["explorer", "round_evaluator"])
def test_the_inherit_flag_does_nothing_where_the_parent_has_agents_of_its_own(name: str) -> None:
    found = [resolve(name, local=LOCAL, inherit_spawning_agent_backend=flag) for flag in (False, True)]
    assert found[0] == found[1]
    assert models(found[0]) == ["a:local", "b:local"]


def test_without_a_primary_that_has_a_model_nobody_is_left() -> None:
    settings = TeamSettings(enabled=True)
    found = resolve_members(settings, "explorer", local_members=(), spawner_model=None, primary_model=None)
    assert (found.members, found.step) == ((), 6)


@pytest.mark.requirement("MASS-29")
@pytest.mark.parametrize("local", [(), LOCAL])
def test_with_the_inherit_flag_a_model_in_a_task_is_rejected(local: tuple[Member, ...]) -> None:
    settings = TeamSettings(enabled=True, inherit_spawning_agent_backend=True)
    with pytest.raises(
        ConfigError, match=r"^Cannot set 'model' for subagent 'explorer'.*inherit_spawning_agent_backend"
    ):
        check_task_model(settings, "explorer", resolve("explorer", local=local, inherit_spawning_agent_backend=True))


def test_a_model_in_a_task_is_rejected_for_members_that_a_person_chose_and_else_allowed() -> None:
    with pytest.raises(ConfigError, match="its members have models of their own \\(the subagent_agents of the spawner"):
        check_task_model(TeamSettings(enabled=True), "explorer", resolve("explorer", local=LOCAL))
    check_task_model(TeamSettings(enabled=True), "explorer", resolve("explorer"))
    check_task_model(TeamSettings(), "explorer", resolve("explorer", enabled=False))
