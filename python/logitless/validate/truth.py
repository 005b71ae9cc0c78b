# SPDX-License-Identifier: Apache-2.0
"""What a case is to give: autograd over whole logits, in float64 and, for comparison, in x's dtype.

Uses nothing of the package but the case.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .cases import Case

__all__ = ["Expected", "expected"]


@dataclass
class Expected:
    """Results over the whole vocabulary; those of ignored tokens and of padding are 0."""

    loss: Tensor  # [M], or [] where it is reduced
    lse: Tensor  # [M]
    entropy: Tensor  # [M]
    dx: Tensor  # [M, H]
    dw: Tensor  # [rows, H]
    largest: float  # max of |z| and |z/τ|
    # How far dX [M] and dW [rows] move per row and nat of error in entropy; 0 without its gradient.
    dx_slope: Tensor
    dw_slope: Tensor


def expected(case: Case, dtype: torch.dtype, device: str = "cpu") -> Expected:
    """Evaluate a case by plain PyTorch: the product in `dtype`, the rest in at least float32."""
    live = case.live.nonzero()[:, 0]
    # Leaves hold only what counts: NaN in ignored tokens and in padding never enters.
    x = case.x[live].to(device, dtype).requires_grad_()
    weight = case.weight[: case.vocab_size].to(device, dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    z = (x @ weight.T).to(wide)
    tau = torch.as_tensor(case.temperature, device=device, dtype=wide).expand(len(case.live))
    tau = tau[live.to(device)]
    s = z / tau[:, None]
    log_p = s.log_softmax(1)
    target = case.target[live].long().to(device)
    nll = -log_p.gather(1, target[:, None])[:, 0]
    if dtype == torch.float64:
        # The truth of a confident row is 1 − p, which p − 1 loses: log(1 + Σ_rest/e^s_y) has it.
        rest = s.scatter(1, target[:, None], -torch.inf).logsumexp(1)
        above = rest - s.gather(1, target[:, None])[:, 0]
        nll = torch.logaddexp(above, torch.zeros_like(above))
    results = {
        "loss": nll,
        "lse": s.logsumexp(1),
        "entropy": -(log_p.exp() * log_p).sum(1),
    }
    total = sum(
        (
            (results[name].sum() * _share(case, name) * grad.to(device, wide))
            if grad.dim() == 0
            else (results[name] * grad[live].to(device, wide)).sum()
            for name, grad in case.upstream.items()
        ),
        start=torch.zeros((), device=device, dtype=wide),
    )
    if len(live):
        dx, dw = torch.autograd.grad(total, (x, weight))
    else:
        dx, dw = torch.zeros_like(x), torch.zeros_like(weight)
    dx_slope, dw_slope = x.new_zeros(len(live)), weight.new_zeros(len(weight))
    if "entropy" in case.upstream:
        # dz = p·(… − entropy)·h/τ: what is wrong in entropy comes back times p·h/τ.
        h = (case.upstream["entropy"][live].to(device, wide) / tau).abs()
        p = log_p.detach().exp()
        dx_slope = h * (p @ weight.detach().to(wide).norm(dim=1))
        dw_slope = ((p * h[:, None]).square().T @ x.detach().to(wide).square().sum(1)).sqrt()
    tokens, padding = len(case.target), len(case.weight) - case.vocab_size
    full = {
        name: torch.zeros(tokens, dtype=wide).index_copy(0, live, values.detach().cpu())
        for name, values in results.items()
    }
    loss = full["loss"] if case.reduction == "none" else full["loss"].sum() * _share(case, "loss")
    return Expected(
        loss=loss,
        lse=full["lse"],
        entropy=full["entropy"],
        dx=torch.zeros(case.x.shape, dtype=dtype).index_copy(0, live, dx.cpu()),
        dw=torch.nn.functional.pad(dw.cpu(), (0, 0, 0, padding)),
        largest=max(float(part.detach().abs().max()) for part in (z, s)) if len(live) else 0.0,
        dx_slope=torch.zeros(tokens, dtype=wide).index_copy(0, live, dx_slope.cpu().to(wide)),
        dw_slope=torch.nn.functional.pad(dw_slope.cpu().to(wide), (0, padding)),
    )


def _share(case: Case, name: str) -> float:
    """Return the weight of a token in a reduced loss."""
    return 1.0 / max(1, int(case.live.sum())) if name == "loss" and case.reduction == "mean" else 1
