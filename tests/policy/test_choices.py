"""Words (options, environment, settings file) become requests; every wrong one is an error that names its place."""

from __future__ import annotations

import json

import pytest

import hal
from hal import choices, plugins
from hal.backend import Backend, Kernel
from hal.catalog import Catalog
from hal.config import Config
from hal.errors import PolicyError
from hal.policy import Fit, Site, Target, ruled

CATALOG = plugins.catalog()


def requests(**words):
    return [(r.kind, r.mode, str(r), str(r.target)) for r in choices.policy_of(CATALOG, **words).requests]


WORDS = [
    # words, requests: kind, mode, what, where
    ({}, []),
    ({"attention_backend": "fa"}, [("global", "require", "fa", "everywhere")]),
    ({"attention_backend": "FA-3"}, [("global", "require", "fa", "everywhere")]),
    ({"attention_backend": "fa", "attention_fallback": "declared"}, [("global", "prefer", "fa", "everywhere")]),
    ({"attention_backend": "fa", "attention_fallback": "refuse"}, [("global", "require", "fa", "everywhere")]),
    # one kernel is asked for strictly, whatever else is said
    ({"kernel": "fa3", "attention_fallback": "declared"}, [("global", "require", "fa / fa3", "everywhere")]),
    ({"kernel": "sdpa.math"}, [("global", "require", "torch_sdpa / sdpa.math", "everywhere")]),
    ({"attention_backend": "fa", "kernel": "fa3"}, [("global", "require", "fa / fa3", "everywhere")]),
    (
        {"component_attention_backends": "text_encoder=torch_sdpa,transformer.cross=fa"},
        [("override", "require", "torch_sdpa", "text_encoder"), ("override", "require", "fa", "transformer.cross")],
    ),
    (
        {"component_attention_backends": {"transformer@0-2+5": "fa"}},
        [("override", "require", "fa", "transformer@0+1+2+5")],
    ),
    ({"component_attention_backends": ("vae=sdpa", "vae=sdpa")}, [("override", "require", "torch_sdpa", "vae")]),
    (
        {"forbid": "fa,vae=torch_sdpa"},
        [("override", "forbid", "fa", "everywhere"), ("override", "forbid", "torch_sdpa", "vae")],
    ),
    ({"forbid": "sdpa.math"}, [("override", "forbid", "sdpa.math", "everywhere")]),
    ({"forbid": {"vae": "fa"}}, [("override", "forbid", "fa", "vae")]),
    (
        {"component_attention_backends": ["vae=fa,text_encoder=sdpa", "unet=fa"]},
        [("override", "require", *x) for x in (("fa", "vae"), ("torch_sdpa", "text_encoder"), ("fa", "unet"))],
    ),
    ({"waive": ["memory.math"], "fit": {"pad_head_dim"}, "forbid": (), "component_attention_backends": {}}, []),
]


@pytest.mark.parametrize("words, expected", WORDS)
def test_words_are_requests(words, expected):
    assert requests(**words) == expected


WRONG = [
    ({"attention_backend": "fa9"}, "attention_backend='fa9'.*did you mean 'fa'"),
    ({"attention_backend": "sage_attn_3"}, "is not in this release"),
    ({"attention_fallback": "maybe"}, "unknown fallback 'maybe'.*declared, refuse"),
    ({"kernel": "fa33"}, "unknown kernel 'fa33'; did you mean"),
    ({"attention_backend": "torch_sdpa", "kernel": "fa3"}, "fa3 is no kernel of torch_sdpa; its kernels: sdpa"),
    ({"component_attention_backends": "text_encoder"}, "is no COMPONENT=BACKEND"),
    ({"component_attention_backends": "=fa"}, "is no COMPONENT=BACKEND"),
    ({"component_attention_backends": "vae="}, "is no COMPONENT=BACKEND"),
    ({"component_attention_backends": "vae=fa,vae=torch_sdpa"}, "vae was given fa as well"),
    ({"component_attention_backends": "transformer.croos=fa"}, "unknown role.*did you mean 'cross'"),
    ({"component_attention_backends": "transformer@2-1=fa"}, "'2-1' is no layer or range"),
    ({"component_attention_backends": "trans former=fa"}, "no component's name"),
    ({"component_attention_backends": "txt_encoder=fa", "components": ["text_encoder"]}, "did you mean 'text_encoder'"),
    ({"component_attention_backends": "vae=fa", "forbid": "fa"}, "required by .*vae=fa.* and forbidden by .*forbid"),
    ({"attention_backend": "fa", "forbid": "fa"}, "required by attention_backend='fa' and forbidden by forbid='fa'"),
    ({"kernel": "fa3", "forbid": "fa"}, "fa / fa3 is required by kernel='fa3' and forbidden by forbid='fa'"),
    ({"waive": "nobody"}, "waive='nobody': unknown waiver 'nobody'"),
    ({"waive": ["memory.math", "nobody"]}, "waive='nobody': unknown waiver 'nobody'"),
    ({"fit": "padding"}, "fit='padding': unknown fitting 'padding'"),
    ({"attention_backend": "fa", "attention_backend_config": "sparsity=0.5"}, "fa has no settings"),
    ({"attention_backend_config": "sparsity=0.5"}, "choose one with --attention-backend"),
]


