"""Tiny diffusers pipelines and transformers models, built from configurations without a hub.

Each builder gives the same weights every time.  A pipeline is complete (tokenizers included): it can be saved with
``save_pretrained`` and loaded with ``DiffusionPipeline.from_pretrained``, and runs two steps on a CPU in under a second
with the arguments that ``CALLS`` has for it.  The weights are random, so the pictures are noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Arguments of a pipeline's __call__ that suit its tiny size.
CALLS: dict[str, dict[str, Any]] = {
    "wan": {"height": 16, "width": 16, "num_frames": 9, "guidance_scale": 5.0, "max_sequence_length": 16},
    "flux": {"height": 8, "width": 8, "max_sequence_length": 16},
    "sd3": {"height": 32, "width": 32, "guidance_scale": 5.0, "max_sequence_length": 16},
    "pixart": {
        "height": 8,
        "width": 8,
        "guidance_scale": 5.0,
        "max_sequence_length": 16,
        "use_resolution_binning": False,
        "clean_caption": False,
    },
    "ltx": {"height": 32, "width": 32, "num_frames": 9, "guidance_scale": 3.0, "max_sequence_length": 16},
}

_VOCABULARY = 128
_TEXT = {"vocab_size": _VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
_T5 = {
    "vocab_size": _VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "pad_token_id": 0,
}
_KL: dict[str, Any] = {"block_out_channels": (4,), "layers_per_block": 1, "norm_num_groups": 1}


@contextmanager
def _seeded(seed: int = 0) -> Iterator[None]:
    """Random weights that are the same every time, without moving anyone else's generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


# --- transformers models ---------------------------------------------------------------------------------------------


def llama() -> Any:
    """A Llama body with grouped-query attention: 4 query heads, 2 key heads, 2 layers."""
    from transformers import LlamaConfig, LlamaModel

    with _seeded():
        return LlamaModel(LlamaConfig(**_TEXT, intermediate_size=64, num_key_value_heads=2)).eval()


def qwen2() -> Any:
    """A Qwen2 body: grouped-query attention with biases."""
    from transformers import Qwen2Config, Qwen2Model

    with _seeded():
        return Qwen2Model(Qwen2Config(**_TEXT, intermediate_size=64, num_key_value_heads=2)).eval()


def clip_text(projected: bool = False) -> Any:
    """A CLIP text encoder (causal), with the pooled projection where ``projected``."""
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        **_TEXT,
        intermediate_size=37,
        max_position_embeddings=77,
        projection_dim=32,
        bos_token_id=3,
        eos_token_id=1,
        pad_token_id=0,
    )
    with _seeded():
        return (CLIPTextModelWithProjection if projected else CLIPTextModel)(config).eval()


def t5() -> Any:
    """A T5 encoder: its layers share one learned position bias."""
    from transformers import T5Config, T5EncoderModel

    with _seeded():
        return T5EncoderModel(T5Config(**_T5, decoder_start_token_id=0)).eval()


def umt5() -> Any:
    """A UMT5 encoder: each layer has a position bias of its own."""
    from transformers import UMT5Config, UMT5EncoderModel

    with _seeded():
        return UMT5EncoderModel(UMT5Config(**_T5)).eval()


def tokenizer(length: int = 77) -> Any:
    """A fast tokenizer: a few whole words, and single characters otherwise; every text ends in ``</s>``."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "</s>", "<unk>", *map(chr, range(32, 127)), "cat", "dog", "photo", "of"]
    vocabulary = {word: number for number, word in enumerate(words)}
    built = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    built.pre_tokenizer = pre_tokenizers.Split(Regex(r"cat|dog|photo|of|."), behavior="isolated")
    built.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=length
    )


# --- diffusers pipelines ---------------------------------------------------------------------------------------------


def _ready(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def wan() -> Any:
    """Wan text to video: self- and cross-attention in each of 2 blocks, UMT5 encoder, causal video VAE."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    with _seeded():
        vae = AutoencoderKLWan(
            base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
        )
        transformer = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=256,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        )
    scheduler = UniPCMultistepScheduler(flow_shift=3.0, prediction_type="flow_prediction", use_flow_sigmas=True)
    return _ready(
        WanPipeline(
            tokenizer=tokenizer(512),
            text_encoder=umt5(),
            transformer=transformer.eval(),
            vae=vae.eval(),
            scheduler=scheduler,
        )
    )


