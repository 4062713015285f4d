"""What a person may write as input, and how every mistake in it is named (B18, B32)."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
import tracemalloc
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import jsonl
from typer.testing import CliRunner

import sume_resume
from sume_resume import (
    Added,
    Defaults,
    InputError,
    InputLog,
    Job,
    SumeResumeError,
    UsageError,
    read_rows,
    typed,
)

SCRIPT = str(Path(sume_resume.__file__).resolve())


@dataclass
class Book:
    """A ledger that may not be there yet, and what adding to it does."""

    path: Path

    def add(
        self,
        data: bytes | str,
        name: str = "clips.jsonl",
        namespace: str | None = None,
        **defaults: Any,
    ) -> Added:
        raw = data.encode() if isinstance(data, str) else data
        fill_in = Defaults(**defaults)
        return sume_resume.add_rows(self.path, io.BytesIO(raw), name, fill_in, namespace)

    def refuse(self, data: bytes | str, name: str = "clips.jsonl", **more: Any) -> str:
        """Expect a refusal that changes nothing, and return its text."""
        before = self.content()
        with pytest.raises(SumeResumeError) as caught:
            self.add(data, name, **more)
        assert isinstance(caught.value, InputError | UsageError)
        assert caught.value.exit_code == 2
        assert self.content() == before
        return str(caught.value)

    def content(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.path.parent.iterdir()}

    def jobs(self) -> list[Job]:
        with sume_resume.open_ledger(self.path) as ledger:
            return list(ledger.latest())

    def bodies(self) -> list[dict[str, Any]]:
        return [json.loads(job.body) for job in self.jobs()]

    def prompts(self) -> list[str]:
        return [job.prompt for job in self.jobs()]


@pytest.fixture
def book(tmp_path: Path) -> Book:
    folder = tmp_path / "work"
    folder.mkdir()
    return Book(folder / "jobs.db")


def sume(*args: str, cwd: Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, SCRIPT, *args], cwd=cwd, input=stdin, capture_output=True, timeout=30
    )


# -- formats --

TWO = [{"id": "a", "prompt": "one", "duration": 4}, {"id": "b", "prompt": "two", "seed": 7}]
TWO_CSV = b"id,prompt,duration,seed\na,one,4,\nb,two,,7\n"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", jsonl(*TWO)),
        ("x.ndjson", jsonl(*TWO)),
        ("x.json", json.dumps(TWO).encode()),
        ("x.json", json.dumps(TWO, indent=2).encode()),
        ("x.jsonl", json.dumps(TWO).encode()),
        ("x.json", jsonl(*TWO)),
        ("-", jsonl(*TWO)),
        ("-", json.dumps(TWO).encode()),
        ("-", b"\n  \n" + json.dumps(TWO, indent=1).encode()),
        ("x.csv", TWO_CSV),
        ("X.CSV", TWO_CSV),
        ("x.txt", TWO_CSV),
        ("-", TWO_CSV),
    ],
)
def test_format_is_known_by_extension_or_content(book: Book, name: str, data: bytes) -> None:
    assert book.add(data, name).new == 2
    first, second = book.bodies()
    assert [job.row for job in book.jobs()] == ["a", "b"]
    assert (first["prompt"], first["duration"]) == ("one", 4)
    assert (second["prompt"], second["seed"]) == ("two", 7)
    assert "seed" not in first
    assert "duration" not in second
    assert "id" not in first


def test_csv_extension_wins_over_content(book: Book) -> None:
    """A header that looks like JSON is a header all the same."""
    book.add(b'[note],prompt\n{x},"a clip"\n', "x.csv")
    assert book.bodies()[0]["[note]"] == "{x}"


@pytest.mark.parametrize("bom", [b"", b"\xef\xbb\xbf"], ids=["no BOM", "BOM"])
@pytest.mark.parametrize("end", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("last", [True, False], ids=["last newline", "no last newline"])
@pytest.mark.parametrize("form", ["jsonl", "json", "csv"])
def test_bom_and_line_ends_change_nothing(
    book: Book, bom: bytes, end: bytes, last: bool, form: str
) -> None:
    lines = {
        "jsonl": [b'{"id":"r1","prompt":"first"}', b'{"id":"r2","prompt":"second"}'],
        "json": [b'[{"id":"r1","prompt":"first"},', b'{"id":"r2","prompt":"second"}]'],
        "csv": [b"id,prompt", b"r1,first", b"r2,second"],
    }[form]
    book.add(bom + end.join(lines) + (end if last else b""), f"x.{form}")
    assert [(job.row, job.prompt) for job in book.jobs()] == [("r1", "first"), ("r2", "second")]
    plain = Book(book.path.with_name("plain.db"))
    plain.add(jsonl({"id": "r1", "prompt": "first"}, {"id": "r2", "prompt": "second"}))
    assert [(j.own, j.body) for j in book.jobs()] == [(j.own, j.body) for j in plain.jobs()]


def test_blank_lines_are_no_rows_and_still_count(book: Book) -> None:
    text = book.refuse(b'\n  \n{"prompt":"a"}\r\n\r\n\t\n{"prompt":7}\n\n')
    assert "clips.jsonl:6: prompt" in text
    book.add(b'\n  \n{"prompt":"a"}\r\n\r\n\t\n{"prompt":"b"}\n\n')
    assert [job.source for job in book.jobs()] == ["clips.jsonl:3", "clips.jsonl:6"]


def test_blank_lines_before_a_csv_header_still_count(book: Book) -> None:
    text = book.refuse(b"\n\nid,prompt\nr1,a\nr2,\n", "x.csv")
    assert "x.csv:5: prompt" in text


def test_blank_lines_inside_a_csv_still_count(book: Book) -> None:
    text = book.refuse(b'id,prompt\n\nr1,"two\nlines"\n\nr2,\n', "x.csv")
    assert "x.csv:6: prompt" in text


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0b", "\x0c", "\x1c"])
def test_unicode_line_ends_are_text_inside_a_string(book: Book, mark: str) -> None:
    prompt = f"a{mark}b [/x] [red] \x1b[2J 日本"
    raw = mark if mark > "\x1f" else json.dumps(mark)[1:-1]
    line = f'{{"id":"r1","prompt":"a{raw}b [/x] [red] \\u001b[2J 日本"}}\r\n'
    assert book.add(line).new == 1
    assert book.prompts() == [prompt]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85"])
def test_unicode_line_ends_are_text_inside_a_cell(book: Book, mark: str) -> None:
    assert book.add(f"id,prompt\nr1,a{mark}b\n", "x.csv").new == 1
    assert book.prompts() == [f"a{mark}b"]


def test_csv_cell_may_span_lines(book: Book) -> None:
    book.add(b'id,prompt\nr1,"one\r\ntwo, ""three"""\nr2,x\n', "x.csv")
    assert book.prompts() == ['one\r\ntwo, "three"', "x"]
    assert [job.source for job in book.jobs()] == ["x.csv:2", "x.csv:4"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("x.jsonl", b'{"prompt":"a"}\r{"prompt":"b"}\r'),
        ("x.csv", b"prompt\ra\rb\r"),
        ("x.json", b'[{"prompt":"a"},\r{"prompt":"b"}]\r'),
    ],
)
def test_lone_cr_is_read_right_or_refused_with_a_line(book: Book, name: str, data: bytes) -> None:
    """Never rows glued together, and never one lost (P3)."""
    said = ""
    try:
        book.add(data, name)
    except InputError as exc:
        said = str(exc)
    if said:
        assert f"{name}:1" in said
        assert book.content() == {}
    else:
        assert book.prompts() == ["a", "b"]


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.csv", "-"])
@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_utf_16_is_named(book: Book, name: str, codec: str) -> None:
    text = "id,prompt\nr1,a\n" if name == "x.csv" else '{"prompt":"a"}\n'
    said = book.refuse(text.encode(codec), name)
    assert f"{name}:1" in said
    assert "UTF-8" in said


