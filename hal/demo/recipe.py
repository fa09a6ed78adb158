"""The parts of the demo pipeline, all of standard diffusers and transformers classes, built from nothing.

    tokenizer     a word-level vocabulary of the captions
    text_encoder  a one-layer T5 encoder, trained with the transformer
    transformer   LTXVideoTransformer3DModel, head_dim 128, one token per latent
    vae           AutoencoderKLLTXVideo whose weights are set by least squares, not trained: a linear codec that packs
                  4 frames x 8 x 8 pixels into one token
    scheduler     FlowMatchEulerDiscreteScheduler

A clip of F frames of H x W pixels is a token grid of (F / 4, H / 8, W / 8).
"""

from __future__ import annotations

from typing import Any

import torch

from . import digits
from .codec import CHANNELS, Codec

FRAME_RATE = 25  # what LTXPipeline assumes; only sets the scale of the time positions
TEXT_LENGTH = 128  # LTXPipeline pads every prompt to this length
TEXT_WIDTH = 64
HEADS, HEAD_DIM, LAYERS = 1, 128, 14
WORDS = ("<pad>", "</s>", "<unk>", "a", "an", ",", *digits.NAMES, *digits.MOTIONS, *digits.DIRECTIONS, "and", ".")


def build_tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    numerals = [normalizers.Replace(Regex(rf"\b{i}\b"), name) for i, name in enumerate(digits.NAMES)]
    core.normalizer = normalizers.Sequence([normalizers.Lowercase(), *numerals])
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=TEXT_LENGTH
    )


def build_text_encoder() -> Any:
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=32, d_model=TEXT_WIDTH, d_kv=16, d_ff=128, num_layers=1, num_heads=4, dropout_rate=0.0,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return T5EncoderModel(config).eval()


def build_transformer(layers: int = LAYERS) -> Any:
    from diffusers import LTXVideoTransformer3DModel

    width = HEADS * HEAD_DIM
    model = LTXVideoTransformer3DModel(
        in_channels=CHANNELS, out_channels=CHANNELS, num_attention_heads=HEADS, attention_head_dim=HEAD_DIM,
        cross_attention_dim=width, num_layers=layers, caption_channels=TEXT_WIDTH,
    )  # fmt: skip
    with torch.no_grad():  # every block begins as a small change, the output as zero
        for layer in (model.proj_out, model.time_embed.linear):
            torch.nn.init.zeros_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
        for block in model.transformer_blocks:
            block.scale_shift_table.zero_()
            block.scale_shift_table[[2, 5]] = 0.5
    return model


def build_scheduler() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_shift=1.4, max_shift=2.1)


def build_pipeline(codec: Codec, text_encoder: Any, transformer: Any) -> Any:
    from diffusers import LTXPipeline

    return LTXPipeline(
        scheduler=build_scheduler(), vae=codec.build_vae(), text_encoder=text_encoder, tokenizer=build_tokenizer(),
        transformer=transformer,
    )  # fmt: skip
