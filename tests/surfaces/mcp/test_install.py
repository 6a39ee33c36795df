"""`retinue mcp install`: what each client is told, and that nothing of its file is lost."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.models import streams
from tests.models.server import KEY, Server
from tests.surfaces.cli.shell import PROVIDER, Project, environment, find_quick_command
from tests.surfaces.mcp.kit import Pipe

SERVE = ["mcp", "serve"]
FILES = {
    "claude": ".mcp.json",
    "gemini": ".gemini/settings.json",
    "opencode": "opencode.json",
    "cursor": ".cursor/mcp.json",
    "vscode": ".vscode/mcp.json",
}


def install(project: Project, client: str, *more: str, **environment: str) -> Any:
    home = {"HOME": str(project.folder.parent), "CODEX_HOME": "", **environment}
    return project.retinue("mcp", "install", "--client", client, *more, **home)


def entry(client: str, text: str) -> dict[str, Any]:
    found: dict[str, Any]
    if client == "codex":
        found = tomllib.loads(text)["mcp_servers"]["retinue"]
        return found
    under = {"vscode": "servers", "opencode": "mcp"}.get(client, "mcpServers")
    found = json.loads(text)[under]["retinue"]
    return found


@pytest.mark.parametrize("client", [*FILES, "codex"])
def test_what_is_printed_is_what_is_written(project: Project, client: str) -> None:
    printed = install(project, client)
    assert printed.returncode == 0 and not printed.stderr
    start = printed.stdout.index("[mcp_servers" if client == "codex" else "{\n")
    written = install(project, client, "--write")
    file = project.folder.parent / ".codex/config.toml" if client == "codex" else project.folder / FILES[client]
    assert str(file) in printed.stdout and written.stdout == f"wrote {file}\n"
    assert file.read_text() == printed.stdout[start:]
    found = entry(client, file.read_text())
    if client == "opencode":
        assert found["type"] == "local" and found["command"][-2:] == SERVE and found["enabled"] is True
    else:
        assert isinstance(found["command"], str) and [word for word in SERVE if word in found["args"]] == SERVE
    again = install(project, client, "--write")
    assert "nothing was changed" in again.stdout
    assert [path.name for path in file.parent.iterdir() if "retinue-" in path.name] == []


@pytest.mark.requirement("MASS-47")
@pytest.mark.parametrize("seconds", [None, 3000])
def test_clients_that_have_a_timeout_get_one_that_a_subagent_fits_in(project: Project, seconds: int | None) -> None:
    if seconds is not None:
        settings = f"orchestrator: {{coordination: {{subagent_default_timeout: {seconds}}}}}\n"
        (project.folder / "retinue.yaml").write_text(settings)
        assert project.retinue("trust", "--yes", HOME=str(project.folder.parent)).returncode == 0
    whole = (seconds or 1800) + 60
    assert entry("codex", install(project, "codex").stdout.partition(":\n\n")[2])["tool_timeout_sec"] == whole
    printed = install(project, "gemini").stdout
    assert entry("gemini", printed[printed.index("{") :])["timeout"] == whole * 1000


SHELL = {
    "ANTHROPIC_API_KEY": KEY,
    "RETINUE_MODEL": "anthropic:claude-x",
    "TRACKER_TOKEN": "t1",
    "XDG_STATE_HOME": "/s",
    "RETINUE_SUBAGENT_TOKENS": "5000000",
}
CODEX_PASSES = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "SHELL", "TERM", "TMPDIR", "TZ", "USER")
GEMINI_DROPS = re.compile("TOKEN|SECRET|PASSWORD|KEY|AUTH|CREDENTIAL|PRIVATE|CERT")


def started_by(client: str, found: dict[str, Any], shell: dict[str, str]) -> dict[str, str]:
    """The environment that the client gives the server of this entry, when it was started in this shell."""
    if client == "codex":
        return {name: value for name, value in shell.items() if name in (*CODEX_PASSES, *found["env_vars"])}
    if client == "gemini":
        passed = {name: value for name, value in shell.items() if GEMINI_DROPS.search(name) is None}
        return passed | {name: shell.get(value.removeprefix("$"), "") for name, value in found["env"].items()}
    return shell


@pytest.mark.finding("M1")
@pytest.mark.parametrize("client", ["claude", "codex", "gemini", "opencode"])
async def test_a_server_that_a_client_starts_has_the_key_the_model_and_the_address(
    project: Project, client: str
) -> None:
    """The keys are in the user's shell; base URL and model too. A subagent answers with what was installed."""
    printed = await asyncio.to_thread(install, project, client)
    found = entry(client, printed.stdout[printed.stdout.index("[mcp_servers" if client == "codex" else "{\n") :])
    async with Server(streams.said("the model was reached")) as server:
        shell = environment(**SHELL | {"ANTHROPIC_BASE_URL": server.environ()["ANTHROPIC_BASE_URL"]})
        del shell["XDG_STATE_HOME"]
        env = started_by(client, found, shell) | environment()
        command = found["command"] if client == "opencode" else [found["command"], *found["args"]]
        if (
            client != "claude"
        ):  # what is installed is the same for all: started once, the others differ in what they pass
            command = [*find_quick_command(*PROVIDER), *command[command.index("mcp") :]]
        process = await asyncio.create_subprocess_exec(
            *command, "--runtime", "inherited", cwd=project.folder, env=env, stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        pipe = Pipe(process)
        await pipe.hello()
        reply = await pipe.call("spawn_subagents", tasks=[{"task": "look"}])
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
    assert "the model was reached" in json.dumps(reply), reply
    assert [KEY in str(asked.headers) for asked in server.requests] == [True]


@pytest.mark.finding("M1")
@pytest.mark.parametrize("client", ["codex", "gemini"])
def test_an_entry_names_what_the_project_s_own_servers_and_other_providers_need(project: Project, client: str) -> None:
    settings = 'mcp_servers: {tracker: {command: "x", env: {T: "${TRACKER_TOKEN}"}}}\n'
    (project.folder / "retinue.yaml").write_text(settings)
    assert project.retinue("trust", "--yes", HOME=str(project.folder.parent)).returncode == 0
    printed = install(project, client, OPENROUTER_API_KEY="sk-or-0123456789abcdef").stdout
    assert "sk-or" not in printed  # by name, never the value
    found = entry(client, printed[printed.index("[mcp_servers" if client == "codex" else "{\n") :])
    env = started_by(client, found, SHELL | {"OPENROUTER_API_KEY": "k"})
    assert {name for name, value in env.items() if value} == {*SHELL, "OPENROUTER_API_KEY"}


@pytest.mark.finding("M1")
@pytest.mark.parametrize("client", ["codex", "gemini"])
def test_all_that_is_set_in_the_shell_and_that_we_read_reaches_the_server(project: Project, client: str) -> None:
    """Also where Gemini CLI passes on hardly anything: in a GitHub Action, or a proxy's address with a password."""
    shell = SHELL | {
        "XDG_CONFIG_HOME": "/c", "HTTPS_PROXY": "http://me:secret@127.0.0.1:9", "RETINUE_TRACEBACK": "1",
        "RETINUE_SUBAGENT_DEPTH": "2", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9", "BAGGAGE": "a=b",
    }  # fmt: skip
    del shell["TRACKER_TOKEN"]
    set_here = {name: value for name, value in shell.items() if name not in ("XDG_STATE_HOME", "XDG_CONFIG_HOME")}
    printed = install(project, client, **set_here, XDG_STATE_HOME=str(project.folder.parent / "state"),
                      XDG_CONFIG_HOME=str(project.folder.parent / "config")).stdout  # fmt: skip
    assert "secret" not in printed  # by name, never the value
    found = entry(client, printed[printed.index("[mcp_servers" if client == "codex" else "{\n") :])
    if client == "gemini":
        env = {name: shell.get(value.removeprefix("$"), "") for name, value in found["env"].items()}
    else:
        env = started_by(client, found, shell)
    assert {name: value for name, value in env.items() if value} == shell


@pytest.mark.finding("M1")
def test_the_printed_command_of_gemini_adds_the_same_entry(project: Project) -> None:
    printed = install(project, "gemini").stdout
    found = entry("gemini", printed[printed.index("{\n") :])
    words = shlex.split(next(line for line in printed.splitlines() if "gemini mcp add" in line))
    passed = [words[at + 1] for at, word in enumerate(words) if word == "-e"]
    assert passed == [f"{name}={value}" for name, value in found["env"].items()]
    assert words[words.index("--timeout") + 1 :] == [str(found["timeout"]), "retinue", found["command"], *found["args"]]


@pytest.mark.finding("M1")
def test_a_variable_that_is_passed_on_but_not_set_counts_as_not_set(project: Project) -> None:
    """Gemini CLI passes an unset variable on as an empty or an unexpanded one."""
    from retinue.surfaces.mcp.install import remove_unset_variables

    environ = {
        "RETINUE_MODEL": " ", "ANTHROPIC_BASE_URL": "", "OPENAI_API_KEY": "$OPENAI_API_KEY", "MINE": "${MINE}",
        "RETINUE_SUBAGENT_TOKENS": "", "OTHER": "", "ANTHROPIC_API_KEY": KEY,
    }  # fmt: skip
    remove_unset_variables(environ)
    assert environ == {"OTHER": "", "ANTHROPIC_API_KEY": KEY}


@pytest.mark.parametrize("client", FILES)
def test_other_keys_stay_and_the_old_file_is_kept(project: Project, client: str) -> None:
    file = project.folder / FILES[client]
    file.parent.mkdir(exist_ok=True)
    under = {"vscode": "servers", "opencode": "mcp"}.get(client, "mcpServers")
    values = {"theme": "dark ☾", under: {"other": {"command": "x"}}, "z": [1, {"a": None}]}
    before = json.dumps(values, indent=4, ensure_ascii=False)
    file.write_text(before)
    file.chmod(0o600)
    assert install(project, client, "--write").returncode == 0
    after = json.loads(file.read_text())
    del after[under]["retinue"]
    assert after == values and "☾" in file.read_text()
    assert '\n    "' in file.read_text()  # indented as it was
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    kept = file.with_name(f"{file.name}.retinue-backup")
    assert kept.read_text() == before and stat.S_IMODE(kept.stat().st_mode) == 0o600


def test_comments_of_a_toml_file_stay(project: Project) -> None:
    home = project.folder.parent / "codex home"
    home.mkdir()
    before = '# mine\nmodel = "o9" # best\n\n[mcp_servers.other] # another\ncommand = "x"'
    (home / "config.toml").write_text(before)
    done = install(project, "codex", "--write", CODEX_HOME=str(home))
    assert done.returncode == 0, done.stderr
    after = (home / "config.toml").read_text()
    assert after.startswith(before + "\n\n[mcp_servers.retinue]\n")
    assert set(tomllib.loads(after)["mcp_servers"]) == {"other", "retinue"}
    assert (home / "config.toml.retinue-backup").read_text() == before


@pytest.mark.finding("M1")
@pytest.mark.parametrize("client", ["codex", "gemini"])
def test_installing_again_adds_a_variable_and_keeps_what_the_user_changed(project: Project, client: str) -> None:
    file = (
        project.folder / ".gemini/settings.json" if client == "gemini" else project.folder.parent / ".codex/config.toml"
    )
    assert install(project, client, "--write").returncode == 0
    if client == "gemini":
        values = json.loads(file.read_text())
        values["mcpServers"]["retinue"] |= {"trust": True}
        values["mcpServers"]["retinue"]["env"]["MINE"] = "1"
        file.write_text(json.dumps(values, indent=2))
    else:
        text = file.read_text().replace(
            "[mcp_servers.retinue]\n", "[mcp_servers.retinue] # subagents\nrequired = true\n"
        )
        file.write_text(text.replace('["RETINUE_MODEL"', '["MINE", "RETINUE_MODEL"') + "\n[tui] # mine\n")
    before = file.read_text()
    assert "nothing was changed" in install(project, client, "--write").stdout and file.read_text() == before
    done = install(project, client, "--write", GROQ_API_KEY=KEY)
    assert done.returncode == 0, done.stderr
    after = file.read_text()
    assert KEY not in after
    if client == "gemini":
        entry = json.loads(after)["mcpServers"]["retinue"]
        assert entry["trust"] is True and {"MINE": "1", "GROQ_API_KEY": "$GROQ_API_KEY"}.items() <= entry["env"].items()
    else:
        assert "[mcp_servers.retinue] # subagents\nrequired = true\n" in after and after.endswith("\n[tui] # mine\n")
        assert {"MINE", "GROQ_API_KEY"} <= set(tomllib.loads(after)["mcp_servers"]["retinue"]["env_vars"])


@pytest.mark.parametrize(
    ("client", "text", "said"),
    [
        ("claude", '{"mcpServers": {"retinue": {"command": []}}}', "--name"),
        ("vscode", '{\n  // mine\n  "servers": {}\n}', "is not plain JSON"),
        ("claude", "{", "is not plain JSON"),
        ("claude", "[]", "is not a JSON object"),
        ("claude", '{"mcpServers": []}', "'mcpServers' is not an object"),
        ("claude", '{"a": 1, "a": 2}', "a key is there twice"),
        ("claude", '{"mcpServers": {"retinue": {"command": "mine"}}}', "--name"),
        ("claude", "[" * 100_000, "is not plain JSON"),
        ("codex", "= no", "is not TOML"),
        ("codex", 'mcp_servers = {other = {command = "x"}}', "nothing can be added;"),
        ("codex", '[mcp_servers.retinue]\ncommand = "mine"', "--name"),
    ],
)
def test_a_file_that_would_lose_something_is_left_alone(project: Project, client: str, text: str, said: str) -> None:
    file = project.folder.parent / ".codex/config.toml" if client == "codex" else project.folder / FILES[client]
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    done = install(project, client, "--write")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr
    assert file.read_text() == text
    assert not list(file.parent.glob("*.retinue-*"))


def test_a_linked_file_stays_a_link_and_bytes_that_are_no_text_stay(project: Project, tmp_path: Path) -> None:
    real = tmp_path / "dotfiles.json"
    real.write_text("{}")
    (project.folder / ".mcp.json").symlink_to(real)
    assert install(project, "claude", "--write").returncode == 0
    assert (project.folder / ".mcp.json").is_symlink() and "retinue" in real.read_text()
    real.write_bytes(b"\xff\xfe{}")
    done = install(project, "claude", "--write")
    assert done.returncode == 2 and "not UTF-8" in done.stderr and real.read_bytes() == b"\xff\xfe{}"


def test_a_name_and_a_project_of_ones_own(project: Project) -> None:
    printed = install(project, "cursor", "--name", "helpers", "--project", ".").stdout
    found = json.loads(printed[printed.index("{\n") :])["mcpServers"]["helpers"]
    assert found["args"][-2:] == ["--project", str(project.folder)]
    assert install(project, "cursor", "--name", "a b").returncode == 2
    assert install(project, "cursor", "--project", "nowhere").returncode == 2
    assert install(project, "emacs").returncode == 2


def test_the_page_names_only_what_there_is() -> None:
    from retinue.surfaces.cli.main import make_parser
    from retinue.surfaces.mcp.catalog import NAMES
    from retinue.surfaces.mcp.install import CLIENTS

    page = (Path(__file__).parents[3] / "docs" / "mcp.md").read_text()
    page = re.sub(r"`(claude|codex|gemini|opencode) [^`]*`", "", page)  # commands of others
    assert set(re.findall(r"install --client (\w+) ", page)) | {"claude"} == set(CLIENTS)
    named = {name for name in re.findall(r"`(\w+)`", page) if "background_tool" in name or "subagent" in name}
    assert named <= {*NAMES, "wait_for_background_tool"}
    _, commands = make_parser("mcp")
    [actions] = [action for action in commands["mcp"]._actions if action.choices]
    options = {
        name for below in actions.choices.values() for action in below._actions for name in action.option_strings
    }
    assert set(re.findall(r"(--[a-z][a-z-]+)", page)) <= options
    for kind in CLIENTS.values():
        assert kind.file in page


@pytest.mark.finding("M8")
@pytest.mark.parametrize("title", ["Claude Code", "Codex", "Gemini CLI", "opencode", "Cursor, VS Code"])
def test_the_page_has_the_header_that_each_client_sends_over_http(title: str) -> None:
    """`make clients` drives the clients with these entries; here only that they can be read."""
    from scripts.drive_clients import read_documented_entry

    *before, entry = read_documented_entry(title)
    if title == "Codex":
        table, url = before
        found = tomllib.loads(f"{table}\n{url}\n{entry}")["mcp_servers"]["retinue"]
        assert found["bearer_token_env_var"] == "RETINUE_MCP_TOKEN"
    else:
        found = json.loads(f"{{{entry}}}")["retinue"]
        assert re.fullmatch(r"Bearer [${:a-z]*RETINUE_MCP_TOKEN}?", found["headers"]["Authorization"])
    assert "http://127.0.0.1:8931/mcp" in (found.get("url"), found.get("httpUrl"))


def test_what_a_client_is_told_runs_no_code_of_the_project(project: Project) -> None:
    """Without `retinue` on the PATH, the entry starts Python in the project's folder, from which it must import
    nothing."""
    printed = install(project, "claude", PATH="/nowhere").stdout
    told = entry("claude", printed[printed.index("{") :])
    (project.folder / "json.py").write_text("raise SystemExit('imported')")
    command = [told["command"], *told["args"]]
    done = subprocess.run(
        command, cwd=project.folder, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    assert command[1:] == ["-P", "-m", "retinue", *SERVE]
    assert (done.returncode, done.stdout) == (0, b""), done.stderr
