"""Everyday calls that compute: arithmetic, torch.nn, autograd, optimizers and mixed precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from .checks import DEVICE, data, everyday, on_both, refused, require, same_tensor

# ---- arithmetic ----


@everyday("arithmetic")
def pointwise() -> None:
    """Broadcast arithmetic, elementwise functions, clamp, lerp, addcmul."""

    def use(device: str) -> Any:
        x, y = data(4, 1, 5).to(device), data(3, 5, seed=2).to(device)
        made = x + y, x - 2 * y, x / y, x**2, torch.atan2(x, y), torch.lerp(x, y, 0.3), torch.addcmul(x, y, y)
        return *made, x.exp(), x.sigmoid(), x.clamp(-1, 0.5), F.gelu(x), F.silu(x), x.erf(), torch.maximum(x, y)

    on_both(use)


@everyday("arithmetic")
def reductions() -> None:
    """sum, mean, var, norm, max with indices, prod, logsumexp, cumsum, bincount and histc."""

    def use(device: str) -> Any:
        x = data(5, 7).to(device)
        whole = x.sum(), x.mean(), x.std(), x.norm(), x.argmax(), x.any(), x.isnan().all()
        along = x.sum(0), x.mean(1, keepdim=True), x.var(-1), *x.max(1), x.prod(0), x.logsumexp(1), x.cumsum(0)
        return *whole, *along, *x.median(0), *torch.aminmax(x), torch.bincount(data(9, dtype=torch.int64).to(device))

    on_both(use)


@everyday("arithmetic")
def sorting() -> None:
    """sort, argsort, topk, kthvalue, unique, searchsorted, bucketize."""

    def use(device: str) -> Any:
        x, n = data(5, 7).to(device), (data(20, dtype=torch.int64) % 5).to(device)
        several = *torch.unique(n, return_inverse=True, return_counts=True), *torch.unique_consecutive(n, True)
        edges = torch.arange(-2.0, 3.0, device=device)
        return *x.sort(1), x.argsort(0, True), *x.topk(3), *x.kthvalue(2), *several, torch.bucketize(x, edges)

    on_both(use)


@everyday("arithmetic")
def matrix_products() -> None:
    """matmul, bmm, einsum, addmm, outer, kron, with transposed and strided operands."""

    def use(device: str) -> Any:
        a, b = data(3, 4, 5).to(device), data(3, 5, 6, seed=2).to(device)
        plain = a @ b, torch.bmm(a, b), torch.einsum("bij,bjk->ik", a, b), a[0] @ a[1].t(), a[0] @ b[0, :, 0]
        return *plain, torch.addmm(b[0, 0], a[0], b[0], beta=0.5), torch.kron(a[0], a[1]), a[:, ::2] @ b[..., ::3]

    on_both(use)


@everyday("arithmetic")
def linear_algebra() -> None:
    """torch.linalg (solve, qr, cholesky, eigh, svdvals, det, inv, matrix_exp) and torch.fft."""

    def use(device: str) -> Any:
        x = data(5, 5).to(device)
        spd = x @ x.t() + 5 * torch.eye(5, device=device)
        found = torch.linalg.solve(spd, x), *torch.linalg.qr(x), torch.linalg.cholesky(spd), *torch.linalg.eigh(spd)
        more = torch.linalg.svdvals(x), torch.linalg.det(x), torch.linalg.inv(spd), torch.linalg.matrix_exp(x)
        return *found, *more, torch.fft.rfft(x), torch.fft.ifft2(torch.fft.fft2(x)), torch.fft.fftshift(x)

    on_both(use)


@everyday("arithmetic")
def out_arguments() -> None:
    """out= tensors: of the right shape, empty (resized), strided, and several."""

    def use(device: str) -> Any:
        x, y = data(4, 5).to(device), data(4, 5, seed=2).to(device)
        right, empty = torch.empty(4, 5, device=device), torch.empty(0, device=device)
        strided = torch.zeros(5, 4, device=device).t()
        values, indices = torch.empty(4, device=device), torch.empty(4, dtype=torch.int64, device=device)
        require(torch.add(x, y, out=right) is right, "out= must be returned")
        torch.mul(x, y, out=empty)
        torch.sub(x, y, out=strided)
        torch.max(x, 1, out=(values, indices))
        return right, empty, strided, values, indices, torch.cat([x, y], 1, out=torch.empty(0, device=device))

    on_both(use)


@everyday("arithmetic")
def in_place() -> None:
    """In-place methods return the same object and keep its memory."""

    def use(device: str) -> Any:
        x = data(4, 5).to(device)
        pointer = x.data_ptr()
        same_object = x.add_(1).mul_(2).clamp_(min=0).sqrt_().t_().t_().fill_diagonal_(7)
        require(same_object is x and x.data_ptr() == pointer, "in-place methods must keep the object and its memory")
        x += 1
        x[0].zero_()
        return x, x.clone().transpose_(0, 1), x.int().bitwise_not_()

    on_both(use)


@everyday("arithmetic")
def foreach() -> None:
    """torch._foreach_* on lists of tensors, as optimizers call them."""

    def use(device: str) -> Any:
        xs = [data(n, 3).to(device) for n in range(1, 5)]
        torch._foreach_add_(xs, 1.0)
        torch._foreach_addcdiv_(xs, xs, [x.abs() + 1 for x in xs], value=0.5)
        norms = torch._foreach_norm(xs)
        return xs, torch._foreach_mul(xs, xs), torch.stack(list(norms)), torch._foreach_sqrt(torch._foreach_abs(xs))

    on_both(use)


@everyday("arithmetic")
def infini_ops() -> None:
    """torch_infini's own ops: functional, out= and in-place forms, with the CPU kernels' bits."""
    from ... import ops

    def use(device: str) -> Any:
        x, weight = data(3, 64).to(device), data(64, seed=2).to(device)
        into = torch.empty_like(x)
        ops.rms_norm(x, weight, out=into)
        q, k = data(1, 4, 2, 16).to(device), data(1, 4, 1, 16, seed=2).to(device)
        return ops.rms_norm(x, weight), into, ops.swiglu(x, into), ops.softmax(x), ops.linear(x, x), q + k

    on_both(use)


# ---- torch.nn ----


def trained_step(make: Callable[[], torch.nn.Module], *inputs: torch.Tensor, exact: bool = True) -> None:
    """Require equal results and gradients of a module on both devices; up to rounding if not `exact`."""

    def use(device: str) -> Any:
        torch.manual_seed(0)
        module = make().to(device)
        result = module(*(x.to(device) for x in inputs))
        leaves = [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        loss = torch.stack([leaf.float().pow(2).sum() for leaf in leaves]).sum()
        loss.backward()
        return [leaf.detach() for leaf in leaves], {name: p.grad for name, p in module.named_parameters()}

    on_both(use, exact)


@everyday("torch.nn")
def convolution() -> None:
    """Conv1d, Conv2d with groups and dilation, ConvTranspose2d, Conv3d: results and gradients."""
    trained_step(lambda: torch.nn.Conv1d(3, 4, 3), data(2, 3, 9))
    trained_step(lambda: torch.nn.Conv2d(4, 6, 3, padding=1, stride=2, groups=2, dilation=2), data(2, 4, 9, 8))
    trained_step(lambda: torch.nn.ConvTranspose2d(3, 2, 3, stride=2), data(1, 3, 4, 5))
    trained_step(lambda: torch.nn.Conv3d(2, 3, 2, bias=False), data(1, 2, 3, 4, 5))


@everyday("torch.nn")
def normalization() -> None:
    """LayerNorm, RMSNorm, GroupNorm, BatchNorm in training and evaluation."""
    for make in (lambda: torch.nn.LayerNorm(6), lambda: torch.nn.RMSNorm(6), lambda: torch.nn.GroupNorm(2, 4)):
        trained_step(make, data(3, 4, 6))
    trained_step(lambda: torch.nn.BatchNorm2d(4), data(3, 4, 5, 6))
    trained_step(lambda: torch.nn.BatchNorm1d(4).eval(), data(3, 4))


@everyday("torch.nn")
def embedding() -> None:
    """Embedding with padding_idx, EmbeddingBag, one_hot."""
    indices = data(3, 4, dtype=torch.int64) % 10
    trained_step(lambda: torch.nn.Embedding(10, 5, padding_idx=0), indices)
    trained_step(lambda: torch.nn.EmbeddingBag(10, 5, mode="sum"), indices)
    on_both(lambda device: F.one_hot(indices.to(device), 10))


@everyday("torch.nn")
def attention() -> None:
    """scaled_dot_product_attention, causal, masked and grouped: results and gradients."""

    def use(device: str) -> Any:
        q, k, v = (data(2, 4, 6, 8, seed=seed).to(device).requires_grad_() for seed in (1, 2, 3))
        mask = torch.ones(6, 6, dtype=torch.bool, device=device).tril()
        causal = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        masked = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3)
        grouped = F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        (causal + masked + grouped).pow(2).sum().backward()
        return causal.detach(), masked.detach(), grouped.detach(), q.grad, k.grad, v.grad

    on_both(use)


@everyday("torch.nn")
def transformer_layer() -> None:
    """TransformerEncoderLayer in training, and in evaluation by its fast path."""

    def layer() -> torch.nn.Module:
        return torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)

    trained_step(layer, data(2, 5, 16))

    def use(device: str) -> Any:
        torch.manual_seed(0)
        model = layer().eval().to(device)
        with torch.no_grad():
            return model(data(2, 5, 16).to(device))

    on_both(use)


# torch computes these cells by different sums on a device than on the CPU: equal up to rounding.


@everyday("torch.nn")
def lstm() -> None:
    """LSTM and LSTMCell, two layers, both directions, packed sequences."""
    trained_step(lambda: torch.nn.LSTM(4, 5, 2, bidirectional=True), data(6, 3, 4), exact=False)
    trained_step(lambda: torch.nn.LSTMCell(4, 5), data(3, 4), exact=False)

    def packed(device: str) -> Any:
        torch.manual_seed(0)
        model = torch.nn.LSTM(4, 5).to(device)
        several = torch.nn.utils.rnn.pack_sequence([data(n, 4).to(device) for n in (5, 3, 1)])
        return torch.nn.utils.rnn.pad_packed_sequence(model(several)[0])[0].detach()

    on_both(packed, exact=False)


@everyday("torch.nn")
def gru() -> None:
    """GRU, GRUCell and RNN."""
    trained_step(lambda: torch.nn.GRU(4, 5, 2, batch_first=True), data(3, 6, 4), exact=False)
    trained_step(lambda: torch.nn.GRUCell(4, 5), data(3, 4), exact=False)
    trained_step(lambda: torch.nn.RNN(4, 5, bidirectional=True), data(6, 3, 4), exact=False)


@everyday("torch.nn")
def losses() -> None:
    """cross_entropy, nll, mse, BCE with logits, CTC, KL; pooling and interpolation before them."""

    def use(device: str) -> Any:
        x = data(4, 6).to(device).requires_grad_()
        target = (data(4, dtype=torch.int64) % 6).to(device)
        smooth = F.cross_entropy(x, target, label_smoothing=0.1) + F.mse_loss(x, x.detach() + 1)
        other = F.binary_cross_entropy_with_logits(x, (x > 0).float()) + F.kl_div(x.log_softmax(1), x.softmax(1))
        lengths = torch.tensor([6]), torch.tensor([2])
        ctc = F.ctc_loss(data(6, 1, 5).to(device).log_softmax(-1), torch.tensor([[1, 2]], device=device), *lengths)
        pooled = F.max_pool2d(F.interpolate(x.view(1, 1, 4, 6), scale_factor=2, mode="bilinear"), 2).sum()
        (smooth + other + ctc + pooled).backward()
        return smooth.detach(), other.detach(), ctc, pooled.detach(), x.grad

    on_both(use)


# ---- autograd ----


@everyday("autograd")
def backward() -> None:
    """backward, torch.autograd.grad, retain_grad, accumulation into .grad, and hooks."""

    def use(device: str) -> Any:
        x = data(4, 5).to(device).requires_grad_()
        seen: list[torch.Tensor] = []
        x.register_hook(lambda gradient: seen.append(gradient.clone()))
        y = (x * 3).relu()
        y.retain_grad()
        y.pow(2).sum().backward()
        (x[0] * 2).sum().backward()
        return x.grad, y.grad, seen, torch.autograd.grad((x.sin() * x).sum(), x)

    on_both(use)


@everyday("autograd")
def double_backward() -> None:
    """Gradients of gradients: create_graph, Hessian, gradient penalty."""

    def use(device: str) -> Any:
        x = data(5).to(device).requires_grad_()
        weight = data(5, 5, seed=2).to(device).requires_grad_()
        (first,) = torch.autograd.grad((weight @ x).tanh().sum(), x, create_graph=True)
        first.pow(2).sum().backward()
        return x.grad, weight.grad, torch.autograd.functional.hessian(lambda v: v.exp().sum(), x.detach())

    on_both(use)


@everyday("autograd")
def gradient_check() -> None:
    """torch.autograd.gradcheck and gradgradcheck in float64."""
    x = data(3, 4).double().to(DEVICE).requires_grad_()
    y = data(4, 2, seed=2).double().to(DEVICE).requires_grad_()
    require(torch.autograd.gradcheck(lambda a, b: (a @ b).sin(), (x, y)), "gradcheck must pass")
    require(torch.autograd.gradgradcheck(lambda a: (a * a).tanh(), (x,)), "gradgradcheck must pass")


@everyday("autograd")
def checkpointing() -> None:
    """torch.utils.checkpoint, with the random state restored for the second forward pass."""

    def use(device: str) -> Any:
        torch.manual_seed(0)
        layer = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Dropout(0.5), torch.nn.Tanh()).to(device)
        torch.manual_seed(1)  # because the layer's parameters were drawn on the CPU
        x = data(3, 5).to(device).requires_grad_()
        y: Any = checkpoint(layer, x, use_reentrant=False)
        y.sum().backward()
        return y.detach(), x.grad, layer[0].weight.grad

    on_both(use)


class Cube(torch.autograd.Function):
    """x³ with a custom gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        context.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = context.saved_tensors
        return 3 * x * x * gradient


