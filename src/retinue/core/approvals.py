"""The question a person is asked before a tool runs, and the answers there are."""

from __future__ import annotations

from typing import Any

import msgspec


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


class Allow(msgspec.Struct, frozen=True, gc=False, tag="allow"):
    """Yes, this call."""


class Deny(msgspec.Struct, frozen=True, gc=False, tag="deny"):
    """No; the model reads the reason."""

    reason: str = ""


Decision = Allow | Deny


def denial(decision: Deny) -> str:
    """What the model reads when it was told no."""
    return f"The user denied this call: {decision.reason}" if decision.reason else "The user denied this call."
