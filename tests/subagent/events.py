"""Events made by hand, for folds that are fed what no run of ours would say."""

from typing import Any

from retinue.core.events import Body, Event, RunSpawned


def spawned(*, run: int = 1, **fields: Any) -> RunSpawned:
    given: dict[str, Any] = {"label": "w", "depth": 1, "task": "go", "subagent_id": "worker_1f", "workspace": "/w"}
    return RunSpawned(0 if run else None, **(given | fields))


def stream(*bodies: Body, run: int = 1, tree: str = "t", agent: str = "worker") -> list[Event]:
    return [
        Event(seq, tree, run, f"/main/{agent}-{run}", agent, float(seq), body) for seq, body in enumerate(bodies, 1)
    ]
