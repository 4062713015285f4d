"""The rooms of the module hold: names flow downward, and each thing lives in one room."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import sume_resume

SOURCE = Path(sume_resume.__file__).read_text("utf-8")
TREE = ast.parse(SOURCE)


@dataclass
class Room:
    """A part of the file: from its banner to the next one."""

    name: str
    first: int
    last: int = 0
    defines: set[str] = field(default_factory=set)

    def holds(self, node: ast.AST) -> bool:
        return self.first <= getattr(node, "lineno", 0) <= self.last


def find_rooms() -> list[Room]:
    rooms = [Room("header", 1)]
    for number, line in enumerate(SOURCE.splitlines(), 1):
        if match := re.fullmatch(r"# --- ([a-z-]+) -+", line):
            rooms[-1].last = number - 1
            rooms.append(Room(match[1], number))
    rooms[-1].last = len(SOURCE.splitlines())
    for statement in TREE.body:
        home = next(room for room in rooms if room.holds(statement))
        home.defines |= set(bound_names(statement))
    return rooms


def test_no_name_is_bound_twice() -> None:
    """A second function of one name would take the place of the first, also for its callers."""
    bound = [
        statement.name
        for statement in TREE.body
        if isinstance(statement, ast.FunctionDef | ast.ClassDef)
    ]
    assert sorted(set(bound)) == sorted(bound)


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement at the top level binds."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        yield statement.name
        return
    if is_type_checking(statement):
        return
    inner = {
        id(n) for loop in ast.walk(statement) if isinstance(loop, LOOPS) for n in targets(loop)
    }
    for node in ast.walk(statement):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in inner:
            yield node.id
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]


LOOPS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


def targets(loop: ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp) -> list[ast.Name]:
    """Return the names that a comprehension binds for itself alone."""
    found = (node for part in loop.generators for node in ast.walk(part.target))
    return [node for node in found if isinstance(node, ast.Name)]


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def running_nodes(node: ast.AST, local: frozenset[str] = frozenset()) -> Iterator[ast.AST]:
    """Walk what runs: annotations and TYPE_CHECKING blocks do not; locals hide globals."""
    if is_type_checking(node):
        return
    if isinstance(node, ast.FunctionDef | ast.Lambda):
        arguments = node.args
        names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        names += [arg for arg in (arguments.vararg, arguments.kwarg) if arg]
        local = local | {arg.arg for arg in names} | stored_in(node)
    if isinstance(node, LOOPS):
        local = local | {name.id for name in targets(node)}
    if isinstance(node, ast.Name) and node.id in local:
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from running_nodes(child, local)


def stored_in(function: ast.FunctionDef | ast.Lambda) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.ExceptHandler):
            found.add(node.name or "")
        elif isinstance(node, ast.FunctionDef) and node is not function:
            found.add(node.name)
    return found


ROOMS = find_rooms()
ROOM = {room.name: room for room in ROOMS}


def room_of(node: ast.AST) -> Room:
    return next(room for room in ROOMS if room.holds(node))


def nodes_of(name: str) -> Iterator[ast.AST]:
    for statement in TREE.body:
        if ROOM[name].holds(statement):
            yield from running_nodes(statement)


def names_used(name: str) -> set[str]:
    """Return every name that a room mentions, in annotations too."""
    used = set()
    for statement in TREE.body:
        if ROOM[name].holds(statement):
            for node in ast.walk(statement):
                if isinstance(node, ast.Name):
                    used.add(node.id)
                elif isinstance(node, ast.Call) and ast.unparse(node.func) == "cast":
                    # A quoted type, as in cast("Job | None", x).
                    used |= set(re.findall(r"\w+", ast.unparse(node.args[0]))) & NAMES
    return used


NAMES = {name for room in ROOMS for name in room.defines}


def test_rooms_come_in_the_order_of_the_header() -> None:
    doc = ast.get_docstring(TREE) or ""
    listed = re.findall(r"^    ([a-z-]+) {2,}\S", doc.partition("The rooms")[2], re.MULTILINE)
    assert len(listed) > 10
    assert [room.name for room in ROOMS[1:]] == listed


def test_banners_are_79_wide_and_say_what_for() -> None:
    lines = SOURCE.splitlines()
    for room in ROOMS[1:]:
        assert len(lines[room.first - 1]) == 79
        assert lines[room.first].startswith("# ") or room.name == "end"


def test_names_flow_downward() -> None:
    homes = {name: index for index, room in enumerate(ROOMS) for name in room.defines}
    wrong = [
        f"line {node.lineno}: {ROOMS[index].name} uses {node.id} of {ROOMS[homes[node.id]].name}"
        for index, room in enumerate(ROOMS)
        for node in nodes_of(room.name)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)
        if homes.get(node.id, -1) > index
    ]
    assert wrong == []


def test_no_name_is_bound_in_two_rooms() -> None:
    seen: dict[str, str] = {}
    for room in ROOMS:
        for name in room.defines:
            assert seen.setdefault(name, room.name) == room.name, name


@pytest.mark.parametrize(("one", "other"), [("ledger", "api"), ("api", "ledger")])
def test_ledger_and_api_never_mention_each_other(one: str, other: str) -> None:
    assert ROOM[other].defines & names_used(one) == set()


@pytest.mark.parametrize("name", ["display", "stand-in", "api", "decisions", "money", "input"])
def test_rooms_that_hold_no_ledger(name: str) -> None:
    assert "Ledger" not in names_used(name)


@pytest.mark.parametrize("name", ["money", "decisions", "pacing"])
def test_pure_rooms_touch_nothing_outside(name: str) -> None:
    outside = {"os", "time", "socket", "sqlite3", "threading", "open", "print", "secrets", "sys"}
    assert outside & names_used(name) == set()


def test_ledger_room_knows_no_http_and_no_display() -> None:
    for name in ("ledger", "schema", "engine"):
        assert {"httpx", "rich", "typer", "print"} & names_used(name) == set()


def imports(package: str) -> set[str]:
    """Return the rooms that import a package at run time."""
    found = set()
    for room in ROOMS:
        for node in nodes_of(room.name):
            modules = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            if any(module.partition(".")[0] == package for module in modules):
                found.add(room.name)
    return found


def test_only_display_and_cli_import_rich() -> None:
    assert imports("rich") <= {"display", "cli"}


def test_only_the_api_imports_httpx() -> None:
    assert imports("httpx") == {"api"}


def test_only_the_cli_uses_typer() -> None:
    assert imports("typer") == {"header"}
    assert {room.name for room in ROOMS if "typer" in names_used(room.name)} == {"cli"}
    assert {room.name for room in ROOMS if "TyperGroup" in names_used(room.name)} == {"cli"}


def test_nothing_heavy_is_imported_at_the_top() -> None:
    """Start-up pays for nothing that `add` and `status --format json` do not need."""
    heavy = {"httpx", "rich", "http", "csv", "ssl", "ipaddress", "tempfile", "urllib", "asyncio"}
    top = {
        module.partition(".")[0]
        for statement in TREE.body
        if not is_type_checking(statement)
        for node in [statement]
        if isinstance(node, ast.Import | ast.ImportFrom)
        for module in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    }
    assert "typer" in top
    assert heavy & top == set()


# -- SQL --

SQL = re.compile(
    r"^\s*(SELECT\s|INSERT\s+INTO\s|UPDATE\s+\w+\s+SET\s|DELETE\s+FROM\s|CREATE\s+\w+\s|DROP\s+\w+\s"
    r"|ALTER\s+TABLE\s|PRAGMA\s|VACUUM|WITH\s+\w+\s+AS\s|(BEGIN|COMMIT|ROLLBACK)\b)"
)


def sql_texts() -> Iterator[tuple[str, str]]:
    """Yield room and text of every string that is SQL."""
    for node in ast.walk(TREE):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and SQL.match(node.value):
            yield room_of(node).name, node.value


def test_sql_lives_in_the_schema_and_the_stand_in() -> None:
    where = {room for room, _ in sql_texts()}
    assert where == {"schema", "stand-in"}


def test_sql_is_never_built_from_pieces() -> None:
    for node in ast.walk(TREE):
        if isinstance(node, ast.JoinedStr):
            head = node.values[0] if node.values else None
            text = head.value if isinstance(head, ast.Constant) else ""
            assert not SQL.match(str(text)), f"line {node.lineno}"


def test_history_is_never_changed() -> None:
    texts = [text for _, text in sql_texts()]
    assert any(re.search(r"INSERT\s+INTO\s+events\b", text) for text in texts)
    for text in texts:
        assert not re.search(r"(UPDATE|DELETE\s+FROM|DROP\s+TABLE|REPLACE\s+INTO)\s+events\b", text)
        assert not re.search(r"DELETE\s+FROM\s+jobs\b", text)


def test_every_change_of_an_attempt_compares_first() -> None:
    changes = [text for room, text in sql_texts() if room == "schema"]
    changes = [text for text in changes if re.search(r"UPDATE\s+jobs\b", text)]
    assert changes
    assert all("status = :expected" in text for text in changes)


def test_each_statement_name_is_used() -> None:
    """A statement that nobody runs is no part of the ledger."""
    used = {n.id for n in ast.walk(TREE) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    assert {name for name in ROOM["schema"].defines if name not in used} == set()


# -- files and time --


def functions_that_call(what: str) -> set[str]:
    """Return the outer functions and methods in which a call such as `os.open` stands."""
    found = set()
    for top in TREE.body:
        members = top.body if isinstance(top, ast.ClassDef) else [top]
        for member in members:
            for node in ast.walk(member):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == what:
                    owner = f"{top.name}." if isinstance(top, ast.ClassDef) else ""
                    found.add(owner + getattr(member, "name", "?"))
    return found


def test_the_ledger_file_is_never_opened_beside_sqlite() -> None:
    """Closing such a file drops SQLite's locks (B10): only before the first connect."""
    # The second one opens an input, the third the null device; the last two are a drill's,
    # in a folder of its own, whose ledger nobody is connected to.
    assert functions_that_call("open") == {
        "check_header", "_open_input", "main", "Trial._start", "_content",
    }  # fmt: skip
    # A new file before it is a ledger; a folder; the lock file; result files; the null device;
    # a drill's.
    assert functions_that_call("os.open") == {
        "_create_file",
        "sync_folder",
        "RunLock.__enter__",
        "Part._open",
        "verified",
        "_flushed",
        "be_drilled",
        "Trial._write",
    }
    for node in ast.walk(TREE):
        if isinstance(node, ast.Attribute):
            assert node.attr not in ("read_bytes", "read_text", "write_bytes", "write_text")
            assert node.attr not in ("copyfile", "copy2", "copytree", "file_digest")


