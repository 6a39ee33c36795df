"""Schemas of servers: what they mean here, and that none of them takes for ever."""

from __future__ import annotations

from typing import Any

import mcp_types as types
import pytest
from jsonschema.exceptions import SchemaError

from retinue.core.errors import ConfigError, ToolError
from retinue.tools.answer import make_output
from retinue.tools.bounded_schema import BoundedSchema, SchemaTooCostly, SchemaUnusable, Steps
from retinue.tools.mcp.calls import ElicitationForm
from retinue.tools.mcp.tool_listing import ToolListing
from tests.gates import limit_calls

EVIL = "^(a+)+$"
ALMOST = "a" * 40 + "!"
MOST_CALLS = 20_000_000
DIALECT = "https://json-schema.org/draft/2020-12/schema"


def doubling(levels: int, keyword: str = "allOf") -> dict[str, Any]:
    """References that double at each level: 2 ** levels checks."""
    parts: dict[str, Any] = {f"d{n}": {keyword: [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(levels)}
    parts[f"d{levels}"] = {"type": "string"}
    return {"type": "object", "properties": {"x": {"$ref": "#/$defs/d0"}}, "$defs": parts}


def listed(schema: dict[str, Any], output: dict[str, Any] | None = None) -> Any:
    tool = types.Tool(name="t", input_schema=schema, output_schema=output)
    listing = ToolListing("s", None)
    listing.add_page([tool])
    assert not listing.list_notes()
    return listing.tools["mcp__s__t"]


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


def refer(times: int, part: dict[str, Any], **parts: Any) -> dict[str, Any]:
    """Return a schema that refers to a part many times."""
    return {"allOf": [{"$ref": "#/$defs/part"}] * times, "$defs": {"part": part, **parts}}


NAMES = [str(number) for number in range(5000)]
EQUAL = [[[] for _ in range(5000)]]


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        pytest.param({**doubling(40), "$schema": DIALECT, "$defs": {name: {**part, "$schema": DIALECT} for name, part in
                     doubling(40)["$defs"].items()}}, {"x": 1}, id="parts that name their dialect"),
        pytest.param({"$ref": DIALECT}, {"allOf": [{}] * 2000}, id="the schema of schemas"),
        pytest.param({"anyOf": [False] * 2000}, "x" * 100_000, id="long messages of no keyword"),
        pytest.param({"anyOf": [{"type": "integer"}] * 1000}, "x" * 100_000, id="long messages"),
        pytest.param(refer(100, {"enum": [EQUAL, 1]}), [[*EQUAL[0][:-1], 1]], id="values that differ at their ends"),
        pytest.param(refer(200, {"dependentRequired": {"0": ["0"] * 5000}}), {"0": 0}, id="long dependencies"),
        pytest.param({"items": {"uniqueItems": True}}, [[[n, "x"] if n % 2 else {"n": n} for n in range(100)]] * 1000,
                     id="many lists of unique items"),
        pytest.param(refer(100, {"pattern": "[a-z]{1,900}!?(x|y)*$"}), "ab" * 1000, id="patterns on long texts"),
        pytest.param({"patternProperties": {f"^x{n}$": {} for n in range(1000)}, "additionalProperties": False},
                     dict.fromkeys(NAMES), id="many patterns for many names"),
        pytest.param({"items": {"title": "x"}}, [0] * 500_000, id="many items"),
        pytest.param({"items": dict.fromkeys(NAMES, 0)}, [0] * 1000, id="many unknown keywords"),
        pytest.param({"$ref": "#/x", "x": {"type": ["string"] * 1000, "required": NAMES}}, {}, id="many types"),
    ],
)  # fmt: skip
def test_what_a_check_does_costs_steps(quick: None, schema: dict[str, Any], value: Any) -> None:
    checked = BoundedSchema(schema)
    with pytest.raises(SchemaTooCostly):
        checked.find_error(value)


@pytest.mark.parametrize(
    "schema",
    [
        {"anyOf": [True] * 50_000},
        {"properties": {"x": {"$id": "a/" * 2000, "$defs": {name: {"$id": name} for name in NAMES}}}},
    ],
)
def test_the_check_of_a_schema_costs_steps(quick: None, schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaTooCostly):
        BoundedSchema(schema)


def test_an_anchor_is_found_without_a_search_for_each_reference() -> None:
    parts = {"part": {"$anchor": "here"}, **{name: {} for name in NAMES[:1000]}}
    checked = BoundedSchema({"allOf": [{"$ref": "#here"}] * 1000, "$defs": parts})
    with limit_calls(1_000_000):
        assert checked.find_error(1) is None


def test_schemas_share_steps() -> None:
    steps, schema = Steps(100_000), {"properties": {name: {} for name in NAMES[:100]}}
    BoundedSchema(schema, steps)
    used = 100_000 - steps.left
    BoundedSchema(schema, steps)
    assert 10_000 < used < 50_000 and steps.left == 100_000 - 2 * used
    with pytest.raises(SchemaTooCostly):
        BoundedSchema(schema, Steps(used - 1))


