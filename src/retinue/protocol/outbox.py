"""The files that the two sides of a delegated run write for each other: names, request, response. No I/O.

The requesting side is in a container and is not trusted. A request names a task, a profile, folders, and limits that
narrow the run. The host decides everything else, and refuses a request that says how the run is launched.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec

from retinue.core.caller import Caller
from retinue.core.errors import RetinueError
from retinue.core.limits import EVENT_BYTES
from retinue.core.profiles import check_name
from retinue.core.results import STATUSES, Ending, ending_texts, make_unconfirmed_ending
from retinue.protocol.inherited_limits import BAGGAGE_KEY, KEYS, TRACE_KEY, from_meta
from retinue.protocol.strict_json import InvalidBody, decode_body, encode_body

VERSION = 1
REQUEST_BYTES = 1024 * 1024
RESPONSE_BYTES = 4 * EVENT_BYTES
LINE_BYTES = 4 * EVENT_BYTES
MOST_PATHS = 64
MOST_STEERS = 1000
PATH_CHARACTERS = 4096
_CUT = "\n[... cut ...]"
# The fields of a response without a bound of their own, and the warning about such a field.
_LONG_FIELDS = {
    "final_response": "the answer was cut",
    "error_details": "the error was cut",
    "structured": "the structured answer was left out",
    "partial": "the partial answer was cut",
    "warning": "a warning was cut",
}
_OTHER_BYTES = 4096  # room for the other fields of a response, the marks of cut texts and the warnings about them
SPENDING_KEYS = {"tokens": KEYS["tokens"][0], "cost": KEYS["cost"][0], "traceparent": TRACE_KEY, "baggage": BAGGAGE_KEY}
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_STEER = re.compile(rf"steer_({_ID.pattern})_(\d{{4}})\.json")
_REQUEST = re.compile(rf"request_({_ID.pattern})\.json")
SUBAGENT_ID_CHARACTERS = 200
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[^\W\d_A-Z]+")
# An unknown key with one of these words says how something is launched, so the request is refused.
_LAUNCH = frozenset((
    "apparmor", "argv", "cap", "capability", "capabilities", "cgroup", "cgroups", "command", "config", "configuration",
    "container", "cwd", "device", "devices", "dns", "docker", "entrypoint", "env", "environment", "envs", "exec",
    "execution", "expose", "fallback", "gid", "image", "ipc", "launch", "launcher", "mcp", "mount", "mounts", "net",
    "network", "networks", "networking", "orchestrator", "permission", "permissions", "podman", "policy", "privilege",
    "privileged", "privileges", "proxy", "runtime", "sandbox", "seccomp", "secret", "secrets", "selinux", "setting",
    "settings", "sudo", "uid", "ulimit", "ulimits", "user", "userns", "volume", "volumes", "workdir",
    "yaml",
))  # fmt: skip
# These count only if all other words of the key are in _BESIDE: `tools` and `max_cost`, not `tool_hint`, `key_points`.
_ALONE = frozenset((
    "allow", "allowed", "api", "approval", "approvals", "approve", "approver", "args", "arguments", "bind", "binds",
    "budget", "cost", "costs", "deny", "flags", "host", "hostname", "hosts", "key", "keys", "limit", "limits", "mode",
    "model", "models", "port", "ports", "prefix", "provider", "root", "roots", "rule", "rules", "script", "security",
    "server", "servers", "shell", "token", "tokens", "tool", "tools",
))  # fmt: skip
_BESIDE = frozenset((
    "add", "default", "drop", "extra", "file", "files", "id", "line", "list", "max", "min", "name", "opt", "opts",
    "options", "path", "paths", "subagent", "url", "yes",
))  # fmt: skip


class RequestError(RetinueError):
    """A request that is not run; the text goes into its response."""


class OutboxRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A delegation request.

    `subagent_id` is the run's id on the requesting side. `limits` are the remaining limits of the run, apart from its
    time, and its trace. `ignored` are the unknown keys."""

    id: str
    subagent_id: str = ""
    task: str
    profile: str
    workspace: str
    context_paths: Sequence[str] = ()
    timeout_seconds: float | None = None
    limits: Caller = Caller(depth=0)
    ignored: Sequence[str] = ()


_OWN_KEYS = ("id", "subagent_id", "task", "profile", "workspace", "context_paths", "timeout_seconds")
_LIMIT_KEYS = ("depth", *SPENDING_KEYS)
_KEYS = ("version", *_OWN_KEYS, *_LIMIT_KEYS)


