"""Settings of remote agents in retinue.yaml. Each agent becomes a profile to which a parent can delegate.

a2a_agents:
  argocd:
    url: https://agents.example.com/argocd
    description: Knows the deployments.
    auth: {bearer_env: ARGOCD_TOKEN}
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retinue.config.located import Node
from retinue.config.location import SourceLocation
from retinue.config.schema import (
    POSITIVE,
    TEXTS,
    WORD,
    Kind,
    Loosening,
    Setting,
    TrustRule,
    list_of,
    read_section,
    section,
    section_schema,
    setting,
    text_for,
)
from retinue.config.servers import ADDRESS_PATTERN, HEADER, VARIABLE, parse_address
from retinue.core.errors import ConfigError
from retinue.core.profiles import NAME_PATTERN, Profile, check_name
from retinue.core.remote_agents import (
    ANSWER_SECONDS,
    API_KEY_HEADER,
    IDLE_SECONDS,
    RECONNECT_SECONDS,
    A2aAgent,
    AgentAuth,
)

HOST_PATTERN = r"^[A-Za-z0-9.\-\[\]:]+$"


def check_agent_url(text: str) -> str:
    """Return the address of an agent without trailing slashes. Raises ConfigError if it is not an address."""
    return parse_address(text, with_user="a URL may not contain a user name: set credentials in 'auth'").rstrip("/")


_URL = text_for(check_agent_url, ADDRESS_PATTERN)


def _check_host(text: str) -> str:
    if not re.fullmatch(HOST_PATTERN, text):
        raise ConfigError(f"{text!r} is not a host, or a host and a port")
    return text.lower()


_HOSTS = list_of(text_for(_check_host, HOST_PATTERN), what="a list of hosts")


@dataclass(frozen=True)
class AuthSettings:
    """Credentials of a remote agent; secrets stay in the environment."""

    bearer_env: str = setting(
        VARIABLE, "the environment variable with a bearer token", default="", example="ARGOCD_TOKEN"
    )
    api_key_env: str = setting(VARIABLE, "the environment variable with an API key", default="", example="ARGOCD_KEY")
    api_key_header: str = setting(HEADER, "the header that carries the API key", default=API_KEY_HEADER)
    client_id_env: str = setting(
        VARIABLE,
        "OAuth client credentials: the environment variable with the client's id",
        default="",
        example="ARGOCD_CLIENT",
    )
    client_secret_env: str = setting(
        VARIABLE, "the environment variable with the client's secret", default="", example="ARGOCD_SECRET"
    )
    token_url: str = setting(
        _URL,
        "where to get tokens (default: the URL in the card, if its host is allowed)",
        default="",
        example="https://login.example.com/token",
    )
    scopes: tuple[str, ...] = setting(TEXTS, "the scopes to ask for", default=(), example="[agents.call]")


@dataclass(frozen=True)
class AgentSettings:
    """One remote agent that speaks A2A."""

    url: str = setting(_URL, "its base URL", default="", example="https://agents.example.com")
    description: str = setting(
        WORD, "what it is for; a parent model reads it when it chooses", default="", example="Knows the deployments."
    )
    auth: AuthSettings = section(AuthSettings, "its credentials", example="{bearer_env: ARGOCD_TOKEN}")
    timeout: float = setting(POSITIVE, "seconds to wait for the answer to a request", default=ANSWER_SECONDS)
    idle_timeout: float = setting(
        POSITIVE, "seconds without data after which its task is looked up again", default=IDLE_SECONDS
    )
    reconnect_timeout: float = setting(POSITIVE, "seconds to keep trying to reach it again", default=RECONNECT_SECONDS)
    allowed_hosts: tuple[str, ...] = setting(
        _HOSTS,
        "other hosts, with ports, that its card may point to",
        default=(),
        example="[agents.example.com:8443]",
    )


@dataclass(frozen=True)
class RemoteAgent:
    """The profile of a remote agent, and its place in the file."""

    profile: Profile
    place: SourceLocation = field(compare=False)


def _read_agents(node: Node) -> tuple[RemoteAgent, ...]:
    return tuple(_read_agent(name, entry) for name, entry in node.named_entries(check_name).items())


def _read_agent(name: str, node: Node) -> RemoteAgent:
    values = read_section(AgentSettings, node)
    if not values.url:
        raise node.error("give it a 'url'")
    auth = values.auth
    if bool(auth.client_id_env) != bool(auth.client_secret_env):
        raise node.error("'client_id_env' and 'client_secret_env' go together")
    ways = [bool(auth.bearer_env), bool(auth.api_key_env), bool(auth.client_id_env)]
    if sum(ways) > 1:
        raise node.error("'auth' may have only one of: a bearer token, an API key, OAuth client credentials")
    agent = A2aAgent(
        url=values.url,
        auth=AgentAuth(**vars(auth)),
        timeout=values.timeout,
        idle_timeout=values.idle_timeout,
        reconnect_timeout=values.reconnect_timeout,
        allowed_hosts=values.allowed_hosts,
    )
    about = values.description or f"The agent at {values.url}"
    return RemoteAgent(make_remote_profile(name, agent, about, source=Path(node.place.file).name), node.place)


def make_remote_profile(name: str, agent: A2aAgent, description: str, *, source: str = "python") -> Profile:
    """Return the profile of a remote agent. The agent has its own tools and model."""
    return Profile(name, description=description, tools=(), leaf=True, a2a=agent, source=source)


def _drop_agents(agents: tuple[RemoteAgent, ...], _: Setting) -> tuple[Any, list[Loosening]]:
    """Drop all agents: without trust, a project must not send tasks and secrets to any agent."""
    return (), [Loosening(agent.profile.name, _describe(agent.profile.a2a)) for agent in agents]


def _describe(agent: A2aAgent | None) -> str:
    assert agent is not None
    gets = f" (gets {', '.join(agent.auth.variables)})" if agent.auth.variables else ""
    return f"{agent.url}{gets}"


NEW_AGENTS = TrustRule("any agent", _drop_agents)
AGENTS = Kind(
    _read_agents,
    {
        "type": "object",
        "propertyNames": {"pattern": NAME_PATTERN},
        "additionalProperties": section_schema(AgentSettings),
    },
)
