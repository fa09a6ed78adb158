"""F: torch.compile, and what a call costs; G: several devices for one sequence."""

from __future__ import annotations

from . import Case
from .numerics import PARALLEL
from .selection import SAGE

# fmt: off
CASES = (
    Case("F1", "a kernel breaks the graph, or has no form without data", "every operator is registered with a fake form", later=SAGE),
    Case(
        "F2",
        "torch.compile traces the selection itself",
        "a decision is made while tracing, outside of the graph; only its result is in it; a changed policy traces again",
        tests=(
            "test_compiled.py::test_every_argument_means_the_same_when_compiled",
            "test_compiled.py::test_a_changed_policy_traces_again",
        ),
    ),
    Case(
        "F3",
        "asking PyTorch which path it would take breaks the graph",
        "the path is predicted from facts; nothing is asked of the tensors while tracing",
        tests=("test_compiled.py::test_gradients_flow_through",),
    ),
    Case("G2", "30 heads over 4 devices", "a declared fitting for uneven heads", later=PARALLEL),
    Case("G4", "a ring of quantised kernels needs a release with a right LSE", "an LSE that depends on a version", later=SAGE),
    Case("G5", "uneven lengths in a ring", "strategies and their limits are declared for each backend", later=PARALLEL),
)
