"""`retinue_cassette` as users meet it: their tests, a real pytest, real provider SDKs on a local server that is then
gone."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from retinue.core.errors import ModelError
from retinue.core.messages import Reply, Request, RunRef
from retinue.core.records import RecordedExchange, RecordedRequest
from retinue.models.cassettes import Cassette, CassetteModel, RunNames, redact_keys
from tests.docs.test_docs import ROOT, snippets
from tests.models import streams
from tests.models.cassettes.kit import Suite
from tests.models.server import KEY, Answer, Server

SECRET = "a-very-private-value"
NEW, ALL = "--retinue-record=new", "--retinue-record=all"
MINE = """
import os
import retinue
from retinue import Profile, tool

@tool
async def lookup(word: str) -> str:
    '''Looks a word up.'''
    return f"{word} costs 5; token {os.environ.get('SHOP_TOKEN', '[secret]')}"

CLERK = Profile("clerk", "You answer %(how)s.", model="%(model)s", tools=[lookup])

def test_price(retinue_cassette):
    result = retinue.run_sync(CLERK, "what is tea?", mode="yes")
    assert result.final_response == "Tea costs 5."
    assert result.usage.total_tokens == 34
"""
CLAUDE, GPT, SCRIPTED = "anthropic:claude-x", "openai:gpt-5.5", "scripted:says.yaml"
LOOKS: dict[str, Any] = {"tools": [{"name": "lookup", "args": {"word": "tea"}}]}
TELLS = {"text": "Tea costs 5."}
ANSWERS = {
    CLAUDE: lambda: [
        Answer(
            streams.anthropic(
                streams.thinking("look it up", "sig=="),
                streams.tool("c1", "lookup", '{"word": "tea"}'),
                stop="tool_use",
            )
        ),
        streams.said("Tea ", "costs 5."),
    ],
    GPT: lambda: [
        Answer(streams.responses(streams.function("c1", "lookup", '{"word": "tea"}'))),
        Answer(streams.responses(streams.message("Tea costs 5."))),
    ],
}


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    return Suite(tmp_path)


def mine(*, model: str = CLAUDE, how: str = "briefly") -> str:
    return MINE % {"model": model, "how": how}


def says(suite: Suite, *replies: dict[str, Any]) -> dict[str, str]:
    """Lets the scripted model say so; without, it cannot even be made."""
    usage = {"input_tokens": 10, "output_tokens": 7}
    script = {"agents": {"clerk": [{**reply, "usage": usage} for reply in replies]}}
    (suite.folder / "says.yaml").write_text(json.dumps(script))
    return {"SHOP_TOKEN": SECRET}


async def recorded(suite: Suite) -> None:
    """The test with its cassette, without the provider's SDK, which takes seconds to load."""
    suite.write(mine(model=SCRIPTED))
    await suite.passes(NEW, env=says(suite, LOOKS, TELLS))
    (suite.folder / "says.yaml").unlink()


async def record(suite: Suite, model: str = CLAUDE) -> list[str]:
    """Records the test; gives what the server saw."""
    suite.write(mine(model=model))
    async with Server(*ANSWERS[model]()) as server:
        await suite.passes(NEW, env={**server.environ(), "SHOP_TOKEN": SECRET})
        assert len(server.requests) == 2
        return [f"{asked.headers}{asked.body}" for asked in server.requests]


async def test_recorded_once_it_plays_without_a_server_or_a_key(suite: Suite) -> None:
    seen = await record(suite, GPT)
    assert all(KEY in asked for asked in seen)
    text = suite.cassette("test_price").read_text()
    assert KEY not in text and SECRET not in text
    assert "tea costs 5; token [secret]" in text
    assert str(suite.folder) not in text
    await suite.passes()
    assert suite.cassette("test_price").read_text() == text


async def test_the_test_of_the_docs_records_and_plays(suite: Suite) -> None:
    [code] = snippets(ROOT / "docs/testing.md", "python")
    suite.write(code)
    async with Server(streams.called("c1", "price", {"product": "tea"}), streams.said("Tea is 5 EUR.")) as server:
        await suite.passes(NEW, env=server.environ())
    assert "tea: 5 EUR" in suite.cassette("test_the_clerk_knows_the_price_of_tea").read_text()
    await suite.passes()


async def test_a_missing_cassette_says_how_to_record_it(suite: Suite) -> None:
    suite.write(mine())
    out = await suite.fails(quick=False)
    assert "retinue_cassette: /main (clerk), turn 1: this call is not recorded" in out
    assert f"there is no file {suite.cassette('test_price')}" in out
    assert "record it: pytest test_mine.py::test_price --retinue-record=new" in out
    assert "Traceback" not in out
    assert not suite.cassette("test_price").exists()


