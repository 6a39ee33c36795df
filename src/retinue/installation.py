"""The installation: the tool that installed Retinue, and the command that adds packages to its environment.

Commands name only the missing packages, never Retinue itself. Retinue is not on the public index, where a stranger
could register its name.
"""

from __future__ import annotations

import importlib.util
import shlex
import sys
from pathlib import Path

ADAPTERS = "pydantic-ai-slim"


def make_install_command(*packages: str) -> str:
    """Return the command that installs `packages` into the environment of this process, with pipx, uv or pip."""
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").is_file():
        return shlex.join(["pipx", "inject", prefix.name, *packages])
    if (prefix / "uv-receipt.toml").is_file() or importlib.util.find_spec("pip") is None:
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *packages])
    return shlex.join([sys.executable, "-m", "pip", "install", *packages])


def find_adapter_package(provider: str) -> str:
    """Return the package that a model provider needs, with its extra if there is one for the provider."""
    from importlib import metadata  # noqa: PLC0415 - slow to import, and most commands name no package

    try:
        extras = metadata.metadata(ADAPTERS).get_all("Provides-Extra") or []
    except metadata.PackageNotFoundError:
        return f"{ADAPTERS}[anthropic,openai]"
    named = next((extra for extra in (provider, provider.partition("-")[0]) if extra in extras), "")
    return f"{ADAPTERS}[{named}]" if named else ADAPTERS
