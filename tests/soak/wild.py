"""Random trees from a seed: scripts for every run, limits, and who answers questions. Runs nothing.

Every run that may come to be has a name of its own (`n7`), by which its script is found: as `subagent_id` where
`spawn_subagents` makes it, as the label where `subagent_{name}` does. Which are made depends on limits and timing.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from retinue import Limits

DEEPEST = 4
WIDEST = 6
KINDS = ("alpha", "beta", "typed")
TEXTS = (
    "fine",
    "two\nlines\r\nand a tab\t.",
    "\x1b[31mred\x1b[0m \x07 \u202eback\u202c \U0001f9ea \u00e9",
    '{"json": ["inside", null]} [bold]markup[/bold]',
    "said: {{last_result}}",
    "long " * 2000,
)
BAD_SPAWNS: tuple[dict[str, Any], ...] = (
    {},
    {"tasks": "one"},
    {"tasks": []},
    {"tasks": [{}]},
    {"tasks": [{"task": "  "}]},
    {"tasks": [7]},
    {"tasks": [{"task": "x", "colour": "red"}]},
    {"tasks": [{"task": "x", "subagent_type": "nobody"}]},
    {"tasks": [{"task": "x", "subagent_id": "twin"}, {"task": "y", "subagent_id": "twin"}]},
    {"tasks": [{"task": "x", "context_paths": ["no/such/path"]}]},
    {"tasks": [{"task": "x", "context_paths": ["/etc"]}]},
    {"tasks": [{"task": "x", "timeout_seconds": "soon"}]},
    {"tasks": [{"task": "x", "model": "nosuch:model"}]},
    {"tasks": [{"task": f"t{n}"} for n in range(33)]},
    {"tasks": [{"task": "x"}], "refine": True},
)
OTHER_CALLS: tuple[dict[str, Any], ...] = (
    {"name": "nosuch", "args": {"deep": {"list": [1, 2.5, None, True, "x"]}, "timeout": 3}},
    {"name": "final_answer", "args": {"answer": "nobody asked"}},
    {"name": "subagent_alpha", "args": {}},
    {"name": "subagent_beta", "args": {"task": 7}},
    {"name": "subagent_nobody", "args": {"task": "x"}},
    {"name": "get_agent", "args": {}},
    {"name": "get_agent", "args": {"agent_id": "one"}},
    {"name": "get_agent", "args": {"agent_id": 1}},
    {"name": "get_agent", "args": {"agent_id": -1}},
    {"name": "list_agents", "args": {}},
    {"name": "list_agents", "args": {"more": 1}},
    {"name": "read", "args": {}},
    {"name": "read", "args": {"file_path": "/etc/shadow"}},
    {"name": "write", "args": {"file_path": "left.txt", "content": "by a run"}},
    {"name": "write", "args": {"file_path": "../../out.txt", "content": "x"}},
    {"name": "glob", "args": {"pattern": "*.txt"}},
    {"name": "grep", "args": {"pattern": "(("}},
    {"name": "effect", "args": {"what": "a thing"}},
    {"name": "effect", "args": {"what": "a thing"}},
    {"name": "effect", "args": {"wrong": 1}},
    {"name": "look", "args": {"turns": 5}},
    {"name": "look", "args": {"turns": 0}},
    {"name": "look", "args": {"turns": "many"}},
    {"name": "breaks", "args": {}},
)


@dataclass
class Wild:
    """One case. `mode` is `yes`, `ask` (somebody answers at random) or `nobody` (asked, and nobody is there)."""

    seed: int
    agents: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    mode: str = "yes"
    background: bool = True

    @property
    def timing_matters(self) -> bool:
        """Return True if two runs of the case may differ in more than their order."""
        return self.background or self.limits.concurrent is not None or self.mode != "yes"


def wild(seed: int, *, size: int = 30, hangs: bool = False) -> Wild:
    """The case of this seed, with at most `size` runs planned below the primary."""
    return _Maker(seed, size, hangs).make()


class _Maker:
    def __init__(self, seed: int, size: int, hangs: bool) -> None:
        self.random = random.Random(f"wild {seed}")
        self.case = Wild(seed)
        self.left = size
        self.hangs = hangs
        self.names: list[str] = []

    def make(self) -> Wild:
        pick = self.random.choice
        self.case.background = pick((True, True, False))
        self.case.mode = pick(("yes", "yes", "yes", "ask", "ask", "nobody"))
        self.case.limits = Limits(
            depth=pick((0, 1, 2, 3, *[DEEPEST] * 6)),
            concurrent=pick((None, None, None, None, 0, 1, 1, 1, 2, 2, 3, 8)),
            turns=pick((None, None, 100, 100, 100, 100, 100, 1, 2, 3)),
        )
        self.case.agents["main"] = [self._work(0), self._work(0), *self._replies(0)]
        return self.case

    def _replies(self, depth: int) -> list[dict[str, Any]]:
        work = [self._work(depth) for _ in range(self.random.choice((0, 0, 1, 1, 2)))]
        return [*work, self._last()]

    def _work(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.05:
            return self._fault()
        calls = [self._call(depth) for _ in range(self.random.choice((1, 1, 1, 2, 3, 5)))]
        return self._dressed({"tools": calls})

    def _last(self) -> dict[str, Any]:
        chance = self.random.random()
        if chance < 0.15:
            return self._fault()
        return self._dressed({"text": ""} if chance < 0.25 else {})

    def _dressed(self, reply: dict[str, Any]) -> dict[str, Any]:
        if "text" not in reply and self.random.random() < (0.4 if "tools" in reply else 1):
            reply |= {"text": self.random.choice(TEXTS), "chunks": self.random.choice((1, 3))}
        if self.random.random() < 0.3:
            reply["thinking"] = self.random.choice(TEXTS[:4])
        return reply | self._spent()

    def _spent(self) -> dict[str, Any]:
        if self.random.random() < 0.1:
            return {}
        return {"usage": {"input_tokens": self.random.randrange(1000), "output_tokens": self.random.randrange(100)}}

    def _fault(self) -> dict[str, Any]:
        faults: list[dict[str, Any]] = [
            {"refuse": "I will not"},
            {"refuse": ""},
            {"error": "overloaded", "status": self.random.choice((400, 429, 500, 529))},
            {"error": "no idea"},
            {"crash": "boom"},
            {"cut": "half of"},
            {"cut": ""},
        ]
        if self.hangs:
            faults += [{"hang": True}] * 4
        return self.random.choice(faults) | self._spent()

    def _call(self, depth: int) -> dict[str, Any]:
        chance = self.random.random()
        may_spawn = depth < DEEPEST and self.left > 0
        if may_spawn and chance < 0.45:
            return self._spawn(depth)
        if may_spawn and chance < 0.65:
            kind = self.random.choice(KINDS)
            args = {"task": self._child(depth, kind)}
            return {"name": f"subagent_{kind}", "args": args | self._in_background(0.2)}
        if chance < 0.7:
            return {"name": "spawn_subagents", "args": self.random.choice(BAD_SPAWNS)}
        return self.random.choice(OTHER_CALLS)

    def _spawn(self, depth: int) -> dict[str, Any]:
        tasks = []
        for _ in range(self.random.randint(1, min(WIDEST, self.left))):
            if self.left <= 0:  # the children before this one have taken what was left
                break
            kind = self.random.choice((None, None, *KINDS))
            again = self.random.random() < 0.03 and self.names
            name = self.random.choice(self.names) if again else self._child(depth, kind)
            task: dict[str, Any] = {"task": f"do {name}", "subagent_id": name}
            tasks.append(task if kind is None else task | {"subagent_type": kind})
        return {"name": "spawn_subagents", "args": {"tasks": tasks} | self._in_background(0.3)}

    def _in_background(self, chance: float) -> dict[str, Any]:
        return {"background": True} if self.case.background and self.random.random() < chance else {}

    def _child(self, depth: int, kind: str | None) -> str:
        self.left -= 1
        name = f"n{len(self.names) + 1}"
        self.names.append(name)
        replies = self._replies(depth + 1)
        if kind == "typed" and self.random.random() < 0.8:
            answers = ({"answer": 3}, {"answer": "three"}, {})
            replies[-1:] = [self._dressed({"tools": [{"name": "final_answer", "args": args}]}) for args in answers[:2]]
            self.random.shuffle(replies)
        self.case.agents[name] = replies
        return name
