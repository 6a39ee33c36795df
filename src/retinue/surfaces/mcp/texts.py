"""The results of tool calls. Their text is for clients that show only text. It has the same content as the structured
reply and sets the answers of subagents apart from our own text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retinue.log.blocks import format_count

LISTED = 20


def make_result(reply: dict[str, Any]) -> dict[str, Any]:
    """Return the result for the client: the reply as data, and the same content as text."""
    failed = "error" in reply
    text = str(reply["error"]) if failed else "\n".join(_render_lines(reply))
    return {"content": [{"type": "text", "text": text}], "structuredContent": reply, "isError": failed}


def make_error_result(text: str) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": text}], "isError": True}


def _render_lines(reply: dict[str, Any]) -> Iterator[str]:
    if "summary" in reply:
        counts = reply["summary"]
        kinds = [f"{counts[kind]} {kind}" for kind in ("completed", "failed", "timeout", "cancelled") if counts[kind]]
        yield f"{format_count(counts['total'], 'subagent')}: {', '.join(kinds)}"
    for entry in reply.get("results", ()):
        yield from _render_result(entry)
    if "result" in reply:
        yield from _render_result(reply["result"])
    if "subagent" in reply:
        yield from _render_status(reply["subagent"], whole=True)
    for key in ("subagents", "running"):
        for entry in reply.get(key, ()):
            yield from _render_status(entry)
        if key in reply and not reply[key] and key == "subagents":
            yield "No subagents."
    if reply.get("left_out"):
        offset = reply.get("next_offset")
        more = f"call it again with offset={offset}" if offset else "list_subagents lists all of them"
        yield f"and {reply['left_out']} more: {more}"
    if "cancelled" in reply:
        yield f"{reply['subagent_id']}: {'being cancelled' if reply['cancelled'] else reply['status']}"
    if "note" in reply:
        yield reply["note"]
    if "watch" in reply:
        yield f"watch: {reply['watch']}"


def _render_result(entry: dict[str, Any]) -> Iterator[str]:
    yield ""
    yield f"== {entry['subagent_id']} ({entry['status']}, {entry['execution_time_seconds']} s)"
    if entry["answer"]:
        yield entry["answer"]
    if entry["error"] and entry["error"] != entry["answer"]:
        yield f"error: {entry['error']}"
    if entry["warning"]:
        yield f"warning: {entry['warning']}"
    yield f"-- workspace: {entry['workspace']}"
    if "changed_files" in entry:
        files = entry["changed_files"]
        more = entry["changed_count"] - len(files[:LISTED])
        yield f"-- changed: {', '.join(files[:LISTED])}{f' and {more} more' if more > 0 else ''}"
        yield f"-- apply: {entry['apply']}"


def _render_status(entry: dict[str, Any], *, whole: bool = False) -> Iterator[str]:
    words = [entry["status"]]
    if entry["status"] == "running" and entry.get("state", "running") != "running":
        words.append(entry["state"])
    if "elapsed_seconds" in entry:
        limit = entry["timeout_seconds"]
        words.append(f"{entry['elapsed_seconds']} s" + ("" if limit is None else f" of {limit:g} s"))
    names = ", ".join(filter(None, (entry["subagent_id"], entry.get("agent"), entry.get("session_id"))))
    yield f"{names}: {', '.join(words)}: {entry.get('task', '')}"
    if whole:
        yield f"workspace: {entry['workspace']}"
        if entry.get("doing"):
            yield f"doing: {entry['doing']}"
    for question in entry.get("questions", ()):
        yield f"waits for the user's answer: {question['question']}: {question['answer']}"
