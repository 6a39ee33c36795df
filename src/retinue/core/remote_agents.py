"""The configuration of a remote agent: its address, its credentials and its timeouts. Also the facts of its card."""

from __future__ import annotations

import re

import msgspec

ANSWER_SECONDS = 30.0
IDLE_SECONDS = 60.0
RECONNECT_SECONDS = 60.0
API_KEY_HEADER = "X-API-Key"


class AgentAuth(msgspec.Struct, frozen=True, kw_only=True):
    """Credentials of a remote agent. Secrets are given as names of environment variables: a bearer token, an API key
    with its header, or the client of an OAuth client-credentials flow. Without `token_url`, the URL in the agent's
    card is used if its host is allowed."""

    bearer_env: str = ""
    api_key_env: str = ""
    api_key_header: str = API_KEY_HEADER
    client_id_env: str = ""
    client_secret_env: str = ""
    token_url: str = ""
    scopes: tuple[str, ...] = ()

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables whose values are sent."""
        named = (self.bearer_env, self.api_key_env, self.client_id_env, self.client_secret_env)
        return tuple(name for name in named if name)


class A2aAgent(msgspec.Struct, frozen=True, kw_only=True):
    """An agent called over A2A. `timeout` is the time limit for the answer to a request. `idle_timeout` is how long its
    stream may be silent before we check that the agent is still there. `reconnect_timeout` is how long we try to reach
    it again. All are in seconds. `allowed_hosts` are hosts, besides the host of `url`, that its card may send us to."""

    url: str
    auth: AgentAuth = AgentAuth()
    timeout: float = ANSWER_SECONDS
    idle_timeout: float = IDLE_SECONDS
    reconnect_timeout: float = RECONNECT_SECONDS
    allowed_hosts: tuple[str, ...] = ()

    @property
    def origins(self) -> frozenset[str]:
        """The hosts, with ports, that requests may go to."""
        named = [read_host(self.url), *(host.lower() for host in self.allowed_hosts)]
        return frozenset([*named, read_host(self.auth.token_url)] if self.auth.token_url else named)


def read_host(url: str) -> str:
    """Return the host and port of a URL, in lower case."""
    rest = url.partition("://")[2]
    return re.split(r"[/?#]", rest, maxsplit=1)[0].lower()


class AgentReport(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about an agent from its card."""

    name: str
    description: str
    version: str
    protocols: tuple[str, ...]
    is_streaming: bool
    is_retinue: bool
    notes: tuple[str, ...] = ()
