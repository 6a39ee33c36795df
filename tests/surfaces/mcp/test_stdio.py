"""Tests of stdio as bytes: answers before anything is loaded, output outside the protocol, and bad input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from retinue.surfaces.mcp.messages import RpcError, parse_message
from tests.surfaces.cli.shell import SOURCE, Project, environment
from tests.surfaces.mcp.kit import piped, serve

META = {
    "io.modelcontextprotocol/protocolVersion": "2026-07-28",
    "io.modelcontextprotocol/clientCapabilities": {},
}
# Prints when the host is imported: that is after the first answer, so after the server has claimed its descriptors.
NOISE = """
import os, sys
def make_noise(event, args):
    if event == "import" and args[0] == "retinue.surfaces.mcp.host":
        print("from a library")
        sys.stdout.flush()
        os.write(1, b"from C code\\n")
        os.system("echo from a child")
if "mcp" in sys.argv:
    sys.addaudithook(make_noise)
"""


def test_what_answers_the_handshake_loads_nothing_heavy() -> None:
    heavy = ("mcp", "pydantic", "apsw", "yaml", "retinue.build", "retinue.log.sqlite", "retinue.surfaces.mcp.host")
    code = (
        "import sys; import retinue.surfaces.cli.main as m, retinue.surfaces.cli.mcp, asyncio; m.make_parser('mcp');"
        "import retinue.surfaces.mcp.stdio, retinue.surfaces.cli.signals;"
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment(), check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.requirement("CPE-10")
async def test_stdout_is_protocol_whatever_prints(project: Project, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(NOISE)
    agents: dict[str, Any] = {"*": ["done"]}
    spawn = {"name": "spawn_subagents", "arguments": {"tasks": [{"task": "t"}]}, "_meta": META}
    calls: list[dict[str, Any]] = [
        {"id": 1, "method": "server/discover", "params": {"_meta": META}},
        {"id": 2, "method": "tools/call", "params": spawn},
    ]
    lines = b"".join(json.dumps({"jsonrpc": "2.0", **call}).encode() + b"\n" for call in calls)
    async with piped(project, agents=agents, quick=False, PYTHONPATH=f"{tmp_path}:{SOURCE}") as client:
        await client.send(lines)
        first, second = await client.read(), await client.read()
        assert [first["id"], second["id"]] == [1, 2]
        assert second["result"]["structuredContent"]["success"]
        client.process.stdin.close()  # type: ignore[union-attr]
        assert await client.process.stdout.read() == b""  # type: ignore[union-attr]
        said = (await client.process.stderr.read()).decode()  # type: ignore[union-attr]
    assert all(text in said for text in ("from a library", "from C code", "from a child"))


async def test_the_handshake_of_each_revision(project: Project) -> None:
    async with piped(project) as client:
        early = await client.ask("tools/list")
        assert early["error"]["code"] == -32600 and "initialize" in early["error"]["message"]
        assert (await client.ask("ping"))["result"] == {}
        discovered = (await client.ask("server/discover", _meta=META))["result"]
        assert discovered["supportedVersions"] == ["2026-07-28"] and discovered["resultType"] == "complete"
        assert discovered["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "retinue"
        assert isinstance(discovered["ttlMs"], int) and discovered["cacheScope"] == "private"
        assert "Delegate" in discovered["instructions"] and "parallel task" in discovered["instructions"]
        hello = (await client.hello())["result"]
        assert hello["protocolVersion"] == "2025-11-25" and hello["serverInfo"]["name"] == "retinue"
        assert (await client.ask("initialize", protocolVersion="1999-01-01"))["result"][
            "protocolVersion"
        ] == "2025-11-25"
        assert (await client.ask("initialize", protocolVersion="2025-03-26"))["result"][
            "protocolVersion"
        ] == "2025-03-26"
        assert len((await client.ask("tools/list"))["result"]["tools"]) == 9
        wrong = {**META, "io.modelcontextprotocol/protocolVersion": "2030-01-01"}
        refused = (await client.ask("tools/list", _meta=wrong))["error"]
        assert (refused["code"], refused["data"]["supported"]) == (-32022, ["2026-07-28"])
        half = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
        assert (await client.ask("tools/list", _meta=half))["error"]["code"] == -32602
        assert (await client.ask("ping", _meta=META))["error"]["code"] == -32601


BAD: list[tuple[bytes, int]] = [
    (b"{", -32700),
    (b"hello", -32700),
    (b"\xff\xfe", -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":NaN}}', -32700),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":"\\ud800"}}', -32700),
    (b"[" * 100_000, -32700),
    (b'{"a":' * 100_000, -32700),
    (b'{"jsonrpc":"2.0","id":' + b"9" * 5000 + b',"method":"ping"}', -32700),
    (b"[]", -32600),
    (b"null", -32600),
    (b'"text"', -32600),
    (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', -32600),
    (b"{}", -32600),
    (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
    (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
    (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600),
    (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', -32600),
    (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"method":5}', -32600),
    (b'{"jsonrpc":"2.0","id":1}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"id":2,"method":"ping"}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":{"b":1,"\\u0062":2}}}', -32600),
    (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[1]}', -32602),
    (b'{"jsonrpc":"2.0","id":1,"method":"initialize","params":{"protocolVersion":7}}', -32602),
    (b'{"jsonrpc":"2.0","id":1,"method":"no/such"}', -32601),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/call"}', -32602),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":5}}', -32602),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"list_subagents","arguments":[]}}', -32602),
    (b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"../../etc"}}', -32602),
]  # fmt: skip


async def test_bad_input_is_answered_and_the_server_lives(project: Project) -> None:
    async with piped(project) as client:
        await client.hello()
        for line, code in BAD:
            await client.send(line + b"\n")
            answer = await client.read()
            assert answer["error"]["code"] == code, line[:100]
        await client.send(b'\xef\xbb\xbf{"jsonrpc":"2.0","id":"bom","method":"ping"}\r\n\n   \n')
        assert await client.read() == {"jsonrpc": "2.0", "id": "bom", "result": {}}
        for unheard in (b'{"jsonrpc":"2.0","method":"no/such"}', b'{"jsonrpc":"2.0","id":"x","result":{}}',
                        b'{"jsonrpc":"2.0","id":"x","error":{"code":1,"message":""}}',
                        b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":[]}}'):  # fmt: skip
            await client.send(unheard + b"\n")
        huge = b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":"' + b"x" * (5 * 1024 * 1024) + b'"}}\n'
        await client.send(huge)
        answer = await client.read()
        assert answer["id"] is None and "larger than" in answer["error"]["message"]
        assert (await client.ask("ping"))["result"] == {}


@pytest.mark.finding("R2")
@pytest.mark.parametrize("value", ['"\\ud83d"', "NaN", "9" * 5000, "1e999"])
def test_a_call_that_is_almost_json_is_answered_by_its_id(value: str) -> None:
    """Else the client waits for its answer."""
    params = f'{{"name":"spawn_subagents","arguments":{{"tasks":[{{"task":{value},"id":4}}]}}}}'
    line = f'{{"method":"tools/call","params":{params},"jsonrpc":"2.0","id":7}}'
    with pytest.raises(RpcError, match="Parse error") as caught:
        parse_message(line.encode())
    assert caught.value.id == 7


@pytest.mark.parametrize(
    ("line", "key", "id"),
    [
        ('{"jsonrpc":"2.0","id":7,"method":"tools/call","params":{"name":"a","name":"b"}}', "name", 7),
        ('{"jsonrpc":"2.0","id":7,"method":"ping","method":"tools/list"}', "method", 7),
        ('{"jsonrpc":"2.0","id":7,"id":8,"method":"ping"}', "id", None),
        ('{"jsonrpc":"2.0","id":7,"result":{"action":"decline","action":"accept"}}', "action", None),
        ('{"jsonrpc":"2.0","method":"notifications/initialized","params":{},"params":{}}', "params", None),
    ],
)
def test_a_key_that_is_given_twice_is_an_error_that_names_it(line: str, key: str, id: int | None) -> None:
    with pytest.raises(RpcError) as caught:
        parse_message(line.encode())
    assert (str(caught.value), caught.value.code, caught.value.id) == (f"the key '{key}' is given twice", -32600, id)


async def test_arguments_of_every_wrong_type_are_an_error_of_the_tool(project: Project) -> None:
    values: list[Any] = [None, True, 7, -1.5, "", "x" * 100_000, [], [[]], {}, {"task": {}}, "\x00", "../..", "a\nb"]
    tools = (
        "spawn_subagents", "continue_subagent", "get_background_tool_status", "get_background_tool_result",
        "wait_for_background_tool", "cancel_background_tool",
    )  # fmt: skip
    async with piped(project) as client:
        await client.hello()
        for tool in tools:
            for value in values:
                wrong = {"tasks": [value], "subagent_id": value, "message": value, "timeout_seconds": value}
                result = await client.call(tool, **wrong)
                assert result["structuredContent"]["success"] is False or value is None, (tool, value)
        assert (await client.call("spawn_subagents", tasks=[{"task": "still there"}]))["structuredContent"]["success"]


async def test_a_project_that_is_wrong_is_said_in_every_call_and_can_be_mended(project: Project) -> None:
    (project.folder / "retinue.yaml").write_text("nonsense: 1\n")
    async with piped(project) as client:
        assert "result" in await client.hello()
        what = f"{project.folder}/retinue.yaml:1: key 'nonsense': unknown key"
        listed = (await client.ask("tools/list"))["result"]["tools"]
        note = f"[Not usable when the tools were listed. Tell the user: {what}"
        assert len(listed) == 9 and all(tool["description"].startswith(note) for tool in listed)
        result = await client.call("list_subagents")
        [said] = result["content"]
        assert result["isError"] and said["text"].startswith(what) and "\n" not in said["text"]
        (project.folder / "retinue.yaml").write_text("")
        assert not (await client.call("list_subagents"))["isError"]
        assert "Not usable" not in json.dumps(await client.ask("tools/list"))


async def test_the_project_can_be_elsewhere(project: Project, tmp_path: Path) -> None:
    other = Project(tmp_path / "other")
    (other.folder / "retinue.yaml").write_text("profiles:\n  poet:\n    description: writes verse\n")
    async with piped(project, "--project", str(other.folder)) as client:
        await client.hello()
        [spawn, *_] = (await client.ask("tools/list"))["result"]["tools"]
        assert "poet: writes verse" in json.dumps(spawn)
        said = (await client.call("spawn_subagents", tasks=[{"task": "t"}]))["structuredContent"]
        assert said["watch"].startswith(f"cd {other.folder} && ")
        assert said["results"][0]["workspace"].startswith(str(other.folder))
    assert not (project.folder / ".retinue").exists()


def test_what_was_asked_before_the_input_ended_is_answered(project: Project) -> None:
    lines = b"".join(
        json.dumps({"jsonrpc": "2.0", "id": number, "method": method, "params": {"_meta": META}}).encode() + b"\n"
        for number, method in enumerate(("server/discover", "tools/list"))
    )
    done = subprocess.run(
        serve(project), input=lines, cwd=project.folder, env=environment(), capture_output=True, check=True
    )
    assert [json.loads(line)["id"] for line in done.stdout.splitlines()] == [0, 1]


def test_wrong_options_are_one_line(project: Project) -> None:
    for words, text in (
        (["mcp"], "ACTION"),
        (["mcp", "serve", "--port", "1"], "--http"),
        (["mcp", "serve", "--output-schema", "x"], "--profile"),
        (["mcp", "serve", "--http", "--port", "0"], "1 to 65535"),
        (["mcp", "serve", "--http", "--project", "nowhere"], "there is no folder nowhere"),
        (["mcp", "serve", "--http"], "no model"),
        (["mcp", "serve", "--http", "--profile", "wizard"], "unknown profile 'wizard'"),
    ):
        done = project.retinue(*words)
        assert done.returncode == 2, (words, done)
        assert text in done.stderr and done.stderr.count("\n") == 1 and not done.stdout, (words, done.stderr)


def test_files_of_the_state_are_the_users_alone(project: Project) -> None:
    lines = b"".join(
        json.dumps({"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {**params, "_meta": META}}).encode()
        + b"\n"
        for params in ({"name": "spawn_subagents", "arguments": {"tasks": [{"task": "t"}], "background": True}},)
    )
    subprocess.run(
        serve(project), input=lines, cwd=project.folder, env=environment(), capture_output=True, check=True, timeout=200
    )
    found = [path for path in (project.folder / ".retinue").rglob("*") if path.name != ".gitignore"]
    assert found and all(os.stat(path).st_mode & 0o077 == 0 for path in found if not path.is_symlink())


@pytest.mark.finding("M7")
@pytest.mark.parametrize("mode", ["legacy", "modern"])
@pytest.mark.parametrize(
    "method", ["prompts/list", "resources/list", "resources/templates/list", "completion/complete", "logging/setLevel"]
)
async def test_methods_of_what_is_not_declared_do_not_exist(project: Project, mode: str, method: str) -> None:
    async with piped(project) as client:
        if mode == "legacy":
            declared, more = (await client.hello())["result"]["capabilities"], {}
        else:
            more = {"_meta": {
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientCapabilities": {},
            }}  # fmt: skip
            declared = (await client.ask("server/discover", **more))["result"]["capabilities"]
        answer = await client.ask(method, **more)
    assert declared == {"tools": {}}
    assert answer["error"]["code"] == -32601 and "result" not in answer
