"""Drive MCP clients against scripted models, with the entries that `retinue mcp install` writes for them.

    python -m scripts.drive_clients FOLDER [CLIENT ...] [TRIAL ...]

FOLDER has the clients' node_modules; `scripts/clients` makes it and starts this in a network namespace that has the
loopback interface only. A local server plays all models: the client's, in its own protocol, which makes it call our
tools, and the one of the subagents, which our server reaches with the key that is in the user's shell.

For each client: a headless session that delegates a task and says the answer; a session whose server is killed and a
second one that continues the interrupted subagent; a session over HTTP with the header that the docs give. For clients
whose screen shows a form: a question that Enter approves.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.models import streams

KEY = "sk-clients-0123456789abcdef"
SUBAGENT_MODEL = "claude-x"
SECONDS = 180  # only ends what hangs: clients are slow on a busy machine
SESSIONS = 3
NO_TOOLS = "no tools yet"
PORT = "8931"  # as in docs/mcp.md; every port is free in a network of one's own
PAGE = Path(__file__).parents[1] / "docs/mcp.md"
ANSWER = re.compile(r"I saw[^\n\"\\<]*")
PROMPT = "Ask a subagent to look around, and tell me what it says."
Args = dict[str, Any]


@dataclass(frozen=True)
class Call:
    """A tool call that a model makes; `tool` is the name that our server gave the tool."""

    tool: str
    args: Args


Trial = Callable[["Stage", "Client"], str]
Step = Callable[[Sequence[str]], Call | str]  # from the results so far to a call, or the final text


@dataclass
class Conversation:
    """A request to a model: the tools by our names, and the results of the calls so far."""

    tools: dict[str, Any] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)


class AnthropicWire:
    """Claude Code, and our own server's subagents."""

    def read(self, body: Args) -> Conversation:
        blocks = [block for each in body["messages"] if isinstance(each["content"], list) for block in each["content"]]
        results = [_flatten(block.get("content")) for block in blocks if block["type"] == "tool_result"]
        return Conversation(_by_our_names(tool["name"] for tool in body.get("tools", []) if "name" in tool), results)

    def call(self, name: Any, args: Args) -> list[bytes]:
        return streams.anthropic(streams.tool(_new_id(), name, json.dumps(args)), stop="tool_use")

    def say(self, text: str) -> list[bytes]:
        return streams.anthropic(streams.text(text))


class ResponsesWire:
    """Codex, which puts the tools of a server into a namespace."""

    def read(self, body: Args) -> Conversation:
        listed = body.get("tools", [])
        spaces = [
            (each["name"], tool["name"]) for each in listed if each["type"] == "namespace" for tool in each["tools"]
        ]
        plain = _by_our_names(each["name"] for each in listed if each["type"] == "function")
        results = [_flatten(item["output"]) for item in body["input"] if item.get("type") == "function_call_output"]
        return Conversation({**plain, **{name: (space, name) for space, name in spaces}}, results)

    def call(self, name: Any, args: Args) -> list[bytes]:
        space, tool = name if isinstance(name, tuple) else ("", name)
        item, pieces = streams.function(_new_id(), tool, json.dumps(args))
        return streams.responses(({**item, "namespace": space} if space else item, pieces))

    def say(self, text: str) -> list[bytes]:
        return streams.responses(streams.message(text))


class GeminiWire:
    """Gemini CLI."""

    def read(self, body: Args) -> Conversation:
        declared = [each["name"] for tool in body.get("tools", []) for each in tool.get("functionDeclarations", [])]
        parts = [part for content in body["contents"] for part in content.get("parts", [])]
        results = [json.dumps(part["functionResponse"]["response"]) for part in parts if "functionResponse" in part]
        return Conversation(_by_our_names(declared), results)

    def call(self, name: Any, args: Args) -> list[bytes]:
        return self._reply({"functionCall": {"id": _new_id(), "name": name, "args": args}})

    def say(self, text: str) -> list[bytes]:
        return self._reply({"text": text})

    def _reply(self, part: Args) -> list[bytes]:
        candidate = {"content": {"role": "model", "parts": [part]}, "finishReason": "STOP", "index": 0}
        usage = {"promptTokenCount": 10, "candidatesTokenCount": 7, "totalTokenCount": 17}
        chunk = {"candidates": [candidate], "usageMetadata": usage, "modelVersion": "gemini-x", "responseId": "r1"}
        return [f"data: {json.dumps(chunk)}\r\n\r\n".encode()]


