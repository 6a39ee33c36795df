"""Asking one model one thing, through the real SDK of its provider."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from retinue.concurrency import SystemClock
from retinue.core.messages import Reply, Request, RunRef, ToolSpec, Turn, UserTurn
from retinue.models.providers import ProviderModel
from tests.models.server import Answer, Server

REF = RunRef("t", 0, "/main", "main", "main", "main_1")
ADD = ToolSpec("add", "Adds.", {"type": "object", "properties": {"a": {"type": "integer"}}})
CLAUDE = "anthropic:claude-x"
CHAT = "openai-chat:gpt-x"
GPT = "openai:gpt-5.5"


def request(*thread: Turn, system: str = "Be brief.", tools: Sequence[ToolSpec] = ()) -> Request:
    return Request(REF, 1, "m", system, list(thread) or [UserTurn("hello")], tuple(tools))


class Heard:
    """Collects deltas."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, str]] = []

    def __call__(self, kind: str, text: str) -> None:
        self.pieces.append((kind, text))

    def of(self, kind: str) -> list[str]:
        return [text for of_kind, text in self.pieces if of_kind == kind]


@asynccontextmanager
async def serving(*answers: Answer) -> AsyncIterator[Server]:
    """A server, with the environment of this process pointing the SDKs at it."""
    async with Server(*answers) as server:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in server.environ().items():
                patch.setenv(name, value)
            yield server


@asynccontextmanager
async def provider(name: str, **options: Any) -> AsyncIterator[ProviderModel]:
    model = ProviderModel(name, **{"clock": SystemClock(), **options})
    try:
        yield model
    finally:
        await model.aclose()


async def ask(name: str, asked: Request | None = None, **options: Any) -> tuple[Reply, Heard]:
    heard = Heard()
    async with provider(name, **options) as model:
        return await model.complete(asked or request(), heard), heard
