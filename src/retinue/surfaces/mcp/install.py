"""Entries for `retinue mcp serve` in the configuration files of MCP clients: their location, content and installation.

Installing adds one entry and changes nothing else. A file that cannot be read, or whose comments would be lost, is
left alone, and the error says so. Every changed file is backed up next to the new one.

Some clients pass only a part of their environment to a server. Codex passes a few variables. Gemini CLI passes all but
those that look like secrets, and only a few in a GitHub Action. The entries for these clients name the variables that
Retinue reads.
"""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retinue.config.models import MODEL_VARIABLES, OTHER_MODEL_VARIABLES
from retinue.core.errors import ConfigError
from retinue.files.atomic import replace_file
from retinue.protocol.inherited_limits import BAGGAGE, COST, DEADLINE, DEPTH, TOKENS, TRACE
from retinue.protocol.reports import ADDRESS, CPE_ADDRESS

BACKUP = ".retinue-backup"
SPARE_SECONDS = 60  # time that a call may take beyond its subagent's timeout
WORKSPACE_FOLDER = "${workspaceFolder}"
MAX_BYTES = 4 * 1024 * 1024
Entry = dict[str, Any]
# Variables that Retinue or its HTTP libraries read. Names that look like secrets are listed separately.
HIDDEN_VARIABLES = (TOKENS, "SSL_CERT_FILE", "SSL_CERT_DIR")
OTHER_VARIABLES = (
    *(DEPTH, DEADLINE, COST, TRACE, BAGGAGE, ADDRESS, CPE_ADDRESS, "RETINUE_DELEGATION_DIRECTORY", "RETINUE_TRACEBACK"),
    *("XDG_CONFIG_HOME", "XDG_STATE_HOME", "XDG_RUNTIME_DIR", "XDG_DATA_HOME"),
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "all_proxy", "no_proxy"),
    *("DOCKER_HOST", "DOCKER_CONTEXT", "CONTAINER_HOST"),
)
TELEMETRY_PREFIX = "OTEL_"


def list_passed_variables(environ: Mapping[str, str]) -> list[str]:
    """Return the variables for the model, its key and its address, and all other variables that Retinue reads and are
    set."""
    telemetry = sorted(name for name in environ if name.startswith(TELEMETRY_PREFIX))
    others = (*OTHER_MODEL_VARIABLES, *OTHER_VARIABLES, *telemetry)
    return [*MODEL_VARIABLES, *(name for name in others if environ.get(name))]


def remove_unset_variables(environ: MutableMapping[str, str]) -> None:
    """Remove variables that a client passed although the user has not set them: empty ones of ours, and any with the
    literal value `$NAME`."""
    ours = (*MODEL_VARIABLES, *OTHER_MODEL_VARIABLES, *HIDDEN_VARIABLES, *OTHER_VARIABLES)
    for name, value in list(environ.items()):
        if value in (f"${name}", f"${{{name}}}") or (name in ours and not value.strip()):
            del environ[name]


@dataclass(frozen=True)
class ClientKind:
    """A kind of client.

    `file` is its configuration file in a project, or in the user's home if `own` is set. `under` is the key that holds
    its servers, `type` the type of an entry, `add_command` the client's own command for adding an entry, and `timeout`
    the key and unit of its timeout. An `editor` starts servers in any folder. `forward` returns the keys of an entry
    that forward variables by name; None if a server gets the client's whole environment."""

    title: str
    file: str
    under: str
    type: str = ""
    add_command: str = ""
    own: bool = False
    editor: bool = False
    timeout: tuple[str, int] | None = None
    forward: Callable[[Sequence[str]], Entry] | None = None


def _forward_to_codex(names: Sequence[str]) -> Entry:
    return {"env_vars": list(dict.fromkeys((*names, *HIDDEN_VARIABLES, *OTHER_VARIABLES)))}


def _forward_to_gemini(names: Sequence[str]) -> Entry:
    return {"env": {name: f"${name}" for name in dict.fromkeys((*names, *HIDDEN_VARIABLES))}}


