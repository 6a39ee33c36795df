"""Scripts of a scripted model, as values. Files become these in `config`; tests and libraries build them directly."""

from __future__ import annotations

from typing import Any

import msgspec


class ScriptedCall(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tool call of a reply."""

    name: str
    args: dict[str, Any] = {}


class ScriptedUsage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The usage that a reply reports."""

    input_tokens: int = 0
    output_tokens: int = 0


class ScriptedReply(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One reply: any of text, thinking and tools, or one fault.

    `{{last_result}}` in a text is the last tool result. `delay` is seconds before the reply, `chunks` the number
    of deltas its text comes in. Faults: `refuse` (text), `error` (text, with `status`), `crash` (an exception in the
    provider), `cut` (the text arrives, then the stream ends in the middle), `hang` (never answers).
    """

    text: str = ""
    thinking: str = ""
    tools: tuple[ScriptedCall, ...] = ()
    usage: ScriptedUsage = ScriptedUsage()
    delay: float = 0.0
    chunks: int = 1
    refuse: str | None = None
    error: str | None = None
    status: int | None = None
    crash: str | None = None
    cut: str | None = None
    hang: bool = False


class Script(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Replies by run: a path, a label or subagent_id, an agent name, or `"*"`, the most specific first.

    After the last reply a run gets the text `done`, or an error when the script is strict."""

    agents: dict[str, tuple[ScriptedReply, ...]]
    strict: bool = False
