"""Golden files: transcripts of trees in a form that is the same in every run, and the comparison with a file.

A transcript is a dict from the path of a run to its events, each a dict of plain values. Times, ids, folders and
lengthy texts are replaced by placeholders. Only the order within a run is kept, because concurrent runs may interleave.
`RETINUE_UPDATE_GOLDEN=1` writes the files instead of comparing.

What this module knows of Retinue beyond the public names: an event's body is a msgspec struct, and some of its fields.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from retinue import Event, Result

FOLDER = Path(__file__).parent
UPDATE = "RETINUE_UPDATE_GOLDEN"
LONGEST_TEXT = 1500
# Times, ids and what depends on the machine; `profile` repeats what the test says.
DROPPED = {"duration_ms", "approval_id", "digest", "seal", "trace_id", "span_id", "profile", "layout", "signature"}
RESULT_FIELDS = ("status", "final_response", "error_details", "partial", "structured", "total_turns", "tool_count")

Transcript = dict[str, list[dict[str, Any]]]


def transcribe(events: Iterable[Event], result: Result[Any], project: Path) -> Transcript:
    """Turn the events of a tree, and the result of its primary, into a transcript."""
    runs: Transcript = {}
    for event in events:
        runs.setdefault(event.path, []).append(_describe(event))
    runs = {path: _sort_concurrent_calls(runs[path]) for path in sorted(runs)}
    runs["result"] = [_result_fields(result)]
    plain: Transcript = json.loads(_replace_ids(json.dumps(runs), result.tree, project))
    return {path: [_shorten(event) for event in events] for path, events in plain.items()}


def _describe(event: Event) -> dict[str, Any]:
    """Return the main fields of an event, the kind first."""
    fields = msgspec.json.decode(msgspec.json.encode(event.body))
    found = {"kind": event.kind}
    found |= {name: value for name, value in fields.items() if name not in {"kind", "sandbox", *DROPPED}}
    if event.kind == "run.started":
        found["sandboxed"] = bool(fields.get("sandbox"))
    if event.kind == "run.spawned":
        found["tools"] = [tool["name"] for tool in fields.get("tools", [])]
    return found


def _result_fields(result: Result[Any]) -> dict[str, Any]:
    fields = json.loads(json.dumps(result.to_json()))
    return {name: fields.get(name) for name in RESULT_FIELDS}


def _sort_concurrent_calls(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sort neighbouring events of tool calls by the call of the model that they belong to.

    The calls of one reply run at the same time. Calls `ID.N` of a program keep their place within its call `ID`.
    """
    stretches = itertools.groupby(events, lambda event: "call_id" in event and event["kind"] != "run.spawned")
    return [
        event
        for is_call, stretch in stretches
        for event in (sorted(stretch, key=lambda event: event["call_id"].partition(".")[0]) if is_call else stretch)
    ]


def _replace_ids(text: str, tree: str, project: Path) -> str:
    text = text.replace(tree, "TREE").replace(str(project), "PROJECT")
    text = re.sub(r"(?<=[a-z]_)[0-9a-f]{12,}", "ID", text)
    text = re.sub(r'(execution_time_seconds|elapsed_seconds)(\\*": ?)[0-9.]+', r"\1\g<2>0", text)
    return re.sub(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[0-9.+:Z]*", "TIME", text)


def _shorten(value: Any) -> Any:
    """Cut lengthy texts anywhere in the value. Their length is not kept: it depends on the length of folder names."""
    if isinstance(value, dict):
        return {name: _shorten(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_shorten(inner) for inner in value]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"{value[:100]}<and so on>{value[-100:]}"
    return value


def check_golden(name: str, found: Any) -> None:
    """Compare the value with the golden file of that name, or write the file if asked to."""
    file = FOLDER / f"{name}.json"
    if os.environ.get(UPDATE) == "1":
        file.write_text(_format(found), encoding="utf-8")
    assert found == json.loads(file.read_text(encoding="utf-8")), f"differs from {file.name}; {UPDATE}=1 rewrites it"


def _format(value: Any) -> str:
    """Write JSON with one event per line for a transcript."""
    if not all(isinstance(events, list) for events in value.values()):
        return json.dumps(value, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    runs = []
    for path, events in value.items():
        lines = ",\n".join("  " + json.dumps(event, ensure_ascii=False) for event in events)
        runs.append(f" {json.dumps(path)}: [\n{lines}\n ]")
    return "{\n" + ",\n".join(runs) + "\n}\n"