@pytest.mark.parametrize(
    "schema",
    [{"$schema": 5}, {"$schema": []}, {"$schema": "http://["}, {"$id": "http://a/", "not": {"$id": "http://["}}],
)
def test_a_schema_with_an_address_that_is_none_cannot_be_used(schema: dict[str, Any]) -> None:
    with pytest.raises(SchemaUnusable, match=r"its schema cannot be used: '\$(schema|id)' is not an address"):
        BoundedSchema(schema)


@pytest.mark.parametrize("wrong", [{"$schema": 5}, {"anyOf": [True] * 20_000}])
def test_an_output_schema_that_cannot_be_checked_is_an_error_of_the_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="output type cannot be used: its schema "):
        make_output({"type": "object", **wrong})


@pytest.mark.parametrize(
    ("part", "value"),
    [
        (5, 1),
        ({"properties": 5}, {}),
        ({"type": "no such type"}, 1),
        ({"multipleOf": 0}, 1),
        ({"minimum": "1"}, 1),
        ({"$ref": "#/nowhere"}, 1),
        ({"multipleOf": 0.5}, float("nan")),
    ],
)
def test_a_reference_to_what_is_no_schema_is_an_error_of_the_schema(part: Any, value: Any) -> None:
    """References may lead to parts that the check of the schema does not look at."""
    schema = {"type": "object", "properties": {"x": {"$ref": "#/part"}}, "part": part}
    with pytest.raises(SchemaUnusable):
        BoundedSchema(schema).find_error({"x": value})
    tool = listed(schema, schema)
    assert tool.check_arguments({"x": value}).keys() == {"x"}  # left to the server
    with pytest.raises(ToolError, match="its result cannot be checked"):
        tool.check_result(types.CallToolResult(content=[], structured_content={"x": value}))


def test_parts_keep_their_dialect_their_addresses_and_their_anchors() -> None:
    old = {"$schema": "http://json-schema.org/draft-07/schema#", "items": [{"type": "integer"}]}
    new = {"$id": "new", "$anchor": "here", "type": "string"}
    properties = {"a": {"$ref": "#/old"}, "b": {"$ref": "new#here"}, "c": False}
    schema = {"properties": properties, "$defs": {"new": new}, "old": old}
    checked = BoundedSchema(schema)
    assert checked.find_error({"a": [1], "b": "x"}) is None
    for wrong in ({"a": ["x"]}, {"b": 1}, {"c": 1}):
        assert checked.find_error(wrong) is not None


def test_a_value_that_no_schema_allows_is_named() -> None:
    error = BoundedSchema({"properties": {"x": False}}).find_error({"x": 1})
    assert error is not None and error.message == "False schema does not allow 1"


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {f"x{n}": {"$id": f"#/properties/settings/properties/x{n}"} for n in range(100)},
         "$schema": "http://json-schema.org/draft-07/schema#"},
        {"examples": [{"id": "0123456789abcdef" * 2}] * 100},
        {"properties": {f"x{n}": {"anyOf": [{"type": "string"}, {"type": "null"}]} for n in range(2000)}},
    ],
    ids=["an address in each part", "examples that have ids", "100 KB"],
)  # fmt: skip
def test_an_ordinary_large_schema_can_be_checked(schema: dict[str, Any]) -> None:
    assert BoundedSchema(schema).find_error({}) is None


def test_what_takes_too_many_levels_of_calls_to_check_is_too_costly() -> None:
    endless = {"$ref": "#/$defs/part", "$defs": {"part": {"$ref": "#/$defs/part"}}}
    with pytest.raises(SchemaTooCostly):
        BoundedSchema(endless).find_error(1)
    node = {"type": "object", "properties": {"nodes": {"type": "array", "items": {"$ref": "#/$defs/node"}}}}
    value: dict[str, Any] = {}
    for _ in range(190):
        value = {"nodes": [value]}
    tool = listed({"type": "object"}, {"type": "object", "$ref": "#/$defs/node", "$defs": {"node": node}})
    tool.check_result(types.CallToolResult(content=[], structured_content=value))


def test_names_that_no_pattern_allows_are_named() -> None:
    error = BoundedSchema({"patternProperties": {"^x": {}}, "additionalProperties": False}).find_error({"y": 1})
    assert error is not None and error.message == "Additional properties are not allowed ('y' was unexpected)"


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


def test_a_large_form_of_a_server_is_not_asked() -> None:
    schema = {"type": "object", "properties": {name * 10: {"type": "string"} for name in NAMES}}
    params = types.ElicitRequestFormParams(message="Which?", requested_schema=schema)
    with pytest.raises(ValueError, match="its form is larger than 128 KiB"):
        ElicitationForm("s", params)


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