@pytest.mark.parametrize("words, said", WRONG)
def test_a_wrong_word_is_told_with_what_is_allowed(words, said):
    with pytest.raises(PolicyError, match=said):
        choices.policy_of(CATALOG, **words)


MALFORMED = [
    # key, value, what is shown of it (None: the value), what is allowed
    *(
        (key, value, None, allowed)
        for key, allowed in (
            ("attention_backend", "one name; write, say, torch_sdpa"),
            ("attention_fallback", "refuse or declared; write, say, declared"),
            ("kernel", "one name; write, say, sdpa.math"),
        )
        for value in (3, True, False, ["a"], {"vae": "fa"}, "", " ", 0.5)
    ),
    *(
        (key, value, None, allowed)
        for key, allowed in (
            ("component_attention_backends", "COMPONENT=NAME: one, several with commas, a list, a mapping"),
            ("forbid", "[COMPONENT=]NAME: one, several with commas, a list, a mapping of components"),
            ("waive", "the waiver of a rule: one, several with commas, a list; write, say, memory.math"),
            ("fit", "the name of a fitting: one, several with commas, a list; write, say, pad_head_dim"),
        )
        for value in (3, True, [1], [None], ["fa", ["fa"]], [{"vae": "fa"}], "", ",", [""])
    ),
    *(
        (key, {"unet": "fa", "vae": value}, f"vae={shown}", "a mapping")
        for key in ("component_attention_backends", "forbid")
        for value, shown in ((3, "3"), (True, "True"), (["fa"], "['fa']"), ({}, "{}"), (None, ""), ("", ""))
    ),
    ("waive", {"vae": "memory.math"}, None, "the waiver of a rule"),
    ("fit", {"vae": "pad_head_dim"}, None, "the name of a fitting"),
    *(
        ("attention_backend_config", value, None, "a mapping, key=value,..., JSON, or the name of a file")
        for value in (3, True, [1], [], ["sparsity=0.5"], "", 0.5)
    ),
]


@pytest.mark.parametrize("key, value, shown, allowed", MALFORMED)
def test_a_malformed_value_is_told_with_its_word_what_is_allowed_and_an_example(key, value, shown, allowed):
    with pytest.raises(PolicyError) as e:
        choices.policy_of(CATALOG, **{key: value})
    said = str(e.value)
    assert said.startswith(f"{key}={(value if shown is None else shown)!r}: allowed is ")
    assert allowed in said and "; write, say, " in said


@pytest.mark.parametrize("key, value, shown, allowed", MALFORMED)
def test_a_malformed_value_in_a_settings_file_is_told_with_its_line(tmp_path, key, value, shown, allowed):
    path = tmp_path / "hal.json"
    inner = json.dumps(value).replace('{"unet"', '{\n"unet"').replace(', "vae"', ',\n"vae"')
    path.write_text(f'{{"fit": "pad_head_dim",\n"{key}": {inner}}}' if key != "fit" else f'{{\n"{key}": {inner}}}')
    with pytest.raises(PolicyError) as e:
        choices.settings_file(CATALOG, str(path))
    text = shown if shown is not None else value if isinstance(value, str) else json.dumps(value)
    line = 2 if shown is None else 4  # of the inner key
    assert str(e.value).startswith(f"{path}, line {line}, {key}: {text}: allowed is ") and allowed in str(e.value)


@pytest.mark.parametrize("key", choices.KEYS)
def test_a_key_without_a_value_is_an_error_in_a_file_and_nothing_as_an_argument(settings, key):
    path = settings(f"# nothing\n{key}:\n")
    with pytest.raises(PolicyError, match=f"hal.yaml, line 2, {key}: : allowed is .*; write, say, "):
        choices.settings_file(CATALOG, path)
    assert choices.policy_of(CATALOG, **{key: None}) == choices.AUTOMATIC


def test_every_example_of_the_table_is_allowed():
    for key, (_, _, example) in choices.WORDS.items():
        if key != "attention_backend_config":  # no backend of this catalog has settings
            choices.policy_of(CATALOG, **{key: example})


def test_attach_and_scope_read_the_same_table():
    with pytest.raises(PolicyError, match="waive=3: allowed is"), hal.scope(waive=3):
        pass


