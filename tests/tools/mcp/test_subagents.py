"""Subagents behind MCP: the run's id is made by us and hidden, and what travels down to servers is in their hands."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import retinue
from retinue.core.events import ToolResult
from retinue.core.messages import RunRef
from retinue.core.ports import Outcome
from tests.gates import until
from tests.tools.mcp.kit import call, http_server, main, offered, quick_program, results, run, turns

DELEGATE = call("mcp__calm__delegate", prompt="look")


class Ledger:
    """A collector that records its requests."""

    def __init__(self) -> None:
        self.minted: list[tuple[str, str, str]] = []
        self.came: list[tuple[str, Outcome | None]] = []
        self.ended: list[str] = []

    def environment(self, server: str) -> Mapping[str, str]:
        address = f"http://127.0.0.1:1/{server}"
        return {"RETINUE_SUBAGENT_LOGGING_ADDRESS": address, "CPE_SUBAGENT_LOGGING_ADDRESS": address}

    def call(self, server: str, ref: RunRef, name: str, give_up: Callable[[], object] | None = None) -> str:
        self.minted.append((server, ref.path, name))
        return f"run-{len(self.minted)}"

    def meta(self, ref: RunRef) -> Mapping[str, Any]:
        return {"retinue/depth": 2}

    def end_call(self, run_id: str, outcome: Outcome | None) -> None:
        self.came.append((run_id, outcome))

    def end_server(self, server: str) -> None:
        self.ended.append(server)


def use_collector(r: Any, ledger: Ledger) -> None:
    for connection in r.control.servers.connections.values():
        connection.collector = ledger


@pytest.mark.requirement("CPE-22")
async def test_the_runs_id_is_hidden_and_filled() -> None:
    _, events = await run(
        {"calm": quick_program("calm")},
        turns(DELEGATE, DELEGATE, call("mcp__calm__delegate", prompt="x", runId="mine")),
    )
    schema = offered(events)["mcp__calm__delegate"]["schema"]
    assert "runId" not in schema["properties"] and schema["required"] == ["prompt"]
    first, second, forged = [re.search(r"runId=(\S*)", body.text)[1] for body in results(events)]  # type: ignore[index]
    assert re.fullmatch("delegate-[0-9a-f]+", first) and re.fullmatch("delegate-[0-9a-f]+", second) and first != second
    assert forged not in ("mine", first, second)


@pytest.mark.requirement("CPE-22", "CPE-55", "CPE-57")
async def test_a_collector_mints_the_id_and_hears_of_the_end(tmp_path: Path) -> None:
    ledger, marker = Ledger(), tmp_path / "marker"
    async with retinue.open(mode="yes", mcp_servers={"calm": quick_program("calm")}) as r:
        use_collector(r, ledger)
        going = await r.spawn(main({"main": turns(DELEGATE, call("mcp__calm__environment"))}), "go")
        events = [event async for event in going.events()]
        delegated, environment = results(events)
        assert delegated.text == "prompt=look runId=run-1 meta={'retinue/depth': 2}"
        assert ledger.minted == [("calm", "/main", "delegate")]
        assert [(run_id, outcome and outcome.text) for run_id, outcome in ledger.came] == [("run-1", delegated.text)]
        variables = dict(line.split("=", 1) for line in environment.text.splitlines())
        assert variables["RETINUE_SUBAGENT_LOGGING_ADDRESS"] == "http://127.0.0.1:1/calm"
        assert variables["CPE_SUBAGENT_LOGGING_ADDRESS"] == "http://127.0.0.1:1/calm"
        # One that is given up has come back too.
        stuck = await r.spawn(main({"main": turns(call("mcp__calm__delegate", prompt=f"wait {marker}"))}), "go")
        await until(marker.exists)
        await stuck.cancel()
        await stuck.result()
    assert ledger.came[1:] == [("run-2", None)]


async def test_a_collector_hears_of_a_server_that_ends_and_why_its_call_failed(tmp_path: Path) -> None:
    ledger, marker = Ledger(), tmp_path / "marker"
    async with retinue.open(mode="yes", mcp_servers={"calm": quick_program("calm")}) as r:
        use_collector(r, ledger)
        script = turns(call("mcp__calm__who"), call("mcp__calm__delegate", prompt=f"wait {marker}"))
        going = await r.spawn(main({"main": script}), "go")
        await until(marker.exists)
        said = await anext(_results(going))
        for pid in said.text.split()[:2]:  # a server made by a fork has no group of its own to end with it
            os.kill(int(pid), signal.SIGKILL)
        await going.result()
        await until(lambda: ledger.ended)
    [(run_id, outcome)] = ledger.came
    assert run_id == "run-1" and outcome is not None and not outcome.success
    assert "the MCP server 'calm' went away during the call" in outcome.text
    assert ledger.ended == ["calm"]


async def _results(going: Any) -> AsyncIterator[ToolResult]:
    async for event in going.events():
        if isinstance(event.body, ToolResult):
            yield event.body


@pytest.mark.requirement("CPE-57")
async def test_a_server_gets_few_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "sk-0123456789abcdef")
    monkeypatch.setenv("WANTED", "one")
    monkeypatch.setenv("ALSO", "two")
    server = quick_program("calm", env={"MADE": "of ${ALSO}"}, inherit_env=["WANTED", "MISSING"])
    _, events = await run({"calm": server}, turns(call("mcp__calm__environment")))
    variables = dict(line.split("=", 1) for line in results(events)[0].text.splitlines())
    assert (variables["WANTED"], variables["MADE"]) == ("one", "of two")
    assert not {"SOME_API_KEY", "ALSO", "MISSING"} & set(variables)
    others = {name for name in variables if not name.startswith("LC_")} - {"WANTED", "MADE"}
    passed = {"PATH", "HOME", "LANG", "TERM", "TMPDIR", "USER", "SHELL", "VIRTUAL_ENV"}
    passed |= {"XDG_CONFIG_HOME", "XDG_STATE_HOME"}
    down = {"RETINUE_SUBAGENT_LOGGING_ADDRESS", "CPE_SUBAGENT_LOGGING_ADDRESS", "RETINUE_SUBAGENT_DEPTH"}
    assert down <= others <= passed | down


async def test_what_travels_down_reaches_a_server_by_http_too() -> None:
    async with http_server() as url, retinue.open(mode="yes", mcp_servers={"calm": {"url": url}}) as r:
        use_collector(r, Ledger())
        going = await r.spawn(main({"main": turns(DELEGATE)}), "go")
        events = [event async for event in going.events()]
    assert results(events)[0].text == "prompt=look runId=run-1 meta={'retinue/depth': 2}"
