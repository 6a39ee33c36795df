"""What tells an MCP client of `retinue mcp serve`: where its configuration is, what to put there, and putting it there.

Adds one entry and changes nothing else: a file that cannot be read, or has comments that writing it would lose, is left
alone and said so. Every file that is changed is kept beside the new one.
"""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.core.errors import ConfigError
from retinue.files.atomic import replace_file

BACKUP = ".retinue-backup"
SPARE_SECONDS = 60  # that a call may take longer than its subagent
HERE = "${workspaceFolder}"
LARGEST = 4 * 1024 * 1024
Entry = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One client: its file in a project (or the user's own), the key its servers are under, an entry for ours, the
    command of its own that adds one, if it has such a command, and the key and unit of its timeout, if it has one."""

    title: str
    file: str
    under: str
    entry: Callable[[str, list[str]], Entry]
    adds: str = ""
    own: bool = False
    timeout: tuple[str, int] | None = None


def _stdio(command: str, words: list[str]) -> Entry:
    return {"type": "stdio", "command": command, "args": words}


def _stdio_here(command: str, words: list[str]) -> Entry:
    """For editors, which start servers in whatever folder."""
    return _stdio(command, words if "--project" in words else [*words, "--project", HERE])


def _plain(command: str, words: list[str]) -> Entry:
    return {"command": command, "args": words}


def _opencode(command: str, words: list[str]) -> Entry:
    return {"type": "local", "command": [command, *words], "enabled": True}


CLIENTS = {
    "claude": Kind("Claude Code", ".mcp.json", "mcpServers", _stdio, "claude mcp add {name} -- {line}"),
    "codex": Kind("Codex", "config.toml", "mcp_servers", _plain, own=True, timeout=("tool_timeout_sec", 1)),
    "gemini": Kind(
        "Gemini CLI",
        ".gemini/settings.json",
        "mcpServers",
        _plain,
        "gemini mcp add {name} {line}",
        timeout=("timeout", 1000),
    ),
    "opencode": Kind("opencode", "opencode.json", "mcp", _opencode),
    "cursor": Kind("Cursor", ".cursor/mcp.json", "mcpServers", _stdio_here),
    "vscode": Kind("VS Code", ".vscode/mcp.json", "servers", _stdio_here),
}


@dataclass(frozen=True)
class Wish:
    """`line` are the words of the command to start; `folder` is the project, whose file is written; `seconds` is what a
    subagent may take there."""

    client: str
    name: str
    line: Sequence[str]
    folder: Path
    seconds: float

    @property
    def kind(self) -> Kind:
        return CLIENTS[self.client]

    @property
    def file(self) -> Path:
        if not self.kind.own:
            file = self.folder / self.kind.file
            with_comments = file.with_name(f"{file.name}c")  # opencode reads either
            return with_comments if self.client == "opencode" and with_comments.exists() else file
        home = os.environ.get("CODEX_HOME")
        return (Path(home) if home else Path.home() / ".codex") / self.kind.file

    @property
    def entry(self) -> Entry:
        command, *words = self.line
        entry = self.kind.entry(command, words)
        if self.kind.timeout is not None:
            key, unit = self.kind.timeout
            entry[key] = math.ceil(self.seconds + SPARE_SECONDS) * unit
        return entry

    @property
    def text(self) -> str:
        """The entry alone, as the file has it."""
        if self.file.suffix == ".toml":
            return _toml(self.kind.under, self.name, self.entry)
        return json.dumps({self.kind.under: {self.name: self.entry}}, indent=2) + "\n"


def write(wish: Wish) -> str:
    """Puts it into the client's file; what was done, in words. ConfigError says why it was not."""
    file = Path(os.path.realpath(wish.file))
    before = _read(file)
    if before is None:
        _replace(file, wish.text, mode=0o644)
        return f"wrote {file}"
    after = _with_toml(wish, before) if file.suffix == ".toml" else _with_json(wish, before)
    if after == before:
        return f"{file} has it already; nothing was changed"
    kept = _backup(file)
    _replace(file, after, mode=file.stat().st_mode & 0o777)
    return f"added it to {file}; the file as it was is {kept}"


def _with_json(wish: Wish, before: str) -> str:
    """The file with the entry; only the entry's own place is changed."""
    try:
        found = json.loads(before or "{}", object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{wish.file} is not plain JSON ({error}), so it was left alone; {_by_hand(wish)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{wish.file} is not a JSON object, so it was left alone; {_by_hand(wish)}")
    servers = found.setdefault(wish.kind.under, {})
    if not isinstance(servers, dict):
        raise ConfigError(f"{wish.file}: '{wish.kind.under}' is not an object, so it was left alone")
    if servers.get(wish.name) == wish.entry:
        return before
    _free(wish, servers)
    servers[wish.name] = wish.entry
    return json.dumps(found, indent=_indent(before), ensure_ascii=False) + "\n"


def _with_toml(wish: Wish, before: str) -> str:
    """The file with the entry behind all that is there, comments and all."""
    try:
        servers = tomllib.loads(before).get(wish.kind.under, {})
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{wish.file} is not TOML ({error}), so it was left alone") from None
    if isinstance(servers, dict) and servers.get(wish.name) == wish.entry:
        return before
    if isinstance(servers, dict):
        _free(wish, servers)
    after = before + ("" if before.endswith("\n") or not before else "\n") + ("\n" if before else "") + wish.text
    try:
        tomllib.loads(after)
    except tomllib.TOMLDecodeError:
        raise ConfigError(
            f"{wish.file} has its '{wish.kind.under}' where nothing can be added behind it; {_by_hand(wish)}"
        ) from None
    return after


def _free(wish: Wish, servers: dict[str, Any]) -> None:
    if wish.name in servers:
        raise ConfigError(
            f"{wish.file} has another server called '{wish.name}': remove it there, or give --name for another name"
        )


def _by_hand(wish: Wish) -> str:
    return f"`retinue mcp install --client {wish.client}` prints what to add by hand"


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _indent(text: str) -> int | str:
    """As the file has it."""
    for line in text.splitlines()[1:]:
        space = line[: len(line) - len(line.lstrip())]
        if space:
            return "\t" if space.startswith("\t") else len(space)
    return 2


def _toml(under: str, name: str, entry: Entry) -> str:
    """A table of strings, numbers and lists of strings: JSON and TOML write those alike."""
    lines = [f"[{under}.{json.dumps(name)}]" if not name.isidentifier() else f"[{under}.{name}]"]
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in entry.items()), ""])


def _read(file: Path) -> str | None:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    if len(data) > LARGEST:
        raise ConfigError(f"{file} is larger than {LARGEST // 1024 // 1024} MiB, so it was left alone")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text, so it was left alone") from None


def _backup(file: Path) -> Path:
    """A copy under a name that is free."""
    number = 1
    while True:
        kept = file.with_name(f"{file.name}{BACKUP}{'' if number == 1 else f'-{number}'}")
        try:
            fd = os.open(kept, os.O_CREAT | os.O_EXCL | os.O_WRONLY, file.stat().st_mode & 0o777)
        except FileExistsError:
            number += 1
            continue
        except OSError as error:
            raise ConfigError(f"cannot write {kept}: {error.strerror or error}") from None
        with os.fdopen(fd, "wb") as out:
            out.write(file.read_bytes())
        return kept


def _replace(file: Path, text: str, *, mode: int) -> None:
    """The whole new content or the whole old one."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text.encode(), mode=mode)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from None
