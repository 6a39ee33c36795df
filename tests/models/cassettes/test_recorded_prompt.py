"""The system prompt on a cassette: everything but the folders of the run, whatever a person wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue.core.messages import Model, OnDelta, Reply, Request
from retinue.core.records import RecordedRequest
from retinue.testing import scripted

TIDY = "Your workspace is precious: keep it tidy. You may also read: the handbook."


class Recorder:
    """A model that keeps the requests it gets."""

    name = "recorder"

    def __init__(self, inner: Model) -> None:
        self._inner = inner
        self.requests: list[Request] = []

    async def complete(self, request: Request, on_delta: OnDelta) -> Reply:
        self.requests.append(request)
        return await self._inner.complete(request, on_delta)


@retinue.tool(tier="observe")
async def look(what: str) -> str:
    """Look at something."""
    return what


@pytest.mark.parametrize("tools", [[], [look]], ids=["no tools", "tools"])
@pytest.mark.parametrize("folder", ["plain", "with\na line break"])
async def test_a_recording_leaves_out_the_folders_and_nothing_that_a_person_wrote(
    tmp_path: Path, tools: list[Any], folder: str
) -> None:
    state = tmp_path / folder / ".retinue"
    state.parent.mkdir()
    model = Recorder(scripted({"*": ["done"]}))
    async with retinue.open(state, mode="yes") as r:
        await r.run(retinue.Profile("a", TIDY, model=model, tools=tools), "go")
    [request] = model.requests
    assert (str(state.parent) in request.system) == bool(tools)
    assert RecordedRequest.from_request(request).system == TIDY
