"""Tests of MCP tools in runs: the model's view of them, the messages sent, and the results."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import threading
import tracemalloc
from pathlib import Path
from typing import Any

import anyio
import mcp_types as types
import msgspec
import pytest
from mcp.shared.message import SessionMessage

import retinue
from retinue import ConfigError, Profile
from retinue.core.events import Warned
from retinue.core.limits import INLINE_BYTES
from retinue.tools.mcp.server_messages import (
    MAX_PARTS,
    MAX_REQUESTS,
    TOO_MANY_PARTS,
    LenientReader,
    SentWatcher,
    ServerRequests,
    explain_excess,
    parse_server_message,
)
from retinue.tools.mcp.server_text import READ, cap_text, to_line
from retinue.tools.mcp.servers import _make_text
from retinue.tools.mcp.tool_listing import LISTING_STEPS, ToolListing
from tests.gates import limit_calls
from tests.supervisor.tree.kit import bodies
from tests.tools.mcp.kit import call, http_server, main, offered, program, quick_program, results, run, turns


async def test_what_comes_back() -> None:
    script = turns(
        call("mcp__calm__add", a=2, b=3),
        call("mcp__calm__say", text="a\x1b[31mb\x07c\ttab"),
        call("mcp__calm__fail"),
        call("mcp__calm__picture"),
        call("mcp__calm__add", a="two", b=3),
        call("mcp__calm__add", a=2),
        call("mcp__calm__say", text="x", loud=None),
    )
    result, events = await run({"calm": quick_program("calm")}, script)
    added, said, failed, picture, wrong, missing, null = results(events)
    assert result.status == "done"
    assert added.success and '"total": 5' in added.text
    assert said.text == "a[31mbc\ttab"  # no byte that a terminal would obey
    assert not failed.success and "made of cheese" in failed.text
    assert wrong.text == "mcp__calm__add: at ['a']: 'two' is not of type 'integer'" and not wrong.success
    assert "'b' is a required property" in missing.text
    assert null.text == "x"  # models write null for what they leave out
    assert picture.text.startswith("here\n[image (image/png, 15 bytes) in ")
    assert picture.text.endswith("a note")


async def test_files_are_the_runs_own(tmp_path: Path) -> None:
    _, events = await run(
        {"calm": quick_program("calm")}, turns(call("mcp__calm__picture")), path=tmp_path / ".retinue", project=tmp_path
    )
    [picture] = results(events)
    kept = [Path(part.partition("]")[0]) for part in picture.text.split(" in ")[1:]]
    assert [path.suffix for path in kept] == [".png", ".txt"]
    for path in kept:
        assert path.parent == tmp_path / ".retinue" / "runs" / events[0].tree / "0" / "full_logs"
        assert path.stat().st_mode & 0o777 == 0o600
    assert kept[0].read_bytes() == b"\x89PNG not really" and kept[1].read_text() == "a note"


async def test_what_models_see() -> None:
    _, events = await run({"calm": quick_program("calm", tools=["add", "dele*"])}, turns())
    tools = offered(events)
    assert set(tools) == {"mcp__calm__add", "mcp__calm__delegate"}
    add = tools["mcp__calm__add"]
    assert (add["server"], add["description"], len(add["seal"])) == ("calm", "Adds two numbers.", 32)
    assert add.get("tier", "confirm") == "confirm"  # whatever it says of itself


@pytest.mark.requirement("P7")
async def test_large_answers_are_cut_and_kept(tmp_path: Path) -> None:
    size = 12_000_000
    script = turns(call("mcp__calm__large", size=size))
    _, events = await run({"calm": quick_program("calm")}, script, path=tmp_path / ".retinue", project=tmp_path)
    [large] = results(events)
    assert len(large.text) <= INLINE_BYTES and "bytes cut; whole text in" in large.text
    assert Path(large.file).stat().st_size == size


@pytest.mark.requirement("P36")
async def test_a_child_has_the_tools_it_was_given() -> None:
    reader = Profile("reader", "You read.", tools=["read"])
    adder = Profile("adder", "You add.", tools=["mcp__calm__add"])
    script: dict[str, Any] = {
        "main": [
            {"tools": [{"name": f"subagent_{name}", "args": {"task": "go"}} for name in ("reader", "adder", "same")]},
            {"text": "done"},
        ],
        "reader": turns(call("mcp__calm__add", a=1, b=1)),
        "adder": turns(call("mcp__calm__add", a=1, b=1), call("mcp__calm__say", text="x")),
        "same": turns(call("mcp__calm__say", text="x")),
    }
    same = Profile("same", "You do the same.")
    entries = ["mcp__calm__add", "mcp__calm__say", reader, adder, same]
    _, events = await run({"calm": quick_program("calm")}, script, fields={"tools": entries})
    assert [set(offered(events, run)) for run in range(4)] == [
        {"mcp__calm__add", "mcp__calm__say"},
        set(),
        {"mcp__calm__add"},
        {"mcp__calm__add", "mcp__calm__say"},
    ]
    said = {number: [body.text for body in results(events, number)] for number in (1, 2, 3)}
    assert said[1] == ["Unknown tool 'mcp__calm__add'. Available tools: read"]
    assert '"total": 2' in said[2][0] and said[2][1].startswith("Unknown tool 'mcp__calm__say'")
    assert said[3] == ["x"]


async def test_patterns_of_a_profile_and_names_that_mean_nothing() -> None:
    servers = {"calm": quick_program("calm")}
    _, events = await run(servers, turns(), fields={"tools": ["mcp__calm__*"]})
    assert "mcp__calm__delegate" in offered(events)
    _, events = await run(servers, turns(), fields={"tools": ["mcp__calm__nothing", "read"]})
    assert offered(events) == {}
    assert [body.text for body in bodies(events, Warned)] == [
        "the MCP server 'calm' has no tool that 'mcp__calm__nothing' means"
    ]
    async with retinue.open(mcp_servers=servers) as r:
        with pytest.raises(ConfigError, match="unknown MCP server 'clam' in 'mcp__clam__add'; available: calm"):
            await r.spawn(main({"main": turns()}, tools=["mcp__clam__add"]), "go")


async def test_an_odd_tool_is_left_out_and_said_so(tmp_path: Path) -> None:
    said: list[str] = []
    async with retinue.open(mode="yes", mcp_servers={"lame": program("bad", "lame", str(tmp_path))}) as r:
        await r.control.prepare(None, said.append)
        run = await r.spawn(main({"main": turns(call("mcp__lame__one"))}), "go")
        events = [event async for event in run.events()]
    assert set(offered(events)) == {"mcp__lame__one", "mcp__lame__an_odd_name"}
    assert results(events)[0].text == "life 1"
    assert said == [
        "warning: the MCP server 'lame': its tool 'broken' is left out: 'no such type' is not valid under any of the "
        "given schemas"
    ]


@pytest.mark.parametrize("revision", ["2025-11-25", "2026-07-28"])
async def test_tools_that_cannot_be_read_are_left_out_and_the_others_work(revision: str, tmp_path: Path) -> None:
    said: list[str] = []
    mode = "modern" if revision == "2026-07-28" else "unreadable"
    async with retinue.open(mode="yes", mcp_servers={"lame": program("bad", mode, str(tmp_path))}) as r:
        await r.control.prepare(None, said.append)
        servers: Any = r.control.servers
        assert servers.connections["lame"].revision == revision
        run = await r.spawn(main({"main": turns(call("mcp__lame__last"))}), "go")
        events = [event async for event in run.events()]
    expected = {
        "text": "its 'inputSchema' is not what MCP requires",
        "typeless": "its 'inputSchema.type' is missing",
        "without": "its 'inputSchema' is missing",
        "[31m" + ("long" * 100)[:76] + " [... 324 characters cut]": "its 'inputSchema.type' is not what MCP requires",
        "number 6": "its 'name' is not what MCP requires",
        "number 7": "it is not an object",
    }
    good = {"mcp__lame__one", "mcp__lame__last"}
    if revision == "2026-07-28":
        good.add("mcp__lame__lists")
    else:
        expected["lists"] = "its 'outputSchema.type' is not what MCP requires"
    assert set(offered(events)) == good
    assert results(events)[0].text == "life 1"
    warning = "warning: the MCP server 'lame': its tool '{}' is left out: {}"
    assert said == [warning.format(name, why) for name, why in expected.items()]


async def test_a_list_of_tools_that_is_no_list_is_an_error_of_the_server(tmp_path: Path) -> None:
    _, events = await run({"lame": program("bad", "unlisted", str(tmp_path))}, turns())
    assert offered(events) == {}
    [warned] = bodies(events, Warned)
    assert "the MCP server 'lame' is not available: its 'tools' is not what MCP requires; it is being" in warned.text


async def test_a_message_with_too_many_values_is_not_parsed(tmp_path: Path) -> None:
    """Parsing costs up to a hundred times the bytes of the message."""
    _, events = await run({"lame": program("bad", "bomb", str(tmp_path))}, turns())
    assert offered(events) == {}
    [warned] = bodies(events, Warned)
    assert "not available: it sent a message with more than 1,000,000 values" in warned.text


def test_a_long_text_in_a_message_is_not_many_values() -> None:
    message = json.dumps({"text": ',"[{\\' * 500_000}).encode()
    assert len(message) > MAX_PARTS and explain_excess(message) == ""
    assert explain_excess(message + b"," * MAX_PARTS) == TOO_MANY_PARTS


def test_half_characters_are_replaced_without_a_call_for_each_escape() -> None:
    texts = {
        r"\n" * 100_000 + r"\ud800": "\n" * 100_000 + "\ufffd",
        r"\\ud800\ud83d\ude00\udc00": "\\ud800\U0001f600\ufffd",
    }
    for text, meant in texts.items():
        line = f'{{"jsonrpc": "2.0", "id": 1, "result": {{"text": "{text}"}}}}'.encode()
        with limit_calls(10_000):
            message = parse_server_message(line)
        assert isinstance(message, types.JSONRPCResponse) and message.result == {"text": meant}


def test_of_a_long_text_only_its_beginning_is_read() -> None:
    """It may have 64 MiB, and looking for keys in it takes seconds."""
    assert to_line(" " * READ + "late") == " [... 4 characters cut]"
    assert cap_text("x" * READ + "\0" * 5, 10) == f"{'x' * 10} [... {READ - 5} characters cut]"
    assert cap_text("a\0b" * 100, 200) == "ab" * 100


async def test_a_page_of_many_wrong_tools_costs_little(tmp_path: Path) -> None:
    """Neither more tools than are used nor the many errors of one tool are looked through."""
    said: list[str] = []
    async with retinue.open(mode="yes", mcp_servers={"lame": program("bad", "crowd", str(tmp_path))}) as r:
        await r.control.prepare(None, said.append)
        servers: Any = r.control.servers
        assert set(servers.connections["lame"].tools) == {"mcp__lame__one", "mcp__lame__again"}
    about = "warning: the MCP server 'lame': its "
    large = f"{about}tool 'large' is left out: its schema is larger than 128 KiB"
    many = f"{about}tool 'many' is left out: it is not what MCP requires"
    again = f"{about}tool 'again' is left out: another one has the same name"
    assert said == [large, many, *[again] * 508, f"{about}other tools are left out: 512 are enough"]


async def test_a_listing_costs_a_bounded_number_of_steps_and_none_of_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checks of one tool may take half a second, and everything else would stand still meanwhile."""
    monkeypatch.setattr("retinue.tools.bounded_schema.SCHEMA_STEPS", 1_000_000)
    monkeypatch.setattr("retinue.tools.mcp.tool_listing.LISTING_STEPS", 4_000_000)
    said: list[str] = []
    async with retinue.open(mode="yes", mcp_servers={"bad": program("bad", "costly", str(tmp_path))}) as r:
        with limit_calls(2_000_000):  # of this thread
            await r.control.prepare(None, said.append)
        servers: Any = r.control.servers
        assert set(servers.connections["bad"].tools) == {"mcp__bad__one", "mcp__bad__light0"}
    warning = "warning: the MCP server 'bad': its tool '{}' is left out: {}"
    own = "its schema takes too many steps to check"
    together = "its server has too many or too large tools to read them all"
    names = [*(f"heavy{number}" for number in range(8)), *(f"light{number}" for number in range(1, 8))]
    warnings = [text for text in said if not text.startswith("waiting")]  # it may take longer than our patience
    assert warnings[0] == warning.format("heavy0", own)
    assert warnings[4:] == [warning.format(name, together) for name in names[4:]]


