"""What the package says about itself agrees: metadata, script header, README, exit codes."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import sume_resume
from sume_resume import Exit

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "sume_resume.py"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def script_block() -> dict[str, Any]:
    """Read the PEP 723 block by the regular expression that the PEP gives."""
    pattern = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    found = [m for m in re.finditer(pattern, SCRIPT.read_text("utf-8")) if m["type"] == "script"]
    assert len(found) == 1
    lines = found[0]["content"].splitlines(keepends=True)
    return tomllib.loads("".join(x[2:] if x.startswith("# ") else x[1:] for x in lines))


def test_script_block_equals_the_project() -> None:
    block = script_block()
    assert block["dependencies"] == PROJECT["project"]["dependencies"]
    assert block["requires-python"] == PROJECT["project"]["requires-python"]


def test_runtime_packages_are_exactly_three() -> None:
    needs = PROJECT["project"]["dependencies"]
    names = [re.split(r"[^A-Za-z0-9_.-]", need)[0].lower() for need in needs]
    assert sorted(names) == ["httpx", "rich", "typer"]
    assert any("<0.29" in need for need in needs if need.startswith("typer"))
    assert [n for n in PROJECT["project"]["optional-dependencies"]["postgres"] if "psycopg" in n]


def test_only_the_runtime_packages_are_imported() -> None:
    """psycopg is an extra, so its import has to be inside a function."""
    tree = ast.parse(SCRIPT.read_text("utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add((node.module or "").partition(".")[0])
    outside = found - set(sys.stdlib_module_names)
    assert outside - {"psycopg"} == {"httpx", "rich", "typer"}


def test_version_of_the_file_is_what_the_command_says() -> None:
    match = re.search(r'^__version__ = "([^"]+)"$', SCRIPT.read_text("utf-8"), re.MULTILINE)
    assert match is not None
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "sume_resume.py"
    assert PROJECT["project"]["dynamic"] == ["version"]
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--version"], capture_output=True, text=True, timeout=30
    )
    assert done.stdout.strip() == f"sume-resume {match[1]}"
    assert re.fullmatch(r"\d+\.\d+\.\d+", match[1])


def test_command_and_module_have_their_names() -> None:
    assert PROJECT["project"]["name"] == "sume-resume"
    assert PROJECT["project"]["scripts"] == {"sume-resume": "sume_resume:main"}
    wheel = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["only-include"] == ["sume_resume.py"]


def test_top_level_is_exactly_what_it_should_be() -> None:
    done = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30
    )
    if done.returncode:
        # No checkout: a source archive has the same files.
        names = {path.name for path in ROOT.iterdir()}
    else:
        names = {name.partition("/")[0] for name in done.stdout.split("\0") if name}
    names -= {"PKG-INFO"}
    plain = {name for name in names if not name.startswith(".")}
    assert plain == {"pyproject.toml", "README.md", "sume_resume.py", "tests", "jobs.example.db"}
    dots = {".ci", ".gitignore", ".gitattributes", ".github"}
    assert {name for name in names if name.startswith(".")} <= dots


# -- exit codes --


def codes_in(text: str) -> dict[int, str]:
    """Read lines such as `  129, 130, 143  hung up` into code and meaning."""
    found: dict[int, str] = {}
    for line in text.splitlines():
        if match := re.fullmatch(r"\s+(\d+(?:, \d+)*)\s{2,}(\S.*)", line):
            found |= {int(code): match[2] for code in match[1].split(", ")}
    return found


def test_exit_codes_in_help_are_those_of_the_enum() -> None:
    assert set(codes_in(sume_resume.EXIT_CODES)) == {int(code) for code in Exit}


def test_exit_codes_are_the_promised_ones() -> None:
    promised = {
        "DONE": 0,
        "NOT_ALL_COMPLETED": 1,
        "USAGE": 2,
        "UNFINISHED": 3,
        "REVIEW": 4,
        "ACCOUNT": 5,
        "CAPPED": 6,
        "LOCKED": 7,
        "LEDGER": 8,
        "HANGUP": 129,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }
    assert promised.items() <= {code.name: int(code) for code in Exit}.items()


def test_every_error_has_a_code_of_the_enum() -> None:
    for value in vars(sume_resume).values():
        if isinstance(value, type) and issubclass(value, sume_resume.SumeResumeError):
            assert value.exit_code in Exit
            assert value.__doc__


# -- README --


@pytest.fixture(scope="module")
def readme() -> str:
    return (ROOT / "README.md").read_text("utf-8")


def help_of(*command: str) -> str:
    result = CliRunner().invoke(sume_resume.app, [*command, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    return result.stdout


def commands() -> list[str]:
    listed = help_of().partition("Commands:")[2].partition("Exit codes")[0]
    return re.findall(r"^  ([a-z][a-z-]*)\b", listed, re.MULTILINE)


def flags(command: str) -> set[str]:
    """Return the flags at the start of the lines of a command's help."""
    lines = re.findall(r"^  (-[^ ].*?)(?:  |$)", help_of(command), re.MULTILINE)
    return {flag for line in lines for flag in re.findall(r"--[a-z][a-z-]*", line)} - {"--help"}


def test_help_is_read_right() -> None:
    assert {"add", "run", "status"} <= set(commands())
    assert {"--db", "--limit", "--simulate", "--adopt-account", "--key-ttl"} <= flags("run")


@pytest.mark.parametrize("command", commands())
def test_readme_names_every_command_and_flag(readme: str, command: str) -> None:
    assert re.search(rf"\bsume-resume {command}\b|`{command}\b", readme)
    missing = {flag for flag in flags(command) if not re.search(rf"{flag}(?![\w-])", readme)}
    assert missing == set()


def test_readme_names_no_flag_that_does_not_exist(readme: str) -> None:
    """Looks at what stands after the command's name, up to a pipe or a comment."""
    own = {flag for command in commands() for flag in flags(command)}
    own |= {"--version", "--help", "--install-completion", "--show-completion"}
    texts = re.findall(r"sume-resume ([^|#\n]*)", readme)
    used = {flag for text in texts for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)}
    assert used <= own


@pytest.mark.parametrize("code", sorted(int(code) for code in Exit))
def test_readme_names_every_exit_code(readme: str, code: int) -> None:
    """In a table or a list: the code stands alone at the start, or in its cell."""
    table = [line for line in readme.splitlines() if re.match(r"\s*[|*-]?\s*`?\d", line)]
    cells = {number for line in table for number in re.findall(r"\d+", line.strip("| ")[:24])}
    assert str(code) in cells


@pytest.mark.parametrize(
    "name", ["SUME_API_KEY", "SUME_API_BASE_URL", "SUME_API_AUTH_MODE", "SUME_RESUME_DB"]
)
def test_readme_names_every_variable(readme: str, name: str) -> None:
    assert name in SCRIPT.read_text("utf-8")
    assert name in readme


def test_readme_says_how_far_the_promise_reaches(readme: str) -> None:
    """A lost ledger is safe only as long as Sume remembers keys (P1)."""
    assert "jobs.example.db" in readme
    assert "--simulate" in readme
    assert "--namespace" in readme
