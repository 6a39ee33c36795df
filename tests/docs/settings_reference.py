"""The tables of docs/settings.md, made from the declarations. `python -m tests.docs.settings_reference` prints them."""

from __future__ import annotations

from collections.abc import Iterator

from retinue.config.coordination import MemberSettings
from retinue.config.remote_agents import AgentSettings
from retinue.config.schema import Setting, format_default, list_settings
from retinue.config.servers import ServerSettings
from retinue.config.settings import ProfileSettings, Settings


def render_reference() -> str:
    """Return the tables of all settings as Markdown."""
    tables = {
        "retinue.yaml": _render_rows(list_settings(Settings), ""),
        "Each of `profiles`": _render_rows(list_settings(ProfileSettings), ""),
        "Each of `agents` and `subagent_agents`": _render_rows(list_settings(MemberSettings), ""),
        "Each of `a2a_agents`": _render_rows(list_settings(AgentSettings), ""),
        "Each of `mcp_servers`": _render_rows(list_settings(ServerSettings), ""),
    }
    return "\n".join(
        f"### {title}\n\n| key | meaning | default | example | needs trust |\n|---|---|---|---|---|\n{''.join(rows)}"
        for title, rows in tables.items()
    )


def _render_rows(settings: tuple[Setting, ...], prefix: str) -> Iterator[str]:
    for each in settings:
        name = f"{prefix}{each.name}"
        if each.kind.section is not None:
            yield from _render_rows(list_settings(each.kind.section), f"{name}.")
            continue
        default = format_default(each.default)
        cells = [f"`{name}`", each.help, f"`{default}`" if default else "", f"`{each.example}`" if each.example else ""]
        cells.append("" if each.trust is None else each.trust.words)
        yield f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    print(render_reference(), end="")
