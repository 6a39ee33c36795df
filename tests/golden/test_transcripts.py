"""Event transcripts of whole trees stay what they are: each scene is compared with its golden file."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue import Allow, Approval, Deny, Limits, Profile, RunHandle, tool
from retinue.testing import scripted
from tests.golden.dying_tree import make_profile
from tests.golden.kit import check_golden, transcribe

REPO = Path(__file__).parents[2]
needs_bubblewrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

SERVER = """
from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("weather")


@server.tool(structured_output=False)
def report(city: str) -> str:
    "Describe the weather."
    return f"fine in {city}"


@server.tool(structured_output=False)
def broken(city: str) -> str:
    "Fail always."
    raise ToolError(f"no station in {city}")


server.run()
"""
PROGRAM = """
from tools import ToolError, weather

print(await weather.report("Rome"))
try:
    await weather.broken("Oslo")
except ToolError as error:
    print("failed:", error)
"""


@pytest.fixture
def project() -> Iterator[Path]:
    """A project that the user of a sandbox can read."""
    with tempfile.TemporaryDirectory(prefix="retinue-golden-") as name:
        folder = Path(name).resolve()
        folder.chmod(0o755)
        (folder / "notes.txt").write_text("one\ntwo\nthree\n")
        yield folder


def call(name: str, /, **args: Any) -> dict[str, Any]:
    return {"tools": [{"name": name, "args": args}]}


def spawn(*tasks: dict[str, Any], **options: Any) -> dict[str, Any]:
    return call("spawn_subagents", tasks=list(tasks), **options)


async def approve(question: Approval) -> Allow | Deny:
    """Deny what removes files, allow the rest."""
    return Deny("keep it") if "rm " in str(question.args) else Allow()


async def play(
    name: str,
    project: Path,
    agents: dict[str, Any],
    *,
    during: Callable[[RunHandle], Awaitable[None]] | None = None,
    limits: Limits | None = None,
    fields: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Run a scripted tree to its end and compare its transcript; `during` acts while it runs."""
    profile = Profile("main", "You are main.", model=scripted(agents), **{"workspace": "shared", **(fields or {})})
    async with retinue.open(project / ".retinue", **{"mode": "yes", "runtime": "inherited", **options}) as r:
        run = await r.spawn(profile, "go", limits=limits)
        async with asyncio.TaskGroup() as tasks:
            if during is not None:
                tasks.create_task(during(run))
            events = [event async for event in run.events()]
        check_golden(name, transcribe(events, await run.result(), project))


async def wait_for(run: RunHandle, *wanted: tuple[int, str]) -> None:
    """Wait until each of the runs, by number, has had an event of the kind."""
    missing = set(wanted)
    async for event in run.events():
        missing.discard((event.run, event.kind))
        if not missing:
            return
    raise AssertionError(f"the tree ended without {missing}")


WORK = [
    {"text": "I look first.", "thinking": "hm", **call("read", path="notes.txt")},
    call("edit", path="notes.txt", old_string="two", new_string="2"),
    call("shell", command="cat notes.txt; echo oops >&2; exit 3"),
    call("shell", command="rm notes.txt"),
    {"tools": [{"name": "read", "args": {"path": "notes.txt"}}, {"name": "glob", "args": {"pattern": "*.txt"}}]},
    {"text": "done", "usage": {"input_tokens": 30, "output_tokens": 20}},
]


async def test_inherited_run_with_approvals(project: Path) -> None:
    await play("inherited", project, {"main": WORK}, mode="ask", approver=approve)


@needs_bubblewrap
async def test_isolated_run_with_denied_failing_and_oversized_calls(project: Path) -> None:
    more = [
        call("write", path="made/file.txt", content="alpha\n"),
        call("read", path="/etc/shadow"),
        call("shell", command="seq 20000"),
    ]
    await play("isolated", project, {"main": more + WORK}, mode="ask", approver=approve, runtime="isolated")


async def test_tree_with_two_children_and_a_nested_one(project: Path) -> None:
    agents = {
        "main": [spawn({"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}), {"text": "over"}],
        "a": [call("read", path="notes.txt"), {"text": "a said", "usage": {"input_tokens": 3, "output_tokens": 2}}],
        "b": [spawn({"task": "c", "subagent_id": "c"}), {"text": "b said"}],
        "c": [call("read", path="nowhere.txt"), {"error": "no", "status": 400}],
    }
    await play("tree", project, agents)


async def test_background_child_with_a_notice(project: Path) -> None:
    may_end = asyncio.Event()

    @tool(tier="observe")
    async def hold() -> str:
        """Wait until the parent has nothing left to do."""
        await may_end.wait()
        return "held"

    async def release(run: RunHandle) -> None:
        await wait_for(run, (0, "message"))
        may_end.set()

    agents = {
        "main": [spawn({"task": "slow", "subagent_id": "slow"}, background=True), {"text": "waiting"}, {"text": "end"}],
        "slow": [call("hold"), {"text": "slow is done"}],
    }
    await play("background", project, agents, during=release, fields={"tools": ["spawn_subagents", hold]})


async def test_run_that_reaches_its_limit_of_turns(project: Path) -> None:
    await play("max_turns", project, {"main": [call("list_agents")] * 5}, limits=Limits(turns=2))


async def test_typed_final_answer(project: Path) -> None:
    schema = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
    agents = {"main": [call("final_answer", count="many"), {"text": "3"}, call("final_answer", count=3)]}
    await play("final_answer", project, agents, fields={"output": schema})


async def test_code_mode_program_that_calls_an_mcp_tool(project: Path) -> None:
    (project / "server.py").write_text(SERVER)
    servers = {"weather": {"command": sys.executable, "args": [str(project / "server.py")]}}
    agents = {"main": [call("execute_python_code", code=PROGRAM), {"text": "over"}]}
    fields = {"tools": ["execute_python_code", "mcp__weather__report", "mcp__weather__broken"]}
    await play("code_mode", project, agents, fields=fields, mcp_servers=servers)


async def test_cancelled_tree(project: Path) -> None:
    async def cancel(run: RunHandle) -> None:
        await wait_for(run, (1, "turn.started"), (2, "tool.call"))
        assert await run.cancel()

    agents = {
        "main": [spawn({"task": "a", "subagent_id": "a"}, {"task": "b", "subagent_id": "b"}), {"text": "never"}],
        "a": [{"hang": True}],
        "b": [{"text": "so far", **call("shell", command="sleep 60")}],
    }
    await play("cancelled", project, agents, during=cancel)


async def test_tree_that_is_resumed_after_its_process_was_killed(project: Path) -> None:
    state = project / ".retinue"
    argv = [sys.executable, "-m", "tests.golden.dying_tree", str(state)]
    process = await asyncio.create_subprocess_exec(*argv, cwd=REPO, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == -9
    async with retinue.open(state, mode="yes") as r:
        run = await r.resume(said.decode().strip(), profiles=[make_profile()])
        result = await run.result()
        events = [event async for event in run.events()]
        check_golden("resumed", transcribe(events, result, project))