async def test_a_listing_reads_only_the_wanted_tools(tmp_path: Path) -> None:
    said: list[str] = []
    server = program("bad", "costly", str(tmp_path), tools=["light*", "none"])
    async with retinue.open(mode="yes", mcp_servers={"bad": server}) as r:
        await r.control.prepare(None, said.append)
        servers: Any = r.control.servers
        assert set(servers.connections["bad"].tools) >= {f"mcp__bad__light{number}" for number in range(4)}
    assert said[-1] == "warning: the MCP server 'bad': it has no tool 'none', which mcp_servers.bad.tools names"
    assert not any("heavy" in text for text in said)


async def test_arguments_and_results_are_checked_beside_the_event_loop() -> None:
    threads: list[threading.Thread] = []

    class Recording:
        def find_error(self, value: Any, steps: Any = None) -> None:
            threads.append(threading.current_thread())

    async with retinue.open(mode="yes", mcp_servers={"calm": quick_program("calm")}) as r:
        await r.control.prepare()
        servers: Any = r.control.servers
        tools = servers.connections["calm"].tools
        tools["mcp__calm__add"] = dataclasses.replace(tools["mcp__calm__add"], checked=Recording(), output=Recording())
        run = await r.spawn(main({"main": turns(call("mcp__calm__add", a=1, b=2))}), "go")
        assert (await run.result()).status == "done"
        assert not servers.connections["calm"]._client.session._tool_output_schemas  # the SDK keeps them for ever
    assert len(threads) == 2 and threading.main_thread() not in threads


