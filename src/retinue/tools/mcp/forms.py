"""What a server asks a person (elicitation), put as a question with fields, and the answer made fit for its schema."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import mcp_types as types
from jsonschema.exceptions import SchemaError, best_match
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from retinue.tools.mcp import words

Action = Literal["accept", "decline", "cancel"]
YES = "yes"


class Form:
    """One question. `fields` are what a person can fill in, with what stands there before they do."""

    def __init__(self, server: str, params: types.ElicitRequestParams) -> None:
        self._schema: dict[str, Any] = {}
        message = words.capped(params.message)
        if isinstance(params, types.ElicitRequestURLParams):
            self.fields: dict[str, Any] = {"url": words.line(params.url, 2000)}
            self._is_url = True
            self.preview = f"The MCP server '{server}' wants you to open this address:\n{message}"
            return
        self._is_url = False
        self._schema = words.plain_value(params.requested_schema)
        self.fields = {name: self._filled(name, about) for name, about in self._properties()}
        lines = [f"The MCP server '{server}' asks:", message, *self._described()]
        self.preview = "\n".join(lines)

    def content(self, given: dict[str, Any]) -> dict[str, Any] | str | None:
        """What is sent for an answer; a text says what is wrong with it."""
        if self._is_url:
            return None
        kinds = dict(self._properties())
        made = {
            name: _as_kind(value, kinds.get(name, {}))
            for name, value in given.items()
            if value is not None or name not in kinds
        }
        try:
            kind = validator_for(self._schema)
            kind.check_schema(self._schema)
            error = best_match(kind(self._schema, registry=Registry()).iter_errors(made))
        except (SchemaError, Unresolvable, RecursionError) as problem:
            return f"its form cannot be read: {words.reason(problem)}"
        if error is None:
            return made
        where = ".".join(map(str, error.absolute_path))
        return f"{where}: {words.line(error.message)}" if where else words.line(error.message)

    def _properties(self) -> Iterator[tuple[str, dict[str, Any]]]:
        found = self._schema.get("properties")
        for name, about in found.items() if isinstance(found, dict) else ():
            if isinstance(about, dict):
                yield name, about

    def _filled(self, name: str, about: dict[str, Any]) -> Any:
        """What stands in a field at first. Where one has to choose and `yes` is a choice, it is what a yes means."""
        means = name in (self._schema.get("required") or ()) and YES in _choices(about)
        return about.get("default", YES if means else None)

    def _described(self) -> Iterator[str]:
        required = self._schema.get("required") or ()
        for name, about in self._properties():
            choices = _choices(about)
            kind = f"one of {', '.join(map(str, choices))}" if choices else str(about.get("type", "text"))
            must = ", required" if name in required else ""
            more = about.get("description") or about.get("title") or ""
            yield words.line(f"  {name} ({kind}{must}) {more}")


def _choices(about: dict[str, Any]) -> list[Any]:
    listed, said = about.get("enum"), about.get("oneOf")
    if isinstance(listed, list) and listed:
        return listed
    return [one.get("const") for one in said if isinstance(one, dict)] if isinstance(said, list) else []


def _as_kind(value: Any, about: dict[str, Any]) -> Any:
    """A value that was typed, as the kind of thing the form wants."""
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
