"""AdamW on float32 master copies, for parameters that live in bfloat16.

A bfloat16 parameter keeps 8 significant bits: at a learning rate of 1e-4 most updates are smaller than
half a unit in its last place and would be rounded away. The masters collect them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")


class MasterAdamW:
    """torch's AdamW over masters, with clipping, a cosine schedule and a guard against non-finite steps.

    Args:
        parameters: name → trainable parameter, any float dtype; names key the saved state.
        learning_rate: peak, reached after warm-up.
        total_steps: optimiser steps of the whole run; the schedule ends there.
        warmup: fraction of `total_steps` with a linearly rising rate.
        final_learning_rate: fraction of the peak at the last step.
        weight_decay: decoupled, per step and unit of learning rate.
        max_gradient_norm: global L2 norm above which gradients are scaled down.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        learning_rate: float,
        total_steps: int,
        warmup: float,
        final_learning_rate: float,
        weight_decay: float,
        max_gradient_norm: float,
    ) -> None:
        assert parameters, "nothing to train"
        self._parameters = dict(parameters)
        self._masters = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}
        self._adam = torch.optim.AdamW(
            self._masters.values(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=weight_decay, fused=True
        )
        self._peak = learning_rate
        self._total = max(1, total_steps)
        self._warmup = max(1, round(warmup * self._total))
        self._final = final_learning_rate
        self._max_norm = max_gradient_norm
        self.steps = 0
        self.skipped = 0

    def learning_rate(self, step: int) -> float:
        """Rate for 0-based `step`: linear warm-up, then cosine down to the final fraction."""
        if step < self._warmup:
            return self._peak * (step + 1) / self._warmup
        progress = min(1.0, (step - self._warmup) / max(1, self._total - self._warmup))
        cosine = 0.5 * (1.0 + math.cos(math.pi * progress))
        return self._peak * (self._final + (1.0 - self._final) * cosine)

    @torch.no_grad()
    def step(self) -> float:
        """Apply and clear the gradients; returns their global L2 norm before clipping.

        A non-finite norm skips the update and counts in `skipped`: one NaN through a clipped update
        would poison every weight. The schedule counts applied steps only.
        """
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            self._masters[name].grad = None if gradient is None else gradient.float()
            parameter.grad = None
        norm = float(torch.nn.utils.clip_grad_norm_(self._masters.values(), self._max_norm))
        if not math.isfinite(norm):
            self.skipped += 1
            return norm
        for group in self._adam.param_groups:
            group["lr"] = self.learning_rate(self.steps)
        self._adam.step()
        self.steps += 1
        self._publish()
        return norm

    def state(self) -> dict[str, Tensor]:
        """Masters, moments and counters as plain tensors, for safetensors."""
        tensors = {"counters": torch.tensor([self.steps, self.skipped])}
        for name, master in self._masters.items():
            tensors[f"master.{name}"] = master.detach()
            moments = self._adam.state.get(master, {})
            tensors.update({f"{moment}.{name}": moments[moment] for moment in MOMENTS if moment in moments})
        return tensors

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore `state()`; the parameters take their masters' values. Raises KeyError on other names."""
        self.steps, self.skipped = (int(value) for value in tensors["counters"])
        for name, master in self._masters.items():
            master.copy_(tensors[f"master.{name}"])
            if f"{MOMENTS[0]}.{name}" in tensors:
                moments = {moment: tensors[f"{moment}.{name}"].clone() for moment in MOMENTS}
                # Each Adam step counts one applied update; parameters never skip alone.
                self._adam.state[master] = {"step": torch.tensor(float(self.steps)), **moments}
        self._publish()

    @torch.no_grad()
    def _publish(self) -> None:
        for name, parameter in self._parameters.items():
            parameter.copy_(self._masters[name])
