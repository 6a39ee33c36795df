"""Streams of the Anthropic Messages API and the OpenAI APIs, for tests to script."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tests.models.server import Answer


def _event(data: dict[str, Any]) -> bytes:
    return f"event: {data['type']}\ndata: {json.dumps(data)}\n\n".encode()


# Anthropic


def text(*pieces: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return {"type": "text", "text": ""}, [{"type": "text_delta", "text": piece} for piece in pieces]


def thinking(words: str, signature: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    deltas = [{"type": "thinking_delta", "thinking": words}, {"type": "signature_delta", "signature": signature}]
    return {"type": "thinking", "thinking": "", "signature": ""}, deltas


def redacted(data: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    return {"type": "redacted_thinking", "data": data}, []


def tool(call_id: str, name: str, *pieces: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    block = {"type": "tool_use", "id": call_id, "name": name, "input": {}}
    return block, [{"type": "input_json_delta", "partial_json": piece} for piece in pieces]


def anthropic(
    *blocks: tuple[dict[str, Any], list[dict[str, Any]]],
    stop: str = "end_turn",
    usage: dict[str, int] | None = None,
    output: int = 7,
) -> list[bytes]:
    """The events of one whole reply."""
    counted = {"input_tokens": 10, "output_tokens": 1, **(usage or {})}
    message = {
        "id": "msg_1", "type": "message", "role": "assistant", "model": "claude-x", "content": [],
        "stop_reason": None, "stop_sequence": None, "usage": counted,
    }  # fmt: skip
    events: list[bytes] = [_event({"type": "message_start", "message": message})]
    for index, (block, deltas) in enumerate(blocks):
        events.append(_event({"type": "content_block_start", "index": index, "content_block": block}))
        events += [_event({"type": "content_block_delta", "index": index, "delta": delta}) for delta in deltas]
        events.append(_event({"type": "content_block_stop", "index": index}))
    ending = {"stop_reason": stop, "stop_sequence": None}
    events.append(_event({"type": "message_delta", "delta": ending, "usage": {"output_tokens": output}}))
    events.append(_event({"type": "message_stop"}))
    return events


def said(*pieces: str, **more: Any) -> Answer:
    """Anthropic says just this."""
    return Answer(anthropic(text(*pieces), **more))


def called(call_id: str, name: str, args: dict[str, Any], **more: Any) -> Answer:
    """Anthropic calls just this tool."""
    return Answer(anthropic(tool(call_id, name, json.dumps(args)), stop="tool_use", **more))


def broke(kind: str, message: str) -> bytes:
    """Anthropic's error inside a stream."""
    return _event({"type": "error", "error": {"type": kind, "message": message}})


# OpenAI Chat Completions


def chat(
    *,
    content: Sequence[str] = (),
    calls: Sequence[tuple[str, str, Sequence[str]]] = (),
    finish: str | None = "stop",
    refused: str = "",
    usage: dict[str, Any] | None = None,
) -> list[bytes]:
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
    deltas += [{"content": piece} for piece in content]
    if refused:
        deltas.append({"refusal": refused})
    for index, (call_id, name, pieces) in enumerate(calls):
        head = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        deltas.append({"tool_calls": [head]})
        deltas += [{"tool_calls": [{"index": index, "function": {"arguments": piece}}]} for piece in pieces]
    chunks = [{"index": 0, "delta": delta, "finish_reason": None} for delta in deltas]
    if finish is not None:
        chunks.append({"index": 0, "delta": {}, "finish_reason": finish})
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "gpt-x"}
    lines: list[dict[str, Any]] = [{**base, "choices": [chunk]} for chunk in chunks]
    if finish is not None:
        counted = usage or {"prompt_tokens": 10, "completion_tokens": 7, "total_tokens": 17}
        lines.append({**base, "choices": [], "usage": counted})
    events = [f"data: {json.dumps(line)}\n\n".encode() for line in lines]
    return events + ([b"data: [DONE]\n\n"] if finish is not None else [])


# OpenAI Responses


