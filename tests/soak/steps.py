"""Every await of a tree, counted: a task factory whose tasks call back after each step, where they are suspended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from typing import Any


class Steps:
    """Counts the steps of all tasks made while it is armed; `pull` holds what is done after which of them."""

    def __init__(self) -> None:
        self.count = 0
        self.pull: dict[int, Callable[[], object]] = {}
        self._stepping = False

    def step(self) -> None:
        if self._stepping:
            return
        self.count += 1
        action = self.pull.pop(self.count, None)
        if action is not None:
            self._stepping = True
            try:
                action()
            finally:
                self._stepping = False

    @contextmanager
    def armed(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, coro, **named: asyncio.Task(_Stepped(coro, self), loop=loop, **named))
        try:
            yield
        finally:
            loop.set_task_factory(None)


class _Stepped(Coroutine[Any, Any, Any]):
    """A coroutine that reports each await that really waits."""

    def __init__(self, coro: Any, steps: Steps) -> None:
        self._coro = coro
        self._steps = steps
        self.__name__ = getattr(coro, "__name__", "")
        self.__qualname__ = getattr(coro, "__qualname__", "")

    def send(self, value: Any) -> Any:
        waits_for = self._coro.send(value)
        self._steps.step()
        return waits_for

    def throw(self, *error: Any) -> Any:
        waits_for = self._coro.throw(*error)
        self._steps.step()
        return waits_for

    def close(self) -> None:
        self._coro.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return (yield from self._coro.__await__())  # type: ignore[no-any-return]
