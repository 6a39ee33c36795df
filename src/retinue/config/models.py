"""The default model: the table of providers with their default models, and the order of lookup.

The order is `--model`, `model:` in retinue.yaml, RETINUE_MODEL, and the default of the only provider whose key is set.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass

from retinue.installation import find_adapter_package, make_install_command

VARIABLE = "RETINUE_MODEL"


@dataclass(frozen=True)
class Provider:
    """A provider, which is also the name of the package it needs, and its default model. `key` and `address` are the
    variables with its key and with another address of its API."""

    name: str
    default: str
    key: str
    address: str

    def is_installed(self) -> bool:
        return all(importlib.util.find_spec(package) is not None for package in ("pydantic_ai", self.name))

    def has_key(self, environ: Mapping[str, str]) -> bool:
        return bool(environ.get(self.key, "").strip())


PROVIDERS = (
    Provider("anthropic", "anthropic:claude-sonnet-5-5", key="ANTHROPIC_API_KEY", address="ANTHROPIC_BASE_URL"),
    Provider("openai", "openai:gpt-6.1-terra", key="OPENAI_API_KEY", address="OPENAI_BASE_URL"),
)
# Variables that the SDKs of these and other providers read. Some programs that start us pass on only listed variables.
MODEL_VARIABLES = (VARIABLE, *(name for provider in PROVIDERS for name in (provider.key, provider.address)))
OTHER_MODEL_VARIABLES = (
    *("ANTHROPIC_AUTH_TOKEN", "ANTHROPIC_CUSTOM_HEADERS", "OPENAI_ORG_ID", "OPENAI_PROJECT_ID"),
    *("OLLAMA_BASE_URL", "OLLAMA_API_KEY", "VLLM_BASE_URL", "VLLM_API_KEY", "OPENROUTER_API_KEY"),
    *("GEMINI_API_KEY", "GOOGLE_API_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "GOOGLE_CLOUD_PROJECT"),
    *("GOOGLE_CLOUD_LOCATION", "AZURE_OPENAI_API_KEY", "AZURE_OPENAI_ENDPOINT", "OPENAI_API_VERSION"),
    *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_BEARER_TOKEN_BEDROCK", "AWS_PROFILE"),
    *("AWS_REGION", "AWS_DEFAULT_REGION", "MISTRAL_API_KEY", "GROQ_API_KEY", "GROQ_BASE_URL", "DEEPSEEK_API_KEY"),
    *("XAI_API_KEY", "CO_API_KEY", "CEREBRAS_API_KEY", "FIREWORKS_API_KEY", "TOGETHER_API_KEY", "HF_TOKEN"),
    *("MOONSHOTAI_API_KEY", "MOONSHOTAI_BASE_URL", "GITHUB_API_KEY", "VERCEL_AI_GATEWAY_API_KEY"),
)
NO_MODEL = (
    "no model{why}: give --model MODEL, write 'model: MODEL' in {where}, set RETINUE_MODEL, or set the key of one "
    f"provider ({' or '.join(provider.key for provider in PROVIDERS)}); MODEL is anthropic:NAME, openai:NAME, another "
    "PROVIDER:NAME, or scripted:FILE"
)


def explain_missing_model(where: object) -> str:
    """Return the error for a missing model: all four ways to choose one, and the reason if several keys are set."""
    keys = [provider.key for provider in PROVIDERS if provider.has_key(os.environ)]
    why = f" ({' and '.join(keys)} are set, so none is the default)" if len(keys) > 1 else ""
    return NO_MODEL.format(where=where, why=why)


def find_default_model(environ: Mapping[str, str]) -> str | None:
    """Return the default model from the environment, or None if there is none or several keys are set."""
    named = environ.get(VARIABLE, "").strip()
    if named:
        return named
    with_key = [provider for provider in PROVIDERS if provider.has_key(environ)]
    return with_key[0].default if len(with_key) == 1 else None


def explain_missing_key(model: str, environ: Mapping[str, str]) -> str:
    """Return the error for a model of a listed provider whose key is not set, or an empty text. Does not import the
    provider's library. A provider with a base URL may need no key, so it gives no error."""
    vendor = model.partition(":")[0].partition("-")[0]
    for provider in PROVIDERS:
        if vendor == provider.name and not provider.has_key(environ) and not environ.get(provider.address):
            return f"model {model!r}: Set the `{provider.key}` environment variable"
    return ""


def find_install_command(name: str) -> str:
    """Return the command that installs the packages of this model, or an empty text if they are installed or
    unknown."""
    prefix = name.partition(":")[0]
    for provider in PROVIDERS:
        if prefix == provider.name or prefix.startswith(f"{provider.name}-"):
            return "" if provider.is_installed() else make_install_command(find_adapter_package(provider.name))
    return "" if importlib.util.find_spec("pydantic_ai") is not None else make_install_command(find_adapter_package(""))
