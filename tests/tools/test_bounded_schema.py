"""Schemas of servers: what they mean here, and that none of them takes for ever."""

from __future__ import annotations

from typing import Any

import mcp_types as types
import pytest
from jsonschema.exceptions import SchemaError

from retinue.core.errors import ToolError
from retinue.tools.bounded_schema import BoundedSchema, SchemaTooCostly
from retinue.tools.mcp.calls import ElicitationForm
from retinue.tools.mcp.tool_listing import make_listed_tools
from tests.gates import limit_calls

EVIL = "^(a+)+$"
ALMOST = "a" * 40 + "!"
MOST_CALLS = 20_000_000


def doubling(levels: int, keyword: str = "allOf") -> dict[str, Any]:
    """References that double at each level: 2 ** levels checks."""
    parts: dict[str, Any] = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    parts[f"d{levels}"] = {"type": "string"}
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": parts}


def listed(schema: dict[str, Any], output: dict[str, Any] | None = None) -> Any:
    tool = types.Tool(name="t", input_schema=schema, output_schema=output)
    found, left_out = make_listed_tools("s", [tool], None)
    assert not left_out
    return found["mcp__s__t"]


@pytest.fixture
def quick() -> Any:
    """Fail if the check takes many steps; without a limit it would take far more."""
    with limit_calls(MOST_CALLS):
        yield


@pytest.mark.finding("X8")
@pytest.mark.parametrize("keyword", ["allOf", "anyOf", "oneOf"])
def test_references_that_double_are_given_up_on(quick: None, keyword: str) -> None:
    schema = doubling(40, keyword)
    with pytest.raises(SchemaTooCostly):
        BoundedSchema(schema).find_error({"x": 1})
    tool = listed(schema, schema)
    assert tool.check_arguments({"x": None, "y": 1}) == {"x": None, "y": 1}  # left to the server
    tool.check_result(types.CallToolResult(content=[], structured_content={"x": 1}))  # taken as it is


@pytest.mark.finding("X8")
@pytest.mark.parametrize(
    ("schema", "fit"),
    [
        ({"type": "object", "properties": {"x": {"pattern": EVIL}}}, [False, True]),
        ({"type": "object", "patternProperties": {EVIL: {}}, "additionalProperties": False}, [False, False]),
        ({"type": "object", "patternProperties": {EVIL: {}}, "unevaluatedProperties": False}, [True, True]),
        (
            {"type": "object", "patternProperties": {EVIL: {}}, "additionalProperties": {"type": "integer"}},
            [False, False],
        ),
        ({"type": "object", "propertyNames": {"pattern": EVIL}}, [False, False]),
    ],
)
def test_patterns_take_linear_time(quick: None, schema: dict[str, Any], fit: list[bool]) -> None:
    checked = BoundedSchema(schema)
    assert [checked.find_error(value) is None for value in ({"x": ALMOST}, {ALMOST: "text"})] == fit


def test_patterns_mean_what_they_say() -> None:
    named = BoundedSchema({"patternProperties": {"^x_": {"type": "integer"}}, "additionalProperties": False})
    assert named.find_error({"x_1": 1}) is None
    assert named.find_error({"x_1": "one"}) is not None and named.find_error({"y": 1}) is not None
    digits = BoundedSchema({"type": "string", "pattern": "^[0-9]+$"})
    assert digits.find_error("12") is None and digits.find_error("1x") is not None
    assert BoundedSchema({"pattern": "(?=unknown to RE2)"}).find_error("anything") is None
    assert BoundedSchema({"uniqueItems": True}).find_error([1, 1]) is not None
    with pytest.raises(SchemaError):
        BoundedSchema({"type": "nothing"})


@pytest.mark.finding("X8")
@pytest.mark.parametrize("about", [{"type": "string", "pattern": EVIL}, doubling(40)["$defs"]["d0"]])
def test_a_form_of_a_server_is_checked_in_bounded_time(quick: None, about: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"x": about}, "$defs": doubling(40)["$defs"]}
    params = types.ElicitRequestFormParams(message="Which?", requested_schema=schema)
    assert isinstance(ElicitationForm("s", params).make_content({"x": ALMOST}), str)


@pytest.mark.finding("X8")
def test_a_large_list_is_not_compared_each_with_each(quick: None) -> None:
    values = [{"n": n} if n % 2 else [n] for n in range(20_000)]
    assert BoundedSchema({"uniqueItems": True}).find_error(values) is None


def test_a_result_that_does_not_fit_is_an_error() -> None:
    tool = listed({"type": "object"}, {"type": "object", "required": ["n"]})
    tool.check_result(types.CallToolResult(content=[], structured_content={"n": 1}))
    for result in (types.CallToolResult(content=[]), types.CallToolResult(content=[], structured_content={})):
        with pytest.raises(ToolError, match="the server's result"):
            tool.check_result(result)
