"""A tree of depth 3 with four leaves, as a script, and what it must add up to."""

from typing import Any

ANSWER = "the whole is done"
FINAL = "leaf says: "


def _spawn(*tasks: dict[str, str]) -> dict[str, Any]:
    return {"name": "spawn_subagents", "args": {"tasks": list(tasks)}}


def _leaf(name: str) -> dict[str, str]:
    return {"task": f"do {name}", "subagent_id": name, "subagent_type": "explorer"}


def _usage(n: int) -> dict[str, int]:
    return {"input_tokens": 100 + n, "output_tokens": 10 + n}


LEAVES = ("leaf-a", "leaf-b", "leaf-c", "leaf-d")
HALVES = {"task": "left half", "subagent_id": "left"}, {"task": "right half", "subagent_id": "right"}
AGENTS: dict[str, Any] = {
    "main": [
        {"thinking": "I ask a lead.", "tools": [_spawn({"task": "lead", "subagent_id": "lead"})], "usage": _usage(1)},
        {"text": ANSWER, "usage": _usage(2)},
    ],
    "lead": [{"tools": [_spawn(*HALVES)], "usage": _usage(3)}, {"text": "both halves are done", "usage": _usage(4)}],
    "left": [
        {"tools": [_spawn(_leaf("leaf-a"), _leaf("leaf-b"))], "usage": _usage(5)},
        {"text": "left done", "usage": _usage(6)},
    ],
    "right": [
        {"tools": [_spawn(_leaf("leaf-c"), _leaf("leaf-d"))], "usage": _usage(7)},
        {"text": "right done", "usage": _usage(8)},
    ],
} | {
    leaf: [
        {"thinking": f"{leaf} thinks", "tools": [{"name": "glob", "args": {"pattern": "*.yaml"}}], "usage": _usage(n)},
        {"text": f"{FINAL}{leaf}", "usage": _usage(n + 1)},
    ]
    for n, leaf in zip((10, 20, 30, 40), LEAVES, strict=True)
}


def script_total() -> tuple[int, int]:
    """Input and output tokens of all replies of the script."""
    usages = [reply["usage"] for replies in AGENTS.values() for reply in replies]
    return sum(usage["input_tokens"] for usage in usages), sum(usage["output_tokens"] for usage in usages)
