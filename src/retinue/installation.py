"""The installation: which tool installed this package, and the command that adds packages to it.

Commands name the packages that are missing, never this one: it is not on the public index, where a stranger could
register its name.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import shlex
import sys
from pathlib import Path

ADAPTERS = "pydantic-ai-slim"


def make_install_command(*packages: str) -> str:
    """Return the command that adds these packages to the environment that runs us: a tool of uv, an application of
    pipx, or any other environment."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").is_file():
        return shlex.join(["pipx", "inject", prefix.name, *packages])
    if (prefix / "uv-receipt.toml").is_file() or importlib.util.find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *packages])
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def find_adapter_package(provider: str) -> str:
    """Return the package with the extra that a provider of models needs; without an extra if it has none."""
    try:
        extras = importlib.metadata.metadata(ADAPTERS).get_all("Provides-Extra") or []
    except importlib.metadata.PackageNotFoundError:
        return f"{ADAPTERS}[anthropic,openai]"
    named = next((extra for extra in (provider, provider.partition("-")[0]) if extra in extras), "")
    return f"{ADAPTERS}[{named}]" if named else ADAPTERS
