"""The question a person is asked before a tool runs, and the answers there are."""

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
INPUT_REQUIRED = "input_required"  # the tool of a question in an agent's own words, which only a person can answer


class Approval(msgspec.Struct, frozen=True, gc=False):
    """One pending question. `label` is None for the primary; `preview` is our own rendering of what would happen.

    `rule` is what an answer for the whole project would write, a rule a line, empty where no rule says just this;
    `digest` stands for the action shown, so that an answer can say which one it means. `number` is its place among all
    that its tree has asked, so it never changes and never means another one."""

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


class QuestionClosed(msgspec.Struct, frozen=True, gc=False, omit_defaults=True):
    """A question that does not wait any more. `allowed` is None if its run ended before anybody answered; else the
    other fields are those of the answer: who gave it, on which surface, and when."""

    id: str
    allowed: bool | None = None
    by: str = ""
    surface: str = ""
    reason: str = ""
    at: float = 0.0


QuestionChange = Approval | QuestionClosed


def describe_closing(closed: QuestionClosed) -> str:
    """Return who answered what, where and when: `approved by user at pts/3 (retinue approve) at 14:03:11`."""
    if closed.allowed is None:
        return "no longer needed: its run ended"
    where = f" ({closed.surface})" if closed.surface else ""
    when = f" at {datetime.fromtimestamp(closed.at):%H:%M:%S}" if closed.at else ""
    reason = f": {closed.reason}" if closed.reason else ""
    word = "approved" if closed.allowed else "denied"
    return f"{word} by {closed.by or 'somebody'}{where}{when}{reason}"


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


def check_approver(approver: object) -> None:
    """Raise ConfigError for an approver that could never answer: one that is not async, takes other parameters than
    the question, or is declared to return something else than Allow or Deny."""
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
    except ValueError:  # it has no signature to look at
        return
    try:
        declared = typing.get_type_hints(called).get("return", Any)
    except (NameError, TypeError, AttributeError):  # an annotation that only a type checker can read
        return
    if declared in (bool, int, str, type(None)):
        raise ConfigError(f"the approver {name} returns {getattr(declared, '__name__', declared)}: {wanted}")


def check_decision(decision: object) -> Allow | Deny:
    """Return the decision if it is one; else raise ConfigError."""
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
