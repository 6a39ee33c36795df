"""A model that replies from a script, with every fault a provider can have. For tests, demos and benchmarks."""

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
CUT = "the model's stream ended in the middle of its reply"


class ScriptedModel:
    """The model of a script. It has no state: the turn of a run (from 1) selects the reply in the run's list."""

    def __init__(self, script: Script, clock: Clock) -> None:
        self._strict, self._clock = script.strict, clock
        self._turns = {  # built once for all runs: bench/latency.py measures the runtime, not the script
            who: (_DONE, *((scripted, _make_reply(scripted, turn)) for turn, scripted in enumerate(replies, 1)))
            for who, replies in script.agents.items()
        }
        self._other = self._turns.get("*", (_DONE,))

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        scripted, reply = self._find_turn(request)
        if scripted.hang:
            await asyncio.get_running_loop().create_future()
        await self._clock.sleep(scripted.delay)
        if scripted.thinking:
            on_delta("thinking", scripted.thinking)
        if scripted.error is not None:
            raise ModelError(scripted.error, status=scripted.status, usage=reply.usage)
        if scripted.crash is not None:
            raise RuntimeError(scripted.crash)
        if scripted.cut is not None:
            on_delta("text", scripted.cut)
            raise StreamCut(CUT, usage=reply.usage, partial=scripted.cut)
        if reply.refused or not reply.text:
            return reply
        if LAST_RESULT in reply.text:
            text = reply.text.replace(LAST_RESULT, _find_last_result(request))
            reply = msgspec.structs.replace(reply, text=text)
        size = max(1, -(-len(reply.text) // (scripted.chunks or 1)))
        for start in range(0, len(reply.text), size):
            on_delta("text", reply.text[start : start + size])
        return reply

    def _find_turn(self, request: Request) -> tuple[ScriptedReply, Reply]:
        named, ref, turn = self._turns.get, request.ref, request.turn
        turns = named(ref.path) or named(ref.label) or named(ref.subagent_id) or named(ref.agent) or self._other
        if turn < len(turns):
            return turns[turn]
        if self._strict:
            said = f"has {len(turns) - 1} replies" if len(turns) > 1 else "says nothing"
            raise ModelError(f"the script {said} for {ref.path} ({ref.agent}), which asks for turn {turn}")
        return _DONE


def _make_reply(scripted: ScriptedReply, turn: int) -> Reply:
    usage = Usage(scripted.usage.input_tokens, scripted.usage.output_tokens)
    thoughts = (Thought(scripted.thinking),) if scripted.thinking else ()
    if scripted.refuse is not None:
        return Reply(scripted.refuse, (), thoughts, usage, refused=True, counted=True)
    calls = tuple(Call(f"call_{turn}_{n}", tool.name, tool.args) for n, tool in enumerate(scripted.tools, 1))
    return Reply(scripted.text, calls, thoughts, usage, counted=True)


_LAST = ScriptedReply(text="done")
_DONE = _LAST, _make_reply(_LAST, 0)


def _find_last_result(request: Request) -> str:
    return next((turn.text for turn in reversed(request.thread) if isinstance(turn, ToolTurn)), "")
