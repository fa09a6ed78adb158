"""The linear codec of the demo model: 4 frames x 8 x 8 pixels in one token, as a standard diffusers VAE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from . import digits

FRAMES, PIXELS = 4, 8  # frames and pixels (a side) in one token
CHANNELS = 12  # latent channels
CONSTANT = 2000.0  # what the VAE adds to its hidden values, see build_vae


def _patches(video: torch.Tensor) -> torch.Tensor:
    """(n, frames, h, w) -> (n, f, h/8, w/8, 256): patches flattened in the order (frame, x, y) that the VAE wants."""
    split = video.unflatten(1, (-1, FRAMES)).unflatten(3, (-1, PIXELS)).unflatten(5, (-1, PIXELS))
    return split.permute(0, 1, 3, 5, 2, 6, 4).flatten(4)


@dataclass
class Codec:
    """The linear map between pixels and latents, and the same map as an AutoencoderKLLTXVideo.

    The basis is the first principal components of moving digits; a channel is scaled by the root of its spread, half
    way to unit variance.  Decoding reads the 3x3x3 neighbourhood of a latent, which hides the seams between patches.
    """

    basis: torch.Tensor  # (channels, 256)
    std: torch.Tensor  # (channels,): the latents_std of the VAE
    taps: torch.Tensor  # (256, channels, 3, 3, 3)

    def state(self) -> dict[str, torch.Tensor]:
        return {"basis": self.basis, "std": self.std, "taps": self.taps}

    @classmethod
    def of(cls, state: dict[str, torch.Tensor]) -> Codec:
        return cls(state["basis"], state["std"], state["taps"])

    @classmethod
    def of_vae(cls, vae: Any) -> Codec:
        """The map that a VAE of `build_vae` holds."""
        wide = vae.decoder.conv_out.conv.weight.size(1)
        gain = math.sqrt(wide) / CONSTANT
        basis = vae.encoder.conv_in.conv.weight[:CHANNELS, : FRAMES * PIXELS**2, 2, 1, 1] * 6
        taps = vae.decoder.conv_out.conv.weight[: FRAMES * PIXELS**2, :CHANNELS] * gain / 2
        return cls(basis.detach().float(), vae.latents_std.float(), taps.detach().float().contiguous())

    @classmethod
    def fit(cls, clips: int = 160, seed: int = 0) -> Codec:
        """Least squares over moving digits of the training split."""
        rng = np.random.default_rng(seed)
        drawn = []
        for side in (64, 96):
            sample = [digits.sample_clip(rng, 16, side, side) for _ in range(clips // 2)]
            drawn.append(_patches(digits.render(sample, side, side))[:, :, : 64 // PIXELS, : 64 // PIXELS])
        video = torch.cat(drawn)
        flat = video.flatten(0, 3)
        active = flat.abs().amax(1) > 1e-3
        values, vectors = torch.linalg.eigh((flat.T @ flat).double() / active.sum())
        basis = vectors.flip(1)[:, :CHANNELS].T.float().contiguous()
        basis *= torch.where(basis.sum(1, keepdim=True) < 0, -1.0, 1.0)
        std = values.flip(0)[:CHANNELS].sqrt().sqrt().float()
        latents = (video @ basis.T).permute(0, 4, 1, 2, 3)
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed))
        padded = F.pad(latents + 0.15 * std.view(1, -1, 1, 1, 1) * noise, (1, 1, 1, 1, 0, 0))
        padded = F.pad(padded, (0, 0, 0, 0, 1, 1), mode="replicate")
        rows = padded.unfold(2, 3, 1).unfold(3, 3, 1).unfold(4, 3, 1).permute(0, 2, 3, 4, 1, 5, 6, 7)
        rows = rows.reshape(-1, CHANNELS * 27).double()
        gram = rows.T @ rows
        gram += torch.eye(len(gram)) * gram.diagonal().mean() * 1e-4
        taps = torch.linalg.solve(gram, rows.T @ flat.double()).float()
        return cls(basis, std, taps.T.reshape(-1, CHANNELS, 3, 3, 3).contiguous())

    def encode(self, video: torch.Tensor) -> torch.Tensor:
        """(n, frames, h, w) in [0, 1] -> latents (n, f, h/8, w/8, channels) as the transformer sees them."""
        return _patches(video) @ (self.basis.T / self.std)

    def build_vae(self) -> Any:
        from diffusers import AutoencoderKLLTXVideo

        wide = 2 * CHANNELS + 1
        vae = AutoencoderKLLTXVideo(
            # the class multiplies these by PIXELS**2 but not by FRAMES, so FRAMES goes in here
            in_channels=3 * FRAMES, out_channels=3 * FRAMES, latent_channels=CHANNELS,
            block_out_channels=(wide,), decoder_block_out_channels=(wide,), down_block_types=("LTXVideoDownBlock3D",),
            layers_per_block=(0, 0), decoder_layers_per_block=(0, 0), spatio_temporal_scaling=(False,),
            decoder_spatio_temporal_scaling=(False,), decoder_inject_noise=(False, False), upsample_residual=(False,),
            upsample_factor=(1,), downsample_type=("conv",), patch_size=PIXELS, patch_size_t=FRAMES,
        ).eval()  # fmt: skip
        # Inside, a value x travels as (x, -x, constant): the constant makes the RMS norm a fixed factor, and
        # silu(x) - silu(-x) = x undoes the activation.
        gain = math.sqrt(wide) / CONSTANT
        with torch.no_grad():
            for parameter in vae.parameters():
                parameter.zero_()
            enter, leave = vae.encoder.conv_in.conv, vae.encoder.conv_out.conv  # causal: the last tap is now
            grey = self.basis.repeat(1, 3) / 6  # pixels are (v + 1) / 2, mean of three colours
            enter.weight[:CHANNELS, :, 2, 1, 1] = grey
            enter.bias[:CHANNELS] = grey.sum(1)
            enter.weight[CHANNELS:-1] = -enter.weight[:CHANNELS]
            enter.bias[CHANNELS:-1] = -enter.bias[:CHANNELS]
            enter.bias[-1] = CONSTANT
            eye = torch.eye(CHANNELS)
            leave.weight[:CHANNELS, :-1, 2, 1, 1] = torch.cat([eye, -eye], 1) / gain
            leave.bias[CHANNELS] = -30.0  # log variance
            enter, leave = vae.decoder.conv_in.conv, vae.decoder.conv_out.conv
            enter.weight[:-1, :, 1, 1, 1] = torch.cat([eye, -eye])
            enter.bias[-1] = CONSTANT
            leave.weight[:, :-1] = torch.cat([self.taps, -self.taps], 1).repeat(3, 1, 1, 1, 1) * 2 / gain
            leave.bias.fill_(-1.0)
            vae.latents_std.copy_(self.std)
        return vae
