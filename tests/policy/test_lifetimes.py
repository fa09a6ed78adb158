"""How long a choice, a layer's place, a count and a callback live: no longer than they should, and no shorter."""

from __future__ import annotations

import asyncio
import gc

import pytest
import torch

import hal
from hal import context, run
from hal.integrations import routing
from hal.testing import tiny

Q = torch.ones(1, 4, 2, 8)


def is_zero(layer, *tensors):
    return bool((layer(*(tensors or (Q, Q, Q))) == 0).all())


def test_a_layer_lives_on_when_an_equal_one_is_gone():
    first, second = hal.LocalAttention(2, 8), hal.LocalAttention(2, 8)
    assert first.place.key == second.place.key
    del second
    gc.collect()
    assert context.place(first.place.key) is first.place
    torch.testing.assert_close(torch.compile(first, backend="eager", fullgraph=True)(Q, Q, Q), first(Q, Q, Q))


def test_a_layer_that_is_built_under_force_is_not_forced_afterwards(zeros):
    with hal.force(zeros):
        layer = hal.LocalAttention(2, 8)
        assert is_zero(layer)
    assert not is_zero(layer)
    with hal.force("torch_sdpa"):
        assert not is_zero(layer)


def test_a_request_is_for_the_pipeline_that_was_prepared(zeros, monkeypatch):
    per_request(zeros, monkeypatch)
    with hal.component("transformer"):
        mine, other = hal.LocalAttention(2, 8), hal.LocalAttention(2, 8)
    with hal.component("text_encoder"):
        encoder = hal.LocalAttention(2, 8)
    alone = hal.LocalAttention(2, 8)
    with hal.request(mine, attention_backend_override=zeros):
        assert is_zero(mine) and not is_zero(other)
        assert not (hal.attention(Q, Q, Q) == 0).all()
    with hal.request(attention_backend_override=zeros):
        assert is_zero(mine) and is_zero(other) and is_zero(alone) and not is_zero(encoder)
    assert not is_zero(mine)


def per_request(name, monkeypatch):
    from hal import plugins

    monkeypatch.setitem(vars(plugins.catalog().backends[name]), "per_request", True)


def test_a_bound_function_that_outlives_its_scope_is_counted():
    hal.clear_receipts()
    with hal.scope(attention_backend="torch_sdpa"):
        bound = hal.bind(Q, Q, Q)
    for _ in range(5):
        bound(Q, Q, Q)
    assert sum(r.runs for r in hal.receipts()) == 5


def test_a_task_that_outlives_its_scope_is_counted():
    hal.clear_receipts()

    async def work(entered, left):
        hal.attention(Q, Q, Q)
        entered.set()
        await left.wait()
        for _ in range(4):
            hal.attention(Q, Q, Q)

    async def main():
        entered, left = asyncio.Event(), asyncio.Event()
        with hal.scope(attention_backend="torch_sdpa"):
            task = asyncio.create_task(work(entered, left))
            await entered.wait()
        left.set()
        await task

    asyncio.run(main())
    assert sum(r.runs for r in hal.receipts()) == 5


def test_a_scope_that_is_entered_again_decides_nothing_anew():
    taken = []
    with hal.hooks(decision=taken.append):
        for _ in range(20):
            with hal.scope(attention_backend="torch_sdpa"):
                hal.attention(Q, Q, Q)
    assert len(taken) == 1


def test_a_callback_ends_with_its_block():
    told = []
    with hal.hooks(run=told.append):
        bound = hal.bind(Q, Q, Q)
        bound(Q, Q, Q)
    bound(Q, Q, Q)
    assert len(told) == 1


def test_places_and_decisions_do_not_pile_up():
    for _ in range(3):
        pipeline = tiny.wan()
        for _ in range(3):
            with hal.attach(pipeline):
                pass
    keys = len(context._keys), len(context._places)
    with hal.attach(pipeline):
        pass
    assert (len(context._keys), len(context._places)) == keys
    assert len(run._entries) <= run.LIMIT
    assert routing._NO_ROUTE.place.site.component == "model"


def test_attach_tells_only_what_it_has_asked(zeros):
    """A lenient choice that auxiliaries pass over is no error; one that a transformer must follow would have raised."""
    encoder = tiny.t5()
    with hal.attach(encoder, attention_backend="fa") as attached:
        encoder(torch.ones(1, 4, dtype=torch.long))
    assert all("fa" in " ".join(r.notes) for r in attached.receipts())


@pytest.mark.parametrize("name", ["", " ", ".cross"])
def test_a_component_has_a_name(name):
    with pytest.raises(hal.HalError), hal.component(name):
        pass