@pytest.mark.parametrize(
    ("name", "data", "line"),
    [
        ("x.jsonl", b'{"prompt":"a"}\n\n{"prompt":"caf\xe9"}\n', 3),
        ("x.jsonl", b'{"prompt":"\xf0\x9f"}', 1),
        ("x.jsonl", b'{"prompt":"\xed\xa0\x80"}', 1),
        ("x.jsonl", b'{"prompt":"a","caf\xe9":1}', 1),
        ("x.csv", b"id,prompt\nr1,a\nr2,caf\xe9\n", 3),
        ("x.json", b'[{"prompt":"a"},\n{"prompt":"b"},\n{"prompt":"caf\xe9"}]', 3),
    ],
)
def test_bytes_that_are_no_utf_8_are_named_by_line(
    book: Book, name: str, data: bytes, line: int
) -> None:
    said = book.refuse(data, name)
    assert f"{name}:{line}:" in said
    assert "UTF-8" in said


def test_bad_bytes_in_a_csv_header_are_named(book: Book) -> None:
    said = book.refuse(b"id,prompt,caf\xe9\nr1,a,b\n", "x.csv")
    assert "x.csv:1:" in said
    assert "UTF-8" in said


@pytest.mark.parametrize("first", [b"", b'{"prompt":"ok"}\n'], ids=["first", "second"])
def test_nul_in_json_is_refused_with_its_line(book: Book, first: bytes) -> None:
    said = book.refuse(first + b'{"prompt":"a\0b"}\n')
    assert f"clips.jsonl:{2 if first else 1}:" in said


