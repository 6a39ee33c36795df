"""Code mode: the tool `execute_python_code`, which runs one Python program instead of many tool calls.

The program runs in its run's sandbox as a process group, like a shell command. It can import the run's MCP tools as
modules. Each tool call of the program travels over a channel to the host, which executes it like any other call of the
run. A program that violates the channel's protocol is ended.

There is one module per server and one async function per tool, typed from the tool's JSON schemas. The model gets a
compact list of them. Names, descriptions and schemas come from the server and are not trusted: in the generated source
they appear only as literals or checked identifiers, never as code.
"""

from __future__ import annotations

import asyncio
import keyword
import re
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from retinue.concurrency import TaskOwner
from retinue.core.errors import ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Execution, Outcome, ProgramCallResult
from retinue.core.rules import CODE_MODE
from retinue.processes.group import ProcessGroup
from retinue.protocol.frames import FrameReader, ProtocolError, encode_frame
from retinue.tools.code_program import FRAME_BYTES
from retinue.tools.command_process import CommandTool

CODE_BYTES = 256 * 1024
CHUNK_BYTES = 64 * 1024
AT_ONCE = 32
KEPT_BYTES = 16 * 1024 * 1024
STOP_SECONDS = 2.0
NOTE_CHARACTERS = 200
NOTES = 5
Calls = Callable[[str, dict[str, Any]], Awaitable[ProgramCallResult]]
DESCRIPTION_CHARACTERS = 12_000
SUMMARY_CHARACTERS = 100
DOC_CHARACTERS = 4000
DEEP = 8
SHOWN_DEEP = 3
PARTS = 200
CHOICES = 20
TYPES = 40
RESULT = "result"
ABOUT = (
    "Run a Python program and give what it prints, and the value of its last expression. Top-level `await` works, and "
    "so does `asyncio.gather`. Prefer it to many tool calls: loop over them, make them at once, keep what is large in "
    "variables and print only what you need. It runs in the workspace, has no input, and what it leaves in the "
    "background is ended. "
)
CALLING = (
    "Tools are async functions in one module per server; what they need is asked and shown as if you had called them. "
    "A tool that fails raises `tools.ToolError`. `...` marks what may be left out; `help(tools.NAME)` tells more.\n"
)
NO_TOOLS = "There are no tools for it to call."
_SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "None"}
_KINDS: dict[str, tuple[type, ...]] = {
    "string": (str,), "integer": (int,), "number": (int, float), "boolean": (bool,), "null": (type(None),),
}  # fmt: skip
_OURS = frozenset({"Any", "Literal", "NotRequired", "ToolError", "TypedDict", "annotations"})
PROGRAM = str(Path(__file__).with_name("code_program.py"))


class ExecutePython(CommandTool):
    """The `execute_python_code` tool. Its programs can call the tools `program_tools`, if any."""

    text_argument, seconds_argument = "code", "executionTimeout"
    default_seconds = 60.0
    process_noun = "program"
    note_bytes = 4096
    spec = ToolSpec(
        CODE_MODE,
        ABOUT + NO_TOOLS,
        {
            "type": "object",
            "properties": {
                "code": {"type": "string", "description": "the Python program"},
                "executionTimeout": {
                    "type": "integer",
                    "description": "seconds; waiting for a person's approval does not count",
                    "default": int(default_seconds),
                    "minimum": 1,
                    "maximum": int(CommandTool.max_seconds),
                },
            },
            "required": ["code"],
        },
        display_name="Python",
    )
    program_tools: tuple[ToolSpec, ...] = ()
    _modules: tuple[Module, ...] = ()

    def __init__(self, program_tools: Sequence[ToolSpec] = (), *, sandboxed: bool = False) -> None:
        super().__init__(sandboxed=sandboxed)
        if program_tools:
            self.program_tools = tuple(program_tools)
            self._modules = build_modules(program_tools)
            self.spec = msgspec.structs.replace(self.spec, description=describe_modules(self._modules))

    def read_arguments(self, call: Call) -> tuple[str, float]:
        code, seconds = super().read_arguments(call)
        if len(code.encode("utf-8", "replace")) > CODE_BYTES:
            raise ToolError(f"{call.name}: 'code' is longer than {CODE_BYTES} bytes")
        return code, seconds

    async def __call__(self, call: Call, execution: Execution) -> Outcome:
        code, seconds = self.read_arguments(call)
        start = {"code": code, "modules": {module.name: module.source for module in self._modules}}
        running = _Running()
        ours, theirs = socket.socketpair()

        async def follow(group: ProcessGroup) -> str:
            theirs.close()
            try:
                ended = await running.follow(group, ours, start, execution)
            finally:
                await running.stop()
            return f"[timed out after {seconds:g}s]" if ended is None else ended

        with ours, theirs:
            argv = (sys.executable, "-I", "-X", "utf8", PROGRAM, str(theirs.fileno()))
            return await self.run_command(
                argv, call, execution, follow, notes=running.notes, pass_fds=(theirs.fileno(),)
            )


