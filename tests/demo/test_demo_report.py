"""The measured part of the model card: what it says of a target, and that it touches nothing else of the card."""

from __future__ import annotations

import click
import pytest

from hal.demo import report


def counted(hits: int, of: int = 100) -> dict[str, float]:
    return {"hits": hits, "of": of, "low": 0.0, "high": 1.0}


def result(hits: int, *, size=(16, 128, 128), shuffled: int = 7, whole: bool = True) -> dict:
    return {
        "size": list(size), "steps": 10, "guidance": 7.0, "pair": 0.5, "self-attention": whole, "cpu_seconds": 250,
        "found": counted(hits), "found, prompts shuffled": counted(shuffled),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("hits", "bound", "above", "said"),
    [
        (80, 0.8, True, "at least 80%: reached"),
        (79, 0.8, True, "at least 80%: **missed**"),
        (29, 0.3, False, "below 30%: reached"),
        (30, 0.3, False, "below 30%: **missed**"),
        (99, None, True, "none"),
    ],
)
def test_a_target_is_reached_or_missed(hits, bound, above, said):
    assert report.verdict(counted(hits), bound, above) == said


def test_a_share_has_its_interval():
    assert report.share({"hits": 72, "of": 100, "low": 0.625, "high": 0.799}) == "72 of 100 = 72% [62, 80]"


@pytest.mark.parametrize(
    ("size", "tokens", "target"),
    [
        ((16, 128, 128), "1,024", "at least 80%: **missed**"),
        ((32, 256, 256), "8,192", "at least 50%: reached"),
        ((16, 64, 64), "256", "none"),
    ],
)
def test_each_size_has_the_target_of_its_tokens(size, tokens, target):
    _, _, row, shuffled = report.rows([result(72, size=size)])
    assert f"| {tokens} |" in row and row.endswith(f"| {target} | 2.5 |")
    assert "below 30%: reached" in shuffled


def test_without_self_attention_fewer_hits_are_the_target():
    _, _, row = report.rows([result(31, whole=False)])
    assert "self-attention zeroed" in row and "below 30%: **missed**" in row


def test_only_what_stands_between_the_markers_is_written():
    card = f"# Card\n{report.BEGIN}\nold\n{report.END}\nprose\n"
    new = report.written(card, ["new"])
    assert new == f"# Card\n{report.BEGIN}\n\nnew\n\n{report.END}\nprose\n"
    assert report.written(new, ["new"]) == new


def test_a_card_without_markers_is_refused():
    with pytest.raises(click.ClickException, match="has no lines"):
        report.written("# Card\n", ["new"])
