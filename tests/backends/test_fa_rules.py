"""What FlashAttention's kernels honour, refuse, and are known to get wrong: as tables."""

from __future__ import annotations

import pytest

import hal
from hal import policy, resolver
from hal.backends.fa import BACKEND
from hal.facts import Call
from hal.testing import fakes

PACKAGES = {
    "fa2": ("flash-attn", "2.8.3.post1+cu13torch2.9"),
    "fa2.vllm": ("vllm-flash-attn", "0.28.0"),
    "fa3": ("flash_attn_3", "3.0.0"),
    "fa3.hub": ("kernels", "0.17.2"),
    "fa3.sgl": ("sgl-kernel", "0.4.10"),
    "fa4": ("flash-attn-4", "4.0.0b36"),
}
REFUSED = [  # (kernels, call, reason): everything that a kernel does not honour is a reason
    ({"fa2"}, {"mask": "bool"}, "mask.bool"),
    ({"fa3", "fa3.hub", "fa3.sgl", "fa4", "fa2.vllm"}, {"dropout": 0.1}, "dropout"),
    ({"fa3.sgl", "fa2.vllm"}, {"grad": True}, "grad"),
    ({"fa2", "fa3", "fa3.hub"}, {"grad": True, "lse": True}, "lse_grad"),
    ({"fa2.vllm", "fa3.sgl", "fa4"}, {"compile": True}, "compile"),
    ({*PACKAGES}, {"dtype": "float32"}, "dtype"),
    ({*PACKAGES} - {"fa4"}, {"head_dim": 72}, "head_dim"),
    ({"fa4"}, {"head_dim": 68}, "head_dim"),
    ({"fa2.vllm"}, {"head_dim": 224}, "head_dim"),
    ({*PACKAGES}, {"head_dim": 128, "v_head_dim": 64}, "v_head_dim"),
    ({"fa2", "fa2.vllm"}, {"head_dim": 192, "v_head_dim": 128}, "v_head_dim"),
    ({"fa2", "fa2.vllm"}, {"window": (2, 2), "q_len": 9, "kv_len": 4}, "window.rectangular"),
    ({"fa3", "fa3.hub"}, {"grad": True, "deterministic": True, "head_dim": 256}, "deterministic.head_dim"),
]
ACCEPTED = [
    ({"fa2"}, {"dropout": 0.1, "grad": True, "compile": True, "deterministic": True, "head_dim": 224}),
    ({"fa2", "fa2.vllm"}, {"window": (2, 2), "causal": True, "q_len": 9, "kv_len": 4}),
    (
        {"fa3", "fa3.hub", "fa3.sgl", "fa4"},
        {"head_dim": 192, "v_head_dim": 128, "window": (2, 2), "q_len": 9, "kv_len": 4},
    ),
    ({"fa3", "fa3.hub"}, {"grad": True, "deterministic": True, "head_dim": 128, "compile": True}),
    ({"fa4"}, {"head_dim": 72, "grad": True, "lse": True, "graph": True}),
    ({*PACKAGES}, {"ring": 2, "kv_heads": 1, "varlen": True, "causal": True}),
]
PLAIN = {"dtype": "bfloat16", "head_dim": 64, "heads": 4, "batch": 2, "q_len": 128}


def decided(kernel, call, arch="any", version=None, package=None):
    name, newest = PACKAGES[kernel]
    with fakes.workbench(BACKEND, arch=arch, **{package or name: version or newest}) as machine:
        ask = policy.Policy((policy.Request("fa", "require", "test", kernel),))
        return resolver.resolve(Call.of({**PLAIN, **call}), machine, hal.plugins.catalog(), ask)


@pytest.mark.parametrize(
    "kernel, call, reason",
    [pytest.param(k, call, r, id=f"{k}-{r}") for kernels, call, r in REFUSED for k in sorted(kernels)],
)
def test_refused(kernel, call, reason):
    d = decided(kernel, call)
    assert d.chosen is None
    (mine,) = [c for c in d.candidates if c.kernel.name == kernel]
    assert reason in [r.id for r in mine.reasons if r.verdict is False]


