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
from safelight.models.wan import Modulation, TextContext, WanTransformer, keeps_float32
from safelight.models.wan_vae import ENCODER_PREFIXES, WanVaeDecoder
from safelight.pipelines import Report
from safelight.pipelines.wan.checkpoint import TEXT_LENGTH, WanCheckpoint, guidance_scales
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


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A transformer on its way through the steps that it takes, from `first_step` on: what they have in common.

    `rows` are the guidance branches that it runs here, the prompt's (0) and the negative one's (1).
    """

    transformer: WanTransformer
    guidance_scale: float
    first_step: int
    rows: Sequence[int]
    modulations: Sequence[Modulation]
    context: TextContext
    rotary: Tensor


class WanPipeline:
    """A loaded Wan model. `transformers` are by component; the second one of two takes the steps of low noise."""

    def __init__(
        self,
        checkpoint: WanCheckpoint,
        tokenizer: Tokenizer,
        text_encoder: Umt5Encoder,
        transformers: Mapping[str, WanTransformer],
        vae: WanVaeDecoder,
        device: torch.device,
        mesh: "Mesh | None" = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.text_encoder = text_encoder
        self.transformers = transformers
        self.transformer = transformers["transformer"]
        self.vae = vae
        self.device = device
        self.mesh = mesh
        self.modules: Mapping[str, nn.Module] = {"text_encoder": text_encoder, **transformers, "vae": vae}

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
            transformers = {
                component: WanTransformer(config, torch_dtype, component)
                for component, config in checkpoint.transformers.items()
            }
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
        report(1, len(files))
        for i, (component, transformer) in enumerate(transformers.items()):
            load_module(transformer, files[component], dtype=torch_dtype, device=device, keep_float32=keeps_float32)
            transformer.fuse()
            report(2 + i, len(files))
        load_module(vae, files["vae"], dtype=torch.float32, device=device, skip_prefixes=ENCODER_PREFIXES)
        report(len(files), len(files))
        return cls(checkpoint, tokenizer, text_encoder, transformers, vae, torch.device(device), mesh)

    def encode(self, request: Request) -> tuple[TextStates, tuple[str, ...]]:
        """Encode the prompt and, where guidance runs a second branch, the negative one."""
        texts = [("prompt", request.prompt), ("negative prompt", request.negative_prompt or "")]
        tokenised, warnings = [], []
        for name, text in texts[: branches(max(guidance_scales(request)))]:
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
        grid = [size // patch for size, patch in zip(self._latent_shape(request)[1:], self._patch_size, strict=True)]
        rows = max(1, BATCH_TOKENS // (math.prod(grid) * branches(max(guidance_scales(request)))))
        for start in range(0, len(seeds), rows):
            yield seeds[start : start + rows]

    def denoise(self, request: Request, text: TextStates, seeds: Sequence[int]) -> Iterator[StepState]:
        """Denoise one batch of outputs; the state's latents are float32 [outputs, channels, frames, height, width]."""
        assert request.num_steps is not None
        mesh = self.mesh
        solver = solver_from_config(self.checkpoint.scheduler, request.num_steps)
        noise = draw_noise(seeds, self._latent_shape(request)).to(self.device)
        grid = self.transformer.grid(noise)
        shards = None if mesh is None else mesh.shards(math.prod(grid))
        is_second = [self.checkpoint.is_second_stage(timestep) for timestep in solver.timesteps.tolist()]
        stage: Stage | None = None

        def velocity(latents: Tensor, step: int) -> Tensor:
            nonlocal stage
            if stage is None or is_second[step] != is_second[stage.first_step]:
                stage = None  # what the one before has computed goes first
                last = next((i for i in range(step, len(is_second)) if is_second[i] != is_second[step]), len(is_second))
                timesteps = solver.timesteps[step:last].to(self.device)
                stage = self._stage(request, text, is_second[step], step, timesteps, grid, len(seeds))
            rows = latents.repeat(len(stage.rows), 1, 1, 1, 1) if len(stage.rows) > 1 else latents
            layout = Layout(grid=grid, step=step, shards=shards)
            modulation = stage.modulations[step - stage.first_step]
            predicted: Tensor = stage.transformer(rows, modulation, stage.context, stage.rotary, layout, mesh).float()
            if branches(stage.guidance_scale) == 1:
                return predicted
            if mesh is not None and mesh.grid.cfg == 2:
                predicted = mesh.branches.gather(predicted, [len(seeds)] * 2, dim=0)
            conditional, unconditional = predicted.chunk(2)
            return guide(conditional, unconditional, stage.guidance_scale)

        return denoise(velocity, noise, solver, request.cancel)

    def _stage(
        self,
        request: Request,
        text: TextStates,
        is_second: bool,
        first_step: int,
        timesteps: Tensor,
        grid: tuple[int, int, int],
        num_outputs: int,
    ) -> Stage:
        """One of the stages, with what its steps have in common computed."""
        transformer = self.transformers["transformer_2" if is_second else "transformer"]
        scale = guidance_scales(request)[is_second]
        mesh = self.mesh
        # The prompt's branch, then the negative one's: both here, or one on each half of the ranks.
        own = list(range(branches(scale)))
        if mesh is not None and mesh.grid.cfg == 2:
            own = [mesh.branches.rank]
        rows = torch.tensor(own).repeat_interleave(num_outputs)
        num_tokens = [text.num_tokens[row] for row in rows.tolist()]
        rotary = transformer.rotary(grid)
        return Stage(
            transformer=transformer,
            guidance_scale=scale,
            first_step=first_step,
            rows=own,
            modulations=transformer.modulations(timesteps),
            context=transformer.text_context(text.states[rows.to(self.device)], num_tokens, TEXT_LENGTH),
            rotary=rotary if mesh is None else mesh.own(rotary, dim=0),
        )

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
