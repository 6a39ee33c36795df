"""Settings of MCP servers, from retinue.yaml or Python values, and the names of tools.

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
from collections.abc import Mapping
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from retinue.config.located import Node, make_node
from retinue.config.location import SourceLocation, suggest
from retinue.config.schema import (
    POSITIVE,
    TEXTS,
    WORD,
    Kind,
    Loosening,
    Section,
    Setting,
    list_of,
    make_named_schema,
    text_for,
    text_like,
    trust_none,
)
from retinue.core.errors import ConfigError
from retinue.core.profiles import LOCAL_TOOLS, SPAWN_TOOLS, WEB_TOOLS
from retinue.core.secrets import is_named
from retinue.core.servers import (
    CALL_SECONDS,
    PREFIX,
    SERVER_NAME,
    STARTUP_SECONDS,
    McpServer,
    check_server_name,
    server_of,
)

VARIABLE = text_like(r"^[A-Za-z_][A-Za-z0-9_]*$", "the name of a variable")
HEADER = text_like(r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$", "the name of a header")
USER_IN_URL = "contains a user name; put credentials into 'headers', as ${VARIABLE}"
ADDRESS_PATTERN = r"^https?://[^\s@]+$"
ONLY_PROGRAM, ONLY_ADDRESS = ("args", "env", "inherit_env", "cwd"), ("headers",)
PYTHON = "mcp_servers"
TOOLS = (*LOCAL_TOOLS, *WEB_TOOLS, *SPAWN_TOOLS)
TOOL_PATTERN = rf"^({'|'.join(TOOLS)}|(subagent_|{PREFIX})[^\n]+)$(?!\n)"  # valid in Python and in a JSON schema


def _texts_by_name(name: Kind) -> Kind:
    """Return the kind of a mapping from names of kind `name` to one-line texts."""

    def read(node: Node) -> dict[str, str]:
        return {name.read(Node(entry.place, key)): _read_line(entry) for key, entry in node.entries().items()}

    line = {"type": "string", "pattern": r"^[^\r\n\0]*$"}
    return Kind(read, lambda: make_named_schema(name.make_schema()["pattern"], line))


def _read_line(node: Node) -> str:
    text = node.text()
    if any(char in text for char in "\r\n\0"):
        raise node.error("must be one line")
    return text


def parse_address(text: str, *, with_user: str) -> str:
    """Return an http or https address. Raises ConfigError, with the text `with_user` if the address contains a user
    name."""
    try:
        parts = urlsplit(text)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_sound = False
    if not is_sound or not text.isprintable() or any(char.isspace() for char in text):
        raise ConfigError(f"{text!r} is not an http or https URL")
    if "@" in parts.netloc:
        raise ConfigError(with_user)
    return text


SERVER = Section(
    "One MCP server: a program that is started, or an address",
    McpServer,
    {
        "command": Setting(WORD, "the program to start", example="npx"),
        "args": Setting(TEXTS, "its arguments", example="[-y, some-mcp-server]"),
        "env": Setting(
            _texts_by_name(VARIABLE),
            "its environment variables; ${NAME} is the value of your variable NAME",
            example='{TOKEN: "${TRACKER_TOKEN}"}',
        ),
        "inherit_env": Setting(
            list_of(VARIABLE, what="a list of names"),
            "names of your variables to pass on, besides PATH, HOME and the like",
            example="[HTTPS_PROXY]",
        ),
        "cwd": Setting(WORD, "the folder it is started in (default: the project)", example="tools"),
        "url": Setting(
            text_for(partial(parse_address, with_user=USER_IN_URL), ADDRESS_PATTERN),
            "its address, for streamable HTTP",
            example="https://mcp.example.com/mcp",
        ),
        "headers": Setting(
            _texts_by_name(HEADER), "sent with every request", example='{Authorization: "Bearer ${TRACKER_TOKEN}"}'
        ),
        "timeout": Setting(
            POSITIVE,
            "seconds that a call may be silent; null: no limit of its own",
            default=CALL_SECONDS,
            null="unlimited",
        ),
        "startup_timeout": Setting(
            POSITIVE, "seconds to wait for its first answer", default=STARTUP_SECONDS, null="refused"
        ),
        "tools": Setting(TEXTS, "its tools to use, by name or pattern (default: all)", example="[search_*]"),
    },
    hints={"type": "is not needed: give 'command' for a program, or 'url' for an address"},
)


def _read_servers(node: Node) -> tuple[McpServer, ...]:
    return tuple(_read_server(name, entry) for name, entry in node.named_entries(check_server_name).items())


def _read_server(name: str, node: Node) -> McpServer:
    server: McpServer = SERVER.read_value(node, name=name)
    if bool(server.command) == bool(server.url):
        raise node.error("give it a 'command' to start, or a 'url' to reach" + (", not both" if server.url else ""))
    for key in ONLY_PROGRAM if server.url else ONLY_ADDRESS:
        if getattr(server, key):
            raise node.entries()[key].error(f"is for a server with a '{'command' if server.url else 'url'}'")
    return server


def _describe_servers(servers: tuple[McpServer, ...]) -> list[Loosening]:
    return [Loosening(server.name, f"{server.words}{_describe_environment(server)}") for server in servers]


def _describe_environment(server: McpServer) -> str:
    """Return the variables and the folder that a server gets, because they too decide which code runs."""
    told = [f"gets {', '.join(server.gets)}"] if server.gets else []
    told += [f"{name}={'...' if is_named(name) else value}" for name, value in server.env.items()]
    told += [] if server.cwd is None else [f"in {server.cwd}"]
    return f" ({'; '.join(told)})" if told else ""


# Without trust, a project must not start or contact any server.
NEW_SERVERS = trust_none("any server", _describe_servers)
SERVERS = Kind(_read_servers, lambda: make_named_schema(SERVER_NAME, SERVER.make_schema()))


def _check_tool(name: str) -> str:
    if not re.match(TOOL_PATTERN, name):
        there = ", ".join([*TOOLS, "subagent_NAME", f"{PREFIX}SERVER__TOOL"])
        raise ConfigError(f"there is no tool {name!r}; available: {there}{suggest(name, TOOLS)}")
    return name


TOOL_NAMES = list_of(text_for(_check_tool, TOOL_PATTERN), what="a list of tools")


def check_tool_servers(tools: Node | None, servers: tuple[McpServer, ...]) -> None:
    """Check that the tools of a profile name only servers that exist."""
    names = [server.name for server in servers]
    for entry in () if tools is None else tools.items():
        server = server_of(entry.value)
        if server and server not in names:
            there = ", ".join(names) or "none"
            raise entry.error(
                f"there is no MCP server '{server}' in 'mcp_servers'; available: {there}{suggest(server, names)}"
            )


def parse_servers(values: Mapping[str, Mapping[str, Any]]) -> tuple[McpServer, ...]:
    """Read servers from Python values, with the same checks."""
    return _read_servers(make_node({name: dict(about) for name, about in values.items()}, SourceLocation(PYTHON)))
