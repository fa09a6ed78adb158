"""Settling: the chosen kernel's needs are proven, and PyTorch is asked what only it knows, until the choice stands.

There is no ``except`` that runs something else: what is learnt becomes a fact, and the pure decision is made again.
"""

from __future__ import annotations

from typing import Any

from . import detect, probe
from .catalog import Catalog
from .decision import Decision
from .facts import Call, Machine, Package
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
        states = [(n, n.state(machine.packages)) for n in kernel.needs]
        unproven = next(((n, s) for n, s in states if s and s.state == "found"), None)
        if unproven:
            needs, before = unproven
            state = probe.prove(needs, before)
            shown = {needs.proof: state}
            if before.version is None and state.version:  # a module without a distribution tells its version itself
                shown[needs.package] = Package("found", state.version)
            detect.learn(shown)
            machine = machine.with_packages(shown)
            continue
        confirm = kernel.confirmer() if tensors else None
        if confirm:
            refusal = confirm(*tensors, decision.fitted[-1])
            if refusal:
                call = call.but(refused=(*call.refused, (kernel.name, refusal)))
                continue
        return decision
