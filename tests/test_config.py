"""Configuration of backends: what each model takes, from which spellings, for which backend and component."""

from __future__ import annotations

import json
from typing import Annotated, ClassVar, Literal

import jsonschema
import pytest
from pydantic import AliasChoices, Field, model_validator

from hal import config
from hal.backend import Backend
from hal.catalog import Catalog
from hal.config import Config, Layers, Setting, read
from hal.errors import DeclarationError, PolicyError


class Tiles(Config):
    """Stands in for a sparse backend's settings."""

    groups: ClassVar[tuple[str, ...]] = ("tiles_config",)

    sparsity: float = Field(0.0, ge=0, lt=1, validation_alias=AliasChoices("sparsity", "TILES_sparsity"))
    tiles_mode: Literal["exempt", "compete"] = Field(
        "exempt", validation_alias=AliasChoices("tiles_mode", "TILES_mode")
    )
    dense_layers: Layers = Field("0,1")  # type: ignore[assignment]
    chunk: tuple[int, int] = (2, 2)
    splits: int | Literal["auto"] = "auto"
    enabled: bool = False
    tau: Annotated[float, Field(allow_inf_nan=True)] = 1.0
    name: str = ""


class Mask(Config):
    mask_path: str
    lowest: int = Field(0, ge=0)
    highest: int = Field(9, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> Mask:
        if self.lowest > self.highest:
            raise ValueError(f"lowest={self.lowest} is above highest={self.highest}")
        return self


TILES = Backend("tiles", config=Tiles, aliases=("tiles_1",))
MASK = Backend("mask", config=f"{__name__}:Mask")
PLAIN = Backend("plain")
BROKEN = Backend("broken", config="nowhere_to_be_found:Config")
CATALOG = Catalog({}, {b.name: b for b in (TILES, MASK, PLAIN, BROKEN)})
COMPONENTS = ("transformer", "transformer_2", "text_encoder")


def found(given, backend=None, components=COMPONENTS, overrides=None):
    return config.settings(read(given), CATALOG, backend, components, overrides)


def refused(given, backend=None, components=COMPONENTS, overrides=None) -> str:
    with pytest.raises(PolicyError) as e:
        found(given, backend, components, overrides)
    return str(e.value)


# ---- values

VALUES = [
    # text for the chosen backend, field, value
    ("sparsity=0.5", "sparsity", 0.5),
    ("sparsity=5e-1", "sparsity", 0.5),
    ("sparsity=1e-3", "sparsity", 0.001),
    ("sparsity=0", "sparsity", 0.0),
    ('{"sparsity": 1e-3}', "sparsity", 0.001),
    ("tau=-1.5", "tau", -1.5),
    ("tau=-1", "tau", -1.0),
    ("tau=inf", "tau", float("inf")),
    ("tau=-inf", "tau", float("-inf")),
    ("TILES_sparsity=0.5", "sparsity", 0.5),
    ("TILES_mode=compete", "tiles_mode", "compete"),
    ("tiles-mode=compete", "tiles_mode", "compete"),
    ("enabled=true", "enabled", True),
    ("enabled=False", "enabled", False),
    ("splits=auto", "splits", "auto"),
    ("splits=2", "splits", 2),
    ("chunk=3,4", "chunk", (3, 4)),
    ("chunk=[3,4]", "chunk", (3, 4)),
    ('{"chunk": [3, 4]}', "chunk", (3, 4)),
    ("name='true'", "name", "true"),
    ('name="1,2=3"', "name", "1,2=3"),
    ("name=/a/it's.json", "name", "/a/it's.json"),
    ("enabled=true", "dense_layers", (0, 1)),
    ("dense_layers=0,1", "dense_layers", (0, 1)),
    ("dense_layers=0-2", "dense_layers", (0, 1, 2)),
    ("dense_layers=0+2", "dense_layers", (0, 2)),
    ("dense_layers=5,0-2", "dense_layers", (0, 1, 2, 5)),
    ("dense_layers='0,1'", "dense_layers", (0, 1)),
    ("dense_layers=[0,1]", "dense_layers", (0, 1)),
    ("dense_layers=(0,1)", "dense_layers", (0, 1)),
    ("dense_layers=3", "dense_layers", (3,)),
    ('dense_layers=""', "dense_layers", ()),
    ('{"dense_layers": []}', "dense_layers", ()),
    ('{"dense_layers": "0-2"}', "dense_layers", (0, 1, 2)),
    ('{"dense_layers": [0, "2-3", 2]}', "dense_layers", (0, 2, 3)),
    ('tiles_config={"sparsity":0.5}', "sparsity", 0.5),
    ('{"tiles_config": {"TILES_sparsity": 0.5}}', "sparsity", 0.5),
]


@pytest.mark.parametrize(("text", "field", "value"), VALUES, ids=[f"{t} {f}" for t, f, _ in VALUES])
def test_values(text, field, value):
    (setting,) = found(text, "tiles")
    got = getattr(setting.config, field)
    assert (got, type(got)) == (value, type(value))


WRONG = [
    # text for the chosen backend, what the error says
    ("sparsity=1.5", ("sparsity=1.5", "less than 1", "sparsity (number >= 0 < 1, default 0.0)")),
    ("TILES_sparsity=-1", ("TILES_sparsity=-1", "number >= 0 < 1")),
    ("sparsity=abc", ('sparsity="abc"', "number >= 0 < 1")),
    ("sparsity=true", ("sparsity=true", "number >= 0 < 1")),
    ("sparsity='0.5'", ('sparsity="0.5"', "number >= 0 < 1")),
    ("sparsity=nan", ("sparsity=NaN", "finite")),
    ('{"sparsity": Infinity}', ("sparsity=Infinity", "number >= 0 < 1")),
    ("sparsity=null", ("sparsity=null", "number >= 0 < 1")),
    ("sparsity=0.1,0.2", ("sparsity=[0.1, 0.2]",)),
    ("splits=true", ("splits=true", "splits (integer or auto")),
    ("splits=1.5", ("splits=1.5", "splits (integer or auto")),
    ("enabled=1", ("enabled=1", "enabled (boolean, default false)")),
    ("enabled=yes", ('enabled="yes"', "boolean")),
    ("tiles_mode=compet", ('tiles_mode="compet"', "tiles_mode (exempt or compete")),
    ("chunk=3", ("chunk=3", "chunk ([integer, integer]")),
    ("chunk=1,2,3", ("chunk=[1, 2, 3]", "chunk ([integer, integer]")),
    ("chunk=1,true", ("chunk.1=true", "chunk ([integer, integer]")),
    ("name=1", ("name=1", "write it in quotes")),
    ("dense_layers=2-0", ("'2-0' is no layer or range of layers", "0,1 or 0-2")),
    ("dense_layers=-1", ("dense_layers=-1", "greater than or equal to 0")),
    ("dense_layers=true", ("dense_layers=true",)),
    ('{"dense_layers": [true]}', ("dense_layers.0=true",)),
    ("dense_layers=1.0", ("dense_layers=1.0",)),
    ("dense_layers=first", ("'first' is no layer",)),
    ("dense_layers=0-999999999", ("'0-999999999' is no layer",)),
    ("sparsty=1", ("tiles has no setting 'sparsty'; did you mean 'sparsity'? Its settings: sparsity (number",)),
    ("tile_sparsity=1", ("did you mean 'TILES_sparsity'?",)),
    ("zzz=1", ("tiles has no setting 'zzz'. Its settings: sparsity (number",)),
    ("sparsity=0.1,TILES_sparsity=0.2", ("'TILES_sparsity' and 'sparsity' are one setting of tiles",)),
    ("dense-layers=1,dense_layers=1", ("'dense_layers' and 'dense-layers' are one setting",)),
    ('sparsity=0.1,tiles_config={"sparsity":0.2}', ("are one setting of tiles",)),
    ("tiles_config=1", ("'tiles_config' of tiles must be an object of settings, not 1",)),
    ('{"tiles_config": {"sparsty": 1}}', ("no setting 'sparsty'; did you mean 'sparsity'?",)),
    ('{"tiles_config": {"tiles_config": {}}}', ("no setting 'tiles_config'",)),
    ({"sparsity": {1, 2}}, ("not JSON serializable",)),
    ({7: 1}, ("no setting '7'",)),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), WRONG, ids=[str(t) for t, _ in WRONG])
