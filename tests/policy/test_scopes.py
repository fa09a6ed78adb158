"""Scopes are contexts: nested, undone by whatever ends them, and each thread's and each task's own."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F

import hal
from hal import context
from hal.errors import PolicyError

MANY = 64
BACKENDS = ("torch_sdpa", "zeros")


def qkv(n=4):
    return [torch.ones(1, n, 1, 8) for _ in range(3)]


def seen(*tensors):
    """Who decides here, and for which component, as a call finds it."""
    d = hal.explain(*(tensors or qkv()))
    if d.chosen and d.machine.origin == "detected":
        hal.attention(*(tensors or qkv()))  # what is asked for is used, or leaving its scope would tell
    return d.backend, d.source, d.policy.site.component


def nested(number):
    """A few scopes, one in another, and what must be seen after each."""
    r = random.Random(number)
    name = f"part_{number}"
    yield hal.component(name), (None, "automatic", name)
    first = r.choice(BACKENDS)
    yield (
        hal.scope(component_attention_backends={name: first}),
        (first, f"component_attention_backends='{name}={first}'", name),
    )
    second = r.choice(BACKENDS)
    yield hal.force(second, on=name), (second, f"hal.force({second!r}, on={name!r})", name)
    yield hal.component(f"{name}_b"), (None, "automatic", f"{name}_b")
    third = r.choice(BACKENDS)
    yield hal.force(third), (third, f"hal.force({third!r})", f"{name}_b")


def check(want, *tensors):
    got = seen(*tensors)
    return None if got == (want[0] or got[0], *want[1:]) else (want, got)


@pytest.fixture
def wrong(zeros):
    return []


def test_sixty_four_threads_with_nested_scopes_see_their_own(wrong):
    barrier = threading.Barrier(MANY, timeout=60)
    inputs = [qkv(n + 1) for n in range(MANY)]  # PyTorch lets other threads in; few calls of it keep this test short

    def work(number):
        barrier.wait()
        with ExitStack() as stack:
            for scope, want in nested(number):
                stack.enter_context(scope)
                wrong.extend(filter(None, [check(want, *inputs[number])]))
            output = hal.attention(*inputs[number])
        wrong.extend(filter(None, [check((None, "automatic", ""), *inputs[number])]))
        if context.current.get() is not context.NOTHING or context.local.generation is not context.local:
            wrong.append("something is left")
        return want[0], output

    with (
        hal.force("torch_sdpa"),
        ThreadPoolExecutor(MANY) as pool,
    ):  # which the threads do not see: they start with nothing
        ran = list(pool.map(work, range(MANY)))
    assert not wrong and all(output.any() == (backend != "zeros") for backend, output in ran)


def test_sixty_four_tasks_with_nested_scopes_see_their_own(wrong):
    async def work(number):
        r = random.Random(number)
        with ExitStack() as stack:
            for scope, want in nested(number):
                stack.enter_context(scope)
                await asyncio.sleep(r.random() / 500)
                wrong.extend(filter(None, [check(want)]))
                hal.attention(*qkv(number % 7 + 1))
            await asyncio.sleep(0)
            if hal.attention(*qkv()).any() != (want[0] != "zeros"):
                wrong.append((number, want))
        return context.current.get()

    async def tasks():
        with hal.scope(forbid="fa"):  # which every task inherits, and gets back
            outer = context.current.get()
            assert all(c is outer for c in await asyncio.gather(*(work(n) for n in range(MANY))))

    asyncio.run(tasks())
    assert not wrong


def test_sixty_four_tasks_are_on_simulated_machines_of_their_own():
    presets = {"h100": "cuda", "mi300x": "rocm", "910b": "npu", "x86": "cpu"}
    names = list(presets)

    async def work(number):
        preset = names[number % len(names)]
        with hal.simulate(preset), hal.component(f"c{number}"):
            await asyncio.sleep(0)
            here = hal.explain(*qkv())
            with hal.simulate(names[(number + 1) % len(names)]) as inner:
                await asyncio.sleep(0)
                assert hal.current_platform().name == inner.platform == hal.explain(*qkv()).machine.platform
            await asyncio.sleep(0)
            return (hal.current_platform().name, here.machine.platform, here.policy.site.component) == (
                presets[preset], presets[preset], f"c{number}",
            )  # fmt: skip

    async def tasks():
        return await asyncio.gather(*(work(n) for n in range(MANY)))

    assert all(asyncio.run(tasks())) and hal.explain(*qkv()).machine.platform == "cpu"


def test_a_task_inherits_what_was_in_force_where_it_was_made(zeros):
    async def work():
        return seen()[0]

    async def tasks():
        with hal.force(zeros):
            inside = asyncio.ensure_future(work())
        outside = asyncio.ensure_future(work())
        return await inside, await outside

    assert asyncio.run(tasks()) == (zeros, "torch_sdpa")


def test_a_thread_given_the_context_of_its_maker_sees_it(zeros):
    async def tasks():
        with hal.force(zeros):
            return await asyncio.to_thread(seen), await asyncio.get_running_loop().run_in_executor(None, seen)

    given, bare = asyncio.run(tasks())
    assert (given[0], bare[0]) == (zeros, "torch_sdpa")


SCOPES = [
    pytest.param(lambda: hal.force("zeros"), id="force"),
    pytest.param(lambda: hal.scope(attention_backend="zeros"), id="scope"),
    pytest.param(lambda: hal.component("vae"), id="component"),
    pytest.param(lambda: hal.component("vae", "zeros"), id="override"),
    pytest.param(lambda: hal.simulate("h100"), id="simulate"),
    pytest.param(lambda: hal.position(step=3), id="position"),
]


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, GeneratorExit, PolicyError])
def test_whatever_ends_a_scope_undoes_it_and_stays_what_it_is(zeros, scope, error):
    before = context.current.get()
    ours = error("mine")
    with pytest.raises(error) as told, hal.force("torch_sdpa", on="nowhere"), scope(), scope():
        raise ours
    assert told.value is ours
    assert (
        context.current.get() is before
        and context.where() == context.NOWHERE
        and context.local.generation is context.local
    )


@pytest.mark.parametrize("bad", [
    lambda: hal.force("fa9"), lambda: hal.force("fa", on="a b"), lambda: hal.scope(attention_backend="fa9"),
    lambda: hal.scope(nonsense=1), lambda: hal.component("vae", "fa9"), lambda: hal.simulate("h10O"),
    lambda: hal.scope(attention_backend="fa", forbid="fa"), lambda: hal.component("vae", "fa", mode="perhaps"),
])  # fmt: skip
def test_a_scope_that_cannot_be_entered_leaves_the_one_around_it(bad):
    with hal.force("torch_sdpa"):
        before = context.current.get()
        with pytest.raises(hal.HalError), bad():
            raise AssertionError
        assert context.current.get() is before and seen()[0] == "torch_sdpa"


def test_a_scope_inside_that_contradicts_the_one_around_names_both():
    with hal.scope(forbid="fa"), pytest.raises(PolicyError, match=r"hal.force\('fa'\).*forbidden by forbid='fa'"):
        with hal.force("fa"):
            raise AssertionError
    with hal.force("fa"), pytest.raises(PolicyError, match=r"hal.force\('fa'\).*forbidden by forbid='fa'"):
        with hal.scope(forbid="fa"):
            raise AssertionError


# ---- generators


def test_a_generator_sees_what_is_in_force_where_it_is_driven(zeros):
    def frames():
        while True:
            yield seen()[0]

    g = frames()
    assert next(g) == "torch_sdpa"
    with hal.force(zeros):
        assert next(g) == zeros
    assert next(g) == "torch_sdpa"


@pytest.mark.parametrize("end", ["exhausted", "closed", "thrown", "dropped"])
def test_a_scope_inside_a_generator_ends_with_it(zeros, end):
    def frames():
        with hal.force(zeros), hal.component("vae"):
            yield seen()
            yield seen()

    g = frames()
    assert next(g)[0] == zeros
    if end == "exhausted":
        assert [x[2] for x in g] == ["vae"]
    elif end == "closed":
        g.close()
    elif end == "thrown":
        with pytest.raises(ZeroDivisionError):
            g.throw(ZeroDivisionError())
    else:
        del g
    assert context.current.get() is context.NOTHING and seen() == ("torch_sdpa", "automatic", "")


def test_an_async_generator_of_each_task_keeps_its_scope(zeros):
    async def frames(backend, number):
        with hal.force(backend), hal.component(f"c{number}"):
            for _ in range(3):
                await asyncio.sleep(0)
                yield seen()[::2]

    async def work(number):
        backend = BACKENDS[number % 2]
        return [x async for x in frames(backend, number)] == [(backend, f"c{number}")] * 3

    async def tasks():
        return await asyncio.gather(*(work(n) for n in range(MANY)))

    assert all(asyncio.run(tasks()))


# ---- compiled code guards on a number, not on the context


def test_compiled_code_follows_each_threads_policy(zeros):
    step = torch.compile(lambda q, k, v: hal.attention(q, k, v) + 0, backend="aot_eager", fullgraph=True)
    wrong = []

    def work(backend):
        with hal.force(backend):
            if step(*qkv()).any() != (backend != zeros):
                wrong.append(backend)

    for n in (0, 1, 0, 1):
        thread = threading.Thread(target=work, args=(BACKENDS[n],))
        thread.start()
        thread.join()
        if not step(*qkv()).any():
            wrong.append("outside")
    assert not wrong


def test_compiled_code_follows_the_component_it_runs_in(zeros):
    step = torch.compile(lambda q, k, v: hal.attention(q, k, v) + 0, backend="aot_eager", fullgraph=True)
    with hal.scope(component_attention_backends={"vae": zeros}):
        for name in ("vae", "text_encoder", "vae"):
            with hal.component(name):
                assert step(*qkv()).any() == (name != "vae")


def test_an_override_that_compiled_code_has_followed_before_counts_as_used(zeros):
    step = torch.compile(lambda q, k, v: hal.attention(q, k, v) + 0, backend="aot_eager", fullgraph=True)
    for _ in range(2):  # the second time nothing is decided anew
        with hal.component("vae", zeros):
            assert not step(*qkv()).any()
    with (
        pytest.raises(PolicyError, match="no attention layer of 'vae' used torch_sdpa"),
        hal.component("vae", "torch_sdpa"),
    ):
        pass


def test_compiled_code_follows_each_tasks_policy(zeros):
    step = torch.compile(lambda q, k, v: hal.attention(q, k, v) + 0, backend="aot_eager", fullgraph=True)
    wrong = []

    async def work(backend):
        with hal.force(backend):
            for _ in range(3):
                await asyncio.sleep(0)
                if step(*qkv()).any() != (backend != zeros):
                    wrong.append(backend)
        await asyncio.sleep(0)
        if not step(*qkv()).any():
            wrong.append("after")

    async def tasks():
        await asyncio.gather(*(work(BACKENDS[n % 2]) for n in range(4)))

    asyncio.run(tasks())
    assert not wrong and context.local.generation is context.local


# ---- receipts and scopes at once


def test_receipts_can_be_read_while_other_threads_open_and_close_scopes():
    stop, wrong = threading.Event(), []
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads change places as often as Python lets them

    def work():
        while not stop.is_set():
            try:
                with hal.scope(forbid="fa"):
                    hal.attention(*qkv(2))
            except Exception as e:
                wrong.append(e)
                return

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    try:
        for _ in range(100):
            hal.receipts()
    finally:
        stop.set()
        sys.setswitchinterval(before)
        for t in threads:
            t.join()
    assert not wrong


def test_every_run_of_every_scope_is_counted_once():
    def work(number):
        for _ in range(10):
            with hal.component(f"c{number % 8}", "torch_sdpa"):
                hal.attention(*qkv(3))
                hal.attention(*qkv(3))

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(work, range(16)))
    counts = {r.component: r.runs for r in hal.receipts()}
    assert counts == {f"c{n}": 2 * 2 * 10 for n in range(8)}


# ---- two attached models in one process


def test_two_attached_pipelines_that_take_turns_in_threads_never_meet(zeros):
    from attached import Plain

    one, two = Plain(), Plain()
    wrong = []
    barrier = threading.Barrier(2, timeout=60)
    x = torch.randn(1, 2, 6, 8)

    def work(model, zero):
        barrier.wait()
        for n in range(50):
            if model(x).any() == zero:
                wrong.append((zero, n))
            time.sleep(0)

    with (
        hal.attach(one, component="transformer", component_attention_backends={"transformer": zeros}) as first,
        hal.attach(two, component="transformer", attention_backend="torch_sdpa") as second,
    ):
        threads = [threading.Thread(target=work, args=a) for a in ((one, True), (two, False))]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert {(r.backend, r.runs) for r in first.receipts()} == {(zeros, 50)}
        assert {(r.backend, r.runs) for r in second.receipts()} == {("torch_sdpa", 50)}
    assert not wrong and x.any()


def test_a_model_inside_an_attached_one_of_another_pipeline_keeps_its_own_choice(zeros):
    """A pipeline that is run within the other's attention: the inner's place decides inside, the outer's around it."""
    from attached import Plain

    class Outer(torch.nn.Module):
        def forward(self, q):
            first = inner[0](q)
            return first, F.scaled_dot_product_attention(q, q, q)

    inner, outer = [Plain()], Outer()
    x = torch.randn(1, 2, 6, 8)
    with (
        hal.attach(inner[0], component="transformer", component_attention_backends={"transformer": "torch_sdpa"}),
        hal.attach(outer, component="transformer_2", component_attention_backends={"transformer_2": zeros}),
    ):
        first, second = outer(x)
    assert first.any() and not second.any()
