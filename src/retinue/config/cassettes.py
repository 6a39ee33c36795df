"""The file of a cassette: YAML that reads well in a review. A call has only what is new since the one before it in its
run; what tools there are stands once, at the end. Who recorded the calls, and why, is not known here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import yaml

from retinue.config.files import exists, read_text
from retinue.core.errors import ConfigError
from retinue.core.messages import AssistantTurn, Reply, ToolSpec, Turn
from retinue.files.atomic import replace_file

VERSION = 1
HEAD = "# Model calls of a test, recorded by retinue_cassette. `pytest --retinue-record=all` records them anew.\n"
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class Entry(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """One call as the file has it. What is None is as in the call before it; `messages` are what is new since, or with
    `whole` all there are."""

    run: str
    turn: int
    agent: str
    model: str
    reply: Reply
    tree: int = 1
    system: str | None = None
    whole: bool = False
    messages: list[Turn] = []
    tools: list[str] | None = None


class _File(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    calls: list[Entry]
    tools: dict[str, ToolSpec] = {}


class Request(msgspec.Struct, frozen=True):
    """What an entry asked, in full."""

    system: str
    thread: tuple[Turn, ...]
    tools: tuple[ToolSpec, ...]


def read_cassette(path: Path) -> list[tuple[Entry, Request]]:
    """The calls of the file; none if there is no such file."""
    if not exists(path):
        return []
    text = read_text(path)
    try:
        file = msgspec.convert(yaml.load(text, _LOADER), _File)
    except (yaml.YAMLError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(f"{path} is not a cassette: {' '.join(str(error).split())}") from None
    if file.version != VERSION:
        raise ConfigError(f"{path} is of version {file.version}; this retinue reads {VERSION}: record it anew")
    last: dict[tuple[int, str], tuple[Request, Reply]] = {}
    calls = []
    for entry in file.calls:
        try:
            tools = None if entry.tools is None else tuple(file.tools[name] for name in entry.tools)
        except KeyError as error:
            raise ConfigError(f"{path} names the tool {error} and does not describe it") from None
        asked = _whole(entry, tools, last.get((entry.tree, entry.run)))
        last[entry.tree, entry.run] = asked, entry.reply
        calls.append((entry, asked))
    return calls


def _whole(entry: Entry, tools: tuple[ToolSpec, ...] | None, before: tuple[Request, Reply] | None) -> Request:
    if before is None:
        return Request(entry.system or "", tuple(entry.messages), tools or ())
    asked, reply = before
    known = () if entry.whole else (*asked.thread, _said(reply))
    system = asked.system if entry.system is None else entry.system
    return Request(system, (*known, *entry.messages), asked.tools if tools is None else tools)


def _said(reply: Reply) -> AssistantTurn:
    return AssistantTurn(reply.text, reply.calls, reply.thoughts, reply.natives)


def write_cassette(path: Path, calls: Sequence[tuple[Entry, Request]]) -> None:
    """Writes the calls in the order given; folders are made, and a file is there whole or not at all."""
    tools: dict[str, ToolSpec] = {}
    last: dict[tuple[int, str], tuple[Request, Reply]] = {}
    entries = []
    for entry, asked in calls:
        before = last.get((entry.tree, entry.run))
        entries.append(_plain(entry, asked, before, [_named(tool, tools) for tool in asked.tools]))
        last[entry.tree, entry.run] = asked, entry.reply
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


def _plain(entry: Entry, asked: Request, before: tuple[Request, Reply] | None, tools: list[str]) -> dict[str, Any]:
    known: tuple[Turn, ...] = ()
    same_tools = same_system = whole = False
    if before is not None:
        known = (*before[0].thread, _said(before[1]))
        same_system, same_tools = before[0].system == asked.system, before[0].tools == asked.tools
        whole = asked.thread[: len(known)] != known
        known = () if whole else known
    plain: dict[str, Any] = {"run": entry.run, "turn": entry.turn, "agent": entry.agent, "model": entry.model}
    plain |= {} if entry.tree == 1 else {"tree": entry.tree}
    plain |= {} if same_system else {"system": asked.system}
    plain |= {"whole": True} if whole else {}
    plain["messages"] = [_short(turn) for turn in asked.thread[len(known) :]]
    plain |= {} if same_tools else {"tools": tools}
    reply = {name: value for name, value in msgspec.to_builtins(entry.reply).items() if value}
    reply["usage"] = {name: value for name, value in reply["usage"].items() if value}
    return plain | {"reply": reply}


def _short(turn: Turn) -> dict[str, Any]:
    """A message without what goes without saying: that it is the task, that the tool worked."""
    plain: dict[str, Any] = msgspec.to_builtins(turn)
    usual = {"source": "task", "success": True}
    return {name: value for name, value in plain.items() if usual.get(name) != value}


def _named(tool: ToolSpec, tools: dict[str, ToolSpec]) -> str:
    """The name under which the file describes a tool: its own, unless another one has that."""
    name, number = tool.name, 2
    while tools.setdefault(name, tool) != tool:
        name, number = f"{tool.name} ({number})", number + 1
    return name


class _Dumper(yaml.SafeDumper):
    """Text of several lines stands as such; nothing is an alias of anything."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)
