"""Script files of the scripted model: YAML or Python values are read into a core `Script`, which `models` plays.

strict: false                # true: a run that asks for more replies than it has gets an error
agents:
  main:                      # a run's path, label or subagent_id, an agent's name, or "*"
    - text: I will look.     # text, thinking, tools, usage, delay, chunks: any of them
      tools: [{name: grep, args: {pattern: TODO}}]
    - found it               # a text alone is short for {text: ...}
  worker:
    - error: overloaded      # or one fault: refuse, error (with status), crash, cut, hang
      status: 529
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from retinue.config.located import Node, make_node
from retinue.config.location import SourceLocation
from retinue.config.schema import NUMBER, WHOLE
from retinue.config.yaml import read_yaml
from retinue.core.scripts import Script, ScriptedCall, ScriptedReply, ScriptedUsage

Readers = Mapping[str, Callable[[Node], Any]]
FAULTS = ("refuse", "error", "crash", "cut", "hang")
MAX_CHUNKS = 100_000
_BESIDE_A_FAULT = frozenset(("usage", "delay", "thinking"))
_WITH_FAULT = {"error": "status", "cut": "chunks"}


def load_script(path: Path) -> Script:
    """Read a script from a YAML file. Errors name file, line and key."""
    return _read_script(read_yaml(path))


def parse_script(values: Mapping[str, Any]) -> Script:
    """Read a script from Python values, with the same checks. Errors begin like `script: agents.main[0]: ...`."""
    return _read_script(make_node(values, SourceLocation("script")))


def _read_script(node: Node) -> Script:
    node.entries(what="a mapping with the key 'agents'")
    node.require("agents")
    return Script(**node.read_keys({"agents": _read_agents, "strict": Node.flag}))


def _read_agents(node: Node) -> dict[str, tuple[ScriptedReply, ...]]:
    agents = node.entries(what="a mapping of agents to lists of replies")
    for name, replies in agents.items():
        if not name.strip():
            raise replies.error("the name of an agent is empty")
    return {name: tuple(map(_read_reply, node.items(what="a list of replies"))) for name, node in agents.items()}


def _read_reply(node: Node) -> ScriptedReply:
    if isinstance(node.value, str):
        return ScriptedReply(text=node.value)
    for entry in node.entries(what="a reply (a mapping or a text)").values():
        if entry.value is None:
            raise entry.error("expected a value, got nothing")
    reply = ScriptedReply(**node.read_keys(_REPLY))
    _check_faults(node)
    return reply


def _check_faults(reply: Node) -> None:
    """Check that a reply has at most one fault (`hang: false` is none), and only allowed keys besides it: usage, delay
    and thinking; `status` with `error`; `chunks` with `cut`."""
    entries = reply.entries()
    faults = [name for name in FAULTS if name in entries and entries[name].value is not False]
    if len(faults) > 1:
        raise reply.error(f"a reply has at most one fault, this one has {', '.join(faults)}")
    if not faults:
        if "status" in entries:
            raise entries["status"].error("only goes with 'error'")
        return
    [fault] = faults
    allowed = _BESIDE_A_FAULT | {fault, _WITH_FAULT.get(fault, fault)}
    for key, node in entries.items():
        if key not in allowed and node.value is not False:
            raise node.error(
                f"cannot be combined with the fault '{fault}'; allowed with it: {', '.join(sorted(allowed))}"
            )


def _read_call(node: Node) -> ScriptedCall:
    node.entries(what="a tool call {name, args}")
    node.require("name")
    return ScriptedCall(**node.read_keys({"name": Node.word, "args": _read_arguments}))


def _read_arguments(node: Node) -> dict[str, Any]:
    node.entries(what="a mapping of arguments")
    arguments: dict[str, Any] = node.to_plain()
    return arguments


_USAGE: Readers = {"input_tokens": WHOLE.read, "output_tokens": WHOLE.read}
_REPLY: Readers = {
    "text": Node.text,
    "thinking": Node.text,
    "tools": lambda node: tuple(map(_read_call, node.items(what="a list of tool calls"))),
    "usage": lambda node: ScriptedUsage(**node.read_keys(_USAGE)),
    "delay": NUMBER.read,
    "chunks": lambda node: node.integer(minimum=1, maximum=MAX_CHUNKS),
    "refuse": Node.text,
    "error": Node.text,
    "status": lambda node: node.integer(minimum=100, maximum=599),
    "crash": Node.text,
    "cut": Node.text,
    "hang": Node.flag,
}
