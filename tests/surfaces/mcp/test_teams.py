"""Teams as an MCP client meets them: one subagent, one answer, in the shape of every other result."""

from __future__ import annotations

import json

import pytest

from tests.surfaces.cli.shell import Project
from tests.surfaces.mcp.kit import connected
from tests.surfaces.mcp.test_tools import reply

TEAMS = """\
orchestrator:
  coordination:
    subagent_orchestrator:
      enabled: true
      agents: [{model: "scripted:one.yaml"}, {model: "scripted:two.yaml"}]
"""


def write_member(project: Project, number: int, name: str) -> None:
    answer = {"tools": [{"name": "new_answer", "args": {"content": f"answer {number}"}}]}
    vote = {"tools": [{"name": "vote", "args": {"agent_id": "agent2", "reason": "better"}}]}
    replies = {"quick": [answer, {"text": "made of both"}], "refined": [answer, vote, {"text": "presented"}]}
    agents = {f"{kind} agent{number}": said for kind, said in replies.items()}
    (project.folder / f"{name}.yaml").write_text(json.dumps({"agents": agents}))


@pytest.mark.requirement("MASS-41", "MASS-42", "MASS-48", "MASS-53")
async def test_a_client_spawns_a_team_quickly_and_with_refine(project: Project) -> None:
    (project.folder / "teams.yaml").write_text(TEAMS)
    for number, name in ((1, "one"), (2, "two")):
        write_member(project, number, name)
    async with connected(project, "--config", "teams.yaml") as client:
        refine = (await client.list_tools()).tools[0].input_schema["properties"]["refine"]
        assert refine["type"] == "boolean" and "teams" in refine["description"]
        quick = await reply(client, "spawn_subagents", tasks=[{"task": "look", "subagent_id": "quick"}])
        refined = await reply(
            client, "spawn_subagents", tasks=[{"task": "look", "subagent_id": "refined"}], refine=True
        )
        later = await reply(client, "get_background_tool_result", subagent_id="refined")
    assert (quick["success"], quick["mode"], quick["summary"]["completed"]) == (True, "blocking", 1)
    [result] = quick["results"]
    assert (result["subagent_id"], result["status"], result["answer"]) == ("quick", "completed", "made of both")
    assert (result["team"]["strategy"], result["team"]["votes"]) == ("synthesize", {})
    [result] = refined["results"]
    assert (result["answer"], result["team"]["winner"]) == ("presented", "agent2.1")
    assert (result["team"]["strategy"], result["team"]["votes"]) == ("winner_present", {"agent1.1": 0, "agent2.1": 2})
    assert later["result"]["answer"] == "presented"
