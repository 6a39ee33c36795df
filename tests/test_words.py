"""The measurable part of how the code should read, held by a list of exceptions that may only get shorter.

`python -m tests.test_words` drops from the list what is no longer an exception.
"""

import ast
import importlib.util
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REPO = Path(__file__).resolve().parent.parent
ALLOWED = Path(__file__).with_name("allowed_words.json")
PACKAGE = "src/retinue"
MOST_PERCENT = {  # to be lowered, never raised
    (PACKAGE, "one_word_functions_percent"): 4.0,
    (PACKAGE, "one_word_methods_percent"): 40.2,
    (PACKAGE, "vague_words_percent"): 3.9,
    ("tests", "vague_words_percent"): 6.1,
    ("bench", "vague_words_percent"): 3.2,
}

ADVICE = {
    "relative docstrings": "start a docstring with a verb or a noun",
    "participle names": "name a function by a verb with an object",
    "class names that stand twice": "one name, one meaning in the whole package",
    "function names that stand twice": "one name, one meaning in the whole package",
}
OLD_WORDS = {"desk": "open questions", "wish": "order, or what was asked for"}
ENTRY_POINTS = {"main"}  # of each program


def load_shape() -> ModuleType:
    """Import scripts/shape, which has no suffix."""
    loader = SourceFileLoader("shape", str(REPO / "scripts/shape"))
    spec = importlib.util.spec_from_loader("shape", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shape"] = module  # its dataclasses look themselves up there
    loader.exec_module(module)
    return module


SHAPE = load_shape()


@cache
def load_modules(folder: str = PACKAGE) -> list[Any]:
    return list(SHAPE.load_modules(REPO / folder))


@cache
def measure_words(folder: str) -> dict[str, Any]:
    return dict(SHAPE.measure_words(load_modules(folder)))


@cache
def list_exceptions() -> dict[str, list[str]]:
    """List what breaks each rule now, as `module:name`."""
    return {
        "relative docstrings": sorted(find_relative()),
        "participle names": sorted(find_participles()),
        "class names that stand twice": find_repeated_names(ast.ClassDef),
        "function names that stand twice": find_repeated_names(ast.FunctionDef, ast.AsyncFunctionDef),
    }


def find_relative() -> Iterator[str]:
    """Yield the docstrings of the package, the tests and the bench that begin with a relative clause."""
    for module in (*load_modules(), *load_modules("tests"), *load_modules("bench")):
        for node, text in SHAPE.find_docstrings(module.tree):
            if text.split()[0].strip(",.:;") in SHAPE.RELATIVE:
                yield f"{module.name}:{getattr(node, 'name', '')}"


def find_participles() -> Iterator[str]:
    for module in load_modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and SHAPE.is_participle(node.name):
                yield f"{module.name}:{node.name}"


def find_repeated_names(*kinds: type[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]) -> list[str]:
    """List the public names of one kind of definition that stand in more than one module of the package."""
    names = Counter(
        name
        for module in load_modules()
        for name in {node.name for node in module.tree.body if isinstance(node, kinds)}
        if not name.startswith("_") and name not in ENTRY_POINTS
    )
    return sorted(name for name, count in names.items() if count > 1)


def find_old_words(tree: ast.Module) -> Iterator[str]:
    """Yield the names and docstrings of a module that have a word of an earlier vocabulary."""
    names = [
        getattr(node, field)
        for node in ast.walk(tree)
        for field in ("id", "attr", "arg", "name", "asname")
        if isinstance(getattr(node, field, None), str)
    ]
    for text in (*names, *(text for _, text in SHAPE.find_docstrings(tree))):
        words = re.findall(r"[A-Z]?[a-z]+", text)
        if any(word.lower() in (old, f"{old}s", f"{old}es") for word in words for old in OLD_WORDS):
            yield text


@pytest.mark.parametrize("rule", ADVICE)
def test_no_new_exception(rule: str) -> None:
    allowed, found = json.loads(ALLOWED.read_text())[rule], list_exceptions()[rule]
    new = sorted(set(found) - set(allowed))
    assert not new, f"{rule}: {ADVICE[rule]}: {new}"
    stale = sorted(set(allowed) - set(found))
    assert not stale, f"no exception any more, run `python -m tests.test_words`: {stale}"


@pytest.mark.parametrize(("folder", "figure"), MOST_PERCENT)
def test_vague_words_and_names_get_fewer(folder: str, figure: str) -> None:
    assert measure_words(folder)[figure] <= MOST_PERCENT[folder, figure]


@pytest.mark.parametrize("folder", [PACKAGE, "tests", "bench"])
def test_no_name_or_docstring_has_a_word_of_an_earlier_vocabulary(folder: str) -> None:
    found = {module.name: list(find_old_words(module.tree)) for module in load_modules(folder)}
    assert not {name: texts for name, texts in found.items() if texts}, f"say instead: {OLD_WORDS}"


def test_a_word_of_an_earlier_vocabulary_is_found() -> None:
    text = (
        'class FrontDesk:\n    """Two wishes."""\n'
        "def place(first_wish, *, wish_list=1): return desktop.desk\n'a wish'"
    )
    assert sorted(find_old_words(ast.parse(text))) == [
        "FrontDesk",
        "Two wishes.",
        "desk",
        "first_wish",
        "wish_list",
    ]


def test_sibling_modules_form_no_cycle() -> None:
    assert SHAPE.measure_imports(load_modules())["sibling_cycle_members"] == []


if __name__ == "__main__":
    found = list_exceptions()
    before = json.loads(ALLOWED.read_text()) if ALLOWED.exists() else found
    kept = {rule: [name for name in before[rule] if name in set(found[rule])] for rule in found}
    ALLOWED.write_text(json.dumps(kept, indent=1) + "\n")
