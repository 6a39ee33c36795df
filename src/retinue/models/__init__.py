"""Models behind the `Model` port. An adapter knows one provider and nothing of runs, logs or budgets.

The names below are for model classes of your own: docs/own-models.md."""

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
