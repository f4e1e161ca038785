"""Muon for matrices, Adam for the rest, behind one `step`; the schedule is the caller's.

Muon moves a matrix along the nearest orthogonal matrix to its momentum, so all directions move equally far.
"""

from collections import defaultdict

import torch
from torch import Tensor, nn

MOMENTUM = 0.95
ADAM_BETAS = (0.9, 0.95)
ADAM_EPS = 1e-10


def orthogonal(matrices: Tensor) -> Tensor:
    """About U Vᵀ of each matrix's U S Vᵀ, [n, rows, columns]: an odd polynomial, repeated, draws all of S near 1."""
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x.mT if tall else x


class Optimizer:
    """Its state is a dict of tensors by name, so that it can be saved like weights."""

    def __init__(self, network: nn.Module, muon_rate: float, adam_rate: float, decay: float) -> None:
        self.muon_rate, self.adam_rate, self.decay = muon_rate, adam_rate, decay
        parameters = dict(network.named_parameters())
        matrices = {name for name, p in parameters.items() if p.ndim == 2 and min(p.shape) >= 16}
        matrices.discard("model.embed_tokens.weight")  # a table of rows: most get no gradient in a step
        by_shape = defaultdict(list)
        for name in sorted(matrices):
            by_shape[parameters[name].shape].append(name)
        self.groups = list(by_shape.values())  # matrices of one shape are orthogonalised together
        self.others = [name for name in parameters if name not in matrices]
        self.parameters = parameters
        self.state = {f"momentum.{name}": torch.zeros_like(p) for name, p in parameters.items()}
        self.state |= {f"square.{name}": torch.zeros_like(parameters[name]) for name in self.others}

    @torch.no_grad()
    def step(self, number: int, scale: float) -> None:
        """Step `number` (from 1), with both learning rates times `scale`. Gradients are consumed."""
        nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        for names in self.groups:
            self._muon(names, self.muon_rate * scale)
        self._adam(number, self.adam_rate * scale)
        for parameter in self.parameters.values():
            parameter.grad = None

    def _muon(self, names: list[str], rate: float) -> None:
        parameters = [self.parameters[name] for name in names]
        gradients = [p.grad for p in parameters]
        momenta = [self.state[f"momentum.{name}"] for name in names]
        torch._foreach_lerp_(momenta, gradients, 1 - MOMENTUM)
        looked_ahead = torch._foreach_lerp(gradients, momenta, MOMENTUM)  # Nesterov
        moves = orthogonal(torch.stack(looked_ahead)).float()
        rows, columns = parameters[0].shape
        torch._foreach_mul_(parameters, 1 - rate * self.decay)
        torch._foreach_add_(parameters, list(moves.unbind()), alpha=-rate * max(1, rows / columns) ** 0.5)

    def _adam(self, number: int, rate: float) -> None:
        parameters = [self.parameters[name] for name in self.others]
        gradients = [p.grad for p in parameters]
        momenta = [self.state[f"momentum.{name}"] for name in self.others]
        squares = [self.state[f"square.{name}"] for name in self.others]
        first, second = ADAM_BETAS
        torch._foreach_lerp_(momenta, gradients, 1 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - second)
        spread = torch._foreach_sqrt(torch._foreach_div(squares, 1 - second**number))
        torch._foreach_add_(spread, ADAM_EPS)
        torch._foreach_addcdiv_(parameters, momenta, spread, -rate / (1 - first**number))