def test_wrong_values_name_the_key_the_place_and_what_is_allowed(text, said):
    error = refused(text, "tiles")
    assert error.startswith("--attention-backend-config: ")
    assert [s for s in said if s not in error] == [], error


def test_a_missing_setting_and_settings_that_contradict_each_other():
    assert "mask needs mask_path (string, required), which is not given" in refused("lowest=1", "mask")
    error = refused("mask_path=/a.json,lowest=3,highest=2", "mask")
    assert "mask refuses its settings: lowest=3 is above highest=2" in error


def test_a_path_of_a_json_file_as_a_value_is_no_configuration_file():
    (setting,) = found("mask_path=/abs/x.json", "mask")
    assert setting.config == Mask(mask_path="/abs/x.json")


def test_settings_do_not_change():
    (setting,) = found("sparsity=0.5", "tiles")
    with pytest.raises(ValueError, match="frozen"):
        setting.config.sparsity = 0.1
    assert hash(setting) == hash(found('{"sparsity": 0.5}', "tiles")[0])


# ---- which backend, which component

HALF, TENTH, WITH_MASK = Tiles(sparsity=0.5), Tiles(sparsity=0.1), Mask(mask_path="m")

FORMS = [
    # configuration, chosen backend, chosen per component, settings
    ("sparsity=0.5", "tiles", {}, [("tiles", "", HALF)]),
    ("sparsity=0.5", "Tiles-1", {}, [("tiles", "", HALF)]),
    ({"tiles": {"sparsity": 0.5}}, None, {}, [("tiles", "", HALF)]),
    ({"tiles_1": {"sparsity": 0.5}}, "plain", {}, [("tiles", "", HALF)]),
    ('tiles={"sparsity":0.5}', None, {}, [("tiles", "", HALF)]),
    (
        {"tiles": {"sparsity": 0.5}, "mask": {"mask_path": "m"}},
        "tiles",
        {},
        [("tiles", "", HALF), ("mask", "", WITH_MASK)],
    ),
    ({"mask": {"mask_path": "m"}, "sparsity": 0.5}, "tiles", {}, [("mask", "", WITH_MASK), ("tiles", "", HALF)]),
    ({"transformer": {"tiles": {"sparsity": 0.5}}}, None, {}, [("tiles", "transformer", HALF)]),
    ({"transformer": {"sparsity": 0.5}}, "tiles", {}, [("tiles", "transformer", HALF)]),
    ({"transformer": {"sparsity": 0.5}}, "plain", {"transformer": "tiles"}, [("tiles", "transformer", HALF)]),
    ({"transformer": {"tiles_config": {"sparsity": 0.5}}}, "tiles", {}, [("tiles", "transformer", HALF)]),
    (
        {"sparsity": 0.1, "transformer": {"sparsity": 0.5}, "transformer_2": {"mask": {"mask_path": "m"}}},
        "tiles",
        {},
        [("tiles", "transformer", HALF), ("mask", "transformer_2", WITH_MASK), ("tiles", "", TENTH)],
    ),
    ({}, "tiles", {}, []),
    ({"tiles": {}}, None, {}, []),
    ({"plain": {}}, None, {}, []),
    ({"transformer": {}}, None, {}, []),
]


