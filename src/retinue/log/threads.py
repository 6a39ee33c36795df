"""The fold of one run's events into the thread its model saw: what resuming and continuing start from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from retinue.core.errors import LogError
from retinue.core.events import (
    ApprovalAsked,
    ApprovalDecided,
    Body,
    Event,
    Inbox,
    Message,
    RunEnded,
    RunSpawned,
    Thinking,
    ToolCall,
    ToolResult,
    TurnEnded,
    TurnStarted,
    Unknown,
)
from retinue.core.messages import AssistantTurn, Call, Native, Reply, Thought, ToolTurn, Turn, UserTurn
from retinue.core.plans import Past
from retinue.core.ports import LogReader, Outcome

BROKEN_OFF = (
    "The run was ended before this call had a result, so nobody knows whether it took effect. "
    "Look at how things are before you make it again."
)
NOT_RUN = "The run was ended before this call was allowed: it was not run."
Histories = Mapping[str, Sequence[Event]]  # events by tree


class Thread:
    """One run's thread: its whole turns, and what is known of the turn it is in. A turn that is begun a second time,
    because a crash tore it, is only what it was the second time. Tool results stand in the order of their calls. A turn
    in which the run was ended is part of the thread once its calls are written: they may have run."""

    def __init__(self, before: Sequence[Turn] = ()) -> None:
        self.turn = 0
        self.ended = False
        self._over = False
        self.waiting: list[UserTurn] = []
        self._turns: list[Turn] = list(before)
        self._clear()

    def _clear(self) -> None:
        self._text = ""
        self._final = False
        self._thoughts: list[Thought] = []
        self._calls: list[Call] = []
        self._results: dict[str, ToolTurn] = {}
        self._withheld: set[str] = set()
        self._natives: dict[str, Native] = {}

    def apply(self, body: Body | Unknown) -> None:
        match body:
            case RunSpawned(task=task):
                self._turns.append(UserTurn(task))
            case Inbox(text=words, source=source):
                self.waiting.append(UserTurn(words, source))
            case TurnStarted(turn=turn):
                self._turns = self._whole_turns() + list(self.waiting)
                self.waiting.clear()
                self.turn, self.ended = turn, False
                self._clear()
            case Thinking(text=words, file=file):
                words = _read_whole_text(words, file)
                signed = body.signature, body.block_id, body.origin, body.layout
                self._thoughts.append(Thought(words, body.type, *signed))
            case Message(text=words, file=file, host=False):
                self._text, self._final = _read_whole_text(words, file), body.final
            case ToolCall(call_id=call_id, name=name, args=args, tier="provider"):
                self._natives[call_id] = Native(call_id, name, args, "")
            case ToolResult(call_id=call_id, text=words, success=success) if call_id in self._natives:
                done = self._natives[call_id]
                self._natives[call_id] = Native(
                    call_id, done.name, done.args, words, success, content=body.content, origin=body.origin
                )
            case ToolCall(call_id=call_id, name=name, args=args, host=False):
                self._calls.append(Call(call_id, name, args))
                self._withheld |= {call_id} if body.tier == "none" else set()
            case ToolResult(call_id=call_id, name=name, text=words, success=success):
                self._results[call_id] = ToolTurn(call_id, name, words, success)
            case TurnEnded():
                self.ended = True
            case _:
                self._note(body)

    def _note(self, body: Body | Unknown) -> None:
        """Note the ending, and the calls that were not to run: they matter only for a run that was ended."""
        match body:
            case ApprovalAsked(call_id=call_id):
                self._withheld.add(call_id)
            case ApprovalDecided(call_id=call_id, allowed=True):
                self._withheld.discard(call_id)
            case RunEnded():
                self._over = True
            case _:
                pass

    def _whole_turns(self) -> list[Turn]:
        broken_off = self._over and not self.ended and bool(self._calls or self._final)
        if not (self.ended or broken_off):
            return self._turns
        said = AssistantTurn(self._text, tuple(self._calls), tuple(self._thoughts), tuple(self._natives.values()))
        results = dict(self._results)
        for call in self._calls if broken_off else ():
            words = NOT_RUN if call.id in self._withheld else BROKEN_OFF
            results.setdefault(call.id, ToolTurn(call.id, call.name, words, False))
        return [*self._turns, said, *(results[call.id] for call in self._calls if call.id in results)]

    def turns(self) -> list[Turn]:
        """Return all whole turns, in the order the model saw them."""
        return self._whole_turns() + list(self.waiting)

    def past(self, seconds: float = 0.0) -> Past:
        """Return the state to go on from. The reply is known when it was the last, or when a call of it is written:
        before that none of its tools has run."""
        if not (self.ended or self._final or self._calls):
            return Past(tuple(self._turns), max(self.turn, 1), seconds=seconds)
        calls, thoughts, natives = tuple(self._calls), tuple(self._thoughts), tuple(self._natives.values())
        reply = Reply(self._text, calls, thoughts, natives=natives)
        mine = {call.id for call in self._calls}
        outcomes = {name: Outcome(said.text, said.success) for name, said in self._results.items() if name in mine}
        return Past(tuple(self._turns), self.turn, reply, outcomes, self.ended, seconds)


def fold_thread(events: Iterable[Event], run: int, *, before: Sequence[Turn] = ()) -> list[Turn]:
    """Fold the events of one run into its turns, in the order the model saw them, after those it began with."""
    found = Thread(before)
    for event in events:
        if event.run == run:
            found.apply(event.body)
    return found.turns()


async def read_histories(log: LogReader, tree: str) -> Histories:
    """Read the events of a tree and of all trees that its runs continue, directly or not."""
    found: dict[str, list[Event]] = {}
    wanted = [tree]
    while wanted:
        name = wanted.pop()
        if name not in found and (events := await log.read(name)):
            found[name] = events
            wanted += [e.body.origin for e in events if isinstance(e.body, RunSpawned) and e.body.origin]
    return found


def fold_earlier_turns(histories: Histories, tree: str, spawned: RunSpawned) -> list[Turn]:
    """Return the turns a run had before its own task: the thread of the run it continues, and of all before that."""
    chain: list[tuple[str, int]] = []
    while spawned.continues is not None:
        tree, run = spawned.origin or tree, spawned.continues
        found = [e.body for e in histories.get(tree, ()) if e.run == run and isinstance(e.body, RunSpawned)]
        if not found or (tree, run) in chain:
            raise LogError(f"the thread begins with that of {tree}/{run}, which is not in the log any more")
        chain.append((tree, run))
        spawned = found[0]
    turns: list[Turn] = []
    for tree, run in reversed(chain):
        turns = fold_thread(histories[tree], run, before=turns)
    return turns


def _read_whole_text(text: str, file: str) -> str:
    try:
        return Path(file).read_bytes().decode("utf-8", "replace") if file else text
    except OSError as error:
        raise LogError(f"the thread has a text that is in {file}: {error.strerror or error}") from None
