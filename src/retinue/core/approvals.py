"""The question a person is asked before a tool runs, and the answers there are."""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

Scope = Literal["call", "run", "tool", "project"]
SCOPES: tuple[Scope, ...] = ("call", "run", "tool", "project")
Answered = Literal["taken", "stale", "unknown"]


class Approval(msgspec.Struct, frozen=True, gc=False):
    """One pending question. `label` is None for the primary; `preview` is our own rendering of what would happen.

    `rule` is what an answer for the whole project would write, empty where no rule says just this; `digest` stands
    for the action shown, so that an answer can say which one it means. `number` is its place among all that its tree
    has asked, so it never changes and never means another one."""

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
    rule: str = ""
    digest: str = ""
    number: int = 0


class Allow(msgspec.Struct, frozen=True, gc=False, tag="allow", omit_defaults=True):
    """Yes: to this call, to this tool for the rest of this run, to this tool in the whole tree, or always in this
    project. `args` are the arguments to run it with instead; `all_pending_of_run` answers all that run asks now."""

    scope: Scope = "call"
    args: dict[str, Any] | None = None
    all_pending_of_run: bool = False


class Deny(msgspec.Struct, frozen=True, gc=False, tag="deny", omit_defaults=True):
    """No; the model reads the reason."""

    reason: str = ""
    all_pending_of_run: bool = False


Decision = Allow | Deny


def describe_denial(decision: Deny) -> str:
    """Return what the model reads when it was told no."""
    return f"The user denied this call: {decision.reason}" if decision.reason else "The user denied this call."


def describe_edit(args: dict[str, Any]) -> str:
    """Return what the model reads before the result of a call whose arguments were changed."""
    return f"[The user changed the arguments of this call to {_encode_plain(args).decode()}]"


def digest_of(tree: str, *, run: int, call_id: str, tool: str, args: dict[str, Any]) -> str:
    """Return a digest that stands for exactly this action of this run."""
    return hashlib.sha256(_encode_plain([tree, run, call_id, tool, args])).hexdigest()[:32]


def _encode_plain(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=repr, order="deterministic")
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError):  # half a character, or no JSON at all
        return ascii(value).encode()
