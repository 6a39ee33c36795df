"""Results of server tools as Outcomes: text for the model, data for programs, images and other blobs as files."""

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
from retinue.tools.mcp.server_text import strip_unseen, to_line

MAX_FILE_BYTES = 64 * 1024 * 1024
Spill = Callable[[str], Path]


def make_outcome(result: types.CallToolResult, spill: Spill) -> Outcome:
    """Make the Outcome of a call. `spill` names a new file of the calling run."""
    parts = [part for block in result.content for part in _render_block(block, spill)]
    data = result.structured_content
    if data is not None and not any(_is_same_data(part, data) for part in parts):
        parts.append(strip_unseen(msgspec.json.format(msgspec.json.encode(data), indent=2).decode()))
    return Outcome("\n".join(parts), success=not result.is_error, data=data)


def _render_block(block: types.ContentBlock, spill: Spill) -> Iterator[str]:
    if isinstance(block, types.TextContent):
        yield strip_unseen(block.text)
    elif isinstance(block, types.ImageContent):
        yield _save_base64("image", block.data, block.mime_type, spill)
    elif isinstance(block, types.AudioContent):
        yield _save_base64("audio", block.data, block.mime_type, spill)
    elif isinstance(block, types.ResourceLink):
        about = f": {to_line(block.description)}" if block.description else ""
        yield f"[resource {to_line(block.uri)} ({to_line(block.name)}){about}]"
    elif isinstance(block.resource, types.TextResourceContents):
        resource, data = block.resource, block.resource.text.encode("utf-8", "replace")
        yield _save_file("resource", data, resource.mime_type or "text/plain", spill, to_line(resource.uri))
        yield strip_unseen(resource.text)
    else:
        blob = block.resource
        yield _save_base64("resource", blob.blob, blob.mime_type or "", spill, to_line(blob.uri))


def _save_base64(kind: str, data: str, mime: str, spill: Spill, name: str = "") -> str:
    try:
        raw = base64.b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        return f"[{kind} {name}: not kept, its data is not base64]"
    return _save_file(kind, raw, mime, spill, name)


def _save_file(kind: str, data: bytes, mime: str, spill: Spill, name: str = "") -> str:
    what = f"{kind} {name}".strip() + f" ({to_line(mime, 80) or 'unknown type'}, {len(data)} bytes)"
    if len(data) > MAX_FILE_BYTES:
        return f"[{what}: not kept, it is larger than {MAX_FILE_BYTES // 1024 // 1024} MiB]"
    try:
        path = spill(f"{kind}{mimetypes.guess_extension(mime.partition(';')[0].strip()) or '.bin'}")
        write_private_file(path, data, exclusive=True)
    except OSError as error:
        return f"[{what}: not kept, {error.strerror or error}]"
    return f"[{what} in {path}]"


def _is_same_data(text: str, data: Any) -> bool:
    """Tell whether the text repeats the data, as servers do for clients that read only one of them."""
    if isinstance(data, dict) and list(data.values()) == [text]:
        return True
    try:
        return bool(msgspec.json.decode(text) == data)
    except (msgspec.DecodeError, RecursionError):
        return False
