"""Words (options, environment, settings file) become requests; every wrong one is an error that names its place."""

from __future__ import annotations

import json

import pytest

from hal import choices, plugins
from hal.errors import PolicyError
from hal.policy import Target

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
    ({"kernel": "fa3", "attention_fallback": "declared"}, [("global", "require", "fa3", "everywhere")]),
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
    ({"waive": "nobody"}, "unknown waiver 'nobody'"),
    ({"fit": "padding"}, "unknown fitting 'padding'"),
    ({"attention_backend": "fa", "attention_backend_config": "sparsity=0.5"}, "fa has no settings"),
    ({"attention_backend_config": "sparsity=0.5"}, "choose one with --attention-backend"),
]


@pytest.mark.parametrize("words, said", WRONG)
def test_a_wrong_word_is_told_with_what_is_allowed(words, said):
    with pytest.raises(PolicyError, match=said):
        choices.policy_of(CATALOG, **words)


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
    assert f"{path}, line 1" in asked[0].source and f"{path}, line 2" in asked[1].source


@pytest.mark.parametrize(
    "text, said",
    [
        ("attention_backend: fa9\n", "line 1.*did you mean 'fa'"),
        (
            "forbid: aiter\natention_backend: fa\n",
            "line 2: unknown setting 'atention_backend'; did you mean 'attention_backend'",
        ),
        ("attention_backend: [\n", "hal.yaml"),
        ("- fa\n", "object of keys and values"),
    ],
)
def test_a_wrong_settings_file_is_told_with_the_line(settings, text, said):
    with pytest.raises(PolicyError, match=said):
        choices.settings_file(CATALOG, settings(text))


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
