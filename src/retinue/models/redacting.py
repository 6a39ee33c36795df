"""A wrapper that keeps known secrets out of a model's requests and replies. Used only if there is a secret to hide."""

from __future__ import annotations

from collections.abc import Callable
from operator import is_

import msgspec

from retinue.core import secrets
from retinue.core.messages import AssistantTurn, Reply, Request, Turn
from retinue.core.ports import Model


class RedactingModel:
    """A model whose requests, deltas and replies are free of known secrets."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.name: str = getattr(model, "name", type(model).__name__)

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        streams: dict[str, secrets.Stream] = {}

        def show(kind: str, text: str) -> None:
            shown = (
                streams.setdefault(kind, secrets.Stream()).feed(text) if kind != "retry" else secrets.clean_text(text)
            )
            if shown:
                on_delta(kind, shown)

        reply = await self._model.complete(_redact_request(request), show)
        for kind, stream in streams.items():
            rest = stream.rest()
            if rest:
                on_delta(kind, rest)
        return _redact_reply(reply)


def _redact_request(request: Request) -> Request:
    system = secrets.clean_text(request.system)
    thread: list[Turn] | None = None
    for at, turn in enumerate(request.thread):
        if type(turn) is AssistantTurn:  # redacted when the model said it
            continue
        text = secrets.clean_text(turn.text)
        if text is not turn.text:
            thread = thread or list(request.thread)
            thread[at] = msgspec.structs.replace(turn, text=text)
    if thread is None and system is request.system:
        return request
    return msgspec.structs.replace(request, system=system, thread=thread or request.thread)


def _redact_reply(reply: Reply) -> Reply:
    replace, text = msgspec.structs.replace, secrets.clean_text(reply.text)
    if text is not reply.text:
        reply = replace(reply, text=text)
    if reply.calls:
        args = [secrets.clean_value(call.args) for call in reply.calls]
        if not all(map(is_, args, (call.args for call in reply.calls))):
            calls = tuple(replace(call, args=new) for call, new in zip(reply.calls, args, strict=True))
            reply = replace(reply, calls=calls)
    if reply.thoughts:
        reply = replace(
            reply, thoughts=tuple(replace(each, text=secrets.clean_text(each.text)) for each in reply.thoughts)
        )
    return reply
