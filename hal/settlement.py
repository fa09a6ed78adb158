"""Settling: the chosen kernel's needs are proven, and PyTorch is asked what only it knows, until the choice stands.

There is no ``except`` that runs something else: what is learnt becomes a fact, and the pure decision is made again.
"""

from __future__ import annotations

from typing import Any

from . import detect, probe
from .catalog import Catalog
from .decision import Decision
from .facts import Call, Machine
from .policy import Policy
from .resolver import resolve


def settle(call: Call, machine: Machine, catalog: Catalog, policy: Policy, tensors: tuple[Any, ...] = ()) -> Decision:
    """Resolve for the machine that is really here until the chosen kernel is proven.

    ``tensors`` are (q, k, v, mask); without them nothing that needs a tensor is asked.
    """
    while True:
        decision = resolve(call, machine, catalog, policy)
        kernel = decision.chosen.kernel if decision.chosen else None
        if kernel is None:
            return decision
        unproven = next((n for n in kernel.needs if machine.packages[n.package].state == "found"), None)
        if unproven:
            state = probe.prove(unproven, machine.packages[unproven.package])
            detect.learn(unproven.package, state)
            machine = machine.with_packages({unproven.package: state})
            continue
        confirm = kernel.confirmer() if tensors else None
        if confirm:
            refusal = confirm(*tensors, decision.fitted[-1])
            if refusal:
                call = call.but(refused=(*call.refused, (kernel.name, refusal)))
                continue
        return decision
