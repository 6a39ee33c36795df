"""A server's tools as tools of ours: names that models accept, safe text, a seal, and a check of the arguments.

A server's own claims about its tools (read only, idempotent) are ignored.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import mcp_types as types
import msgspec
from jsonschema.exceptions import SchemaError

from retinue.core.errors import ToolError
from retinue.core.messages import ToolSpec
from retinue.core.servers import PREFIX
from retinue.tools.bounded_schema import CHECK_STEPS, BoundedSchema, SchemaTooCostly, SchemaUnusable, Steps
from retinue.tools.mcp.server_text import cap_text, clean_server_value, describe_server_error, to_line

RUN_ID = "runId"
MAX_NAME = 64
MAX_TOOLS = 512
LISTING_STEPS = 12_000_000
TOO_MUCH = "its server has too many or too large tools to read them all"
UNREADABLE = "retinue/unreadable"  # in `_meta`: why the SDK cannot read what the server sent for this tool
_ODD = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class ListedTool:
    """A tool that a server offers to runs. `name` is its name on the server. `runs_agents` says that the tool takes
    the id of the run it starts, which we choose."""

    name: str
    spec: ToolSpec
    checked: BoundedSchema
    runs_agents: bool
    output: BoundedSchema | None = None

    def check_arguments(self, args: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments to send. Drop a null for an optional argument that may not be null: models write it for
        arguments they leave out.

        Raises ToolError for invalid arguments. If the schema cannot be used or takes too long to check, the server has
        to check the arguments."""
        steps = Steps(CHECK_STEPS)
        properties, required = self.spec.schema.get("properties") or {}, self.spec.schema.get("required") or ()
        args = {
            name: value
            for name, value in args.items()
            if value is not None or name in required or not self._refuses_null(properties.get(name), steps)
        }
        try:
            error = self.checked.find_error(args, steps)
        except (SchemaTooCostly, SchemaUnusable):
            return args
        if error is not None:
            where = "".join(f"[{part!r}]" for part in error.absolute_path)
            raise ToolError(f"{self.spec.name}: {f'at {where}: ' if where else ''}{to_line(error.message)}")
        return args

    def check_result(self, result: types.CallToolResult) -> None:
        """Raise ToolError for a structured result that does not fit the tool's output schema.

        A result that takes too long to check is accepted, since it is only data."""
        if self.output is None:
            return
        if result.structured_content is None and "structured_content" not in result.model_fields_set:
            raise ToolError(f"{self.spec.name}: the server's result lacks the structured content that it announced")
        try:
            error = self.output.find_error(result.structured_content)
        except SchemaTooCostly:
            return
        except SchemaUnusable as problem:
            raise ToolError(
                f"{self.spec.name}: its result cannot be checked: {describe_server_error(problem)}"
            ) from None
        if error is not None:
            raise ToolError(f"{self.spec.name}: the server's result does not fit its schema: {to_line(error.message)}")

    def _refuses_null(self, about: Any, steps: Steps) -> bool:
        try:
            return isinstance(about, dict) and self.checked.find_part_error(about, None, steps) is not None
        except (SchemaTooCostly, SchemaUnusable):
            return False


