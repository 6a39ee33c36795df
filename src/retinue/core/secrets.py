"""What must never be written down: keys, tokens, passwords. Known by their value, or by how they look."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

SCRUBBED = "[scrubbed]"
SHORTEST = 8  # a shorter value is a word that stands elsewhere too
_NAMES = re.compile(r"(^|_)(KEY|KEYS|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|AUTH|APIKEY)$", re.IGNORECASE)
_LOOKS = re.compile(
    r"""
    \b(?:sk|rk|pk)-[A-Za-z0-9_-]{16,}             # Anthropic, OpenAI and those who do as they do
    | \b(?:sk|rk)_(?:live|test)_[A-Za-z0-9]{16,}
    | \bgh[pousr]_[A-Za-z0-9]{20,} | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bxox[abeoprs]-[A-Za-z0-9-]{10,}
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b
    | \bAIza[A-Za-z0-9_-]{30,}
    | \beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]*
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_HEADERS = re.compile(
    r"(\b(?:proxy-)?authorization[\"']?\s*[:=]\s*[\"']?(?:(?:bearer|basic|token)\s+)?|\bbearer\s+|\bx-api-key[\"']?\s*[:=]\s*[\"']?)"
    r"[A-Za-z0-9+/._~=-]{8,}",
    re.IGNORECASE,
)


def values(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The values in an environment that are secret by their names; the longest first, as one may hold another."""
    found = {value for name, value in environment.items() if _NAMES.search(name) and len(value) >= SHORTEST}
    return tuple(sorted(found, key=lambda value: (-len(value), value)))


def scrub(text: str, known: Sequence[str] = ()) -> str:
    """The text without the secrets in it: those known by value, and what looks like one."""
    for value in known:
        text = text.replace(value, SCRUBBED)
    text = _LOOKS.sub(SCRUBBED, text)
    return _HEADERS.sub(rf"\1{SCRUBBED}", text)
