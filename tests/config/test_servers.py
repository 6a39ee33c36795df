"""Tests of `mcp_servers` in retinue.yaml and in Python: valid and refused settings, and the yes that they need."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

import retinue
from retinue.config.servers import parse_servers
from retinue.config.settings import parse_settings, restrict, settings_schema
from retinue.core.errors import ConfigError
from retinue.core.servers import McpServer

FILE = Path("retinue.yaml")
GOOD = """\
mcp_servers:
  files:
    command: npx
    args: [-y, some-server, .]
    env: {LEVEL: "1", TOKEN: "${MY_TOKEN}"}
    inherit_env: [HTTPS_PROXY]
    cwd: tools
    timeout: null
    startup_timeout: 90
    tools: [read_*]
  tracker:
    url: https://mcp.example.com/mcp
    headers: {Authorization: "Bearer ${TRACKER_TOKEN}"}
profiles:
  explorer:
    tools: [read, mcp__files, mcp__tracker__search, mcp__tracker__*]
"""


def test_what_is_read() -> None:
    settings = parse_settings(GOOD, FILE)
    assert settings.mcp_servers == (
        McpServer(
            "files",
            "npx",
            ("-y", "some-server", "."),
            {"LEVEL": "1", "TOKEN": "${MY_TOKEN}"},
            ("HTTPS_PROXY",),
            "tools",
            timeout=None,
            startup_timeout=90,
            tools=("read_*",),
        ),
        McpServer("tracker", url="https://mcp.example.com/mcp", headers={"Authorization": "Bearer ${TRACKER_TOKEN}"}),
    )
    jsonschema.validate(yaml.safe_load(GOOD), settings_schema())
    assert parse_servers(yaml.safe_load(GOOD)["mcp_servers"]) == settings.mcp_servers


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("a: {}", "3: key 'mcp_servers.a': give it a 'command' to start, or a 'url' to reach"),
        ("a: {command: x, url: 'http://h'}", "3: key 'mcp_servers.a': give it a 'command' to start, or a 'url' to"),
        ("a: {command: x, headers: {A: b}}", "3: key 'mcp_servers.a.headers': is for a server with a 'url'"),
        ("a: {url: 'http://h', args: [x]}", "3: key 'mcp_servers.a.args': is for a server with a 'command'"),
        ("a: {url: 'ftp://h'}", "3: key 'mcp_servers.a.url': 'ftp://h' is not an http or https URL"),
        ("a: {url: 'http://me:pw@h'}", "3: key 'mcp_servers.a.url': contains a user name; put credentials into"),
        ("a: {url: 'http://h', headers: {'a b': c}}", "3: key 'mcp_servers.a.headers.a b': 'a b' is not the name of a"),
        ('a: {url: "http://h", headers: {A: "b\\r\\nC: d"}}', "3: key 'mcp_servers.a.headers.A': must be one line"),
        ("a: {command: x, env: {A: 1}}", "3: key 'mcp_servers.a.env.A': expected a text, got a number (quote it"),
        ("a: {command: x, env: {A-B: x}}", "3: key 'mcp_servers.a.env.A-B': 'A-B' is not the name of a variable"),
        ("a: {command: x, comand: y}", "3: key 'mcp_servers.a.comand': unknown key; allowed here: args, command"),
        ("a: {type: stdio, command: y}", "3: key 'mcp_servers.a.type': is not needed: give 'command' for a program"),
        ("a: {command: x, timeout: 0}", "3: key 'mcp_servers.a.timeout': must be 1 or more, got 0"),
        ("a__b: {command: x}", "3: key 'mcp_servers.a__b': server name 'a__b' must be 1 to 32 letters"),
        ("a: null", "3: key 'mcp_servers.a': expected a mapping, got nothing"),
    ],
)  # fmt: skip
def test_what_is_refused(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_settings(f"# a comment\nmcp_servers:\n  {text}\n", FILE)
    assert str(raised.value).startswith(f"retinue.yaml:{error}")


def test_a_profile_names_servers_that_there_are() -> None:
    with pytest.raises(ConfigError) as raised:
        parse_settings(GOOD.replace("mcp__tracker__search", "mcp__traker__search"), FILE)
    assert str(raised.value) == (
        "retinue.yaml:16: key 'profiles.explorer.tools[2]': there is no MCP server 'traker' in 'mcp_servers'; "
        "available: files, tracker; did you mean 'tracker'?"
    )


def test_it_waits_for_a_yes_with_what_names_it() -> None:
    narrow, words = restrict(parse_settings(GOOD, FILE))
    assert [str(each) for each in words] == [
        "mcp_servers.files: npx -y some-server . (gets HTTPS_PROXY, MY_TOKEN; LEVEL=1; TOKEN=...; in tools)",
        "mcp_servers.tracker: https://mcp.example.com/mcp (gets TRACKER_TOKEN)",
    ]
    assert narrow.mcp_servers == () and narrow.profiles["explorer"]["tools"] == ("read",)


@pytest.mark.parametrize("given", [{"a": {"comand": "x"}}, {"a b": {"command": "x"}}, {"a": {"command": ["x"]}}])
async def test_in_python_the_same_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"^mcp_servers: a"):
        async with retinue.open(mcp_servers=given):
            pass


async def test_a_file_that_is_named_is_trusted_by_that(tmp_path: Path) -> None:
    file = tmp_path / "other.yaml"
    file.write_text(GOOD)
    async with retinue.open(
        config=file, project=tmp_path, model="scripted:x", mcp_servers={"b": {"url": "http://h"}}
    ) as r:
        servers: Any = r.control.servers
        assert list(servers.connections) == ["files", "tracker", "b"]


def test_the_question_shows_all_that_decides_which_code_runs() -> None:
    text = "mcp_servers: {a: {command: npx, cwd: sub, env: {NODE_OPTIONS: --require ./x.js, A_TOKEN: t0p-53cret}}}"
    [words] = restrict(parse_settings(text, FILE))[1]
    assert str(words) == "mcp_servers.a: npx (NODE_OPTIONS=--require ./x.js; A_TOKEN=...; in sub)"