class _ProgramCall(msgspec.Struct, frozen=True):
    """A tool call that a program asks for."""

    id: int
    tool: str
    args: dict[str, Any]


_DECODER = msgspec.json.Decoder(_ProgramCall)


class _Running:
    """A running program: its channel and its pending tool calls. Call `follow` once, then `stop`."""

    def __init__(self) -> None:
        self._over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks = TaskOwner()
        self._room = asyncio.Semaphore(AT_ONCE)
        self.notes: list[str] = []

    async def follow(
        self, group: ProcessGroup, channel: socket.socket, start: dict[str, Any], execution: Execution
    ) -> str | None:
        """Serve the program's calls until it exits, violates the protocol or runs out of time.

        Return "" if the program exited by itself, None if its time is over, else the reason to end it. Raise the
        exception of a tool call that ends the run."""
        reader, writer = await asyncio.open_unix_connection(sock=channel)
        writer.write(encode_frame(start))
        exited = self._tasks.start(group.wait_for_exit())
        expired = self._tasks.start(execution.wait_for_expiry())
        self._tasks.start(self._serve(reader, writer, execution.call_tool))
        try:
            await asyncio.wait((exited, expired, self._over), return_when=asyncio.FIRST_COMPLETED)
            if self._over.done():
                return self._over.result()
            return None if expired.done() else ""
        finally:
            writer.transport.abort()
            exited.cancel()
            await asyncio.wait((exited,))

    async def stop(self) -> None:
        """Cancel the tool calls that the program still waits for."""
        self._over.cancel()
        await self._tasks.close(STOP_SECONDS)

    def _end(self, problem: str) -> None:
        if not self._over.done():
            self._over.set_result(problem)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, make: Calls) -> None:
        """Serve the program's calls, at most `AT_ONCE` at a time, until the program closes its end."""
        frames = FrameReader(_DECODER, limit=FRAME_BYTES)
        try:
            while data := await reader.read(CHUNK_BYTES):
                for asked in frames.feed(data):
                    await self._room.acquire()
                    self._tasks.start(self._answer(asked, writer, make))
        except OSError:
            return
        except ProtocolError as error:
            self._end(f"[ended: it broke the channel to its tools: {error}]")

    async def _answer(self, asked: _ProgramCall, writer: asyncio.StreamWriter, make: Calls) -> None:
        try:
            made = await make(asked.tool, asked.args)
        except Exception as error:  # noqa: BLE001 - it ends the run: `follow` raises it, the program never sees it
            if not self._over.done():
                self._over.set_exception(error)
            return
        finally:
            self._room.release()
        if made.note and len(self.notes) < NOTES:
            self.notes.append(made.note[:NOTE_CHARACTERS])
        answer = {"id": asked.id, "value": made.value} if made.error is None else {"id": asked.id, "error": made.error}
        writer.write(encode_frame(answer))
        if writer.transport.get_write_buffer_size() > KEPT_BYTES:
            self._end("[ended: it does not read the answers of its tools]")


# The tools as modules


class Function(NamedTuple):
    """One tool as a function. `signature` is shown to the model, `source` is the Python code."""

    name: str
    signature: str
    summary: str
    source: str


