"""Seed 001's values: the config and its builders, the result and its JSON, the tool as a model sees it."""

from dataclasses import FrozenInstanceError
from pathlib import Path

import msgspec
import pytest

import retinue
from retinue import Profile, Usage, subagent
from retinue.core.context import Context
from retinue.subagent import SubagentConfig, SubagentFactory, SubagentResult, SubagentTool, ToolCallLog
from retinue.testing import scripted
from tests.subagent.agents import calls, echo, spy

DESCRIPTION = (
    "Spawn a subagent named 'finder' to handle a task. "
    "The subagent will work independently and return only its final response."
)
TASK = {"type": "string", "description": "The task or question for the subagent to handle"}


@pytest.mark.requirement("SDK-8")
def test_a_new_config_has_nothing_set() -> None:
    config = SubagentConfig("default")
    assert (config.name, config.system_prompt) == ("default", "")
    assert (config.nickname, config.max_turns, config.timeout_ms, config.model) == (None, None, None, None)


@pytest.mark.requirement("SDK-7", "SDK-9")
def test_builders_give_a_new_config() -> None:
    plain = SubagentConfig("test")
    built = (
        plain.with_system_prompt("Test prompt")
        .with_max_turns(5)
        .with_timeout_ms(30000)
        .with_model("scripted:x.yaml")
        .with_nickname("Zara")
    )
    assert plain == SubagentConfig("test")
    assert built.to_json() == {
        "name": "test",
        "nickname": "Zara",
        "system_prompt": "Test prompt",
        "max_turns": 5,
        "timeout_ms": 30000,
        "model": "scripted:x.yaml",
    }
    with pytest.raises(FrozenInstanceError):
        built.name = "other"  # type: ignore[misc]


@pytest.mark.requirement("SDK-7")
def test_only_the_model_is_left_out_of_json() -> None:
    assert SubagentConfig("test").to_json() == {
        "name": "test",
        "nickname": None,
        "system_prompt": "",
        "max_turns": None,
        "timeout_ms": None,
    }


@pytest.mark.requirement("SDK-7")
async def test_the_config_is_applied(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text("agents:\n  worker: [{text: from my own model}]\n")
    model = spy({"worker": [calls("echo", message="x"), {"text": "from the shared model"}]})
    config = SubagentConfig("worker").with_system_prompt("Be brief.").with_max_turns(1)
    async with SubagentFactory(model=model, tools=[echo], project=tmp_path) as factory:
        limited = await factory.create(config).execute(None, {"task": "go"})
        own = await factory.create(config.with_model("scripted:own.yaml")).execute(None, {"task": "go"})
    assert limited.output == "Subagent reached its limit"
    assert model.requests[0].system.startswith("Be brief.")
    assert own.output == "from my own model"
    assert len(model.requests) == 1


@pytest.mark.requirement("SDK-10")
def test_the_fields_of_a_tool_call_log() -> None:
    log = ToolCallLog("glob", "Glob", "**/*.toml", "3 files", True)
    assert msgspec.to_builtins(log) == {
        "name": "glob",
        "display_name": "Glob",
        "context": "**/*.toml",
        "result": "3 files",
        "success": True,
        "duration_ms": None,
    }


@pytest.mark.requirement("SDK-11", "SDK-12")
def test_the_fields_of_a_result() -> None:
    log = ToolCallLog("read", "Read", "/tmp/test.rs", "50 lines", True, 10)
    result = SubagentResult("test", "Done", 3, 1, (log,), Usage(1500, 500), True, 2500)
    assert list(result.to_json()) == [
        "name",
        "final_response",
        "total_turns",
        "tool_count",
        "tool_logs",
        "usage",
        "success",
        "duration_ms",
    ]
    assert result.to_json()["tool_logs"] == [msgspec.to_builtins(log)]
    assert result.to_json()["usage"]["input_tokens"] == 1500
    failed = msgspec.structs.replace(result, success=False, error_details="boom")
    assert failed.to_json()["error_details"] == "boom"
    assert "failed_tool" not in failed.to_json()
    assert msgspec.convert(failed.to_json(), SubagentResult) == failed


@pytest.mark.requirement("SDK-13", "SDK-14", "SDK-15")
def test_the_tool_as_it_introduces_itself() -> None:
    tool = SubagentTool(SubagentConfig("finder"))
    assert (tool.name, tool.display_name, tool.description) == ("subagent_finder", "Subagent: finder", DESCRIPTION)
    assert tool.input_schema == {"type": "object", "properties": {"task": TASK}, "required": ["task"]}
    assert tool.tier == "confirm"


@pytest.mark.requirement("SDK-13", "SDK-14", "SDK-15")
async def test_a_model_sees_the_same_tool() -> None:
    model = spy({"main": [{"text": "done"}]})
    main = Profile("main", model=model, tools=[SubagentTool(SubagentConfig("finder")).profile])
    async with retinue.open() as r:
        await r.run(main, "go")
    spec = model.requests[0].tools[0]
    assert (spec.name, spec.display_name, spec.description) == ("subagent_finder", "Subagent: finder", DESCRIPTION)
    assert (spec.schema["type"], spec.schema["required"]) == ("object", ["task"])
    assert spec.schema["properties"]["task"] == TASK


@pytest.mark.requirement("SDK-5")
async def test_the_metadata_keys() -> None:
    assert (subagent.METADATA_SUBAGENT_DEPTH, subagent.METADATA_MAX_SUBAGENT_DEPTH) == (
        "subagent_depth",
        "max_subagent_depth",
    )

    @retinue.tool(tier="observe")
    def where(ctx: Context) -> str:
        return str(ctx.metadata)

    model = scripted({"worker": [calls("where"), {"text": "{{last_result}}"}]})
    async with SubagentFactory(model=model, tools=[where], max_depth=2) as factory:
        outcome = await factory.create(SubagentConfig("worker")).execute(None, {"task": "go"})
    assert outcome.output == str({"subagent_depth": 1, "max_subagent_depth": 2})


@pytest.mark.requirement("SDK-60")
def test_the_public_names() -> None:
    assert set(subagent.__all__) == {
        "AgentHooks",
        "EventStore",
        "MessageStore",
        "StateStore",
        "StoreFactories",
        "ThreadState",
        "METADATA_MAX_SUBAGENT_DEPTH",
        "METADATA_SUBAGENT_DEPTH",
        "SubagentConfig",
        "SubagentFactory",
        "SubagentProgress",
        "SubagentResult",
        "SubagentTool",
        "ToolCallLog",
        "ToolResult",
    }
    assert all(hasattr(subagent, name) for name in subagent.__all__)
