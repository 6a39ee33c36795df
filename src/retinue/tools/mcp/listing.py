"""A server's list of tools made into ours: names that models take, plain words, a seal, and what the arguments must be.

What a server says of its tools (read only, idempotent) is a claim, and no reason for anything here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import msgspec
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import extend, validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from retinue.core.errors import ToolError
from retinue.core.messages import ToolSpec
from retinue.core.servers import PREFIX
from retinue.tools.mcp import words

RUN_ID = "runId"
LONGEST_NAME = 64
MOST_TOOLS = 512
SCHEMA_BYTES = 128 * 1024
_ODD = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class Offered:
    """A tool as its server offers it. `output` is the schema of its structured content, where it has one."""

    name: str
    title: str
    description: str
    schema: dict[str, Any]
    output: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Listed:
    """A tool that runs can have. `name` is the server's own. `runs_agents`: it takes the id of the run it is to
    make, which is nobody's to say but ours."""

    name: str
    spec: ToolSpec
    validator: Any
    runs_agents: bool

    def checked(self, args: dict[str, Any]) -> dict[str, Any]:
        """The arguments as they are sent: models write null for what they leave out. Raises ToolError for those that
        the tool does not take; what only its server can tell (a schema with parts elsewhere) is left to it."""
        properties, required = self.spec.schema.get("properties") or {}, self.spec.schema.get("required") or ()
        args = {
            name: value
            for name, value in args.items()
            if value is not None or name in required or not self._refuses_null(properties.get(name))
        }
        try:
            error = best_match(self.validator.iter_errors(args))
        except (Unresolvable, RecursionError):
            return args
        if error is not None:
            where = "".join(f"[{part!r}]" for part in error.absolute_path)
            raise ToolError(f"{self.spec.name}: {f'at {where}: ' if where else ''}{words.line(error.message)}")
        return args

    def _refuses_null(self, about: Any) -> bool:
        try:
            return isinstance(about, dict) and not self.validator.evolve(schema=about).is_valid(None)
        except (Unresolvable, RecursionError):
            return False


def listed(
    server: str, offered: Sequence[Offered], wanted: Sequence[str] | None
) -> tuple[dict[str, Listed], list[str]]:
    """The tools by the names that models know them by, and why some are left out."""
    found: dict[str, Listed] = {}
    left_out = []
    for tool in offered[:MOST_TOOLS]:
        if wanted is not None and not any(fnmatchcase(tool.name, pattern) for pattern in wanted):
            continue
        try:
            made = _listed(server, tool)
        except (ValueError, RecursionError, SchemaError) as error:
            why = words.line(error.message) if isinstance(error, SchemaError) else words.reason(error)
            left_out.append(f"its tool '{words.line(tool.name, 80)}' is left out: {why}")
            continue
        if made.spec.name in found:
            left_out.append(f"its tool '{words.line(tool.name, 80)}' is left out: another one has the same name")
            continue
        found[made.spec.name] = made
    if len(offered) > MOST_TOOLS:
        left_out.append(f"{len(offered) - MOST_TOOLS} of its tools are left out: {MOST_TOOLS} are enough")
    left_out += _missing(server, offered, wanted)
    return found, left_out


def _missing(server: str, offered: Sequence[Offered], wanted: Sequence[str] | None) -> Iterator[str]:
    for pattern in wanted or ():
        if not any(fnmatchcase(tool.name, pattern) for tool in offered):
            yield f"it has no tool '{pattern}', which mcp_servers.{server}.tools names"


def _listed(server: str, tool: Offered) -> Listed:
    raw = msgspec.json.encode(tool.schema)
    if len(raw) > SCHEMA_BYTES:
        raise ValueError(f"its schema is larger than {SCHEMA_BYTES // 1024} KiB")
    schema = words.plain_value(tool.schema)
    if schema.setdefault("type", "object") != "object":
        raise ValueError("its arguments are no object")
    runs_agents = _wants_run_id(schema)
    if runs_agents:
        schema = _without(schema, RUN_ID)
    output = tool.output if len(msgspec.json.encode(tool.output)) <= SCHEMA_BYTES else {}  # it only helps programs
    kind = validator_for(schema)
    kind.check_schema(schema)
    # Patterns are the server's to check: one of them can take for ever. References stay inside the schema.
    lenient: Any = extend(kind, {"pattern": _anything, "patternProperties": _anything})  # type: ignore[no-untyped-call]
    spec = ToolSpec(
        model_name(server, tool.name),
        words.capped(tool.description),
        schema,
        display_name=words.line(tool.title or tool.name, 80),
        server=server,
        seal=seal_of(tool),
        output=words.plain_value(output),
    )
    return Listed(tool.name, spec, lenient(schema, registry=Registry()), runs_agents)


def _anything(*_: Any) -> tuple[()]:
    return ()


def model_name(server: str, tool: str) -> str:
    """`mcp__SERVER__TOOL`, in the letters and the length that every provider takes."""
    name = f"{PREFIX}{server}__{_ODD.sub('_', tool)}"
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[: LONGEST_NAME - 9]}_{hashlib.sha256(tool.encode()).hexdigest()[:8]}"


def seal_of(tool: Offered) -> str:
    """Stands for what the server says the tool is and takes: a yes to it is a yes to just this."""
    said = [tool.name, tool.title, tool.description, tool.schema]
    return hashlib.sha256(msgspec.json.encode(said, order="deterministic")).hexdigest()[:32]


def _wants_run_id(schema: dict[str, Any]) -> bool:
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict) or RUN_ID not in required:
        return False
    about = properties.get(RUN_ID)
    return isinstance(about, dict) and about.get("type") == "string"


def _without(schema: dict[str, Any], name: str) -> dict[str, Any]:
    properties = {key: value for key, value in schema["properties"].items() if key != name}
    return {**schema, "properties": properties, "required": [key for key in schema["required"] if key != name]}
