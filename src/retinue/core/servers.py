"""The configuration of an MCP server: how to start or reach it, and which of its tools to use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import msgspec

from retinue.core.errors import ConfigError

PREFIX = "mcp__"
SERVER_NAME = r"^(?!.*__)[A-Za-z0-9](?:[A-Za-z0-9_-]{0,30}[A-Za-z0-9])?$(?!\n)"  # in Python and in a JSON schema
CALL_SECONDS = 300.0
STARTUP_SECONDS = 30.0
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_NAME = re.compile(SERVER_NAME)


class McpServer(msgspec.Struct, frozen=True):
    """A configured MCP server: a program to start (`command`), or an address (`url`). A program gets few of our
    environment variables: those in `inherit_env`, and `env`. In `env` and `headers`, `${NAME}` is one of our
    variables. `timeout` is how long a call may be silent; None means as long as its run has. `tools` are names or
    patterns; None means all."""

    name: str
    command: str = ""
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = {}
    inherit_env: tuple[str, ...] = ()
    cwd: str | None = None
    url: str = ""
    headers: Mapping[str, str] = {}
    timeout: float | None = CALL_SECONDS
    startup_timeout: float = STARTUP_SECONDS
    tools: tuple[str, ...] | None = None

    @property
    def words(self) -> str:
        """The command or the address, as configured."""
        return self.url or " ".join((self.command, *self.args))

    @property
    def gets(self) -> tuple[str, ...]:
        """The names of our environment variables whose values the server is given."""
        values = (*self.env.values(), *self.headers.values())
        return tuple(dict.fromkeys((*self.inherit_env, *(name for value in values for name in list_variables(value)))))


class ServerReport(msgspec.Struct, frozen=True):
    """The state of a server: the number of its tools and its protocol revision, or the `error`."""

    name: str
    words: str
    error: str = ""
    tools: int = 0
    revision: str = ""
    notes: tuple[str, ...] = ()


def check_server_name(name: str) -> str:
    """Return `name` if it can be part of a tool's name; else raise ConfigError."""
    if not _NAME.match(name):
        raise ConfigError(
            f"server name {name!r} must be 1 to 32 letters, digits, '-' or single '_', with a letter or digit at "
            "both ends"
        )
    return name


def server_of(entry: object) -> str:
    """Return the server that an entry of a profile's tools refers to; empty if it refers to none."""
    if not isinstance(entry, str) or not entry.startswith(PREFIX):
        return ""
    return entry.removeprefix(PREFIX).partition("__")[0]


def list_variables(text: str) -> Iterator[str]:
    """Return the names of the environment variables that a text refers to as `${NAME}`."""
    return (found[1] for found in _VARIABLE.finditer(text))


def fill_variables(text: str, environ: Mapping[str, str]) -> str:
    """Return the text with its variables replaced by their values. Raises ConfigError if a variable is not set."""
    for name in list_variables(text):
        if name not in environ:
            raise ConfigError(f"the variable {name} is not set")
    return _VARIABLE.sub(lambda found: environ[found[1]], text)