async def test_a_tool_that_changes_while_its_arguments_are_checked_is_not_called() -> None:
    class Changing:
        def find_error(self, value: Any, steps: Any = None) -> None:
            tools["mcp__calm__say"] = dataclasses.replace(
                tools["mcp__calm__say"], spec=msgspec.structs.replace(tools["mcp__calm__say"].spec, seal="another")
            )

    async with retinue.open(mode="yes", mcp_servers={"calm": quick_program("calm")}) as r:
        await r.control.prepare()
        servers: Any = r.control.servers
        tools = servers.connections["calm"].tools
        tools["mcp__calm__say"] = dataclasses.replace(tools["mcp__calm__say"], checked=Changing())
        run = await r.spawn(main({"main": turns(call("mcp__calm__say", text="x"))}), "go")
        events = [event async for event in run.events()]
    assert results(events)[0].text == (
        "mcp__calm__say was changed by its server while the arguments were checked, so it was not run. Call it again."
    )


async def test_a_server_that_sends_requests_and_reads_no_answers_is_ended(tmp_path: Path) -> None:
    """Each request is a task, which waits until the server reads its answer."""
    _, events = await run({"odd": program("bad", "pings", str(tmp_path))}, turns(call("mcp__odd__one")))
    [result] = results(events)
    assert result.text == (
        "the MCP server 'odd' went away during the call: "
        f"it sent more than {MAX_REQUESTS} requests without waiting for answers"
    )


