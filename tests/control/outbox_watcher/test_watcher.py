"""The host's side of an outbox, with whatever a container may put into it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retinue import Limits
from retinue.control.delegation_request import WatcherSettings
from retinue.control.outbox_watcher import HELD, OutboxWatcher
from retinue.core.events import Inbox, RunSpawned
from retinue.core.limits import Timeouts
from retinue.files.mailbox import Mailbox
from tests.gates import until
from tests.remote.outbox.kit import FlatPrices, answer, ask, explorer, hashes, put
from tests.sandbox.hosts import Host, host
from tests.supervisor.tree.kit import call


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Make a folder that is shared, beside a folder that is not."""
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "notes.txt").write_text("one\n")
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "key").write_text("planted-secret")
    return folder


def inherited(*roots: Path, **options: Any) -> Any:
    """A host without sandboxes, which is all that questions of files need."""
    profiles = options.pop("profiles", [explorer()])
    return host(*roots, profiles=profiles, runtime="inherited", **options)


@pytest.mark.requirement("MASS-9", "MASS-10", "MASS-15", "P33")
async def test_a_request_is_run_and_answered_once(work: Path) -> None:
    async with inherited(work) as there:
        ask(there.outbox, "a-1", workspace=str(work), hint="harmless")
        said = await answer(there.outbox, "a-1")
        assert (said["status"], said["final_response"], said["id"]) == ("done", "done here", "a-1")
        assert "hint" in said["warning"]
        lines = [json.loads(line) for line in (there.outbox / "events_a-1.ndjson").read_text().splitlines()]
        assert len(lines) == said["events"]
        kinds = [line["kind"] for line in lines]
        assert (kinds[0], kinds[2], kinds[-1]) == ("run.spawned", "run.started", "run.ended")
        assert (kinds[1], lines[1]["code"]) == ("warning", "network")  # without a sandbox it has what the host has
        assert "profile" not in lines[0] and "tools" not in lines[0] and not lines[0]["workspace"]
        assert sorted(os.listdir(there.outbox)) == ["events_a-1.ndjson", "response_a-1.json"]
        assert (work / "made.txt").read_text() == "made\n" and (work / "notes.txt").read_text() == "one\n"
        assert any("a-1: done" in text for text in there.said)
        ask(there.outbox, "a-2", workspace=str(work))  # one that comes while it watches
        assert (await answer(there.outbox, "a-2"))["final_response"] == "done here"


async def test_the_events_name_no_folder_and_no_settings_of_the_host(work: Path) -> None:
    async with inherited(work, limits=Limits(tokens=9000), prices=FlatPrices()) as there:
        ask(there.outbox, "a", workspace=str(work), context_paths=[str(work)], baggage="user=1")
        await answer(there.outbox, "a")
        events = (there.outbox / "events_a.ndjson").read_text()
        assert str(there.folder) not in events
        first = json.loads(events.splitlines()[0])
        assert not {"context_paths", "limits", "files", "baggage", "traceparent", "max_tokens"} & set(first)


@pytest.mark.finding("S13")
@pytest.mark.requirement("MASS-9", "MASS-15")
def test_a_message_is_whole_under_its_name_or_not_there(tmp_path: Path) -> None:
    """A reader of the old file still reads all of it, and a writer that fails leaves the old file in place."""
    box, place = Mailbox(tmp_path, "host"), tmp_path / "response_a-1.json"
    place.write_text("old answer")
    with place.open() as reader:
        box.put_message(place.name, b"new answer")
        assert reader.read() == "old answer"
    assert place.read_text() == "new answer"
    with pytest.raises(TypeError):
        box.put_message(place.name, "no bytes")  # type: ignore[arg-type]
    assert place.read_text() == "new answer" and os.listdir(tmp_path) == [place.name]
    box.close()


async def test_the_same_id_again_has_the_same_answer_and_no_second_effect(work: Path) -> None:
    async with inherited(work) as there:
        ask(there.outbox, "a-1", workspace=str(work))
        first = await answer(there.outbox, "a-1")
        (there.outbox / "response_a-1.json").unlink()
        ask(there.outbox, "a-1", workspace="/", task="another thing", image="x")
        assert await answer(there.outbox, "a-1") == first
        assert len(there.trees) == 1