@everyday("autograd")
def custom_function() -> None:
    """torch.autograd.Function with saved tensors; saved_tensors_hooks that offload to the CPU."""

    def use(device: str) -> Any:
        x = data(4).to(device).requires_grad_()
        with torch.autograd.graph.save_on_cpu():
            y: Any = Cube.apply(x)  # type: ignore[no-untyped-call]
        y.sum().backward()
        return y.detach(), x.grad

    on_both(use)


@everyday("autograd")
def inference_mode() -> None:
    """no_grad, inference_mode, detach, and the errors of a graph that is misused."""
    x = data(3).to(DEVICE).requires_grad_()
    with torch.no_grad():
        require(not (x * 2).requires_grad, "no_grad must record nothing")
    with torch.inference_mode():
        y = x * 2
        require(y.is_inference(), "tensors of inference_mode must say so")
    require(not x.detach().requires_grad, "detach must cut the graph")
    same_tensor(y.clone(), data(3) * 2)
    z = x.exp()
    z.add_(1)
    refused(RuntimeError, "modified by an inplace operation", lambda: z.sum().backward())


# ---- training ----


def trained(
    make: Callable[[Any], torch.optim.Optimizer],
    around: Callable[[torch.nn.Module], object] = lambda module: None,
) -> None:
    """Require equal parameters after five steps of an optimiser on both devices."""

    def use(device: str) -> Any:
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).to(device)
        optimizer = make(module.parameters())
        for step in range(5):
            optimizer.zero_grad()
            F.mse_loss(module(data(4, 6, seed=step).to(device)), data(4, 2, seed=-1 - step).to(device)).backward()
            around(module)
            optimizer.step()
        return [p.detach() for p in module.parameters()]

    on_both(use)


