"""What a server answered made into an Outcome: text for the model, data for programs, the rest kept as files."""

from __future__ import annotations

import base64
import binascii
import mimetypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mcp_types as types
import msgspec

from retinue.core.ports import Outcome
from retinue.files.private import write_private_file
from retinue.tools.mcp import words

LARGEST_FILE = 64 * 1024 * 1024
Spill = Callable[[str], Path]


def outcome_of(result: types.CallToolResult, spill: Spill) -> Outcome:
    """`spill` makes a new file of the calling run's own."""
    parts = [part for block in result.content for part in _block(block, spill)]
    data = result.structured_content
    if data is not None and not any(_says(part, data) for part in parts):
        parts.append(words.plain(msgspec.json.format(msgspec.json.encode(data), indent=2).decode()))
    return Outcome("\n".join(parts), success=not result.is_error, data=data)


def _block(block: types.ContentBlock, spill: Spill) -> Iterator[str]:
    if isinstance(block, types.TextContent):
        yield words.plain(block.text)
    elif isinstance(block, types.ImageContent):
        yield _kept("image", block.data, block.mime_type, spill)
    elif isinstance(block, types.AudioContent):
        yield _kept("audio", block.data, block.mime_type, spill)
    elif isinstance(block, types.ResourceLink):
        about = f": {words.line(block.description)}" if block.description else ""
        yield f"[resource {words.line(block.uri)} ({words.line(block.name)}){about}]"
    elif isinstance(block.resource, types.TextResourceContents):
        resource, data = block.resource, block.resource.text.encode("utf-8", "replace")
        yield _written("resource", data, resource.mime_type or "text/plain", spill, words.line(resource.uri))
        yield words.plain(resource.text)
    else:
        blob = block.resource
        yield _kept("resource", blob.blob, blob.mime_type or "", spill, words.line(blob.uri))


def _kept(kind: str, data: str, mime: str, spill: Spill, name: str = "") -> str:
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return f"[{kind} {name}: not kept, its data is not base64]"
    return _written(kind, raw, mime, spill, name)


def _written(kind: str, data: bytes, mime: str, spill: Spill, name: str = "") -> str:
    what = f"{kind} {name}".strip() + f" ({words.line(mime, 80) or 'unknown type'}, {len(data)} bytes)"
    if len(data) > LARGEST_FILE:
        return f"[{what}: not kept, it is larger than {LARGEST_FILE // 1024 // 1024} MiB]"
    try:
        path = spill(f"{kind}{mimetypes.guess_extension(mime.partition(';')[0].strip()) or '.bin'}")
        write_private_file(path, data, exclusive=True)
    except OSError as error:
        return f"[{what}: not kept, {error.strerror or error}]"
    return f"[{what} in {path}]"


def _says(text: str, data: Any) -> bool:
    """Whether the text is the data already, as servers do for clients that look at one of them only."""
    if isinstance(data, dict) and list(data.values()) == [text]:
        return True
    try:
        return bool(msgspec.json.decode(text) == data)
    except (msgspec.DecodeError, RecursionError):
        return False