# -- values that JSON allows and a request cannot carry, and the other way round --


@pytest.mark.parametrize(
    "field",
    [
        '"x":NaN',
        '"x":Infinity',
        '"x":-Infinity',
        '"x":1e999',
        '"x":-1e999',
        '"x":[{"y":1e400}]',
        '"x":"\\ud800"',
        '"\\ud800":1',
        '"x":["\\udc00\\ud800"]',
        '"x":1,"x":1',
        '"x":{"y":1,"z":2,"y":3}',
        '"x":[[{"y":1,"\\u0079":3}]]',
        '"x":' + "9" * 5000,
        '"x":' + "[" * 100_000 + "]" * 100_000,
        '"x":' + '{"y":' * 100_000 + "1" + "}" * 100_000,
        '"x":01',
        '"x":1,',
        '"x":undefined',
        "'x':1",
    ],
    ids=lambda text: str(text)[:24],
)
@pytest.mark.parametrize("form", ["jsonl", "json"])
def test_unusable_values_are_refused_by_line(book: Book, field: str, form: str) -> None:
    row = '{"id":"r2","prompt":"b",' + field + "}"
    good = '{"id":"r1","prompt":"a"}'
    data = f"{good}\n{row}\n" if form == "jsonl" else f"[{good},\n{row}]"
    said = book.refuse(data, f"x.{form}")
    assert f"x.{form}:2:" in said or form == "json"
    assert f"x.{form}:" in said
    assert len(said) < 400


@pytest.mark.parametrize("field", ['"x":1,"x":1', '"x":NaN', '"x":01'])
def test_a_bad_row_of_an_array_is_not_blamed_on_another(book: Book, field: str) -> None:
    """It is the second row, and on the second line."""
    said = book.refuse(
        '[{"id":"r1","prompt":"a"},\n{"id":"r2","prompt":"b",' + field + "}]", "x.json"
    )
    assert "x.json:1:" not in said


@pytest.mark.parametrize("field", ['"tone":"\\ud800"', '"tone":1e999', '"prompt":"\\udfff"'])
def test_unusable_value_names_its_field(book: Book, field: str) -> None:
    name = field.split('"')[1]
    said = book.refuse(
        '{"prompt":"a",' * (name != "prompt") + "{" * (name == "prompt") + field + "}"
    )
    assert "clips.jsonl:1" in said
    assert name in said


def test_a_doubled_field_is_named(book: Book) -> None:
    assert "'seed'" in book.refuse('{"prompt":"a","seed":1,"seed":2}')


@pytest.mark.parametrize("around", [0, 100, 900, 925, 950, 975])
def test_no_depth_of_nesting_is_a_fault(tmp_path: Path, around: int) -> None:
    """Between "fine" and "too deep" there is no depth that ends in an internal error."""
    deepest = 0
    for depth in range(around, around + 25):
        book = Book(tmp_path / f"{depth}.db")
        row = '{"prompt":"p","x":' + "[" * depth + "1" + "]" * depth + "}"
        said = ""
        try:
            book.add(row)
            deepest = depth
        except InputError as exc:
            said = str(exc)
        assert said == "" or "clips.jsonl:1" in said
        assert bool(said) != book.path.exists()
    assert deepest == around + 24 or around > 200


def test_integers_and_text_reach_the_body_exactly(book: Book) -> None:
    row = {
        "prompt": "日本 \U0001f600 é\u0301",
        "seed": 2**70,
        "flag": False,
        "none": None,
        "f": 0.1,
    }
    book.add(jsonl(row))
    body = book.bodies()[0]
    assert {name: body[name] for name in row} == row
    assert body["mode"] == "async"
    assert body["model"] == sume_resume.DEFAULT_MODEL


# -- sizes --


def test_long_prompt_is_accepted_in_every_format(book: Book) -> None:
    long = "x" * 200_000
    book.add(jsonl({"id": "a", "prompt": long}))
    book.add(f'id,prompt\nb,"{long}"\n', "x.csv")
    book.add(json.dumps([{"id": "c", "prompt": long}]), "x.json")
    assert book.prompts() == [long] * 3