def test_a_word_that_does_not_exist_is_told():
    with pytest.raises(PolicyError, match="unknown choice 'attention_backends'; did you mean 'attention_backend'"):
        choices.checked({"attention_backends": "fa"})


@pytest.fixture
def settings(tmp_path):
    def write(text: str) -> str:
        path = tmp_path / "hal.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_a_settings_file_says_the_same_words_and_is_named_with_its_line(settings):
    path = settings("attention_backend: fa\ncomponent_attention_backends:\n  vae: torch_sdpa\nforbid: [aiter]\n")
    asked = choices.settings_file(CATALOG, path).requests
    assert [(str(r), r.mode, str(r.target)) for r in asked] == [
        ("fa", "require", "everywhere"),
        ("torch_sdpa", "require", "vae"),
        ("aiter", "forbid", "everywhere"),
    ]
    assert f"{path}, line 1" in asked[0].source and f"{path}, line 3" in asked[1].source


@pytest.mark.parametrize(
    "text, said",
    [
        ("attention_backend: fa9\n", "line 1.*did you mean 'fa'"),
        (
            "forbid: aiter\natention_backend: fa\n",
            "line 2: unknown setting 'atention_backend'; did you mean 'attention_backend'",
        ),
        (
            "component_attention_backends:\n  vae: fa\n  unet: fa9\n",
            "line 3, component_attention_backends: unet=fa9: .*did you mean 'fa'",
        ),
        ("component_attention_backends:\n  vae: fa\n  vae.croos: fa\n", "line 3, .*did you mean 'cross'"),
        ("fit: []\ncomponent_attention_backends: vae=fa,unet=fa9\n", "line 2, .*unet=fa9: .*did you mean 'fa'"),
        ("forbid:\n  unet: aiter\n  vae: fa9\n", "line 3, forbid: vae=fa9: .*did you mean 'fa'"),
        (
            "component_attention_backends:\n  vae: fa\nforbid:\n  vae: fa\n",
            "fa is required by .*line 2, .* and forbidden by .*line 4, ",
        ),
        ("fit: []\nwaive: [nobody]\n", "line 2, waive: nobody: unknown waiver 'nobody'"),
        ("attention_backend_config:\n  sparsity: 0.5\n", "line 2: 'sparsity' is for no backend"),
        ("fit: []\nattention_backend_config: sparsity\n", "line 2: 'sparsity' is no key=value"),
        ("attention_fallback: maybe\n", "line 1, attention_fallback: maybe: unknown fallback 'maybe'"),
        ("attention_backend: [\n", "hal.yaml"),
        ("- fa\n", "object of keys and values"),
    ],
)
def test_a_wrong_settings_file_is_told_with_the_line(settings, text, said):
    with pytest.raises(PolicyError, match=said):
        choices.settings_file(CATALOG, settings(text))


@pytest.mark.parametrize(
    "text",
    [
        "component_attention_backends: vae=fa,text_encoder=torch_sdpa",
        "component_attention_backends: [vae=fa, text_encoder=torch_sdpa]",
        "component_attention_backends:\n- vae=fa,text_encoder=torch_sdpa",
        "component_attention_backends:\n  vae: fa\n  text_encoder: torch_sdpa",
        'component_attention_backends: {"vae": "fa", "text_encoder": "torch_sdpa"}',
    ],
)
def test_a_settings_file_takes_a_text_a_list_or_a_mapping(settings, text):
    asked = choices.settings_file(CATALOG, settings(text)).requests
    assert [(str(r), str(r.target)) for r in asked] == [("fa", "vae"), ("torch_sdpa", "text_encoder")]


@pytest.mark.parametrize("wrong", ["3", "maybe", ""])
def test_a_fallback_that_gives_way_is_checked_all_the_same(settings, wrong):
    with pytest.raises(PolicyError, match="line 1, attention_fallback: "):
        choices.settings_file(CATALOG, settings(f"attention_fallback: {wrong}\n"), "declared")


@pytest.mark.parametrize("wrong", ["3", "maybe", "[declared]"])
def test_a_wrong_fallback_of_the_environment_is_told_with_its_line(settings, monkeypatch, wrong):
    monkeypatch.setenv("HAL_SETTINGS", settings(f"fit: []\nattention_fallback: {wrong}\n"))
    with pytest.raises(PolicyError, match="hal.yaml, line 2, attention_fallback: "):
        choices.policy_of(CATALOG, attention_backend="fa")


class Tiles(Config):
    """Stands in for a sparse backend's settings."""

    sparsity: float = 0.0


