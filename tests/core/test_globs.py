"""Patterns of rules: what they match, and that none of them takes for ever."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retinue.core.errors import ConfigError
from retinue.core.globs import MAX_CHARACTERS, GlobPattern, compile_glob
from retinue.core.rules import parse_rule
from tests.gates import limit_calls


def make_regex(pattern: str, *, paths: bool) -> re.Pattern[str]:
    """The same as a regular expression, which is shorter to read and can take for ever."""
    made, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        if paths and pattern.startswith("**/", at):
            made, at = made + "(?:.*/)?", at + 3
        elif char == "*":
            stars = len(pattern) - at - len(pattern[at:].lstrip("*"))
            made, at = made + ("[^/]*" if paths and stars == 1 else ".*"), at + stars
        elif char == "?":
            made, at = made + ("[^/]" if paths else "."), at + 1
        elif char == "[" and (end := pattern.find("]", at + 2)) > 0:
            inside = pattern[at + 1 : end]
            turned = inside[0] == "!" and len(inside) > 1
            made, at = made + f"[{'^' if turned else ''}{re.escape(inside[turned:])}]", end + 1
        else:
            made, at = made + re.escape(char), at + 1
    return re.compile(made, re.DOTALL)


@given(
    st.lists(st.sampled_from(["*", "**", "**/", "?", "[ab]", "[!a]", "a", "b", "/", "."]), max_size=8).map("".join),
    st.text("ab/.\n", max_size=10),
    st.booleans(),
)
def test_patterns_mean_what_the_regular_expression_means(pattern: str, text: str, paths: bool) -> None:
    expected = make_regex(pattern, paths=paths).fullmatch(text) is not None
    assert GlobPattern(pattern, paths=paths).matches(text) == expected


@pytest.mark.finding("X8")
@pytest.mark.parametrize("paths", [True, False])
@pytest.mark.parametrize("part", ["*a", "**/", "**a", "a*b*", "?*", "[a]*"])
def test_a_pattern_made_to_take_for_ever_takes_a_moment(part: str, paths: bool) -> None:
    """Each pattern would take years as a regular expression. Our matcher takes one step for each character of the
    text."""
    pattern = (part * 1000)[: MAX_CHARACTERS - 1] + "!"
    for text in ("ab/" * 1000, "a" * 10_000):
        with limit_calls(10 * len(pattern) + 3 * len(text)):
            assert not compile_glob(pattern, paths=paths).matches(text)


@pytest.mark.finding("X8")
def test_a_pattern_has_an_end() -> None:
    with pytest.raises(ConfigError, match="is longer than the 4096 characters that a pattern can have"):
        parse_rule(f"shell({'a*' * 4096})")
