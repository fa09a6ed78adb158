"""Configuration as people write it: one meaning in a file, a JSON text and key=value, and every mistake told."""

from __future__ import annotations

import json
import math
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hal.errors import PolicyError
from hal.source import read, scalar

PAIRS = [
    # text, mapping
    ("a=1", {"a": 1}),
    ("a=-1,b=+2,c=007", {"a": -1, "b": 2, "c": 7}),
    ("a=-0.5,b=1e-3,c=.5,d=5.,e=-1E3", {"a": -0.5, "b": 1e-3, "c": 0.5, "d": 5.0, "e": -1000.0}),
    ("a=inf,b=-.inf", {"a": math.inf, "b": -math.inf}),
    ("a=true,b=FALSE,c=null,d=~", {"a": True, "b": False, "c": None, "d": None}),
    ("a=yes,b=off,c=none", {"a": "yes", "b": "off", "c": "none"}),  # words; null, true and false are no words
    ("a=1_000,b=0x10,c=1e,d=1:30,e=2026-12-01,f=٣",
     {"a": "1_000", "b": "0x10", "c": "1e", "d": "1:30", "e": "2026-12-01", "f": "٣"}),
    ("layers=0,1", {"layers": [0, 1]}),
    ("layers=0,1,b=2", {"layers": [0, 1], "b": 2}),
    ("layers=0-2,5", {"layers": ["0-2", 5]}),
    ("layers=0+1", {"layers": "0+1"}),
    ("a=[0, 1],b=[[1], 2]", {"a": [0, 1], "b": [[1], 2]}),
    ("a={\"b\": {\"c\": [1, 2]}, \"d\": \"x,y\"},e=1", {"a": {"b": {"c": [1, 2]}, "d": "x,y"}, "e": 1}),
    ("a='x,y=z',b=\"p,q\"", {"a": "x,y=z", "b": "p,q"}),
    ("a=\"say \\\"no\\\", \\u00e9\"", {"a": 'say "no", é'}),
    ("a='C:\\new'", {"a": "C:\\new"}),
    ("a='1',b=\"true\",c=''", {"a": "1", "b": "true", "c": ""}),
    ("a='1','2'", {"a": ["1", "2"]}),
    (" a = 1 , b = x y ", {"a": 1, "b": "x y"}),
    ("a-b=1", {"a-b": 1}),
    ("a=/x/y=z.json", {"a": "/x/y=z.json"}),
    ("a=x[0,1]", {"a": "x[0,1]"}),
    ("a=it's,b=2", {"a": "it's", "b": 2}),
    ("mask_strategy_file_path=/abs/x.json", {"mask_strategy_file_path": "/abs/x.json"}),
    ("mask_strategy_file_path = /abs/x.yaml", {"mask_strategy_file_path": "/abs/x.yaml"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "data"), PAIRS, ids=[t for t, _ in PAIRS])
def test_key_value(text, data):
    got = read(text).data
    assert got == data
    assert repr(got) == repr(data)  # True is not 1


WRONG = [
    # text, what the error says
    ("", "has an empty piece"),
    ("a=1,", "has an empty piece"),
    ("a=1,,b=2", "has an empty piece"),
    (",a=1", "has an empty piece"),
    ("a", "'a' is no key=value; write, say, sparsity=0.5"),
    ("settings.toml", "or the name of a file in .json, .yaml, .yml"),
    ("=1", "'=1' is no key=value"),
    ("1a=1", "'1a=1' is no key=value"),
    ("a b=1", "'a b=1' is no key=value"),
    ("a=1,/x=2", "'/x=2' is no key=value"),
    ("a=", "'a' has no value"),
    ("a=1,a=2", "'a' is given twice in 'a=1,a=2'"),
    ("a='x", "\"a='x\" is not closed: a ' is missing"),
    ('a="x', "is not closed"),
    ("a=[1,2", "is not closed: a bracket is missing"),
    ("a='x'y", "goes on after its quote"),
    ('a="x"y', "Extra data at column 4"),
    ('a="C:\\U"', "Invalid \\escape"),
    ("a=[x]", "--attention-backend-config, a: this is no JSON"),
    ('a={"b":1,"b":2}', "the key 'b' is given twice"),
    ('{"a": 1', "this is no JSON: Expecting ',' delimiter at column 8"),
    ("{'a': 1}", "this is no JSON: Expecting property name enclosed in double quotes at column 2, near"),
    ('{"a": 1, "a": 2}', "the key 'a' is given twice"),
    ('{"x": [{"a": 1, "a": 2}]}', "the key 'a' is given twice"),
    ("[1, 2]", "it must hold an object of keys and values, not [1, 2]"),
    ('{"a": ' * 100_000, "is nested too deeply"),
    ('{"a": ' + "9" * 5000 + "}", "this is no JSON"),
]


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[t[:40] for t, _ in WRONG])
def test_wrong_texts(text, said):
    with pytest.raises(PolicyError) as e:
        read(text)
    assert str(e.value).startswith("--attention-backend-config")
    assert said in str(e.value)
    assert len(str(e.value)) < 400