@pytest.mark.requirement("MASS-11", "MASS-12", "MASS-17", "P34")
@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"image": "evil"}, "may not set 'image'"),
        ({"profile": "nobody"}, "unknown profile 'nobody'"),
        ({"workspace": "/etc"}, "not below a folder that the host allows"),
        ({"workspace": "WORK/../secret"}, "plain path"),
        ({"workspace": "WORK/link"}, "leads over a link"),
        ({"workspace": "WORK/link/inner"}, "leads over a link"),
        ({"workspace": "WORK/notes.txt"}, "cannot be used"),
        ({"workspace": "WORK/missing"}, "cannot be used"),
        ({"workspace": "WORK/.git"}, "inside a .git folder"),
        ({"workspace": "WORK/.git/hooks"}, "inside a .git folder"),
        ({"workspace": "WORK/.retinue/logs"}, "inside a .retinue folder"),
        ({"workspace": "WORK-beside"}, "not below"),
        ({"context_paths": ["/etc/passwd"]}, "context_paths[0] '/etc/passwd' is not below"),
        ({"context_paths": ["WORK", "WORK/file-link"]}, "context_paths[1]"),
        ({"context_paths": ["WORK/pipe"]}, "cannot be used"),
        ({"context_paths": ["WORK/.retinue/control"]}, "inside a .retinue folder"),
    ],
)  # fmt: skip
async def test_what_may_not_be_is_answered_with_an_error_and_nothing_runs(
    work: Path, fields: dict[str, Any], said: str
) -> None:
    (work / "link").symlink_to(work.parent / "secret")
    (work / "file-link").symlink_to("/etc/passwd")
    (work / ".git").mkdir()
    os.mkfifo(work / "pipe")
    (work.parent / "work-beside").mkdir()
    before = hashes(work.parent)
    asked = json.loads(json.dumps({"workspace": "WORK", **fields}).replace("WORK", str(work)))
    async with inherited(work) as there:
        ask(there.outbox, "a-1", **asked)
        response = await answer(there.outbox, "a-1")
        assert response["status"] == "failed" and said in response["error_details"]
        assert there.trees == []
    assert hashes(work.parent) == before


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(path))


def _sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 36)


def _linked(path: Path) -> None:
    other = path.with_name("elsewhere")
    other.write_text("{}")
    os.link(other, path)


def _foreign(path: Path) -> None:
    path.write_text("{}")
    os.chown(path, 54321, 54321)


