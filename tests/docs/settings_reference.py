"""The tables of docs/settings.md, made from the declarations. `python -m tests.docs.settings_reference` prints them."""

from __future__ import annotations

from collections.abc import Iterator

from retinue.config.coordination import MEMBER
from retinue.config.remote_agents import AGENT
from retinue.config.schema import Section, format_default
from retinue.config.servers import SERVER
from retinue.config.settings import PROFILE, SETTINGS


def render_reference() -> str:
    """Return the tables of all settings as Markdown."""
    tables = {
        "retinue.yaml": _render_rows(SETTINGS, ""),
        "Each of `profiles`": _render_rows(PROFILE, ""),
        "Each of `agents` and `subagent_agents`": _render_rows(MEMBER, ""),
        "Each of `a2a_agents`": _render_rows(AGENT, ""),
        "Each of `mcp_servers`": _render_rows(SERVER, ""),
    }
    return "\n".join(
        f"### {title}\n\n| key | meaning | default | example | needs trust |\n|---|---|---|---|---|\n{''.join(rows)}"
        for title, rows in tables.items()
    )


def _render_rows(section: Section, prefix: str) -> Iterator[str]:
    for key, each in section.settings.items():
        name = f"{prefix}{key}"
        if isinstance(each.kind, Section):
            yield from _render_rows(each.kind, f"{name}.")
            continue
        default = format_default(each.default)
        example = each.shown_example
        cells = [f"`{name}`", each.help, f"`{default}`" if default else "", f"`{example}`" if example else ""]
        cells.append("" if each.trust is None else each.trust.words)
        yield f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(render_reference(), end="")