TILES = Backend(
    "tiles",
    (Kernel("tiles.k", lambda call: None),),
    traits=frozenset({"sparse"}),
    roles=frozenset({"self"}),
    config=Tiles,
)
WIDER = Catalog(CATALOG.platforms, {**CATALOG.backends, "tiles": TILES})


@pytest.mark.parametrize("narrow", ["transformer@0-1=torch_sdpa", "transformer.cross=fa", "transformer.cross@3=fa"])
@pytest.mark.parametrize("known", [None, ["transformer", "vae"]])
def test_settings_of_a_component_are_of_the_backend_of_all_of_it(narrow, known):
    settings = {"transformer": {"sparsity": 0.5}}
    for asked in (f"transformer=tiles,{narrow}", f"{narrow},transformer=tiles"):
        words = {"component_attention_backends": asked, "attention_backend_config": settings}
        found = choices.policy_of(WIDER, **words, components=known).settings
        assert [(s.backend, s.component, s.config.sparsity) for s in found] == [("tiles", "transformer", 0.5)]
    words = {"component_attention_backends": narrow, "attention_backend_config": settings}
    found = choices.policy_of(WIDER, attention_backend="tiles", **words, components=known).settings
    assert [(s.backend, s.component) for s in found] == [("tiles", "transformer")]
    with pytest.raises(PolicyError, match="'sparsity' is for no backend"):
        choices.policy_of(WIDER, **words, components=known)


@pytest.mark.parametrize(
    "site, outcomes",
    [
        (Site("transformer"), ["taken"]),
        (Site("transformer", "cross"), ["replaced"]),  # sparse, so dense there, as for the backend's own name
        (Site("vae"), ["passed"]),
    ],
)
@pytest.mark.parametrize("word", ["kernel", "attention_backend"])
def test_a_kernel_of_a_sparse_backend_is_ruled_as_its_backend_is(word, site, outcomes):
    policy = choices.policy_of(WIDER, **{word: "tiles.k" if word == "kernel" else "tiles"})
    ruling = ruled(policy.requests, site, WIDER.backends, lambda backend, kernel: Fit("found"))
    assert [step.outcome for step in ruling.steps] == outcomes


def test_a_kernel_that_two_backends_have_is_of_neither():
    both = Catalog(CATALOG.platforms, {**WIDER.backends, "other": Backend("other", TILES.kernels)})
    assert [(r.backend, r.kernel) for r in choices.policy_of(both, kernel="tiles.k").requests] == [("", "tiles.k")]
    asked = choices.policy_of(both, attention_backend="other", kernel="tiles.k").requests
    assert [(r.backend, r.kernel) for r in asked] == [("other", "tiles.k")]


def test_the_environment_comes_before_the_settings_file_and_after_what_is_said(settings, monkeypatch):
    monkeypatch.setenv("HAL_SETTINGS", settings("attention_backend: aiter\nattention_fallback: declared\n"))
    monkeypatch.setenv("HAL_ATTENTION_BACKEND", "fa")
    said = choices.policy_of(CATALOG, attention_backend="torch_sdpa")
    everything = said.over(choices.environment(CATALOG)).requests
    assert [(r.backend, r.mode) for r in everything] == [
        ("torch_sdpa", "prefer"),
        ("fa", "prefer"),
        ("aiter", "prefer"),
    ]
    assert everything[1].source == "HAL_ATTENTION_BACKEND=fa"
    monkeypatch.setenv("HAL_ATTENTION_FALLBACK", "refuse")
    assert [r.mode for r in choices.environment(CATALOG).requests] == ["require", "require"]


@pytest.mark.parametrize("text", ["", "transformer", "transformer.cross", "transformer@0+2", "transformer_2.self@7"])
def test_a_target_is_read_back_from_its_own_text(text):
    target = Target.parse(text)
    assert Target.parse("" if str(target) == "everywhere" else str(target)) == target


def test_the_command_line_names_its_options_and_the_order_is_shown(tmp_path):
    from click.testing import CliRunner

    from hal.cli import main

    file = tmp_path / "s.json"
    file.write_text(json.dumps({"attention_backend": "torch_sdpa"}))
    line = [
        "explain",
        "--on",
        "h100",
        "--json",
        "--config",
        str(file),
        "--attention-backend",
        "fa",
        "--without",
        "flash_attn",
    ]
    ran = CliRunner().invoke(main, [*line, "--component", "vae"], env={"HAL_ATTENTION_BACKEND": "torch_cudnn_sdpa"})
    told = [(s["source"].split(",")[0], s["outcome"]) for s in json.loads(ran.stdout)["policy"]]
    assert told == [
        ("--attention-backend fa", "passed"),
        ("HAL_ATTENTION_BACKEND=torch_cudnn_sdpa", "taken"),
        (str(file), "outranked"),
    ]