def flux() -> Any:
    """Flux: one double-stream and one single-stream block, joint attention, CLIP and T5 encoders."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    with _seeded():
        transformer = FluxTransformer2DModel(
            patch_size=1,
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=32,
            pooled_projection_dim=32,
            axes_dims_rope=[4, 4, 8],
        )
        vae = AutoencoderKL(
            **_KL,
            sample_size=32,
            latent_channels=1,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5035,
        )
    return _ready(
        FluxPipeline(
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae.eval(),
            transformer=transformer.eval(),
            text_encoder=clip_text(),
            tokenizer=tokenizer(77),
            text_encoder_2=t5(),
            tokenizer_2=tokenizer(77),
        )
    )


def sd3() -> Any:
    """Stable Diffusion 3: joint attention whose processor ignores diffusers' backend setting, three encoders."""
    from diffusers import (
        AutoencoderKL,
        FlowMatchEulerDiscreteScheduler,
        SD3Transformer2DModel,
        StableDiffusion3Pipeline,
    )

    with _seeded():
        transformer = SD3Transformer2DModel(
            sample_size=32,
            patch_size=1,
            in_channels=4,
            num_layers=1,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_projection_dim=32,
            joint_attention_dim=32,
            pooled_projection_dim=64,
            out_channels=4,
        )
        vae = AutoencoderKL(
            **_KL,
            sample_size=32,
            latent_channels=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            shift_factor=0.0609,
            scaling_factor=1.5035,
        )
    return _ready(
        StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            vae=vae.eval(),
            text_encoder=clip_text(True),
            tokenizer=tokenizer(77),
            text_encoder_2=clip_text(True),
            tokenizer_2=tokenizer(77),
            text_encoder_3=t5(),
            tokenizer_3=tokenizer(77),
        )
    )


def pixart() -> Any:
    """PixArt-alpha: self- and masked cross-attention by ``AttnProcessor2_0``, T5 encoder."""
    from diffusers import AutoencoderKL, DDIMScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel

    with _seeded():
        transformer = PixArtTransformer2DModel(
            sample_size=8,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=24,
            out_channels=8,
            norm_type="ada_norm_single",
        )
        vae = AutoencoderKL(**_KL, latent_channels=4)
    return _ready(
        PixArtAlphaPipeline(
            tokenizer=tokenizer(120),
            text_encoder=t5(),
            vae=vae.eval(),
            transformer=transformer.eval(),
            scheduler=DDIMScheduler(),
        )
    )


def ltx() -> Any:
    """LTX-Video: self- and masked cross-attention in one block, T5 encoder, a VAE without attention."""
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    with _seeded():
        transformer = LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            patch_size=1,
            patch_size_t=1,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=1,
            caption_channels=32,
        )
        channels = (8, 8, 8, 8)
        vae = AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=channels,
            decoder_block_out_channels=channels,
            layers_per_block=(1,) * 5,
            decoder_layers_per_block=(1,) * 5,
            spatio_temporal_scaling=(True, True, False, False),
            decoder_spatio_temporal_scaling=(True, True, False, False),
            decoder_inject_noise=(False,) * 5,
            upsample_residual=(False,) * 4,
            upsample_factor=(1,) * 4,
            patch_size=1,
            patch_size_t=1,
        )
    return _ready(
        LTXPipeline(
            transformer=transformer.eval(),
            vae=vae.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(),
            text_encoder=t5(),
            tokenizer=tokenizer(128),
        )
    )


PIPELINES: dict[str, Callable[[], Any]] = {"wan": wan, "flux": flux, "sd3": sd3, "pixart": pixart, "ltx": ltx}
MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "qwen2": qwen2, "clip_text": clip_text, "t5": t5, "umt5": umt5}
