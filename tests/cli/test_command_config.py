"""hal config: schemas are printed, configurations are checked."""

from __future__ import annotations

import json

import jsonschema
import pytest
from pydantic import Field

from hal.backend import Backend
from hal.catalog import Catalog
from hal.cli import config as command
from hal.config import Config, Layers

STRANGER = """
from hal.backend import Backend
BACKEND = Backend("stranger", config="stranger.settings:Settings")
"""
SETTINGS = """
from hal.config import Config
class Settings(Config):
    sparsity: float = 0.0
"""


class Tiles(Config):
    sparsity: float = Field(0.0, ge=0, lt=1)
    dense_layers: Layers = ()
    mode: str = "exempt"


@pytest.fixture
def tiles(monkeypatch):
    made = Catalog({}, {b.name: b for b in (Backend("tiles", config=Tiles), Backend("plain"))})
    monkeypatch.setattr(command, "installed", lambda: made)


def test_schema_of_one_backend_and_of_all(hal, tiles):
    one = hal("config", "schema", "tiles").json
    assert hal("config", "schema").json == {"tiles": one}
    jsonschema.validate({"sparsity": 0.5}, one)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"sparsity": 1.5}, one)
    assert hal("config", "schema", "plain").json["properties"] == {}


def test_the_command_alone_shows_the_help(hal):
    ran = hal("config")
    assert (ran.code, ran.err) == (0, "")
    assert "schema" in ran.out
    assert "check" in ran.out


def test_schema_of_what_is_installed(hal):
    from hal import plugins

    named = {b.name for b in plugins.catalog().backends.values() if b.config is not None}
    assert set(hal("config", "schema").json) == named


def test_check_tells_what_it_understood(hal, tiles, tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("transformer:\n  tiles:\n    sparsity: 0.5\n    dense_layers: 0-1\n")
    ran = hal("config", "check", str(path))
    assert (ran.code, ran.err) == (0, "")
    assert [" ".join(line.split()) for line in ran.out.splitlines()] == [
        "setting value",
        "tiles in transformer",
        "sparsity 0.5",
        "dense_layers [0, 1]",
        "mode exempt default",
    ]
    assert hal("config", "check", str(path), "--json").json == {
        "settings": [
            {
                "backend": "tiles",
                "component": "transformer",
                "config": {"sparsity": 0.5, "dense_layers": [0, 1], "mode": "exempt"},
            }
        ]
    }


@pytest.mark.parametrize("text", ["sparsity=0.5", '{"sparsity": 0.5}', '{"tiles": {"sparsity": 0.5}}'])
def test_check_takes_every_form(hal, tiles, text):
    (setting,) = hal("config", "check", text, "--attention-backend", "tiles", "--json").json["settings"]
    assert (setting["backend"], setting["component"], setting["config"]["sparsity"]) == ("tiles", None, 0.5)


def test_check_of_nothing(hal, tiles):
    assert hal("config", "check", "{}").out == "no settings of backends\n"
    assert hal("config", "check", "{}", "--json").json == {"settings": []}


BAD = [
    # arguments, what the one line on stderr says
    (("shema",), "unknown command 'shema'; did you mean 'schema'? (known: schema, check)"),
    (("schema", "tils"), "unknown attention backend 'tils'; did you mean 'tiles'?"),
    (("check",), "Missing argument 'FILE'"),
    (("check", "nowhere.yaml"), "the configuration file 'nowhere.yaml' cannot be read: No such file or directory"),
    (("check", "sparsity=0.5"), "choose one with --attention-backend"),
    (("check", "sparsity=0.5", "--attention-backend", "tils"), "did you mean 'tiles'?"),
    (("check", "sparsity=0.5", "--attention-backend", "plain"), "plain has no settings"),
    (("check", "sparsity=1.5", "--attention_backend", "tiles"), "FILE: tiles refuses sparsity=1.5"),
    (("check", "{}", "--jsn"), "unknown option '--jsn'; did you mean '--json'?"),
]


@pytest.mark.parametrize(("arguments", "said"), BAD, ids=[" ".join(a) for a, _ in BAD])
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(hal, tiles, arguments, said):
    ran = hal("config", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert len(ran.err.splitlines()) == 1
    assert said in ran.err


def test_an_error_names_file_and_line(hal, tiles, tmp_path):
    path = tmp_path / "settings.json"
    path.write_text(json.dumps({"tiles": {"mode": "x", "sparsty": 0.5}}, indent=1))
    ran = hal("config", "check", str(path))
    assert ran.code == 2
    assert ran.err.startswith(f"hal: {path}, line 4: tiles has no setting 'sparsty'; did you mean 'sparsity'?")


def test_the_settings_of_a_strangers_backend(process, distribution):
    files = {"stranger/__init__.py": STRANGER, "stranger/settings.py": SETTINGS}
    made = distribution("hal-stranger", files=files, backends={"stranger": "stranger:BACKEND"})
    ran = process("config", "check", "sparsity=0.5", "--attention-backend", "stranger", "--json", PYTHONPATH=str(made))
    assert (ran.code, ran.err) == (0, "")
    assert ran.json == {"settings": [{"backend": "stranger", "component": None, "config": {"sparsity": 0.5}}]}


def test_pydantic_is_imported_only_where_there_is_a_configuration(process):
    ran = process(
        code="import sys, hal.cli.config, hal.backend, hal.source; print('pydantic' in sys.modules, 'yaml' in sys.modules)"
    )
    assert ran.out.split() == ["False", "False"]
