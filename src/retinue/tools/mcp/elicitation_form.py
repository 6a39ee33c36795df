"""An elicitation: a server's question to a person, as fields to fill in, and the answer checked against its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import mcp_types as types
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from retinue.tools.mcp.server_text import cap_text, clean_value, describe_error, to_line

Action = Literal["accept", "decline", "cancel"]
YES = "yes"


class ElicitationForm:
    """One question. `fields` are what a person can fill in, with their defaults; `preview` is the question as text."""

    def __init__(self, server: str, params: types.ElicitRequestParams) -> None:
        self._schema: dict[str, Any] = {}
        message = cap_text(params.message)
        if isinstance(params, types.ElicitRequestURLParams):
            self.fields: dict[str, Any] = {"url": to_line(params.url, 2000)}
            self._is_url = True
            self.preview = f"The MCP server '{server}' wants you to open this address:\n{message}"
            return
        self._is_url = False
        self._schema = clean_value(params.requested_schema)
        self.fields = {name: self._default_of(name, about) for name, about in self._list_properties()}
        lines = [f"The MCP server '{server}' asks:", message, *self._describe_fields()]
        self.preview = "\n".join(lines)

    def make_content(self, given: dict[str, Any]) -> dict[str, Any] | str | None:
        """Return the content to send for an answer, or a text that says what is wrong with it."""
        if self._is_url:
            return None
        kinds = dict(self._list_properties())
        made = {
            name: _convert_value(value, kinds.get(name, {}))
            for name, value in given.items()
            if value is not None or name not in kinds
        }
        try:
            kind = validator_for(self._schema)
            kind.check_schema(self._schema)
            error = best_match(kind(self._schema, registry=Registry()).iter_errors(made))
        except (SchemaError, Unresolvable, RecursionError) as problem:
            return f"its form cannot be read: {describe_error(problem)}"
        if error is None:
            return made
        where = ".".join(map(str, error.absolute_path))
        return f"{where}: {to_line(error.message)}" if where else to_line(error.message)

    def _list_properties(self) -> Iterator[tuple[str, dict[str, Any]]]:
        found = self._schema.get("properties")
        for name, about in found.items() if isinstance(found, dict) else ():
            if isinstance(about, dict):
                yield name, about

    def _default_of(self, name: str, about: dict[str, Any]) -> Any:
        """Return the default of a field. A required choice that has `yes` gets it: a person's yes means that."""
        means = name in (self._schema.get("required") or ()) and YES in _list_choices(about)
        return about.get("default", YES if means else None)

    def _describe_fields(self) -> Iterator[str]:
        required = self._schema.get("required") or ()
        for name, about in self._list_properties():
            choices = _list_choices(about)
            kind = f"one of {', '.join(map(str, choices))}" if choices else str(about.get("type", "text"))
            must = ", required" if name in required else ""
            more = about.get("description") or about.get("title") or ""
            yield to_line(f"  {name} ({kind}{must}) {more}")


def _list_choices(about: dict[str, Any]) -> list[Any]:
    listed, said = about.get("enum"), about.get("oneOf")
    if isinstance(listed, list) and listed:
        return listed
    return [one.get("const") for one in said if isinstance(one, dict)] if isinstance(said, list) else []


def _convert_value(value: Any, about: dict[str, Any]) -> Any:
    """Convert a value that a person typed to the type of its field."""
    kind = about.get("type")
    if kind == "string" and isinstance(value, bool | int | float):
        return str(value).lower() if isinstance(value, bool) else str(value)
    if kind in ("integer", "number") and isinstance(value, str):
        for convert in (int, float):
            try:
                return convert(value)
            except ValueError:
                continue
    if kind == "boolean" and isinstance(value, str):
        return {"true": True, "yes": True, "false": False, "no": False}.get(value.strip().lower(), value)
    return value
