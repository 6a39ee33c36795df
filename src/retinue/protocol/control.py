"""What is asked of a door and what it answers, as both its ends know it. Pure: the bytes travel in `door/`.

Bodies are JSON objects, read strictly: what is misspelt, given twice, nested without end or no text at all is an
error that names what is wrong.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

import msgspec

from retinue.core.approvals import Allow, Answered, Approval, Deny
from retinue.core.events import Delta, Event, decode

VERSION = 1
KEY_HEADER = "Idempotency-Key"
LONGEST_KEY = 64
TREES, PENDING, WATCH = "/v1/trees", "/v1/pending", "/v1/watch"
CANCEL, SEND, ANSWER = "/v1/cancel", "/v1/send", "/v1/answer"
RESUME, CONTINUE = "/v1/resume", "/v1/continue"
LONGEST_NAME = 200
DEEPEST = 100
_DELTA = b'{"delta":'
T = TypeVar("T")


class BadBody(ValueError):
    """A body that is not what was asked for; the text says why."""


class Address(msgspec.Struct, frozen=True):
    """Where the door of a process is, and the token that opens it."""

    version: int
    pid: int
    port: int
    token: str


class Cancel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: str
    run: int = 0


class Send(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: str
    run: int
    text: str


class Resume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`unasked` says that the user wants it even where nothing asks."""

    tree: str
    model: str | None = None
    unasked: bool = False


class Continue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    tree: str
    run: int
    text: str
    model: str | None = None
    unasked: bool = False


class Begun(msgspec.Struct, frozen=True):
    """The run that goes on."""

    tree: str
    run: int


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`digest` is that of the question as it was shown; an answer to anything else is stale."""

    approval_id: str
    decision: Allow | Deny
    by: str = ""
    digest: str | None = None


class Cancelled(msgspec.Struct, frozen=True):
    cancelled: bool


class Outcome(msgspec.Struct, frozen=True):
    outcome: Answered


class Question(msgspec.Struct, frozen=True):
    """A pending question and what an answer to it is bound to."""

    approval: Approval
    digest: str


class LiveRun(msgspec.Struct, frozen=True):
    run: int
    parent: int | None
    path: str
    label: str
    agent: str
    state: str


class LiveTree(msgspec.Struct, frozen=True):
    tree: str
    runs: list[LiveRun]


class Process(msgspec.Struct, frozen=True):
    """Who is behind the door, and the trees that live there."""

    version: int
    pid: int
    trees: list[LiveTree]


class Problem(msgspec.Struct, frozen=True):
    error: str


class _Piece(msgspec.Struct, frozen=True):
    delta: Delta


def encode(value: Any) -> bytes:
    """JSON of one of these; half a character becomes a mark, what JSON has no word for its name."""
    try:
        return msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, enc_hook=str)
        return msgspec.json.encode(json.loads(json.dumps(plain, ensure_ascii=False).encode("utf-8", "replace")))


def encode_delta(delta: Delta) -> bytes:
    return encode(_Piece(delta))


def decode_item(line: bytes) -> Event | Delta:
    """One line of a watch."""
    if line.startswith(_DELTA):
        return msgspec.json.decode(line, type=_Piece).delta
    return decode(line)


def read(body: bytes, shape: type[T]) -> T:
    """The body as that shape; BadBody for everything it should not be."""
    try:
        text = body.decode()
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_no_number, parse_int=_whole)
        if "\\" in text:  # only so can half a character have come in
            json.dumps(value, ensure_ascii=False).encode()
        _check_depth(value, DEEPEST)
        return msgspec.convert(value, shape)
    except BadBody:
        raise
    except RecursionError:
        raise BadBody("the body is nested too deeply") from None
    except UnicodeDecodeError:
        raise BadBody("the body is not UTF-8") from None
    except UnicodeEncodeError:
        raise BadBody("the body holds half of a character") from None
    except json.JSONDecodeError as error:
        raise BadBody(f"the body is not JSON: {error}") from None
    except msgspec.ValidationError as error:
        raise BadBody(str(error)) from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BadBody(f"the key {name[:LONGEST_NAME]!r} is given twice")
        found[name] = value
    return found


def _no_number(name: str) -> NoReturn:
    raise BadBody(f"{name} is not JSON")


def _whole(digits: str) -> int:
    if len(digits) > 18:
        raise BadBody("a number has more than 18 digits")
    return int(digits)


def _check_depth(value: Any, left: int) -> None:
    if left == 0:
        raise BadBody("the body is nested too deeply")
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_depth(inner, left - 1)
