"""The reference servers that others wrote, as tool providers: by stdio, and by HTTP of the older revision."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import retinue
from retinue import Allow, Approval
from retinue.core.approvals import Decision
from tests.tools.mcp.kit import call, http_server, main, offered, results, run, turns

PEERS = Path(sys.prefix) / "peers" / "node_modules" / ".bin"


def peer(name: str, *args: str) -> dict[str, Any]:
    command = PEERS / f"mcp-server-{name}"
    assert command.exists(), "the servers of others are not there: run scripts/setup-system"
    return {"command": str(command), "args": list(args)}


async def test_the_filesystem_server(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy milk\n")
    script = turns(
        call("mcp__files__read_text_file", path=str(tmp_path / "notes.txt")),
        call("mcp__files__write_file", path=str(tmp_path / "new.txt"), content="made"),
        call("mcp__files__read_text_file", path="/etc/passwd"),
        call("mcp__files__list_directory", path=str(tmp_path)),
    )
    asked: list[Approval] = []

    async def person(question: Approval) -> Decision:
        asked.append(question)
        return Allow()

    servers = {"files": peer("filesystem", str(tmp_path))}
    _, events = await run(servers, script, mode="ask", allow=["mcp__files__read_*"], approver=person)
    read, wrote, outside, listed = results(events)
    assert read.text == "buy milk\n"
    assert wrote.success and (tmp_path / "new.txt").read_text() == "made"
    assert not outside.success and "outside allowed directories" in outside.text
    assert listed.text == "[FILE] new.txt\n[FILE] notes.txt"
    assert [question.tool for question in asked] == ["mcp__files__write_file", "mcp__files__list_directory"]


async def test_the_everything_server() -> None:
    form = {"name": "Ann", "check": True, "integer": 3}

    async def person(question: Approval) -> Decision:
        return Allow(args={**question.args, **form})

    script = turns(
        call("mcp__all__get-sum", a=2, b=40),
        call("mcp__all__get-tiny-image"),
        call("mcp__all__get-structured-content", location="New York"),
        call("mcp__all__trigger-elicitation-request"),
        call("mcp__all__trigger-long-running-operation", duration=1, steps=2),
    )
    result, events = await run({"all": peer("everything")}, script, approver=person)
    total, image, weather, form_result, long = [
        body for body in results(events) if body.name.startswith("mcp__all__")
    ]  # fmt: skip
    assert result.status == "done"
    assert "42" in total.text and "[image (image/png, " in image.text
    assert '"temperature":33' in weather.text
    assert "Ann" in form_result.text and form_result.success
    assert "completed" in long.text
    assert "mcp__all__trigger-sampling-request" not in offered(events)  # for we offer none


async def test_streamable_http_of_the_older_revision() -> None:
    async with http_server(peer("everything")["command"], "streamableHttp") as url:
        script = turns(call("mcp__all__echo", message="hello"), call("mcp__all__trigger-elicitation-request"))

        async def person(question: Approval) -> Decision:
            assert (question.path, question.tool) == ("/main", "mcp__all")
            return Allow(args={**question.args, "name": "Bo", "check": False, "integer": 1})

        options: Any = {"mode": "yes", "approver": person, "mcp_servers": {"all": {"url": url}}}
        async with retinue.open(**options) as r:
            going = await r.spawn(main({"main": script}), "go")
            events = [event async for event in going.events()]
            servers: Any = r.control.servers
            assert servers.connections["all"].revision == "2025-11-25"
    said = [body.text for body in results(events) if body.name != "mcp__all"]
    assert said[0] == "Echo: hello" and "Bo" in said[1]