class ToolListing:
    """The tools of a server's list, page by page. Reading and checking them all takes a bounded number of steps, where
    a byte of a tool counts as a step. It may take seconds, so it is done in a thread.

    `wanted` are the names or patterns of the tools to use. `tools` are those that are used, by their names for models.
    `is_full` says that no further page is used."""

    def __init__(self, server: str, wanted: Sequence[str] | None) -> None:
        self.tools: dict[str, ListedTool] = {}
        self.is_full = False
        self._server = server
        self._wanted = wanted
        self._missing = set(wanted or ())
        self._count = 0
        self._steps = Steps(LISTING_STEPS)
        self._left_out: list[str] = []

    def add_page(self, tools: Sequence[types.Tool]) -> None:
        """Add the wanted tools of a page, as far as the steps allow."""
        for tool in tools:
            if self._count == MAX_TOOLS:
                self.is_full = True
                return
            self._count += 1
            matching = {pattern for pattern in self._wanted or () if fnmatchcase(tool.name, pattern)}
            self._missing -= matching
            if self._wanted is not None and not matching:
                continue
            try:
                self._add_tool(tool)
            except (ValueError, RecursionError, SchemaError) as error:
                why = to_line(error.message) if isinstance(error, SchemaError) else describe_server_error(error)
                self._left_out.append(f"its tool '{to_line(tool.name, 80)}' is left out: {why}")

    def list_notes(self) -> list[str]:
        """Return a text for each tool that was left out or is missing."""
        if self.is_full:
            return [*self._left_out, f"its other tools are left out: {MAX_TOOLS} are enough"]
        missing = [pattern for pattern in self._wanted or () if pattern in self._missing]
        return self._left_out + [
            f"it has no tool '{each}', which mcp_servers.{self._server}.tools names" for each in missing
        ]

    def _add_tool(self, tool: types.Tool) -> None:
        try:
            self._steps.take(len(_encode(tool, tool.output_schema)))
            made = _make_listed_tool(self._server, tool, self._steps)
        except SchemaTooCostly:
            if self._steps.left > 0:
                raise
            raise SchemaTooCostly(TOO_MUCH) from None
        if made.spec.name in self.tools:
            raise ValueError("another one has the same name")
        self.tools[made.spec.name] = made


def _make_listed_tool(server: str, tool: types.Tool, steps: Steps) -> ListedTool:
    if tool.meta is not None and UNREADABLE in tool.meta:
        raise ValueError(str(tool.meta[UNREADABLE]))
    schema = clean_server_value(tool.input_schema)
    if schema.setdefault("type", "object") != "object":
        raise ValueError("its arguments are not an object")
    runs_agents = _wants_run_id(schema)
    if runs_agents:
        schema = _remove_property(schema, RUN_ID)
    output = tool.output_schema or {}
    checked = BoundedSchema(schema, steps)
    spec = ToolSpec(
        make_model_name(server, tool.name),
        cap_text(tool.description or ""),
        schema,
        display_name=to_line(tool.title or tool.name, 80),
        server=server,
        seal=compute_seal(tool),
        output=clean_server_value(output),
    )
    return ListedTool(
        name=tool.name,
        spec=spec,
        checked=checked,
        runs_agents=runs_agents,
        output=BoundedSchema(output, steps) if output else None,
    )


def make_model_name(server: str, tool: str) -> str:
    """Return `mcp__SERVER__TOOL`, in the characters and the length that every provider accepts."""
    name = f"{PREFIX}{server}__{_ODD.sub('_', tool)}"
    if len(name) <= MAX_NAME:
        return name
    return f"{name[: MAX_NAME - 9]}_{hashlib.sha256(tool.encode()).hexdigest()[:8]}"


def compute_seal(tool: types.Tool) -> str:
    """Hash the server's description of the tool. An approval of the tool holds only for this description."""
    return hashlib.sha256(_encode(tool)).hexdigest()[:32]


def _encode(tool: types.Tool, *more: Any) -> bytes:
    said = [tool.name, tool.title or "", tool.description or "", tool.input_schema, *more]
    return msgspec.json.encode(said, order="deterministic")


def _wants_run_id(schema: dict[str, Any]) -> bool:
    required, properties = schema.get("required"), schema.get("properties")
    if not isinstance(required, list) or not isinstance(properties, dict) or RUN_ID not in required:
        return False
    about = properties.get(RUN_ID)
    return isinstance(about, dict) and about.get("type") == "string"


def _remove_property(schema: dict[str, Any], name: str) -> dict[str, Any]:
    properties = {key: value for key, value in schema["properties"].items() if key != name}
    return {**schema, "properties": properties, "required": [key for key in schema["required"] if key != name]}
