"""A markdown file that begins with YAML between two `---` lines: its keys and its body. Knows no particular key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from retinue.config.files import read_text
from retinue.config.located import Section
from retinue.config.location import Place
from retinue.config.yaml import parse_yaml

FENCE = "---"


@dataclass(frozen=True)
class Document:
    """The keys, with the lines they stand on, and the text below them."""

    keys: Section
    body: str


def read_document(path: Path) -> Document:
    """Read the document of a regular file; links are not followed."""
    return parse_document(read_text(path, follow=False), str(path))


def parse_document(text: str, file: str) -> Document:
    lines = text.split("\n")
    if lines[0].rstrip() != FENCE:
        raise Place(file, 1).error(f"the first line must be '{FENCE}', with the keys below it (frontmatter)")
    end = next((i for i, line in enumerate(lines) if i > 0 and line.rstrip() == FENCE), None)
    if end is None:
        raise Place(file, 1).error(f"the frontmatter that begins here has no closing '{FENCE}' line")
    node = parse_yaml("\n".join(lines[1:end]), file, first_line=2)
    keys = Section(Place(file, 1), {}) if node.value is None else node.section(what="'key: value' lines")
    return Document(Section(Place(file, 1), keys.entries), "\n".join(lines[end + 1 :]).strip())
