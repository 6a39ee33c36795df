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


class _Turn(msgspec.Struct, frozen=True, gc=False):
    """One reply of the script, with the pieces of its text. `pieces` is None for a reply that depends on the thread,
    thinks first, or fails."""

    scripted: ScriptedReply
    reply: Reply
    pieces: tuple[str, ...] | None


class ScriptedModel:
    """The model of a script. It has no state: the turn of a run (from 1) selects the reply in the run's list."""

    def __init__(self, script: Script, clock: Clock) -> None:
        self._strict, self._clock = script.strict, clock
        self._turns = {  # built once for all runs: bench/latency.py measures the runtime, not the script
            who: (_DONE, *(_make_turn(scripted, turn) for turn, scripted in enumerate(replies, 1)))
            for who, replies in script.agents.items()
        }
        self._other = self._turns.get("*", (_DONE,))

    async def complete(self, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
        turn = self._find_turn(request)
        scripted = turn.scripted
        if scripted.hang:
            await asyncio.get_running_loop().create_future()
        await self._clock.sleep(scripted.delay)
        if turn.pieces is None:
            return _play_reply(scripted, turn.reply, request, on_delta)
        for piece in turn.pieces:
            on_delta("text", piece)
        return turn.reply

    def _find_turn(self, request: Request) -> _Turn:
        named, ref, turn = self._turns.get, request.ref, request.turn
        turns = named(ref.path) or named(ref.label) or named(ref.subagent_id) or named(ref.agent) or self._other
        if turn < len(turns):
            return turns[turn]
        if self._strict:
            said = f"has {len(turns) - 1} replies" if len(turns) > 1 else "says nothing"
            raise ModelError(f"the script {said} for {ref.path} ({ref.agent}), which asks for turn {turn}")
        return _DONE


def _make_turn(scripted: ScriptedReply, turn: int) -> _Turn:
    calls = tuple(Call(f"call_{turn}_{n}", tool.name, tool.args) for n, tool in enumerate(scripted.tools, 1))
    reply = Reply(
        scripted.text if scripted.refuse is None else scripted.refuse,
        calls,
        (Thought(scripted.thinking),) if scripted.thinking else (),
        Usage(scripted.usage.input_tokens, scripted.usage.output_tokens),
        refused=scripted.refuse is not None,
        counted=True,
    )
    faults = scripted.error, scripted.crash, scripted.cut, scripted.refuse
    is_plain = not scripted.thinking and LAST_RESULT not in reply.text and all(fault is None for fault in faults)
    return _Turn(scripted, reply, _split_text(reply.text, scripted.chunks) if is_plain else None)


def _play_reply(scripted: ScriptedReply, reply: Reply, request: Request, on_delta: Callable[[str, str], None]) -> Reply:
    """Send the deltas of a reply, and return the reply or raise its fault."""
    if scripted.thinking:
        on_delta("thinking", scripted.thinking)
    if scripted.error is not None:
        raise ModelError(scripted.error, status=scripted.status, usage=reply.usage)
    if scripted.crash is not None:
        raise RuntimeError(scripted.crash)
    if scripted.cut is not None:
        on_delta("text", scripted.cut)
        raise StreamCut(CUT, usage=reply.usage, partial=scripted.cut)
    if reply.refused:
        return reply
    if LAST_RESULT in reply.text:
        last = next((turn.text for turn in reversed(request.thread) if isinstance(turn, ToolTurn)), "")
        text = reply.text.replace(LAST_RESULT, last)
        reply = msgspec.structs.replace(reply, text=text)
    for piece in _split_text(reply.text, scripted.chunks):
        on_delta("text", piece)
    return reply


def _split_text(text: str, chunks: int) -> tuple[str, ...]:
    """Split a text into `chunks` pieces of the same size, or fewer."""
    size = max(1, -(-len(text) // (chunks or 1)))
    return tuple([text[start : start + size] for start in range(0, len(text), size)])


_DONE = _make_turn(ScriptedReply(text="done"), 0)
