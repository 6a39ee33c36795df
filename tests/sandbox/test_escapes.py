"""Nothing gets out of a sandbox, whoever started it."""

from __future__ import annotations

from pathlib import Path

import pytest

from retinue.build.parts import Parts
from retinue.sandbox.escapes import TRIES, CommandListModel, plant_targets
from retinue.surfaces.cli.doctor import NotTried, play, print_table, try_all
from tests.sandbox.places import PLACES, Place


@pytest.mark.parametrize("place", PLACES[:-1])  # by an ordinary user in a container: test_ordinary.py
async def test_no_way_out(place: Place) -> None:
    told = await place.play("escapes")
    assert len(TRIES) >= 60
    assert told == {"escaped": dict.fromkeys(TRIES, False), "left": []}


async def test_the_tries_are_never_run_without_a_sandbox() -> None:
    with pytest.raises(NotTried, match="is not a sandbox"):
        await try_all("inherited")


async def test_nothing_is_tried_when_the_first_look_does_not_see_the_sandbox(tmp_path: Path) -> None:
    with plant_targets("isolated") as made:
        model = CommandListModel([made.model.commands[0], "echo tried"])
        result = await play(Parts(tmp_path, mode="yes", runtime="inherited"), model)
    assert (result.status, model.stands, result.tool_count) == ("done", False, 1)


def test_the_table_tells_what_got_out(capsys: pytest.CaptureFixture[str]) -> None:
    held = dict.fromkeys(TRIES, "held")
    print_table({"isolated, by root": held, "container, by root": held | {"loopback": "ESCAPED"}}, ["x: no \x1b[2J"])
    said = capsys.readouterr().out.splitlines()
    assert said[0].split() == ["isolated", "container"] and said[1].split() == ["by", "root", "by", "root"]
    assert [line.split()[1:] for line in said if line.startswith("loopback")] == [["held", "ESCAPED"]]
    assert said[-2].endswith(f"{2 * len(held) - 1} held, 1 ESCAPED") and "\x1b" not in said[-1]
