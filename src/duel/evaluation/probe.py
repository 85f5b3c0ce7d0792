"""What labels can read off frozen features: the linear probe, and the nearest centroid of a few shots."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypedDict

import torch
from torch import Tensor

from duel.errors import UserError
from duel.evaluation.numerics import exact_matmul, sent, unit_rows
from duel.evaluation.progress import ProgressLike, bars
from duel.evaluation.rates import Rates, check_labels, rates
from duel.evaluation.settings import DEFAULTS
from duel.graph import CAPTURE_ERRORS

# A block is what one CUDA graph holds. 256 steps amortise the launch; 2^26 floats (256 MiB) bound the gathered copy.
_BLOCK_STEPS = 256
_BLOCK_FLOATS = 2**26


class ProbeResult(Rates):
    train_accuracy: float
    """Share of the training images that the final weights classify rightly."""
    diverged: bool
    """The weights are not finite: the learning rate is too large for features of this scale."""


class ShotResult(TypedDict):
    accuracy: float
    """Mean over the draws, 0 to 1."""
    std: float
    """Standard deviation over the draws."""


def linear_probe(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    epochs: int = DEFAULTS.probe_epochs,
    lr: float = DEFAULTS.probe_lr,
    momentum: float = DEFAULTS.probe_momentum,
    weight_decay: float = DEFAULTS.probe_weight_decay,
    batch_size: int = DEFAULTS.probe_batch_size,
    seed: int = DEFAULTS.seed,
    classes: int | None = None,
    device: torch.device | str | None = None,
    progress: ProgressLike = False,
) -> ProbeResult:
    """Test accuracy, after the last epoch, of one linear layer trained by SGD on the features as they come.

    train_x (n, f), test_x (m, f) any float type (float32 is used); train_y (n,), test_y (m,) int64.
    Starts from zero weights, so the seed decides only the order of the images; the order is drawn on the host and is
    the same on every device. On a GPU the steps run from a CUDA graph, and the host waits for none of them.
    """
    classes = classes or int(torch.max(train_y.max().cpu(), test_y.max().cpu())) + 1
    check_labels("train", train_x, train_y, classes)
    check_labels("test", test_x, test_y, classes)
    on = torch.device(device) if device is not None else train_x.device
    train_y, test_y = train_y.to(on), test_y.to(on)
    with exact_matmul(on), torch.no_grad():
        inputs = _with_one(train_x.to(on))
        weights = fit(
            inputs, train_y, classes, epochs=epochs, lr=lr, momentum=momentum, weight_decay=weight_decay,
            batch_size=batch_size, seed=seed, progress=progress,
        )  # fmt: skip
        correct = (_with_one(test_x.to(on)) @ weights.T).argmax(1) == test_y
        train_correct = (inputs @ weights.T).argmax(1) == train_y
    return ProbeResult(
        **rates(correct, test_y, classes),
        train_accuracy=float(train_correct.double().mean()),
        diverged=not bool(weights.isfinite().all()),
    )


def standardised(train_x: Tensor, test_x: Tensor) -> tuple[Tensor, Tensor]:
    """Both less the mean of the training features, each feature over its standard deviation there."""
    mean, spread = train_x.mean(0), train_x.std(0, correction=0)
    spread = torch.where(spread > 0, spread, 1.0)
    return (train_x - mean) / spread, (test_x - mean) / spread


def _with_one(features: Tensor) -> Tensor:
    """(n, f) → float32 (n, f + pad): a column of ones makes the bias a weight; zeros fill up to a multiple of 8.

    The zero columns have zero gradient and stay zero; without them every row would be misaligned for the GPU.
    """
    n, width = features.shape
    padded = features.new_zeros((n, width + 8 - width % 8), dtype=torch.float32)
    padded[:, :width] = features
    padded[:, width] = 1
    return padded


def fit(
    inputs: Tensor,
    labels: Tensor,
    classes: int,
    *,
    epochs: int,
    lr: float,
    momentum: float,
    weight_decay: float,
    batch_size: int,
    seed: int,
    progress: ProgressLike = False,
) -> Tensor:
    """Softmax regression: weights (classes, d) after `epochs` shuffled passes over inputs (n, d) and labels (n,)."""
    n, width = inputs.shape
    weights = inputs.new_zeros(classes, width)
    velocity = torch.zeros_like(weights)
    block = batch_size * max(1, min(_BLOCK_STEPS, _BLOCK_FLOATS // (batch_size * (width + classes))))
    x = inputs.new_empty(min(block, n), width)
    target = inputs.new_empty(len(x), classes)
    every_class = torch.arange(classes, device=inputs.device)

    def steps(size: int) -> Callable[[], None]:
        """SGD with momentum, as torch.optim.SGD defines it, over the first `size` gathered rows."""

        def run() -> None:
            pairs = zip(torch.split(x[:size], batch_size), torch.split(target[:size], batch_size), strict=True)
            for batch, wanted in pairs:
                residual = torch.softmax(batch @ weights.T, dim=1) - wanted  # ∂(cross-entropy)/∂(logits) × b
                velocity.addmm_(residual.T, batch, beta=momentum, alpha=1 / len(batch))
                velocity.add_(weights, alpha=weight_decay)
                weights.add_(velocity, alpha=-lr)

        return run

    runs = {size: steps(size) for size in {min(block, n - start) for start in range(0, n, block)}}
    if inputs.is_cuda:
        runs = {size: _captured(run, (weights, velocity)) for size, run in runs.items()}

    generator = torch.Generator().manual_seed(seed)
    with bars(progress) as shown:
        for _ in shown.track(range(epochs), description="linear probe", total=epochs):
            order = sent(torch.randperm(n, generator=generator), inputs.device)
            for chunk in torch.split(order, block):
                size = len(chunk)
                torch.index_select(inputs, 0, chunk, out=x[:size])
                torch.eq(labels[chunk].unsqueeze(1), every_class, out=target[:size])
                runs[size]()
    return weights


def _captured(run: Callable[[], None], state: tuple[Tensor, ...]) -> Callable[[], None]:
    """`run` as a CUDA graph: thousands of tiny kernels in one launch. `state` is left as it was."""
    before = [tensor.clone() for tensor in state]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # libraries set themselves up on their first call, which cannot be captured
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=CAPTURE_ERRORS):
        run()
    for tensor, value in zip(state, before, strict=True):
        tensor.copy_(value)
    return graph.replay


def nearest_centroid(
    train_x: Tensor,
    train_y: Tensor,
    test_x: Tensor,
    test_y: Tensor,
    *,
    shots: int = DEFAULTS.shots,
    repeats: int = DEFAULTS.shot_repeats,
    seed: int = DEFAULTS.seed,
    classes: int | None = None,
) -> ShotResult:
    """Accuracy with `shots` labelled images per class: a test image takes the class whose mean has the largest cosine.

    Means are of unit features; `repeats` draws without replacement, made on the host so that devices agree.
    """
    classes = classes or int(torch.max(train_y.max().cpu(), test_y.max().cpu())) + 1
    check_labels("train", train_x, train_y, classes)
    check_labels("test", test_x, test_y, classes)
    members = [(train_y.cpu() == label).nonzero().squeeze(1) for label in range(classes)]
    fewest = min(range(classes), key=lambda label: len(members[label]))
    if len(members[fewest]) < shots:
        raise UserError(f"shots must be <= {len(members[fewest])}, the training images of class {fewest}, got {shots}")
    generator = torch.Generator().manual_seed(seed)
    on = train_x.device
    bank, queries, labels = unit_rows(train_x), unit_rows(test_x.to(on)), test_y.to(on)
    draws = [ids[torch.randperm(len(ids), generator=generator)[:shots]] for _ in range(repeats) for ids in members]
    found = []
    with exact_matmul(on), torch.no_grad():
        for drawn in sent(torch.stack(draws).view(repeats, classes, shots), on):
            centroids = unit_rows(bank[drawn].mean(1))  # (classes, shots, f) -> (classes, f)
            found.append(((queries @ centroids.T).argmax(1) == labels).double().mean())
    accuracy = torch.stack(found)
    return ShotResult(accuracy=float(accuracy.mean()), std=float(accuracy.std(correction=0)))
