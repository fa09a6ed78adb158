"""What a pipeline cannot do with a prompt or with sizes: told before it runs, or of what it made."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ..errors import AttachError

COUNTS = ("num_frames", "height", "width", "num_inference_steps")
SHORT = 64  # a vocabulary of no more words is told whole


def check_numbers(call: Mapping[str, Any], said: Callable[[str, Any], str]) -> None:
    """Refuse what is no size and no scale for any pipeline.  Raises AttachError."""
    for key in COUNTS:
        if call.get(key) is not None and call[key] < 1:
            raise AttachError(f"{said(key, call[key])}: allowed is 1 or more")
    for key, value in call.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise AttachError(f"{said(key, value)}: allowed is a finite number")


def check_prompts(pipeline: Any, prompt: str, call: Mapping[str, Any]) -> list[str]:
    """Refuse a prompt that the pipeline would cut; what it does not know of a prompt, as warnings.  Raises AttachError.

    A pipeline with several text encoders reads a prompt where one of them reads it whole.
    """
    from transformers import PreTrainedTokenizerBase

    tokenizers = [t for t in pipeline.components.values() if isinstance(t, PreTrainedTokenizerBase)]
    parameter = inspect.signature(pipeline.__call__).parameters.get("max_sequence_length")
    most = call.get("max_sequence_length", parameter.default if parameter else None) or math.inf
    warnings = []
    for key, text in (("prompt", prompt), ("negative_prompt", call.get("negative_prompt"))):
        if not tokenizers or not isinstance(text, str):
            continue
        sizes = [(len(t(text, verbose=False).input_ids), min(t.model_max_length, most)) for t in tokenizers]
        if all(size > limit for size, limit in sizes):
            size, limit = max(sizes, key=lambda s: s[1])
            raise AttachError(
                f"the {key} is too long: it has {size} tokens, and {type(pipeline).__name__} reads {limit}; shorten it"
            )
        unread = [_unread(t, text) for t in tokenizers]
        if words := [w for w in dict.fromkeys(unread[0]) if all(w in u for u in unread)]:
            told = ", ".join(repr(w[:40]) for w in words[:12]) + ", ..." * (len(words) > 12)
            warnings.append(f"the model does not know {told} of the {key}{_known(tokenizers)}")
    return warnings


def _unread(tokenizer: Any, text: str) -> list[str]:
    """The words that a tokenizer has only its token for unknown words for."""
    if tokenizer.unk_token_id is None or not tokenizer.is_fast:
        return []
    read = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    places = zip(read["input_ids"], read["offset_mapping"])
    return [text[first:end] for token, (first, end) in places if token == tokenizer.unk_token_id]


def _known(tokenizers: Sequence[Any]) -> str:
    words = {w for t in tokenizers for w in t.get_vocab() if w not in t.all_special_tokens and w.isalnum()}
    return f"; it knows: {', '.join(sorted(words))}" if len(words) <= SHORT else ""


def otherwise(call: Mapping[str, Any], images: Sequence[Any], name: str) -> str:
    """How the images differ from what was asked for, as a warning; empty where they do not."""
    width, height = images[0].size
    made = {"num_frames": len(images), "height": height, "width": width}
    other = [k for k, n in made.items() if call.get(k) not in (None, n)]
    told = ", ".join(f"{k} {made[k]} and not {call[k]}" for k in other)
    return f"{name} made {told}: it does not make every size" if told else ""
