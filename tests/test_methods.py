"""Each method against a plain computation, and where its gradients go."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from duel.batchnorm import SplitBatchNorm, ViewBatchNorm, prepare_views, split_batchnorm, views_apart
from duel.encoders import Encoder, encoder
from duel.errors import UserError
from duel.methods import METHODS, Method, MoCo, SimCLR, SimSiam, build, settings_of
from duel.modes import evaluating

B, DIM = 8, 16


class Memory(nn.Module):
    """What a method asks of `WorkingMemory`."""

    def __init__(self, n: int = 12, seed: int = 5) -> None:
        super().__init__()
        rows = torch.randn(n, DIM, generator=torch.Generator().manual_seed(seed))
        self.register_buffer("rows", nn.functional.normalize(rows, dim=1).requires_grad_())
        self.register_buffer("ids", torch.arange(n))

    def negatives(self, *, exclude_ids: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        return self.rows, None if exclude_ids is None else exclude_ids[:, None] == self.ids[None, :]


def net(norm: Any = "hidden", **kwargs: Any) -> Encoder:
    torch.manual_seed(0)
    return encoder("convnet", image_size=8, dim=DIM, projection="mlp", hidden=32, norm=norm, **kwargs)


def views(b: int = B, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(b, 3, 8, 8, generator=generator)
    return images, images + 0.3 * torch.randn(b, 3, 8, 8, generator=generator)


def make(name: str, **settings: Any) -> Method:
    if name == "moco":
        settings.setdefault("memory", Memory())
    return build(name, net(), **settings)


def cos(a: Tensor, b: Tensor) -> float:
    a, b = a.detach().double(), b.detach().double()
    return float(a @ b / (a.norm() * b.norm()))


def log_loss(positive: float, negatives: list[float], temperature: float) -> float:
    return -positive / temperature + math.log(sum(math.exp(c / temperature) for c in [positive, *negatives]))


def mean(values: Any) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)


# The losses --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_memory", [False, True])
def test_simclr_loss(with_memory: bool) -> None:
    memory, ids = (Memory(), torch.arange(3, 3 + B)) if with_memory else (None, None)
    method = SimCLR(net(), temperature=0.5, memory=memory)
    v1, v2 = views()
    with torch.no_grad():
        z = copy.deepcopy(method.encoder)(torch.cat([v1, v2]))  # BatchNorm over all 2b images
    wanted = []
    for i in range(2 * B):
        other = (i + B) % (2 * B)
        negatives = [cos(z[i], z[j]) for j in range(2 * B) if j not in (i, other)]
        if memory is not None and ids is not None:
            negatives += [cos(z[i], memory.rows[j]) for j in range(12) if j != ids[i % B]]
        wanted.append(log_loss(cos(z[i], z[other]), negatives, 0.5))
    out = method(v1, v2, ids)
    assert out.loss.item() == pytest.approx(mean(wanted), rel=1e-4)
    assert torch.allclose(out.embeddings, nn.functional.normalize(z[:B]), atol=1e-5)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("in_batch", [False, True])
def test_moco_loss(symmetric: bool, in_batch: bool) -> None:
    memory, ids = Memory(), torch.arange(3, 3 + B)
    method = MoCo(net(), memory=memory, temperature=0.2, symmetric=symmetric, in_batch_negatives=in_batch)
    _differ(method.key_encoder)
    v = views()
    with torch.no_grad():
        q = [copy.deepcopy(method.encoder)(x) for x in v]
        k = [copy.deepcopy(method.key_encoder)(x) for x in v]

    def one_way(query: Tensor, key: Tensor) -> float:
        losses = []
        for i in range(B):
            negatives = [cos(query[i], memory.rows[j]) for j in range(12) if j != ids[i]]
            if in_batch:
                negatives += [cos(query[i], key[j]) for j in range(B) if j != i]
            losses.append(log_loss(cos(query[i], key[i]), negatives, 0.2))
        return mean(losses)

    wanted = mean([one_way(q[0], k[1]), one_way(q[1], k[0])]) if symmetric else one_way(q[0], k[1])
    out = method(*v, ids)
    assert out.loss.item() == pytest.approx(wanted, rel=1e-4)
    assert torch.allclose(out.embeddings, nn.functional.normalize(k[1]), atol=1e-5)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", ["simsiam", "byol"])
def test_losses_without_negatives(name: str, symmetric: bool) -> None:
    method: Any = make(name, symmetric=symmetric)
    if name == "byol":
        _differ(method.target)
    v = views()
    with torch.no_grad():
        z = [copy.deepcopy(method.encoder)(x) for x in v]
        p = [copy.deepcopy(method.predictor)(x) for x in z]
        t = [copy.deepcopy(method.target)(x) for x in v] if name == "byol" else z
    there, back = (-mean(map(cos, p[i], t[1 - i])) for i in (0, 1))
    out = method(*v)
    assert out.loss.item() == pytest.approx(mean([there, back]) if symmetric else there, rel=1e-4)
    assert torch.allclose(out.embeddings.norm(dim=1), torch.ones(B))


def test_an_item_drawn_twice_is_not_its_own_negative() -> None:
    v1, v2 = views()
    ids = torch.arange(B)
    ids[3] = ids[0]
    for method in (SimCLR(net()), MoCo(net(), in_batch_negatives=True)):
        with evaluating(method):
            assert method(v1, v2, ids).loss < method(v1, v2, torch.arange(B)).loss


# Gradients ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("name", METHODS)
def test_gradients_reach_exactly_what_is_trained(name: str, symmetric: bool) -> None:
    memory = Memory()
    settings = {"memory": memory} if name in ("moco", "simclr") else {}
    method: Any = make(name, **settings, **({} if name == "simclr" else {"symmetric": symmetric}))
    v1, v2 = (x.requires_grad_() for x in views())
    out = method(v1, v2, torch.arange(B))
    out.loss.backward()
    learning = {"encoder", "predictor"} if hasattr(method, "predictor") else {"encoder"}
    for label, parameter in method.named_parameters():
        if label.split(".")[0] in learning:
            assert parameter.grad is not None, label
            assert parameter.grad.abs().sum() > 0, label
        else:
            assert not parameter.requires_grad, label
            assert parameter.grad is None, label
    assert memory.rows.grad is None
    assert not out.embeddings.requires_grad
    # The second view is a target only, unless the loss is symmetric.
    assert v1.grad is not None
    assert (v2.grad is not None) == (name == "simclr" or symmetric)
    trained = {id(p) for p in method.trainable_parameters()}
    assert trained == {id(p) for label, p in method.named_parameters() if label.split(".")[0] in learning}


def test_simsiam_treats_the_predicted_side_as_a_constant() -> None:
    method = SimSiam(net())
    plain = copy.deepcopy(method)
    v1, v2 = views()
    method(v1, v2).loss.backward()
    with torch.no_grad():
        constants = [copy.deepcopy(plain.encoder)(v) for v in (v1, v2)]
    total = torch.zeros(())
    for view, constant in ((v1, constants[1]), (v2, constants[0])):
        prediction = plain.predictor(plain.encoder(view))
        total = total - nn.functional.cosine_similarity(prediction, constant).mean() / 2
    total.backward()
    for got, wanted in zip(method.parameters(), plain.parameters(), strict=True):
        assert got.grad is not None
        assert torch.allclose(got.grad, wanted.grad, atol=1e-6)


# Momentum copies ---------------------------------------------------------------------------------------------


def _differ(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(7)))


@pytest.mark.parametrize(
    ("name", "settings", "progress", "momentum"),
    [
        ("moco", {"momentum": 0.9}, 0.5, 0.9),
        ("byol", {"momentum": 0.9, "momentum_schedule": False}, 0.5, 0.9),
        ("byol", {"momentum": 0.9}, 0.0, 0.9),
        ("byol", {"momentum": 0.9}, 0.25, 1 - 0.1 * (math.cos(math.pi / 4) + 1) / 2),
        ("byol", {"momentum": 0.9}, 1.0, 1.0),
    ],
)
@pytest.mark.parametrize("as_tensor", [False, True])
def test_momentum_update(
    name: str, settings: dict[str, Any], progress: float, momentum: float, as_tensor: bool
) -> None:
    method = make(name, **settings)
    _differ(method.encoder)
    slow = method.memory_encoder
    before = [p.clone() for p in slow.parameters()]
    method.after_step(torch.tensor(progress) if as_tensor else progress)
    for new, old, fast in zip(slow.parameters(), before, method.encoder.parameters(), strict=True):
        assert torch.allclose(new, momentum * old + (1 - momentum) * fast, atol=1e-6)
        assert not new.requires_grad


@pytest.mark.parametrize("name", ["moco", "byol"])
def test_momentum_copies_keep_batchnorm_statistics_of_their_own(name: str) -> None:
    method = make(name, symmetric=False)
    _differ(method.memory_encoder)
    v1, v2 = views()
    method(v1, v2 + 3)
    fast, slow = (dict(m.named_buffers()) for m in (method.encoder, method.memory_encoder))
    kept = {key: value.clone() for key, value in slow.items()}
    method.after_step(0.5)
    assert not torch.allclose(fast["backbone.features.1.running_mean"], slow["backbone.features.1.running_mean"])
    assert all(torch.equal(value, kept[key]) for key, value in slow.items())


# The memory and embeddings -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_the_memory_is_no_part_of_the_module(name: str) -> None:
    memory = Memory()
    method = make(name, memory=memory)
    assert method.memory is memory
    method.memory = other = Memory(seed=6)
    assert method.memory is other
    assert not any("memory" in key for key in method.state_dict())
    assert memory not in list(method.modules())


@pytest.mark.parametrize("name", METHODS)
def test_embed_depends_on_the_item_alone_and_changes_nothing(name: str) -> None:
    method = make(name)
    method.encoder.backbone.eval()  # a part frozen by the user stays so
    modes = [m.training for m in method.modules()]
    images, _ = views(6)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    z = method.embed(images)
    assert z.shape == (6, DIM)
    assert not z.requires_grad
    assert torch.allclose(z.norm(dim=1), torch.ones(6))
    assert torch.allclose(method.embed(images[:1]), z[:1], atol=1e-6)
    assert all(torch.equal(value, before[key]) for key, value in method.state_dict().items())
    assert [m.training for m in method.modules()] == modes


@pytest.mark.parametrize("name", ["moco", "byol"])
def test_embed_uses_the_slow_copy(name: str) -> None:
    method = make(name)
    images, _ = views()
    before = method.embed(images)
    _differ(method.encoder)
    assert torch.equal(method.embed(images), before)
    _differ(method.memory_encoder)
    assert not torch.allclose(method.embed(images), before)


def test_moco_with_the_working_memory() -> None:
    memories = pytest.importorskip("duel.memory")
    memory = memories.WorkingMemory(4 * B, DIM, policy="fifo", payload={"id": ((), torch.int64)})
    method = MoCo(net(), memory=memory, in_batch_negatives=False)
    with pytest.raises(UserError, match="no negatives"):
        method(*views())
    for step in range(5):
        memory.update(method.embed(views(seed=step)[0]), id=torch.arange(step * B, (step + 1) * B))
    v1, v2 = views(seed=4)
    ids = torch.arange(4 * B, 5 * B)  # these are in the memory
    out = method(v1, v2, ids)
    out.loss.backward()
    slots = memory.update(out.embeddings, id=ids + 100)
    assert torch.allclose(memory.embeddings[slots], out.embeddings, atol=1e-6)
    with torch.no_grad(), evaluating(method):
        assert method(v1, v2, memory["id"][slots]).loss < method(v1, v2, ids + 1000).loss


# BatchNorm ---------------------------------------------------------------------------------------------------


def test_split_batchnorm_normalises_each_group_and_averages_their_statistics() -> None:
    plain = nn.Sequential(nn.BatchNorm2d(3))
    with torch.no_grad():
        plain[0].weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
        plain[0].running_mean.fill_(0.5)
    split = copy.deepcopy(plain)
    split_batchnorm(split, 4)
    assert isinstance(split[0], SplitBatchNorm)
    x = torch.randn(8, 3, 5, 5) * 2 + 1
    parts, means, variances = [], [], []
    for part in x.chunk(4):
        one = copy.deepcopy(plain)
        parts.append(one(part))
        means.append(one[0].running_mean)
        variances.append(one[0].running_var)
    assert torch.allclose(split(x), torch.cat(parts), atol=1e-6)
    assert torch.allclose(split[0].running_mean, torch.stack(means).mean(0), atol=1e-6)
    assert torch.allclose(split[0].running_var, torch.stack(variances).mean(0), atol=1e-6)
    plain.load_state_dict(split.state_dict())
    assert torch.equal(plain.eval()(x), split.eval()(x))
    for module in (plain, split):  # re-estimation over whole batches
        module.train()
        module[0].momentum = None
        module[0].reset_running_stats()
    assert torch.equal(plain(x), split(x))
    assert torch.equal(plain[0].running_var, split[0].running_var)


def test_views_in_one_pass_are_as_good_as_passes_of_their_own() -> None:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3), nn.BatchNorm2d(2))
    apart = nn.Sequential(*layers).double()
    with torch.no_grad():
        for norm in (apart[1], apart[4]):
            norm.weight.normal_()
            norm.bias.normal_()
    once = copy.deepcopy(apart)
    assert prepare_views(once)
    assert isinstance(once[4], ViewBatchNorm)
    batches = [torch.randn(5, 3, 8, 8, dtype=torch.float64) * scale + scale for scale in (1, 3)]
    inputs = torch.cat(batches).requires_grad_()
    with views_apart(once, 2):
        found = once(inputs)
    alone = [batch.requires_grad_() for batch in batches]
    wanted = torch.cat([apart(batch) for batch in alone])
    assert torch.allclose(found, wanted, atol=1e-12)
    towards = torch.randn_like(found)
    (found * towards).sum().backward()
    (wanted * towards).sum().backward()
    assert torch.allclose(inputs.grad, torch.cat([batch.grad for batch in alone]), atol=1e-12)
    for one, two in zip(once.parameters(), apart.parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, atol=1e-11)
    for name, buffer in apart.named_buffers():
        if "num_batches" not in name:
            assert torch.allclose(once.get_buffer(name), buffer, atol=1e-12), name
    # afterwards, and in evaluation, it is plain BatchNorm
    assert torch.equal(once.eval()(inputs), once(inputs))
    assert torch.allclose(once.eval()(inputs), apart.eval()(inputs), atol=1e-12)
    assert torch.allclose(once.train()(inputs), apart.train()(inputs), atol=1e-12)
    for module in (once, apart):  # statistics of many batches count them
        for norm in (module[1], module[4]):
            norm.reset_running_stats()
            norm.momentum = None
        for batch in batches:
            module(batch)
    assert all(torch.allclose(*pair, atol=1e-12) for pair in zip(once.buffers(), apart.buffers(), strict=True))
    assert not prepare_views(nn.Sequential(nn.BatchNorm2d(3), nn.BatchNorm1d(3)))
    assert not prepare_views(nn.Linear(2, 2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_views_in_one_pass_have_gradients_when_compiled(dtype: torch.dtype) -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
    prepare_views(network)
    compiled, images = copy.deepcopy(network), torch.randn(8, 3, 6, 6)
    compiled.compile(backend="aot_eager", dynamic=False)
    for one in (network, compiled):
        with views_apart(one, 2), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            one(images).float().square().sum().backward()
    for one, two in zip(network.parameters(), compiled.parameters(), strict=True):
        assert two.grad.abs().max() > 0
        assert torch.allclose(one.grad, two.grad, rtol=1e-2, atol=1e-2 * float(one.grad.abs().max()))


@pytest.mark.parametrize("name", ["moco", "simsiam", "byol"])
def test_methods_can_take_both_views_at_once(name: str) -> None:
    """The same loss, gradients and statistics as with a pass for each view."""
    methods = []
    for once in (False, True):
        torch.manual_seed(0)
        method = make(name, symmetric=True)
        if once:
            for part in method.modules():
                if isinstance(part, Encoder):
                    part.take_views_at_once()
            assert method.encoder.one_pass
        methods.append(method)
    v1, v2 = views()
    losses = []
    for method in methods:
        out = method(v1, v2)
        out.loss.backward()
        losses.append(out)
    assert torch.allclose(losses[0].loss, losses[1].loss, atol=1e-5)
    assert torch.allclose(losses[0].embeddings, losses[1].embeddings, atol=1e-5)
    for one, two in zip(methods[0].trainable_parameters(), methods[1].trainable_parameters(), strict=True):
        assert torch.allclose(one.grad, two.grad, atol=1e-4)
    for (which, one), two in zip(methods[0].named_buffers(), methods[1].buffers(), strict=True):
        assert "num_batches" in which or torch.allclose(one, two, atol=1e-4), which


def test_keys_are_normalised_with_other_images_than_queries() -> None:
    groups = 4
    method = MoCo(net(), memory=Memory(), batchnorm_groups=groups)
    assert sum(isinstance(m, SplitBatchNorm) for m in method.key_encoder.modules()) == 4
    images, _ = views()
    plain = net()  # the same weights, ordinary BatchNorm
    wanted = torch.empty(B, DIM)
    with torch.no_grad():
        # Like cards: one image of every query group in turn.
        dealt = [i * (B // groups) + j for j in range(B // groups) for i in range(groups)]
        for group in range(groups):
            members = dealt[group * (B // groups) : (group + 1) * (B // groups)]
            wanted[members] = copy.deepcopy(plain)(images[members])
        got = method._keys(images).projections
    assert torch.allclose(got, wanted, atol=1e-5)
    queries = [set(range(g * 2, g * 2 + 2)) for g in range(groups)]
    assert all(len(set(dealt[g * 2 : g * 2 + 2]) & q) <= 1 for g in range(groups) for q in queries)
    with pytest.raises(UserError, match="multiple of batchnorm_groups 4, got 6"):
        method(*views(6))


def test_keys_by_running_statistics_depend_on_the_image_alone() -> None:
    method = MoCo(net(), memory=Memory(), momentum=0.9, key_batchnorm="running")
    v1, v2 = views()
    out = method(v1, v2)
    assert torch.allclose(out.embeddings, method.embed(v2), atol=1e-6)
    assert torch.allclose(out.embeddings[:2], method(v1[:2], v2[:2]).embeddings, atol=1e-6)
    name = "backbone.features.1.running_mean"
    fast, slow = (m.get_buffer(name) for m in (method.encoder, method.key_encoder))
    assert bool((slow == 0).all())
    method.after_step(0.5)
    assert torch.allclose(slow, 0.1 * fast)
    assert bool(slow.abs().sum() > 0)


def test_both_views_in_one_pass_where_nothing_mixes_images() -> None:
    assert SimCLR(net()).joint
    assert not SimSiam(net()).joint
    assert SimSiam(net(), joint=True).joint


@pytest.mark.parametrize("asked", [False, True])
def test_an_encoder_without_batchnorm_takes_both_views_at_once_and_its_predictor_each_by_itself(asked: bool) -> None:
    method = SimSiam(encoder("vit_tiny_patch16_224", image_size=8, dim=DIM), joint=asked)
    seen: dict[str, list[int]] = {"backbone": [], "predictor": []}
    method.encoder.backbone.register_forward_hook(lambda _, given, __: seen["backbone"].append(len(given[0])))
    norms = [part for part in method.predictor.modules() if isinstance(part, torch.nn.BatchNorm1d)]
    assert norms
    norms[0].register_forward_hook(lambda _, given, __: seen["predictor"].append(len(given[0])))
    assert method(*views(2)).loss.isfinite()
    assert seen == {"backbone": [4], "predictor": [4] if asked else [2, 2]}


# Capture -----------------------------------------------------------------------------------------------------


class NoHostReads(TorchDispatchMode):
    """Fails on what a CUDA graph cannot capture: numbers read back, shapes that depend on data, host tensors."""

    forbidden = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "unique", "equal.default")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = "index" in str(func) and any(
            i is not None and i.dtype == torch.bool for group in args if isinstance(group, list | tuple) for i in group
        )
        if by_mask or any(word in str(func) for word in self.forbidden):
            raise AssertionError(f"{func} inside a training step")
        return func(*args, **(kwargs or {}))


def test_the_detector_detects() -> None:
    x = torch.ones(2)
    for guilty in (lambda: x.sum().item(), lambda: x[x > 0], lambda: torch.tensor(1.0)):
        with pytest.raises(AssertionError, match="inside a training step"), NoHostReads():
            guilty()


ALL_FORMS = [
    ("simclr", {"memory": Memory()}),
    ("moco", {"symmetric": True, "in_batch_negatives": True}),
    ("moco", {"batchnorm_groups": 2}),
    ("moco", {"key_batchnorm": "running"}),
    ("simsiam", {}),
    ("byol", {}),
]


@pytest.mark.parametrize(("name", "settings"), ALL_FORMS)
def test_a_step_reads_nothing_back(name: str, settings: dict[str, Any]) -> None:
    method = make(name, **settings)
    v1, v2 = views()
    ids, progress = torch.arange(B), torch.tensor(0.3)
    with NoHostReads():
        method(v1, v2, ids).loss.backward()
        method.after_step(progress)
        method.embed(v1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "settings"), ALL_FORMS)
def test_a_step_captures_as_a_cuda_graph(name: str, settings: dict[str, Any]) -> None:
    memory = Memory().cuda()
    method = make(name, **{**settings, **({"memory": memory} if name in ("simclr", "moco") else {})}).cuda()
    v1, v2 = (v.cuda() for v in views())
    ids, progress = torch.arange(B, device="cuda"), torch.full((), 0.3, device="cuda")
    optimizer = torch.optim.Adam(method.trainable_parameters(), lr=1e-3, capturable=True)

    def step() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss: Tensor = method(v1, v2, ids).loss
        loss.backward()
        optimizer.step()
        method.after_step(progress)
        return loss

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    first = loss.item()
    for _ in range(30):
        graph.replay()
    assert loss.item() < first


# Training, settings, mistakes --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "settings"), ALL_FORMS)
def test_a_few_steps_lower_the_loss(name: str, settings: dict[str, Any]) -> None:
    method = make(name, **settings)
    groups = method.parameter_groups(1e-4, decay_norm_and_bias=False)
    optimizer = torch.optim.SGD(groups, lr=0.05, momentum=0.9)
    losses = []
    for step in range(20):
        out = method(*views(16, seed=0), None)
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        method.after_step(step / 20)
        losses.append(out.loss.item())
    assert losses[-1] < losses[0] - 0.05


def test_parameter_groups_spare_norms_and_biases_if_asked() -> None:
    method = make("byol")
    (everything,) = method.parameter_groups(0.1)
    decayed, spared = method.parameter_groups(0.1, decay_norm_and_bias=False)
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert len(decayed["params"]) + len(spared["params"]) == len(everything["params"])
    norms = [
        m
        for m in [*method.encoder.modules(), *method.predictor.modules()]
        if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d)
    ]
    biases = [m.bias for m in [*method.encoder.modules(), *method.predictor.modules()] if isinstance(m, nn.Linear)]
    wanted = {id(p) for m in norms for p in m.parameters()} | {id(b) for b in biases if b is not None}
    assert {id(p) for p in spared["params"]} == wanted


def test_settings_of() -> None:
    assert settings_of("moco")["temperature"] == 0.2
    assert set(settings_of("simclr")) == {
        "temperature", "temperature_high", "temperature_cycles", "debias", "memory", "joint"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("mocco", {}, r"unknown method 'mocco'; did you mean 'moco'\?"),
        ("simclr", {"temprature": 1}, r"unknown setting of simclr 'temprature'; did you mean 'temperature'\?"),
        ("simclr", {"temperature": 0.0}, r"temperature must be > 0, got 0"),
        ("moco", {"temperature": float("nan")}, r"temperature must be > 0, got nan"),
        ("moco", {"momentum": 1.5}, r"momentum must be >= 0 and <= 1, got 1.5"),
        ("moco", {"key_batchnorm": "none"}, r"key_batchnorm must be 'batch' or 'running', got 'none'"),
        ("moco", {"batchnorm_groups": 0}, r"batchnorm_groups must be >= 1, got 0"),
        ("byol", {"predictor_hidden": 0}, r"predictor_hidden must be >= 1, got 0"),
    ],
)
def test_mistakes_are_named(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(name, net(), **settings)


def test_moco_without_negatives_says_what_to_do() -> None:
    with pytest.raises(UserError, match=r"memory is missing or empty.*in_batch_negatives=True"):
        MoCo(net())(*views())


def test_a_batchnorm_that_cannot_be_split_is_named() -> None:
    with pytest.raises(UserError, match="batchnorm_groups must be 1 for this backbone"):
        MoCo(encoder("mobilenetv3_small_050", dim=DIM), memory=Memory(), batchnorm_groups=2)


def test_a_method_must_say_what_its_loss_is() -> None:
    with pytest.raises(TypeError, match="forward"):
        Method(net())  # type: ignore[abstract]


@pytest.mark.parametrize(
    ("name", "settings"), [*ALL_FORMS, ("byol", {"symmetric": False}), ("simsiam", {"joint": True})]
)
def test_a_step_gives_the_features_that_its_embeddings_were_projected_from(name: str, settings: dict[str, Any]) -> None:
    method = make(name, **settings)
    with evaluating(method), torch.no_grad():
        out = method(*views(), torch.arange(B))
        projected = nn.functional.normalize(method.memory_encoder.projection(out.features))
    assert torch.allclose(projected, out.embeddings, atol=1e-5)
    assert out.features.shape == (B, method.encoder.feature_dim)
    assert not method(*views(), torch.arange(B)).features.requires_grad


def test_features_and_projection_come_from_one_pass() -> None:
    method = make("moco")
    passes = []
    method.memory_encoder.backbone.register_forward_hook(lambda *_: passes.append(1))
    images, _ = views()
    z, features = method.embed_with_features(images)
    assert len(passes) == 1
    assert torch.equal(z, method.embed(images))
    with torch.no_grad(), evaluating(method):
        assert torch.equal(features, method.memory_encoder.features(images))
