"""The Python that is made of tools: typed from their schemas, safe whatever a server says, short enough to be told."""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retinue.core.messages import ToolSpec
from retinue.tools.code_mode import DESCRIPTION_CHARACTERS, ExecutePython, build_modules, describe_modules
from retinue.tools.code_program import ToolError


def spec(name: str, schema: dict[str, Any], about: str = "", *, server: str = "hub", **more: Any) -> ToolSpec:
    return ToolSpec(f"mcp__{server}__{name}", about, schema, server=server, **more)


def an_object(*required: str, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required)}


@pytest.fixture
def tools() -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """Makes `from tools import ...` of a generated module work, and keeps what is called."""
    calls: list[tuple[str, dict[str, Any]]] = []

    async def call(tool: str, args: dict[str, Any]) -> None:
        calls.append((tool, {name: value for name, value in args.items() if value is not ...}))

    module = types.ModuleType("tools")
    module.__dict__.update(_call=call, ToolError=ToolError)
    sys.modules["tools"] = module
    yield calls
    del sys.modules["tools"]


def loaded(*specs: ToolSpec) -> types.ModuleType:
    [made] = build_modules(specs)
    module = types.ModuleType(f"tools.{made.name}")
    exec(compile(made.source, "generated", "exec", dont_inherit=True), module.__dict__)
    return module


def signature(*specs: ToolSpec) -> str:
    [made] = build_modules(specs)
    [function] = made.functions
    return function.signature


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        ({"type": "string"}, "str"),
        ({"type": "integer"}, "int"),
        ({"type": "number"}, "float"),
        ({"type": "boolean"}, "bool"),
        ({"type": ["string", "null"]}, "str | None"),
        ({"type": "array", "items": {"type": "integer"}}, "list[int]"),
        ({"type": "array"}, "list[Any]"),
        ({"type": "object"}, "dict[str, Any]"),
        ({"type": "object", "additionalProperties": {"type": "number"}}, "dict[str, float]"),
        ({"enum": ["a", "b", 3, None, True]}, "Literal['a', 'b', 3, None, True]"),
        ({"const": "only"}, "Literal['only']"),
        ({"enum": [[1], {}]}, "Any"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}, {"type": "string"}]}, "str | int"),
        ({"allOf": [{"$ref": "#/$defs/City"}]}, "{name: str, mayor?: str}"),
        ({"$ref": "#/$defs/City"}, "{name: str, mayor?: str}"),
        ({"$ref": "#/nowhere"}, "Any"),
        ({"$ref": "#/$defs/Around"}, "Any"),
        ({}, "Any"),
        (True, "Any"),
        ({"type": "surprise"}, "Any"),
    ],
)
def test_types_are_read_from_the_schema(schema: Any, kind: str) -> None:
    city = an_object("name", name={"type": "string"}, mayor={"type": "string"})
    whole = an_object("x", x=schema) | {"$defs": {"City": city, "Around": {"$ref": "#/$defs/Around"}}}
    assert signature(spec("f", whole)) == f"f(x: {kind}) -> Any"


@pytest.mark.parametrize(
    ("schema", "default"),
    [
        ({"type": "integer", "default": 3}, "3"),
        ({"type": "string", "default": "it's"}, '"it\'s"'),
        ({"type": ["string", "null"], "default": None}, "None"),
        ({"enum": ["a", "b"], "default": "b"}, "'b'"),
        ({"type": "boolean", "default": False}, "False"),
        ({"type": "string"}, "..."),
        ({"type": "string", "default": None}, "..."),  # a server that would refuse its own default
        ({"type": "integer", "default": True}, "..."),
        ({"type": "array", "default": []}, "..."),
    ],
)
def test_a_default_is_shown_where_it_fits_its_type(schema: dict[str, Any], default: str) -> None:
    assert signature(spec("f", an_object(x=schema))).partition(" = ")[2] == f"{default}) -> Any"


async def test_what_is_left_out_is_not_sent(tools: list[Any]) -> None:
    schema = an_object("b", a={"type": "string"}, b={"type": "string"}, c={"type": "integer", "default": 2})
    module = loaded(spec("f", schema))
    await module.f("x")
    await module.f("x", a="y", c=5)
    await module.f(b=None)
    name = "mcp__hub__f"
    assert tools == [(name, {"b": "x", "c": 2}), (name, {"b": "x", "a": "y", "c": 5}), (name, {"b": None, "c": 2})]


def test_a_result_in_a_field_of_its_own_is_the_result() -> None:
    """Servers wrap a result that is no object in such a field."""
    output = an_object("result", result={"type": "array", "items": {"type": "string"}})
    made = spec("f", {}, output=output)
    assert signature(made) == "f() -> list[str]"
    assert "await _call('mcp__hub__f', {}, 'result')" in build_modules([made])[0].source
    more = an_object("result", result={"type": "string"}, other={"type": "string"})
    assert signature(spec("f", {}, output=more)) == "f() -> {result: str, other?: str}"


async def test_names_that_python_does_not_take_are_mapped(tools: list[Any]) -> None:
    names = ["class", "content-type", "content_type", "1st", "", "self", "_call", "ünïcode", "\n'); boom("]
    schema = an_object(*names[:7], **{name: {"type": "string"} for name in names})
    module = loaded(spec("do-it", schema), spec("do_it", {}), spec("import", {}), spec("list", {}), server_of_ours())
    await module.do_it(*"1234567", n_code="8", boom="9")
    [(name, args)] = tools
    assert name == "mcp__hub__do-it"
    assert args == dict(zip(schema["properties"], "123456789", strict=True))
    await module.do_it_2()
    await module.import_()
    await module.list()
    assert [name for name, _ in tools[1:]] == ["mcp__hub__do_it", "mcp__hub__import", "mcp__hub__list"]


