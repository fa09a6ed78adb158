"""hal leaves a process as it found it: nothing imported, printed, touched or switched that was not asked for."""

from __future__ import annotations

SEEN = """
import os, sys
modules, env, path, hooks = set(sys.modules), dict(os.environ), list(sys.path), (sys.excepthook, sys.displayhook)
import hal
"""
POISON = """
import sys, torch
class Poison:
    def __getattribute__(self, name):
        sys.stderr.write(f"touched {name}\\n"); raise AssertionError(name)
for name in ("cuda", "xpu", "mps", "mtia"):
    sys.modules[f"torch.{name}"] = Poison()
    setattr(torch, name, Poison())
torch._C._cuda_init = lambda: sys.exit("a CUDA context")
"""
FLAGS = """
import warnings, torch
from torch.backends import cuda, cudnn, mkldnn
def flags():
    return {
        "sdp": (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled(),
                cuda.fp16_bf16_reduction_math_sdp_allowed(), cuda.is_flash_attention_available()),
        "order": torch._C._get_sdp_priority_order() if hasattr(torch._C, "_get_sdp_priority_order") else None,
        "precision": (torch.get_float32_matmul_precision(), cuda.matmul.allow_tf32, cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark,
                      cudnn.deterministic, cuda.matmul.allow_bf16_reduced_precision_reduction, mkldnn.enabled),
        "deterministic": (torch.are_deterministic_algorithms_enabled(), torch.get_deterministic_debug_mode(),
                          torch.utils.deterministic.fill_uninitialized_memory),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "defaults": (torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "seed": torch.initial_seed(), "state": torch.get_rng_state().sum().item(),
        "functions": (torch.nn.functional.scaled_dot_product_attention, torch.Tensor.__matmul__, torch.softmax),
        "warnings": len(warnings.filters),
    }
"""
USE = """
x = lambda *shape: torch.arange(float(torch.Size(shape).numel())).reshape(shape).sin()
q = x(2, 5, 4, 8)
mask = x(5, 5) > 0
def use():
    for arguments in ({}, {"is_causal": True}, {"attn_mask": mask}, {"return_lse": True}, {"window": 2}, {"enable_gqa": True}):
        hal.explain(q, q, q, **arguments).to_json()
        hal.attention(q, q, q, **arguments)
    hal.attention(q.clone().requires_grad_(), q, q)
    hal.bind(q, q, q)(q, q, q)
    packed = q.flatten(0, 1)
    hal.attention_varlen(packed, packed, packed, cu_seqlens_q=torch.tensor([0, 5, 10], dtype=torch.int32))
    with hal.simulate("h100"):
        hal.explain(q.bfloat16(), q.bfloat16(), q.bfloat16()).to_json()
    hal.receipts()
"""


def test_importing_imports_no_torch_and_little_else_prints_nothing_and_changes_nothing(python):
    ran = python(
        SEEN
        + """
new = set(sys.modules) - modules
heavy = {"torch", "numpy", "packaging", "importlib.metadata", "click", "rich", "pydantic", "asyncio", "subprocess", "logging", "json"}
assert not new & heavy, new & heavy
assert dict(os.environ) == env and sys.path == path and (sys.excepthook, sys.displayhook) == hooks
"""
    )
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_explaining_a_simulated_machine_imports_no_torch(python):
    ran = python(
        SEEN
        + """
with hal.simulate("h100", packages={"flash-attn-3": "3.0.0"}):
    machine = hal.context.current.get().machine
d = hal.resolve(hal.Call.of(dtype="bf16", head_dim=128, heads=8, batch=1, q_len=64), machine, hal.plugins.catalog(hal.detect.ignored()))
str(d), d.explain("json")
assert "torch" not in sys.modules and dict(os.environ) == env
print(d.kernel)
"""
    )
    assert (ran.code, ran.out.strip(), ran.err) == (0, "fa3", "")


def test_no_name_of_hal_imports_torch_until_it_is_one_that_needs_tensors(python):
    ran = python("""
import sys, hal
for name in sorted(set(hal.__all__) - {"attention", "attention_varlen", "bind", "explain", "forget", "attach", "LocalAttention", "request"}):
    getattr(hal, name)
    assert "torch" not in sys.modules, name
assert set(hal.__all__) <= set(dir(hal))
try: hal.attentoin
except AttributeError as e: print(e)
""")
    assert (ran.code, ran.out.strip()) == (0, "module 'hal' has no attribute 'attentoin'"), ran.err


def test_with_every_accelerator_poisoned_importing_and_running_on_the_cpu_touches_none(python):
    """Field case E12, golden case 37."""
    ran = python(
        POISON
        + "import hal, hal.run\nhal.current_platform()\nq = torch.ones(1, 2, 1, 8)\nhal.attention(q, q, q)\nhal.explain(q, q, q)"
    )
    assert (ran.code, ran.out, ran.err) == (0, "", "")


def test_no_flag_of_torch_differs_after_import_explain_attention_and_a_refusal_and_nothing_is_printed(python):
    """Field case A32: a decision is no log line."""
    ran = python(
        FLAGS
        + """
before = flags()
import hal
assert flags() == before, "import"
"""
        + USE
        + """
for _ in range(9):
    use()
assert flags() == before, {k: (before[k], x) for k, x in flags().items() if before[k] != x}
try: hal.attention(q, q, q, backend="fa")
except hal.HalError: pass
else: raise AssertionError
assert flags() == before
"""
    )
    assert (ran.code, ran.out, ran.err) == (0, "", "")
