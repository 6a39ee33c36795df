"""Token counts of model calls, and estimates for missing counts."""

from __future__ import annotations

import math

import msgspec


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts of a call, a run or a tree. Adding two gives their sum.

    `input_tokens` includes the tokens read from and written to the provider's cache."""

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
MOST_TOKENS = 2**53 - 1  # the largest integer that every JSON reader accepts


def repair_usage(usage: object) -> Usage:
    """Return the token counts of a model as whole numbers of 0 or more. Any other value counts as not reported: it
    would make the log unreadable, and a negative count would refund a budget."""
    if not isinstance(usage, Usage):
        return NO_USAGE
    sent, received = usage.input_tokens, usage.output_tokens
    read, written = usage.cache_read_tokens, usage.cache_write_tokens
    if (
        type(sent) is type(received) is type(read) is type(written) is int
        # All at once: a negative count makes the whole negative, and MOST_TOKENS has every bit that a count may have.
        and 0 <= sent | received | read | written <= MOST_TOKENS
    ):
        return usage
    return Usage(*map(_repair_count, (sent, received, read, written)))


def _repair_count(count: object) -> int:
    if not isinstance(count, int | float) or not 0 <= count < math.inf:  # NaN fails the comparison
        return 0
    return min(math.ceil(count), MOST_TOKENS)


def estimate_missing(reported: Usage, *, sent: int, received: int) -> Usage:
    """Return the reported usage, with missing token counts estimated from the characters sent and received."""
    return msgspec.structs.replace(
        reported,
        input_tokens=reported.input_tokens or sent // CHARACTERS_PER_TOKEN + 1,
        output_tokens=reported.output_tokens or received // CHARACTERS_PER_TOKEN,
    )