@everyday("training")
def sgd() -> None:
    """SGD with momentum, Adagrad and RMSprop, with a learning-rate schedule."""
    trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True))
    trained(lambda p: torch.optim.Adagrad(p, 0.1))
    trained(lambda p: torch.optim.RMSprop(p, 0.01, centered=True))


@everyday("training")
def adam_foreach() -> None:
    """Adam and AdamW, foreach and one tensor at a time."""
    trained(lambda p: torch.optim.Adam(p, 0.01, foreach=True))
    trained(lambda p: torch.optim.AdamW(p, 0.01, foreach=False, amsgrad=True))


@everyday("training")
def adam_fused() -> None:
    """Fused Adam, AdamW and SGD, by the backing device's fused kernels."""
    trained(lambda p: torch.optim.Adam(p, 0.01, fused=True))
    trained(lambda p: torch.optim.AdamW(p, 0.01, fused=True))
    trained(lambda p: torch.optim.SGD(p, 0.01, momentum=0.9, fused=True))


@everyday("training")
def gradient_clipping() -> None:
    """clip_grad_norm_ and clip_grad_value_ between backward and step."""
    trained(lambda p: torch.optim.SGD(p, 0.1), lambda module: torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1))
    trained(
        lambda p: torch.optim.SGD(p, 0.1), lambda module: torch.nn.utils.clip_grad_value_(module.parameters(), 0.01)
    )


