"""kill -9 of a supervisor and its two remote subagents at random moments: one ending per run, and nothing twice."""

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from retinue.concurrency import TaskOwner
from tests.surfaces.a2a.kit import TLS, body_of, message_of
from tests.surfaces.a2a.test_three_processes import Processes, start_processes, wait_for_ending

pytestmark = pytest.mark.soak
ROUNDS = 12


@pytest.mark.parametrize("seed", range(2))
async def test_kills_at_random_moments(tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    async with start_processes(tmp_path) as processes:
        for _ in range(ROUNDS):
            await kill_one(processes, dice)


async def kill_one(processes: Processes, dice: random.Random) -> None:
    for gate in processes.gates.values():
        gate.unlink(missing_ok=True)
    victim, moment = dice.choice(("supervisor", "argocd", "github")), dice.uniform(0, 2)
    body = message_of("go")
    async with TaskOwner() as owner, httpx.AsyncClient(verify=TLS, timeout=60) as http:
        params = {**body, "configuration": {"blocking": False}}
        said = await http.post(processes.urls["supervisor"], json=body_of("message/send", params))
        task = said.json()["result"]["id"]
        owner.start(processes.approve())
        await asyncio.sleep(moment)  # the random moment
        opened = dice.random() < 0.5
        for gate in processes.gates.values() if opened else ():
            gate.touch()
        await processes.kill(victim)
        await processes.start(victim)
        for gate in processes.gates.values():
            gate.touch()
        state = await wait_for_ending(processes, task)
    where = f"{victim} after {moment:.2f} s, task {task}"
    assert state == "completed", where
    check_log(processes.read_log(processes.supervisor, task), victim, where)


def check_log(log: list[dict[str, Any]], victim: str, where: str) -> None:
    runs = {each["run"]: each["agent"] for each in log if each["kind"] == "run.spawned"}
    endings = Counter(each["run"] for each in log if each["kind"] == "run.ended")
    assert set(endings) == set(runs) and set(endings.values()) == {1}, where
    last = {each["run"]: each for each in log}
    assert all(each["kind"] == "run.ended" for each in last.values()), where
    calls = Counter((each["run"], each["call_id"]) for each in log if each["kind"] == "tool.call")
    results = Counter((each["run"], each["call_id"]) for each in log if each["kind"] == "tool.result")
    assert not calls or max(calls.values()) == 1, where
    assert not results or max(results.values()) == 1, where
    statuses = {runs[each["run"]]: each["status"] for each in log if each["kind"] == "run.ended"}
    assert statuses["supervisor"] == "done", where
    for agent in ("argocd", "github"):
        allowed = {"done", "disconnected"} if agent == victim == "github" or victim == "supervisor" else {"done"}
        assert statuses.get(agent, "done") in allowed, f"{where}: {statuses}"