def test_requests_of_a_server_count_until_they_are_answered_or_cancelled() -> None:
    requests = ServerRequests()
    for number in range(3 * MAX_REQUESTS):
        requests.note_received(types.JSONRPCRequest(jsonrpc="2.0", id=number, method="ping"))
        assert not requests.are_too_many
        params = {"requestId": str(number)}
        ends: list[Any] = [
            types.JSONRPCResponse(jsonrpc="2.0", id=number, result={}),
            types.JSONRPCError(jsonrpc="2.0", id=number, error=types.ErrorData(code=1, message="")),
            types.JSONRPCNotification(jsonrpc="2.0", method="notifications/cancelled", params=params),
        ]
        (requests.note_received if number % 3 == 2 else requests.note_sent)(ends[number % 3])
    for _ in range(MAX_REQUESTS + 1):  # the same id again and again
        assert not requests.are_too_many
        requests.note_received(types.JSONRPCRequest(jsonrpc="2.0", id=1, method="ping"))
    assert requests.are_too_many


async def test_blank_lines_take_no_time_of_the_event_loop(tmp_path: Path) -> None:
    async with retinue.open(mode="yes", mcp_servers={"odd": program("bad", "blank", str(tmp_path))}) as r:
        await r.control.prepare()
        with limit_calls(2_000_000):
            run = await r.spawn(main({"main": turns(call("mcp__odd__one"))}), "go")
            events = [event async for event in run.events()]
    assert results(events)[0].text == "at last"


