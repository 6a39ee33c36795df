"""`@tool`, which turns a Python function into a tool. The function always runs on the host, whatever the runtime."""

from __future__ import annotations

import asyncio
import inspect
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, Literal, ParamSpec, TypeVar, overload

import msgspec

from retinue.core.context import Context
from retinue.core.errors import ConfigError, Stop, ToolError
from retinue.core.messages import Call, ToolSpec
from retinue.core.ports import Folders, Link, Outcome
from retinue.core.profiles import check_name
from retinue.tools.answer import inline_schema

Tier = Literal["observe", "confirm"]
P = ParamSpec("P")
R = TypeVar("R")


class FunctionTool(Generic[P, R]):
    """A tool made from a function. Its spec is read from the function's signature and docstring. Calling the tool
    object calls the function."""

    def __init__(self, function: Callable[P, R], *, tier: Tier, repeatable: bool, name: str | None) -> None:
        if tier not in ("observe", "confirm"):
            raise ConfigError(f"tool tier must be 'observe' or 'confirm', got {tier!r}")
        self.function = function
        named = check_name(name or getattr(function, "__name__", ""), what="tool name")
        self._takes_context, self._args = _inspect_parameters(function, named)
        self._is_async = inspect.iscoroutinefunction(inspect.unwrap(function))
        self.spec: ToolSpec = ToolSpec(
            named,
            inspect.getdoc(function) or "",
            inline_schema(self._args),
            tier=tier,
            display_name=named.replace("_", " ").capitalize(),
            repeatable=repeatable,
        )

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    async def run(self, args: dict[str, Any], context: Context) -> Outcome:
        """Run the function for one call of a model. An exception other than Stop becomes a ToolError, whose text the
        model reads."""
        try:
            given = msgspec.convert(args, self._args)
        except msgspec.ValidationError as error:
            raise ToolError(f"{self.spec.name}: {error}") from None
        named = msgspec.structs.asdict(given)
        function: Callable[..., Any] = self.function
        try:
            if self._is_async:
                value = await (function(context, **named) if self._takes_context else function(**named))
            else:
                aside = context.aside(asyncio.get_running_loop().call_soon_threadsafe)
                given_context = (aside,) if self._takes_context else ()
                value = await asyncio.to_thread(_call_function, function, *given_context, **named)
                if inspect.isawaitable(value):
                    value = await value
        except (ToolError, Stop):
            raise
        except (Exception, SystemExit, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the run itself is being cancelled; any other CancelledError comes from the function
            raise ToolError(f"{type(error).__name__}: {error}") from error
        return Outcome(as_text(value), data=value)


def _call_function(function: Callable[..., Any], *context: Context, **named: Any) -> Any:
    """Call `function` in a thread. Turn a StopIteration into a RuntimeError, as a coroutine does.

    asyncio cannot carry a StopIteration out of a thread, so the awaiting task would wait forever."""
    try:
        return function(*context, **named)
    except StopIteration as error:
        raise RuntimeError("function raised StopIteration") from error


@dataclass(eq=False)
class HostedTool:
    """A host-side tool as a run sees it: every call goes over the link."""

    spec: ToolSpec

    async def preview(self, call: Call, folders: Folders) -> str:
        return ""

    def __call__(self, call: Call, folders: Folders, link: Link) -> Awaitable[Outcome]:
        return link.run_host_tool(call)


def as_text(value: Any) -> str:
    """Return a function's return value as the text that the model reads."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if hasattr(value, "model_dump_json"):
        return str(value.model_dump_json())
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, ValueError):
        return str(value)


def _inspect_parameters(function: Callable[..., Any], name: str) -> tuple[bool, type[msgspec.Struct]]:
    """Return whether the first parameter is the Context, and a Struct type with a field for each other parameter."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
        parameters = list(inspect.signature(function).parameters.values())
    except (NameError, TypeError, ValueError) as error:
        raise ConfigError(f"tool {name!r}: its signature cannot be read: {error}") from None
    takes_context = bool(parameters) and hints.get(parameters[0].name) is Context
    fields: list[Any] = []
    for parameter in parameters[takes_context:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(f"tool {name!r}: parameter {parameter.name!r} must be passable by name")
        hint = hints.get(parameter.name, Any)
        default = () if parameter.default is parameter.empty else (parameter.default,)
        fields.append((parameter.name, hint, *default))
    try:
        made = msgspec.defstruct(f"{name}_args", fields, kw_only=True, forbid_unknown_fields=True)
        msgspec.json.schema(made)
    except (TypeError, NotImplementedError) as error:
        raise ConfigError(f"tool {name!r}: {error}") from None
    return takes_context, made


@overload
def tool(function: Callable[P, R], /) -> FunctionTool[P, R]: ...
@overload
def tool(
    *, tier: Tier = "confirm", repeatable: bool = False, name: str | None = None
) -> Callable[[Callable[P, R]], FunctionTool[P, R]]: ...
def tool(
    function: Callable[P, R] | None = None,
    /,
    *,
    tier: Tier = "confirm",
    repeatable: bool = False,
    name: str | None = None,
) -> FunctionTool[P, R] | Callable[[Callable[P, R]], FunctionTool[P, R]]:
    """Turn a sync or async function into a tool. Tier `confirm` asks the user before each call, `observe` never."""

    def wrap(wrapped: Callable[P, R]) -> FunctionTool[P, R]:
        return FunctionTool(wrapped, tier=tier, repeatable=repeatable, name=name)

    return wrap if function is None else wrap(function)
