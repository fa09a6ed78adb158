"""Model cards: what identifies a model, and what its component takes."""

from __future__ import annotations

import pytest

from hal import models, plugins, resolve
from hal.backend import Backend
from hal.catalog import Catalog
from hal.errors import DeclarationError, PolicyError
from hal.facts import Call
from hal.models import Card, Need
from hal.policy import Policy, Request, Site

INSTALLED = plugins.catalog()
BACKENDS = {**INSTALLED.backends, "other": Backend("other", portable=INSTALLED.backends["torch_sdpa"].portable)}
CATALOG = Catalog(INSTALLED.platforms, BACKENDS)
CPU = CATALOG.machine("cpu-avx2") if "cpu-avx2" in CATALOG.presets else CATALOG.platform("cpu").describe("x86-64-v3")
CALL = Call("float32", 64, heads=8, batch=1, q_len=64)
ONLY = frozenset({"torch_sdpa"})


def card(*needs, **more):
    return Card("m", classes=frozenset({"Model", "Pipeline"}), needs=needs, **more)


MATCHES = [
    # card, classes, config, weights, matches
    (card(), {"Model"}, {}, [], True),
    (card(), {"Pipeline", "Other"}, {}, [], True),
    (card(), {"Other"}, {}, [], False),
    (card(config={"layers": {2, 4}}), {"Model"}, {"layers": 4}, [], True),
    (card(config={"layers": {2, 4}}), {"Model"}, {"layers": 3}, [], False),
    (card(config={"layers": {2, 4}}), {"Model"}, {}, [], False),
    (card(weights=("*.to_gate",)), {"Model"}, {}, ["a.to_q", "a.to_gate"], True),
    (card(weights=("*.to_gate", "*.beta")), {"Model"}, {}, ["a.to_gate"], False),
]


@pytest.mark.parametrize("one, classes, config, weights, matches", MATCHES)
def test_a_card_is_matched_by_class_config_and_weights(one, classes, config, weights, matches):
    assert bool(models.found([one], "transformer", classes, config, weights)) is matches


def test_a_match_tells_the_gates_and_the_geometry_that_the_checkpoint_has():
    one = card(gates=("*.to_gate", "*.beta"), geometry=("window", "chunk"))
    (match,) = models.found([one], "transformer", {"Model"}, {"window": 3}, ["a.to_gate"])
    assert (match.gates, match.geometry) == (("*.to_gate",), {"window": 3})


def decide(one, site, *requests):
    match = models.Found(one, "transformer", (), {})
    return resolve(CALL, CPU, CATALOG, Policy(requests).over(models.policy([match], CATALOG)).at(site))


def asked(backend, kind="global"):
    return Request(backend, source="somebody", kind=kind)


SELF, ENCODER = Site("transformer"), Site("text_encoder")
REQUIRE = Need("require", frozenset({"other"}), "trained with it")
LIMIT = Need("only", ONLY, "its layers are fixed", "text_encoder")
FORBID = Need("forbid", frozenset({"other"}), "pictures turn black")

NEEDS = [
    # need, where, who asks for what, the backend or what the refusal says
    (REQUIRE, SELF, (), "other"),
    (REQUIRE, SELF, (asked("torch_sdpa", "force"),), "other"),
    (REQUIRE, ENCODER, (), "torch_sdpa"),
    (LIMIT, ENCODER, (asked("other"),), "torch_sdpa"),  # a global choice is lenient there
    (LIMIT, ENCODER, (asked("other", "override"),), "only torch_sdpa here: .*its layers are fixed"),
    (LIMIT, SELF, (asked("other"),), "other"),
    (FORBID, SELF, (asked("other"),), "forbidden by the card of m: pictures turn black"),
    (FORBID, ENCODER, (asked("other"),), "other"),
]


@pytest.mark.parametrize("need, site, requests, expected", NEEDS)
def test_a_card_requires_limits_and_forbids(need, site, requests, expected):
    d = decide(card(need), site, *requests)
    if d.backend:
        assert d.backend == expected
    else:
        import re

        assert re.search(expected, d.error)


def test_a_card_and_a_layer_that_require_different_backends_are_refused_naming_both():
    site = SELF._replace(required="torch_sdpa", why="its gates")
    with pytest.raises(
        PolicyError, match="torch_sdpa is required by the layer, .*its gates, and other by the card of m"
    ):
        decide(card(REQUIRE), site)


def test_a_cards_default_is_taken_where_nobody_asks_otherwise():
    default = Need("default", frozenset({"other"}), "faster there")
    assert decide(card(default), SELF).backend == "other"
    assert decide(card(default), SELF, asked("torch_sdpa")).backend == "torch_sdpa"


def test_a_card_that_contradicts_itself_is_refused_as_it_is_written():
    with pytest.raises(DeclarationError, match="require is of one backend"):
        Need("require", frozenset({"a", "b"}), "both")
    with pytest.raises(DeclarationError, match="did you mean 'forbid'"):
        Need("forbids", frozenset({"a"}), "why")


def test_a_need_for_a_backend_that_is_not_installed_forbids_nothing():
    assert (
        models.policy(
            [models.Found(card(Need("forbid", frozenset({"sage_attn"}), "black")), "transformer", (), {})], CATALOG
        )
        == Policy()
    )


def test_ours_are_found_by_entry_points_as_anybodys_are():
    assert INSTALLED.models["qwen_image"].needs[0].citation == "ComfyUI#9184"
