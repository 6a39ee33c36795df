"""The composition root: the only package that names concrete backends. Each is loaded when it is asked for.

Its functions take values (a folder, profiles, a model name) and return what they build. Nothing here reads a file
unless a name or a project says so.
"""

from retinue.build.logs import open_log
from retinue.build.parts import MAIN, Parts, adapt_to_watcher, add_profiles, find_profile
from retinue.build.project import load_project_parts
from retinue.build.sandboxes import make_placement
from retinue.build.supervisor import make_supervisor, open_control

__all__ = [
    "MAIN",
    "Parts",
    "adapt_to_watcher",
    "add_profiles",
    "find_profile",
    "load_project_parts",
    "make_placement",
    "make_supervisor",
    "open_control",
    "open_log",
]
