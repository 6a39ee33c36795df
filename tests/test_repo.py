"""Rules for source files that lint alone cannot check.

Exceptions are counted in allowed_places.json, which may only get shorter: `python -m tests.test_repo` drops from the
list what is no longer an exception.
"""

import ast
import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
ALLOWED = Path(__file__).with_name("allowed_places.json")
MOST_POSITIONAL = 4
MOST_ROLE_MEMBERS = 3
# Test folders that are about more than one module of their package.
TOPICS = {"agent/teams", "control/loopback", "supervisor/accounts", "surfaces/demo"}
BANNED = {
    "unittest" + ".mock": "write a real in-memory implementation instead",
    "time" + ".sleep(": "the test owns time; in async code it blocks the loop",
}


def python_files(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((REPO / folder).rglob("*.py"))


@pytest.mark.parametrize("banned", BANNED)
def test_no_source_file_uses_what_is_banned(banned: str) -> None:
    users = [
        path.relative_to(REPO).as_posix()
        for path in python_files("src", "tests", "bench")
        if banned in path.read_text(encoding="utf-8")
    ]
    assert not users, f"{banned} in {users}: {BANNED[banned]}"


@pytest.mark.finding("R11")
def test_a_shared_temporary_folder_gets_only_names_of_this_user() -> None:
    """A fixed name belongs to whoever ran the suite first, and every later user fails. The whole suite as an ordinary
    user is run by hand (CONTRIBUTING.md)."""
    named = "|".join(
        ("gettemp" + r"dir\(\)", r"""["']/(?:tmp|var/tmp|dev/shm)/[^"']*["'][^\n]*(?:open|write|mkdir|touch)""")
    )
    shared = {
        f"{path.relative_to(REPO)}:{number}": line
        for path in python_files("tests", "bench")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(named, line) and " != " not in line
    }
    assert shared and all("geteuid()" in line for line in shared.values()), shared


# Mechanisms that are written once: the package or module that holds each of them, and what shows a second one. Some
# uses elsewhere are right: the task of a run belongs to its driver, a live view stops its own process on Ctrl-Z, and
# `retinue run --detach` leaves its terminal. The list of places says how many, and a new one goes through the home.
MECHANISMS = {
    "files/": (
        r"O_NOFOLLOW|O_EXCL|os\.replace\(|os\.link\(|\.renames?\(|mkstemp|mkdtemp|fsync\(|rmtree\b|copytree\(|chmod\(|0o700"
        r"|TemporaryDirectory|TemporaryFile|shutil\.move\("
    ),
    "processes/": (
        r"os\.kill\(|killpg|\.terminate\(|start_new_session|setsid\(|Popen\(|create_subprocess|(?:process|victim)\.kill\b"
        r"|subprocess\.(?:run|call|check_\w+|get\w+)\(|os\.(?:system|popen|fork\w*|posix_spawn\w*|spawn\w+)\(|send_signal\("
    ),
    "concurrency.py": r"\bcreate_task\(|ensure_future\(|asyncio\.Task\(|TaskOwner\(\)\.start",
    "http/": r"\b(?:import|from) (?:h11|http\.client|http\.server|urllib\.request)\b",
    "config/yaml.py": r"\b(?:import|from) yaml\b",
}
KEYWORD_RULE = "records are built by keyword"
OWNER_RULE = "state is written by its module"
SLEEP_RULE = "tests own their time"
BUILD_RULE = "build passes on no class from below"
PORT_RULE = "a port has two implementations"
CLOCKS = {
    f"{clock}{unit}"
    for clock in ("time", "monotonic", "perf_counter", "process_time", "thread_time")
    for unit in ("", "_ns")
}
DURATIONS = {"elapsed", "took", "seconds", "duration"}
# The tests that may assert a duration, and why.
MEASURED = {
    "surfaces/printer/test_live_view.py": "the longer it took, the more frames there may be",
}
CONTAINERS = {"list", "dict", "set", "deque", "defaultdict", "Counter", "OrderedDict"}
CHANGES = {
    "add", "append", "appendleft", "clear", "discard", "extend", "insert", "pop", "popitem", "popleft", "remove",
    "reverse", "setdefault", "sort", "update",
}  # fmt: skip
# Surfaces may import the other packages themselves.
BELOW_BUILD = ("agent", "control", "models", "remote", "sandbox", "supervisor", "telemetry", "tools", "workspaces")
ADVICE = {
    **{home: f"use retinue/{home} instead" for home in MECHANISMS},
    KEYWORD_RULE: f"name the arguments: a record takes at most {MOST_POSITIONAL} by position",
    OWNER_RULE: "call a method of the object: only the module that defines an object writes its fields",
    SLEEP_RULE: "wait for what happens: tests/gates.py",
    BUILD_RULE: "give surfaces a Control, a value or a role of core, or a function",
    PORT_RULE: f"use the class, or split the Protocol into roles with at most {MOST_ROLE_MEMBERS} members",
}


@cache
def load_source() -> dict[str, str]:
    """Read the source files of the package, by their path below it."""
    return read_folder("src/retinue")


def read_folder(folder: str) -> dict[str, str]:
    return {path.relative_to(REPO / folder).as_posix(): path.read_text("utf-8") for path in python_files(folder)}


def parse_files(texts: dict[str, str]) -> dict[str, ast.Module]:
    return {name: ast.parse(text) for name, text in texts.items()}


def get_classes(tree: ast.Module) -> list[ast.ClassDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]


def get_last_name(node: ast.expr) -> str:
    """Return the last part of a dotted name, also where it is called or has parameters in brackets."""
    while isinstance(node, ast.Call | ast.Subscript):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def find_second_mechanisms(home: str) -> Iterator[str]:
    """Yield the file of each use of the mechanism outside its home."""
    for name, text in load_source().items():
        if not name.startswith(home):
            yield from [name] * len(re.findall(MECHANISMS[home], text))


def find_sleeps(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield the file of each wait for a time. A sleep of 0 only lets others run; a long wait only ends what hangs, but
    for an event that nobody else has."""
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and node.args and name != "gates.py":
                called, seconds = get_last_name(node.func), getattr(node.args[0], "value", None)
                is_short = isinstance(seconds, float) and seconds < 1
                is_short |= isinstance(node.func, ast.Attribute) and is_call_of(node.func.value, "Event")
                if (called == "sleep" and seconds != 0) or (called == "wait" and is_short):
                    yield name


def is_call_of(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Call) and get_last_name(node) == name


def find_asserted_durations(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield the file of each comparison in an assert with a difference of clock readings, with a name that was made
    from one, or of a name in `DURATIONS` with a number."""
    for name, tree in trees.items():
        nodes = list(ast.walk(tree))
        measured = list_measured_names(nodes)
        compared = [
            node
            for each in nodes
            if isinstance(each, ast.Assert)
            for node in ast.walk(each.test)
            if isinstance(node, ast.Compare)
        ]
        for node in compared:
            parts = list(ast.walk(node))
            names = set(map(get_name, parts))
            sides = [getattr(side, "value", None) for side in (node.left, *node.comparators)]
            has_number = any(isinstance(side, int | float) for side in sides)
            if any(map(is_duration, parts)) or names & measured or (names & DURATIONS and has_number):
                yield name


def list_measured_names(nodes: list[ast.AST]) -> set[str]:
    """List the names that are assigned a difference of clock readings, or a value made from such a name."""
    assigned = [node for node in nodes if isinstance(node, ast.Assign)]
    measured, found = {""}, set[str]()
    while found != measured:
        measured = found
        found = {
            target.id
            for node in assigned
            for target in node.targets
            if isinstance(target, ast.Name)
            and any(is_duration(part) or get_name(part) in measured for part in ast.walk(node.value))
        }
    return measured


def get_name(node: ast.AST) -> str | None:
    return node.id if isinstance(node, ast.Name) else None


def is_duration(node: ast.AST) -> bool:
    """Return True for a difference with the reading of a clock."""
    return (
        isinstance(node, ast.BinOp)
        and isinstance(node.op, ast.Sub)
        and any(isinstance(side, ast.Call) and get_last_name(side) in CLOCKS for side in (node.left, node.right))
    )


def list_record_classes(trees: dict[str, ast.Module]) -> set[str]:
    """List the names of the dataclasses, Structs and NamedTuples of the modules, and of the classes that inherit from
    them."""
    classes = [node for tree in trees.values() for node in get_classes(tree)]
    records = {node.name for node in classes if "dataclass" in map(get_last_name, node.decorator_list)}
    found = records | {"Struct", "NamedTuple"}
    while found != records:
        records = found
        found = records | {node.name for node in classes if records & set(map(get_last_name, node.bases))}
    return records


def find_positional_records(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield `file:class` for each call that builds a record from many positional arguments."""
    records = list_record_classes(trees)
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and len(node.args) > MOST_POSITIONAL and get_last_name(node.func) in records:
                yield f"{name}:{get_last_name(node.func)}"


def list_written_attributes(tree: ast.AST) -> list[ast.Attribute]:
    """List the attributes below the tree that are assigned or deleted."""
    return [
        node for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del)
    ]


def belongs_to_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def list_fields(tree: ast.Module) -> set[str]:
    """List the fields that the classes of a module declare, in their bodies or by an assignment to `self`."""
    classes = get_classes(tree)
    annotated = {
        field.target.id
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    written = [node for owner in classes for node in list_written_attributes(owner)]
    return annotated | {node.attr for node in written if belongs_to_self(node)}


def list_changed_containers(tree: ast.Module) -> list[ast.Attribute]:
    """List the attributes whose items a module assigns or deletes, or that it changes by a method such as `append`."""
    owners: list[ast.expr] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del):
            owners.append(node.value)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CHANGES:
            owners.append(node.func.value)
    return [owner for owner in owners if isinstance(owner, ast.Attribute)]


def list_containers(tree: ast.Module) -> set[str]:
    """List the fields that the classes of a module declare as containers, or set to one."""
    found = set[str]()
    for owner in get_classes(tree):
        for node in ast.walk(owner):
            match node:
                case ast.AnnAssign(target=target, annotation=kind) if get_last_name(kind) in CONTAINERS:
                    if node in owner.body or isinstance(target, ast.Attribute):
                        found.add(get_last_name(target))
                case ast.Assign(targets=[ast.Attribute() as target], value=ast.List() | ast.Dict() | ast.Set()):
                    found.add(target.attr)
    return found


def find_foreign_writes(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield `file:field` for each write to a field that only classes of other modules declare, and for each change of
    a container in one.

    The check goes by the name of the field, so a module that declares a field of the same name hides a write.
    """
    fields = {name: list_fields(tree) for name, tree in trees.items()}
    known = set[str]().union(*fields.values())
    for name, tree in trees.items():
        for node in list_written_attributes(tree):
            if not belongs_to_self(node) and node.attr in known - fields[name]:
                yield f"{name}:{node.attr}"
    containers = set[str]().union(*map(list_containers, trees.values()))
    for name, tree in trees.items():
        for node in list_changed_containers(tree):
            if not belongs_to_self(node) and node.attr in containers - fields[name]:
                yield f"{name}:{node.attr}"


def find_passed_classes(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield `file:name` for each name that surfaces import from build and that comes from a package below, or whose
    signature names a class from there."""
    imports = {name: dict(list_imported_names(tree)) for name, tree in trees.items()}
    surfaces = [name for name in trees if name.startswith("surfaces/") or name == "subagent.py"]
    taken = {source for name in surfaces for source in imports[name].values() if source.startswith("retinue.build.")}
    for source in sorted(taken):
        module, _, name = source.rpartition(".")
        file = f"{module.removeprefix('retinue.').replace('.', '/')}.py"
        if file not in trees:
            continue
        own = [node for node in trees[file].body if getattr(node, "name", "") == name]
        used = {name} if not own else set(list_signature_names(own[0]))
        for each in sorted(used):
            if imports[file].get(each, "").startswith(tuple(f"retinue.{package}." for package in BELOW_BUILD)):
                yield f"{file}:{each}"


def list_imported_names(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield each name that a module imports from another, also lazily, with its full name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def list_signature_names(node: ast.stmt) -> Iterator[str]:
    """Yield the names in the annotations of a function, or in the bases and fields of a class."""
    signature: list[ast.AST | None] = []
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        signature = [node.args, node.returns]
    elif isinstance(node, ast.ClassDef):
        signature = [*node.bases, *(field for field in node.body if isinstance(field, ast.AnnAssign))]
    for part in signature:
        yield from (each.id for each in ast.walk(part) if isinstance(each, ast.Name)) if part is not None else ()


def is_protocol(node: ast.ClassDef) -> bool:
    return "Protocol" in map(get_last_name, node.bases)


def list_own_members(node: ast.ClassDef) -> set[str]:
    """List the methods and fields of a class, without inherited ones and without nested classes."""
    functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
    fields = [each.target for each in node.body if isinstance(each, ast.AnnAssign)]
    fields += [target for each in node.body if isinstance(each, ast.Assign) for target in each.targets]
    written = [
        each.attr for function in functions for each in list_written_attributes(function) if belongs_to_self(each)
    ]
    return {each.name for each in functions} | {each.id for each in fields if isinstance(each, ast.Name)} | set(written)


def list_members(node: ast.ClassDef, classes: list[ast.ClassDef]) -> set[str]:
    """List the members of a class and of the classes it inherits from. A class that is no Protocol has no members of
    the Protocols that it inherits from: there they are only declared."""
    bases = set(map(get_last_name, node.bases)) - {node.name}
    inherited = [each for each in classes if each.name in bases and is_protocol(each) <= is_protocol(node)]
    return list_own_members(node).union(*(list_members(each, classes) for each in inherited))


def find_ports_without_second_implementation(trees: dict[str, ast.Module]) -> Iterator[str]:
    """Yield `file:class` for each Protocol with many members and fewer than two implementations.

    The check goes by the names of the members, so it takes a class for an implementation that has them by chance."""
    classes = [node for tree in trees.values() for node in get_classes(tree)]
    made = [list_members(node, classes) for node in classes if not is_protocol(node)]
    for name, tree in trees.items():
        for node in filter(is_protocol, get_classes(tree)):
            members = list_members(node, classes)
            if len(members) > MOST_ROLE_MEMBERS and sum(members <= each for each in made) < 2:
                yield f"{name}:{node.name}"


@cache
def count_exceptions() -> dict[str, Counter[str]]:
    """Count the places that break each rule now."""
    mechanisms = {home: Counter(find_second_mechanisms(home)) for home in MECHANISMS}
    trees = parse_files(load_source())
    records, writes = find_positional_records(trees), find_foreign_writes(trees)
    passed, ports = find_passed_classes(trees), find_ports_without_second_implementation(trees)
    return {
        **mechanisms,
        KEYWORD_RULE: Counter(records),
        OWNER_RULE: Counter(writes),
        BUILD_RULE: Counter(passed),
        PORT_RULE: Counter(ports),
        SLEEP_RULE: Counter(find_sleeps(parse_files(read_folder("tests")))),
    }


@pytest.mark.parametrize("rule", ADVICE)
def test_no_place_breaks_a_rule_but_the_listed_ones(rule: str) -> None:
    """The counts must be equal, so that the list gets shorter with each place that is mended."""
    allowed, found = Counter(json.loads(ALLOWED.read_text())[rule]), count_exceptions()[rule]
    assert not found - allowed, f"{rule}: {ADVICE[rule]}: {dict(found - allowed)}"
    assert not allowed - found, f"no exception any more, run `python -m tests.test_repo`: {dict(allowed - found)}"


def test_a_record_of_many_positional_arguments_is_found() -> None:
    trees = {
        "records.py": ast.parse(
            "class Base(msgspec.Struct, frozen=True): ...\nclass Child(Base): ...\n"
            "@dataclass(slots=True)\nclass Data: ...\nclass Pair(NamedTuple): ...\nclass Service: ..."
        ),
        "users.py": ast.parse(
            "Child(1, 2, 3, 4, 5)\nrecords.Data(1, 2, 3, 4, *rest)\n"
            "Base(1, 2, 3, 4, e=5)\nPair(1, 2, 3, 4, 5)\nService(1, 2, 3, 4, 5)\nprint(1, 2, 3, 4, 5)"
        ),
    }
    assert sorted(find_positional_records(trees)) == ["users.py:Child", "users.py:Data", "users.py:Pair"]


def test_a_write_to_the_state_of_another_module_is_found() -> None:
    trees = {
        "run.py": ast.parse(
            "class Run:\n    state: str\n    def __init__(self):\n        self.turns = 0\n"
            "def end_run(run):\n    run.state = 'done'"
        ),
        "viewer.py": ast.parse(
            "class Viewer:\n    def watch(self, run):\n        self.state = run.state\n"
            "def count(run, viewer):\n    run.turns += 1\n    viewer.run.turns = 2\n"
            "    run.unknown = 3\n    viewer.state = 4"
        ),
        "driver.py": ast.parse("del run.turns\nrun.state, other = 'failed', run.turns"),
    }
    found = ["driver.py:state", "driver.py:turns", "viewer.py:turns", "viewer.py:turns"]
    assert sorted(find_foreign_writes(trees)) == found


def test_a_change_of_a_container_of_another_module_is_found() -> None:
    trees = {
        "tree.py": ast.parse(
            "class Tree:\n    runs: dict[int, Run]\n    def __init__(self):\n        self.inbox = []\n"
            "        local: list[str] = []\n        self.runs[0] = self.inbox.pop()"
        ),
        "viewer.py": ast.parse(
            "class Viewer:\n    def watch(self, tree):\n        tree.runs[1] = tree.inbox[0]\n"
            "        tree.inbox.append(1)\n        del self.tree.runs[1]\n        tree.local.append(2)\n"
            "        runs = tree.runs.get(1)\n        runs.append(3)"
        ),
    }
    assert sorted(find_foreign_writes(trees)) == ["viewer.py:inbox", "viewer.py:runs", "viewer.py:runs"]


def test_a_wait_for_a_time_is_found() -> None:
    waits = [
        "asyncio.sleep(0.1)",
        "sleep(seconds)",
        "clock.sleep(50)",
        "pause.wait(0.05)",
        "threading.Event().wait(moment)",
    ]
    others = ["asyncio.sleep(0)", "process.wait(150)", "event.wait()", "sleep_less(3)"]
    trees = {text: ast.parse(text) for text in [*waits, *others]}
    assert list(find_sleeps(trees)) == waits


def test_no_test_asserts_how_long_something_took() -> None:
    found = set(find_asserted_durations(parse_files(read_folder("tests"))))
    assert found - MEASURED.keys() == set(), "count steps (tests/gates.py), or measure in bench/"
    assert MEASURED.keys() - found == set(), "no exception any more"


def test_an_asserted_duration_is_found() -> None:
    durations = [
        "assert time.monotonic() - began < 1",
        "assert done and 5 > 2 * (end - perf_counter())",
        "spent = loop.time() - began\nassert spent <= limit",
        "spent = process_time() - began\nrate = count / spent\nassert rate >= LEAST",
        "assert elapsed < 0.5",
        "assert 1 < took < 2",
    ]
    others = [
        "assert time.monotonic() < deadline",
        "spent = time.time() - began\nprint(spent)",
        "assert result.duration_ms == 100",
        "assert seconds == given",
        "assert count - 1 == 4",
    ]
    trees = {text: ast.parse(text) for text in [*durations, *others]}
    assert list(find_asserted_durations(trees)) == durations


def test_a_class_from_below_that_build_passes_on_is_found() -> None:
    trees = {
        "build/parts.py": ast.parse(
            "from retinue.agent.replay import Replay\nfrom retinue.core.control import Control\n"
            "if TYPE_CHECKING:\n    from retinue.sandbox.escapes import Attempts\n"
            "def plant() -> Iterator[tuple[Attempts, Control]]: ...\n"
            "def start() -> Control:\n    from retinue.supervisor.supervisor import Supervisor\n"
            "    return Supervisor()"
        ),
        "surfaces/cli/run.py": ast.parse(
            "from retinue.build.parts import plant, start\n"
            "if TYPE_CHECKING:\n    from retinue.build.parts import Replay"
        ),
    }
    assert list(find_passed_classes(trees)) == ["build/parts.py:Replay", "build/parts.py:Attempts"]


def test_a_port_with_one_implementation_is_found_unless_it_is_a_small_role() -> None:
    trees = {
        "ports.py": ast.parse(
            "class Reader(Protocol):\n    def read(self): ...\n    def find(self): ...\n"
            "class Log(Reader, Protocol):\n    ahead: bool\n    def append(self): ...\n"
            "class Role(Protocol):\n    def a(self): ...\n    def b(self): ...\n    def c(self): ..."
        ),
        "memory.py": ast.parse(
            "class Stored:\n    def read(self): ...\n    def find(self): ...\n"
            "class MemoryLog(Stored, Log):\n    def __init__(self):\n        self.ahead = True\n"
            "    def append(self): ..."
        ),
        "broken.py": ast.parse("class HalfLog(Log):\n    ahead = False\n    def append(self): ..."),
    }
    assert list(find_ports_without_second_implementation(trees)) == ["ports.py:Log"]
    trees["sqlite.py"] = ast.parse("class SqliteLog(Stored):\n    ahead = True\n    async def append(self): ...")
    assert list(find_ports_without_second_implementation(trees)) == []


def test_core_and_protocol_touch_no_files() -> None:
    """The linter sees imports only, and a Path needs none that is forbidden."""
    touches = re.compile(
        r"(?<![\w.])(?<!def )open\(|\.(?:read_|write_)(?:text|bytes)\(|\.(?:exists|l?stat|is_file|is_dir|iterdir|r?glob"
        r"|mkdir|unlink|touch|resolve|expanduser|cwd|home)\("
    )
    found = [
        name for name, text in load_source().items() if name.startswith(("core/", "protocol/")) and touches.search(text)
    ]
    assert found == []


def test_only_the_lazy_package_and_the_command_table_import_our_modules_by_string() -> None:
    """No contract sees such an import. The program of code mode imports the modules made for it."""
    by_string = re.compile(r"import_module\((?!\"(?!retinue))|__import__\(")
    found = {name for name, text in load_source().items() if not name.startswith("build/") and by_string.search(text)}
    assert found == {"__init__.py", "surfaces/cli/main.py", "tools/code_program.py"}


def test_files_that_the_source_names_exist() -> None:
    source = load_source()
    named = {name for text in source.values() for name in re.findall(r"`((?:\w+/)*\w+\.py)`", text)}
    assert [name for name in named if not any(f"/{path}".endswith(f"/{name}") for path in source)] == []


def test_tests_are_laid_out_like_the_packages() -> None:
    packages = {path.parent.name for path in (REPO / "src/retinue").glob("*/__init__.py")}
    folders = {path.name for path in (REPO / "tests").iterdir() if list(path.glob("**/test_*.py"))}
    assert folders - packages == {"crash", "docs", "golden", "packaging", "soak", "subagent"}  # subagent is a module
    assert packages <= folders


def test_a_test_folder_below_that_of_a_package_names_a_part_of_it_or_a_topic() -> None:
    source, tests = REPO / "src/retinue", REPO / "tests"
    folders = {path.parent.relative_to(tests) for path in tests.glob("*/*/**/test_*.py")}
    parts = {path.relative_to(source).with_suffix("") for path in (*source.rglob("*.py"), *source.rglob("*/"))}
    assert {path.as_posix() for path in folders - parts} == TOPICS


def test_fragments_wait_only_for_a_version_without_a_section() -> None:
    """Otherwise `towncrier build` writes a second section of the same version."""
    towncrier = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["towncrier"]
    fragments = [path.name for path in (REPO / towncrier["directory"]).iterdir() if path.name != "README.md"]
    section = f"\n## {towncrier['version']} "
    assert not fragments or section not in (REPO / towncrier["filename"]).read_text(encoding="utf-8"), fragments


def test_constraints_are_pins_without_addresses() -> None:
    lines = (REPO / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert pins
    assert not [line for line in pins if "://" in line or "@ " in line or "==" not in line]


if __name__ == "__main__":
    before = json.loads(ALLOWED.read_text())
    kept = {rule: dict(sorted((Counter(before[rule]) & count_exceptions()[rule]).items())) for rule in ADVICE}
    ALLOWED.write_text(json.dumps(kept, indent=1) + "\n")
