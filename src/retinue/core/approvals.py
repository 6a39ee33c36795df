"""The question a person is asked before a tool runs, and the answers there are."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

Answered = Literal["taken", "stale", "unknown"]


class Approval(msgspec.Struct, frozen=True, gc=False):
    """One pending question. `label` is None for the primary; `preview` is our own rendering of what would happen."""

    id: str
    tree: str
    run: int
    path: str
    agent: str
    tool: str
    args: dict[str, Any]
    call_id: str
    label: str | None = None
    preview: str = ""

    @property
    def digest(self) -> str:
        """What an answer is bound to: this action, exactly as it was shown."""
        action = (self.id, self.tool, self.args, self.preview)
        return hashlib.sha256(repr(action).encode("utf-8", "backslashreplace")).hexdigest()[:16]


class Allow(msgspec.Struct, frozen=True, gc=False, tag="allow"):
    """Yes, this call."""


class Deny(msgspec.Struct, frozen=True, gc=False, tag="deny"):
    """No; the model reads the reason."""

    reason: str = ""


Decision = Allow | Deny


def denial(decision: Deny) -> str:
    """What the model reads when it was told no."""
    return f"The user denied this call: {decision.reason}" if decision.reason else "The user denied this call."