CLIENTS = {
    "claude": ClientKind(
        "Claude Code", ".mcp.json", "mcpServers", "stdio", add_command="claude mcp add {name} -- {line}"
    ),
    "codex": ClientKind(
        "Codex", "config.toml", "mcp_servers", own=True, timeout=("tool_timeout_sec", 1), forward=_forward_to_codex
    ),
    "gemini": ClientKind(
        "Gemini CLI",
        ".gemini/settings.json",
        "mcpServers",
        add_command="gemini mcp add {variables} --timeout {timeout} {name} {line}",
        timeout=("timeout", 1000),
        forward=_forward_to_gemini,
    ),
    "opencode": ClientKind("opencode", "opencode.json", "mcp", "local"),
    "cursor": ClientKind("Cursor", ".cursor/mcp.json", "mcpServers", "stdio", editor=True),
    "vscode": ClientKind("VS Code", ".vscode/mcp.json", "servers", "stdio", editor=True),
}


@dataclass(frozen=True)
class Installation:
    """The entry for one client. `line` is the command that starts the server, `folder` the project, `seconds` the
    timeout of its subagents, and `variables` the environment variables that the server needs."""

    client: str
    name: str
    line: Sequence[str]
    folder: Path
    seconds: float
    variables: Iterable[str] = ()

    @property
    def kind(self) -> ClientKind:
        return CLIENTS[self.client]

    @property
    def file(self) -> Path:
        if not self.kind.own:
            file = self.folder / self.kind.file
            with_comments = file.with_name(f"{file.name}c")  # opencode reads both names
            return with_comments if self.client == "opencode" and with_comments.exists() else file
        home = os.environ.get("CODEX_HOME")
        return (Path(home) if home else Path.home() / ".codex") / self.kind.file

    @property
    def entry(self) -> Entry:
        kind, (command, *words) = self.kind, self.line
        if kind.editor and "--project" not in words:
            words += ["--project", WORKSPACE_FOLDER]
        entry: Entry = {"type": kind.type} if kind.type else {}
        if self.client == "opencode":
            entry |= {"command": [command, *words], "enabled": True}
        else:
            entry |= {"command": command, "args": words}
        if kind.timeout is not None:
            key, unit = kind.timeout
            entry[key] = math.ceil(self.seconds + SPARE_SECONDS) * unit
        if kind.forward is not None:
            entry |= kind.forward(list(self.variables))
        return entry

    @property
    def add_command(self) -> str:
        """Return the client's own command for adding the entry, or an empty string if there is none."""
        entry = self.entry
        settings = [f"-e {shlex.quote(f'{name}={value}')}" for name, value in entry.get("env", {}).items()]
        return self.kind.add_command.format(
            name=self.name, line=shlex.join(self.line), timeout=entry.get("timeout"), variables=" ".join(settings)
        )

    @property
    def text(self) -> str:
        """Return the entry alone, as written in the file."""
        if self.file.suffix == ".toml":
            return _render_toml(self.kind.under, self.name, self.entry)
        return json.dumps({self.kind.under: {self.name: self.entry}}, indent=2) + "\n"


def write_entry(target: Installation) -> str:
    """Write the entry into the client's file, and return a message about the change. Raises ConfigError."""
    file = Path(os.path.realpath(target.file))
    before = _read_file(file)
    if before is None:
        _write_file(file, target.text, mode=0o644)
        return f"wrote {file}"
    after = _add_to_toml(target, before) if file.suffix == ".toml" else _add_to_json(target, before)
    if after == before:
        return f"{file} has it already; nothing was changed"
    kept = _back_up(file)
    _write_file(file, after, mode=file.stat().st_mode & 0o777)
    return f"added it to {file}; the file as it was is {kept}"


def _add_to_json(target: Installation, before: str) -> str:
    """Return the content of the JSON file with the entry added. Nothing else changes."""
    try:
        found = json.loads(before or "{}", object_pairs_hook=_make_object)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{target.file} is not plain JSON ({error}), so it was left alone; {_explain_manual_way(target)}"
        ) from None
    if not isinstance(found, dict):
        raise ConfigError(f"{target.file} is not a JSON object, so it was left alone; {_explain_manual_way(target)}")
    servers = found.setdefault(target.kind.under, {})
    if not isinstance(servers, dict):
        raise ConfigError(f"{target.file}: '{target.kind.under}' is not an object, so it was left alone")
    entry = _merge_entry(target, servers)
    if servers.get(target.name) == entry:
        return before
    servers[target.name] = entry
    return json.dumps(found, indent=_find_indent(before), ensure_ascii=False) + "\n"