def test_body_over_a_mebibyte_is_refused_by_line(book: Book) -> None:
    rows = [{"id": "a", "prompt": "ok"}, {"id": "b", "prompt": "x" * (1 << 20)}]
    said = book.refuse(jsonl(*rows))
    assert "clips.jsonl:2:" in said
    assert "1048576" in said
    rows[1]["prompt"] = "x" * ((1 << 20) - 100)
    assert book.add(jsonl(*rows)).new == 2


def test_body_limit_counts_bytes_and_not_characters(book: Book) -> None:
    assert "clips.jsonl:1:" in book.refuse(jsonl({"prompt": "日" * 400_000}))


def test_overlong_line_names_the_file_and_the_line(book: Book) -> None:
    data = b'{"prompt":"a"}\n{"prompt":"' + b"x" * (9 << 20) + b'"}\n'
    assert "clips.jsonl:2" in book.refuse(data)


def test_array_on_one_long_line_is_read(book: Book) -> None:
    """json.dump writes an array on one line, however many rows it has."""
    rows = [{"id": f"r{n}", "prompt": "x" * 900} for n in range(10_000)]
    assert book.add(json.dumps(rows), "x.json").new == 10_000


@pytest.mark.parametrize(("form", "count"), [("jsonl", 20_000), ("csv", 8_000)])
def test_many_rows_in_flat_memory(form: str, count: int) -> None:
    """Each row is made and let go: what stays is an id and its line."""
    long = "x" * 1000
    if form == "jsonl":
        lines = (f'{{"id":"r{n}","prompt":"{n} {long}"}}' for n in range(count))
    else:
        lines = (f"r{n},{n} {long}" for n in range(count))
    head = "id,prompt\n" if form == "csv" else ""
    stream = io.BytesIO((head + "\n".join(lines)).encode())
    log = InputLog()
    tracemalloc.start()
    try:
        total = sum(1 for _ in read_rows(stream, f"x.{form}", Defaults(), log))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    log.check()
    assert total == count
    assert peak < 400_000 + 250 * count, peak


# -- CSV --


@pytest.mark.parametrize(
    ("data", "name", "said"),
    [
        (b"id,prompt\rr1,a\r", "x.csv", "LF or CRLF"),
        (b'{"prompt":"a"}\r{"prompt":"b"}\r', "x.jsonl", "LF or CRLF"),
        (b'{"prompt":"a","seed":' + b"9" * 5000 + b"}", "x.jsonl", "a number is too long"),
    ],
    ids=["CR in CSV", "CR in JSONL", "5000 digits"],
)
def test_what_python_would_say_in_its_own_words(
    book: Book, data: bytes, name: str, said: str
) -> None:
    assert said in book.refuse(data, name)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"id,prompt\nr1,a\nr2,b,c\n", "x.csv:3: expected 2 cells as in the header, got 3"),
        (b"prompt,x,prompt\na,1,b\n", "x.csv:1: the column 'prompt' is there twice"),
        (b"prompt,x, x\na,1,b\n", "x.csv:1: the column 'x' is there twice"),
        (b"id,text\nr1,a\n", "column 'prompt'"),
        (b"id;prompt\nr1;a\n", "separated by commas"),
        (b"ID,Prompt\nr1,a\n", 'got "ID, Prompt"'),
        (b"id,prompt\nr1,\n", "x.csv:2: prompt: missing"),
        (b"id,prompt\nr1\n", "x.csv:2: prompt: missing"),
        (b'id,prompt\nr1,a\nr2,"open\n', "x.csv:3: not valid CSV"),
        (b"id,prompt,duration\nr1,a,five\n", "x.csv:2: duration: expected"),
    ],
)
def test_csv_mistakes_are_named(book: Book, data: bytes, said: str) -> None:
    assert said in book.refuse(data, "x.csv")


