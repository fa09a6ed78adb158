"""What surrounds a call: component, policy, a simulated machine and the position; each thread and task has its own."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest
import torch

import hal
from hal import context
from hal.errors import FactError, PlatformError, SimulationError
from hal.facts import Package
from hal.policy import Policy, Request


def half():
    return [torch.zeros(1, 4, 2, 64, dtype=torch.bfloat16) for _ in range(3)]


@pytest.mark.parametrize("on, packages, kernel", [
    ("h100", {}, "sdpa.flash"),
    ("h100", {"flash_attn_3": "3.0.0"}, "fa3"),
    ("H100", {"flash-attn-3": "3.0.0"}, "fa3"),
    ("h100", {"flash_attn_interface": "3.0.0"}, "fa3"),  # by the name that is imported
    ("h100", {"flash_attn_3": Package("broken", "3.0.0", "undefined symbol")}, "sdpa.flash"),
    ("cuda:8.6", {"flash-attn": "2.8.3"}, "fa2"),
    ("x86", {}, "sdpa.cpu"),
])  # fmt: skip
def test_a_simulated_machine_decides_in_place_of_this_one(on, packages, kernel):
    here = hal.explain(*half()).kernel
    with hal.simulate(on, packages=packages) as machine:
        d = hal.explain(*half())
        assert hal.current_platform().name == d.machine.platform == machine.platform
        assert d.kernel == kernel and d.machine is machine
    assert hal.explain(*half()).kernel == here == "sdpa.cpu"


def test_packages_and_software_are_set_and_taken_away():
    with hal.simulate("910b", without=("torch-npu",), torch="2.9", cudnn=None) as m:
        assert m.software["torch"] == "2.9" and m.software["cudnn"] is None
        assert m.packages["torch_npu"].state == "absent"
    with hal.simulate("h100", packages={"flash-attn": "2.8.3"}) as m, hal.simulate(m, without=("flash_attn",)) as n:
        assert (m.packages["flash_attn"].version, n.packages["flash_attn"].state) == ("2.8.3", "absent")


@pytest.mark.parametrize("on, error, said", [
    ("h10O", FactError, "unknown machine 'h10O'; did you mean 'h100'"),
    ("cuda", FactError, "'cuda' names no device; write cuda:ARCH, or one of its presets: .*h100"),
    ("cudaa:9.0", PlatformError, "unknown platform 'cudaa'; did you mean 'cuda'"),
    ("cuda:banana", FactError, "'banana' is no .* architecture; write it as"),
    ("/nowhere/x.json", FactError, "the facts file /nowhere/x.json cannot be read: .*No such file"),
])  # fmt: skip
def test_a_machine_that_does_not_exist_is_told(on, error, said):
    with pytest.raises(error, match=said), hal.simulate(on):
        raise AssertionError


def test_a_facts_file_is_a_machine(tmp_path):
    file = tmp_path / "box.json"
    file.write_text(
        '{"platform": "cuda", "devices": [{"arch": "9.0", "index": 3}], "software": {"torch": "2.13.0"}, "packages": {}}'
    )
    with hal.simulate(str(file)) as m:
        assert (m.devices[0].arch, m.origin) == ("sm90", f"file {file}")
        assert hal.explain(*half()).call.device == 3


def test_what_was_decided_for_a_simulated_machine_is_no_silent_stand_in():
    hal.clear_receipts()
    with (
        hal.simulate("h100"),
        pytest.raises(
            SimulationError, match="sdpa.flash was chosen for the simulated machine .preset h100. and cannot run"
        ),
    ):
        hal.attention(*half())
    with (
        hal.simulate("h100", packages={"flash_attn_3": "3.0.0"}),
        pytest.raises(SimulationError, match="fa3 was chosen .*explain inside hal.simulate, run outside"),
    ):
        hal.attention(*half())
    with hal.simulate("x86"):
        assert hal.attention(*half()).shape == (1, 4, 2, 64)
    assert [(r.platform, r.kernel) for r in hal.receipts() if r.kernel == "sdpa.cpu"] == [("cpu", "sdpa.cpu")]


def test_what_is_left_is_undone_also_by_an_exception():
    before = context.current.get()
    with pytest.raises(ZeroDivisionError), hal.component("a"), hal.simulate("h100"), hal.position(step=3):
        1 / 0  # noqa: B018
    assert context.current.get() is before and context.where() == context.NOWHERE


def test_a_position_is_changed_piece_by_piece():
    with hal.position(step=3, steps=20), hal.position(layer=7):
        assert context.where() == context.Position(3, 20, None, 7)
    assert context.where() == context.NOWHERE


def test_equal_contexts_are_one_and_those_that_nobody_uses_are_forgotten():
    with hal.component("a") as _, context.changed(policy=Policy((Request("fa"),))) as one:
        pass
    with hal.component("a") as _, context.changed(policy=Policy((Request("fa"),))) as two:
        assert two is one
    del one, two
    before = len(context._interned)
    for _ in range(50):
        with hal.simulate("h100"):
            pass
    gc.collect()
    assert len(context._interned) <= before


def test_each_thread_and_each_task_has_its_own():
    seen = {}

    def work(name):
        with hal.component(name):
            barrier.wait()
            seen[name] = context.current.get().site.component, context.local.generation

    async def task(name):
        with hal.component(name), hal.position(step=int(name[1:])):
            await asyncio.sleep(0)
            return context.current.get().site.component, context.where().step

    async def tasks():
        return await asyncio.gather(*(task(f"c{n}") for n in range(5)))

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=work, args=(n,)) for n in "abc"]
    with context.changed(policy=Policy((Request("fa"),))):
        number = context.local.generation
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        assert context.local.generation == number is not context.local
    assert {n: name for n, (name, _) in seen.items()} == {n: n for n in "abc"}
    assert len({number, *(generation for _, generation in seen.values())}) == 4
    assert asyncio.run(tasks()) == [(f"c{n}", n) for n in range(5)]
