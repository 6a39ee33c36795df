"""A subagent behind MCP in a program of another vendor, which reports to the address in the variable of its own name.
Its answer names the one of the two variables that was set."""

import datetime
import json
import os
import urllib.request
from typing import Any

from mcp.server import MCPServer

app = MCPServer("helper")
NAMES = ("CPE_SUBAGENT_LOGGING_ADDRESS", "RETINUE_SUBAGENT_LOGGING_ADDRESS")


def post(run: str, kind: str, **more: Any) -> None:
    now = datetime.datetime.now(datetime.UTC).isoformat().replace("+00:00", "Z")
    body = {"subagentName": "helper", "subagentRunID": run, "timestamp": now, "type": kind, **more}
    address = os.environ[NAMES[0]].removesuffix("/subagent-events") + "/subagent-events"
    request = urllib.request.Request(address, json.dumps(body).encode(), {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=100).read()


@app.tool()
def ask(prompt: str, runId: str) -> str:
    """A subagent that answers a question."""
    code = json.dumps({"code": "print(42)", "executionTimeout": 10})
    post(runId, "subagent_start")
    post(runId, "thought_trace", payload=f"thinking about {prompt}", reasoningType="text")
    post(runId, "tool_call", toolName="execute_python_code", toolCallID="a1", payload=code, executionTimeoutSeconds=10)
    post(runId, "tool_result", toolName="execute_python_code", toolCallID="a1", payload="42")
    post(runId, "subagent_end")
    return f"{prompt}: {len({os.environ[name] for name in NAMES})} address"


if __name__ == "__main__":
    app.run()
