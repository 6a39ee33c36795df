"""Scripts of a scripted model, as values. `config` reads them from files; tests and libraries build them directly."""

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

    `{{last_result}}` in a text stands for the last tool result. `delay` is the number of seconds before the reply,
    `chunks` the number of deltas of its text. Faults: `refuse` (text), `error` (text, with `status`), `crash` (an
    exception in the provider), `cut` (the text arrives, then the stream ends in the middle), `hang` (never
    answers)."""

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
    """Replies by run: a path, a label or subagent_id, an agent name, or `"*"`. The most specific entry wins.

    After the last reply a run gets the text `done`, or an error if the script is `strict`."""

    agents: dict[str, tuple[ScriptedReply, ...]]
    strict: bool = False