@pytest.mark.parametrize(("given", "backend", "overrides", "wanted"), FORMS, ids=[str(f[0]) for f in FORMS])
def test_forms(given, backend, overrides, wanted):
    assert found(given, backend, overrides=overrides) == tuple(Setting(*w) for w in wanted)


@pytest.mark.parametrize(("given", "backend", "overrides", "wanted"), FORMS, ids=[str(f[0]) for f in FORMS])
def test_forms_are_the_same_where_the_pipeline_is_not_known(given, backend, overrides, wanted):
    assert found(given, backend, None, overrides) == tuple(Setting(*w) for w in wanted)


MISPLACED = [
    # configuration, chosen backend, components, what the error says
    ("sparsity=1", None, COMPONENTS,
     "'sparsity' is for no backend (sparsity is a setting of tiles); choose one with --attention-backend, "
     'or write {"tiles": {"sparsity": 1}}'),
    ("zzz=1", None, COMPONENTS, "'zzz' is for no backend; choose one"),
    ("tiles=1", None, COMPONENTS, "'tiles' is a backend, so an object of settings must follow, not 1"),
    ("transformer=1", "tiles", COMPONENTS, "'transformer' is a component, so an object of settings must follow"),
    ("sparsity=1", "plain", COMPONENTS, "plain has no settings, so 'sparsity' cannot be given; drop it"),
    ({"plain": {"sparsity": 1}}, "tiles", COMPONENTS, "plain has no settings"),
    ({"transformer": {"sparsity": 1}}, "plain", COMPONENTS, "plain has no settings"),
    ({"transformer": {"sparsity": 1}}, None, COMPONENTS, "'sparsity' is for no backend"),
    ({"transfomer": {"sparsity": 0.5}}, "tiles", COMPONENTS, "did you mean 'transformer'?"),
    ({"transfomer": {"sparsity": 0.5}}, None, COMPONENTS,
     "unknown backend or component 'transfomer'; did you mean 'transformer'? (known: broken, mask, plain, "),
    ({"tils": {"sparsity": 0.5}}, "tiles", COMPONENTS, "did you mean 'tiles'?"),
    ({"tils": {"sparsity": 0.5}}, "tiles", None, "unknown name 'tils'; did you mean 'tiles'?"),
    ({"tiles_confg": {"sparsity": 0.5}}, "tiles", None, "unknown name 'tiles_confg'; did you mean 'tiles_config'?"),
    ({"text encoder": {"mask": {"mask_path": "m"}}}, None, None, "unknown backend 'text encoder'"),
    ({"text_encoder": {"transformer": {"sparsity": 1}}}, "tiles", COMPONENTS, "tiles has no setting 'transformer'"),
    ({"sparsity": 0.1, "tiles": {"sparsity": 0.2}}, "tiles", COMPONENTS, "tiles is configured twice, by tiles.sparsity too"),
    ({"tiles": {"sparsity": 0.1}, "tiles_1": {"sparsity": 0.2}}, None, COMPONENTS, "tiles is configured twice"),
    ({"tiles": {"sparsity": 0.1}}, None, ("tiles",), "'tiles' is the name of a backend and of a component"),
    ({"name": {"sparsity": 0.1}}, "tiles", ("name",), "'name' is the name of a setting and of a component"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "backend", "components", "said"), MISPLACED, ids=[str(f[0]) for f in MISPLACED])
