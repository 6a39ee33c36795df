"""`mcp_servers` of retinue.yaml, and the same as Python values: which MCP servers runs may have tools from.

mcp_servers:
  files:
    command: npx
    args: [-y, "@modelcontextprotocol/server-filesystem", .]
  tracker:
    url: https://mcp.example.com/mcp
    headers: {Authorization: "Bearer ${TRACKER_TOKEN}"}
    tools: [search_*, get_issue]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from retinue.config.located import Node, node_of
from retinue.config.location import Place, meant
from retinue.config.schema import POSITIVE, TEXTS, WORD, Key, Kind, Shape, texts_like
from retinue.core.errors import ConfigError
from retinue.core.profiles import LOCAL_TOOLS, SPAWN_TOOLS, WEB_TOOLS
from retinue.core.servers import PREFIX, SERVER_NAME, McpServer, check_server_name, server_of

VARIABLE_NAME = r"^[A-Za-z_][A-Za-z0-9_]*$"
HEADER_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
ONLY_PROGRAM, ONLY_ADDRESS = ("args", "env", "inherit_env", "cwd"), ("headers",)
PYTHON = "mcp_servers"
TOOLS = (*LOCAL_TOOLS, *WEB_TOOLS, *SPAWN_TOOLS)
TOOL_PATTERN = rf"^({'|'.join(TOOLS)}|(subagent_|{PREFIX})[^\n]+)$(?!\n)"  # in Python and in a JSON schema


def _named(pattern: str, what: str) -> Callable[[str], str]:
    def check(name: str) -> str:
        if not re.fullmatch(pattern, name):
            raise ConfigError(f"{name!r} is no name of {what}")
        return name

    return check


def _texts_by_name(pattern: str, what: str) -> Kind:
    """A mapping of such names to texts of one line."""
    check = _named(pattern, what)

    def read(node: Node) -> dict[str, str]:
        found = {}
        for name, entry in node.section().entries.items():
            Node(entry.place, name).checked(check)
            found[name] = _line(entry)
        return found

    about = {"type": "string", "pattern": r"^[^\r\n\0]*$"}
    return Kind(read, {"type": "object", "propertyNames": {"pattern": pattern}, "additionalProperties": about})


def _line(node: Node) -> str:
    text = node.text()
    if any(char in text for char in "\r\n\0"):
        raise node.error("must be one line")
    return text


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and text.isprintable()
    except ValueError:
        sound = False
    if not sound or any(char.isspace() for char in text):
        raise ConfigError(f"{text!r} is no http or https address")
    if "@" in parts.netloc:
        raise ConfigError("has a user's name in it; give what opens it in 'headers', with ${VARIABLE}")
    return text


SERVER = Shape(
    "One MCP server: a program that is started, or an address",
    (
        Key("command", WORD, "the program to start", "npx"),
        Key("args", TEXTS, "its arguments", "[-y, some-mcp-server]"),
        Key("env", _texts_by_name(VARIABLE_NAME, "a variable"),
            "variables it gets; ${NAME} is the value of one of yours", '{TOKEN: "${TRACKER_TOKEN}"}'),
        Key("inherit_env", texts_like(lambda node: node.checked(_named(VARIABLE_NAME, "a variable")), VARIABLE_NAME,
            what="a list of names"), "variables of yours it gets as they are, beside PATH, HOME and the like",
            "[HTTPS_PROXY]"),
        Key("cwd", WORD, "the folder it is started in; the project's unless named", "tools"),
        Key("url", Kind(lambda node: node.checked(_url), {"type": "string", "pattern": r"^https?://[^\s@]+$"}),
            "its address, for streamable HTTP", "https://mcp.example.com/mcp"),
        Key("headers", _texts_by_name(HEADER_NAME, "a header"), "what is sent with every request",
            '{Authorization: "Bearer ${TRACKER_TOKEN}"}'),
        Key("timeout", POSITIVE, "seconds a call may be silent; null: as long as its run has", "300"),
        Key("startup_timeout", POSITIVE, "seconds it may take to answer first", "30", null=False),
        Key("tools", TEXTS, "those of its tools that are wanted, by name or pattern; all unless named", "[search_*]"),
    ),
    {"type": "is not needed: give 'command' for a program, or 'url' for an address"},
)  # fmt: skip


def _servers(node: Node) -> tuple[McpServer, ...]:
    found = []
    names: dict[str, str] = {}
    for name, entry in node.section().entries.items():
        Node(entry.place, name).checked(check_server_name)
        other = names.setdefault(name.casefold(), name)
        if other != name:
            raise entry.error(f"is the same name as '{other}'")
        found.append(_server(name, entry))
    return tuple(found)


def _server(name: str, node: Node) -> McpServer:
    section = node.section()
    found = SERVER.read(section)
    command, url = found.get("command"), found.get("url")
    if (command is None) == (url is None):
        raise node.error(
            "give it a 'command' to start, or a 'url' to reach" + ("" if command is None else ", not both")
        )
    for key in ONLY_ADDRESS if url is None else ONLY_PROGRAM:
        if found.get(key):
            raise section.entries[key].error(f"is for a server with a '{'url' if url is None else 'command'}'")
    given = {key: value for key, value in found.items() if value is not None or key == "timeout"}
    return McpServer(name, **given)


SERVERS = Kind(
    _servers,
    {
        "type": "object",
        "propertyNames": {"pattern": SERVER_NAME},
        "additionalProperties": SERVER.schema(),
    },
)


def _tool(name: str) -> str:
    if not re.match(TOOL_PATTERN, name):
        there = ", ".join([*TOOLS, "subagent_NAME", f"{PREFIX}SERVER__TOOL"])
        raise ConfigError(f"there is no tool {name!r}; there is {there}{meant(name, TOOLS)}")
    return name


TOOL_NAMES = texts_like(lambda node: node.checked(_tool), TOOL_PATTERN, what="a list of tools")


def check_tools(tools: Node | None, servers: tuple[McpServer, ...]) -> None:
    """The tools of a profile name servers that there are."""
    names = [server.name for server in servers]
    for entry in tools.items() if tools is not None and tools.value is not None else ():
        server = server_of(entry.value)
        if server and server not in names:
            there = ", ".join(names) or "none"
            raise entry.error(
                f"there is no MCP server '{server}' in 'mcp_servers'; there is {there}{meant(server, names)}"
            )


def servers_from(given: Mapping[str, Mapping[str, Any]]) -> tuple[McpServer, ...]:
    """The same as Python values."""
    return _servers(node_of({name: dict(about) for name, about in given.items()}, Place(PYTHON)))
