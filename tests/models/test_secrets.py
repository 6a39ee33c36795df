"""I8: secrets planted wherever they could get in, looked for wherever they could come out."""

import asyncio
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

import retinue
from retinue import Approval, Context, Deny, Profile
from retinue.core import secrets
from retinue.core.events import _TEXT_FIELDS, KINDS, Delta, encode_event, redact
from retinue.core.messages import (
    AssistantTurn,
    Call,
    ToolTurn,
    Turn,
    UserTurn,
)
from retinue.core.results import ChangedFile
from retinue.log.runs import Runs
from retinue.sandbox.box import mask_outputs
from retinue.testing import scripted
from tests.gates import pass_time, until
from tests.log.kit import make_spawned
from tests.models import streams
from tests.models.kit import CLAUDE
from tests.models.server import Answer, Server, refusal
from tests.sandbox.places import needs_bubblewrap
from tests.supervisor.tree.kit import call, main
from tests.surfaces.cli.shell import PROVIDER, environment, find_quick_command
from tests.workspaces.kit import repository, seen, shell

KEY = "sk-planted-0123456789abcdefghij"
TOKEN = "ghp_planted0123456789"
PASSWORD = "pla/nted+pass=word"
PLANTED = (KEY, TOKEN, PASSWORD)


def call_of(name: str, **args: Any) -> Answer:
    return streams.called("c1", name, args)


ANSWERS = [
    # What is in the environment, in a file, and far too much of both for one event.
    call_of("shell", command="env; cat .env; for n in $(seq 2000); do cat .env; done"),
    call_of("read", path=".env"),
    # A provider that knows the key, and says it in pieces, in a thought, in a call.
    Answer(
        streams.anthropic(
            streams.thinking(f"my key is {KEY}", "sig"),
            streams.text("I say sk-pla", "nted-012345", f"6789abcdefghij and {TOKEN}"),
            streams.tool("c2", "shell", json.dumps({"command": f"echo {KEY}; cat /proc/$$/cmdline /proc/$$/environ"})),
            stop="tool_use",
        )
    ),
    call_of("spawn_subagents", tasks=[{"task": f"use {KEY}", "task_context": TOKEN}]),
    refusal(401, f"invalid x-api-key: {KEY}, Authorization: Bearer {PASSWORD}"),
    streams.said("The key is ", KEY[:9], KEY[9:], "."),
]


def found(data: bytes, where: object) -> list[str]:
    return [f"{planted} in {where}" for planted in PLANTED if planted.encode() in data]


async def command(folder: Path, *args: str, env: dict[str, str]) -> bytes:
    """Both outputs of a command."""
    done = await asyncio.to_thread(
        subprocess.run,
        [*find_quick_command(*PROVIDER), *args],
        cwd=folder,
        env=env,
        capture_output=True,
        timeout=200,
        check=False,
    )
    assert b"Traceback" not in done.stderr, done.stderr
    return bytes(done.stdout) + bytes(done.stderr)


@pytest.mark.parametrize("how", [["--verbose"], ["--json"]])
async def test_planted_secrets_appear_nowhere(how: Sequence[str], tmp_path: Path) -> None:
    (tmp_path / ".env").write_text(f"KEY={KEY}\nTOKEN={TOKEN}\nPASSWORD={PASSWORD}\n")
    async with Server(*ANSWERS) as server:
        env = environment(**server.environ()) | {
            "ANTHROPIC_API_KEY": KEY,
            "GITHUB_TOKEN": TOKEN,
            "DB_PASSWORD": PASSWORD,
        }
        task = f"use {TOKEN}"
        shown = await command(
            tmp_path, "run", task, "--runtime", "inherited", "--yes", "--model", CLAUDE, *how, env=env
        )
        bodies = [json.dumps(asked.body).encode() for asked in server.requests]
    assert len(bodies) == len(ANSWERS), shown.decode()[-2000:]
    leaks = found(shown, "the screen") + [leak for body in bodies for leak in found(body, "a request")]
    assert secrets.HIDDEN.encode() in shown
    for args in (["show", "--json"], ["tail"], ["ps", "--all"]) if "--json" in how else (["show", "--markdown"],):
        leaks += found(await command(tmp_path, *args, env=env), args)
    files = [file for file in (tmp_path / ".retinue").rglob("*") if file.is_file()]
    assert [file for file in files if file.suffix == ".db"] and [file for file in files if "shell" in file.name]
    for file in files:
        leaks += found(file.read_bytes(), file)
    assert not leaks, leaks