class Module(NamedTuple):
    """The tools of one server as a module."""

    name: str
    functions: tuple[Function, ...]
    source: str


def build_modules(specs: Sequence[ToolSpec]) -> tuple[Module, ...]:
    """Return one module per server for the tools `specs`, under unique names that Python accepts."""
    servers: dict[str, list[ToolSpec]] = {}
    for spec in specs:
        servers.setdefault(spec.server, []).append(spec)
    names = _choose_names(list(servers), taken=_OURS)
    return tuple(_make_module(names[server], server, found) for server, found in servers.items())


def describe_modules(modules: Sequence[Module]) -> str:
    """Return the tool description for the model. With many tools, each gets less detail."""
    for detail in ("summary", "signature", "name"):
        listed = "\n".join(line for module in modules for line in _list_functions(module, detail))
        if len(listed) <= DESCRIPTION_CHARACTERS:
            return ABOUT + CALLING + listed
    left = listed[:DESCRIPTION_CHARACTERS].rpartition("\n")[0]
    return f"{ABOUT}{CALLING}{left}\n[{listed.count(chr(10)) - left.count(chr(10))} more lines: see `help(tools)`]"


def _list_functions(module: Module, detail: str) -> Iterator[str]:
    """Yield the import line of a module and a line for each function. `detail` is "summary", "signature" or "name"."""
    yield f"from tools import {module.name}"
    for function in module.functions:
        about = f"  # {function.summary}" if detail == "summary" and function.summary else ""
        called = f"await {module.name}.{function.signature}{about}"
        yield f"{module.name}.{function.name}" if detail == "name" else called


def _make_module(name: str, server: str, specs: Sequence[ToolSpec]) -> Module:
    names = _choose_names([_find_own_name(spec) for spec in specs], taken=_OURS)
    types = _Types(taken=set(names.values()) | _OURS)
    functions = tuple(_make_function(names[_find_own_name(spec)], spec, types) for spec in specs)
    parts = [
        _quote_docstring(f"Tools of the MCP server {server!r}."),
        "from __future__ import annotations\n\nfrom typing import Any, Literal, NotRequired, TypedDict\n\n"
        "from tools import ToolError, _call\n",
        f"__all__ = {[*names.values(), *types.names]!a}\n",
        *types.sources,
        *(function.source for function in functions),
    ]
    return Module(name, functions, "\n\n".join(parts))


def _make_function(name: str, spec: ToolSpec, types: _Types) -> Function:
    schema = spec.schema
    properties, required = _find_properties(schema), _find_required(schema)
    ordered = sorted(properties, key=lambda each: each not in required)
    named = _choose_names(ordered, taken=frozenset({"_call", "more_"}))
    compact, whole = [], []
    for each in ordered:
        default = "" if each in required else f" = {_format_default(properties[each], schema)}"
        kind = types.make_formatter(schema, f"{name}_{each}").format_type(properties[each])
        whole.append(f"{named[each]}: {kind}{default}")
        kind = _TypeFormatter(schema, _format_inline, deep=SHOWN_DEEP).format_type(properties[each])
        compact.append(f"{named[each]}: {kind}{default}")
    args = ", ".join(f"{each!a}: {named[each]}" for each in ordered)
    if schema.get("additionalProperties") and not properties:
        whole.append("**more_: Any")
        compact.append("**arguments: Any")
        args = "**more_"
    wrapped = _is_wrapped(spec.output)
    output = spec.output["properties"][RESULT] if wrapped else spec.output
    gives = types.make_formatter(spec.output, f"{name}_result").format_type(output)
    source = (
        f"async def {name}({', '.join(whole)}) -> {gives}:\n"
        f"    {_quote_docstring(_describe(spec, properties, named))}\n"
        f"    return await _call({spec.name!a}, {{{args}}}{f', {RESULT!a}' if wrapped else ''})\n"
    )
    shown = _TypeFormatter(spec.output, _format_inline, deep=SHOWN_DEEP).format_type(output)
    signature = f"{name}({', '.join(compact)}) -> {shown}"
    return Function(name, signature, _shorten(spec.description, SUMMARY_CHARACTERS), source)