def test_only_the_first_texts_of_a_result_are_compared_with_its_data() -> None:
    """To compare a text is to parse it, and a result may have a thousand texts."""
    data = {"one": 1, "two": 2}
    for before, times in ((0, 1), (3, 1), (10, 2)):
        assert _make_text(["[]"] * before + [json.dumps(data)], data).count("two") == times


def test_of_a_tool_that_is_left_out_no_long_name_is_kept() -> None:
    """A page may have 64 MiB of names, and a listing has many pages."""
    listing = ToolListing("s", None)
    listing.add_page([types.Tool(name=f"{number}" * 15_000_000, input_schema={"type": "object"}) for number in (1, 2)])
    assert not listing.tools and [len(note) < 300 for note in listing.list_notes()] == [True, True]


def test_the_first_tools_of_a_large_listing_are_used() -> None:
    description = "long " * 1_000_000
    listing = ToolListing("s", None)
    listing.add_page([types.Tool(name=f"t{n}", description=description, input_schema={}) for n in range(4)])
    assert list(listing.tools) == ["mcp__s__t0", "mcp__s__t1"]
    too_much = "is left out: its server has too many or too large tools to read them all"
    assert listing.list_notes() == [f"its tool 't{n}' {too_much}" for n in (2, 3)]


def test_a_hundred_tools_take_less_than_a_quarter_of_the_steps() -> None:
    """Each has ten arguments and ten fields of its result, and names no dialect, as pydantic writes them."""
    field = {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None, "title": "A Field"}
    schema = {"type": "object", "properties": {f"field{n}": field for n in range(10)}, "required": ["field0"]}
    listing = ToolListing("s", None)
    listing.add_page([types.Tool(name=f"t{n}", input_schema=schema, output_schema=schema) for n in range(100)])
    assert len(listing.tools) == 100 and listing._steps.left > LISTING_STEPS * 3 // 4


def test_a_wanted_tool_that_was_not_read_is_not_called_missing() -> None:
    listing = ToolListing("s", ["t0", "t600"])
    listing.add_page([types.Tool(name=f"t{n}", input_schema={"type": "object"}) for n in range(601)])
    assert list(listing.tools) == ["mcp__s__t0"]
    assert listing.list_notes() == ["its other tools are left out: 512 are enough"]


async def test_data_is_indented_only_if_that_does_not_make_it_much_longer(tmp_path: Path) -> None:
    server = program("bad", "wide", str(tmp_path))
    _, events = await run({"odd": server}, turns(call("mcp__odd__one")), path=tmp_path / ".retinue")
    text = Path(results(events)[0].file).read_text()
    assert len(text) < 1_000_000 and json.loads(text)["two"] == 2  # 20 MB with the indentation


@pytest.mark.parametrize("answered", [7, "7"])
async def test_a_page_has_only_its_used_fields_when_its_tools_are_checked(answered: types.RequestId) -> None:
    """Each tool is checked together with the page, which may have a million other values."""
    page: dict[str, Any] = {"tools": [{"name": "one", "inputSchema": {"type": "object"}}], "nextCursor": "2"}
    more = {f"name {number}": 0 for number in range(1000)}
    list_ids: set[types.RequestId] = set()
    to_us, ours = anyio.create_memory_object_stream[SessionMessage | Exception](1)
    theirs, from_us = anyio.create_memory_object_stream[SessionMessage](1)
    shared: dict[str, Any] = {"list_ids": list_ids, "requests": ServerRequests()}
    reader = LenientReader(ours, get_revision=lambda: "2025-11-25", on_excess=pytest.fail, **shared)
    async with to_us, reader, from_us, SentWatcher(theirs, **shared) as writer:
        await writer.send(SessionMessage(types.JSONRPCRequest(jsonrpc="2.0", id=7, method="tools/list")))
        message = types.JSONRPCResponse(jsonrpc="2.0", id=answered, result={**page, "_meta": more, **more})
        await to_us.send(SessionMessage(message))
        await reader.receive()
    assert message.result == page and not list_ids


