"""A server's token, which each client gets once. A private file holds it, signed by the user's key."""

from __future__ import annotations

import os
import re
import secrets
from pathlib import Path

from retinue.core.errors import RetinueError
from retinue.files.atomic import replace_file
from retinue.files.content import read_small_file
from retinue.files.private import make_private_folder
from retinue.files.user_key import has_signature, sign_data

MAX_TOKEN = 100
NONCE_LETTERS = 32
_TOKEN = re.compile(rf"[A-Za-z0-9_-]{{32,{MAX_TOKEN}}}")


def load_token(file: Path, purpose: str) -> str:
    """Return the token in `file`. Creates a new token if the file has none that is private and signed.

    Each client gets the token once, so it stays the same. `purpose` separates the tokens of different servers."""
    try:
        found = _read_token(file, purpose)
        if found:
            return found
        make_private_folder(file.parent)
        nonce = secrets.token_hex(16)
        token = nonce + sign_data(purpose, nonce.encode())
        replace_file(file, token.encode())
        return token
    except OSError as error:
        raise RetinueError(f"cannot keep a token in {file}: {error.strerror or error}") from None


def _read_token(file: Path, purpose: str) -> str:
    """Return the token, or "" unless the file is private, belongs to the user and carries the user's signature."""
    try:
        data = read_small_file(file, MAX_TOKEN, owners=(os.geteuid(),), forbidden_mode=0o077)
    except OSError:
        return ""
    text = data.decode("ascii", "replace")
    nonce, signature = text[:NONCE_LETTERS], text[NONCE_LETTERS:]
    return text if _TOKEN.fullmatch(text) and has_signature(purpose, nonce.encode(), signature) else ""
