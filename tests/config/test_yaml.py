"""Tests of strict YAML: accepted and refused texts, and refusals as one line with file, line and key."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml as pyyaml
from hypothesis import given, settings
from hypothesis import strategies as st

import retinue.config.yaml as strict
from retinue.config.located import Node, make_node
from retinue.config.location import SourceLocation
from retinue.config.yaml import parse_yaml, read_yaml
from retinue.core.errors import ConfigError


def plain(text: str) -> object:
    return parse_yaml(text, "f.yaml").to_plain()


def refusal(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "f.yaml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


def section(text: str) -> Node:
    return parse_yaml(text, "f.yaml")


def test_scalars_mean_what_they_mean_in_yaml_1_2() -> None:
    assert plain("[null, ~, true, False, 0, -3, +4, 1.5, .5, 1e3, '1', yes, no, on, 1:30, 0x1f, 010]") == [
        None, None, True, False, 0, -3, 4, 1.5, 0.5, 1000.0, "1", "yes", "no", "on", "1:30", "0x1f", "010",
    ]  # fmt: skip


def test_mappings_lists_and_block_texts() -> None:
    assert plain("a:\n  - b: |\n      two\n      lines\n  - {}\n") == {"a": [{"b": "two\nlines\n"}, {}]}
    assert plain("") is None
    assert plain("2020-01-01") == "2020-01-01"
    assert plain("# nothing\n") is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2\n", "f.yaml:4: key 'b.c': appears twice, first on line 3"),
        ("a:\n  b: !!python/object/apply:os.system [ls]\n", "f.yaml:2: key 'a.b': tags are not allowed"),
        ("a: !!str 1\n", "f.yaml:1: key 'a': tags are not allowed"),
        ("a: ! x\n", "f.yaml:1: key 'a': tags are not allowed"),
        ("!x a: 1\n", "f.yaml:1: tags are not allowed"),
        ("a: &x 1\n", "f.yaml:1: key 'a': anchors are not allowed"),
        ("a: 1\nb: [*x]\n", "f.yaml:2: key 'b[0]': aliases are not allowed"),
        ("agents:\n  *: []\n", "f.yaml:2: is not valid YAML: "),
        ("a: 1\n1: 2\n", 'f.yaml:2: keys must be texts; quote this one: "1"'),
        ("true: 2\n", 'f.yaml:1: keys must be texts; quote this one: "true"'),
        ("? [a]\n: 2\n", "f.yaml:1: a list or mapping cannot be a key"),
        ("a: 1\n---\nb: 2\n", "f.yaml:2: a second document begins here"),
        ("a: .nan\n", "f.yaml:1: key 'a': '.nan' is not a number"),
        ("a: -.inf\n", "f.yaml:1: key 'a': '-.inf' is not a number"),
        ("a: 1e999\n", "f.yaml:1: key 'a': expected a number, got one that is not finite"),
        (f"a: {'9' * 5000}\n", "f.yaml:1: key 'a': the whole number does not fit in 64 bits"),
        (f"a: {2**64}\n", "f.yaml:1: key 'a': the whole number does not fit in 64 bits"),
        ("a: b: c\n", "f.yaml:1: is not valid YAML: mapping values are not allowed"),
        ("a:\n\t- b\n", "f.yaml:2: is not valid YAML: "),
        ("a: [1\n", "f.yaml:2: is not valid YAML: "),
        ("a: 1\nb: \x07\n", "f.yaml:2: has a character that YAML does not allow (U+0007)"),
        ("a: \ud800\n", "f.yaml:1: has a character that YAML does not allow (U+D800)"),
    ],
)
def test_hostile_yaml_is_refused_with_its_line(text: str, expected: str) -> None:
    assert refusal(text).startswith(expected)


def test_an_alias_bomb_stops_at_its_first_anchor() -> None:
    bomb = "a: &a [x,x]\n" + "".join(f"{c}: &{c} [*{p},*{p}]\n" for p, c in zip("abcdefgh", "bcdefghi", strict=True))
    assert "f.yaml:1: key 'a': anchors are not allowed" in refusal(bomb)


@pytest.mark.parametrize("opening", ["[", "- ", "{a: ", "? ", "- - ? "])
def test_deep_nesting_is_refused_without_recursing(opening: str) -> None:
    message = refusal(opening * 1_000_000)
    assert "nested deeper than 64 levels" in message or "cannot be a key" in message
    assert len(message) < 400


@pytest.mark.parametrize("loader", [pyyaml.SafeLoader, getattr(pyyaml, "CSafeLoader", pyyaml.SafeLoader)])
def test_both_parsers_refuse_the_same(loader: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict, "_LOADER", loader)
    assert plain("a: [1, {b: c}]") == {"a": [1, {"b": "c"}]}
    for text in ('a: "\\ud800"', "[" * 100_000, "a: &x 1", "a: !!str 1", "a: 1\na: 2", "a: 1\n---\nb: 1"):
        refusal(text)


def test_hidden_characters_in_keys_are_escaped_in_the_message() -> None:
    assert "key 'a\\nb\\u202e.c'" in refusal('"a\\nb\\u202e": {c: 1, c: 2}')


def test_section_gives_typed_values() -> None:
    s = section("t: x\ni: 3\nn: 2\nf: true\nl: [a, b]\ns: {k: 1}\np: [1, {a: null}]\nz:\n")
    readers = {"t": Node.text, "i": Node.integer, "n": Node.number, "f": Node.flag, "l": Node.texts, "z": Node.text}
    inner = {"s": lambda node: node.read_keys({"k": Node.integer}), "p": Node.to_plain, "absent": Node.text}
    assert s.read_keys(readers | inner) == {
        "t": "x", "i": 3, "n": 2.0, "f": True, "l": ("a", "b"), "s": {"k": 1}, "p": [1, {"a": None}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("method", "text", "expected"),
    [
        ("text", "k: 3", "f.yaml:1: key 'k': expected a text, got a number (quote it to make it a text)"),
        ("text", "k: [a]", "f.yaml:1: key 'k': expected a text, got a list"),
        ("integer", "k: x", "f.yaml:1: key 'k': expected a whole number, got a text"),
        ("integer", "k: 1.5", "f.yaml:1: key 'k': expected a whole number, got 1.5"),
        ("integer", "k: true", "f.yaml:1: key 'k': expected a whole number, got true"),
        ("number", "k: {a: 1}", "f.yaml:1: key 'k': expected a number, got a mapping"),
        ("flag", "k: yes", "f.yaml:1: key 'k': expected true or false, got a text"),
        ("texts", "k: 3", "f.yaml:1: key 'k': expected a list of texts, got a number"),
        (
            "texts",
            "k:\n  - a\n  - 3",
            "f.yaml:3: key 'k[1]': expected a text, got a number (quote it to make it a text)",
        ),
        ("entries", "k: []", "f.yaml:1: key 'k': expected a mapping, got a list"),
    ],
)
def test_wrong_types_are_named(method: str, text: str, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(section(text).require("k"), method)()
    assert str(caught.value) == expected


def test_ranges() -> None:
    with pytest.raises(ConfigError, match="key 'k': must be 1 or more, got 0"):
        section("k: 0").require("k").integer(minimum=1)
    with pytest.raises(ConfigError, match="key 'k': must be 5 or less, got 6"):
        section("k: 6").require("k").number(maximum=5)


def test_unknown_keys_list_the_allowed_ones_and_the_likely_one() -> None:
    with pytest.raises(ConfigError) as caught:
        section("model: x\nmax_dept: 3\n").read_keys({"model": Node.text, "max_depth": Node.integer})
    expected = "f.yaml:2: key 'max_dept': unknown key; allowed here: max_depth, model; did you mean 'max_depth'?"
    assert str(caught.value) == expected


def test_a_missing_key_names_the_misspelt_one() -> None:
    with pytest.raises(ConfigError, match=r"f\.yaml:1: the key 'name' is missing; did you mean 'nam'\?"):
        section("nam: x").require("name")


def test_python_values_are_checked_alike() -> None:
    assert make_node({"a": [1, (2.5, None)]}, SourceLocation("script")).to_plain() == {"a": [1, [2.5, None]]}
    loop: list[object] = []
    loop.append(loop)
    for value in ({1: 2}, {"a": object()}, {"a": float("nan")}, {"a": 2**70}, {"a": "\ud800"}, {"\ud800": 1}, loop):
        with pytest.raises(ConfigError, match=r"^script"):
            make_node(value, SourceLocation("script"))


def test_files(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_bytes(b"\xef\xbb\xbfa: 1\r\nb: 2\r\n")
    assert read_yaml(good).to_plain() == {"a": 1, "b": 2}
    link = tmp_path / "link.yaml"
    link.symlink_to(good)
    assert read_yaml(link).to_plain() == {"a": 1, "b": 2}


def bad_files(folder: Path) -> dict[str, Path]:
    (folder / "latin").write_bytes(b"a: 1\nb: \xe9\n")
    (folder / "nul").write_bytes(b"a: 1\nb: \0\n")
    (folder / "huge").write_bytes(b"#" * (4 * 1024 * 1024 + 1))
    (folder / "nowhere").symlink_to(folder / "gone")
    os.mkfifo(folder / "fifo")
    return {
        "no such file": folder / "missing",
        "folder, not a file": folder,
        "latin:2: is not UTF-8 text": folder / "latin",
        "nul:2: has a NUL character": folder / "nul",
        "huge: is larger than 4 MiB": folder / "huge",
        "nowhere: no such file": folder / "nowhere",
        "fifo: is not a regular file": folder / "fifo",
        "is not a usable file name": Path("a\0b"),
        "File name too long": folder / ("x" * 300),
        "missing: no such file": folder / "latin" / "missing",
    }


def test_unreadable_files_are_one_line_that_names_the_file(tmp_path: Path) -> None:
    for expected, path in bad_files(tmp_path).items():
        with pytest.raises(ConfigError) as caught:
            read_yaml(path)
        assert expected in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


@settings(deadline=None)
@given(st.text())
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse_yaml(text, "f.yaml")
    except ConfigError as error:
        assert "\n" not in str(error)


@pytest.mark.finding("X8")
def test_a_file_of_very_many_values_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match=r"f:24999: has more than 50,000 keys and values"):
        parse_yaml("a: 1\n" + "".join(f"k{n}: 1\n" for n in range(200_000)), "f")