async def test_a_field_named_tools_of_another_result_takes_nothing_from_it(tmp_path: Path) -> None:
    _, events = await run({"odd": program("bad", "extra", str(tmp_path))}, turns(call("mcp__odd__one")))
    [result] = results(events)
    assert result.success and result.text == "took effect"


async def test_a_result_of_very_many_parts_is_cut(tmp_path: Path) -> None:
    _, events = await run({"odd": program("bad", "flood", str(tmp_path))}, turns(call("mcp__odd__one")))
    [flood] = results(events)
    assert flood.success and flood.text.startswith(
        "x\n[content of the type 'int' was left out: it cannot be read here]"
    )
    assert flood.text.endswith("\n[2001 more parts were left out: 1000 are enough]")


async def test_a_text_that_repeats_the_data_of_a_result_is_parsed_only_within_the_bounds_of_a_message(
    tmp_path: Path,
) -> None:
    """A text counts as one value of the message, so it can hold any number of values."""
    tracemalloc.start()
    try:
        _, events = await run({"odd": program("bad", "packed", str(tmp_path))}, turns(call("mcp__odd__one")))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    [packed] = results(events)
    assert packed.success and packed.text.startswith("[[],[],")
    assert peak < 60_000_000  # a million lists need 64 MB


async def test_numbers_that_are_not_json_are_read_as_python_writes_them(tmp_path: Path) -> None:
    _, events = await run({"odd": program("bad", "nan", str(tmp_path))}, turns(call("mcp__odd__one")))
    [result] = results(events)
    assert result.success and json.loads(result.text) == {"one": None, "two": None}


async def test_an_answer_of_many_levels_is_read(tmp_path: Path) -> None:
    server = program("bad", "nested", str(tmp_path), env={"LEVELS": "240"})
    _, events = await run({"odd": server}, turns(call("mcp__odd__one")), path=tmp_path / ".retinue")
    [result] = results(events)
    assert result.success, result.text
    assert "".join(Path(result.file).read_text().split()) == '{"one":' + "[" * 241 + "]" * 241 + ',"two":1}'


async def test_an_answer_of_more_levels_than_the_sdk_passes_on_fails_only_its_call(tmp_path: Path) -> None:
    server = program("bad", "nested", str(tmp_path), env={"LEVELS": "800"})
    _, events = await run({"odd": server}, turns(call("mcp__odd__one"), call("mcp__odd__one")))
    why = "mcp__odd__one: the server's answer is not MCP: Maximum serialization depth exceeded"
    assert [(body.success, body.text) for body in results(events)] == [(False, why)] * 2
    assert (tmp_path / "nested.lives").read_text() == "x"


