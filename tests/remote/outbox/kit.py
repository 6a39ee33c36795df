"""Both ends of an outbox by hand: files as a container writes them, and the answers it finds."""

from __future__ import annotations

import hashlib
import json
import os
from decimal import Decimal
from pathlib import Path
from typing import Any

from retinue import Profile
from retinue.core.usage import Usage
from retinue.files.mailbox import Mailbox
from retinue.testing import scripted
from tests.gates import until
from tests.supervisor.tree.kit import call

WORKS = [call("write", path="made.txt", content="made\n"), {"text": "done here"}]


def explorer(replies: list[Any] | None = None, **fields: Any) -> Profile:
    said = WORKS if replies is None else replies
    return Profile("explorer", model=scripted({"explorer": said, "subagent": said}), **fields)


def ask(outbox: Path, name: str, **fields: Any) -> None:
    """Writes a request as our own side does; fields that are None are left out."""
    wanted = {"version": 1, "id": name, "task": "look", "profile": "explorer", **fields}
    put(outbox, f"request_{name}.json", json.dumps({k: v for k, v in wanted.items() if v is not None}).encode())


def put(outbox: Path, name: str, data: bytes) -> None:
    box = Mailbox(outbox, "test")
    box.put_message(name, data)
    box.close()


async def answer(outbox: Path, name: str) -> dict[str, Any]:
    """The response, when it is there and its request is gone."""
    file = outbox / f"response_{name}.json"
    await until(
        lambda: file.is_file() and not file.is_symlink() and not os.path.lexists(outbox / f"request_{name}.json")
    )
    found: dict[str, Any] = json.loads(file.read_bytes())
    return found


def hashes(folder: Path) -> dict[str, str]:
    """Every file below, by content, with links as what they are."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path)] = f"-> {os.readlink(path)}"
        elif path.is_file():
            found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            found[str(path)] = "folder"
    return found


class FlatPrices:
    """Every call is free, and every price is known."""

    def price(self, model: str, usage: Usage) -> Decimal:
        return Decimal(0)