class ChatWire:
    """opencode with an OpenAI-compatible provider."""

    def read(self, body: Args) -> Conversation:
        names = _by_our_names(tool["function"]["name"] for tool in body.get("tools", []))
        return Conversation(names, [_flatten(each["content"]) for each in body["messages"] if each["role"] == "tool"])

    def call(self, name: Any, args: Args) -> list[bytes]:
        return streams.chat(calls=[(_new_id(), name, [json.dumps(args)])], finish="tool_calls")

    def say(self, text: str) -> list[bytes]:
        return streams.chat(content=[text])


def _by_our_names(names: Iterable[str]) -> dict[str, str]:
    """Return the names of a client by those that our server gave: clients put words before them."""
    return {re.sub(r"^mcp_+retinue_+|^retinue_", "", name): name for name in names}


def _flatten(content: Any) -> str:
    """Return the text of a result: a string, or blocks of which some have text."""
    blocks = content if isinstance(content, list) else [{"text": content or ""}]
    return "\n".join(block.get("text", "") for block in blocks)


def _new_id() -> str:
    return f"call_{secrets.token_hex(6)}"


WIRES: tuple[tuple[str, Any], ...] = (
    ("/messages", AnthropicWire()),
    ("/responses", ResponsesWire()),
    ("GenerateContent", GeminiWire()),
    ("/chat/completions", ChatWire()),
)


