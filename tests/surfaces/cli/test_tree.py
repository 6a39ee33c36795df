"""The main job from the shell: a tree of depth 3 with four leaves, seen live and read again from the log."""

import json
from collections import defaultdict
from typing import Any

import pytest

from tests.surfaces.cli.shell import Project, interrupt, read_until
from tests.surfaces.cli.trees import AGENTS, ANSWER, FINAL, LEAVES, script_total


def usages(result: dict[str, Any]) -> tuple[int, int]:
    """The tokens of a result and all its children."""
    below = [usages(child) for child in result["children"]]
    own = result["usage"]
    return own["input_tokens"] + sum(b[0] for b in below), own["output_tokens"] + sum(b[1] for b in below)


@pytest.mark.requirement("CPE-6", "CPE-46")
def test_the_whole_tree_is_on_stderr_and_the_answer_once_on_stdout(project: Project) -> None:
    done = project.run("--yes", agents=AGENTS)
    assert done.returncode == 0
    assert done.stdout == ANSWER + "\n"
    assert ANSWER not in done.stderr
    for leaf in LEAVES:
        assert f"○ explorer [{leaf}] spawned: do {leaf}" in done.stderr
        assert f"● explorer [{leaf}] done (2 turns, 1 tool," in done.stderr
    assert "#### thought trace\nI ask a lead.\n" in done.stderr
    assert "#### [tool call]\nspawn_subagents\n" in done.stderr
    assert '#### Tool "spawn_subagents" result:\n' in done.stderr
    assert done.stderr.count('Tool "glob" result:\n') == len(LEAVES)
    headers = [line for line in done.stderr.splitlines() if line.startswith("####") and "explorer" in line]
    for leaf in LEAVES:
        steps = ("thought trace", "[tool call]", 'Tool "glob" result:')
        mine = [line for line in headers if f"[{leaf}]" in line]
        # the label stands there while another explorer is alive, so the last leaf may end without it
        assert [line.partition(f"[{leaf}] ")[2] for line in mine] == list(steps[: len(mine)])


@pytest.mark.requirement("P3", "CPE-46")
def test_tail_has_the_same_events_in_strict_order(project: Project) -> None:
    project.run("--yes", agents=AGENTS)
    events = project.events()
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert all({"seq", "tree", "run", "path", "agent", "kind", "at"} <= event.keys() for event in events)
    by_run: dict[int, list[str]] = defaultdict(list)
    for event in events:
        by_run[event["run"]].append(event["kind"])
    assert len(by_run) == 8
    for kinds in by_run.values():
        assert kinds[0] == "run.spawned"
        assert kinds[-1] == "run.ended"
        assert kinds.count("run.ended") == kinds.count("run.spawned") == 1
        assert kinds.count("tool.call") == kinds.count("tool.result")
    assert events[-1]["run"] == 0
    depths = {event["path"]: event["depth"] for event in events if event["kind"] == "run.spawned"}
    assert sorted(depths.values()) == [0, 1, 2, 2, 3, 3, 3, 3]


def test_totals_are_the_sum_of_the_script(project: Project) -> None:
    done = project.run("--yes", "--json", "--quiet", agents=AGENTS)
    result = json.loads(done.stdout)
    assert usages(result) == script_total()
    spent = [event["usage"] for event in project.events() if event["kind"] == "usage"]
    assert (sum(u["input_tokens"] for u in spent), sum(u["output_tokens"] for u in spent)) == script_total()
    rows = project.rows()
    assert sum(row["usage"]["input_tokens"] for row in rows) == script_total()[0]
    assert {row["state"] for row in rows} == {"done"}


def test_the_summary_has_every_run_and_the_commands_to_look_closer(project: Project) -> None:
    done = project.run("--yes", agents=AGENTS)
    tree = project.rows()[0]["tree"]
    assert f"{sum(script_total()):,}" in done.stderr.partition("\ntotal")[2].splitlines()[0]
    assert "Agents: 1 primary, 0 running, 7 finished" in done.stderr
    assert f"retinue show {tree}" in done.stderr


@pytest.mark.requirement("CPE-1", "CPE-2", "CPE-3", "CPE-6")
def test_blocks_of_a_grandchild_are_printed_while_it_is_at_work(project: Project) -> None:
    model = project.script(
        {
            "main": [{"tools": [{"name": "subagent_critic", "args": {"task": "have it looked at"}}]}],
            "critic": [{"tools": [{"name": "subagent_explorer", "args": {"task": "look"}}]}],
            "explorer": [
                {"thinking": "hm", "tools": [{"name": "glob", "args": {"pattern": "*.yaml"}}]},
                {"hang": True},
            ],
        }
    )
    with project.running("run", "x", "--yes", "--model", model) as process:
        assert process.stderr is not None
        seen = read_until(process.stderr, '#### explorer Tool "glob" result:')
        assert process.poll() is None
        assert "#### explorer thought trace\nhm\n" in seen
        assert "#### explorer [tool call]\nglob\n" in seen
        interrupt(process)
        assert process.wait() == 130


def test_nothing_of_a_childs_answer_is_a_block_of_its_own(project: Project) -> None:
    done = project.run("--yes", "--verbose", agents=AGENTS)
    for leaf in LEAVES:  # in its parent's tool result, and nowhere else
        assert done.stderr.count(f"{FINAL}{leaf}") == 1