async def test_a_departing_call_fails_with_a_diff_that_names_run_and_turn(suite: Suite) -> None:
    await recorded(suite)
    before = suite.cassette("test_price").read_text()
    suite.write(mine(model=SCRIPTED, how="at length"))
    for mode in ((), (NEW,)):
        out = await suite.fails(*mode)
        assert "retinue_cassette: /main (clerk), turn 1: the request is not the recorded one" in out
        assert "-  You answer briefly." in out and "+  You answer at length." in out
        assert "record again: pytest test_mine.py::test_price --retinue-record=all" in out
    assert suite.cassette("test_price").read_text() == before
    suite.write(mine(model=SCRIPTED).replace("costs 5; token", "costs 6; token"))
    out = await suite.fails()
    assert "/main (clerk), turn 2: the request is not the recorded one" in out
    assert "+  tea costs 6; token [secret]" in out


async def test_what_one_model_said_is_not_played_as_another_s() -> None:
    request = RecordedRequest("anthropic:claude-x", "Be brief.", (), ())
    cassette = Cassette([RecordedExchange("/main", 1, "clerk", request, Reply("tea"))], "none", str)
    names = RunNames(lambda ref: ref.path, "", "")
    for model, mismatches in (("anthropic:claude-x", 0), ("anthropic:claude-y", 1)):
        asked = Request(RunRef("t", 0, "/main", "main", "clerk", "c"), 1, model, "Be brief.", [], ())
        player = CassetteModel(model, lambda: pytest.fail("it asks a model"), names, cassette)
        with suppress(ModelError):
            await player.complete(asked, lambda *_: None)
        assert len(cassette.mismatches) == mismatches
    [mismatch] = cassette.mismatches
    assert {"-model: anthropic:claude-x", "+model: anthropic:claude-y"} <= set(mismatch.lines)


async def test_all_records_anew_but_a_recording_that_broke_off_replaces_nothing(suite: Suite) -> None:
    await recorded(suite)
    before = suite.cassette("test_price").read_text()
    suite.write(mine(model=SCRIPTED, how="at length"))
    out = await suite.fails(ALL, env=says(suite, LOOKS, {"error": "no"}))
    assert "retinue_cassette: the model failed, so this call is not recorded: /main (clerk), turn 2: no" in out
    assert suite.cassette("test_price").read_text() == before
    await suite.passes(ALL, env=says(suite, LOOKS, TELLS))
    after = suite.cassette("test_price").read_text()
    assert "You answer at length." in after
    await suite.passes(NEW)
    await suite.passes("-p", "no:asyncio")
    assert suite.cassette("test_price").read_text() == after


async def test_new_records_only_what_is_missing(suite: Suite) -> None:
    await record(suite)
    path = suite.cassette("test_price")
    whole = path.read_text()
    path.write_text(whole.replace(whole[whole.index("- run: /main\n  turn: 2") : whole.index("\ntools:")], ""))
    assert "/main (clerk), turn 2: this call is not recorded" in await suite.fails()
    async with Server(ANSWERS[CLAUDE]()[1]) as server:
        await suite.passes(NEW, env={**server.environ(), "SHOP_TOKEN": SECRET})
        [asked] = server.requests
    assert "sig==" in str(asked.body)  # what was played is what the provider needs to go on
    assert path.read_text() == whole


async def test_recorded_calls_that_are_not_made_are_told(suite: Suite) -> None:
    await recorded(suite)
    suite.write(
        mine(model=SCRIPTED)
        .replace('mode="yes")', 'mode="yes", limits=retinue.Limits(turns=1))')
        .replace("assert", "# ")
    )
    out = await suite.fails()
    assert "these recorded calls were not made:\n  /main (clerk), turn 2" in out


async def test_a_file_that_is_no_cassette_is_one_clear_line(suite: Suite) -> None:
    await recorded(suite)
    path = suite.cassette("test_price")
    path.write_text(path.read_text().replace("turn: 2", "turn: two"))
    out = await suite.fails()
    assert f"{path} is not a cassette: Expected `int`, got `str` - at `$.calls[1].turn`" in out