async def test_over_http_with_a_key_that_stands_in_no_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CALM_SECRET", "open-sesame-1234")
    async with http_server() as url:
        server = {"url": url, "headers": {"Authorization": "Bearer ${CALM_SECRET}"}}
        script = turns(
            call("mcp__calm__add", a=2, b=2),
            call("mcp__calm__say", text="open-sesame-1234"),
            call("mcp__calm__large", size=3_000_000),
        )
        _, events = await run({"calm": server}, script, path=tmp_path / ".retinue")
    added, said, large = results(events)
    assert '"total": 4' in added.text and Path(large.file).stat().st_size == 3_000_000
    assert said.text == "[secret]"
    assert not any(b"open-sesame" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    _, events = await run({"calm": {**server, "headers": {"Authorization": "${NO_SUCH}"}}}, turns())
    assert "the variable NO_SUCH is not set" in bodies(events, Warned)[0].text


async def test_the_newest_revision_both_know_is_spoken() -> None:
    async with http_server() as url, retinue.open(mode="yes", mcp_servers={"calm": {"url": url}}) as r:
        await r.control.prepare()
        servers: Any = r.control.servers
        assert servers.connections["calm"].revision == "2026-07-28"


@pytest.mark.parametrize("runtime", ["inherited", "isolated"])
async def test_they_work_in_a_sandbox(runtime: str, tmp_path: Path) -> None:
    """A sandboxed run has no network and no server of its own: the call goes over the link."""
    script = turns(
        call("mcp__calm__add", a=20, b=22), call("mcp__calm__large", size=200_000), call("mcp__calm__picture")
    )
    servers = {"calm": quick_program("calm")}
    (tmp_path / "project").mkdir()
    given: dict[str, Any] = {"path": tmp_path / ".retinue", "project": tmp_path / "project", "runtime": runtime}
    result, events = await run(servers, script, **given)
    assert result.status == "done", result.error_details
    added, large, picture = results(events)
    assert '"total": 42' in added.text
    assert len(large.text) <= INLINE_BYTES and Path(large.file).stat().st_size == 200_000
    assert " in " in picture.text


@pytest.mark.finding("M4")
@pytest.mark.parametrize("runtime", ["inherited", "isolated"])
async def test_a_file_that_a_tool_returned_can_be_read_by_the_run(runtime: str, tmp_path: Path) -> None:
    """The text names a path; the run's own tools, wherever they work, find the bytes there."""
    (tmp_path / "project").mkdir()
    given: dict[str, Any] = {"path": tmp_path / ".retinue", "project": tmp_path / "project", "runtime": runtime}
    folder = "full_logs" if runtime == "inherited" else "host_outputs"
    seen = call("shell", command=f"cd ../{folder} && cat *.png *.txt")
    script = turns(call("shell", command="true"), call("mcp__calm__picture"), seen)
    _, events = await run({"calm": quick_program("calm")}, script, fields={"workspace": "scratch"}, **given)
    _, picture, read = results(events)
    kept = [part.partition("]")[0] for part in picture.text.split(" in ")[1:]]
    assert [Path(path).suffix for path in kept] == [".png", ".txt"], picture.text
    assert Path(kept[0]).read_bytes() == b"\x89PNG not really"
    assert "PNG not really" in read.text and "a note" in read.text, (picture.text, read.text)


@pytest.mark.finding("M8")
async def test_content_of_an_unknown_kind_costs_only_itself(tmp_path: Path) -> None:
    _, events = await run({"odd": program("bad", "mixed", str(tmp_path))}, turns(call("mcp__odd__one")))
    [mixed] = results(events)
    assert mixed.success and mixed.text.startswith("before\n") and mixed.text.endswith("\nafter")
    assert mixed.text.count("was left out") == 3 and "'hologram'" in mixed.text


@pytest.mark.finding("M8")
async def test_a_tool_of_a_server_that_never_started_says_so(tmp_path: Path) -> None:
    _, events = await run({"gone": program("bad", "exits", str(tmp_path))}, turns(call("mcp__gone__one")))
    [refused] = results(events)
    assert not refused.success and refused.text.startswith("the MCP server 'gone' is not available: "), refused.text
    assert "cannot find my configuration" in refused.text


async def test_the_client_of_the_conformance_suite_calls_every_tool(tmp_path: Path) -> None:
    """`make conformance` runs the suite; this test checks the client that the suite drives."""
    script = Path(__file__).parents[3] / "scripts" / "conformance-client"
    wanted = {"toolCalls": [{"name": "add", "arguments": {"a": 1, "b": 1}}, {"name": "ask", "arguments": {}}]}
    async with http_server() as url:
        client = await asyncio.create_subprocess_exec(
            sys.executable, str(script), url, cwd=tmp_path, stdout=asyncio.subprocess.PIPE,
            env={**os.environ, "MCP_CONFORMANCE_CONTEXT": json.dumps(wanted)},
        )  # fmt: skip
        said, _ = await client.communicate()
    assert client.returncode == 0
    assert b"mcp__peer__add: True: " in said and b"mcp__peer__ask: True: cancel: None" in said