def test_csv_cells_are_typed_by_the_rules(book: Book) -> None:
    head = "id,prompt,model,duration,seed,flag,list,object,nothing,text,code,quoted"
    line = 'r1,true,7,4,7,true,"[1, ""a""]","{""a"": 1}",null,plain,007,"""5"""'
    book.add(f"{head}\n{line}\n12,[1],null,,,,,,,,,\n", "x.csv")
    first, second = book.bodies()
    assert first == {
        "mode": "async",
        "prompt": "true",
        "model": "7",
        "duration": 4,
        "seed": 7,
        "flag": True,
        "list": [1, "a"],
        "object": {"a": 1},
        "nothing": None,
        "text": "plain",
        "code": "007",
        "quoted": "5",
    }
    assert second == {"mode": "async", "prompt": "[1]", "model": "null"}
    assert [job.row for job in book.jobs()] == ["r1", "12"]


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("seed", "7", 7),
        ("seed", "0.5", 0.5),
        ("seed", "true", True),
        ("seed", "null", None),
        ("seed", '"7"', "7"),
        ("seed", "[1,2]", [1, 2]),
        ("seed", '{"a":1}', {"a": 1}),
        ("seed", "16:9", "16:9"),
        ("seed", "NaN", "NaN"),
        ("seed", "Infinity", "Infinity"),
        ("seed", "True", "True"),
        ("seed", "007", "007"),
        ("seed", "", ""),
        ("seed", '{"a":1,"a":2}', '{"a":1,"a":2}'),
        ("seed", "[" * 100_000, "[" * 100_000),
        ("id", "7", "7"),
        ("prompt", "7", "7"),
        ("model", "7", "7"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_typed(name: str, text: str, value: Any) -> None:
    assert typed(name, text) == value
    assert type(typed(name, text)) is type(value)


# -- fields --


@pytest.mark.parametrize(
    ("field", "value", "expected", "got"),
    [
        ("prompt", 7, "text", "7"),
        ("prompt", "  ", "text", '"  "'),
        ("prompt", ["a"], "text", '["a"]'),
        ("prompt", None, "missing", ""),
        ("id", "", "1 to 200", '""'),
        ("id", "x" * 201, "1 to 200", "xxx"),
        ("id", "a\nb", "printable text", "a"),
        ("id", "a\x1b[2Jb", "printable text", "a"),
        ("id", " a", "printable text", "a"),
        ("id", True, "printable text", "true"),
        ("id", 1.5, "printable text", "1.5"),
        ("id", [1], "printable text", "[1]"),
        ("model", 5, "model name", "5"),
        ("model", "", "model name", '""'),
        ("duration", "5", "whole number", '"5"'),
        ("duration", 5.0, "whole number", "5.0"),
        ("duration", True, "whole number", "true"),
        ("duration", 0, "above 0", "0"),
        ("duration", -4, "above 0", "-4"),
        ("duration", 2**40, "whole number", "1099511627776"),
        ("kind", "gif", "video or image", '"gif"'),
        ("kind", "Video", "video or image", '"Video"'),
        ("kind", {}, "video or image", "{}"),
        ("mode", "sync", "async", '"sync"'),
        ("mode", None, "async", "null"),
        ("mode", True, "async", "true"),
    ],
)
def test_wrong_field_names_place_field_expected_and_got(
    book: Book, field: str, value: Any, expected: str, got: str
) -> None:
    said = book.refuse(jsonl({"prompt": "ok"}, {"prompt": "a"} | {field: value}))
    assert said.startswith(f"clips.jsonl:2: {field}: ")
    assert expected in said
    assert got in said
    assert "\n" not in said
    assert "\x1b" not in said


def test_row_without_prompt_is_named(book: Book) -> None:
    assert "clips.jsonl:2: prompt: missing" in book.refuse(jsonl({"prompt": "ok"}, {"id": "r2"}))


@pytest.mark.parametrize("line", ["5", '"text"', "[1]", "null", "true"])
def test_line_that_is_no_object_is_named(book: Book, line: str) -> None:
    said = book.refuse(f'{{"prompt":"a"}}\n{line}\n')
    assert f"clips.jsonl:2: expected a JSON object, got {line}" in said


def test_mode_async_and_unknown_fields_go_through(book: Book) -> None:
    book.add(jsonl({"prompt": "a", "mode": "async", "aspect_ratio": "9:16", "x": {"y": [None]}}))
    body = book.bodies()[0]
    assert (body["mode"], body["aspect_ratio"], body["x"]) == ("async", "9:16", {"y": [None]})


def test_null_in_a_known_field_is_a_field_left_out(book: Book) -> None:
    row = {"id": None, "prompt": "a", "model": None, "duration": None, "kind": None}
    book.add(jsonl(row), fields={"duration": 6})
    assert book.add(jsonl({"prompt": "a"})).existing == 1
    assert book.bodies()[0]["duration"] == 6


def test_first_ten_problems_then_a_count(book: Book) -> None:
    rows = [{"prompt": n} for n in range(1, 8)] + [{"prompt": "a", "duration": 0, "mode": "x"}] * 4
    said = book.refuse(jsonl(*rows)).splitlines()
    assert len(said) == 11
    assert [line.partition(": ")[0] for line in said[:7]] == [
        f"clips.jsonl:{n}" for n in range(1, 8)
    ]
    assert said[7].startswith("clips.jsonl:8: duration")
    assert said[8].startswith("clips.jsonl:8: mode")
    assert said[10] == "… and 5 more"


def test_ten_problems_have_no_count(book: Book) -> None:
    said = book.refuse(jsonl(*[{"prompt": 0}] * 10)).splitlines()
    assert len(said) == 10
    assert "more" not in said[-1]


@pytest.mark.parametrize("where", [0, 50, 99])
def test_one_bad_row_adds_nothing_and_makes_no_ledger(book: Book, where: int) -> None:
    rows = [{"prompt": f"p{n}"} for n in range(100)]
    good = jsonl(*rows)
    rows[where] = {"prompt": "bad", "kind": "gif"}
    book.refuse(jsonl(*rows))
    assert book.content() == {}
    book.add(jsonl({"prompt": "before"}))
    book.refuse(jsonl(*rows))
    assert book.prompts() == ["before"]
    assert book.add(good).new == 100


@pytest.mark.parametrize("data", [b"", b"\n \n", b"[]", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.csv", "-"])
def test_input_without_rows_is_refused(book: Book, data: bytes, name: str) -> None:
    if (name, data) == ("x.csv", b"[]"):
        data = b"id,prompt\n"
    assert name in book.refuse(data, name)
    assert book.content() == {}


def test_syntax_error_in_an_array_names_its_own_line(book: Book) -> None:
    said = book.refuse(b'[\n{"prompt":"a"},\n{"prompt":"b"},\n{"prompt" "c"}\n]', "x.json")
    assert "x.json:4:" in said


# -- rows, ids, sameness --


def test_equal_lines_are_two_clips(book: Book) -> None:
    assert book.add(jsonl({"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"})).new == 3
    jobs = book.jobs()
    assert len({job.row for job in jobs}) == 3
    assert len({job.key for job in jobs}) == 3
    assert jobs[0].body == jobs[1].body


def test_same_file_twice_adds_nothing(book: Book) -> None:
    data = jsonl({"prompt": "a"}, {"prompt": "a"}, {"id": "r", "prompt": "a"})
    book.add(data)
    before = book.jobs()
    again = book.add(data, "other-name.jsonl")
    assert (again.new, again.existing) == (0, 3)
    assert again.rows == {job.row for job in before}
    assert book.jobs() == before


def test_order_of_fields_and_form_make_no_new_row(book: Book) -> None:
    book.add(b'{"prompt":"a","duration":4,"x":{"b":1,"a":2}}')
    assert book.add(b'{ "x" : {"a":2, "b":1},"duration":4, "prompt" : "\\u0061" }').existing == 1
    assert book.add(b'prompt,duration,x\na,4,"{""b"":1,""a"":2}"\n', "x.csv").existing == 1
    assert len(book.jobs()) == 1


def test_a_longer_file_adds_what_is_new(book: Book) -> None:
    book.add(jsonl({"prompt": "a"}))
    added = book.add(jsonl({"prompt": "a"}, {"prompt": "a"}, {"prompt": "b"}))
    assert (added.new, added.existing) == (2, 1)


def test_take_buys_lines_without_an_id_once_more(book: Book) -> None:
    data = jsonl({"prompt": "a"}, {"prompt": "a"}, {"id": "r", "prompt": "a"})
    book.add(data)
    second = book.add(data, take=2)
    assert (second.new, second.existing) == (2, 1)
    assert (book.add(data, take=2).new, book.add(data, take=3).new) == (0, 2)
    jobs = book.jobs()
    assert len({job.key for job in jobs}) == len({job.row for job in jobs}) == 7


def test_same_id_with_other_content_names_both_lines(book: Book) -> None:
    book.add(jsonl({"id": "x", "prompt": "a"}, {"id": "r2", "prompt": "a"}), "first.jsonl")
    rows = [{"id": "x", "prompt": "a"}, {"id": "y", "prompt": "new"}, {"id": "r2", "prompt": "b"}]
    said = book.refuse(jsonl(*rows), "second.jsonl")
    assert "second.jsonl:3" in said
    assert "first.jsonl:2" in said
    assert "'r2'" in said


def test_twin_id_in_one_file_names_both_lines(book: Book) -> None:
    rows = [{"id": "r1", "prompt": "a"}, {"id": "r2", "prompt": "b"}, {"id": "r1", "prompt": "a"}]
    said = book.refuse(jsonl(*rows))
    assert "clips.jsonl:3" in said
    assert "line 1" in said
    assert "'r1'" in said


def test_number_and_its_text_are_one_id(book: Book) -> None:
    said = book.refuse(jsonl({"id": 7, "prompt": "a"}, {"id": "7", "prompt": "b"}))
    assert "clips.jsonl:2" in said


def test_twin_ids_in_csv_and_array(book: Book) -> None:
    assert "x.csv:3" in book.refuse(b"id,prompt\nr1,a\nr1,b\n", "x.csv")
    assert "r1" in book.refuse(json.dumps([{"id": "r1", "prompt": "a"}] * 2), "x.json")


# -- defaults --


def test_defaults_fill_in_and_the_row_wins(book: Book) -> None:
    fields = {"model": "m/one", "duration": 6, "seed": 1}
    book.add(jsonl({"prompt": "a"}, {"prompt": "b", "model": "own", "seed": 2}), fields=fields)
    first, second = book.bodies()
    assert (first["model"], first["duration"], first["seed"]) == ("m/one", 6, 1)
    assert (second["model"], second["duration"], second["seed"]) == ("own", 6, 2)
    assert [(job.model, job.duration_s) for job in book.jobs()] == [("m/one", 6), ("own", 6)]


@pytest.mark.parametrize(
    ("first", "second", "names"),
    [
        ({"model": "m/one"}, {"model": "m/two"}, ("model", "m/one", "m/two")),
        ({}, {"model": "m/two"}, ("model", sume_resume.DEFAULT_MODEL, "m/two")),
        ({"duration": 5}, {"duration": 8}, ("duration", "5", "8")),
        ({}, {"duration": 8}, ("duration", "8")),
        ({"seed": 1}, {"seed": 2}, ("seed", "1", "2")),
        ({}, {"seed": None}, ("seed", "null")),
        ({"seed": 1}, {"seed": True}, ("seed", "1", "true")),
    ],
)
def test_default_that_differs_now_is_refused_naming_both(
    book: Book, first: dict[str, Any], second: dict[str, Any], names: tuple[str, ...]
) -> None:
    data = jsonl({"id": "r1", "prompt": "a"})
    book.add(data, fields=first)
    said = book.refuse(data, fields=second)
    assert all(name in said for name in names)
    assert "'r1'" in said


@pytest.mark.parametrize("now", [{}, {"model": "m/one"}, {"duration": 5}])
def test_same_default_or_none_is_a_no_op(book: Book, now: dict[str, Any]) -> None:
    data = jsonl({"prompt": "a"})
    book.add(data, fields={"model": "m/one", "duration": 5})
    before = book.content()
    assert book.add(data, fields=now).existing == 1
    assert book.content() == before


def test_default_of_a_field_that_the_row_has_is_no_clash(book: Book) -> None:
    data = jsonl({"prompt": "a", "model": "own"})
    book.add(data)
    assert book.add(data, fields={"model": "m/two"}).existing == 1


def test_kind_rules(book: Book) -> None:
    """A row's own kind wins; --kind fills in; without both it is a video."""
    rows = [{"id": "a", "prompt": "x"}, {"id": "b", "prompt": "x", "kind": "video"}]
    book.add(jsonl(*rows), kind="image")
    book.add(jsonl({"id": "c", "prompt": "x"}))
    assert {job.row: job.kind for job in book.jobs()} == {"a": "image", "b": "video", "c": "video"}
    assert all("kind" not in body for body in book.bodies())
    assert book.add(jsonl(*rows)).existing == 2
    said = book.refuse(jsonl(*rows), kind="video")
    assert all(word in said for word in ("'a'", "kind", "image", "video"))
    assert book.refuse(jsonl({"id": "c", "prompt": "x"}), kind="image")


def test_kind_given_as_a_flag_makes_no_new_row(book: Book) -> None:
    """A forgotten flag never buys the same line again."""
    book.add(jsonl({"prompt": "x"}), kind="image")
    assert book.add(jsonl({"prompt": "x"})).existing == 1


# -- namespace (B07, B18) --


def keys(book: Book) -> list[str]:
    return [job.key for job in book.jobs()]


def test_same_namespace_makes_the_same_keys_in_a_fresh_ledger(tmp_path: Path) -> None:
    one, two, three = (Book(tmp_path / name) for name in ("1.db", "2.db", "3.db"))
    data = jsonl({"prompt": "a"}, {"id": "r2", "prompt": "b"})
    one.add(data, namespace="build-42")
    two.add(data, namespace="build-42")
    three.add(data, namespace="build-43")
    assert keys(one) == keys(two)
    assert not set(keys(one)) & set(keys(three))


def test_without_a_namespace_two_ledgers_share_no_key(tmp_path: Path) -> None:
    one, two = Book(tmp_path / "1.db"), Book(tmp_path / "2.db")
    one.add(jsonl({"id": "hook", "prompt": "a"}))
    two.add(jsonl({"id": "hook", "prompt": "a"}))
    assert keys(one) != keys(two)


def test_namespace_is_fixed_at_creation(book: Book) -> None:
    book.add(jsonl({"prompt": "a"}), namespace="build-42")
    assert book.add(jsonl({"prompt": "b"})).new == 1
    assert book.add(jsonl({"prompt": "c"}), namespace="build-42").new == 1
    said = book.refuse(jsonl({"prompt": "d"}), namespace="build-43")
    assert "build-42" in said


def test_row_id_body_and_key_never_change(book: Book) -> None:
    """Golden: other bytes here would buy every clip of every old ledger again."""
    book.add(jsonl({"prompt": "a clip", "duration": 5}), namespace="golden")
    job = book.jobs()[0]
    assert job.body == (b'{"duration":5,"mode":"async","model":"sume/auto","prompt":"a clip"}')
    assert job.own == '{"duration":5,"prompt":"a clip"}'
    assert job.row == GOLDEN_ROW
    assert job.key == GOLDEN_KEY


GOLDEN_ROW = "affd891334b8c944"
GOLDEN_KEY = "sr-9e7436fe16def4f8a9e4dbb0cbbf379d94e2b4fa"


# -- through the command --


def test_stdin_is_an_input(tmp_path: Path) -> None:
    done = sume("add", "-", cwd=tmp_path, stdin=jsonl({"id": "r1", "prompt": "from a pipe"}))
    assert done.returncode == 0, done.stderr
    assert Book(tmp_path / "jobs.db").prompts() == ["from a pipe"]
    assert Book(tmp_path / "jobs.db").jobs()[0].source == "stdin:1"


def test_prompt_flag_adds_one_row(tmp_path: Path) -> None:
    args = ("add", "--prompt", "7", "--id", "r1", "--set", "seed=7", "--set", "ratio=16:9")
    done = sume(*args, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    body = Book(tmp_path / "jobs.db").bodies()[0]
    assert (body["prompt"], body["seed"], body["ratio"]) == ("7", 7, "16:9")


def test_existing_rows_are_counted_and_explained(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_bytes(jsonl({"prompt": "a"}, {"prompt": "b"}))
    sume("add", "c.jsonl", cwd=tmp_path)
    done = sume("add", "c.jsonl", cwd=tmp_path)
    assert done.returncode == 0
    assert b"0 rows added" in done.stderr
    assert b"2 there already, not bought again" in done.stderr
    assert b"--take" in done.stderr


@pytest.mark.parametrize(
    "flag",
    [
        ("--set", "x=1e999"),
        ("--set", 'x="\\ud800"'),
        ("--set", "x=\udcff"),
        ("--model", "\udcff"),
        ("--set", "mode=sync"),
        ("--set", "x"),
        ("--set", "=1"),
        ("--set", "prompt=b"),
        ("--set", "model=b"),
        ("--model", ""),
        ("--kind", "gif"),
        ("--duration", "0"),
        ("--duration", "4.5"),
        ("--take", "0"),
        ("--namespace", ""),
        ("--namespace", "  "),
        ("--namespace", "x" * 201),
        ("--namespace", "a\x1b[2J"),
    ],
    ids=ascii,
)
def test_unusable_default_is_exit_2_and_makes_nothing(
    tmp_path: Path, flag: tuple[str, str]
) -> None:
    """A byte that is no text comes from the shell as a lone surrogate."""
    with contextlib.chdir(tmp_path):
        done = CliRunner().invoke(sume_resume.app, ["add", "--prompt", "a", *flag])
    assert done.exit_code == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert "\x1b" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_set_given_twice_is_exit_2(tmp_path: Path) -> None:
    done = sume("add", "--prompt", "a", "--set", "x=1", "--set", "x=2", cwd=tmp_path)
    assert done.returncode == 2
    assert list(tmp_path.iterdir()) == []


def test_missing_file_and_folder_are_exit_2(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for name in ("absent.jsonl", "folder"):
        done = sume("add", name, cwd=tmp_path)
        assert done.returncode == 2
        assert name.encode() in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
