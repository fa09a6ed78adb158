"""What each rank of a test does: it decides on a simulated machine of its own, and then all of them agree or do not."""

from __future__ import annotations

import json
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

import hal
from hal import detect, plugins
from hal.parallel import agree
from hal.policy import Policy, Request

FA2, FA3 = {"flash-attn": "2.8.3"}, {"flash-attn-3": "3.0.0"}
CALLS = ({"head_dim": 128}, {"head_dim": 72, "role": "cross", "kv_len": 77}, {"causal": True, "kv_heads": 8})


def decide(
    on: str, count: int = 1, packages: Any = None, backend: str = "", software: Any = None, **call: Any
) -> list[Any]:
    catalog = plugins.catalog(detect.ignored())
    policy = Policy((Request(catalog.backend_name(backend), source="the test"),) if backend else ())
    with hal.simulate(on, packages, **(software or {})) as machine:
        plain = {"dtype": "bf16", "head_dim": 128, "heads": 24, "batch": 1, "q_len": 4096}
        return [hal.resolve(hal.Call.of({**plain, **more, **call}), machine, catalog, policy) for more in CALLS[:count]]


def failing() -> Iterator[Any]:
    yield from decide("h100")
    raise OSError("this rank's disk is full")


def given(scenario: str, rank: int, world: int) -> Any:
    """The decisions of a rank; the last rank is the odd one."""
    odd = rank == world - 1
    if scenario == "equal":
        return decide("h100", 3, FA3)
    if scenario == "one decision":
        return decide("h100", 1, FA3)[0]
    if scenario == "devices of one host":
        facts = hal.Catalog.machine(plugins.catalog(), "h100").to_json()
        facts["devices"] = [{**facts["devices"][0], "index": i} for i in range(world)]
        machine = hal.Machine.from_json(facts)
        call = hal.Call.of(dtype="bf16", head_dim=128, heads=24, batch=1, q_len=4096, device=rank)
        return hal.resolve(call, machine, plugins.catalog())
    if scenario == "refused alike":
        return decide("x86", 1, backend="torch_cudnn_sdpa")
    if scenario == "mixed machines":
        return decide("h100" if odd else "b200", 2)
    if scenario == "a package is absent":
        return decide("a100", 3, None if odd else FA2)
    if scenario == "a package differs":
        return decide("a100", 1, {"flash-attn": "2.7.4"} if odd else FA2)
    if scenario == "a package that does not matter":
        return decide("h100", 1, {**FA3, "flash-attn": "2.7.4"} if odd else FA3, backend="fa")
    if scenario == "torch differs":
        return decide("h100", 1, software={"torch": "2.12.1" if odd else "2.13.0"})
    if scenario == "a call differs":
        return decide("h100", 2, **({"q_len": 1024} if odd else {}))
    if scenario == "another source":
        return decide("h100", 1, FA3, backend="fa" if odd else "", causal=True)
    if scenario == "another count":
        return decide("h100", 2 if odd else 3)
    if scenario == "one refuses":
        return decide("h100", 1, None if odd else FA3, backend="fa")
    if scenario == "one fails":
        return failing() if odd else decide("h100")
    if scenario == "one gives something else":
        return ["fa3"] if odd else decide("h100")
    if scenario == "all fail":
        return failing()
    raise AssertionError(scenario)


SCENARIOS = (
    "equal", "one decision", "devices of one host", "refused alike", "mixed machines", "a package is absent", "a package differs",
    "a package that does not matter", "torch differs", "a call differs", "another source", "another count", "one refuses", "one fails",
    "one gives something else", "all fail", "equal",
)  # fmt: skip


def attempt(decisions: Any, group: Any = None) -> dict[str, Any]:
    try:
        return {"digest": agree(decisions, group)}
    except Exception as e:
        return {"error": type(e).__name__, "text": str(e), "cause": type(e.__cause__).__name__}


def main(rank: int, world: int, folder: str) -> None:
    """Every scenario in turn, then groups of some ranks; writes what came of each."""
    out: dict[str, Any] = {}
    try:
        file = f"file://{folder}/meet"
        dist.init_process_group("gloo", file, timedelta(seconds=60), world_size=world, rank=rank)
        for i, scenario in enumerate(SCENARIOS):
            out[f"{scenario} again" if scenario in SCENARIOS[:i] else scenario] = attempt(given(scenario, rank, world))
        pair = [world - 2, world - 1]
        group = dist.new_group(pair)
        if rank in pair or rank == 0:
            out["in a group"] = attempt(given("mixed machines", rank, world), group)
        rest = dist.new_group(list(range(world - 1)))
        if rank < world - 1:
            out["among the rest"] = attempt(given("mixed machines", rank, world), rest)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        out["broke"] = traceback.format_exc()
    (Path(folder) / f"{rank}.json").write_text(json.dumps(out))
