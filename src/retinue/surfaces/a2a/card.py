"""The agent card of a served profile: what it is, where it is reached, and which extension it has."""

from __future__ import annotations

from a2a.types import (
    AgentCapabilities,
    AgentCard,
    AgentExtension,
    AgentInterface,
    AgentSkill,
    HTTPAuthSecurityScheme,
    SecurityRequirement,
    SecurityScheme,
    StringList,
)
from a2a.utils.constants import PROTOCOL_VERSION_0_3, PROTOCOL_VERSION_1_0, TransportProtocol

from retinue.core.profiles import Profile
from retinue.protocol.a2a import EXTENSION
from retinue.protocol.notices import format_name

CACHE_CONTROL = "public, max-age=60"
MODES = ["text/plain"]
INPUT_MODES = ["text/plain", "application/json", "application/octet-stream"]
BEARER = "bearer"


def make_card(profile: Profile, url: str, *, version: str, has_tokens: bool, is_approved_by_client: bool) -> AgentCard:
    """Return the card of a profile that is served at `url`."""
    about = profile.description or f"The agent '{profile.name}'"
    extension = AgentExtension(uri=EXTENSION, description="Every event of the tree of runs, with limits and approvals")
    extension.params.update({"approve_by": "client" if is_approved_by_client else "host"})
    card = AgentCard(
        name=format_name(profile.name),
        description=about,
        version=version,
        supported_interfaces=[
            AgentInterface(url=url, protocol_binding=binding, protocol_version=number)
            for binding in (TransportProtocol.JSONRPC, TransportProtocol.HTTP_JSON)
            for number in (PROTOCOL_VERSION_1_0, PROTOCOL_VERSION_0_3)
        ],
        capabilities=AgentCapabilities(streaming=True, push_notifications=False, extensions=[extension]),
        default_input_modes=INPUT_MODES,
        default_output_modes=MODES,
        skills=[AgentSkill(id=profile.name, name=format_name(profile.name), description=about, tags=["agent"])],
    )
    if has_tokens:
        card.security_schemes[BEARER].CopyFrom(
            SecurityScheme(http_auth_security_scheme=HTTPAuthSecurityScheme(scheme="Bearer"))
        )
        card.security_requirements.append(SecurityRequirement(schemes={BEARER: StringList()}))
    return card
