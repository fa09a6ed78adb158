"""hal.parallel.agree over real gloo processes: what is equal passes, what differs raises on every rank and is named."""

from __future__ import annotations

import json
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ranks

from hal.catalog import Catalog
from hal.config import Config, Setting
from hal.decision import Decision
from hal.errors import AgreementError, HalError, PolicyError
from hal.facts import Call
from hal.parallel import agree
from hal.plugins import catalog
from hal.policy import Policy
from hal.resolver import resolve

LIMIT = 240  # seconds, for the slowest of machines; a hang ends here


@pytest.fixture(scope="module", params=[2, 4])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What came of every scenario, by rank.  The processes are forked from a server that has imported torch once."""
    world, folder = request.param, tmp_path_factory.mktemp("job")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "hal.parallel", "hal.resolver"])
    processes = [context.Process(target=ranks.main, args=(r, world, str(folder))) for r in range(world)]
    for p in processes:
        p.start()
    end = time.monotonic() + LIMIT
    for p in processes:
        p.join(max(0.0, end - time.monotonic()))
    late = [r for r, p in enumerate(processes) if p.is_alive()]
    for p in processes:
        p.kill()
    assert not late, f"ranks {late} hang"
    out = [json.loads(Path(folder, f"{r}.json").read_text()) for r in range(world)]
    assert not [o["broke"] for o in out if "broke" in o]
    return out


def said(job: list[dict[str, Any]], scenario: str) -> str:
    """The one error text that every rank raised."""
    assert [o[scenario].get("error") for o in job] == ["AgreementError"] * len(job)
    (text,) = {o[scenario]["text"] for o in job}
    return str(text)


def who(job: list[dict[str, Any]]) -> tuple[str, str]:
    """The ranks that are alike, and the odd one, as errors name them."""
    last = len(job) - 1
    return (f"ranks 0-{last - 1}" if last > 1 else "rank 0"), f"rank {last}"


@pytest.mark.parametrize(
    "scenario",
    ["equal", "one decision", "devices of one host", "refused alike", "a package that does not matter", "equal again"],
)
def test_the_same_decisions_agree_and_give_every_rank_one_digest(job: Any, scenario: str) -> None:
    (found,) = {json.dumps(o[scenario]) for o in job}
    assert len(json.loads(found)["digest"]) == 64


def test_the_digest_is_that_of_another_process(job: Any) -> None:
    assert job[0]["equal"]["digest"] == job[0]["equal again"]["digest"] == agree(ranks.given("equal", 0, 2))
    assert job[0]["one decision"]["digest"] == agree(ranks.given("one decision", 0, 2))


def test_mixed_machines_are_named_by_rank_and_architecture(job: Any) -> None:
    others, odd = who(job)
    text = said(job, "mixed machines")
    assert f"arch sm100 on {others}, sm90 on {odd} (decisions 0-1)" in text
    assert f"on {others}, " in next(line for line in text.splitlines() if "kernel" in line)
    assert "platform" not in text and "torch 2" not in text, "what is equal is not told"


def test_a_package_that_one_rank_lacks_is_named(job: Any) -> None:
    others, odd = who(job)
    text = said(job, "a package is absent")
    assert f"flash_attn 2.8.3 on {others}, absent on {odd}" in text
    assert f"kernel fa2 on {others}, sdpa.flash on {odd}" in text


def test_another_version_of_a_needed_package_is_a_difference_though_the_kernel_is_the_same(job: Any) -> None:
    others, odd = who(job)
    text = said(job, "a package differs")
    assert f"flash_attn 2.8.3 on {others}, 2.7.4 on {odd}" in text
    assert "kernel" not in text


@pytest.mark.parametrize(
    ("scenario", "fact"),
    [
        ("torch differs", "torch 2.13.0 on {0}, 2.12.1 on {1}"),
        ("a call differs", "call q_len 4096 on {0}, 1024 on {1} (decisions 0-1)"),
        ("another source", "source automatic on {0}, the test on {1}"),
        ("another count", "3 decisions on {0}, 2 decisions on {1}"),
        ("one refuses", "backend fa on {0}, none (refused) on {1}"),
        ("one refuses", "{1} refuses decision 0: attention backend 'fa', asked for by the test, cannot serve"),
        ("one refuses", "flash_attn_3 3.0.0 on {0}, absent on {1}"),
        ("one fails", "{1} failed before it could decide: OSError: this rank's disk is full"),
        ("one gives something else", "{1} failed before it could decide: TypeError: agree takes decisions"),
        ("all fail", "rank 0 failed before it could decide: OSError"),
    ],
)
def test_the_ranks_and_what_differs_are_named_on_every_rank(job: Any, scenario: str, fact: str) -> None:
    assert fact.format(*who(job)) in said(job, scenario)


def test_the_failing_rank_keeps_its_own_error_as_the_cause(job: Any) -> None:
    assert [o["one fails"]["cause"] for o in job] == ["NoneType"] * (len(job) - 1) + ["OSError"]


def test_only_the_ranks_of_a_group_are_compared_by_their_number_in_the_job(job: Any) -> None:
    last = len(job) - 1
    for rank in (last - 1, last):
        assert f"arch sm100 on rank {last - 1}, sm90 on rank {last}" in job[rank]["in a group"]["text"]
    assert all("digest" in o["among the rest"] for o in job[:-1])
    if last > 1:
        assert "rank 0 is not in the group" in job[0]["in a group"]["text"]


# ---- without a process group


def test_alone_the_digest_is_returned_and_follows_every_fact_that_matters() -> None:
    digests = [
        agree(ranks.decide("h100", 1, ranks.FA3, **more))
        for more in ({}, {"q_len": 77}, {"backend": "torch_sdpa"}, {"backend": "fa"}, {"kv_heads": 8})
    ]
    assert len({*digests}) == len(digests)
    assert agree(ranks.decide("h100", 2)) != agree(ranks.decide("h100", 1))
    assert agree([]) == agree(iter([]))


def test_the_settings_of_the_chosen_backend_are_part_of_the_digest() -> None:
    class Sparsity(Config):
        keep: float = 0.5

    plain = catalog()
    backends = {**plain.backends, "fa": replace(plain.backends["fa"], config=Sparsity)}
    made = Catalog(plain.platforms, backends)
    machine = plain.machine("h100").with_packages(ranks.FA3)
    call = Call.of(dtype="bf16", head_dim=128, heads=24, batch=1, q_len=4096)

    def decision(*settings: Setting) -> Decision:
        return resolve(call, machine, made, Policy(settings=settings))

    default, same, other = (), (Setting("fa", "", Sparsity(keep=0.5)),), (Setting("fa", "", Sparsity(keep=0.9)),)
    assert decision().backend == "fa"
    assert agree(decision(*default)) == agree(decision(*same)) != agree(decision(*other))


def test_what_the_decision_does_not_rest_on_changes_no_digest() -> None:
    machine = catalog().machine("h100")
    call = Call.of(dtype="bf16", head_dim=128, heads=24, batch=1, q_len=4096)
    renamed = type(machine).from_json({**machine.to_json(), "origin": "somewhere else"})
    assert agree(resolve(call, machine, catalog())) == agree(resolve(call, renamed, catalog()))


def test_alone_a_failure_is_an_error_of_the_family_with_its_cause() -> None:
    assert issubclass(AgreementError, PolicyError) and issubclass(AgreementError, HalError)
    with pytest.raises(AgreementError, match="this rank's disk is full") as caught:
        agree(ranks.failing())
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(AgreementError, match="NoneType"):
        agree(None)  # type: ignore[arg-type]
