"""Hints for commands that fail only because of the sandbox: a program is not visible, no network, no memory."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

from retinue.sandbox.exposed_paths import find_program_paths

MOST = 3
NOT_SHOWN = (
    "[{name} is on this machine, at {path}, but not in the sandbox: `expose_paths: [{shown}]` in the user's "
    "retinue.yaml would show it]"
)
NOT_IN_IMAGE = (
    "[{name} is on this machine, at {path}, but not in the image that this run has; `container_image` names it]"
)
NO_NETWORK = "[this run has no network; `network: [HOST, ...]` in the user's retinue.yaml names what it may reach]"
NO_MEMORY = (
    "[the kernel killed a process here because the memory ran out: this run may use {mib} MiB; "
    "`resource_limits: {{memory_mib: N}}` in the user's retinue.yaml allows another number]"
)
# The hints match the output of foreign programs: no code exists.
_NAME = r"([A-Za-z0-9_.+-]{1,64})"
_MISSING = re.compile(
    rf"(?:^|: ){_NAME}: (?:command )?not found$"
    rf"|env: [\u2018']?{_NAME}[\u2019']?: No such file or directory$"
    rf"|make(?:\[\d+\])?: {_NAME}: No such file or directory$",
    re.MULTILINE,
)
_INTERPRETER = re.compile(r": (/[^\s:]{1,4000}): bad interpreter: No such file or directory$", re.MULTILINE)
_UNREACHABLE = re.compile(
    r"Could not resolve host|Temporary failure in name resolution|Name or service not known|Network is unreachable"
    r"|getaddrinfo (?:ENOTFOUND|EAI_AGAIN)|failed to lookup address|dial (?:tcp|udp): lookup"
)


def find_program_hint(said: str) -> str:
    """Return hints to append to the output of a failed command; "" if the program is not on this machine either."""
    notes = []
    for name, path in _find_missing_programs(said):
        shown = find_program_paths(path, Path(path).parent, os.environ)
        if shown:
            notes.append(NOT_SHOWN.format(name=name, path=path, shown=", ".join(shown)))
    return "\n".join(notes[:MOST])


def find_image_hint(said: str) -> str:
    """Return such hints for a container, whose programs come from its image."""
    return "\n".join([NOT_IN_IMAGE.format(name=name, path=path) for name, path in _find_missing_programs(said)][:MOST])


def find_offline_hint(said: str) -> str:
    """Return a hint for a command that failed because there is no network."""
    return NO_NETWORK if _UNREACHABLE.search(said) else ""


def _find_missing_programs(said: str) -> list[tuple[str, str]]:
    names = ["".join(groups) for groups in _MISSING.findall(said)]
    found = [(name, path) for name in dict.fromkeys(names) if (path := shutil.which(name)) is not None]
    return found + [(Path(path).name, path) for path in _INTERPRETER.findall(said) if os.access(path, os.X_OK)]
