"""The tools and the system prompt of a planned run: a child has tools of its parent, and no others of the same name."""

import pytest

import retinue
from retinue import Profile, Task, tool
from retinue.core.events import ToolResult
from retinue.testing import scripted
from tests.supervisor.tree.kit import bodies, call, main, spawn, tree


async def test_a_name_alone_does_not_make_a_tool_the_parent_s() -> None:
    @tool(tier="observe", name="shell")
    def harmless(command: str) -> str:
        """Not a shell."""
        return "harmless"

    @tool(tier="observe", name="deploy")
    def staging() -> str:
        """To staging."""
        return "staging"

    @tool(tier="observe", name="deploy")
    def production() -> str:
        """To production."""
        return "PRODUCTION"

    script = {
        "main": [
            spawn({"task": "x", "subagent_type": "kid"}, {"task": "y", "subagent_type": "kid2"}),
            {"text": "{{last_result}}"},
        ],
        "kid": [call("shell", command="echo real"), {"text": "{{last_result}}"}],
        "kid2": [call("deploy"), {"text": "{{last_result}}"}],
    }
    kids = [Profile("kid", tools=["shell"]), Profile("kid2", tools=[production])]
    async with retinue.open(mode="yes", profiles=kids) as r:
        result = await r.run(main(script, tools=[harmless, staging, "spawn_subagents"]), "go")
    assert "Unknown tool 'shell'" in result.children[0].final_response
    assert result.children[1].final_response == "staging"


async def test_a_child_has_no_tool_its_parent_does_not_have() -> None:
    script = {
        "main": [spawn({"task": "x", "subagent_id": "x"}), {"text": "end"}],
        "x": [call("shell", command="id"), {"text": "k"}],
    }
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(main(script, tools=["read", "spawn_subagents"]), "go")
        await run.result()
        events = await r.control.log.read(run.tree)
    refused = bodies(events, ToolResult, run=1)[0]
    assert refused.text.startswith("Unknown tool 'shell'. Available tools: read")


async def test_a_leaf_has_no_way_to_spawn() -> None:
    script = {"main": [call("subagent_tip", task="x"), {"text": "end"}], "tip": [spawn({"task": "y"}), {"text": "k"}]}
    _, events = await tree(script, profiles=[Profile("tip", leaf=True)])
    assert "Unknown tool 'spawn_subagents'" in bodies(events, ToolResult, run=1)[0].text


@pytest.mark.requirement("CODEY-16", "CODEY-17")
async def test_context_goes_into_the_system_prompt_and_edit_is_among_the_tools() -> None:
    asked = []

    class Listening:
        def __init__(self) -> None:
            self.inner = scripted({"main": [spawn({"task": "t", "task_context": "the moon is full"}), {"text": "e"}]})

        async def complete(self, request, on_delta):  # type: ignore[no-untyped-def]
            asked.append(request)
            return await self.inner.complete(request, on_delta)

    async with retinue.open(mode="yes") as r:
        await r.run(Profile("main", model=Listening()), Task("go", context="be brief"))
    primary, child = asked[0], asked[1]
    assert "be brief" in primary.system and "the moon is full" not in primary.system
    assert "the moon is full" in child.system
    assert "edit" in {spec.name for spec in child.tools}