def server_of_ours() -> ToolSpec:
    return spec("Any", {}, "A tool with the name of a type that the module uses.")


def test_nested_objects_are_typed_dicts_and_results_too(tools: list[Any]) -> None:
    node = an_object("id", id={"type": "integer"}, **{"next": {"$ref": "#/$defs/Node"}, "x-y": {"type": "string"}})
    schema = an_object("start", start={"$ref": "#/$defs/Node"}) | {"$defs": {"Node": node | {"title": "Node"}}}
    output = an_object("count", count={"type": "integer"}, list={"type": "array", "items": {"type": "string"}})
    module = loaded(spec("walk", schema, output=output), spec("list", {}))
    assert typing.is_typeddict(module.Node)
    assert module.Node.__required_keys__ | module.Node.__optional_keys__ == {"id", "next", "x-y"}
    assert inspect.signature(module.walk).return_annotation == "WalkResult"
    assert module.WalkResult.__total__
    assert signature(spec("walk", schema, output=output)).endswith("-> {count: int, list?: list[str]}")


def test_the_words_of_a_server_are_words_and_no_code(tools: list[Any]) -> None:
    wicked = 'x"""\nimport os\nos.abort()\n"""\\'
    schema = an_object(**{wicked: {"type": "string", "description": wicked, "enum": [wicked], "default": wicked}})
    module = loaded(spec("f", schema, wicked, server=wicked), spec(wicked, {"title": wicked}, server=wicked))
    assert wicked in module.f.__doc__
    assert "os" not in vars(module)


def test_a_docstring_tells_what_the_parameters_are(tools: list[Any]) -> None:
    schema = an_object("city", city={"type": "string", "description": "which\n  city"}, days={"type": "integer"})
    module = loaded(spec("forecast", schema, "The weather.\n\nOf the next days."))
    assert module.forecast.__doc__.strip() == ("The weather.\n\nOf the next days.\n\nParameters:\n    city: which city")


def test_servers_are_modules_with_names_of_their_own() -> None:
    specs = [spec("f", {}, server=server) for server in ("my-hub", "my_hub", "import", "2nd", "ToolError")]
    assert [module.name for module in build_modules(specs)] == ["my_hub", "my_hub_2", "import_", "n2nd", "ToolError_2"]


def test_the_model_is_told_what_it_can_call() -> None:
    schema = an_object("city", city={"type": "string"}, days={"type": "integer", "default": 3})
    about = describe_modules(build_modules([spec("forecast", schema, "The weather.\nMore of it.", server="weather")]))
    assert about.splitlines()[-2:] == [
        "from tools import weather",
        "await weather.forecast(city: str, days: int = 3) -> Any  # The weather. More of it.",
    ]
    assert ExecutePython().spec.description.endswith("There are no tools for it to call.")


@pytest.mark.parametrize(
    ("many", "last"),
    [(50, "# A word about it."), (100, "-> Any"), (400, "hub.f399"), (3000, " more lines: see `help(tools)`]")],
)
def test_with_many_tools_it_is_told_less_of_each(many: int, last: str) -> None:
    schema = an_object(argument_with_a_name={"type": "string"}, another_argument={"type": "array"})
    about = describe_modules(build_modules([spec(f"f{n}", schema, "A word about it. " * 5) for n in range(many)]))
    assert len(about) < DESCRIPTION_CHARACTERS + 2000
    assert last in about.splitlines()[-1]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
KEYS = st.sampled_from(
    ["type", "properties", "required", "items", "enum", "const", "anyOf", "oneOf", "allOf", "$ref", "$defs", "default",
     "title", "description", "additionalProperties", "x"]
)  # fmt: skip
VALUES = JSON | st.sampled_from(["object", "array", "string", "integer", "#/$defs/x", "#/properties/x", "#"])
SCHEMAS = st.recursive(
    st.dictionaries(KEYS, VALUES, max_size=4),
    lambda inner: st.dictionaries(KEYS, inner | VALUES | st.lists(inner, max_size=3), max_size=5),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(name=st.text(min_size=1), about=st.text(), schema=SCHEMAS, output=SCHEMAS)
def test_whatever_a_server_says_makes_a_module(name: str, about: str, schema: Any, output: Any) -> None:
    specs = [spec(name, schema, about, output=output), spec("f", schema, about, server=name)]
    for module in build_modules(specs):
        tree = ast.parse(module.source)
        kinds = {type(node) for node in tree.body}
        assert kinds <= {ast.Expr, ast.ImportFrom, ast.Assign, ast.AsyncFunctionDef}
    assert len(describe_modules(build_modules(specs))) < DESCRIPTION_CHARACTERS + 2000


def test_a_schema_that_grows_without_end_is_cut_off() -> None:
    many = {"anyOf": [{"$ref": "#/$defs/Many"}] * 20, "type": "object"}
    wide = an_object(**{f"p{n}": {"$ref": "#/$defs/Wide"} for n in range(20)})
    schema = an_object(a={"$ref": "#/$defs/Many"}, b={"$ref": "#/$defs/Wide"}) | {"$defs": {"Many": many, "Wide": wide}}
    assert len(build_modules([spec("f", schema, output=schema)])[0].source) < 100_000