async def test_what_a_program_says_is_clean_in_results_questions_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", KEY)
    asked: list[Approval] = []

    async def approver(question: Approval) -> Deny:
        asked.append(question)
        return Deny(f"not with {KEY}")

    @retinue.tool(tier="observe")
    async def leaky(ctx: Context) -> dict[str, str]:
        """Leaks."""
        ctx.emit(f"emitted {KEY}")
        await ctx.approve(f"really {KEY}")
        return {KEY: KEY}

    async def agent(task: str, ctx: Context) -> str:
        raise RuntimeError(f"connecting with {KEY}")

    script = {
        "main": [
            {"tools": [{"name": "leaky", "args": {}}, {"name": "subagent_agent", "args": {"task": "x"}}]},
            {"text": f"{{{{last_result}}}} {KEY}", "chunks": 9},
        ]
    }
    async with retinue.open(approver=approver, allow=["subagent_agent"]) as r:
        run = await r.spawn(main(script, tools=[leaky, Profile("agent", call=agent)]), f"go {KEY}")
        items = [item async for item in r.control.watch(run.tree, deltas=True)]
        result = await run.result()
    pieces = "".join(item.text for item in items if isinstance(item, Delta))
    for text in (repr(items), repr(result), json.dumps(result.to_json()), repr(asked), pieces):
        assert secrets.HIDDEN in text
        assert KEY not in text, [item for item in items if KEY in repr(item)]


def test_pieces_are_held_back_only_while_they_may_be_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "known", ())  # a random one of another test may begin as this text ends
    secrets.hide_secret(KEY)
    for cut in range(len(KEY) + 1):
        stream = secrets.SecretStream()
        said = [stream.feed(f"a {KEY[:cut]}"), stream.feed(KEY[cut:]), stream.rest()]
        assert "".join(said) == f"a {secrets.HIDDEN}" and said[0].startswith("a ")
    stream = secrets.SecretStream()
    assert [stream.feed("task sk-"), stream.feed("ip"), stream.rest()] == ["task ", "sk-ip", ""]
    said = [stream.feed("task sk-")]
    secrets.forget_secret(KEY)
    assert [*said, stream.feed("ip"), stream.rest()] == ["task ", "sk-ip", ""]


@needs_bubblewrap
async def test_the_whole_output_of_a_sandboxed_command_has_no_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", KEY)
    project = repository(tmp_path / "p", keys=f"{KEY}\n" * 9)
    tmp_path.chmod(0o755)
    said = "seq 20000; cat keys; seq 20000"
    waits = call("shell", command=f"{said}; touch said; sleep 1000", timeout=500)
    playing = asyncio.create_task(
        seen(project, {"main": [shell(said), waits, "done"]}, kind="copy", runtime="isolated")
    )
    await until(lambda: list((project / ".retinue").glob("**/said")))
    await pass_time(500)
    _, events = await playing
    outputs = project / ".retinue" / "runs" / events[0].tree / "0" / "outputs"
    texts = [file.read_text() for file in sorted(outputs.iterdir())]
    assert len(texts) == 2 and all(text.count(f"{secrets.HIDDEN}\n") == 9 and KEY not in text for text in texts)


def test_outputs_of_a_hostile_sandbox_are_masked_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "known", (KEY,))
    with (tmp_path / "hole").open("wb") as hole:
        hole.truncate(2**40)
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path.parent / "precious")
    (tmp_path.parent / "precious").write_text(KEY)
    (tmp_path / "text").write_text(f"a {KEY} b")
    mask_outputs(str(tmp_path))
    assert (tmp_path / "text").read_text() == "a [secret] b" and (tmp_path.parent / "precious").read_text() == KEY


