"""Script files of the scripted model: turns YAML or Python values into a core Script. `models` plays it.

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

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retinue.config.located import Node, Section, make_node
from retinue.config.location import Place
from retinue.config.yaml import read_yaml
from retinue.core.scripts import Script, ScriptedCall, ScriptedReply, ScriptedUsage

FAULTS = ("refuse", "error", "crash", "cut", "hang")
MAX_CHUNKS = 100_000
_BESIDE_A_FAULT = frozenset(("usage", "delay", "thinking"))
_WITH_FAULT = {"error": "status", "cut": "chunks"}


def load_script(path: Path) -> Script:
    """Read the script of a YAML file; errors name file, line and key."""
    return _read_script(read_yaml(path))


def parse_script(values: Mapping[str, Any]) -> Script:
    """Read a script from Python values, with the same checks; errors say `script: agents.main[0]: ...`."""
    return _read_script(make_node(values, Place("script")))


def _read_script(node: Node) -> Script:
    section = node.section(what="a mapping with the key 'agents'")
    agents = section.require("agents").section(what="a mapping of agents to lists of replies")
    strict = section.flag("strict") or False
    section.finish()
    return Script({name: _read_replies(name, replies) for name, replies in agents.entries.items()}, strict)


def _read_replies(name: str, node: Node) -> tuple[ScriptedReply, ...]:
    if not name.strip():
        raise node.error("the name of an agent is empty")
    return tuple(_read_reply(item) for item in node.items(what="a list of replies"))


def _read_reply(node: Node) -> ScriptedReply:
    if isinstance(node.value, str):
        return ScriptedReply(text=node.value)
    section = node.section(what="a reply (a mapping or a text)")
    for entry in section.entries.values():
        if entry.value is None:
            raise entry.error("expected a value, got nothing")
    fault = _find_fault(section)
    reply = ScriptedReply(
        text=section.text("text") or "",
        thinking=section.text("thinking") or "",
        tools=_read_calls(section.get("tools")),
        usage=_read_usage(section.section("usage")),
        delay=section.number("delay", minimum=0) or 0.0,
        chunks=section.integer("chunks", minimum=1, maximum=MAX_CHUNKS) or 1,
        refuse=section.text("refuse"),
        error=section.text("error"),
        status=section.integer("status", minimum=100, maximum=599),
        crash=section.text("crash"),
        cut=section.text("cut"),
        hang=section.flag("hang") or False,
    )
    section.finish()
    _check_fault_keys(section, fault)
    return reply


def _find_fault(section: Section) -> str | None:
    """Return the reply's one fault, if it has one. `hang: false` is none."""
    faults = [name for name in FAULTS if (node := section.entry(name)) is not None and node.value is not False]
    if len(faults) > 1:
        raise section.place.error(f"a reply has at most one fault, this one has {', '.join(faults)}")
    return faults[0] if faults else None


def _check_fault_keys(section: Section, fault: str | None) -> None:
    """Check the keys beside a fault: allowed are usage, delay and thinking; a status with error; chunks with cut."""
    if fault is None:
        if "status" in section.entries:
            raise section.entries["status"].error("only goes with 'error'")
        return
    allowed = _BESIDE_A_FAULT | {fault, _WITH_FAULT.get(fault, fault)}
    for key, node in section.entries.items():
        if key not in allowed and node.value is not False:
            raise node.error(f"cannot stand beside the fault '{fault}'; allowed there: {', '.join(sorted(allowed))}")


def _read_calls(node: Node | None) -> tuple[ScriptedCall, ...]:
    if node is None:
        return ()
    items = node.items(what="a list of tool calls")
    return tuple(_read_call(item.section(what="a tool call {name, args}")) for item in items)


def _read_call(section: Section) -> ScriptedCall:
    name = section.require("name").word()
    args = section.get("args")
    section.finish()
    if args is None:
        return ScriptedCall(name)
    args.section(what="a mapping of arguments")
    return ScriptedCall(name, args.to_plain())


def _read_usage(section: Section | None) -> ScriptedUsage:
    if section is None:
        return ScriptedUsage()
    spent = section.integer("input_tokens", minimum=0), section.integer("output_tokens", minimum=0)
    section.finish()
    return ScriptedUsage(spent[0] or 0, spent[1] or 0)