class ModelServer(ThreadingHTTPServer):
    """All models of one session: `client` and `subagent` are their steps. With `hold`, subagents get no answer. `keys`
    are those that came with the requests of subagents."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.client: Sequence[Step] = ()
        self.subagent: Sequence[Step] = ()
        self.keys: list[str] = []
        self.asked = threading.Event()
        self.released = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def script(self, client: Sequence[Step], subagent: Sequence[Step], *, hold: bool = False) -> None:
        self.client, self.subagent, self.keys = client, subagent, []
        self.asked.clear()
        if hold:
            self.released.clear()
        else:
            self.released.set()

    def reply(self, speaks: Any, body: Args, headers: Any) -> list[bytes]:
        conversation: Conversation = speaks.read(body)
        is_subagent = body.get("model") == SUBAGENT_MODEL
        if is_subagent:
            sent = headers.get("X-Api-Key") or headers.get("Authorization", "").removeprefix("Bearer ")
            self.keys.append(sent)
            self.asked.set()
            self.released.wait(SECONDS)
        steps = self.subagent if is_subagent else self.client
        if not is_subagent and "spawn_subagents" not in conversation.tools:
            return list(speaks.say(NO_TOOLS))  # clients also ask for titles and summaries
        step = steps[min(len(conversation.results), len(steps) - 1)](conversation.results)
        if isinstance(step, str):
            return list(speaks.say(step))
        return list(speaks.call(conversation.tools[step.tool], step.args))


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ModelServer

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: the clients' output is what counts."""

    def do_GET(self) -> None:
        self._send(404, b"{}", "application/json")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        path = self.path.partition("?")[0]
        speaks = next((each for ending, each in WIRES if path.endswith(ending)), None)
        if speaks is None:
            self._send(404, b"{}", "application/json")
            return
        reply = b"".join(self.server.reply(speaks, body, self.headers))
        with suppress(ConnectionError):  # a server that was killed does not hear the answer
            self._send(200, reply, "text/event-stream")

    def _send(self, status: int, data: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


# Clients


@dataclass
class Stage:
    """A home and a project for one client, and a `retinue` on its PATH that writes down its environment and its pid."""

    folder: Path
    clients: Path
    models: ModelServer
    shell: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("bin", "home", "project", "state"):
            (self.folder / name).mkdir()
        retinue = Path(sys.executable).with_name("retinue")
        wrapper = self.folder / "bin/retinue"
        notes = f'env >"{self.folder}/seen"\n  echo $$ >"{self.folder}/pid"'
        wrapper.write_text(f'#!/bin/sh\nif [ "$2" = serve ]; then\n  {notes}\nfi\nexec "{retinue}" "$@"\n')
        wrapper.chmod(0o755)
        subprocess.run(["git", "init", "-q", "."], cwd=self.project, check=True)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def project(self) -> Path:
        return self.folder / "project"

    @property
    def environment(self) -> dict[str, str]:
        """The user's shell, and all switches that keep a client from calling home."""
        path = [self.folder / "bin", self.clients / "node_modules/.bin", "/usr/local/bin", "/usr/bin", "/bin"]
        return {
            "PATH": os.pathsep.join(map(str, path)),
            "HOME": str(self.home),
            "LANG": "C.UTF-8",
            "TERM": "xterm-256color",
            "XDG_STATE_HOME": str(self.folder / "state"),
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": self.models.address,
            "RETINUE_MODEL": f"anthropic:{SUBAGENT_MODEL}",
            "OPENAI_API_KEY": KEY,
            "GEMINI_API_KEY": KEY,
            "GOOGLE_GEMINI_BASE_URL": self.models.address,
            "MCP_CONNECTION_NONBLOCKING": "0",  # or Claude Code may begin before it has our tools
            "DISABLE_AUTOUPDATER": "1",
            "DISABLE_TELEMETRY": "1",
            "DISABLE_ERROR_REPORTING": "1",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "GEMINI_TELEMETRY_ENABLED": "false",
            "GEMINI_CLI_TRUST_WORKSPACE": "true",
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            **self.shell,
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a command as the user does, with its output in one pipe."""
        return subprocess.Popen(
            command, cwd=self.project, env=self.environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
        )  # fmt: skip

    def run(self, *command: str) -> str:
        """Run a command as the user does; return all that it prints."""
        with self.start(*command) as process:
            try:
                return process.communicate(timeout=SECONDS)[0]
            finally:
                process.kill()

    def write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def write_json(self, name: str, value: Any) -> None:
        self.write(name, json.dumps(value))


def prepare_claude(stage: Stage) -> None:
    trusted = {"hasTrustDialogAccepted": True, "hasCompletedProjectOnboarding": True}
    answers = {"approved": [KEY[-20:]], "rejected": []}
    first = {"hasCompletedOnboarding": True, "theme": "dark", "customApiKeyResponses": answers}
    stage.write_json("home/.claude.json", {**first, "projects": {str(stage.project): trusted}})
    allowed = {"permissions": {"allow": ["mcp__retinue"]}, "enableAllProjectMcpServers": True}
    stage.write_json("project/.claude/settings.local.json", allowed)


def prepare_codex(stage: Stage) -> None:
    provider = (
        f'name = "local"\nbase_url = "{stage.models.address}/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"'
    )
    stage.write(
        "home/.codex/config.toml",
        'model = "gpt-x"\nmodel_provider = "local"\ncheck_for_update_on_startup = false\n'
        f"[analytics]\nenabled = false\n[model_providers.local]\n{provider}\n"
        f'[projects."{stage.project}"]\ntrust_level = "trusted"\n',
    )


def prepare_gemini(stage: Stage) -> None:
    settings = {
        "security": {"auth": {"selectedType": "gemini-api-key"}, "folderTrust": {"enabled": False}},
        "privacy": {"usageStatisticsEnabled": False},
        "general": {"enableAutoUpdate": False},
    }
    stage.write_json("home/.gemini/settings.json", settings)


def prepare_opencode(stage: Stage) -> None:
    options = {"baseURL": f"{stage.models.address}/v1", "apiKey": KEY}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {"m": {"tool_call": True}}}
    settings = {"model": "local/m", "small_model": "local/m", "provider": {"local": provider}}
    stage.write_json("home/.config/opencode/opencode.json", {**settings, "autoupdate": False, "share": "disabled"})


def connect_by_json(file: str, under: str) -> Callable[..., None]:
    """Return what puts a documented entry into the client's JSON file."""

    def connect(stage: Stage, entry: str) -> None:
        stage.write_json(f"project/{file}", {under: json.loads(f"{{{entry}}}")})

    return connect


def connect_codex(stage: Stage, table: str, *lines: str) -> None:
    before = (stage.home / ".codex/config.toml").read_text()
    stage.write("home/.codex/config.toml", "\n".join([before, table, *lines, ""]))


@dataclass(frozen=True)
class Client:
    """One client: its package, its settings, its headless command, and how a documented HTTP entry gets into its file.
    If its screen is driven too: the command, a text that shows that it is ready, and the Enters that approve."""

    title: str
    package: str
    prepare: Callable[[Stage], None]
    connect: Callable[..., None]
    headless: tuple[str, ...]
    screen: tuple[str, ...] = ()
    ready: str = ""
    enters: int = 1


CLIENTS = {
    "claude": Client(
        "Claude Code", "@anthropic-ai/claude-code", prepare_claude, connect_by_json(".mcp.json", "mcpServers"),
        ("claude", "-p"), ("claude",), "? for shortcuts",
        enters=2,  # the first takes the chosen answer and moves to Accept, the second sends the form
    ),
    "codex": Client(
        "Codex", "@openai/codex", prepare_codex, connect_codex,
        ("codex", "exec", "-c", "mcp_servers.retinue.required=true"),  # or it may begin before it has our tools
        ("codex",), "? for shortcuts",
    ),
    "gemini": Client(
        "Gemini CLI", "@google/gemini-cli", prepare_gemini, connect_by_json(".gemini/settings.json", "mcpServers"),
        ("gemini", "--approval-mode", "yolo", "-m", "gemini-x", "-p"),
    ),
    "opencode": Client(
        "opencode", "opencode-ai", prepare_opencode, connect_by_json("opencode.json", "mcp"), ("opencode", "run")
    ),
}  # fmt: skip


# What each client is tried with


class Failed(Exception):
    """A trial did not show what it should; the text has what was seen."""


def repeat_answer(results: Sequence[str]) -> str:
    """Say what the subagent answered, as a client's model would."""
    last = results[-1] if results else "nothing"
    found = ANSWER.search(last)
    return f"The subagent says: {found[0]}" if found else f"The tool says: {last[:2000]}"


def spawn(name: str) -> Step:
    return lambda _: Call("spawn_subagents", {"tasks": [{"task": "look around", "subagent_id": name}]})


def run_session(stage: Stage, client: Client) -> str:
    """Run a headless session; again if it began before the client had our tools, which opencode cannot wait for."""
    for _ in range(SESSIONS):
        said = stage.run(*client.headless, PROMPT)
        if NO_TOOLS not in said:
            break
        print(f"        {client.title} began without our tools", flush=True)
    return said


def find_line(said: str, word: str) -> str:
    """Return the line of a client's output that has the word."""
    found = [line.strip() for line in said.splitlines() if word in line]
    if not found:
        raise Failed(said)
    return found[-1]


def answer_task(stage: Stage, client: Client) -> str:
    """A headless session delegates a task and says the answer; the key of the user's shell reached the model."""
    word = f"lighthouse-{secrets.token_hex(4)}"
    stage.models.script([spawn("looker"), repeat_answer], [lambda _: f"I saw {word}."])
    line = find_line(run_session(stage, client), word)
    if set(stage.models.keys) != {KEY}:
        raise Failed(f"the subagent's model was called with the keys {stage.models.keys}")
    seen = (stage.folder / "seen").read_text().splitlines()
    for name in ("XDG_STATE_HOME", "RETINUE_MODEL", "ANTHROPIC_BASE_URL"):
        if f"{name}={stage.environment[name]}" not in seen:
            raise Failed(f"{name} did not reach the server")
    return line


def continue_interrupted(stage: Stage, client: Client) -> str:
    """The server is killed while a subagent works; the client's next session lists the subagent and continues it."""
    word = f"harbour-{secrets.token_hex(4)}"
    stage.models.script([spawn("wanderer"), repeat_answer], [lambda _: "I saw nothing, too late."], hold=True)
    with stage.start(*client.headless, PROMPT) as first:
        if not stage.models.asked.wait(SECONDS):
            first.kill()
            raise Failed(f"the subagent did not begin: {first.communicate()[0]}")
        os.kill(int((stage.folder / "pid").read_text()), signal.SIGKILL)
        output, _ = first.communicate(timeout=SECONDS)
    if "too late" in output:
        raise Failed(f"the server was not killed: {output}")
    listed: list[str] = []

    def go_on(results: Sequence[str]) -> Call:
        listed.append(results[-1])
        return Call("continue_subagent", {"subagent_id": "wanderer", "message": "go on"})

    steps: list[Step] = [lambda _: Call("list_subagents", {}), go_on, repeat_answer]
    stage.models.script(steps, [lambda _: f"I saw {word}."])
    line = find_line(run_session(stage, client), word)
    if not any("interrupted" in each for each in listed):
        raise Failed(f"not listed as interrupted: {listed}")
    return line


def answer_over_http(stage: Stage, client: Client) -> str:
    """The server runs by itself, and the client finds it with the entry and the header that docs/mcp.md gives."""
    word = f"causeway-{secrets.token_hex(4)}"
    stage.models.script([spawn("caller"), repeat_answer], [lambda _: f"I saw {word}."])
    with stage.start("retinue", "mcp", "serve", "--http", "--port", PORT) as server:
        try:
            assert server.stdout is not None
            while "the header to send" not in (line := server.stdout.readline()):
                if not line:
                    raise Failed("the server did not start")
            stage.shell["RETINUE_MCP_TOKEN"] = (stage.project / ".retinue/mcp/token").read_text().strip()
            client.connect(stage, *read_documented_entry(client.title))
            return find_line(run_session(stage, client), word)
        finally:
            server.terminate()


def approve_on_screen(stage: Stage, client: Client) -> str:
    """A subagent wants to run a command; the question is on the client's screen, and Enter approves it."""
    word = f"beacon-{secrets.token_hex(4)}"
    command = f"echo {word} > note.txt; cat note.txt"
    steps: list[Step] = [lambda _: Call("shell", {"command": command}), lambda results: f"I saw {results[-1]}"]
    stage.models.script([spawn("writer"), repeat_answer], steps)
    with Screen(stage, *client.screen) as screen:
        screen.wait_for(client.ready)
        while screen.ask(PROMPT, "Yes, this once", NO_TOOLS) == NO_TOOLS:
            pass  # the client's servers are still being started
        question = find_line(screen.text, "wants to run")
        for _ in range(client.enters):
            shown = screen.text
            screen.press("Enter")
            screen.wait_for_change(shown)
        screen.wait_for("The subagent says: I saw")
        find_line(screen.text, word)
    return f"{question} | {client.enters} x Enter"


TRIALS = (answer_task, continue_interrupted, answer_over_http, approve_on_screen)


def read_documented_entry(title: str) -> tuple[str, ...]:
    """Return the code of the row for a client in the table of the section about HTTP."""
    [row] = re.findall(rf"^\| {re.escape(title)} \| in [^`]*`[^`]*`(.*) \|$", PAGE.read_text(), re.MULTILINE)
    return tuple(re.findall(r"`([^`]*)`", row))


class Screen:
    """A client in a terminal of its own."""

    def __init__(self, stage: Stage, *command: str) -> None:
        self._tmux = ("tmux", "-f", os.devnull, "-S", str(stage.folder / "tmux"))
        self._stage, self._command = stage, command

    def __enter__(self) -> Screen:
        self._run("new-session", "-d", "-x", "140", "-y", "50", *self._command)
        return self

    def __exit__(self, *_: object) -> None:
        self._run("kill-server")

    @property
    def text(self) -> str:
        return self._run("capture-pane", "-p", "-S", "-200")

    def press(self, key: str) -> None:
        self._run("send-keys", key)

    def ask(self, prompt: str, *texts: str) -> str:
        """Type a prompt and send it; return the text that appears."""
        before, asked = [self.text.count(text) for text in texts], self.text.count(prompt[-20:])
        self._run("send-keys", "-l", prompt)
        self.wait_for(prompt[-20:], more_than=[asked])
        time.sleep(1)  # noqa: TID251 - Codex takes an Enter right after fast typing for a part of pasted text
        self.press("Enter")
        return self.wait_for(*texts, more_than=before)

    def wait_for(self, *texts: str, more_than: Sequence[int] = ()) -> str:
        """Wait until one of the texts is on the screen, more often than before; return it."""
        counts = more_than or [0] * len(texts)

        def find_text() -> str:
            shown = self.text
            return next((text for text, count in zip(texts, counts, strict=True) if shown.count(text) > count), "")

        return self._poll(find_text, f"none of {texts} on the screen")

    def wait_for_change(self, shown: str) -> None:
        self._poll(lambda: "changed" if self.text != shown else "", "the screen did not change")

    def _poll(self, look: Callable[[], str], complaint: str) -> str:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            if found := look():
                return found
            time.sleep(0.2)  # noqa: TID251 - a terminal does not say when its content changes
        raise Failed(f"{complaint}:\n{self.text}")

    def _run(self, *words: str) -> str:
        command, place, env = [*self._tmux, *words], self._stage.project, self._stage.environment
        return subprocess.run(command, cwd=place, env=env, stdout=subprocess.PIPE, check=False, encoding="utf-8").stdout


def try_client(name: str, trial: Trial, folder: Path) -> str:
    """Run one trial with a home and a project of its own, with our server set up as `mcp install` does it."""
    client = CLIENTS[name]
    with tempfile.TemporaryDirectory(prefix="retinue-clients-", ignore_cleanup_errors=True) as work:
        stage = Stage(Path(work), folder, ModelServer())
        client.prepare(stage)
        if trial is not answer_over_http:
            stage.run("retinue", "mcp", "install", "--client", name, "--write")
        return trial(stage, client)


def main(folder: str, *names: str) -> int:
    links = {line.split(":")[0].strip() for line in Path("/proc/net/dev").read_text().splitlines()[2:]}
    if links != {"lo"}:
        print(
            f"this machine's network is in reach ({', '.join(sorted(links))}): start scripts/clients", file=sys.stderr
        )
        return 2
    failed = False
    trials = [trial for trial in TRIALS if trial.__name__ in names] or TRIALS
    for name in [name for name in CLIENTS if name in names] or CLIENTS:
        package = json.loads((Path(folder) / "node_modules" / CLIENTS[name].package / "package.json").read_text())
        for trial in trials:
            if trial is approve_on_screen and not CLIENTS[name].screen:
                continue
            what = f"{name} {package['version']}  {trial.__name__}"
            try:
                print(f"passed  {what}: {try_client(name, trial, Path(folder))}", flush=True)
            except (Failed, subprocess.TimeoutExpired) as error:
                failed = True
                print(f"FAILED  {what}", flush=True)
                print(error, file=sys.stderr, flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
