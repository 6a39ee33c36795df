"""The fold of a tree's events into entries: the lines that a live screen leaves behind, one compact entry per call.

Stands on `Blocks`, which knows which words were said and which are held. An entry tells a call once, when its result is
there, with its diff or the end of its output; what goes on is `Activity`'s to tell. Text is left as it came.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from retinue.core.events import (
    INTERRUPTED,
    AnswerGiven,
    ApprovalAsked,
    ApprovalDecided,
    Event,
    Inbox,
    RoundAnswered,
    RunEnded,
    ToolCall,
    ToolResult,
)
from retinue.core.messages import ASKER, USER_WORDS
from retinue.log.blocks import FINAL_ANSWER, TEAM_TOOLS, Block, Blocks, Span, make_call_spans
from retinue.log.summaries import describe_call, shorten_text, summarize_result

SLOW_MS = 1000
ANSWER_CHARACTERS = 72
NOTICE = "notice"  # the kind of what the supervisor tells a model
Style = Literal["markdown", "diff", "output", "faint"]
_FILE_TOOLS = ("edit", "write")
_OUTPUT_TOOLS = ("shell", "bash", "execute_python", "execute_go_code")
_PLAIN_ANSWERS = ("user", "")


class Entry(msgspec.Struct, frozen=True):
    """One thing to leave on the screen: a line of `spans`, and the `body` below it in a `style`. `kind` is that of its
    event, `is_brief` says that a quiet screen shows the line too, `is_detail` that only one that shows all does."""

    kind: str
    spans: tuple[Span, ...]
    body: str = ""
    style: Style = "markdown"
    is_brief: bool = False
    run: int = 0
    is_detail: bool = False


class Entries:
    """Takes events in their order; holds only what concerns calls that are open."""

    def __init__(self) -> None:
        self._blocks = Blocks(tells_unfetched=False)  # an answer stands below the line of its run
        self._calls: dict[tuple[int, str], ToolCall] = {}
        self._previews: dict[tuple[int, str], str] = {}
        self._denied: set[tuple[int, str]] = set()

    def apply(self, event: Event) -> Entry | None:
        """Return the entry of an event, or None if it leaves nothing."""
        block = self._blocks.apply(event)
        key = event.run, getattr(event.body, "call_id", "")
        match event.body:
            case ToolCall() as call:
                self._calls[key] = call
                return None
            case ApprovalAsked(preview=preview):
                self._previews[key] = preview
                return None
            case ApprovalDecided() as decided:
                return self._tell_decision(event, decided, block)
            case ToolResult() as result:
                made, preview = self._calls.pop(key, None), self._previews.pop(key, "")
                if key in self._denied:  # the line of the answer told it
                    self._denied.discard(key)
                    return None
                return None if block is None else _tell_result(event, result, block, made, preview)
            case RunEnded() as ended:
                return self._tell_ending(event, ended, block)
        return None if block is None else _tell_words(event, block)

    def _tell_decision(self, event: Event, decided: ApprovalDecided, block: Block | None) -> Entry | None:
        """Return a line for an answer that says more than yes: the entry of the call tells that."""
        key = event.run, decided.call_id
        call = self._calls.get(key)
        if decided.args is not None:
            self._previews.pop(key, None)  # it showed another call
            if call is not None:
                self._calls[key] = msgspec.structs.replace(call, args=decided.args)
        plain = decided.allowed and decided.scope == "call" and decided.args is None and decided.by in _PLAIN_ANSWERS
        if block is None or plain:
            return None
        if not decided.allowed:
            self._denied.add(key)
        return Entry(kind=event.kind, spans=block.spans, is_brief=True, run=event.run)

    def _tell_ending(self, event: Event, ended: RunEnded, block: Block | None) -> Entry | None:
        for key in [key for key in self._calls if key[0] == event.run]:
            del self._calls[key]
        if block is None:
            return None
        if event.run == 0:
            return Entry(kind=event.kind, spans=(), body=block.body)
        body = ended.final_response if ended.status == "done" else block.body
        if block.is_detail:  # a member: its team tells its answer
            return Entry(kind=event.kind, spans=block.spans, run=event.run, is_detail=True)
        return Entry(kind=event.kind, spans=block.spans, body=body, is_brief=True, run=event.run)


def _tell_words(event: Event, block: Block) -> Entry:
    """Return the entry of what a run thinks, says or is told, of its beginning, and of a warning."""
    who: tuple[Span, ...] = (("label", f"[{block.label}] "),) if event.run else ()
    if isinstance(event.body, AnswerGiven | RoundAnswered) and block.body:
        words = shorten_text(" ".join(block.body.split()), ANSWER_CHARACTERS, ANSWER_CHARACTERS - 3)
        spans = (*block.spans, ("faint", f": {words}"))
        return Entry(kind=event.kind, spans=spans, body=block.body, is_brief=True, run=event.run)
    if block.line:
        is_brief = bool(block.brief) or event.kind in ("warning", "gap")
        return Entry(kind=event.kind, spans=block.spans, is_brief=is_brief, run=event.run)
    if event.kind == "thinking":
        return Entry(kind=event.kind, spans=who, body=block.body, style="faint", run=event.run)
    if isinstance(event.body, Inbox):
        kind = event.kind if event.body.source in USER_WORDS or event.body.source == ASKER else NOTICE
        return Entry(kind=kind, spans=(("mark", "› "), *who), body=block.body, style="faint", run=event.run)
    return Entry(kind=event.kind, spans=who, body=block.body, run=event.run)


def _tell_result(event: Event, result: ToolResult, block: Block, call: ToolCall | None, preview: str) -> Entry | None:
    """Return the entry of a finished call; none for one that told of itself: the runs it waited for have."""
    args: dict[str, Any] = {} if call is None else call.args
    if result.name == FINAL_ANSWER or (call is not None and call.waits and result.success):
        return None
    who: tuple[Span, ...] = (("label", f"[{block.label}] "),) if event.run else ()
    mark: Span = ("good", "✓ ") if result.success else ("bad", "✗ ")
    is_interrupted = result.outcome == INTERRUPTED
    said = INTERRUPTED if is_interrupted else summarize_result(result.name, result.text, result.success, spoken=True)
    is_slow = result.duration_ms >= SLOW_MS and not preview  # the time of one that asked is mostly a person's
    took = f" ({result.duration_ms / 1000:.1f}s)" if is_slow else ""
    outcome: tuple[Span, ...] = (("faint" if result.success else "bad", f" → {said}"), ("faint", took))
    body, style = _tell_action(result, args, preview)
    spans = (mark, *who, *make_call_spans(result.name, args), *outcome)
    return Entry(kind=event.kind, spans=spans, body=body, style=style, is_brief=True, run=event.run)


def _tell_action(result: ToolResult, args: dict[str, Any], preview: str) -> tuple[str, Style]:
    """Return what a person wants to see of a call: the change of a file, the command and its output, or an error. That
    they interrupted it they know."""
    if result.outcome == INTERRUPTED or result.name in TEAM_TOOLS:  # which are told all answers anew
        return "", "output"
    if not result.success and result.name not in _OUTPUT_TOOLS:
        return (result.text if "\n" in result.text.strip() else ""), "output"
    if result.name in _FILE_TOOLS:
        return preview or _draw_change(args), "diff"
    if result.name not in _OUTPUT_TOOLS:
        return "", "output"
    command = args.get("command", args.get("code"))
    shown = describe_call(result.name, args)
    long = isinstance(command, str) and command != shown
    text = result.text if "\n" in result.text.strip() or not result.success else ""
    return (f"$ {command}\n{text}" if long else text), "output"


def _draw_change(args: dict[str, Any]) -> str:
    """Return the change that a file tool makes, as lines taken away and added."""
    old, new = args.get("old_string"), args.get("new_string", args.get("content"))
    lines = [f"- {line}" for line in old.split("\n")] if isinstance(old, str) and old else []
    added = [f"+ {line}" for line in new.rstrip("\n").split("\n")] if isinstance(new, str) and new else []
    return "\n".join([*lines, *added])
