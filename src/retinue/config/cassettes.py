"""The file format of a cassette: YAML that reads well in a review.

A call contains only the changes since the previous call of its run. Each tool is described once, at the end. This
module does not know who recorded the calls, or why.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from retinue.config.files import exists, read_text
from retinue.core.errors import ConfigError
from retinue.core.messages import AssistantTurn, Reply, ToolSpec, Turn
from retinue.core.records import RecordedExchange, RecordedRequest
from retinue.files.atomic import replace_file

VERSION = 1
HEAD = "# Model calls of a test, recorded by retinue_cassette. `pytest --retinue-record=all` records them again.\n"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Entry(msgspec.Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One call in the file. None means the same value as in the previous call of the run. `messages` are the new
    messages, or all messages if `whole`."""

    run: str
    turn: int
    agent: str
    model: str
    tree: int = 1
    system: str | None = None
    whole: bool = False
    messages: list[Turn] = []
    tools: list[str] | None = None
    reply: Reply


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    calls: list[_Entry]
    tools: dict[str, ToolSpec] = {}


def read_cassette(path: Path) -> list[RecordedExchange]:
    """Return the calls of the file, or an empty list if the file does not exist."""
    if not exists(path):
        return []
    text = read_text(path)
    try:
        file = msgspec.convert(yaml.load(text, _LOADER), _File)
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path} is not a cassette: {' '.join(str(error).split())}") from None
    if file.version != VERSION:
        raise ConfigError(f"{path} is of version {file.version}; this retinue reads {VERSION}: record it again")
    newest: dict[tuple[int, str], RecordedExchange] = {}
    exchanges = []
    for entry in file.calls:
        try:
            tools = None if entry.tools is None else tuple(file.tools[name] for name in entry.tools)
        except KeyError as error:
            raise ConfigError(f"{path} names the tool {error} and does not describe it") from None
        exchange = _expand_entry(entry, tools, newest.get((entry.tree, entry.run)))
        newest[entry.tree, entry.run] = exchange
        exchanges.append(exchange)
    return exchanges


def _expand_entry(
    entry: _Entry, tools: tuple[ToolSpec, ...] | None, before: RecordedExchange | None
) -> RecordedExchange:
    system, known = entry.system, ()  # type: tuple[str | None, tuple[Turn, ...]]
    if before is not None:
        system = before.request.system if system is None else system
        tools = before.request.tools if tools is None else tools
        known = () if entry.whole else _extend_thread(before)
    request = RecordedRequest(
        model=entry.model, system=system or "", thread=(*known, *entry.messages), tools=tools or ()
    )
    return RecordedExchange(
        run=entry.run, turn=entry.turn, agent=entry.agent, request=request, reply=entry.reply, tree=entry.tree
    )


def _extend_thread(exchange: RecordedExchange) -> tuple[Turn, ...]:
    """Return the thread of a call followed by its reply. The next call of the run usually begins with these turns."""
    reply = exchange.reply or Reply()
    return (*exchange.request.thread, AssistantTurn(reply.text, reply.calls, reply.thoughts, reply.natives))


def write_cassette(path: Path, exchanges: Iterable[RecordedExchange]) -> None:
    """Write the calls in the given order and create missing folders. The file is replaced atomically."""
    tools: dict[str, ToolSpec] = {}
    newest: dict[tuple[int, str], RecordedExchange] = {}
    entries = []
    for exchange in exchanges:
        run = exchange.tree, exchange.run
        names = [_name_tool(tool, tools) for tool in exchange.request.tools]
        entries.append(_shorten_exchange(exchange, newest.get(run), names))
        newest[run] = exchange
    described = {name: msgspec.to_builtins(tool) for name, tool in sorted(tools.items())}
    text = yaml.dump(
        {"version": VERSION, "calls": entries, "tools": described},
        Dumper=_Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=110,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (HEAD + text).encode(), mode=None)
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror or error}") from None


def _shorten_exchange(exchange: RecordedExchange, before: RecordedExchange | None, tools: list[str]) -> dict[str, Any]:
    """Return the entry of a call, without the values it shares with the previous call of its run."""
    request, old = exchange.request, None if before is None else before.request
    known = () if before is None else _extend_thread(before)
    whole = request.thread[: len(known)] != known
    entry: dict[str, Any] = msgspec.to_builtins(
        _Entry(
            run=exchange.run,
            turn=exchange.turn,
            agent=exchange.agent,
            model=request.model,
            tree=exchange.tree,
            system=None if old is not None and old.system == request.system else request.system,
            whole=whole,
            messages=list(request.thread if whole else request.thread[len(known) :]),
            tools=None if old is not None and old.tools == request.tools else tools,
            reply=exchange.reply or Reply(),
        )
    )
    entry["messages"] = [_shorten_turn(turn) for turn in entry.get("messages", ())]
    reply = {name: value for name, value in entry["reply"].items() if value}
    reply["usage"] = {name: value for name, value in reply["usage"].items() if value}
    return entry | {"reply": reply}


def _shorten_turn(turn: dict[str, Any]) -> dict[str, Any]:
    """Return a message without default values: the source `task`, a successful tool."""
    usual = {"source": "task", "success": True}
    return {name: value for name, value in turn.items() if usual.get(name) != value}


def _name_tool(tool: ToolSpec, tools: dict[str, ToolSpec]) -> str:
    """Add a tool to `tools` and return its name in the file: its own name, unless another tool already has it."""
    name, number = tool.name, 2
    while tools.setdefault(name, tool) != tool:
        name, number = f"{tool.name} ({number})", number + 1
    return name


class _Dumper(yaml.SafeDumper):
    """A dumper that writes texts of several lines as block scalars, and never writes aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
