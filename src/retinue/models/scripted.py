"""A model that says what a script says: for tests, demos and benchmarks, with every fault a provider can have."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from retinue.core.errors import ModelError, StreamCut
from retinue.core.messages import Call, Reply, Request, Thought, ToolTurn
from retinue.core.ports import Clock
from retinue.core.scripts import Script, ScriptedReply
from retinue.core.usage import Usage

_DONE = ScriptedReply(text="done")


class ScriptedModel:
    """Holds no state: a run's place in its list is the number of turns it has begun."""

    def __init__(self, script: Script, clock: Clock) -> None:
        self._script = script
        self._clock = clock

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        scripted = self._reply_for(request)
        if scripted.hang:
            await asyncio.get_running_loop().create_future()
        await self._clock.sleep(scripted.delay)
        usage = Usage(scripted.usage.input_tokens, scripted.usage.output_tokens)
        thoughts: tuple[Thought, ...] = ()
        if scripted.thinking:
            thoughts = (Thought(scripted.thinking),)
            on_delta("thinking", scripted.thinking)
        _raise_fault(scripted, usage, on_delta)
        if scripted.refuse is not None:
            return Reply(scripted.refuse, (), thoughts, usage, refused=True)
        text = scripted.text
        if text:
            if "{{last_result}}" in text:
                text = text.replace("{{last_result}}", _last_result(request))
            for piece in _pieces(text, scripted.chunks):
                on_delta("text", piece)
        return Reply(text, _calls(scripted, request.turn) if scripted.tools else (), thoughts, usage)

    def _reply_for(self, request: Request) -> ScriptedReply:
        agents, ref = self._script.agents, request.ref
        replies = agents.get(ref.path)
        if replies is None:
            replies = agents.get(ref.label)
        if replies is None:
            replies = agents.get(ref.subagent_id)
        if replies is None:
            replies = agents.get(ref.agent)
        if replies is None:
            replies = agents.get("*", ())
        if request.turn <= len(replies):
            return replies[request.turn - 1]
        if self._script.strict:
            said = f"has {len(replies)} replies" if replies else "says nothing"
            raise ModelError(f"the script {said} for {ref.path} ({ref.agent}), which asks for turn {request.turn}")
        return _DONE


def _calls(scripted: ScriptedReply, turn: int) -> tuple[Call, ...]:
    if len(scripted.tools) == 1:
        [tool] = scripted.tools
        return (Call(f"call_{turn}_1", tool.name, tool.args),)
    return tuple(Call(f"call_{turn}_{n}", tool.name, tool.args) for n, tool in enumerate(scripted.tools, 1))


def _raise_fault(scripted: ScriptedReply, usage: Usage, on_delta: Callable[[str, str], None]) -> None:
    if scripted.error is not None:
        raise ModelError(scripted.error, status=scripted.status, usage=usage)
    if scripted.crash is not None:
        raise RuntimeError(scripted.crash)
    if scripted.cut is not None:
        on_delta("text", scripted.cut)
        raise StreamCut("the model's stream ended in the middle of its reply", usage=usage, partial=scripted.cut)


def _last_result(request: Request) -> str:
    for turn in reversed(request.thread):
        if isinstance(turn, ToolTurn):
            return turn.text
    return ""


def _pieces(text: str, chunks: int) -> list[str]:
    if chunks <= 1:
        return [text] if text else []
    size = max(1, -(-len(text) // chunks))
    return [text[start : start + size] for start in range(0, len(text), size)]
