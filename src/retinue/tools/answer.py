"""`final_answer`: the tool with which a run that has an output type gives its answer, checked against that type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from retinue.core.errors import ConfigError, ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome
from retinue.core.results import FINAL_ANSWER, Ending


class OutputType(msgspec.Struct, frozen=True):
    """An output type: its JSON `schema`, `check` to validate a plain value, and `parse` to build the typed value.

    A type whose schema is not an object is wrapped as `{"answer": ...}`, since tools take objects."""

    schema: dict[str, Any]
    check: Callable[[Any], Any]
    parse: Callable[[Any], Any]
    wrapped: bool = False


def make_output(kind: Any) -> OutputType:
    """Return the OutputType of a pydantic model, dataclass, msgspec Struct, TypedDict, plain type or JSON schema."""
    if isinstance(kind, dict):
        output = _make_schema_output(kind)
    elif hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate"):
        output = OutputType(kind.model_json_schema(), lambda v: to_plain(kind.model_validate(v)), kind.model_validate)
    else:
        output = _make_type_output(kind)
    if output.schema.get("type") == "object" or "properties" in output.schema:
        return output
    schema = {"type": "object", "properties": {"answer": output.schema}, "required": ["answer"]}
    if "$defs" in output.schema:
        schema["$defs"] = output.schema["$defs"]
    return msgspec.structs.replace(output, schema=schema, wrapped=True)


def to_plain(value: Any) -> Any:
    """Return an output value as plain values, from which the typed value can be rebuilt."""
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json", by_alias=True, round_trip=True)
    return msgspec.to_builtins(value)


def _make_type_output(kind: Any) -> OutputType:
    try:
        schema = inline_schema(kind)
    except TypeError as error:
        raise ConfigError(f"output type {getattr(kind, '__name__', kind)!r} cannot be described: {error}") from None
    return OutputType(
        schema, lambda v: msgspec.to_builtins(msgspec.convert(v, kind)), lambda v: msgspec.convert(v, kind)
    )


def _make_schema_output(schema: dict[str, Any]) -> OutputType:
    # Both imports load jsonschema, which takes 0.1 s of every start, and only an output schema given as JSON needs it.
    from jsonschema import SchemaError  # noqa: PLC0415

    from retinue.tools.bounded_schema import BoundedSchema, SchemaTooCostly, SchemaUnusable  # noqa: PLC0415

    try:
        checked = BoundedSchema(schema)
    except SchemaError as error:
        raise ConfigError(f"output schema is not a JSON schema: {error.message}") from None
    except (SchemaTooCostly, SchemaUnusable) as error:
        raise ConfigError(f"output type cannot be used: {error}") from None

    def check(value: Any) -> Any:
        error = checked.find_error(value)
        if error is not None:
            raise ValueError(f"{error.json_path}: {error.message}")
        return value

    return OutputType(schema, check, lambda value: value)


def inline_schema(kind: Any) -> dict[str, Any]:
    """Return the JSON schema of a type with its own definition at the top level, as tool schemas require."""
    schema = msgspec.json.schema(kind)
    reference = schema.get("$ref", "")
    definitions = schema.pop("$defs", {})
    if reference.startswith("#/$defs/"):
        top = definitions[reference.removeprefix("#/$defs/")]
        if not _has_reference(definitions, reference):
            definitions.pop(reference.removeprefix("#/$defs/"))
        schema = dict(top)
    if definitions:
        schema["$defs"] = definitions
    return schema


def _has_reference(value: Any, reference: str) -> bool:
    if isinstance(value, dict):
        return value.get("$ref") == reference or any(_has_reference(part, reference) for part in value.values())
    return isinstance(value, list) and any(_has_reference(part, reference) for part in value)


class FinalAnswer:
    """The `final_answer` tool. The `data` of its outcome is the checked answer in plain values."""

    def __init__(self, output: OutputType) -> None:
        self.output = output
        self.spec = ToolSpec(
            FINAL_ANSWER,
            "Give your final answer. Call this once, when the work is done; it ends the run.",
            output.schema,
            tier="observe",
            display_name="Final answer",
            repeatable=True,
        )

    async def preview(self, call: Call, folders: Folders) -> str:
        return ""

    async def __call__(self, call: Call, folders: Folders, link: Link) -> Outcome:
        given = call.args
        if self.output.wrapped:
            if "answer" not in given:
                raise ToolError("final_answer: missing 'answer'")
            given = given["answer"]
        try:
            checked = self.output.check(given)
        except Exception as error:  # noqa: BLE001 - a type's own validators may raise anything; the model gets the text
            raise ToolError(f"final_answer: the answer does not fit its type: {error}") from None
        text = msgspec.json.encode(checked).decode()
        return Outcome("accepted", data=checked, ending=Ending("done", text, structured=checked))
