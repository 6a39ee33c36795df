"""The messages that A2A clients send, checked: words, files, answers to questions, and what is left to a calling run.

Everything in a message is data of a stranger. What cannot be used is refused with the protocol's error and a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from a2a.types import Message, Part, Role, SendMessageRequest
from a2a.utils.errors import ContentTypeNotSupportedError, InvalidParamsError
from google.protobuf.json_format import MessageToDict

from retinue.core.caller import NOBODY, Caller
from retinue.core.limits import EVENT_BYTES
from retinue.core.traces import traceparent_of
from retinue.protocol.a2a import EXTENSION, ApprovalAnswer, read_answer, read_command_metadata, read_request_metadata

ID_CHARACTERS = 200
MOST_FILES = 16
MOST_PARTS = 64
FILE_NAME_CHARACTERS = 100
NO_URI = "a file by its address is not fetched: send its bytes"


class ClientMessage(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a client. `files` are names and bytes; `caller` is what is left to the run that asks, if it comes
    from one; `run` is the run of the task that its words are for."""

    message_id: str
    task_id: str
    context_id: str
    text: str
    files: tuple[tuple[str, bytes], ...]
    answers: tuple[ApprovalAnswer, ...]
    caller: Caller
    run: int = 0


def read_message(params: SendMessageRequest, headers: Mapping[str, str]) -> ClientMessage:
    """Return the message of a request. Raises the protocol's errors."""
    message = params.message
    if not params.HasField("message") or not message.parts:
        raise InvalidParamsError("params.message must have a messageId, a role and at least one part")
    if message.role == Role.ROLE_AGENT:
        raise InvalidParamsError("params.message.role must be 'user': the agent here speaks for itself")
    if len(message.parts) > MOST_PARTS:
        raise InvalidParamsError(f"params.message.parts has more than {MOST_PARTS} parts")
    words: list[str] = []
    files: list[tuple[str, bytes]] = []
    answers: list[ApprovalAnswer] = []
    for number, part in enumerate(message.parts):
        _read_part(part, f"params.message.parts[{number}]", words, files, answers)
    text = "\n\n".join(word for word in words if word.strip())
    if len(text.encode("utf-8", "replace")) > EVENT_BYTES // 2:
        raise InvalidParamsError(f"the text is larger than {EVENT_BYTES // 2} bytes: send it as a file")
    if not (text or files or answers):
        raise InvalidParamsError("the message is empty: say what to do")
    return ClientMessage(
        message_id=_check_id(message.message_id, "messageId", required=True),
        task_id=_check_id(message.task_id, "taskId"),
        context_id=_check_id(message.context_id, "contextId"),
        text=text,
        files=tuple(files),
        answers=tuple(answers),
        caller=_read_caller(params, message, headers),
        run=read_command_metadata(MessageToDict(message.metadata).get(EXTENSION)),
    )


def _read_part(
    part: Part, place: str, words: list[str], files: list[tuple[str, bytes]], answers: list[ApprovalAnswer]
) -> None:
    match part.WhichOneof("content"):
        case "text":
            words.append(part.text)
        case "raw":
            if len(files) == MOST_FILES:
                raise InvalidParamsError(f"a message may have at most {MOST_FILES} files")
            if len(part.raw) > EVENT_BYTES:
                raise InvalidParamsError(f"{place}: a file may have at most {EVENT_BYTES} bytes")
            files.append((_clean_file_name(part.filename, {name for name, _ in files}), part.raw))
        case "url":
            raise ContentTypeNotSupportedError(f"{place}: {NO_URI}")
        case "data":
            data = MessageToDict(part.data)
            try:
                answer = read_answer(data)
            except msgspec.ValidationError as error:
                raise InvalidParamsError(f"{place}: not a well formed answer: {error}") from None
            if answer is None:
                words.append(msgspec.json.encode(data).decode())
            else:
                answers.append(answer)
        case _:
            raise InvalidParamsError(f"{place} has no content: give it text, data or the bytes of a file")


def _clean_file_name(name: str, taken: set[str]) -> str:
    """Return a name that is one plain component of a path and that no other file of the message has."""
    last = name.replace("\\", "/").rpartition("/")[2]
    kept = "".join(c if c.isalnum() or c in "-_. " else "_" for c in last).strip(". ")[:FILE_NAME_CHARACTERS]
    found = kept = kept or "file"
    number = 1
    while found in taken:
        number += 1
        found = f"{number}-{kept}"
    return found


def _check_id(value: str, name: str, *, required: bool = False) -> str:
    if required and not value:
        raise InvalidParamsError(f"params.message.{name} is missing")
    if len(value) > ID_CHARACTERS or not value.isprintable():
        raise InvalidParamsError(f"params.message.{name} must be at most {ID_CHARACTERS} printable characters")
    return value


def _read_caller(params: SendMessageRequest, message: Message, headers: Mapping[str, str]) -> Caller:
    """Return what is left to the run that asks: by our extension, or at least its trace by the usual header."""
    for metadata in (message.metadata, params.metadata):
        found: Any = MessageToDict(metadata).get(EXTENSION)
        if isinstance(found, dict):
            return read_request_metadata(found).as_client()
    trace = traceparent_of(headers.get("traceparent", ""))
    return Caller(traceparent=trace) if trace else NOBODY
