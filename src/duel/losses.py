"""What is minimised: InfoNCE and NT-Xent against a memory, and the cosine loss without negatives.

Pure functions of embeddings. All of them normalise their inputs and compute in float32 even under autocast (a bf16
logit at temperature 0.1 is off by up to 0.04), read nothing back to the host and are safe inside a CUDA graph.
`blocked` marks pairs that must not be negatives: an item is never its own negative.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

#: A logit that counts for nothing. Not -inf, of which a row where nothing counts would make NaN gradients.
NEVER = -1e30


def unit(vectors: Tensor) -> Tensor:
    """Rows scaled to unit length, float32: (n, d) -> (n, d)."""
    return F.normalize(vectors.float(), dim=-1)


def info_nce(
    query: Tensor,
    key: Tensor,
    negatives: Tensor,
    *,
    temperature: float | Tensor,
    blocked: Tensor | None = None,
    in_batch: bool = False,
    ids: Tensor | None = None,
) -> Tensor:
    """InfoNCE, the loss of MoCo: each query against its own key and the negatives.

    Args:
        query: (b, d); receives the gradient.
        key: (b, d), the positives; no gradient.
        negatives: (n, d), the memory; no gradient. n may be 0 if `in_batch`.
        temperature: > 0; divides the cosines.
        blocked: bool (b, n); True where negative j is not to be used for query i.
        in_batch: the other keys of the batch are negatives too.
        ids: int64 (b,); with `in_batch`, items of the same id are not negatives of one another.

    Returns:
        The mean over the batch, a float32 scalar.
    """
    with torch.autocast(query.device.type, enabled=False):
        query, key = unit(query) / temperature, unit(key.detach())
        others = [_against(query, negatives, blocked)]
        if in_batch:
            same = _same_item(query.shape[0], query.device, ids)  # its own key is the positive already
            others.append((query @ key.T).masked_fill(same, NEVER))
        return _mean_loss((query * key).sum(dim=1), others)


def nt_xent(
    z1: Tensor,
    z2: Tensor,
    *,
    temperature: float | Tensor,
    negatives: Tensor | None = None,
    blocked: Tensor | None = None,
    ids: Tensor | None = None,
    debias: float | None = None,
) -> Tensor:
    """NT-Xent, the loss of SimCLR: each of 2b views against the other view of its item and all remaining views.

    Args:
        z1, z2: (b, d), the two views of the same items in the same order; both receive the gradient.
        temperature: > 0; divides the cosines.
        negatives: (n, d), further negatives of every row, from a memory; no gradient.
        blocked: bool (b, n); True where negative j is not to be used for item i (both of its views).
        ids: int64 (b,); items of the same id (drawn twice into one batch) are not negatives of one another.
        debias: τ⁺ of the debiased loss (Chuang et al. 2020), the chance that a negative is of the anchor's own class.

    Returns:
        The mean over the 2b views, a float32 scalar.
    """
    with torch.autocast(z1.device.type, enabled=False):
        b = z1.shape[0]
        z = unit(torch.cat([z1, z2]))  # (2b, d)
        anchors = z / temperature
        logits = anchors @ z.T
        positive = torch.cat([logits.diagonal(b), logits.diagonal(-b)])  # (2b,)
        same = _same_item(b, z.device, ids).repeat(2, 2)  # itself, and the positive, which counts apart
        others = [logits.masked_fill(same, NEVER)]
        if negatives is not None:
            others.append(_against(anchors, negatives, None if blocked is None else blocked.repeat(2, 1)))
        if debias is not None:
            return _debiased_loss(positive, torch.cat(others, dim=1), temperature, debias)
        return _mean_loss(positive, others)


def negative_cosine(prediction: Tensor, target: Tensor) -> Tensor:
    """Minus the mean cosine of prediction (b, d) and target (b, d): SimSiam's D(p, z). No gradient to the target.

    BYOL's squared distance of unit vectors is 2 + 2 x this: the same minimum and direction.
    """
    with torch.autocast(prediction.device.type, enabled=False):
        return -(unit(prediction) * unit(target.detach())).sum(dim=1).mean()


def _against(anchors: Tensor, negatives: Tensor, blocked: Tensor | None) -> Tensor:
    """Logits of anchors (m, d), unit rows over the temperature, with the negatives (n, d); `NEVER` where blocked."""
    logits = anchors @ unit(negatives.detach()).T
    return logits if blocked is None else logits.masked_fill(blocked, NEVER)


def _same_item(b: int, device: torch.device, ids: Tensor | None) -> Tensor:
    """bool (b, b): True where two places in the batch hold the same item."""
    if ids is None:
        return torch.eye(b, dtype=torch.bool, device=device)
    return ids.unsqueeze(1) == ids.unsqueeze(0)


def _debiased_loss(positive: Tensor, others: Tensor, temperature: float | Tensor, chance: float) -> Tensor:
    """-log(p / (p + G)): of the negatives' sum G, the share that same-class ones are expected to have is taken off.

    Logits: positive (m,), others (m, n). With N negatives and p = exp(positive),
    G = max((Σ exp(others) - N τ⁺ p) / (1 - τ⁺), N exp(-1/τ)), in logarithms, which no temperature makes overflow.
    """
    count = (others > NEVER).sum(dim=1)
    total = torch.logsumexp(others, dim=1)
    # as a share of the total; of more than all of it nothing is left either
    removed = (positive + (chance * count).log() - total).clamp(max=0.0).exp()
    left = 1 - removed
    estimate = total + left.clamp(min=torch.finfo(left.dtype).tiny).log() - math.log1p(-chance)
    least = count.log() - 1 / temperature
    corrected = torch.maximum(torch.where(left > 0, estimate, least), least)
    return F.softplus(corrected - positive).mean()


def _mean_loss(positive: Tensor, others: list[Tensor]) -> Tensor:
    """-log softmax of the positive (m,) among itself and all others (m, n), averaged over rows; all are logits.

    Each matrix is summed where it is: to put them side by side would be another pass over all of them.
    """
    total = positive
    for logits in others:
        total = torch.logaddexp(total, torch.logsumexp(logits, dim=1))
    return (total - positive).mean()
