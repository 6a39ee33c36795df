"""The events that a peer may see, and what is taken out of them."""

from __future__ import annotations

import json

import msgspec
import pytest

from retinue.core import events
from retinue.core.events import Body, Event, Message, RunEnded, RunSpawned, ToolResult, encode_event
from retinue.core.limits import Limits
from retinue.protocol.peer_events import REPORTED, SENT, strip_event

HERE = "/host/secret"
SEEN = {"parent", "label", "depth", "task", "subagent_id", "workspace", "model", "call_id", "trace_id", "span_id"}


def of(body: Body) -> Event:
    return Event(tree="t", run=0, path="/main", agent="a", seq=1, at=0.0, body=body)


def test_a_first_event_says_nothing_of_this_machine() -> None:
    spawned = RunSpawned(
        parent=None,
        label="label",
        depth=0,
        task="task",
        subagent_id="id",
        workspace=HERE,
        profile={"instructions": HERE},
        tools=[HERE],
        task_context=HERE,
        model="model",
        call_id="call",
        limits=Limits(turns=3),
        context_paths=(HERE,),
        baggage=HERE,
        traceparent=HERE,
        files=(HERE,),
        reported=HERE,
        server=HERE,
        remote_id=HERE,
    )
    shown = strip_event(of(spawned))
    assert shown is not None and shown.seq == 1
    line = json.loads(encode_event(shown))
    assert HERE not in json.dumps(line)
    assert set(line) & set(spawned.__struct_fields__) <= SEEN
    assert (line["label"], line["task"], line["model"], line["call_id"]) == ("label", "task", "model", "call")


@pytest.mark.parametrize(
    "body",
    [ToolResult("c", "shell", "cut", file=HERE), RunEnded("done", "cut", 0, file=HERE), Message("cut", file=HERE)],
)  # fmt: skip
def test_files_with_whole_texts_are_not_named(body: Body) -> None:
    shown = strip_event(of(body))
    assert shown is not None and HERE not in encode_event(shown).decode() and b"cut" in encode_event(shown)


def test_only_kinds_that_a_peer_may_report_are_shown() -> None:
    kinds = [kind for kind in vars(events).values() if isinstance(kind, type) and issubclass(kind, Body)]
    hidden = [kind for kind in kinds if kind not in (Body, RunSpawned, *SENT)]
    assert set(SENT) - set(REPORTED) == {events.RunResumed}  # has no fields
    assert events.RunRemote in hidden and events.AnswerGiven in hidden  # a reference of ours; a folder of ours
    for kind in hidden:
        values = {field.name: HERE for field in msgspec.structs.fields(kind) if field.required}
        assert strip_event(of(kind(**values))) is None