ASYNCIO = ("-p", "pytest_asyncio.plugin")
NESTED = """
import asyncio, os
import pytest
import retinue
from retinue import Context, Profile, tool
from retinue.testing import scripted

gone = {"a": asyncio.Event(), "b": asyncio.Event()}

@tool
async def go(name: str) -> str:
    '''Waits for the other one, if it is the late one.'''
    if os.environ["LATE"] == name:
        await gone["b" if name == "a" else "a"].wait()
    return "go"

@tool
async def went(name: str) -> str:
    '''Says that it has gone.'''
    gone[name].set()
    return "went"

def tools(*calls):
    return {"tools": [{"name": name, "args": args} for name, args in calls]}

TWIN = ("spawn_subagents", {"tasks": [{"task": "twin"}, {"task": "twin"}]})
SAYS = {
    "main": [tools(("spawn_subagents", {"tasks": [{"task": t, "subagent_id": t} for t in "ab"]})), {"text": "ok"}],
    **{t: [tools(("go", {"name": t})), tools(TWIN, ("went", {"name": t})), {"text": t}] for t in "ab"},
}

class Counting:
    '''Every leaf gets another answer, so that a mix-up is seen.'''
    name = "counting"
    def __init__(self): self.count, self.says = 0, scripted(SAYS)
    async def complete(self, request, on_delta):
        if request.thread[0].text != "twin":
            return await self.says.complete(request, on_delta)
        self.count += 1
        return (await scripted({"*": [{"text": f"answer {self.count}"}]}).complete(request, on_delta))

MARK
async def test_nested(retinue_cassette):
    profile = Profile("main", model=Counting(), tools=[go, went, "spawn_subagents"])
    async with retinue.open(mode="yes", project=PROJECT) as r:
        first, second = await asyncio.gather(r.run(profile, "one"), r.run(profile, "two"))
    assert (first.status, second.status) == ("done", "done")
    assert len(first.children[0].children) == 2
"""


@pytest.mark.parametrize("late", ["a", "b"])
async def test_parallel_children_play_right_in_any_order(suite: Suite, late: str, tmp_path: Path) -> None:
    """Grandchildren get other numbers when the other parent is late, and twins ask the same."""
    suite.write(NESTED.replace("MARK", "@pytest.mark.asyncio").replace("PROJECT", f"{str(tmp_path)!r}"))
    await suite.passes(NEW, *ASYNCIO, env={"LATE": "a"})
    text = suite.cassette("test_nested").read_text()
    assert [n for n in range(1, 10) if f"text: answer {n}" in text] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert "run: /main/subagent-2/subagent-1" in text
    suite.write(suite.folder.joinpath("test_mine.py").read_text().replace("self.count += 1", "raise AssertionError"))
    await suite.passes(*ASYNCIO, env={"LATE": late})


async def test_what_is_of_the_moment_can_be_ignored(suite: Suite) -> None:
    text = """
import os, retinue
from retinue import Profile
from retinue.testing import scripted

class Test:
    def test_date(self, retinue_cassette):
        retinue_cassette.ignore(r"\\d{4}-\\d\\d-\\d\\d", "<date>")
        model = scripted({"main": [{"text": "hello"}]})
        result = retinue.run_sync(Profile("main", f"Today is {os.environ['TODAY']}.", model=model), "greet")
        assert result.final_response == "hello"
"""
    suite.write(text)
    await suite.passes(NEW, env={"TODAY": "2026-01-01"})
    assert "Today is <date>." in suite.cassette("Test.test_date").read_text()
    await suite.passes(env={"TODAY": "2026-12-31"})


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("Authorization: Bearer abcdefgh12.x", "Authorization: Bearer [secret]"),
        ('{"authorization": "Basic dXNlcjpwYXNz"}', '{"authorization": "Basic [secret]"}'),
        ("x-api-key=12345678abc", "x-api-key=[secret]"),
        ("a ghp_0123456789abcdefghijABCDEFGHIJ012345 b", "a [secret] b"),
        ("AKIAIOSFODNN7EXAMPLE", "[secret]"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_1", "[secret]"),
        ("-----BEGIN RSA PRIVATE KEY-----\nMIIE\n-----END RSA PRIVATE KEY-----!", "[secret]!"),
        ("the author: somebody, the bearer of news", "the author: somebody, the bearer of news"),
    ],
)
def test_no_key_gets_into_a_repository(text: str, left: str) -> None:
    assert redact_keys(text) == left


def test_pytest_without_the_fixture_loads_nothing_of_it(tmp_path: Path) -> None:
    code = (
        "import sys, retinue.pytest_plugin\n"
        "print(sorted(m for m in sys.modules if m.startswith('retinue') or m in ('msgspec', 'yaml', 'apsw')))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "['retinue', 'retinue.pytest_plugin']"