class OutboxResponse(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The ending of a run on the host, or why there was none. `is_named` says that both texts begin with the `Run` of
    a primary's ending. `events` is how many event lines were written."""

    version: int = VERSION
    id: str
    status: str
    final_response: str = ""
    error_details: str | None = None
    structured: Any = None
    code: str = ""
    is_named: bool = False
    partial: str = ""
    warning: str = ""
    events: int = 0


def request_name(name: str) -> str:
    return f"request_{name}.json"


def response_name(name: str) -> str:
    return f"response_{name}.json"


def events_name(name: str) -> str:
    return f"events_{name}.ndjson"


def cancel_name(name: str) -> str:
    return f"cancel_{name}"


def parse_cancel_name(file: str) -> str | None:
    """Return the id in the name of a cancel file, or None for any other file."""
    name = file.removeprefix(cancel_name(""))
    return name if name != file and _ID.fullmatch(name) else None


def steer_name(name: str, number: int) -> str:
    """Return the name of the file with message number `number` for a running run. The first number is 0."""
    return f"steer_{name}_{number:04}.json"


def parse_steer_name(file: str) -> str | None:
    """Return the id in the name of a steer file, or None for any other file."""
    found = _STEER.fullmatch(file)
    return None if found is None else found[1]


def claim_name(name: str) -> str:
    """Return the name of the file by which a watcher claims the request."""
    return f"claim_{name}"


def parse_request_name(file: str) -> str | None:
    """Return the id in the name of a request file, or None for any other file."""
    found = _REQUEST.fullmatch(file)
    return None if found is None else found[1]


def is_odd_request(file: str) -> bool:
    """Return True if a file is named like a request, but its id is invalid."""
    return file.startswith("request_") and file.endswith(".json") and parse_request_name(file) is None


def encode_request(request: OutboxRequest) -> bytes:
    fields = {key: getattr(request, key) for key in _OWN_KEYS}
    fields |= {key: getattr(request.limits, key) for key in _LIMIT_KEYS}
    said = {key: value for key, value in fields.items() if value not in (None, "")}
    return json.dumps({"version": VERSION, **said}, ensure_ascii=True, default=str).encode()


def parse_request(data: bytes, name: str) -> OutboxRequest:
    """Parse the request in the file with the id `name`. Raises RequestError, which says what is wrong."""
    fields = _decode_object(data)
    forbidden = [key for key in fields if key not in _KEYS and _is_launch(key)]
    if forbidden:
        raise RequestError(f"a request may not set {_quote_keys(forbidden)}: the host decides how a run is launched")
    if fields.get("version", VERSION) != VERSION:
        raise RequestError(f"the request must have version {VERSION}")
    if fields.get("id", name) != name:
        raise RequestError("'id' is not the one in the name of the file")
    subagent_id = fields.get("subagent_id", "")
    if not isinstance(subagent_id, str) or len(subagent_id) > SUBAGENT_ID_CHARACTERS or not subagent_id.isprintable():
        raise RequestError(f"'subagent_id' must be text of at most {SUBAGENT_ID_CHARACTERS} printable characters")
    timeout = fields.get("timeout_seconds")
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if timeout is not None and not (is_number and 0 < timeout < math.inf):
        raise RequestError("'timeout_seconds' must be a number of seconds above 0")
    depth = fields.get("depth", 0)
    if isinstance(depth, bool) or not isinstance(depth, int) or depth < 0:
        raise RequestError("'depth' must be a whole number of 0 or more")
    profile = _read_text(fields, "profile")
    try:
        check_name(profile)
    except RetinueError as error:
        raise RequestError(str(error)) from None
    return OutboxRequest(
        id=name,
        subagent_id=subagent_id,
        task=_read_text(fields, "task"),
        profile=profile,
        workspace=_read_path(_read_text(fields, "workspace"), "workspace"),
        context_paths=_read_paths(fields.get("context_paths", [])),
        timeout_seconds=None if timeout is None else float(timeout),
        limits=Caller(depth=min(depth, 1000), **_read_spending(fields)),
        ignored=tuple(sorted(key for key in fields if key not in _KEYS)),
    )


def _read_spending(fields: dict[str, Any]) -> dict[str, Any]:
    """Read budget and trace as `from_meta` does: an invalid value counts as nothing left."""
    caller = from_meta({key: fields.get(name) for name, key in SPENDING_KEYS.items()})
    return {name: getattr(caller, name) for name in SPENDING_KEYS}


def encode_steer(run: int, text: str | None) -> bytes:
    """Encode a message for run number `run` of the tree that a request has become. None cancels the run."""
    command = {"cancel": True} if text is None else {"text": text}
    return encode_body({"version": VERSION, "run": run, **command})


def parse_steer(data: bytes) -> tuple[int, str | None]:
    """Return the number of a run, and the message for the run, or None to cancel the run. Raises RequestError."""
    fields = _decode_object(data)
    run = fields.get("run", 0)
    if fields.get("version", VERSION) != VERSION or isinstance(run, bool) or not isinstance(run, int) or run < 0:
        raise RequestError(f"a message for a run must have the number of the run and version {VERSION}")
    return run, None if fields.get("cancel") is True else _read_text(fields, "text")


def encode_response(response: OutboxResponse) -> bytes:
    """Encode a response in at most `RESPONSE_BYTES`, which is the most that the requesting side reads. Too long texts
    are cut with a mark, a too long structured answer is left out, and the warning names them."""
    data = encode_body(response)
    return data if len(data) <= RESPONSE_BYTES else encode_body(_cut_response(response))


def _cut_response(response: OutboxResponse) -> OutboxResponse:
    """Cut the longest fields of a response to equal shares of the room that the shorter fields leave."""
    sizes = {name: _measure_json(getattr(response, name)) for name in _LONG_FIELDS}
    room = RESPONSE_BYTES - _OTHER_BYTES
    fields: dict[str, Any] = {}
    notes = []
    for place, name in enumerate(sorted(sizes, key=sizes.__getitem__)):
        share = room // (len(sizes) - place)
        room -= min(sizes[name], share)
        if sizes[name] > share:
            fields[name] = None if name == "structured" else _cut_text(getattr(response, name), share)
            notes.append(_LONG_FIELDS[name])
    warning = fields.get("warning", response.warning)
    return msgspec.structs.replace(response, **{**fields, "warning": "; ".join(filter(None, (warning, *notes)))})


def _cut_text(text: str, limit: int) -> str:
    """Return the longest beginning of `text` that takes at most `limit` bytes of JSON, and the mark `_CUT`."""
    lengths = range(len(text))
    return text[: bisect_right(lengths, limit, key=lambda length: _measure_json(text[:length])) - 1] + _CUT


def _measure_json(value: object) -> int:
    return len(encode_body(value))


def parse_response(data: bytes, name: str) -> OutboxResponse:
    """Parse the response to the request `name`. Raises RequestError if it is invalid."""
    try:
        response = msgspec.json.decode(data, type=OutboxResponse)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RequestError(f"the response to the request {name} cannot be read: {str(error)[:200]}") from None
    if response.id != name or response.version != VERSION or response.status not in STATUSES:
        raise RequestError(f"the response to the request {name} is not one")
    return response


def make_ending(response: OutboxResponse, *, agent: str, primary: bool) -> Ending:
    """Return the ending, on this side, of a run that was a primary on the host."""
    text, error = response.final_response, response.error_details
    if response.status == "failed" and response.code == "unconfirmed":
        if primary and error is not None:
            return Ending("failed", text, error, code="unconfirmed")
        return make_unconfirmed_ending(name=agent, primary=primary)
    if response.is_named and not primary and error is not None:
        text, error = _name_subagent(text), _name_subagent(error)
    if response.status != "done" and error is None:
        text, error = ending_texts(response.status, name=agent, primary=primary)
    return Ending(response.status, text, error, response.structured)  # type: ignore[arg-type]


def _name_subagent(text: str) -> str:
    return f"Subagent {text.removeprefix('Run ')}"


def _decode_object(data: bytes) -> dict[str, Any]:
    try:
        return decode_body(data, dict[str, Any])
    except InvalidBody as error:
        raise RequestError(f"the request cannot be read: {error}") from None


def _is_launch(key: str) -> bool:
    """Return True if an unknown key says how a run is launched. A key without any word counts too."""
    words = [word.casefold() for word in _WORD.findall(key)]
    joined = {first + second for first, second in pairwise(words)}  # run-time, sandBox
    if not words or not (_LAUNCH.isdisjoint(words) and _LAUNCH.isdisjoint(joined)):
        return True
    return not _ALONE.isdisjoint(words) and _ALONE.union(_BESIDE).issuperset(words)


def _quote_keys(keys: Sequence[str]) -> str:
    shown = ", ".join(repr(key[:64]) for key in sorted(keys)[:5])
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"


def _read_text(fields: dict[str, Any], key: str) -> str:
    value = fields.get(key)
    if not isinstance(value, str) or not value.strip():
        raise RequestError(f"{key!r} must be a text that is not empty")
    if "\0" in value:
        raise RequestError(f"{key!r} has a NUL character in it")
    return value


def _read_paths(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MOST_PATHS:
        raise RequestError(f"'context_paths' must be a list of at most {MOST_PATHS} paths")
    return tuple(_read_path(path, f"context_paths[{index}]") for index, path in enumerate(value))


def _read_path(path: object, key: str) -> str:
    if not isinstance(path, str) or not path.startswith("/") or "\0" in path or len(path) > PATH_CHARACTERS:
        raise RequestError(f"{key!r} must be an absolute path")
    parts = path.split("/")[1:]
    if path != "/" and any(part in ("", ".", "..") for part in parts):
        raise RequestError(f"{key!r} must be a plain path, without '..', '.' or '//'")
    return path
