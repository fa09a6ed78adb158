"""Decision: what was chosen, from whose word, and every rejected candidate with every reason."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .advice import advice
from .errors import NoKernelError, PolicyError, RefusedError
from .examination import Candidate, Examination
from .facts import Call
from .facts.flat import derive
from .fittings import Run, fix, transposed
from .policy import Request, Step, fallbacks, rank
from .rules import Reason, check

__all__ = ["Candidate", "Decision"]


@dataclass(eq=False)
class Decision(Examination):
    """The answer to one call on one machine under one policy.  ``str(decision)`` is the explanation."""

    chosen: Candidate | None = None
    source: str = "automatic"
    request: Request | None = None  # the request that decided, where one did
    steps: tuple[Step, ...] = ()  # what became of every request that applies here, the strongest first

    def __deepcopy__(self, memo: Any) -> Decision:
        return self  # a value

    # ---- what was chosen

    @property
    def backend(self) -> str | None:
        return self.chosen.backend.name if self.chosen else None

    @property
    def kernel(self) -> str | None:
        return self.chosen.kernel.name if self.chosen and self.chosen.kernel else None

    @property
    def fittings(self) -> tuple[str, ...]:
        return tuple(f.name for f, _ in self.chosen.fittings) if self.chosen else ()

    @cached_property
    def warnings(self) -> tuple[str, ...]:
        """What the user should know of the chosen kernel: soft reasons, open conditions, warnings of its rules."""
        if not self.chosen or not self.chosen.line:
            return ()
        out = [f"{r.id}: {r.message}" + (f"; {fix(r)}" if fix(r) else "") for r in self.chosen.reasons]
        noted: list[Reason] = []
        facts = derive({**self.facts, **{k: x for _, change in self.chosen.fittings for k, x in change.items()}})
        for rule in self.chosen.line.warnings:
            if rule.waiver not in self.policy.waive:
                rule.check(facts, noted)
        out += [
            f"{r.id}: {r.message}" + (f" ({r.citation})" if r.citation else "") for r in noted if r.verdict is False
        ]
        kernels = {k.name.partition(".")[0] for k in self.chosen.backend.kernels}
        asked = self.request.asked.lower().replace("-", "") if self.request else ""
        if not self.request or self.request.kernel:
            asked = ""  # one kernel by its name is that kernel
        if asked in kernels and self.kernel and self.kernel.partition(".")[0] != asked:
            out.append(f"kernel.generation: {asked} was asked for; {self.kernel} is what fits here")
        if self.request and self.request.backend not in ("", self.backend):
            why = next((x.why for x in self.steps if x.request is self.request), "")
            out.append(
                f"policy.fallback: {self.request} cannot serve; its declared fallback {self.backend} does ({why})"
            )
        try:
            _ = self.config
        except PolicyError as e:
            out.append(f"settings.missing: it cannot run as it is: {e}")
        if self.chosen.line.row.tier == "portable" and not (self.request and self.request.kernel):
            out.append(
                f"tier.portable: no kernel that {self.backend} has for this device fits; its portable form runs, {self.kernel}"
            )
        return tuple(out)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Requests that apply here and were passed over or replaced, and why."""
        over = ("passed", "replaced")
        return tuple(
            f"{s.request} ({s.request.source}) is {s.outcome}: {s.why}" for s in self.steps if s.outcome in over
        )

    @property
    def answered(self) -> frozenset[Request]:
        """Requests that this decision follows, replaces by rule, or sets aside for a narrower one of the user's own."""
        out = {s.request for s in self.steps if s.outcome in ("taken", "refused", "replaced")}
        out |= {s.request for s in self.steps if s.outcome == "passed" and s.request.kind == "global"}
        mine = self.request
        if mine is not None and mine.kind in ("call", "force", "request", "override"):
            out |= {s.request for s in self.steps if s.outcome == "outranked" and rank(mine) < rank(s.request)}
        return frozenset(out)

    @property
    def error(self) -> str | None:
        """Why nothing was chosen: what was asked, what was found, what would help.  None where a kernel was chosen."""
        return None if self.chosen else self._refusal

    def refusal(self) -> NoKernelError:
        """The error to raise where nothing was chosen: a RefusedError where somebody's request decided."""
        return (RefusedError if self.request else NoKernelError)(self._refusal, self)

    @cached_property
    def _refusal(self) -> str:
        device = self.machine.device(self.call.device)
        where = f"{self.machine.platform} {device.arch}" + (f" ({device.name})" if device.name else "")
        if self.request:
            mine = [c for c in self.candidates if self.asks_for(c)]
            rows = [c.kernel.name for c in self.candidates if c.kernel and self.request.backend in ("", c.backend.name)]
            text = (
                f"attention backend {str(self.request)!r}, asked for by {self.request.source}, cannot serve "
                f"{self._place} on {where}"
            )
        else:
            mine, rows = list(self.candidates), []
            text = f"no attention kernel can serve {self._place} on {where}"
        lines = [f"{text}.", f"  call: {str(self.call) or 'nothing is known of it yet'}"]
        if not mine:
            lines.append(f"  platform: {self.machine.platform} has no row for this kernel; it has {', '.join(rows)}")
        for c in (*mine, *self._fallbacks):
            lines.append(f"  {c}:")
            lines += [f"    {r.id}: {r.message}" + (f"; fix: {fix(r)}" if fix(r) else "") for r in c.reasons]
        lines += [f"  advice: {a}" for a in self.advice]
        return "\n".join(lines)

    @property
    def _fallbacks(self) -> list[Candidate]:
        """Along the declared fallbacks of a backend that was preferred: what was tried as well."""
        preferred = self.request.backend if self.request and self.request.mode == "prefer" else ""
        tried = [c for following in fallbacks(preferred, self.catalog.backends) for c in self.examined(following)]
        return tried if all(c.verdict is False for c in tried) else []

    @property
    def _place(self) -> str:
        return str(self.policy.site) if self.policy.site.component else "this call"

    def asks_for(self, c: Candidate) -> bool:
        """Whether the candidate is of the backend and kernel that were asked for."""
        return self.request is None or self.request.means(c.backend.name, c.kernel.name if c.kernel else None)

    def passed_over(self, c: Candidate) -> str:
        """Why a row that fits was not chosen; empty for all others."""
        if c.verdict is not True or (self.chosen and c.line is self.chosen.line):
            return ""
        if not self.automatic:
            return f"behind {self.chosen}" if self.asks_for(c) else f"{self.request} is asked for"
        if c.backend.quality != "exact":
            return f"{c.backend.quality}, so only where it is named"
        places = [
            when for prefer, when in self.catalog.order(self.machine.platform) if prefer.backend == c.backend.name
        ]
        if not places:
            return f"not in the order of {self.machine.platform}, so only where it is named"
        missed: list[list[Reason]] = [[] for _ in places]
        for when, found in zip(places, missed):
            check(when, self.facts, found)
        if all(missed):
            return f"its place in the order of {self.machine.platform} is for other calls: {missed[0][0].message}"
        return f"behind {self.chosen} in the order of {self.machine.platform}"

    @cached_property
    def advice(self) -> tuple[str, ...]:
        """The one change, which hal may not make by itself, that would bring what was asked for or something better."""
        return advice(self, self.chosen, self.request)

    # ---- telling

    def explain(self, format: str = "text") -> str:
        """The whole decision as ``text``, ``tree`` or ``json``."""
        from .rendering import as_text, as_tree

        if format == "json":
            return json.dumps(self.to_json(), indent=2)
        return as_tree(self) if format == "tree" else as_text(self)

    def __str__(self) -> str:
        return self.explain()

    def to_json(self) -> dict[str, Any]:
        device = self.machine.device(self.call.device)
        return {
            "platform": self.machine.platform,
            "device": device.to_json(),
            "origin": self.machine.origin,
            "call": self.call.to_json(),
            "backend": self.backend,
            "kernel": self.kernel,
            "quality": self.chosen.backend.quality if self.chosen else None,
            "tier": self.chosen.line.row.tier if self.chosen and self.chosen.line else None,
            "source": self.source,
            "site": self.policy.site.to_json(),
            "policy": [s.to_json() for s in self.steps],
            "fittings": list(self.fittings),
            "warnings": list(self.warnings),
            "candidates": [
                {
                    **c.to_json(bool(self.chosen) and c.line is self.chosen.line),  # type: ignore[union-attr]
                    "passed_over": self.passed_over(c) or None,
                }
                for c in self.candidates
            ],
            "advice": list(self.advice),
            "error": self.error,
        }

    # ---- running

    @cached_property
    def config(self) -> Any:
        """The settings of the chosen backend, as they were given or its defaults; None where it has none."""
        if self.chosen is None or self.chosen.backend.config is None:
            return None
        from .config import defaults

        given = self.policy.config(self.chosen.backend.name)
        return defaults(self.chosen.backend) if given is None else given

    @cached_property
    def fitted(self) -> tuple[Call, ...]:
        """The call as asked, and after each fitting; the last is what the kernel sees."""
        calls = [self.call]
        for _, change in self.chosen.fittings if self.chosen else ():
            calls.append(calls[-1].but(**{k: x for k, x in change.items() if k != "contiguous"}))
        return tuple(calls)

    def bind(self) -> Run:
        """``f(q, k, v, mask=None, varlen=None)`` in the caller's layout.  Raises NoKernelError where nothing was chosen."""
        if self.chosen is None or self.chosen.kernel is None:
            raise self.refusal()
        kernel, calls = self.chosen.kernel, self.fitted
        run = kernel.binder()(calls[-1]) if self.config is None else kernel.binder()(calls[-1], self.config)
        if not calls[-1].varlen and kernel.layout not in ("any", calls[-1].layout):
            run = transposed(run, bool(calls[-1].lse))
        for (fitting, _), before, after in reversed(list(zip(self.chosen.fittings, calls, calls[1:]))):
            run = fitting.wrap(run, before, after)
        return run
