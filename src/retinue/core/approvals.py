"""Approval questions about tool calls, and the possible answers."""

from __future__ import annotations

import hashlib
import inspect
import typing
from datetime import datetime
from typing import Any, Literal

import msgspec

from retinue.core.errors import ConfigError
from retinue.core.sendable import find_problem

Scope = Literal["call", "run", "tool", "project"]
SCOPES: tuple[Scope, ...] = typing.get_args(Scope)
Answered = Literal["taken", "stale", "unknown"]
INPUT_REQUIRED = "input_required"  # tool name of an agent's free-text question, which only a person can answer
PROGRAM_ENDED = "The program that made this call ended before it; nobody waited for its result."


class Approval(msgspec.Struct, frozen=True, gc=False):
    """A pending question about a tool call.

    `label` is None for the primary. `preview` is Retinue's own rendering of the effects of the call. `rule` holds the
    rules to save for an answer with scope `project`, a line each, and is empty if no rule describes exactly this call.
    `digest` identifies the action shown, so that an answer can refer to it. `number` is the position of the question
    among all questions of its tree, never changed and never reused."""

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
    """A yes to a question. `scope` says how far it goes: this call, this tool for the rest of this run (`run`), this
    tool in the whole tree (`tool`), or always in this project (`project`). `args` replace the arguments of the call.
    `all_pending_of_run` answers all pending questions of the run."""

    scope: Scope = "call"
    args: dict[str, Any] | None = None
    all_pending_of_run: bool = False


class Deny(msgspec.Struct, frozen=True, gc=False, tag="deny", omit_defaults=True):
    """A no to a question. The model reads the `reason`. `all_pending_of_run` answers all pending questions of the
    run."""

    reason: str = ""
    all_pending_of_run: bool = False


Decision = Allow | Deny


class QuestionClosed(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A question that no longer waits for an answer. `allowed` is None if its run ended first. Otherwise the fields
    describe the answer: its author (`by`), the `surface`, the `reason`, the time (`at`), and the
    `key` that its sender gave it."""

    id: str
    allowed: bool | None = None
    by: str = ""
    surface: str = ""
    reason: str = ""
    at: float = 0.0
    key: str = ""


QuestionChange = Approval | QuestionClosed


def describe_closing(closed: QuestionClosed) -> str:
    """Return a line about the answer, such as `approved by user at pts/3 (retinue approve) at 14:03:11`."""
    if closed.allowed is None:
        return "no longer needed: its run ended"
    where = f" ({closed.surface})" if closed.surface else ""
    when = f" at {datetime.fromtimestamp(closed.at):%H:%M:%S}" if closed.at else ""
    reason = f": {closed.reason}" if closed.reason else ""
    word = "approved" if closed.allowed else "denied"
    return f"{word} by {closed.by or 'somebody'}{where}{when}{reason}"


def describe_denial(decision: Deny) -> str:
    """Return the text that the model reads instead of the result of a denied call."""
    return f"The user denied this call: {decision.reason}" if decision.reason else "The user denied this call."


def is_edit(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return True if two sets of arguments differ as JSON. In Python, `1`, `1.0` and `True` are equal."""
    return _encode_plain(before) != _encode_plain(after)


def describe_edit(args: dict[str, Any]) -> str:
    """Return the text that the model reads before the result of a call whose arguments the user changed."""
    return f"[The user changed the arguments of this call to {_encode_plain(args).decode()}]"


def digest_of(tree: str, *, run: int, call_id: str, tool: str, args: dict[str, Any]) -> str:
    """Return a digest that identifies exactly this call of this run."""
    return hashlib.sha256(_encode_plain([tree, run, call_id, tool, args])).hexdigest()[:32]


def _encode_plain(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value, enc_hook=repr, order="deterministic")
    except (UnicodeEncodeError, TypeError, ValueError, RecursionError):  # a lone surrogate, or not JSON at all
        return ascii(value).encode()


def find_answer_text(decision: Allow) -> str:
    """Return the user's own text in the answer to a free-text question, or ''."""
    text = (decision.args or {}).get("answer")
    return text if isinstance(text, str) else ""


def check_approver(approver: object) -> None:
    """Raise ConfigError if `approver` can never answer: it is not async, cannot be called with just the question, or
    is annotated to return something other than Allow or Deny."""
    name = getattr(approver, "__name__", type(approver).__name__)
    wanted = "write `async def decide(question: Approval) -> Allow | Deny`"
    called = approver if inspect.isroutine(approver) else getattr(approver, "__call__", None)  # noqa: B004
    if isinstance(approver, type) or not callable(approver):
        raise ConfigError(f"the approver {name} is not a function: {wanted}")
    if not (inspect.iscoroutinefunction(approver) or inspect.iscoroutinefunction(called)):
        raise ConfigError(f"the approver {name} is not async: {wanted}")
    try:
        inspect.signature(approver).bind(None)
    except TypeError as error:
        raise ConfigError(f"the approver {name} cannot be called with a question ({error}): {wanted}") from None
    except ValueError:  # no signature available
        return
    try:
        declared = typing.get_type_hints(called).get("return", Any)
    except (NameError, TypeError, AttributeError):  # annotations that cannot be resolved at run time
        return
    if declared in (bool, int, str, type(None)):
        raise ConfigError(f"the approver {name} returns {getattr(declared, '__name__', declared)}: {wanted}")


def check_decision(decision: object) -> Allow | Deny:
    """Return `decision`, or raise ConfigError if it is not a valid Allow or Deny."""
    if not isinstance(decision, Allow | Deny):
        raise ConfigError(f"the approver answered {decision!r}, which is neither Allow nor Deny")
    if isinstance(decision, Deny):
        return decision if isinstance(decision.reason, str) else Deny(str(decision.reason or ""))
    if decision.scope not in SCOPES:
        raise ConfigError(f"the approver answered with a scope of {decision.scope!r}; available: {', '.join(SCOPES)}")
    if decision.args is not None and not isinstance(decision.args, dict):
        kind = type(decision.args).__name__
        raise ConfigError(f"the approver answered with arguments that are {kind}, not a mapping")
    if why := find_problem(decision.args):
        raise ConfigError(f"the approver answered with arguments that cannot be used: {why}")
    return decision
