"""Arguments that a model or a client writes for the tools of subagents, and that no number of ours can hold."""

import asyncio
from typing import Any

import pytest

from retinue.core.errors import ToolError
from retinue.core.messages import Call
from retinue.protocol.subagent_tools import CONTINUE, SubagentTools
from retinue.protocol.subagents import read_tasks


@pytest.mark.parametrize("seconds", [10**400, -(10**400), float("inf"), float("nan")])
def test_a_timeout_that_is_too_large_is_an_error_of_the_call(seconds: Any) -> None:
    with pytest.raises(ToolError, match="invalid 'timeout_seconds': must be finite"):
        read_tasks({"tasks": [{"task": "x", "timeout_seconds": seconds}]})
    call = Call("c", CONTINUE, {"subagent_id": "a", "message": "x", "timeout_seconds": seconds})
    with pytest.raises(ToolError, match="Invalid 'timeout_seconds': must be 0 or more"):
        asyncio.run(SubagentTools(None).answer(CONTINUE, call))  # type: ignore[arg-type] # fails before it is used