def _item_events(index: int, item: dict[str, Any], pieces: Sequence[str]) -> list[dict[str, Any]]:
    where = {"output_index": index, "item_id": item["id"]}
    if item["type"] == "message":
        [part] = item["content"]
        field, kind = ("refusal", "refusal") if part["type"] == "refusal" else ("text", "output_text")
        empty = {**part, field: ""}
        events = [
            {"type": "response.output_item.added", "output_index": index, "item": {**item, "content": []}},
            {"type": "response.content_part.added", "content_index": 0, "part": empty, **where},
        ]
        extra = {} if kind == "refusal" else {"logprobs": []}
        events += [
            {"type": f"response.{kind}.delta", "content_index": 0, "delta": piece, **extra, **where} for piece in pieces
        ]
        events.append({"type": f"response.{kind}.done", "content_index": 0, field: part[field], **extra, **where})
    elif item["type"] == "function_call":
        events = [
            {"type": "response.output_item.added", "output_index": index, "item": {**item, "arguments": ""}},
            *({"type": "response.function_call_arguments.delta", "delta": piece, **where} for piece in pieces),
            {"type": "response.function_call_arguments.done", "arguments": "".join(pieces), **where},
        ]
    elif item["type"] == "web_search_call":
        begun = {key: value for key, value in item.items() if key != "action"} | {"status": "in_progress"}
        events = [
            {"type": "response.output_item.added", "output_index": index, "item": begun},
            {"type": "response.web_search_call.in_progress", **where},
            {"type": "response.web_search_call.searching", **where},
            {"type": "response.web_search_call.completed", **where},
        ]
    else:
        events = [{"type": "response.output_item.added", "output_index": index, "item": {**item, "summary": []}}]
        for n, piece in enumerate(pieces):
            part = {"type": "summary_text", "text": ""}
            events += [
                {"type": "response.reasoning_summary_part.added", "summary_index": n, "part": part, **where},
                {"type": "response.reasoning_summary_text.delta", "summary_index": n, "delta": piece, **where},
            ]
    return [*events, {"type": "response.output_item.done", "output_index": index, "item": item}]


def message(*pieces: str, refused: bool = False) -> tuple[dict[str, Any], Sequence[str]]:
    part: dict[str, Any] = {"type": "output_text", "text": "".join(pieces), "annotations": []}
    if refused:
        part = {"type": "refusal", "refusal": "".join(pieces)}
    return {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": [part]}, pieces


def function(call_id: str, name: str, *pieces: str) -> tuple[dict[str, Any], Sequence[str]]:
    item = {"id": f"fc_{call_id}", "type": "function_call", "call_id": call_id, "name": name, "status": "completed"}
    return {**item, "arguments": "".join(pieces)}, pieces


def reasoning(item_id: str, encrypted: str, *summary: str) -> tuple[dict[str, Any], Sequence[str]]:
    parts = [{"type": "summary_text", "text": words} for words in summary]
    return {"id": item_id, "type": "reasoning", "summary": parts, "encrypted_content": encrypted}, summary


def responses(
    *items: tuple[dict[str, Any], Sequence[str]], usage: dict[str, Any] | None = None, status: str = "completed"
) -> list[bytes]:
    base: dict[str, Any] = {
        "id": "resp_1", "object": "response", "created_at": 1, "model": "gpt-x", "output": [], "error": None,
        "parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "incomplete_details": None,
    }  # fmt: skip
    counted = usage or {
        "input_tokens": 10, "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 7, "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 17,
    }  # fmt: skip
    events: list[dict[str, Any]] = [{"type": "response.created", "response": {**base, "status": "in_progress"}}]
    for index, (item, pieces) in enumerate(items):
        events += _item_events(index, item, pieces)
    done = {**base, "status": status, "output": [item for item, _ in items], "usage": counted}
    if status == "incomplete":
        done["incomplete_details"] = {"reason": "max_output_tokens"}
    events.append({"type": f"response.{status}", "response": done})
    return [_event({**event, "sequence_number": n}) for n, event in enumerate(events)]


# Web search at the provider


def searched(
    call_id: str, query: str, *found: tuple[str, str], error: str = ""
) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Anthropic's own search inside a reply: the call, and what it found as (title, address)."""
    call = {"type": "server_tool_use", "id": call_id, "name": "web_search", "input": {}}
    results: Any = [
        {"type": "web_search_result", "title": title, "url": url, "encrypted_content": "Eo8B==", "page_age": None}
        for title, url in found
    ]
    if error:
        results = {"type": "web_search_tool_result_error", "error_code": error}
    asks = [{"type": "input_json_delta", "partial_json": json.dumps({"query": query})}]
    return [(call, asks), ({"type": "web_search_tool_result", "tool_use_id": call_id, "content": results}, [])]


def web_search_call(item_id: str, query: str, *urls: str) -> tuple[dict[str, Any], Sequence[str]]:
    """OpenAI's own search as an item of a response."""
    sources = [{"type": "url", "url": url} for url in urls]
    action = {"type": "search", "query": query, "queries": [query], "sources": sources}
    return {"id": item_id, "type": "web_search_call", "status": "completed", "action": action}, ()
