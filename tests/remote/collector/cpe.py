"""Posts events as a CPE process does: it knows only its own variable, spells ids its way, has nanoseconds and a zone.

cpe.py RUN_ID"""

import http.client
import json
import os
import sys
from urllib.parse import urlsplit

base = urlsplit(os.environ["CPE_SUBAGENT_LOGGING_ADDRESS"])
connection = http.client.HTTPConnection(base.hostname or "", base.port, timeout=100)


def emit(kind: str, **more: object) -> None:
    event = {
        "subagentName": "code-review-agent",
        "subagentRunId": sys.argv[1],
        "timestamp": "2026-01-23T10:11:12.123456789+02:00",
        "type": kind,
        **more,
    }
    headers = {"User-Agent": "Go-http-client/1.1", "Content-Type": "application/json", "Accept-Encoding": "gzip"}
    connection.request("POST", base.path + "/subagent-events", json.dumps(event), headers)
    answer = connection.getresponse()
    answer.read()
    if not 200 <= answer.status < 300:
        sys.exit(f"server returned non-2xx status: {answer.status}")


emit("subagent_start")
emit("thought_trace", payload="I should look.", reasoningType="reasoning.encrypted")
emit(
    "tool_call",
    toolName="execute_go_code",
    toolCallId="call_123",
    executionTimeoutSeconds=10,
    tokenUsage={"inputTokens": 1234, "outputTokens": 456, "totalTokens": 1690},
    payload="package main\n\nfunc main() {}",
)
emit("tool_result", toolName="execute_go_code", toolCallId="call_123", payload="it ran")
emit("tool_call", toolName="grep", toolCallId="call_124", payload='{"pattern":"todo","paths":["src"]}')
emit("tool_result", toolName="grep", toolCallId="call_124", payload='{"hits":[{"line":1}]}')
emit("subagent_end")
