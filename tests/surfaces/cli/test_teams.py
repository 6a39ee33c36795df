"""A team as the commands that look at runs show it."""

import json
import re
from typing import Any

from tests.surfaces.cli.shell import Project

TEAMS = """\
orchestrator:
  coordination:
    subagent_orchestrator:
      enabled: true
      agents: [{id: fast, model: "scripted:script.yaml"}, {model: "scripted:script.yaml"}]
      shared_child_team_types: [critic]
      final_answer_strategy: winner_present
"""
ESCAPE = "\x1b]0;owned\x07"


def call(name: str, **args: Any) -> dict[str, Any]:
    return {"tools": [{"name": name, "args": args}], "usage": {"input_tokens": 10, "output_tokens": 2}}


AGENTS = {
    "main": [call("spawn_subagents", tasks=[{"task": "look", "subagent_type": "critic"}]), {"text": "all done"}],
    "agent1": [
        call("new_answer", content="it is fine"),
        call("vote", agent_id="agent2", reason=f"{ESCAPE}more\nexact"),
    ],
    "agent2": [
        call("new_answer", content="it is not"),
        call("vote", agent_id="agent2", reason="mine"),
        {"text": "no."},
    ],
}


def test_show_ps_and_tail_present_a_team_as_one_node(project: Project) -> None:
    (project.folder / "teams.yaml").write_text(TEAMS)
    done = project.run("--yes", "--config", "teams.yaml", agents=AGENTS)
    assert (done.returncode, done.stdout) == (0, "all done\n"), done.stderr
    [tree] = re.findall(r"retinue tail (\w+)", done.stderr)
    page = project.retinue("show", f"{tree}/1").stdout
    assert "  team        team of 2: decided for agent2.1, 2 of 2 votes\n" in page
    assert "  usage       48 tokens (40 in, 8 out)\n" in page
    table = [re.split(r" {2,}", line.strip()) for line in page.partition("\nmembers\n")[2].split("\n")[:3]]
    model = "scripted:script.yaml"
    assert table == [
        ["RUN", "MEMBER", "ID", "MODEL", "STATE", "ANSWERS", "VOTE", "TOKENS"],
        ["2", "agent1", "fast", model, "done", "agent1.1", "agent2.1", "24"],
        ["3", "agent2", "agent2", model, "done, presented", "agent2.1", "agent2.1", "24"],
    ]
    assert "\nvotes\n  agent1 for agent2.1: \\x1b]0;owned\\x07more exact\n  agent2 for agent2.1: mine\n" in page
    assert page.endswith("\nresult\n  no.\n")
    told = json.loads(project.retinue("show", f"{tree}/1", "--json").stdout)
    assert (told["team"]["winner"], told["team"]["presented"]) == ("agent2.1", 3)
    assert [each["answers"] for each in told["team"]["contributions"]] == [
        {"agent1.1": "it is fine"},
        {"agent2.1": "it is not"},
    ]
    rows = project.retinue("ps").stdout.splitlines()
    assert [re.split(r" {2,}", row)[1] for row in rows[1:5]] == ["main", "look", "look fast", "look agent2"]
    assert [row.index("look") - rows[0].index("LABEL") for row in rows[2:5]] == [2, 4, 4]
    assert rows[2].endswith("team of 2")
    voted = told["children"][0]["tool_logs"][1]
    assert (voted["name"], voted["context"], voted["result"]) == ("vote", "agent2", "cast")
    tail = project.retinue("tail", tree).stdout
    assert tail.count("it is fine") == tail.count("it is not") == 1
    assert "◇ [look] decided: agent2.1, 2 of 2 votes; agent2 presents\n" in tail
    assert "● critic [look] done (5 turns, 4 tools, 48 tokens, " in tail
