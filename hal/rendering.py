"""A decision as text and as a tree."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .fittings import fix
from .rules import show

if TYPE_CHECKING:
    from .decision import Candidate, Decision

_MARK = {True: "yes", False: "no ", None: "?  "}


def headline(d: Decision) -> str:
    device = d.machine.device(d.call.device)
    where = f"{d.machine.platform} {device.arch}" + (f" {device.name}" if device.name else "")
    if d.chosen is None:
        return f"{where}: refused ({d.source})"
    return f"{where}: {d.backend} by {d.kernel} ({d.source}; {d.chosen.backend.quality})"


def details(d: Decision) -> list[str]:
    """Call, fittings, warnings and error, a line each."""
    out = [f"call: {str(d.call) or 'nothing is known of it'}"]
    for (fitting, change), before in zip(d.chosen.fittings if d.chosen else (), d.fitted):
        said = ", ".join(
            f"{k} {show(getattr(before, k))} -> {show(x)}" for k, x in change.items() if hasattr(before, k)
        )
        out.append(f"fitting {fitting.name}: {fitting.title} ({said})")
    out += [f"policy {s}" for s in d.steps]
    out += [f"warning {w}" for w in d.warnings]
    return out


def reasons(d: Decision, c: Candidate) -> list[str]:
    out = [passed] if (passed := d.passed_over(c)) else []
    for r in c.reasons:
        more = "".join(f"; {word}: {x}" for word, x in (("fix", fix(r)), ("see", r.citation)) if x)
        out.append(f"{r.id}: {r.message}{more}")
    return out


def mark(d: Decision, c: Candidate) -> str:
    return " * " if d.chosen and c.line is not None and c.line is d.chosen.line else _MARK[c.verdict]


def as_text(d: Decision) -> str:
    out = [headline(d), *(f"  {x}" for x in details(d)), "  candidates:"]
    for c in d.candidates:
        fit = f" with {', '.join(f.name for f, _ in c.fittings)}" if c.fittings else ""
        out.append(f"    {mark(d, c)} {c}{fit}")
        out += [f"          {r}" for r in reasons(d, c)]
    out += [f"  advice: {a}" for a in d.advice]
    return "\n".join(out)


def as_tree(d: Decision) -> str:
    """The same as a tree, by rich, without colour."""
    import io

    from rich.console import Console
    from rich.markup import escape
    from rich.tree import Tree

    tree = Tree(escape(headline(d)))
    for x in details(d):
        tree.add(escape(x))
    branch = tree.add("candidates")
    for c in d.candidates:
        leaf = branch.add(escape(f"{mark(d, c).strip()} {c}"))
        for r in reasons(d, c):
            leaf.add(escape(r))
    for a in d.advice:
        tree.add(escape(f"advice: {a}"))
    buffer = io.StringIO()
    Console(file=buffer, width=1000, no_color=True).print(tree)
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines())