ODD: dict[str, Callable[[Path], Any]] = {
    "a link to a secret": lambda path: path.symlink_to(path.parents[2] / "secret" / "key"),
    "a link to nothing": lambda path: path.symlink_to("/nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a folder": lambda path: path.mkdir(),
    "a folder with something in it": lambda path: (path / "x").mkdir(parents=True),
    "a pipe": _pipe,
    "a socket": _socket,
    "a device": lambda path: os.mknod(path, 0o20666, os.makedev(1, 5)),
    "a sparse file": _sparse,
    "too much": lambda path: path.write_bytes(b" " * (1024 * 1024 + 1)),
    "a hard link": _linked,
    "somebody else's": _foreign,
    "empty": lambda path: path.write_bytes(b""),
    "deep": lambda path: path.write_bytes(b'{"a":' * 90_000),
}


@pytest.mark.requirement("P33", "P34")
@pytest.mark.parametrize("kind", ODD)
async def test_what_is_no_request_is_answered_and_not_followed(work: Path, kind: str) -> None:
    async with inherited(work) as there:
        try:
            ODD[kind](there.outbox / "request_odd-1.json")
        except PermissionError:
            pytest.skip("only root can make that")
        await until((there.outbox / "response_odd-1.json").exists)
        response = json.loads((there.outbox / "response_odd-1.json").read_bytes())
        assert response["status"] == "failed" and "planted-secret" not in json.dumps(response)
        ask(there.outbox, "a-1", workspace=str(work))
        assert (await answer(there.outbox, "a-1"))["status"] == "done"
        assert len(there.trees) == 1


@pytest.mark.parametrize("kind", ["a link to a secret", "a folder with something in it", "a pipe", "empty"])
async def test_a_response_that_is_there_already_is_replaced_and_not_followed(work: Path, kind: str) -> None:
    before = hashes(work.parent / "secret")
    async with inherited(work) as there:
        for name in ("response_a-1.json", "events_a-1.ndjson"):
            ODD[kind](there.outbox / name)
        ask(there.outbox, "a-1", workspace=str(work))
        await until(lambda: not os.path.lexists(there.outbox / "request_a-1.json"))
        assert (await answer(there.outbox, "a-1"))["final_response"] == "done here"
    assert hashes(work.parent / "secret") == before


async def test_a_forged_claim_costs_only_the_one_who_made_it(work: Path) -> None:
    async with inherited(work) as there:
        (there.outbox / "claim_a-1").touch()
        ask(there.outbox, "a-1", workspace=str(work))
        assert (await answer(there.outbox, "a-1"))["status"] == "disconnected"
        assert there.trees == []


@pytest.mark.requirement("MASS-18")
async def test_cancel_is_honoured_before_during_and_after(work: Path) -> None:
    hangs = explorer([{"text": "so far", **call("list_agents")}, {"hang": True}])
    async with inherited(work, profiles=[hangs]) as there:
        (there.outbox / "cancel_before").touch()
        ask(there.outbox, "before", workspace=str(work))
        assert (await answer(there.outbox, "before"))["status"] == "cancelled"
        assert there.trees == []
        ask(there.outbox, "during", workspace=str(work))
        events = there.outbox / "events_during.ndjson"
        await until(lambda: events.exists() and "tool.result" in events.read_text())
        os.mkfifo(there.outbox / "cancel_during")  # whatever has the name is a cancel, and nobody opens it
        said = await answer(there.outbox, "during")
        assert (said["status"], said["partial"]) == ("cancelled", "so far")
        (there.outbox / "cancel_during").touch()
        await until(lambda: not (there.outbox / "cancel_during").exists())
        assert await answer(there.outbox, "during") == said
        assert len(there.trees) == 1


def _words(path: Path) -> None:
    put(path.parent, path.name, b'{"run": 0, "text": "left"}')


@pytest.mark.requirement("P34", "P35")
@pytest.mark.parametrize(
    ("write", "heard"),
    [
        (_words, ["left"]),
        (ODD["a link to a secret"], []),
        (ODD["a folder with something in it"], []),
        (ODD["a pipe"], []),
        (ODD["too much"], []),
        (ODD["a hard link"], []),
        (ODD["deep"], []),
        (lambda path: put(path.parent, path.name, b'{"run": 9, "text": "left"}'), []),
        (lambda path: put(path.parent, path.name, b'{"run": -1, "text": "left"}'), []),
        (lambda path: put(path.parent, path.name, b'{"run": 0, "text": ""}'), []),
    ],
)
async def test_words_reach_a_run_as_those_of_the_side_that_asked(
    work: Path, write: Callable[[Path], Any], heard: list[str]
) -> None:
    waits = explorer([call("shell", command="until [ -e go ]; do sleep 0.02; done"), {"text": "over"}])
    async with inherited(work, profiles=[waits]) as there:
        (there.outbox / "steer_other_0000.json").write_text("{}")
        ask(there.outbox, "a-1", workspace=str(work))
        await until(lambda: bool(there.trees))
        run = there.supervisor.trees[there.trees[0]].runs[0]
        write(there.outbox / "steer_a-1_0000.json")
        await until(lambda: not (there.outbox / "steer_a-1_0000.json").is_file())
        put(there.outbox, "steer_a-1_0001.json", b'{"run": 0, "text": "go"}')
        await until(lambda: not (there.outbox / "steer_a-1_0001.json").exists())
        await until(Path(run.folders.path).exists)
        (Path(run.folders.path) / "go").touch()
        assert (await answer(there.outbox, "a-1"))["status"] == "done"
        events = await there.supervisor.log.read(there.trees[0])
        assert [(e.body.text, e.body.source) for e in events if isinstance(e.body, Inbox)] == [
            (text, "asker") for text in [*heard, "go"]
        ]
        put(there.outbox, "steer_a-1_0002.json", b'{"run": 0, "text": "late"}')
        await until(lambda: not (there.outbox / "steer_a-1_0002.json").exists())
        assert (there.outbox / "steer_other_0000.json").exists()


async def test_a_request_that_waits_for_its_turn_can_be_cancelled(work: Path) -> None:
    hangs = explorer([{"hang": True}])
    async with inherited(work, profiles=[hangs], limits=Limits(concurrent=1)) as there:
        ask(there.outbox, "one", workspace=str(work))
        await until(lambda: bool(there.trees))
        ask(there.outbox, "two", workspace=str(work))
        (there.outbox / "cancel_two").touch()
        assert (await answer(there.outbox, "two"))["status"] == "cancelled"
        assert len(there.trees) == 1


async def test_two_watchers_are_one(work: Path, tmp_path: Path) -> None:
    async with inherited(work) as there:
        said: list[str] = []
        second = OutboxWatcher(there.supervisor, _hosting(there, work, tmp_path / "other", said))
        waiting = asyncio.create_task(second.watch())
        for number in range(20):
            ask(there.outbox, f"a-{number}", workspace=str(work))
        for number in range(20):
            assert (await answer(there.outbox, f"a-{number}"))["status"] == "done"
        assert len(there.trees) == 20 and said == [HELD]
        waiting.cancel()
        await asyncio.wait([waiting])
        await second.close()


def _hosting(there: Host, work: Path, state: Path, said: list[str]) -> WatcherSettings:
    return WatcherSettings(
        outbox=there.outbox,
        roots=[work],
        project=state,
        state=state,
        find=lambda _: explorer(),
        limits=Limits(),
        timeouts=Timeouts(),
        say=said.append,
    )


@pytest.mark.requirement("P34")
@pytest.mark.parametrize(
    ("asked", "depth", "seconds"),
    [
        ({}, 0, 1800.0),
        ({"depth": 99, "timeout_seconds": 10**9}, 3, 14400.0),
        ({"depth": 1, "timeout_seconds": 700}, 1, 700.0),
    ],
)
async def test_depth_and_time_are_only_narrowed(work: Path, asked: dict[str, Any], depth: int, seconds: float) -> None:
    deeper = [call("spawn_subagents", tasks=[{"task": "down"}]), {"text": "{{last_result}}"}]
    async with inherited(work, profiles=[explorer(deeper)]) as there:
        ask(there.outbox, "a", workspace=str(work), **asked)
        said = await answer(there.outbox, "a")
        events = await there.supervisor.log.read(there.trees[0])
        spawned = [event.body for event in events if isinstance(event.body, RunSpawned)]
        assert len(spawned) == 1 + depth and spawned[0].timeout_seconds == seconds
        assert "depth limit exceeded" in json.dumps(said)


async def test_limits_that_a_person_set_on_the_host_bound_what_is_asked(work: Path) -> None:
    limited = explorer(limits=Limits(seconds=300.0, depth=0))
    async with inherited(work, profiles=[limited]) as there:
        ask(there.outbox, "a", workspace=str(work), depth=3, timeout_seconds=500)
        await answer(there.outbox, "a")
        [first] = [e.body for e in await there.supervisor.log.read(there.trees[0]) if isinstance(e.body, RunSpawned)]
        assert first.timeout_seconds == 300.0


async def test_what_a_run_changes_is_brought_back_and_nothing_else(work: Path) -> None:
    (work / ".git").mkdir()
    (work / ".git" / "config").write_text("theirs")
    (work / "old").write_text("old")
    (work / "deep").mkdir()
    (work / "deep" / "kept").write_text("kept")
    (work / "whole" / "folder").mkdir(parents=True)
    (work / "whole" / "folder" / "f").write_text("x")
    os.link(work / "deep" / "kept", work.parent / "secret" / "linked")
    command = (
        "rm -r old whole; mkdir -p new/er .git/hooks; echo x > new/er/f; chmod +x new/er/f; echo more >> deep/kept; "
        "ln -s /etc/passwd leak; mkfifo p; echo evil > .git/hooks/pre-commit; ls -A"
    )
    replies = [call("shell", command=command), {"text": "{{last_result}}"}]
    async with inherited(work, profiles=[explorer(replies)]) as there:
        ask(there.outbox, "a", workspace=str(work))
        said = await answer(there.outbox, "a")
        assert "not brought back: leak (a link), p (a FIFO)" in said["warning"]
    assert sorted(path.name for path in work.iterdir()) == [".git", "deep", "new", "notes.txt"]
    assert [path.name for path in (work / ".git").iterdir()] == ["config"]
    assert (work / "deep" / "kept").read_text() == "keptmore\n"
    assert (work.parent / "secret" / "linked").read_text() == "kept"  # a new file took the place of the name
    assert os.access(work / "new" / "er" / "f", os.X_OK)


async def test_context_is_a_copy_that_is_read_and_named(work: Path) -> None:
    (work / "ctx").mkdir()
    (work / "ctx" / "fact.txt").write_text("the sky is blue\n")
    (work / "ctx" / "leak").symlink_to(work.parent / "secret" / "key")
    (work / "box").mkdir()
    replies = [call("grep", pattern="."), {"text": "{{last_result}}"}]
    async with inherited(work, profiles=[explorer(replies)]) as there:
        paths = [str(work / "ctx"), str(work / "notes.txt")]
        ask(there.outbox, "a", workspace=str(work / "box"), context_paths=paths)
        said = await answer(there.outbox, "a")
        assert "the sky is blue" in said["final_response"] and "planted" not in said["final_response"]
        [first] = [e.body for e in await there.supervisor.log.read(there.trees[0]) if isinstance(e.body, RunSpawned)]
        assert f"{work / 'ctx'} is " in first.task_context
        assert list((there.folder / "project" / ".retinue" / "outbox").glob("*.copies/*")) == []


async def test_names_that_are_none_of_ours_are_left_alone(work: Path) -> None:
    async with inherited(work) as there:
        for name in ("request_a b.json", "request_.json", ".asks-1", "notes", "cancel_unknown", "response_x.json"):
            put(there.outbox, name, b"{}")
        ask(there.outbox, "a", workspace=str(work))
        await answer(there.outbox, "a")
        assert {"request_a b.json", "request_.json", ".asks-1", "notes", "cancel_unknown"} <= set(
            os.listdir(there.outbox)
        )


@pytest.mark.finding("S11")
@pytest.mark.requirement("MASS-15")
@pytest.mark.parametrize("name", ["explorer_18c7a5fe1b2c3d4e", "Big-Explorer_18C7", "A" * 128])
async def test_ids_of_our_own_format_are_answered(work: Path, name: str) -> None:
    async with inherited(work) as there:
        ask(there.outbox, name, workspace=str(work), subagent_id="explorer_1")
        assert (await answer(there.outbox, name))["status"] == "done"
        events = await there.supervisor.log.read(there.trees[0])
        assert [event.body.subagent_id for event in events if isinstance(event.body, RunSpawned)] == ["explorer_1"]


@pytest.mark.finding("S11")
async def test_an_id_that_is_none_is_refused_with_a_message(work: Path) -> None:
    async with inherited(work) as there:
        put(there.outbox, "request_a b.json", b"{}")
        ask(there.outbox, "a", workspace=str(work))
        await answer(there.outbox, "a")
        [said] = [line for line in there.said if "a b" in line]
        assert said.startswith("'request_a b.json' is not taken: the id of a request has 1 to 128 of")


class Swapper:
    """Puts a link in the place of a folder and back, as fast as it can."""

    def __init__(self, path: Path, target: Path) -> None:
        self.path, self.swaps, self.stop = path, 0, False
        self.kept, self.link = path.with_name("kept"), path.with_name("link")
        self.link.symlink_to(target)

    def run(self) -> None:
        while not self.stop:
            self.path.rename(self.kept)
            self.link.rename(self.path)
            self.path.rename(self.link)
            self.kept.rename(self.path)
            self.swaps += 1


@pytest.mark.parametrize("swaps", [1000, pytest.param(10_000, marks=[pytest.mark.soak])])
@pytest.mark.requirement("MASS-11")
async def test_a_path_that_is_swapped_while_it_is_looked_at_leads_nowhere(work: Path, swaps: int) -> None:
    box = work / "a" / "box"
    box.mkdir(parents=True)
    secret = work.parent / "secret"
    (secret / "box").mkdir()
    before, seen, number = hashes(secret), set(), 0
    swapper = Swapper(work / "a", secret)
    swapping = asyncio.create_task(asyncio.to_thread(swapper.run))
    replies = [call("shell", command="cat key ../key 2>/dev/null; echo x > made"), {"text": "{{last_result}}"}]
    async with inherited(work, profiles=[explorer(replies)]) as there:
        while swapper.swaps < swaps or len(seen) < 2:
            number += 1
            ask(there.outbox, f"a-{number}", workspace=str(box), context_paths=[str(work / "a")])
            said = await answer(there.outbox, f"a-{number}")
            assert "planted" not in json.dumps(said)
            seen.add(said["status"])
    swapper.stop = True
    await swapping
    assert hashes(secret) == before
    assert seen == {"done", "failed"}


@pytest.mark.requirement("P34")
@pytest.mark.parametrize(
    ("asked", "tokens", "cost"),
    [
        ({}, 9000, None),
        ({"tokens": 50_000, "cost": "7.5"}, 9000, "7.5"),
        ({"tokens": 5000}, 5000, None),
        ({"tokens": "many", "cost": "NaN"}, 0, "0"),
    ],
)
async def test_budget_and_trace_travel_down_and_only_narrow(
    work: Path, asked: dict[str, Any], tokens: int, cost: str | None
) -> None:
    above = f"00-{'a' * 32}-{'b' * 16}-01"
    async with inherited(work, limits=Limits(tokens=9000), prices=FlatPrices()) as there:
        ask(there.outbox, "a", workspace=str(work), traceparent=above, **asked)
        await answer(there.outbox, "a")
        [first] = [e.body for e in await there.supervisor.log.read(there.trees[0]) if isinstance(e.body, RunSpawned)]
        assert (first.max_tokens, None if first.max_cost is None else str(first.max_cost)) == (tokens, cost)
        assert (first.trace_id, first.traceparent) == ("a" * 32, above)
