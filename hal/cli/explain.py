"""hal explain: the decision for one call, with every candidate and every reason."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ..errors import PolicyError
from ..fittings import fix
from ..policy import DENOISER, Request, Site, Target, target_of
from .options import as_json, choosing, installed, machine_of, on_machine, policy_from
from .output import Part, Row, Screen, emit, lined, screen

if TYPE_CHECKING:
    from ..catalog import Catalog
    from ..decision import Candidate, Decision
    from ..facts import Call, Machine
    from ..policy import Policy

# What --call leaves open: the self-attention of a usual video or image transformer.  float32 where there is no bfloat16.
TYPICAL = {"dtype": "bfloat16", "head_dim": 128, "heads": 24, "batch": 1, "q_len": 4096}


@click.command(short_help="Tell which kernel runs a call.")
@on_machine
@choosing
@click.option("--backend", metavar="NAME", help="Require this attention backend, as backend= of a call does.")
@click.option("--attention-backend-override", metavar="NAME", help="One request's own choice.")
@click.option(
    "--component",
    metavar="NAME",
    default="",
    help="Where the call is made: a name of model_index.json, perhaps with a role and a layer (transformer.cross@3).",
)
@click.option("--role", metavar="self|cross", help="Whether the keys are the sequence's own.")
@click.option("--call", "calls", multiple=True, metavar="KEY=VALUE,...", help="The call; ? is unknown. See below.")
@as_json
@click.option("--tree", is_flag=True, help="Print a tree.")
@click.option("--schema", is_flag=True, help="Print the JSON schema of --json.")
@click.pass_context
def command(
    ctx: click.Context,
    on: str | None,
    with_: tuple[str, ...],
    without: tuple[str, ...],
    words: dict[str, Any],
    config: str | None,
    backend: str | None,
    attention_backend_override: str | None,
    component: str,
    role: str | None,
    calls: tuple[str, ...],
    as_json: bool,
    tree: bool,
    schema: bool,
) -> None:
    """Tell which kernel runs a call, on this machine or any other, and why: every candidate with every reason.

    Exit code 2: what was asked for is refused.  What --call leaves open is that of a typical diffusion transformer.

    \b
    hal explain --on h100
    hal explain --on cuda:9.0 --with flash-attn-3==3.0.0 --call dtype=bf16,head_dim=72
    hal explain --on mi300x --attention-backend aiter --attention-fallback declared --json
    hal explain --on h100 --attention-backend fa --component text_encoder --call mask=key_padding

    Call keys: dtype head_dim v_head_dim heads kv_heads batch q_len kv_len causal mask mask_shape dropout window scale
    layout contiguous role varlen lse grad mask_grad deterministic compile graph ring ulysses kv_gather step layer device.
    """
    if schema:
        from ..schemas import explanation

        return emit(explanation())
    catalog = installed()
    machine = machine_of(catalog, on, with_, without)
    target = target_of(component, f"--component {component}")
    call, assumed = _call(_placed(calls, role, target, component), machine)
    policy = policy_from(catalog, words, config)
    override = attention_backend_override
    if override is not None and not DENOISER.fullmatch(target.component):
        catalog.per_request(override)
        click.echo(f"hal: note: --attention-backend-override is for the denoiser, and not for {component}", err=True)
        override = None
    policy = _of_the_call(catalog, policy, backend, override)
    policy = policy.at(Site(target.component))
    if on:
        from ..resolver import resolve

        decision = resolve(call, machine, catalog, policy)
    else:
        from ..settlement import settle

        if not machine.software.get("torch"):
            click.echo("hal: warning: torch is not installed here, so nothing can run; hal doctor tells more", err=True)
        decision = settle(call, machine, catalog, policy)
    if as_json:
        emit({**decision.to_json(), "assumed": assumed})
    elif tree:
        click.echo(decision.explain("tree"))
    else:
        show(screen(), decision, assumed)
    if decision.error:
        ctx.exit(2)


def _keys(texts: tuple[str, ...]) -> dict[str, str]:
    """What is written for each key of a call."""
    pairs = (p.partition("=") for text in texts for p in text.split(","))
    return {k.strip().lower().replace("-", "_"): x.strip().lower() for k, _, x in pairs}


def _placed(texts: tuple[str, ...], role: str | None, target: Target, component: str) -> tuple[str, ...]:
    """The texts of the call with the role and the layer that --role and --component say."""
    keys = _keys(texts)
    if role is not None:
        if "role" in keys:
            raise PolicyError("--role and --call role=… both say the role; keep one")
        texts, keys = (*texts, f"role={role}"), {**keys, "role": role.strip().lower()}
    said = {"role": [target.role] if target.role else [], "layer": [str(n) for n in target.layers]}
    for key, mine in said.items():
        if mine and keys.setdefault(key, mine[0]) not in mine:
            other = f"--role {role}" if key == "role" and role is not None else f"--call {key}={keys[key]}"
            raise PolicyError(f"--component {component} and {other} contradict each other; drop one of them")
        if mine and key not in _keys(texts):
            texts = (*texts, f"{key}={mine[0]}")
    return texts


def _call(texts: tuple[str, ...], machine: Machine) -> tuple[Call, list[str]]:
    """The call, and the keys of it that were not given."""
    from ..facts import Call

    keys = _keys(texts)
    assumed = [k for k in TYPICAL if k not in keys]
    base = {k: TYPICAL[k] for k in assumed}
    dtypes = machine.device(Call.parse(texts).device).dtypes
    if "dtype" in base and dtypes is not None and base["dtype"] not in dtypes:
        base["dtype"] = "float32"
    return Call.parse(texts, base), assumed


def _of_the_call(catalog: Catalog, policy: Policy, backend: str | None, override: str | None) -> Policy:
    """What a call and a request say, before all that is said around them."""
    if override is not None:
        source = f"--attention-backend-override {override}"
        try:
            name = catalog.per_request(override)
        except PolicyError as e:
            raise PolicyError(f"{source}: {e}") from None
        policy = policy.with_request(Request(name, "require", source, "", override, "request"))
    if backend is not None:
        source = f"--backend {backend}"
        policy = policy.with_request(Request(catalog.backend_name(backend), "require", source, "", backend, "call"))
    return policy


# ---- for people


def show(out: Screen, d: Decision, assumed: list[str]) -> None:
    from ..rendering import details

    device = d.machine.device(d.call.device)
    where = " ".join(x for x in (d.machine.platform, device.arch, device.name) if x)
    out.line((where, "bold"), (f"  {d.machine.origin}" if d.machine.origin not in where else "", "dim"))
    if d.chosen:
        tier = d.chosen.line.row.tier if d.chosen.line else ""
        out.line((f"{d.backend} by {d.kernel}", "bold green"), f"  {d.chosen.backend.quality}, {tier}, {d.source}")
    else:
        out.line(("refused", "bold red"), f"  {(d.error or '').partition('.' + chr(10))[0]}")
    said, *rest = details(d)
    said += "".join(f" {k}=?" for k in TYPICAL if getattr(d.call, k) is None)
    note = f"  (assumed: {', '.join(assumed)})" if assumed else ""
    out.item("call", said.removeprefix("call: ").replace(",", " "), (note, "dim"))
    for text in rest:
        name, _, what = text.partition(" ")
        out.item(name, (what, "yellow" if name == "warning" else ""))
    if d.error and not any(map(d.asks_for, d.candidates)):  # no row to hold the reason
        out.item("reason", *(line.strip() for line in d.error.splitlines() if line.startswith("  platform: ")))
    shown = [c for c in d.candidates if c.line is not None or (d.request and d.asks_for(c))]
    out.heading("Candidates")
    out.table(("candidate", "verdict", "why"), [_row(d, c) for c in shown])
    elsewhere = [c.backend.name for c in d.candidates if c not in shown]
    if elsewhere:
        out.line((f"  no row on {d.machine.platform}: {', '.join(elsewhere)}", "dim"))
    if d.advice:
        out.heading("Advice")
        for a in d.advice:
            out.item("-", a)


def _row(d: Decision, c: Candidate) -> Row:
    chosen = d.chosen is not None and c.line is d.chosen.line
    verdict = {True: ("fits", "green"), False: ("no", "red"), None: ("depends", "yellow")}[c.verdict]
    name = (str(c), "bold green" if chosen else "bold" if d.request and d.asks_for(c) else "")
    lines: list[list[Part]] = [[f"with {', '.join(f.name for f, _ in c.fittings)}"]] if c.fittings else []
    lines += [[(passed, "dim")]] if (passed := d.passed_over(c)) else []
    for r in dict.fromkeys(_Told(r.id, r.verdict, r.message, fix(r), r.citation) for r in c.reasons):
        lines.append([(r.id, "red" if r.verdict is False else "yellow"), f"  {r.message}"])
        lines += [[f"  fix: {r.fix}"]] if r.fix else []
        lines += [[(f"  see: {r.citation}", "dim")]] if r.citation else []
    return name, ("chosen", "bold green") if chosen else verdict, lined(lines)


class _Told(NamedTuple):
    """What a person reads of a reason; the same of two facts is said once."""

    id: str
    verdict: bool | None
    message: str
    fix: str
    citation: str
