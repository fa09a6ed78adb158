"""Put what was measured into the model card: ``python -m hal.demo.report --log RUN/log.jsonl --results results.jsonl``.

``--log`` is what ``hal.demo.train`` wrote, ``--results`` the JSON lines that ``hal.demo.evaluate`` printed.  It draws
``pictures/CURVE`` and rewrites what stands between the two markers of ``demo-model.md``.
"""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import click

from .shipped import MODEL
from .train import RECORD

BEGIN, END = "<!-- measured: by python -m hal.demo.report -->", "<!-- end of measured -->"
TARGETS = {1024: 0.8, 8192: 0.5}  # share of hits asked for, by tokens
ABLATED = 0.3  # what an ablation has to stay below
POINTS = 60  # of each curve


def lines(files: tuple[Path, ...]) -> list[dict[str, Any]]:
    """The JSON lines of the files; what else stands there (evaluate prints details) is passed over."""
    return [json.loads(x) for f in files for x in f.read_text("utf-8").splitlines() if x.startswith("{")]


def share(of: dict[str, Any]) -> str:
    low, high = (max(0.0, of[k]) * 100 for k in ("low", "high"))
    return f"{of['hits']} of {of['of']} = {of['hits'] / of['of']:.0%} [{low:.0f}, {high:.0f}]"


def verdict(of: dict[str, Any], bound: float | None, above: bool) -> str:
    if bound is None:
        return "none"
    reached = (of["hits"] / of["of"] >= bound) if above else (of["hits"] / of["of"] < bound)
    return f"{'at least' if above else 'below'} {bound:.0%}: {'reached' if reached else '**missed**'}"


def rows(results: list[dict[str, Any]]) -> list[str]:
    head = ("size (frames, height, width)", "tokens", "steps, guidance", "two digits in", "hits", "target", "s a video")
    out = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for r in sorted(results, key=lambda r: (r["size"], not r["self-attention"])):
        frames, height, width = r["size"]
        tokens = frames // 4 * (height // 8) * (width // 8)
        size = f"{frames} x {height} x {width}"
        rest = f"{tokens:,} | {r['steps']}, {r['guidance']:g} | {r['pair']:.0%} of the prompts"
        seconds, whole = f"{r['cpu_seconds'] / r['found']['of']:.1f}", r["self-attention"]
        target = verdict(r["found"], TARGETS.get(tokens) if whole else ABLATED, whole)
        name = size if whole else f"{size}, self-attention zeroed"
        out.append(f"| {name} | {rest} | {share(r['found'])} | {target} | {seconds} |")
        if whole:
            other, name = r["found, prompts shuffled"], f"{size}, the same videos against shuffled prompts"
            out.append(f"| {name} | {rest} | {share(other)} | {verdict(other, ABLATED, False)} | |")
    return out


def facts(model: Path) -> list[str]:
    from safetensors import safe_open

    count = dict.fromkeys(("transformer", "text_encoder", "vae"), 0)
    for part in count:
        for file in (model / part).glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                count[part] += sum(weights.get_tensor(k).numel() for k in weights.keys())  # noqa: SIM118
    told = ", ".join(f"{n:,} in the {part.replace('_', ' ')}" for part, n in count.items())
    size = sum(f.stat().st_size for f in model.rglob("*") if f.is_file()) / 2**20
    spent = json.loads((model / RECORD).read_text("utf-8"))
    wall, cpu = spent["seconds"] / 3600, spent["cpu_seconds"] / 3600
    return [
        f"- Parameters: {told}. Size: {size:.1f} MiB in all.",
        f"- Training: {spent['step']:,} steps, {wall:.1f} hours of wall time, {cpu:.1f} CPU hours.",
    ]


def draw(log: list[dict[str, Any]], out: Path) -> None:
    """The loss over CPU hours, a curve for each number of tokens, as they cannot be compared."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    hours = dict(zip((e["step"] for e in log), accumulate(e.get("cpu", 0) / 3600 for e in log)))
    figure, axes = pyplot.subplots(figsize=(8, 4.2))
    for tokens in sorted({e["tokens"] for e in log}):
        mine = [e for e in log if e["tokens"] == tokens]
        k = max(1, len(mine) // POINTS)
        parts = [mine[i : i + k] for i in range(0, len(mine) - k + 1, k)]
        points = [(sum(hours[e["step"]] for e in p) / k, sum(e["loss"] for e in p) / k) for p in parts]
        axes.plot(*zip(*points), label=f"{tokens:,} tokens ({len(mine):,} steps, means of {k})")
    axes.set(xlabel="CPU hours", ylabel="flow matching loss", ylim=(0, None))
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=90)
    pyplot.close(figure)


def written(card: str, block: list[str]) -> str:
    before, begin, rest = card.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise click.ClickException(f"the card has no lines {BEGIN!r} and {END!r}")
    return "\n".join([f"{before}{BEGIN}", "", *block, "", f"{END}{after}"])


@click.command()
@click.option("--log", "logs", type=click.Path(exists=True, path_type=Path), multiple=True, required=True)
@click.option("--results", type=click.Path(exists=True, path_type=Path), multiple=True, required=True)
@click.option("--model", type=click.Path(exists=True, path_type=Path), default=MODEL)
@click.option("--curve", default="demo-loss.png", show_default=True, help="The name of the picture of the log.")
@click.option("--docs", type=click.Path(exists=True, path_type=Path), default=Path("docs"), show_default=True)
def main(logs: tuple[Path, ...], results: tuple[Path, ...], model: Path, curve: str, docs: Path) -> None:
    """Draw the loss and write the measured part of the model card."""
    last = {entry["step"]: entry for entry in lines(logs)}  # a resumed run repeats steps after its last checkpoint
    log, card = [last[step] for step in sorted(last)], docs / "demo-model.md"
    text = written(card.read_text("utf-8"), [*rows(lines(results)), "", *facts(model)])
    draw(log, docs / "pictures" / curve)
    card.write_text(text, "utf-8")
    click.echo(f"{card}: {len(log):,} steps, {len(lines(results))} measurements")


if __name__ == "__main__":
    main()
