"""The Wan family's pipeline: encode the prompt, denoise latents, decode frames."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor, nn

from safelight.attention.backend import Layout
from safelight.errors import CheckpointError
from safelight.models import umt5
from safelight.models.umt5 import Umt5Encoder, encode_prompts
from safelight.models.wan import WanTransformer, keeps_float32
from safelight.models.wan_vae import ENCODER_PREFIXES, WanVaeDecoder
from safelight.pipelines import Report
from safelight.pipelines.wan.checkpoint import TEXT_LENGTH, WanCheckpoint
from safelight.request import Request
from safelight.sampling.denoise import StepState, denoise
from safelight.sampling.flow import solver_from_config
from safelight.sampling.guidance import branches, guide
from safelight.sampling.noise import draw_noise
from safelight.text import Tokenizer, clean_prompt
from safelight.weights.loading import load_module

if TYPE_CHECKING:
    from safelight.distributed.mesh import Mesh

BATCH_TOKENS = 8192  # outputs share a batch while their tokens, over both branches, stay below this


@dataclass(frozen=True)
class TextStates:
    """Encoded prompts [branches, tokens, text_dim]: the prompt's, then the negative one's where guidance needs it."""

    states: Tensor
    num_tokens: tuple[int, ...]


class WanPipeline:
    """A loaded Wan model."""

    def __init__(
        self,
        checkpoint: WanCheckpoint,
        tokenizer: Tokenizer,
        text_encoder: Umt5Encoder,
        transformer: WanTransformer,
        vae: WanVaeDecoder,
        device: torch.device,
        mesh: "Mesh | None" = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.transformer = transformer
        self.vae = vae
        self.device = device
        self.mesh = mesh
        self.modules: Mapping[str, nn.Module] = {"text_encoder": text_encoder, "transformer": transformer, "vae": vae}

    @classmethod
    def load(
        cls, checkpoint: WanCheckpoint, dtype: str, device: str, report: Report, mesh: "Mesh | None" = None
    ) -> Self:
        """Build on the meta device, then load each component; every rank of a mesh loads all of them."""
        tokenizer = Tokenizer.from_folder(checkpoint.folder / "tokenizer")
        if tokenizer.vocab_size > checkpoint.text_encoder.vocab_size:
            raise CheckpointError(
                f"{checkpoint.folder}: the components don't fit together: the tokenizer has {tokenizer.vocab_size} "
                f"tokens, text_encoder vocab_size is {checkpoint.text_encoder.vocab_size}"
            )
        torch_dtype: torch.dtype = getattr(torch, dtype)
        with torch.device("meta"):
            text_encoder = Umt5Encoder(checkpoint.text_encoder, dtype)
            transformer = WanTransformer(checkpoint.transformer, torch_dtype)
            vae = WanVaeDecoder(checkpoint.vae, torch.float32)
        files = checkpoint.files
        load_module(
            text_encoder,
            files["text_encoder"],
            dtype=torch_dtype,
            device=device,
            keep_float32=lambda name: umt5.weight_dtype(name, dtype) == "float32",
            tied=umt5.TIED,
        )
        report(1, 3)
        load_module(transformer, files["transformer"], dtype=torch_dtype, device=device, keep_float32=keeps_float32)
        transformer.fuse()
        report(2, 3)
        load_module(vae, files["vae"], dtype=torch.float32, device=device, skip_prefixes=ENCODER_PREFIXES)
        report(3, 3)
        return cls(checkpoint, tokenizer, text_encoder, transformer, vae, torch.device(device), mesh)

    def encode(self, request: Request) -> tuple[TextStates, tuple[str, ...]]:
        """Encode the prompt and, where guidance runs a second branch, the negative one."""
        assert request.guidance_scale is not None
        texts = [("prompt", request.prompt), ("negative prompt", request.negative_prompt or "")]
        tokenised, warnings = [], []
        for name, text in texts[: branches(request.guidance_scale)]:
            prompt = self.tokenizer.encode(clean_prompt(text), TEXT_LENGTH)
            tokenised.append(prompt)
            if prompt.num_cut:
                warnings.append(
                    f"the {name} has {prompt.num_cut} tokens more than the model's {TEXT_LENGTH}; they were cut"
                )
        num_tokens = tuple(prompt.num_tokens for prompt in tokenised)
        states = encode_prompts(self.text_encoder, [prompt.prompt_ids for prompt in tokenised], max(num_tokens))
        return TextStates(states, num_tokens), tuple(warnings)

    def batches(self, request: Request, seeds: Sequence[int]) -> Iterator[Sequence[int]]:
        """The seeds in batches that run together."""
        assert request.guidance_scale is not None
        grid = [size // patch for size, patch in zip(self._latent_shape(request)[1:], self._patch_size, strict=True)]
        rows = max(1, BATCH_TOKENS // (grid[0] * grid[1] * grid[2] * branches(request.guidance_scale)))
        for start in range(0, len(seeds), rows):
            yield seeds[start : start + rows]

    def denoise(self, request: Request, text: TextStates, seeds: Sequence[int]) -> Iterator[StepState]:
        """Denoise one batch of outputs; the state's latents are float32 [outputs, channels, frames, height, width]."""
        assert request.num_steps is not None and request.guidance_scale is not None
        transformer, scale, mesh = self.transformer, request.guidance_scale, self.mesh
        num_branches = branches(scale)
        # The prompt's branch, then the negative one's: both here, or one on each half of the ranks.
        is_split = mesh is not None and mesh.grid.cfg == 2
        own = [mesh.branches.rank] if mesh is not None and is_split else list(range(num_branches))
        solver = solver_from_config(self.checkpoint.scheduler, request.num_steps)
        noise = draw_noise(seeds, self._latent_shape(request)).to(self.device)
        grid = transformer.grid(noise)
        rotary, shards = transformer.rotary(grid), None
        if mesh is not None:
            rotary, shards = mesh.own(rotary, dim=0), mesh.shards(math.prod(grid))
        modulations = transformer.modulations(solver.timesteps.to(self.device))
        rows = torch.tensor(own).repeat_interleave(len(seeds))
        num_tokens = [text.num_tokens[row] for row in rows.tolist()]
        context = transformer.text_context(text.states[rows.to(self.device)], num_tokens, TEXT_LENGTH)

        def velocity(latents: Tensor, step: int) -> Tensor:
            rows = latents.repeat(len(own), 1, 1, 1, 1) if len(own) > 1 else latents
            layout = Layout(grid=grid, step=step, shards=shards)
            predicted: Tensor = transformer(rows, modulations[step], context, rotary, layout, mesh).float()
            if num_branches == 1:
                return predicted
            if mesh is not None and is_split:
                predicted = mesh.branches.gather(predicted, [len(seeds)] * 2, dim=0)
            conditional, unconditional = predicted.chunk(2)
            return guide(conditional, unconditional, scale)

        return denoise(velocity, noise, solver, request.cancel)

    def decode(self, latents: Tensor, report: Report) -> Tensor:
        """Decode latents to pixels in [0, 1], float32 [outputs, frames, height, width, 3]."""
        pixels_BCFHW = self.vae.decode(self.vae.denormalise(latents.float()), on_chunk=report)
        return pixels_BCFHW.div_(2).add_(0.5).permute(0, 2, 3, 4, 1)

    @property
    def _patch_size(self) -> tuple[int, int, int]:
        return self.checkpoint.transformer.patch_size

    def _latent_shape(self, request: Request) -> tuple[int, int, int, int]:
        assert request.num_frames is not None and request.height is not None and request.width is not None
        vae = self.checkpoint.vae
        frames = 1 + (request.num_frames - 1) // vae.temporal_factor
        return (vae.z_dim, frames, request.height // vae.spatial_factor, request.width // vae.spatial_factor)
