"""FlexAttention without its compiler: torch's function itself, which holds all scores, and gives LSE on any CPU."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from safelight_stand_ins.recorded import Call, Recorder
from safelight_stand_ins.stand_in import StandIn

FUNCTION = "torch:torch.nn.attention.flex_attention.flex_attention"


def uncompiled(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any, scale: float | None, enable_gqa: bool, return_aux: Any
) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it advises to compile it
        return flex_attention(
            query, key, value, score_mod=score_mod, scale=scale, enable_gqa=enable_gqa, return_aux=return_aux
        )


class WithoutCompiler(StandIn):
    """A stand-in inside which compiling gives back the recorded function, uncompiled."""

    @contextmanager
    def installed(self) -> Iterator[list[Call]]:
        recorder = Recorder()
        function = recorder.function(FUNCTION, uncompiled)
        compile_ = torch.compile

        def compiled(model: Any, **options: Any) -> Any:
            if model is not flex_attention:  # torch's own use, inside the function
                return compile_(model, **options)
            assert options["fullgraph"], "it may fall back to no compilation"
            return function

        torch.compile = compiled
        try:
            yield recorder.calls
        finally:
            torch.compile = compile_


STAND_INS = (
    WithoutCompiler(
        name="torch 2.13, not compiled", backend="flex", machine="h100", modules=lambda recorder: {}, packages={}
    ),
)
