"""docs/field-cases.md, from the cases: ``python tests/field_cases/table.py`` writes it."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from field_cases import ALL, Case

PAGE = Path(__file__).resolve().parents[2] / "docs" / "field-cases.md"
HEAD = """# Field cases

What went wrong for people with the projects that do this job today, and what hal does. This page is made from
`tests/field_cases/` by `python tests/field_cases/table.py`; a test checks that it is current.

A *row* is a line of facts with the expected answer: backend and kernel, fittings, the reasons against others, and what the
text must say. `pytest tests/test_field_cases.py -k A28` runs the rows of one case. *Later* names the part of hal with which
a case becomes a row.
"""
KINDS = {
    "A": "Silent fallback, ignored request, leaking override",
    "B": "Wrong numbers after a choice that looked valid",
    "C": "Architectures",
    "D": "Which platform is this",
    "E": "Packages that are missing, broken or another's",
    "F": "torch.compile and the cost of a call",
    "G": "Several devices for one sequence",
    "g": "Golden cases",
}


def page() -> str:
    out = [HEAD]
    for kind, title in KINDS.items():
        out += [f"## {title}\n", "| case | what goes wrong | what hal does | tested by |", "|---|---|---|---|"]
        out += [f"| {c.id} | {c.symptom} | {c.does} | {tested(c)} |" for c in ALL if c.id[0] == kind]
        out.append("")
    return "\n".join(out)


def tested(c: Case) -> str:
    said = [f"{len(c.rows)} row" + "s" * (len(c.rows) > 1)] if c.rows else []
    said += [f"the rows of {other}" for other in c.rows_of.split()]
    said += [f"`{t}`" for t in c.tests]
    return ", ".join(said + [f"later: with {c.later}"] * bool(c.later))


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