@pytest.mark.parametrize(
    "kernel, call",
    [pytest.param(k, call, id=f"{k}-{','.join(call)}") for kernels, call in ACCEPTED for k in sorted(kernels)],
)
def test_accepted(kernel, call):
    assert decided(kernel, call).kernel == kernel


KNOWN_BAD = [  # (kernel, arch, version, call, rule): and the same with one condition changed is accepted
    ("fa2", "sm120", "2.7.2.post1", {}, "fa2.blackwell", {"version": "2.7.4"}),
    ("fa2", "sm86", "2.8.3", {"head_dim": 256, "grad": True, "dropout": 0.1}, "fa2.dropout_backward", {"arch": "sm80"}),
    ("fa4", "sm103", "4.0.0b14", {}, "fa4.sm103", {"version": "4.0.0b15"}),
    ("fa4", "sm100", "4.0.0b9", {"head_dim": 256}, "fa4.head_dim_256", {"version": "4.0.0b22"}),
    (
        "fa4",
        "sm100",
        "4.0.0b36",
        {"head_dim": 256, "lse": True, "grad": True},
        "fa4.head_dim_256_lse_grad",
        {"arch": "sm90"},
    ),
    ("fa4", "sm120", "4.0.0b36", {"grad": True, "deterministic": True}, "fa4.sm120_deterministic", {"arch": "sm100"}),
]


@pytest.mark.parametrize("kernel, arch, version, call, rule, change", KNOWN_BAD, ids=[k[4] for k in KNOWN_BAD])
def test_known_bad(kernel, arch, version, call, rule, change):
    d = decided(kernel, call, arch, version)
    reasons = next(c for c in d.candidates if c.kernel.name == kernel).reasons
    assert d.chosen is None and [r.id for r in reasons] == [f"known_bad.{rule}"]
    assert reasons[0].waiver == rule and reasons[0].citation
    assert decided(kernel, call, change.get("arch", arch), change.get("version", version)).kernel == kernel


VERSIONS = [  # (kernel, version, call, accepted)
    ("fa2", "2.8.3+cu13torch2.9", {}, True),
    ("fa2", "2.8.3.post2", {}, True),
    ("fa2", "2.5.8", {}, False),
    ("fa2", "3.0.0", {}, False),
    ("fa2", "2.6.3", {"compile": True}, False),
    ("fa2", "2.10.0", {"compile": True}, True),  # 2.10 is newer than 2.7
    ("fa3", "3.0.0b1", {}, True),
    ("fa3", "3.0.0b1+cu128", {"compile": True}, False),
    ("fa3", "3.0.0", {"compile": True}, True),
    ("fa3.hub", "0.14.1", {}, False),  # cannot select stable-ABI builds
    ("fa4", "4.0.0b22", {}, True),
    ("fa4", "4.0.0b4", {}, False),
    ("fa4", "4.0.0", {}, True),
]


@pytest.mark.parametrize("kernel, version, call, accepted", VERSIONS)
def test_versions(kernel, version, call, accepted):
    assert (decided(kernel, call, version=version).kernel == kernel) is accepted


def test_a_package_by_each_of_its_names():
    for kernel, names in {
        "fa2": ("flash-attn", "flash_attn"),
        "fa2.vllm": ("vllm", "vllm-flash-attn"),
        "fa3": ("flash_attn_3", "flash-attn-3", "flash_attn_interface"),
        "fa3.sgl": ("sgl-kernel", "sglang-kernel", "sgl_kernel"),
        "fa4": ("flash-attn-4", "flash_attn_4"),
    }.items():
        for name in names:
            assert decided(kernel, {}, package=name).kernel == kernel, name


def test_a_ring_is_warned_of_a_build_that_may_not_give_lse():
    for call in ({"lse": True}, {"ring": 4}):
        assert decided("fa3", call, version="3.0.0b1").warnings[0].startswith("lse.build")
        assert not decided("fa3", call, version="3.0.0").warnings
