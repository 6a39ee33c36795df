"""Why a wall does not stand here, and which setting would change that: words for a person."""

from __future__ import annotations

from pathlib import Path

_SYSCTLS = (
    ("kernel/unprivileged_userns_clone", "0", "sysctl kernel.unprivileged_userns_clone=1"),
    ("user/max_user_namespaces", "0", "sysctl user.max_user_namespaces=15000"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "sysctl kernel.apparmor_restrict_unprivileged_userns=0"),
)
_MARKS = ("permission", "permitted", "namespace", "uid map", "mount proc")


def reason(said: str, *, root: bool) -> str:
    """Return what bubblewrap said, in one line, and what to do about it."""
    line = " ".join(said.split())[:300]
    text = f"bubblewrap does not work here: {line or 'it said nothing'}"
    if not any(mark in line.lower() for mark in _MARKS):
        return text
    if root:
        return (
            f"{text}; root needs CAP_SYS_ADMIN here (docker run --cap-add SYS_ADMIN --security-opt seccomp=unconfined)"
        )
    settings = [advice for name, bad, advice in _SYSCTLS if _value(name) == bad]
    return (
        f"{text}; user namespaces are closed here: {' and '.join(settings) or 'ask for unprivileged user namespaces'}"
    )


def _value(name: str) -> str:
    try:
        return Path("/proc/sys", name).read_text().strip()
    except OSError:
        return ""
