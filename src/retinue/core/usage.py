"""Tokens a run has spent, and what they cost."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Counts for one call, one run or one tree; adding two gives their sum.

    `input_tokens` are all that went in; those read from and written to the provider's cache are among them."""

    input_tokens: int = 0
    output_tokens: int = 0
    cache_read_tokens: int = 0
    cache_write_tokens: int = 0

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cache_read_tokens + other.cache_read_tokens,
            self.cache_write_tokens + other.cache_write_tokens,
        )


NO_USAGE = Usage()
CHARACTERS_PER_TOKEN = 4


def estimate_missing(reported: Usage, *, sent: int, received: int) -> Usage:
    """Return the reported usage, with an estimate for tokens that were not reported, from the characters that were
    sent and received."""
    return msgspec.structs.replace(
        reported,
        input_tokens=reported.input_tokens or sent // CHARACTERS_PER_TOKEN + 1,
        output_tokens=reported.output_tokens or received // CHARACTERS_PER_TOKEN,
    )
