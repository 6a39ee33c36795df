"""A model that neither sees nor says a known secret. A Model around a Model, made only where there is one to hide."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from retinue.core import secrets
from retinue.core.messages import AssistantTurn, Reply, Request, Turn
from retinue.core.ports import Model


class Scrubbed:
    """The thread goes out clean, so does every piece that is shown; a reply comes in clean, its calls too."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.name: str = getattr(model, "name", type(model).__name__)

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        streams: dict[str, secrets.Stream] = {}

        def show(kind: str, text: str) -> None:
            shown = streams.setdefault(kind, secrets.Stream()).feed(text) if kind != "retry" else secrets.clean(text)
            if shown:
                on_delta(kind, shown)

        reply = await self._model.complete(_request(request), show)
        for kind, stream in streams.items():
            rest = stream.rest()
            if rest:
                on_delta(kind, rest)
        return _reply(reply)


def _request(request: Request) -> Request:
    system, thread = secrets.clean(request.system), [_turn(turn) for turn in request.thread]
    if system is request.system and all(new is old for new, old in zip(thread, request.thread, strict=True)):
        return request
    return msgspec.structs.replace(request, system=system, thread=thread)


def _turn(turn: Turn) -> Turn:
    """A model's own turns were cleaned when they came."""
    if isinstance(turn, AssistantTurn):
        return turn
    text = secrets.clean(turn.text)
    return turn if text is turn.text else msgspec.structs.replace(turn, text=text)


def _reply(reply: Reply) -> Reply:
    calls = tuple(msgspec.structs.replace(call, args=secrets.clean_value(call.args)) for call in reply.calls)
    thoughts = tuple(msgspec.structs.replace(each, text=secrets.clean(each.text)) for each in reply.thoughts)
    return msgspec.structs.replace(reply, text=secrets.clean(reply.text), calls=calls, thoughts=thoughts)