DATA = {"sparsity": 1e-3, "transformer": {"dense": {"layers": "0-2", "on": True, "n": [-1, None, "5"]}}, "é": "\t😀"}


FILES = [
    # ending, how json.dumps writes it (YAML takes all but tabs), the line of n
    (".json", {}, 1),
    (".json", {"separators": (",", ":")}, 1),
    (".json", {"indent": 2}, 7),
    (".JSON", {"indent": "\t", "ensure_ascii": False}, 7),
    (".yaml", {"ensure_ascii": False}, 1),
    (".yml", {"indent": 2, "ensure_ascii": False}, 7),
]


@pytest.mark.parametrize(("suffix", "style", "line"), FILES)
def test_files(tmp_path, suffix, style, line):
    path = tmp_path / f"settings{suffix}"
    path.write_text(json.dumps(DATA, **style), "utf-8")
    source = read(str(path))
    assert source.data == DATA
    assert source.lines["transformer", "dense", "n"] == line


def test_yaml_as_people_write_it(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text(
        "# how sparse\n"
        "tiles: &t\n"
        "  sparsity: 1e-3\n"
        "  dense_layers: 0,1\n"
        "  quoted: '5'\n"
        "  mode: off\n"
        "  empty:\n"
        "  list: [1, -2.5]\n"
        "text_encoder:\n"
        "  tiles: *t\n"
    )
    tiles = {"sparsity": 1e-3, "dense_layers": "0,1", "quoted": "5", "mode": "off", "empty": None, "list": [1, -2.5]}
    source = read(str(path))
    assert source.data == {"tiles": tiles, "text_encoder": {"tiles": tiles}}
    assert source.place("tiles", "mode") == f"{path}, line 6"
    assert source.place("tiles", "mode", "x") == f"{path}, line 6"
    assert source.place("other") == str(path)


WRONG_FILES = [
    # name, text, what the error says after the file's name
    ("a.json", '{"a": 1,\n "b": }', ", line 2: this is no JSON: Expecting value at column 7"),
    ("a.json", '{"a": 1,\n\n "a": 2}', ", line 3: the key 'a' is given twice"),
    ("a.json", '{"a": {"b": 1,\n\n "b": 2}}', ", line 3: the key 'b' is given twice"),
    ("a.json", '{"a"\n: 1, "a": 2}', ": the key 'a' is given twice"),  # JSON that is no YAML
    ("a.json", "[1]", ": it must hold an object of keys and values, not [1]"),
    ("a.json", "", ", line 1: this is no JSON"),
    ("a.json", "a: 1", ", line 1: this is no JSON"),
    ("a.yaml", "a: 1\nb: [1\n", ", line 3: this is no YAML: "),
    ("a.yaml", "a: 1\nb: {c: 1, c: 2}", ", line 2: the key 'c' is given twice"),
    ("a.yaml", "a: 1\n\ta: 2", ", line 2: this is no YAML: "),
    ("a.yaml", "a: 1\n---\nb: 2", ", line 2: this is no YAML: "),
    ("a.yaml", "a: *nowhere", ", line 1: this is no YAML: found undefined alias"),
    ("a.yaml", "? [1, 2]\n: 1", ", line 1: a key must be a name"),
    ("a.yaml", "a: !!python/name:os.system", ", line 1: the tag"),
    ("a.yaml", "a: 1\nb: !mine 2", ", line 2: the tag '!mine' is not read"),
    ("a.yaml", "- 1", ": it must hold an object of keys and values, not [1]"),
    ("a.yml", "", ": it must hold an object of keys and values, not None"),
]


@pytest.mark.parametrize(("name", "text", "said"), WRONG_FILES, ids=[repr(t) for _, t, _ in WRONG_FILES])
def test_wrong_files_name_the_file_and_the_line(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(PolicyError) as e:
        read(str(path))
    assert str(e.value).startswith(f"{path}{said}")


def test_a_yaml_that_holds_itself_is_refused(tmp_path):
    path = tmp_path / "loop.yaml"
    path.write_text("a: &x\n  b: *x\n")
    with pytest.raises(PolicyError, match="within itself"):
        read(str(path))


@pytest.mark.parametrize("make", ["missing", "folder", "bytes"])
def test_files_that_cannot_be_read(tmp_path, make):
    path = tmp_path / "settings.json"
    if make == "folder":
        path.mkdir()
    elif make == "bytes":
        path.write_bytes(b'{"a": "\xff"}')
    with pytest.raises(PolicyError, match="settings.json' cannot be read: "):
        read(str(path))


def test_a_mapping_is_taken_as_it_is():
    assert read({"a": (1,)}, "attach").place("a") == "attach"
    assert read({"a": (1,)}).data == {"a": (1,)}


def test_what_stands_under_a_key_keeps_its_lines(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("config:\n  tiles:\n    sparsity: 0.5\ntext: a=1\n")
    source = read(str(path))
    assert source.under("config").data == {"tiles": {"sparsity": 0.5}}
    assert source.under("config").place("tiles", "sparsity") == f"{path}, line 3"
    assert source.under("text").data == {"a": 1}
    assert source.under("text").place("a") == f"{path}, line 4"


# ---- round trip

TEXTS = st.text(max_size=12).filter(lambda t: t.isprintable())
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS,
    lambda x: st.lists(x, max_size=3) | st.dictionaries(TEXTS, x, max_size=3),
    max_leaves=6,
)
KEYS = st.from_regex(r"[A-Za-z_][A-Za-z0-9_-]{0,8}", fullmatch=True)


def written(value) -> str:
    """A value as key=value has it; of a text that needs no quotes, the text."""
    if isinstance(value, str) and value and value.isascii() and value.isalnum() and scalar(value) == value:
        return value
    return str(value).lower() if isinstance(value, float) and math.isinf(value) else json.dumps(value)


@given(st.dictionaries(KEYS, VALUES, min_size=1, max_size=4), st.sampled_from((",", ", ", " , ")))
def test_a_mapping_written_as_key_value_is_read_again(data, comma):
    text = comma.join(f"{k}={written(x)}" for k, x in data.items())
    got = read(text).data
    assert got == data
    assert repr(got) == repr(data)


@given(st.dictionaries(KEYS, st.lists(VALUES, min_size=2, max_size=4), min_size=1, max_size=3))
def test_a_list_may_be_written_without_brackets(data):
    assert read(",".join(f"{k}={','.join(map(written, x))}" for k, x in data.items())).data == data


@given(st.text(max_size=40) | st.text(alphabet="ab=,'\"[]{}\\ 1.-:", max_size=20))
def test_any_text_is_read_or_refused(text):
    with suppress(PolicyError):
        assert read(text).data