def _add_to_toml(target: Installation, before: str) -> str:
    """Return the content of the TOML file with the entry at its end or in its old place. Comments stay."""
    try:
        found = tomllib.loads(before)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{target.file} is not TOML ({error}), so it was left alone") from None
    servers = found.setdefault(target.kind.under, {})
    old: Entry | None = None
    if isinstance(servers, dict):
        old, entry = servers.get(target.name), _merge_entry(target, servers)
        servers[target.name] = entry
    if old is None:
        after = before + ("" if before.endswith("\n") or not before else "\n") + ("\n" if before else "") + target.text
    else:
        after = _change_toml_keys(before, target, {key: entry[key] for key in entry if entry[key] != old.get(key)})
    try:
        written = tomllib.loads(after)
    except tomllib.TOMLDecodeError:
        written = {}
    if written != found:
        raise ConfigError(
            f"{target.file} keeps '{target.kind.under}' where nothing can be added; {_explain_manual_way(target)}"
        )
    return after


def _change_toml_keys(before: str, target: Installation, changed: Entry) -> str:
    """Return the content of the TOML file with new values for the `changed` keys of the entry. Multi-line values are
    not replaced correctly, so the caller checks the result."""
    head = re.compile(rf"^\[{re.escape(target.kind.under)}\.\"?{re.escape(target.name)}\"?\][^\n]*\n", re.MULTILINE)
    start = head.search(before)
    if start is None:
        return before
    end = re.compile(r"^\s*\[", re.MULTILINE).search(before, start.end())
    section = before[start.end() : len(before) if end is None else end.start()]
    for key, value in changed.items():
        line = f"{key} = {json.dumps(value)}"
        pattern = re.compile(rf"^{re.escape(key)}\s*=[^\n]*", re.MULTILINE)
        section, count = pattern.subn(line.replace("\\", "\\\\"), section)
        section = section if count else f"{line}\n{section}"
    return before[: start.end()] + section + ("" if end is None else before[end.start() :])


def _merge_entry(target: Installation, servers: dict[str, Any]) -> Entry:
    """Return the entry to write. An existing entry of ours is updated and keeps the user's additions. Raises
    ConfigError if another server has the name."""
    entry = target.entry
    if target.name not in servers:
        return entry
    old = servers[target.name]
    if not isinstance(old, dict) or _read_words(old) != _read_words(entry):
        raise ConfigError(
            f"{target.file} has another server called '{target.name}': remove it there, or give --name for another name"
        )
    merged = {**old, **entry}
    if isinstance(old.get("env"), dict) and "env" in entry:
        merged["env"] = {**old["env"], **entry["env"]}
    if isinstance(old.get("env_vars"), list) and "env_vars" in entry:
        merged["env_vars"] = [*old["env_vars"], *(name for name in entry["env_vars"] if name not in old["env_vars"])]
    if "enabled" in old:
        merged["enabled"] = old["enabled"]
    return merged


def _read_words(entry: Entry) -> list[object]:
    """Return the command of an entry as words, with the program's name instead of its path."""
    command, words = entry.get("command"), entry.get("args", [])
    every = [*(command if isinstance(command, list) else [command]), *(words if isinstance(words, list) else [words])]
    return [Path(str(word)).name if at == 0 else word for at, word in enumerate(every)]


def _explain_manual_way(target: Installation) -> str:
    return f"`retinue mcp install --client {target.client}` prints what to add by hand"


def _make_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key is there twice")
    return found


def _find_indent(text: str) -> int | str:
    """Return the indentation of a JSON file."""
    for line in text.splitlines()[1:]:
        space = line[: len(line) - len(line.lstrip())]
        if space:
            return "\t" if space.startswith("\t") else len(space)
    return 2


def _render_toml(under: str, name: str, entry: Entry) -> str:
    """Return a TOML table of strings, numbers and lists of strings. TOML writes these values as JSON does."""
    lines = [f"[{under}.{json.dumps(name)}]" if not name.isidentifier() else f"[{under}.{name}]"]
    return "\n".join([*lines, *(f"{key} = {json.dumps(value)}" for key, value in entry.items()), ""])


def _read_file(file: Path) -> str | None:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror or error}") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{file} is larger than {MAX_BYTES // 1024 // 1024} MiB, so it was left alone")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text, so it was left alone") from None


def _back_up(file: Path) -> Path:
    """Copy the file to an unused name and return its path."""
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


def _write_file(file: Path, text: str, *, mode: int) -> None:
    """Replace the file atomically: readers see the old content or the new."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, text.encode(), mode=mode)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror or error}") from None
