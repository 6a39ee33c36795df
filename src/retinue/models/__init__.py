"""Models behind the `Model` port. An adapter knows one provider, and knows nothing of runs, logs or budgets.

The names exported here are for your own model classes: docs/own-models.md.
"""

from __future__ import annotations

from retinue.core.errors import ModelError
from retinue.core.messages import (
    AssistantTurn,
    Call,
    Model,
    OnDelta,
    Reply,
    Request,
    Thought,
    ToolSpec,
    ToolTurn,
    Turn,
    UserTurn,
)
from retinue.core.usage import Usage

__all__ = [
    "AssistantTurn",
    "Call",
    "Model",
    "ModelError",
    "OnDelta",
    "Reply",
    "Request",
    "Thought",
    "ToolSpec",
    "ToolTurn",
    "Turn",
    "Usage",
    "UserTurn",
]