def _find_own_name(spec: ToolSpec) -> str:
    """Return the name of a tool on its server."""
    return spec.name.removeprefix(f"mcp__{spec.server}__")


def _describe(spec: ToolSpec, properties: dict[str, Any], named: dict[str, str]) -> str:
    lines = [spec.description.strip()[:DOC_CHARACTERS] or f"The tool {_find_own_name(spec)!r}."]
    told = [
        f"    {named[each]}: {_shorten(schema['description'], 500)}"
        for each, schema in properties.items()
        if isinstance(schema, dict) and isinstance(schema.get("description"), str) and schema["description"].strip()
    ]
    return "\n".join([*lines, *(["", "Parameters:", *told] if told else [])])


def _shorten(text: str, most: int) -> str:
    """Return the text on one line, cut to at most `most` characters."""
    line = " ".join("".join(each if each.isprintable() else " " for each in text).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


def _quote_docstring(text: str) -> str:
    """Return the text as a Python string literal, triple-quoted if the text needs no escapes."""
    pretty = f'"""{text}\n"""' if "\n" in text else f'"""{text}"""'
    plain = all(each.isprintable() or each == "\n" for each in text) and not ("\\" in text or '"""' in f'{text}""')
    return pretty if plain else ascii(text)


def _choose_names(wanted: Sequence[str], *, taken: frozenset[str]) -> dict[str, str]:
    """Map each wanted name to a unique Python identifier that is not in `taken` and does not begin with `_`."""
    found: dict[str, str] = {}
    used = set(taken)
    for each in wanted:
        name = re.sub(r"[^A-Za-z0-9_]", "_", each).strip("_") or "unnamed"
        name = f"n{name}" if name[0].isdigit() else f"{name}_" if keyword.iskeyword(name) else name
        number, free = 2, name
        while free in used:
            free, number = f"{name}_{number}", number + 1
        used.add(free)
        found[each] = free
    return found


def _find_properties(schema: dict[str, Any]) -> dict[str, Any]:
    found = schema.get("properties")
    return {name: each for name, each in found.items() if isinstance(name, str)} if isinstance(found, dict) else {}


def _is_wrapped(output: dict[str, Any]) -> bool:
    """Return True if an output schema is an object with the single required field `result`.

    Servers wrap a result that is not an object this way, since structured content must be an object."""
    return list(_find_properties(output)) == [RESULT] and RESULT in _find_required(output)


def _find_required(schema: dict[str, Any]) -> frozenset[str]:
    found = schema.get("required")
    return frozenset(each for each in found if isinstance(each, str)) if isinstance(found, list) else frozenset()


def _format_default(schema: Any, root: dict[str, Any]) -> str:
    """Return the default of a parameter as source if it is a literal of the parameter's own type, else `...`.

    An argument with the value `...` is not sent, so the server applies its own default."""
    schema = _resolve(schema, root)
    if not isinstance(schema, dict) or "default" not in schema:
        return "..."
    default = schema["default"]
    kinds = [each for option in _find_options(schema) for each in _type_names(_resolve(option, root))]
    allowed = tuple(kind for each in kinds for kind in _KINDS.get(each, ()))
    fits = isinstance(default, allowed) and (bool in allowed or not isinstance(default, bool))
    choices = schema.get("enum")
    chosen = isinstance(choices, list) and default in choices
    return _format_literal(default) if _is_literal(default) and (fits or chosen) else "..."


class _TypeFormatter:
    """A translator from the parts of one JSON schema to Python type expressions.

    `objects` formats an object that has fields. `deep` is how many levels to follow. Parts beyond that, or after the
    first `PARTS` parts, become `Any`."""

    def __init__(
        self, root: dict[str, Any], objects: Callable[[dict[str, Any], _TypeFormatter], str], *, deep: int
    ) -> None:
        self._root, self._objects, self._deep = root, objects, deep
        self._left = PARTS

    def format_type(self, schema: Any) -> str:
        schema = _resolve(schema, self._root)
        self._left -= 1
        if not isinstance(schema, dict) or not schema or not self._deep or self._left < 0:
            return "Any"
        choices = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(choices, list) and 0 < len(choices) <= CHOICES and all(map(_is_literal, choices)):
            return f"Literal[{', '.join(map(_format_literal, choices))}]"
        self._deep -= 1
        try:
            options = _find_options(schema)
            if options != [schema]:
                return _format_union([self.format_type(option) for option in options])
            return _format_union([self._format_plain_type(kind, schema) for kind in _type_names(schema)])
        finally:
            self._deep += 1

    def _format_plain_type(self, kind: str, schema: dict[str, Any]) -> str:
        if kind == "array":
            return f"list[{self.format_type(schema.get('items', {}))}]"
        if kind == "object":
            if _find_properties(schema):
                return self._objects(schema, self)
            return f"dict[str, {self.format_type(schema.get('additionalProperties', {}))}]"
        return _SCALARS.get(kind, "Any")


def _format_union(kinds: list[str]) -> str:
    return "Any" if "Any" in kinds or not kinds else " | ".join(dict.fromkeys(kinds))


def _find_options(schema: dict[str, Any]) -> list[Any]:
    """Return the alternatives of a schema. A value must fit one of them."""
    for key in ("anyOf", "oneOf"):
        if isinstance(schema.get(key), list):
            options: list[Any] = schema[key]
            return options
    both = schema.get("allOf")
    return both if isinstance(both, list) and len(both) == 1 else [schema]


def _type_names(schema: Any) -> list[str]:
    if not isinstance(schema, dict):
        return []
    kind = schema.get("type", "object" if _find_properties(schema) else None)
    return [each for each in (kind if isinstance(kind, list) else [kind]) if isinstance(each, str)]


def _resolve(schema: Any, root: dict[str, Any]) -> Any:
    """Follow a `$ref` within the same schema. Return None if it is dangling, an empty schema if it is circular."""
    for _ in range(DEEP):
        if not isinstance(schema, dict) or not isinstance(schema.get("$ref"), str):
            return schema
        found: Any = root
        for step in schema["$ref"].removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        schema = found
    return {}


def _is_literal(value: Any) -> bool:
    if isinstance(value, int):
        return abs(value) < 2**63
    return value is None or (isinstance(value, str) and len(value) <= 100)


def _format_literal(value: Any) -> str:
    return repr(value) if not isinstance(value, str) or value.isprintable() else ascii(value)


def _format_inline(schema: dict[str, Any], formatter: _TypeFormatter) -> str:
    """Return an object type in the notation for the model: `{title: str, labels?: list[str]}`."""
    needed = _find_required(schema)
    fields = (
        f"{_shorten(name, 60)}{'' if name in needed else '?'}: {formatter.format_type(each)}"
        for name, each in list(_find_properties(schema).items())[:CHOICES]
    )
    return f"{{{', '.join(fields)}}}"


class _Types:
    """The TypedDicts of one generated module."""

    def __init__(self, *, taken: set[str]) -> None:
        self._taken = taken
        self._known: dict[int, str] = {}
        self.names: list[str] = []
        self.sources: list[str] = []

    def make_formatter(self, root: dict[str, Any], about: str) -> _TypeFormatter:
        return _TypeFormatter(root, lambda schema, formatter: self._name_object(schema, formatter, about), deep=DEEP)

    def _name_object(self, schema: dict[str, Any], formatter: _TypeFormatter, about: str) -> str:
        if id(schema) in self._known:
            return self._known[id(schema)]
        if len(self._known) >= TYPES:
            return "dict[str, Any]"
        wanted = schema["title"] if isinstance(schema.get("title"), str) else about
        camel = "".join(part[:1].upper() + part[1:] for part in re.split(r"[^A-Za-z0-9]+", wanted))
        name = _choose_names([camel], taken=frozenset(self._taken))[camel]
        self._taken.add(name)
        self.names.append(name)
        self._known[id(schema)] = name
        needed, fields = _find_required(schema), []
        for each, part in _find_properties(schema).items():
            kind = formatter.format_type(part)
            fields.append(f"{each!a}: {kind if each in needed else f'NotRequired[{kind}]'!a}")
        self.sources.append(f"{name} = TypedDict({name!a}, {{{', '.join(fields)}}})\n")
        return name
