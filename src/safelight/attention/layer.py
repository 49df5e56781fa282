"""Attention: the module a model calls. It holds the bound kernel of one layer; forward never selects."""

from torch import Tensor, nn

from safelight.attention.backend import AttentionBackend, AttentionFn, Layout
from safelight.attention.requirements import AttentionRequirements, Mask
from safelight.errors import KernelError, KernelMismatchError, RankError


class Attention(nn.Module):
    """One attention layer's kernel, without parameters. `runtime.bind` fills in `kernel`, `backend` and `name`.

    `supported` are the only backends that are right here (S10); None means any.
    """

    def __init__(self, requirements: AttentionRequirements, supported: frozenset[str] | None = None) -> None:
        super().__init__()
        self.requirements = requirements
        self.supported = supported
        self.kernel: AttentionFn | None = None
        self.backend: AttentionBackend | None = None
        self.name = requirements.component

    def accepts(self, mask: Mask) -> bool:
        """Whether the bound kernel takes this kind of mask, also where the layer doesn't require it."""
        return self.backend is not None and mask in self.backend.masks

    def forward(
        self,
        q_BSHD: Tensor,
        k_BSHD: Tensor,
        v_BSHD: Tensor,
        *,
        mask: Tensor | None = None,
        layout: Layout | None = None,
    ) -> Tensor:
        """Attend: q [batch, queries, heads, head_dim], k and v [batch, keys, kv_heads, head_dim]; out like q.

        Raises KernelError, naming the layer and the step, with the kernel's own error as its cause, and
        KernelMismatchError from a kernel that is checked, RankError where another rank of a parallel run is lost.
        """
        assert self.kernel is not None, f"{self.name}: no kernel is bound; bind the plan before running the model"
        requirements = self.requirements
        try:
            out: Tensor = self.kernel(
                q_BSHD, k_BSHD, v_BSHD, scale=requirements.scale, causal=requirements.causal, mask=mask, layout=layout
            )
        except (KernelMismatchError, RankError):
            raise
        except Exception as error:
            backend = self.backend.name if self.backend else "unnamed"
            # People count steps from 1, as progress and every other error do.
            step = layout.step + 1 if layout and layout.step is not None else None
            where = self.name if step is None else f"{self.name}, step {step}"
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise KernelError(
                f"attention backend {backend} failed in {where}: {lines[0]}",
                component=requirements.component,
                layer=self.name,
                step=step,
                backend=backend,
            ) from error
        return out
