"""A model that replies as a script says, with every fault a provider can have. For tests, demos and benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from retinue.core.errors import ModelError, StreamCut
from retinue.core.messages import Call, Reply, Request, Thought, ToolTurn
from retinue.core.ports import Clock
from retinue.core.scripts import Script, ScriptedReply
from retinue.core.usage import Usage

LAST_RESULT = "{{last_result}}"


class ScriptedModel:
    """The model of a script. Holds no state: a run gets the reply whose place in its list, from 1, is its turn."""

    def __init__(self, script: Script, clock: Clock) -> None:
        self._strict = script.strict
        self._turns = {
            who: (_DONE, *(_Turn(scripted, turn) for turn, scripted in enumerate(replies, 1)))
            for who, replies in script.agents.items()
        }
        self._other = self._turns.get("*", (_DONE,))
        self._clock = clock

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        turn = self._find_turn(request)
        scripted, reply = turn.scripted, turn.reply
        if scripted.hang:
            await asyncio.get_running_loop().create_future()
        await self._clock.sleep(scripted.delay)
        if scripted.thinking:
            on_delta("thinking", scripted.thinking)
        if turn.fails:
            _raise_fault(scripted, reply, on_delta)
        elif reply.text and not reply.refused:
            if LAST_RESULT in reply.text:
                text = reply.text.replace(LAST_RESULT, _find_last_result(request))
                reply = msgspec.structs.replace(reply, text=text)
            for piece in _split_text(reply.text, scripted.chunks):
                on_delta("text", piece)
        return reply

    def _find_turn(self, request: Request) -> _Turn:
        named, ref, turn = self._turns.get, request.ref, request.turn
        turns = named(ref.path) or named(ref.label) or named(ref.subagent_id) or named(ref.agent) or self._other
        if turn < len(turns):
            return turns[turn]
        if self._strict:
            said = f"has {len(turns) - 1} replies" if len(turns) > 1 else "says nothing"
            raise ModelError(f"the script {said} for {ref.path} ({ref.agent}), which asks for turn {turn}")
        return _DONE


class _Turn:
    """One reply of a list, built once for all runs that get it."""

    __slots__ = ("fails", "reply", "scripted")

    def __init__(self, scripted: ScriptedReply, turn: int) -> None:
        usage = Usage(scripted.usage.input_tokens, scripted.usage.output_tokens)
        calls = tuple(Call(f"call_{turn}_{n}", tool.name, tool.args) for n, tool in enumerate(scripted.tools, 1))
        thoughts = (Thought(scripted.thinking),) if scripted.thinking else ()
        self.scripted = scripted
        if scripted.refuse is None:
            self.reply = Reply(scripted.text, calls, thoughts, usage, counted=True)
        else:
            self.reply = Reply(scripted.refuse, (), thoughts, usage, refused=True, counted=True)
        self.fails = any(fault is not None for fault in (scripted.error, scripted.crash, scripted.cut))


_DONE = _Turn(ScriptedReply(text="done"), 0)


def _raise_fault(scripted: ScriptedReply, reply: Reply, on_delta: Callable[[str, str], None]) -> None:
    if scripted.error is not None:
        raise ModelError(scripted.error, status=scripted.status, usage=reply.usage)
    if scripted.crash is not None:
        raise RuntimeError(scripted.crash)
    if scripted.cut is not None:
        on_delta("text", scripted.cut)
        text = "the model's stream ended in the middle of its reply"
        raise StreamCut(text, usage=reply.usage, partial=scripted.cut)


def _find_last_result(request: Request) -> str:
    for turn in reversed(request.thread):
        if isinstance(turn, ToolTurn):
            return turn.text
    return ""


def _split_text(text: str, chunks: int) -> list[str]:
    if chunks <= 1:
        return [text] if text else []
    size = max(1, -(-len(text) // chunks))
    return [text[start : start + size] for start in range(0, len(text), size)]
