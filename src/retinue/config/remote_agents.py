"""Settings of remote agents in retinue.yaml. Each agent becomes a profile to which a parent can delegate.

a2a_agents:
  argocd:
    url: https://agents.example.com/argocd
    description: Knows the deployments.
    auth: {bearer_env: ARGOCD_TOKEN}
"""

from __future__ import annotations

from pathlib import Path

from retinue.config.located import Node
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
from retinue.config.servers import ADDRESS_PATTERN, HEADER, VARIABLE, parse_address
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
_HOSTS = list_of(text_like(HOST_PATTERN, "a host, or a host and a port", convert=str.lower), what="a list of hosts")

AUTH = Section(
    "Credentials of a remote agent; secrets stay in the environment",
    AgentAuth,
    {
        "bearer_env": Setting(VARIABLE, "the environment variable with a bearer token", example="ARGOCD_TOKEN"),
        "api_key_env": Setting(VARIABLE, "the environment variable with an API key", example="ARGOCD_KEY"),
        "api_key_header": Setting(HEADER, "the header that carries the API key", default=API_KEY_HEADER),
        "client_id_env": Setting(
            VARIABLE, "OAuth client credentials: the environment variable with the client's id", example="ARGOCD_CLIENT"
        ),
        "client_secret_env": Setting(
            VARIABLE, "the environment variable with the client's secret", example="ARGOCD_SECRET"
        ),
        "token_url": Setting(
            _URL,
            "where to get tokens (default: the URL in the card, if its host is allowed)",
            example="https://login.example.com/token",
        ),
        "scopes": Setting(TEXTS, "the scopes to ask for", example="[agents.call]"),
    },
)
AGENT = Section(
    "One remote agent that speaks A2A",
    A2aAgent,
    {
        "url": Setting(_URL, "its base URL", example="https://agents.example.com"),
        "description": Setting(
            WORD, "what it is for; a parent model reads it when it chooses", example="Knows the deployments."
        ),
        "auth": Setting(AUTH, "its credentials", example="{bearer_env: ARGOCD_TOKEN}"),
        "timeout": Setting(POSITIVE, "seconds to wait for the answer to a request", default=ANSWER_SECONDS),
        "idle_timeout": Setting(
            POSITIVE, "seconds without data after which its task is looked up again", default=IDLE_SECONDS
        ),
        "reconnect_timeout": Setting(POSITIVE, "seconds to keep trying to reach it again", default=RECONNECT_SECONDS),
        "allowed_hosts": Setting(
            _HOSTS, "other hosts, with ports, that its card may point to", example="[agents.example.com:8443]"
        ),
    },
)


def _read_agents(node: Node) -> tuple[Profile, ...]:
    return tuple(_read_agent(name, entry) for name, entry in node.named_entries(check_name).items())


def _read_agent(name: str, node: Node) -> Profile:
    given = AGENT.read(node)
    if "url" not in given:
        raise node.error("give it a 'url'")
    description = given.pop("description", f"The agent at {given['url']}")
    agent: A2aAgent = AGENT.make(given)
    auth = agent.auth
    if bool(auth.client_id_env) != bool(auth.client_secret_env):
        raise node.error("'client_id_env' and 'client_secret_env' go together")
    ways = [bool(auth.bearer_env), bool(auth.api_key_env), bool(auth.client_id_env)]
    if sum(ways) > 1:
        raise node.error("'auth' may have only one of: a bearer token, an API key, OAuth client credentials")
    return make_remote_profile(name, agent, description, source=Path(node.place.file).name)


def make_remote_profile(name: str, agent: A2aAgent, description: str, *, source: str = "python") -> Profile:
    """Return the profile of a remote agent. The agent has its own tools and model."""
    return Profile(name, description=description, tools=(), leaf=True, a2a=agent, source=source)


def _describe_agents(profiles: tuple[Profile, ...]) -> list[Loosening]:
    return [Loosening(profile.name, _describe(profile.a2a)) for profile in profiles]


def _describe(agent: A2aAgent | None) -> str:
    assert agent is not None
    gets = f" (gets {', '.join(agent.auth.variables)})" if agent.auth.variables else ""
    return f"{agent.url}{gets}"


# Without trust, a project must not send tasks and secrets to any agent.
NEW_AGENTS = trust_none("any agent", _describe_agents)
AGENTS = Kind(_read_agents, lambda: make_named_schema(NAME_PATTERN, AGENT.make_schema()))
