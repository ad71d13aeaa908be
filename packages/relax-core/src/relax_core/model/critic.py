"""`Qwen35Critic`: the same trunk, with one value per token in place of the vocabulary.

Axes: S scored positions, D hidden.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from relax_kernels import LogProbs

from relax_core.model.arriving import arrived
from relax_core.model.norm import at_least_float32
from relax_core.model.qwen35 import Qwen35Model


class ValueHead(torch.nn.Module):
    """One row [1, D], whole on every rank, that starts at 0: so does every value."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, hidden_size, dtype=dtype))


class Qwen35Critic(Qwen35Model):
    """A Qwen3.5 trunk whose head gives the value of the state in which each token is drawn.

    It takes the place of a policy in the trainer: what is asked for as log-probs of targets are the values
    before them. It has no draft layers.
    """

    def make_head(self) -> ValueHead:
        """The value head."""
        return ValueHead(self.model_config.hidden_size, self.config.params_dtype)

    def token_logprobs(
        self,
        hidden_SD: torch.Tensor,
        target_S: torch.Tensor,
        *,
        temperature: float = 1.0,
        with_entropy: bool = False,
        all_targets: bool = False,
        detach_head: bool = False,
    ) -> LogProbs:
        """Values [S], float32, in the place of log-probs; targets and temperature do not matter."""
        dtype = at_least_float32(hidden_SD.dtype)
        weight_1D: Any = arrived(self.output_layer).weight
        value_S = F.linear(hidden_SD.to(dtype), weight_1D.to(dtype)).squeeze(-1)
        return LogProbs(value_S, None)


@torch.no_grad()
def copy_trunk(critic: Sequence[Qwen35Model], policy: Sequence[Qwen35Model]) -> None:
    """Gives a critic the weights of a policy of the same sizes and layout, all but the head's."""
    for mine, theirs in zip(critic, policy, strict=True):
        trunk = dict(theirs.named_parameters())
        for name, parameter in mine.named_parameters():
            if not name.startswith("output_layer."):
                parameter.copy_(trunk[name])