def test_time_has_one_source() -> None:
    clocks = {"time", "time_ns", "monotonic", "monotonic_ns", "sleep", "clock_gettime_ns"}
    clocks |= {"perf_counter", "clock_gettime", "now", "utcnow"}
    where = {
        room_of(node).name
        for node in ast.walk(TREE)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id in ("time", "datetime")
        and node.attr in clocks
    }
    assert where <= {"clock", "display", "stand-in"}
    assert "clock" in where


def test_environment_is_read_by_the_cli_alone() -> None:
    where = {
        room_of(node).name
        for node in ast.walk(TREE)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv")
    }
    assert where == {"cli"}


def test_every_write_is_a_method_named_after_its_fact() -> None:
    """Only record_ methods (and what they share) run the statements that write."""
    writes = {
        "SQL_SET_META", "SQL_SET_PACE", "SQL_ADD", "SQL_ADDED_EVENT", "SQL_CHANGE", "SQL_EVENT",
        "SQL_DROP_OUTPUTS", "SQL_ADD_OUTPUT", "SQL_RETIRE", "SQL_REPLACE", "SQL_SET_FILE",
        "SQL_SET_PART", "SQL_CLAIM", "SQL_RENEW", "SQL_RELEASE", "SQL_RELEASE_ONE",
        "SQL_UNSET_META",
    }  # fmt: skip
    ledger = next(n for n in TREE.body if isinstance(n, ast.ClassDef) and n.name == "Ledger")
    users = {
        method.name
        for method in ledger.body
        if isinstance(method, ast.FunctionDef)
        for node in ast.walk(method)
        if isinstance(node, ast.Name) and node.id in writes
    }
    assert {name for name in users if not name.startswith("record_")} == {
        "_add",
        "_add_new",
        "_change",
        "_event",
        "_name_outputs",
        "_next_attempt",
        # What the others put off, to be written together.
        "_write",
    }
    statements = {
        name
        for name in ROOM["schema"].defines
        if name.startswith("SQL_") and SQL_WRITES.match(getattr(sume_resume, name))
    }
    assert statements == writes


SQL_WRITES = re.compile(r"\s*(INSERT|UPDATE|DELETE|REPLACE)\b")


def test_public_names_exist() -> None:
    assert sume_resume.__all__ == sorted(sume_resume.__all__)
    for name in sume_resume.__all__:
        assert hasattr(sume_resume, name)
    errors = {
        name
        for name, value in vars(sume_resume).items()
        if isinstance(value, type) and issubclass(value, sume_resume.SumeResumeError)
    }
    # These never leave a run.
    assert errors - {"LedgerBusy", "LedgerLost", "RowChanged"} <= set(sume_resume.__all__)
