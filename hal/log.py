"""Who wants to know: a log line for each distinct decision, and callbacks per decision and per run."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from .errors import PolicyError

if TYPE_CHECKING:
    from .decision import Decision
    from .ledger import Receipt

logger = logging.getLogger("hal")
logger.addHandler(logging.NullHandler())  # without it Python itself would print warnings: a library prints nothing

OnDecision = Callable[["Decision"], None]
OnRun = Callable[["Decision"], None]
_decisions: list[OnDecision] = []
_runs: list[OnRun] = []


@contextmanager
def hooks(decision: OnDecision | None = None, run: OnRun | None = None) -> Iterator[None]:
    """While inside: ``decision(d)`` is called for each decision that is taken, ``run(d)`` before each run of one.

    They see every thread.  Decisions are cached, so the first is called once for equal calls; bound functions
    (``hal.bind``) that were made before are not seen.  An exception of a callback is the caller's own.
    """
    from .run import forget

    for said, wanted in (("decision", decision), ("run", run)):
        if wanted is not None and not callable(wanted):
            raise PolicyError(f"hal.hooks({said}={wanted!r}): a callback is a function of a Decision")
    for wanted, kept in ((decision, _decisions), (run, _runs)):
        if wanted is not None:
            kept.append(wanted)
    forget()  # what is cached was decided and bound without them
    try:
        yield
    finally:
        for wanted, kept in ((decision, _decisions), (run, _runs)):
            if wanted is not None:
                kept.remove(wanted)
        forget()


def decided(d: Decision) -> None:
    for f in list(_decisions):
        f(d)


def observed(d: Decision, run: Any) -> Any:
    """``run`` with the callbacks around it; itself where there are none."""
    if not _runs:
        return run

    def observed_run(*args: Any) -> Any:
        for f in list(_runs):  # those of now: what is bound may outlive them
            f(d)
        return run(*args)

    return observed_run


def tell(d: Decision, receipt: Receipt) -> None:
    """One line in the log ``hal`` for a decision that is not like any before; ``record.hal`` has it as data."""
    level = logging.WARNING if receipt.warnings else logging.INFO
    if receipt.backend and logger.isEnabledFor(level):
        said = "".join(f"; {x}" for x in (*receipt.fittings, *receipt.notes, *receipt.warnings))
        where = f"{receipt.component or 'call'}.{receipt.role}"
        what = f"{receipt.backend} by {receipt.kernel} on {receipt.platform} ({receipt.source}{said})"
        logger.log(level, "%s: %s", where, what, extra={"hal": receipt.to_json() | {"call": str(d.call)}})