def test_what_belongs_to_no_backend_or_to_two_is_refused(given, backend, components, said):
    error = refused(given, backend, components)
    assert said in error


def test_an_unknown_chosen_backend_is_refused():
    with pytest.raises(PolicyError, match="did you mean 'tiles'"):
        found("sparsity=1", "tilez")
    with pytest.raises(PolicyError, match="did you mean 'tiles'"):
        found("sparsity=1", overrides={"transformer": "tilez"})


PLACES = [
    # key that is wrong, line
    ({"sparsity": 1.5}, 2),
    ({"sparsity": 0.5, "splits": True}, 3),
    ({"mask": {"mask_path": "m", "lowest": -1}}, 4),
    ({"transformer": {"tiles": {"name": "", "chunk": [1, 2], "sparsty": 1}}}, 9),
    ({"transformer": {"tiles_config": {"enabled": 1}}}, 4),
    ({"mask": {"lowest": 1}}, 2),
    ({"sparsity": 0.5, "tils": {"name": ""}}, 3),
]


@pytest.mark.parametrize(("data", "line"), PLACES, ids=[str(d) for d, _ in PLACES])
@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_errors_in_files_name_file_and_line(tmp_path, data, line, suffix):
    path = tmp_path / f"settings{suffix}"
    path.write_text(json.dumps(data, indent=2))
    assert refused(str(path), "tiles").startswith(f"{path}, line {line}: ")


# ---- declarations


def test_a_model_is_imported_when_it_is_needed():
    assert config.config_model(PLAIN) is None
    assert config.config_model(TILES) is Tiles
    assert config.config_model(MASK).__name__ == "Mask"
    with pytest.raises(
        DeclarationError, match="backend broken: config 'nowhere_to_be_found:Config' cannot be imported"
    ):
        config.config_model(BROKEN)
    for wrong in ("hal.errors:HalError", dict, "hal.errors:nothing"):
        with pytest.raises(DeclarationError, match="backend wrong: config"):
            config.config_model(Backend("wrong", config=wrong))


def test_the_schema_takes_what_the_model_takes_and_refuses_what_it_refuses():
    schema = config.schema(TILES)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["sparsity"]["aliases"] == ["TILES_sparsity"]
    for right in ({}, {"sparsity": 0.5}, {"dense_layers": "0-2"}, {"dense_layers": [0, "2-3"]}, {"chunk": [1, 2]}):
        jsonschema.validate(right, schema)
        Tiles.model_validate_json(json.dumps(right))
    for wrong in (
        {"sparsity": 1},
        {"sparsity": "0.5"},
        {"zzz": 1},
        {"chunk": [1]},
        {"dense_layers": -1},
        {"splits": True},
    ):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema)
        with pytest.raises(ValueError, match="Tiles"):
            Tiles.model_validate_json(json.dumps(wrong))


def test_a_backend_without_settings_has_a_schema_that_takes_none():
    jsonschema.validate({}, config.schema(PLAIN))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"sparsity": 1}, config.schema(PLAIN))