def test_each_item_of_a_growing_list_is_cleaned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless another secret is known by then; and who changes an item later changes nothing that was cleaned."""
    monkeypatch.setattr(secrets, "known", ())
    sent, args = secrets.ListRedactor(), {"path": "a"}
    thread: list[Turn] = [UserTurn(f"use {KEY} or {TOKEN}"), AssistantTurn("", (Call("c1", "read", args),))]
    assert sent.clean(thread) is thread
    secrets.hide_secret(KEY)
    first = sent.clean(thread)
    assert first == [UserTurn(f"use [secret] or {TOKEN}"), thread[1]]
    args["path"] = KEY
    thread.append(ToolTurn("c1", "read", f"it has {KEY}"))
    second = sent.clean(thread)
    assert [old is new for old, new in zip(first, second, strict=False)] == [True, True]
    assert second[1:] == [
        AssistantTurn("", (Call("c1", "read", {"path": "a"}),)),
        ToolTurn("c1", "read", "it has [secret]"),
    ]
    secrets.hide_secret(TOKEN)
    third = sent.clean(thread)
    assert third[0] == UserTurn("use [secret] or [secret]") and KEY not in repr(third)
    thread[:] = [UserTurn("another thread")]
    assert sent.clean(thread) == thread


async def test_a_secret_that_becomes_known_during_a_run_is_hidden_in_what_its_model_says_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(secrets, "known", ())  # pytest gives back what was known before

    @retinue.tool(tier="observe")
    async def log_in() -> str:
        """Log in."""
        secrets.hide_secret("late-0123456789")
        return "ok"

    calls = [{"tools": [{"name": "log_in", "args": {}}]}, "late-0123456789 is the password"]
    async with retinue.open(mode="yes") as r:
        run = await r.spawn(Profile("main", "Work.", model=scripted({"main": calls}), tools=[log_in]), "go")
        shown = [item async for item in r.control.watch(run.tree, deltas=True)]
        assert (await run.result()).final_response == "[secret] is the password"
    assert "".join(item.text for item in shown if isinstance(item, Delta)) == "[secret] is the password"
    assert "late-" not in repr(shown)


def test_plain_words_and_paths_are_no_secrets() -> None:
    secrets.learn_secrets({"FEATURE_TOKEN": "disabled", "SSH_KEY": "/home/me/.ssh/id_ed25519", "A_TOKEN": "short1"})
    text = "disabled /home/me/.ssh/id_ed25519 short1"
    assert secrets.clean_text(text) is text


@pytest.mark.parametrize("name", ["PGPASSWORD", "MYSQL_PWD", "SMTP_PASS", "SSH_PASSPHRASE", "AWS_SECRET_ACCESS_KEY"])
def test_variables_that_tools_take_passwords_from_are_known_by_their_names(name: str) -> None:
    assert secrets.is_named(name)
    assert not secrets.is_named("COMPASS")


def test_what_looks_like_a_key_is_scrubbed_too() -> None:
    assert (
        secrets.scrub_text("sk-ant-api03-abcdefghijkl and Bearer abc")
        == f"{secrets.HIDDEN} and Bearer {secrets.HIDDEN}"
    )


def test_nothing_hidden_means_the_same_objects() -> None:
    value = {"a": ["b", {"c": 1}], "d": (1.5, None)}
    assert secrets.clean_value(value) is value
    assert call("x", y=value)["tools"][0]["args"]["y"] is value


@pytest.mark.parametrize("key", ['quo"te\\d-0123456789', "plain-0123456789"])
async def test_a_key_is_hidden_in_profiles_and_in_the_names_of_changed_files(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED_KEY", key)
    project = repository(tmp_path / "p")
    script = {"main": [call("shell", command='echo > "f-$PLANTED_KEY"'), "end"]}
    profile = Profile("main", f"use {key}", model=scripted(script), workspace="copy")
    try:
        async with retinue.open(project / ".retinue", mode="yes") as r:
            run = await r.spawn(profile, "go")
            lines = [encode_event(event) async for event in run.events()]
            [changed] = (await run.result()).changed_files
    finally:
        secrets.forget_secret(key)
    as_written = msgspec.json.encode(key)[1:-1]
    assert changed.path in ("f-[secret]", "f-")  # a run's shell may not have the variable
    assert not [line for line in lines if as_written in line]


def test_what_is_no_text_is_cleaned_inside() -> None:
    secrets.hide_secret("planted-name-1")
    try:
        assert secrets.clean_value((ChangedFile("added", "a/planted-name-1"),))[0].path == "a/[secret]"
        kept = (ChangedFile("added", "a"),)
        assert secrets.clean_value(kept) is kept
    finally:
        secrets.forget_secret("planted-name-1")


def test_progress_in_the_parent_s_thread_names_no_secret_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLANTED_API_KEY", KEY)
    secrets.learn_secrets(os.environ)
    run = Runs.of("t1", [make_spawned()]).runs[0]
    about, nickname = f"/{KEY}", f"nick {KEY}"
    told = redact(run.describe_progress("t1", "read", about, None, nickname, None))
    assert (told.tool_context, told.nickname) == (f"/{secrets.HIDDEN}", f"nick {secrets.HIDDEN}")


def test_every_kind_of_event_with_foreign_words_is_redacted() -> None:
    """A new kind is either listed with its fields, or has none that a user, model, tool or peer fills."""
    plain = {
        "run.started", "run.remote", "run.resumed", "run.model", "turn.started", "turn.ended", "usage",
        "team.decided",
    }  # fmt: skip
    assert {kind for kind, body in KINDS.items() if body not in _TEXT_FIELDS} == plain


@pytest.mark.parametrize(
    "kind", [kind for kind, body in KINDS.items() if {"call_id", "within"} & {*body.__struct_fields__}]
)
def test_the_id_of_a_call_is_redacted_alike_wherever_an_event_names_it(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "known", (KEY,))
    fields = KINDS[kind].__struct_fields__
    given = {name: f"c-{KEY}" if name in ("call_id", "within") else "" for name in fields}
    cleaned = redact(KINDS[kind](**given))
    assert {getattr(cleaned, name) for name in ("call_id", "within") if name in fields} == {"c-[secret]"}