@everyday("training")
def autocast() -> None:
    """torch.autocast("infini"): products in bfloat16, sums and softmax in float32; nested off; supported dtypes."""
    x, layer = data(4, 6).to(DEVICE), torch.nn.Linear(6, 3).to(DEVICE)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        require(torch.is_autocast_enabled(DEVICE), "autocast must be on")
        y = layer(x)
        require(y.dtype == torch.bfloat16 and (x @ x.t()).dtype == torch.bfloat16, "products must be in bfloat16")
        require(y.softmax(-1).dtype == torch.float32, "softmax must be in float32")
        with torch.autocast(DEVICE, enabled=False):
            require((x @ x.t()).dtype == torch.float32, "autocast must be off within")
    y.float().sum().backward()
    gradient = layer.weight.grad
    require(gradient is not None and gradient.dtype == torch.float32, "gradients must be in float32")
    same_tensor(
        y.detach(), F.linear(x.cpu().bfloat16(), layer.weight.cpu().bfloat16(), layer.bias.cpu().bfloat16()).detach()
    )
    require(torch.bfloat16 in torch.get_device_module(DEVICE).get_amp_supported_dtype(), "bfloat16 must be supported")


@everyday("training")
def grad_scaler() -> None:
    """torch.amp.GradScaler("infini"): scale, unscale, a step skipped for an infinity, update."""
    weight = torch.nn.Parameter(data(4).to(DEVICE))
    optimizer, scaler = torch.optim.SGD([weight], 0.5), torch.amp.GradScaler(DEVICE, init_scale=8.0)
    before = weight.detach().clone()
    for factor, scale in ((1.0, 8.0), (float("inf"), 4.0)):
        optimizer.zero_grad()
        scaler.scale((weight * factor).sum()).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        require(scaler.get_scale() == scale, f"the scale must be {scale}, got {scaler.get_scale()}")
    same_tensor(weight.detach(), before.cpu() - 0.5)
