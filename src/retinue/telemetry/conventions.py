"""Names of spans and attributes: OpenTelemetry's GenAI conventions, and ours where those have none. Imports nothing of
OpenTelemetry.

Spelled out here because the conventions have moved out of the package that used to name them.
"""

from __future__ import annotations

from pathlib import PurePath

OPERATION = "gen_ai.operation.name"
PROVIDER = "gen_ai.provider.name"
AGENT = "gen_ai.agent.name"
DESCRIPTION = "gen_ai.agent.description"
CONVERSATION = "gen_ai.conversation.id"
MODEL = "gen_ai.request.model"
INPUT = "gen_ai.usage.input_tokens"
OUTPUT = "gen_ai.usage.output_tokens"
CACHE_READ = "gen_ai.usage.cache_read.input_tokens"
CACHE_WRITE = "gen_ai.usage.cache_creation.input_tokens"
TOOL = "gen_ai.tool.name"
TOOL_CALL = "gen_ai.tool.call.id"
TOOL_TYPE = "gen_ai.tool.type"
TOKEN_TYPE = "gen_ai.token.type"
ERROR = "error.type"

INVOKE_AGENT = "invoke_agent"
CHAT = "chat"
EXECUTE_TOOL = "execute_tool"

RUN = "retinue.run"
PATH = "retinue.path"
DEPTH = "retinue.depth"
PARENT_RUN = "retinue.parent.run"
PARENT_PATH = "retinue.parent.path"
RUN_MODE = "retinue.run.mode"
STATUS = "retinue.run.status"
OUTCOME = "retinue.outcome"
TURNS = "retinue.run.turns"
TURN = "retinue.turn"
ALLOWED = "retinue.approval.allowed"
BY = "retinue.approval.by"

TOKEN_USAGE = "gen_ai.client.token.usage"
TOKEN_BUCKETS = [4**n for n in range(14)]
INVOCATIONS = "retinue.invocations"

OTHER = "retinue"
_PROVIDERS = {
    "azure": "azure.ai.openai",
    "bedrock": "aws.bedrock",
    "gemini": "gcp.gemini",
    "google": "gcp.gemini",
    "google-cloud": "gcp.vertex_ai",
    "google-gla": "gcp.gemini",
    "google-vertex": "gcp.vertex_ai",
    "grok": "x_ai",
    "mistral": "mistral_ai",
    "moonshotai": "moonshot_ai",
    "openai-chat": "openai",
    "openai-responses": "openai",
    "xai": "x_ai",
}


def split_model_name(name: str) -> tuple[str, str]:
    """Split our name of a model into provider and model. A script is named by its file alone: its folder is private."""
    provider, colon, model = name.partition(":")
    if not colon:
        return OTHER, name
    return _PROVIDERS.get(provider, provider), PurePath(model).name if provider == "scripted" else model
