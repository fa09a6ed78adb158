"""The order of selection as one table: who asks (source, target, word), at which site, what cannot be had, what comes of it.

A row reads: site | what is asked, in any order | what cannot serve | who decides | what became of each request, in order.
``fa`` requires, ``fa?`` prefers (declared fallbacks), ``-fa`` forbids; ``override:transformer.cross=fa`` has a target.
``fa`` cannot serve: the machine cannot have it; ``fa!``: it lacks what the call asks for.
Quotes are of the document that is implemented (S) and of this project's design (D).
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hal.policy import ruled

TABLE = {
    "S: 1. global_force_attn_backend(...)": [
        ("transformer.self", "force=fa override:transformer=sdpa cli=sdpa default=sdpa", "", "fa by force", "taken outranked outranked outranked"),
        ("transformer.cross", "cli=sdpa force=fa", "", "fa by force", "taken outranked"),
        ("text_encoder.self", "override:text_encoder=sdpa force=fa", "", "fa by force", "taken outranked"),
        ("vae.self", "force=fa override:vae.self=sdpa", "", "fa by force", "taken outranked"),
        (".self", "force=fa env=sdpa", "", "fa by force", "taken outranked"),
        ("transformer.self", "force:vae=fa cli=sdpa", "", "sdpa by cli", "taken"),
        ("transformer.cross@1", "force:transformer.cross@1-2=fa cli=sdpa", "", "fa by force", "taken outranked"),
    ],
    "D: An explicit request that the machine cannot serve is refused": [
        ("transformer.self", "force=fa cli=sdpa", "fa", "refused by force", "refused outranked"),
        ("transformer.cross", "force=fa default=sdpa", "fa", "refused by force", "refused outranked"),
        ("text_encoder.self", "force=fa default=sdpa", "fa", "refused by force", "refused outranked"),
        ("connectors.self", "force=fa", "fa", "refused by force", "refused"),
        ("vae.self", "call=fa cli=sdpa", "fa", "refused by call", "refused outranked"),
        ("transformer.self", "override:transformer=fa", "fa", "refused by override", "refused"),
    ],
    "issue: force (call and context manager); what is nearest to the call counts": [
        ("transformer.self", "force=fa call=sdpa", "", "sdpa by call", "taken outranked"),
        ("transformer.self", "call=sdpa override:transformer=fa cli=fa", "", "sdpa by call", "taken outranked outranked"),
        ("transformer.self", "force=sdpa force=fa", "", "sdpa by force", "taken outranked"),  # the inner comes first
        ("transformer.cross", "force=sdpa force:transformer.cross=fa", "", "sdpa by force", "taken outranked"),
    ],
    "S: requests may switch the DiT denoise attention backend": [
        ("transformer.self", "request:transformer=fa override:transformer=sdpa", "", "fa by request", "taken outranked"),
        ("transformer.self", "request:transformer=fa cli=sdpa default=sdpa", "", "fa by request", "taken outranked outranked"),
        ("transformer.self", "force=sdpa request:transformer=fa", "", "sdpa by force", "taken outranked"),
        ("transformer.self", "request:transformer=fa cli=sdpa", "fa", "refused by request", "refused outranked"),
        ("transformer.cross", "request:transformer=fa cli=sdpa", "fa!", "sdpa by cli", "passed taken"),
        ("text_encoder.self", "request:transformer=fa cli=sdpa", "", "sdpa by cli", "taken"),
    ],
    "D: Override for the component and role (transformer.cross), then for the component": [
        ("transformer.cross", "override:transformer=fa override:transformer.cross=sdpa", "", "sdpa by override", "taken outranked"),
        ("transformer.self", "override:transformer=fa override:transformer.cross=sdpa", "", "fa by override", "taken"),
        ("transformer_2.cross", "override:transformer=fa override:transformer.cross=sdpa", "", "automatic", ""),
        ("vae.self", "override:vae=fa override:vae.self=sdpa", "", "sdpa by override", "taken outranked"),
        ("transformer.cross", "override:transformer=sdpa override:transformer.cross=fa", "fa", "refused by override", "refused outranked"),
        ("transformer.self@0", "override:transformer=fa override:transformer@0-1=sdpa", "", "sdpa by override", "taken outranked"),
        ("transformer.self@2", "override:transformer=fa override:transformer@0-1=sdpa", "", "fa by override", "taken"),
        ("transformer.self", "override:transformer@0-1=sdpa", "", "automatic", ""),  # a layer that is not known is none of them
        ("transformer.cross@1", "override:transformer.cross=fa override:transformer@1=sdpa", "", "sdpa by override", "taken outranked"),
        ("transformer.cross@1", "override:transformer@1=sdpa override:transformer.cross@1=fa", "", "fa by override", "taken outranked"),
        ("transformer.self@1", "override:transformer.cross@1=fa", "", "automatic", ""),
    ],
    "S: 2. Component override before 3. CLI --attention-backend": [
        ("transformer.self", "cli=fa override:transformer=sdpa", "", "sdpa by override", "taken outranked"),
        ("text_encoder.self", "cli=fa override:text_encoder=sdpa", "", "sdpa by override", "taken outranked"),
        ("text_encoder.self", "env=fa override:text_encoder=sdpa", "fa", "sdpa by override", "taken outranked"),
        ("text_encoder_2.self", "cli=fa override:text_encoder=sdpa", "", "fa by cli", "taken"),
        ("connectors.cross", "file=fa override:connectors=sdpa", "", "sdpa by override", "taken outranked"),
        ("vae.self", "override:vae=sdpa default=fa", "", "sdpa by override", "taken outranked"),
    ],
    "S: an incompatible component override raises an error instead of selecting another": [
        ("transformer.self", "override:transformer=fa cli=sdpa", "fa", "refused by override", "refused outranked"),
        ("transformer_2.self", "override:transformer_2=fa", "fa!", "refused by override", "refused"),
        ("transformer.cross", "override:transformer=fa default=sdpa", "fa!", "refused by override", "refused outranked"),
        ("text_encoder.self", "override:text_encoder=fa cli=sdpa", "fa", "refused by override", "refused outranked"),
        ("text_encoder.cross", "override:text_encoder=fa", "fa!", "refused by override", "refused"),
        ("vae.self", "override:vae=fa default=sdpa", "fa", "refused by override", "refused outranked"),
        ("connectors.self", "override:connectors=fa", "fa", "refused by override", "refused"),
        ("image_encoder.self", "override:image_encoder=fa", "fa!", "refused by override", "refused"),
    ],
    "issue: global choice (CLI, HAL_ATTENTION_BACKEND, config file, in that order)": [
        ("transformer.self", "cli=fa env=sdpa file=sage", "", "fa by cli", "taken outranked outranked"),
        ("transformer.self", "env=sdpa file=fa", "", "sdpa by env", "taken outranked"),
        ("transformer.self", "file=fa default=sdpa", "", "fa by file", "taken outranked"),
        ("transformer.self", "cli=fa env=sdpa", "fa", "refused by cli", "refused outranked"),
        ("text_encoder.self", "cli=fa env=sdpa", "fa", "sdpa by env", "passed taken"),
        ("vae.self", "cli=fa env=sage file=sdpa", "fa sage", "sdpa by file", "passed passed taken"),
    ],
    "S: An explicit global backend mismatch fails for DiT self-attention": [
        ("transformer.self", "cli=fa", "", "fa by cli", "taken"),
        ("transformer.self", "cli=fa", "fa", "refused by cli", "refused"),
        ("transformer.self", "cli=fa default=sdpa", "fa!", "refused by cli", "refused outranked"),
        ("transformer_2.self", "env=fa default=sdpa", "fa", "refused by env", "refused outranked"),
        ("transformer_2.self", "file=fa", "fa!", "refused by file", "refused"),
        ("unet.self", "cli=fa", "fa", "refused by cli", "refused"),
        (".self", "cli=fa", "fa", "refused by cli", "refused"),  # a plain call of hal.attention
    ],
    "S: Auxiliary components may fall back to their declared default or another compatible backend": [
        ("text_encoder.self", "cli=fa", "", "fa by cli", "taken"),
        ("text_encoder.self", "cli=fa", "fa", "automatic", "passed"),
        ("text_encoder.self", "cli=fa default=sdpa", "fa", "sdpa by default", "passed taken"),
        ("text_encoder_2.self", "env=fa default=sdpa", "fa!", "sdpa by default", "passed taken"),
        ("text_encoder.cross", "cli=fa", "fa", "automatic", "passed"),
        ("vae.self", "cli=fa default=sage", "fa sage", "automatic", "passed passed"),
        ("vae.self", "file=fa", "fa!", "automatic", "passed"),
        ("connectors.self", "cli=fa", "fa", "automatic", "passed"),
        ("connectors.cross", "cli=fa", "fa", "automatic", "passed"),
        ("image_encoder.self", "cli=fa", "fa", "automatic", "passed"),
        ("transformer_text.self", "cli=fa", "fa", "automatic", "passed"),  # no transformer_N
        ("transformer.cross", "cli=fa", "fa!", "automatic", "passed"),
        ("transformer_2.cross", "cli=fa default=sdpa", "fa!", "sdpa by default", "passed taken"),
    ],
    "S: 4. Layer or component default, when declared; 5. Auto selection": [
        ("transformer.self", "default=fa", "", "fa by default", "taken"),
        ("transformer.self", "default=fa", "fa", "automatic", "passed"),
        ("transformer.self", "default=fa", "fa!", "automatic", "passed"),
        ("transformer.cross", "default=fa component_default:transformer=sdpa", "", "sdpa by component_default", "taken outranked"),
        ("vae.self", "component_default:vae=fa", "fa", "automatic", "passed"),
        ("vae.self", "component_default:vae=fa default=sdpa", "fa", "sdpa by default", "passed taken"),
        ("transformer.self", "", "", "automatic", ""),
        ("vae.self", "", "fa sdpa", "automatic", ""),
        ("text_encoder.self", "override:transformer=fa", "", "automatic", ""),
    ],
    "S: those layers keep that backend even when the surrounding component is overridden": [
        ("transformer.self", "required=sage override:transformer=fa", "", "sage by required", "taken outranked"),
        ("transformer.self", "required=sage force=fa cli=fa default=fa", "", "sage by required", "taken outranked outranked outranked"),
        ("transformer.self", "required=sage call=fa", "", "sage by required", "taken outranked"),
        ("transformer.self", "required=sage request:transformer=fa", "", "sage by required", "taken outranked"),
        ("text_encoder.self", "required=sdpa cli=fa", "", "sdpa by required", "taken outranked"),
        ("transformer.self", "required=sage force=fa", "sage", "refused by required", "refused outranked"),
        ("vae.self", "required=sage default=sdpa", "sage!", "refused by required", "refused outranked"),
        ("transformer.self", "card:transformer=sol force=fa", "", "sol by card", "taken outranked"),
        ("transformer.cross", "card:transformer.self=sol cli=fa", "", "fa by cli", "taken"),
        ("transformer.cross", "required=sol cli=fa", "sol!", "refused by required", "refused outranked"),  # no replacement for it
    ],
    "D: a sparse backend is replaced by a compatible dense one in cross-attention": [
        ("transformer.self", "cli=sol", "", "sol by cli", "taken"),
        ("transformer.self", "cli=sol", "sol!", "refused by cli", "refused"),
        ("transformer.cross", "cli=sol", "", "automatic", "replaced"),
        ("transformer.cross", "cli=sol default=sdpa", "", "sdpa by default", "replaced taken"),
        ("transformer.cross", "override:transformer=sol", "", "automatic", "replaced"),
        ("transformer.cross", "override:transformer=sol cli=fa", "", "fa by cli", "replaced taken"),
        ("transformer.cross", "override:transformer=sol cli=fa", "fa!", "automatic", "replaced passed"),
        ("transformer.cross", "override:transformer.cross=sol", "", "automatic", "replaced"),
        ("transformer.cross", "override:transformer.cross=fa override:transformer=sol", "", "fa by override", "taken outranked"),
        ("transformer.cross", "override:transformer.cross=sol override:transformer=fa", "fa", "refused by override", "replaced refused"),
        ("transformer.cross", "force=sol override:transformer=sdpa", "", "sdpa by override", "replaced taken"),
        ("transformer.cross", "force=sol", "", "automatic", "replaced"),
        ("transformer.cross", "call=sol", "", "automatic", "replaced"),
        ("connectors.cross", "cli=sol", "", "automatic", "replaced"),
        ("transformer.cross", "cli=sol?", "sol", "automatic", "replaced"),
        ("transformer.cross", "cli=both", "", "both by cli", "taken"),  # sparse, and made for cross-attention too
        ("transformer.cross", "override:transformer=both", "both!", "refused by override", "refused"),
        ("text_encoder.self", "cli=sol", "sol!", "automatic", "passed"),
        ("text_encoder.self", "override:text_encoder=sol", "sol!", "refused by override", "refused"),
    ],
    "D: … refused, with the declared fallback as advice, unless the user asked for declared fallbacks": [
        ("transformer.self", "cli=fa", "fa", "refused by cli", "refused"),
        ("transformer.self", "cli=fa?", "", "fa by cli", "taken"),
        ("transformer.self", "cli=fa?", "fa", "sdpa by cli", "taken as sdpa"),
        ("transformer.self", "cli=sage?", "sage", "fa by cli", "taken as fa"),
        ("transformer.self", "cli=sage?", "sage fa", "sdpa by cli", "taken as sdpa"),  # step by step: sage, fa, sdpa
        ("transformer.self", "cli=sage?", "sage fa sdpa", "refused by cli", "refused"),
        ("transformer.self", "cli=sdpa?", "sdpa", "refused by cli", "refused"),  # which declares none
        ("transformer.self", "cli=ring?", "ring", "loop by cli", "taken as loop"),
        ("transformer.self", "cli=ring?", "ring loop", "refused by cli", "refused"),  # which declare each other
        ("text_encoder.self", "cli=fa? default=sage", "fa", "sdpa by cli", "taken as sdpa outranked"),
        ("text_encoder.self", "cli=fa? default=sage", "fa sdpa", "sage by default", "passed taken"),
        ("text_encoder.self", "override:text_encoder=fa?", "fa", "sdpa by override", "taken as sdpa"),
        ("vae.self", "override:vae=sage? cli=sdpa", "sage fa", "sdpa by override", "taken as sdpa outranked"),
        ("transformer.self", "force=fa?", "fa", "sdpa by force", "taken as sdpa"),
        ("transformer.self", "cli=sol?", "sol", "fa by cli", "taken as fa"),
    ],
    "S: It still fails closed when … it lacks a required operation (dense cross, packed varlen, ring LSE)": [
        ("transformer.self", "cli=fa?", "fa!", "refused by cli", "refused"),
        ("transformer.self", "override:transformer=sage?", "sage fa!", "refused by override", "refused"),  # the chain ends there
        ("text_encoder.self", "override:text_encoder=fa?", "fa!", "refused by override", "refused"),
        ("text_encoder.self", "cli=fa?", "fa!", "automatic", "passed"),
        ("transformer.cross", "override:transformer=fa", "fa!", "refused by override", "refused"),
        ("transformer.self", "force=fa", "fa!", "refused by force", "refused"),
    ],
    "D: each entry is require, prefer or forbid; a forbidden one is nobody's choice": [
        ("transformer.self", "override=-fa", "", "automatic", ""),
        ("transformer.self", "override=-fa cli=sdpa", "", "sdpa by cli", "taken"),
        ("transformer.self", "override=-fa cli=fa", "fa!", "refused by cli", "refused"),  # which hal.Policy tells beforehand
        ("text_encoder.self", "override:text_encoder=-fa cli=fa", "fa!", "automatic", "passed"),
        ("transformer.self", "override=-fa cli=sage?", "sage fa!", "refused by cli", "refused"),
        ("transformer.self", "override=-sage required=fa", "", "fa by required", "taken"),
    ],
    "S: Model and layer backend sets guide automatic selection; they are not positive allowlists": [
        ("transformer.self", "supported=sdpa cli=fa", "", "fa by cli", "taken"),
        ("transformer.self", "supported=sdpa override:transformer=fa", "", "fa by override", "taken"),
        ("vae.self", "supported=sdpa default=fa", "", "fa by default", "taken"),
        ("vae.self", "supported=sdpa", "", "automatic", ""),
    ],
}  # fmt: skip

KIND = {"cli": "global", "env": "global", "file": "global", "card": "required", "component_default": "default"}
GLOBAL = ("cli", "env", "file")  # a policy holds its requests in the order in which they were merged
BACKENDS = {
    "fa": SimpleNamespace(traits=set(), roles={"self", "cross"}, fallback="sdpa"),
    "sage": SimpleNamespace(traits={"quantised"}, roles={"self", "cross"}, fallback="fa"),
    "sdpa": SimpleNamespace(traits=set(), roles={"self", "cross"}, fallback=None),
    "sol": SimpleNamespace(traits={"sparse"}, roles={"self"}, fallback="fa"),
    "both": SimpleNamespace(traits={"sparse"}, roles={"self", "cross"}, fallback="sdpa"),
    "ring": SimpleNamespace(traits=set(), roles={"self", "cross"}, fallback="loop"),
    "loop": SimpleNamespace(traits=set(), roles={"self", "cross"}, fallback="ring"),
}


def where(text):
    head, _, layers = text.partition("@")
    component, _, role = head.partition(".")
    first, _, last = layers.partition("-")
    return component, role, tuple(range(int(first), int(last or first) + 1)) if layers else ()


def request(source, target, backend):
    component, role, layers = where(target)
    mode = "forbid" if backend[0] == "-" else "prefer" if backend[-1] == "?" else "require"
    return SimpleNamespace(
        backend=backend.strip("-?"), kernel="", mode=mode, kind=KIND.get(source, source), source=source,
        target=SimpleNamespace(component=component, role=role, layers=layers),
    )  # fmt: skip


def read(site, asks, cannot):
    component, role, layers = where(site)
    own = {"required": "", "default": "", "supported": ""}
    requests = []
    for word in asks.split():
        who, backend = word.split("=")
        source, _, target = who.partition(":")
        if source in own:
            own[source] = backend
        else:
            requests.append(request(source, target, backend))
    place = SimpleNamespace(component=component, role=role, layer=layers[0] if layers else None, why="", **own)

    def serve(backend, kernel):
        closed = f"{backend}!" in cannot.split()
        found = None if closed or backend in cannot.split() else backend
        return SimpleNamespace(found=found, closed=closed, why=f"{backend} cannot")

    return requests, place, serve


def came(ruling):
    if ruling.automatic:
        return "automatic"
    source = {"the layer's default": "default", "the layer, for correctness": "required"}
    by = source.get(ruling.request.source, ruling.request.source)
    return f"refused by {by}" if ruling.found is None else f"{ruling.found} by {by}"


def told(ruling):
    return " ".join(
        f"{s.outcome} as {s.backend}" if s.backend not in ("", s.request.backend) else s.outcome for s in ruling.steps
    )


ROWS = [
    pytest.param(*row, id=f"{clause[:40]} | {' | '.join(row[:3])}") for clause, rows in TABLE.items() for row in rows
]


@pytest.mark.parametrize("site, asks, cannot, decides, became", ROWS)
def test_row(site, asks, cannot, decides, became):
    requests, place, serve = read(site, asks, cannot)
    ruling = ruled(requests, place, BACKENDS, serve)
    assert (came(ruling), told(ruling)) == (decides, became)


def test_no_row_is_there_twice_and_the_table_has_each_of_its_kinds():
    keys = [
        (site, " ".join(sorted(asks.split())), cannot) for rows in TABLE.values() for site, asks, cannot, *_ in rows
    ]
    twice = {k for k in keys if keys.count(k) > 1}
    assert len(keys) > 100 and twice <= {("transformer.self", "cli=fa", "fa")}  # under both of its clauses
    seen = " ".join(became for rows in TABLE.values() for *_, became in rows).split()
    assert {"taken", "passed", "replaced", "refused", "outranked"} <= set(seen)


@pytest.mark.parametrize("weaker_first", [False, True])
def test_between_sources_the_order_in_which_they_were_said_is_no_matter(weaker_first):
    """Rank comes from the source, not from the place in the list; only among equals the first counts."""
    chain = ["call", "force", "request", "override", "cli", "component_default"]
    for n, source in enumerate(chain):
        asks = [request(s, "", "fa" if s == source else "sdpa") for s in chain[n:]]
        ruling = ruled(
            asks[::-1] if weaker_first else asks,
            read("transformer.self", "", "")[1],
            BACKENDS,
            read("x.self", "", "")[2],
        )
        assert ruling.found == "fa" and ruling.request.source == source


def test_the_one_kernel_of_a_request_is_asked_for_and_no_other():
    asked = []
    one = request("cli", "", "fa?")
    one.kernel = "fa3"

    def serve(backend, kernel):
        asked.append((backend, kernel))
        return SimpleNamespace(found=None, closed=False, why="")

    place = read("transformer.self", "", "")[1]
    assert ruled([one], place, BACKENDS, serve).found is None
    assert asked == [("fa", "fa3"), ("sdpa", "")]  # a fallback is another backend, whichever of its kernels
