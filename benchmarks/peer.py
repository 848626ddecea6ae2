"""The training step of `jaxcl.methods.two_view`, written in plain eager PyTorch.

`throughput.py --peer` times it beside ours. What a step does here, in order:
  - rows of the u8 data set on the device are picked by index;
  - two augmented views, batched torch operations on the device (`Augment`);
  - the momentum network (mocov2plus) on each view: training mode, no gradient;
  - the frozen teacher (cassle, pnr) on both views at once: eval mode, no gradient;
  - encoder, projector and, after the first task, the predictor g, on each view:
    one pass per view, as the published code does, for batch statistics per view;
  - the loss, backward, LARS around SGD with momentum, the norm of the gradient;
  - the momentum network's moving average and both queues of negatives.
Nothing is left out and nothing is done that ours does not do. Choices that favour
this side: the order of the colour operations is drawn once per batch and view, not
per image, so each runs once; optimiser and average use torch's multi-tensor
functions; on a GPU cuDNN's autotuner and TF32 are on. It is not `torch.compile`d.

Of options of the method only those of PNR's configs exist: `frozen_bn="running"`,
`form="code"`, `distill_weight=1`, pseudo-negatives in both terms.
"""

import collections
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

_DEPTHS = {
    10: ((1, 1, 1, 1), False),
    18: ((2, 2, 2, 2), False),
    34: ((3, 4, 6, 3), False),
    50: ((3, 4, 6, 3), True),
}


class Residual(nn.Module):
    """Convolutions with batch norm, added to a shortcut."""

    def __init__(self, inputs, convs):
        super().__init__()
        self.count, total, start = len(convs), 1, inputs
        for i, (filters, kernel, stride) in enumerate(convs, start=1):
            conv = nn.Conv2d(inputs, filters, kernel, stride, kernel // 2, bias=False)
            self.add_module(f"conv{i}", conv)
            self.add_module(f"bn{i}", nn.BatchNorm2d(filters))
            inputs, total = filters, total * stride
        self.downsample_conv = None
        if total != 1 or start != inputs:
            self.downsample_conv = nn.Conv2d(start, inputs, 1, total, bias=False)
            self.downsample_bn = nn.BatchNorm2d(inputs)

    def forward(self, x):
        y = x
        for i in range(1, self.count + 1):
            y = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(y))
            y = functional.relu(y, inplace=True) if i < self.count else y
        if self.downsample_conv is not None:
            x = self.downsample_bn(self.downsample_conv(x))
        return functional.relu(y + x, inplace=True)


class ResNet(nn.Module):
    """The network of `jaxcl.nets.resnet`, modules named as its parameters are."""

    def __init__(self, *, depth, width, stem, stem_padding=1):
        super().__init__()
        sizes, bottleneck = _DEPTHS[depth]
        kernel, stride, pad = (3, 1, stem_padding) if stem == "cifar" else (7, 2, 3)
        self.conv1 = nn.Conv2d(3, width, kernel, stride, pad, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, 2, 1)
        self.blocks, inputs = [], width
        for stage, size in enumerate(sizes):
            for i in range(size):
                filters, down = width * 2**stage, 2 if stage > 0 and i == 0 else 1
                convs = [(filters, 3, down), (filters, 3, 1)]
                if bottleneck:
                    convs = [(filters, 1, 1), (filters, 3, down), (filters * 4, 1, 1)]
                self.blocks.append(f"layer{stage + 1}_{i}")
                self.add_module(self.blocks[-1], Residual(inputs, convs))
                inputs = convs[-1][0]
        self.num_features = inputs

    def forward(self, x):
        x = self.pool(functional.relu(self.bn1(self.conv1(x)), inplace=True))
        for name in self.blocks:
            x = self.get_submodule(name)(x)
        return x.float().mean((2, 3))


def _mlp(inputs, hidden, outputs, batch_norm):
    layers = collections.OrderedDict(linear1=nn.Linear(inputs, hidden))
    if batch_norm:
        layers["bn1"] = nn.BatchNorm1d(hidden)
    layers["relu"] = nn.ReLU(inplace=True)
    layers["linear2"] = nn.Linear(hidden, outputs)
    return nn.Sequential(layers)


def _load(module, params, stats):
    """Copy a tree of flax parameters and statistics into a module."""
    names = {"running_mean": "mean", "running_var": "var"}
    with torch.no_grad():
        for path, tensor in module.state_dict().items():
            *parents, leaf = path.split(".")
            if leaf == "num_batches_tracked":
                continue
            node = stats if leaf in names else params
            for parent in parents:
                node = node[parent]
            if leaf in names:
                value = np.asarray(node[names[leaf]])
            elif leaf == "weight" and "kernel" in node:
                kernel = np.asarray(node["kernel"])
                value = kernel.T if kernel.ndim == 2 else kernel.transpose(3, 2, 0, 1)
            else:
                value = np.asarray(node["scale" if leaf == "weight" else "bias"])
            tensor.copy_(torch.from_numpy(value.copy()))


def _unit(x):
    return functional.normalize(x, dim=-1)


def _others(a, b, temperature):
    """Logarithm of the sum over all columns but a row's own."""
    logits = a @ b.T / temperature
    own = torch.eye(len(logits), dtype=torch.bool, device=logits.device)
    return logits.masked_fill(own, -math.inf).logsumexp(1)


def _nt_xent(z1, z2, temperature):
    z = torch.cat([z1, z2])
    positive = (z1 * z2).sum(1).mean() / temperature
    return _others(z, z, temperature).mean() - positive


def _info_nce(anchors, positives, queues, temperature):
    positive = (anchors * positives).sum(1, keepdim=True)
    logits = torch.cat([positive, *(anchors @ q.T for q in queues)], 1) / temperature
    target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits, target)


def _cassle(p, f, temperature):
    p, f = torch.cat(p), torch.cat(f)
    logits = p @ f.T / temperature
    target = torch.arange(len(p), device=p.device)
    there = functional.cross_entropy(logits, target)
    return (there + functional.cross_entropy(logits.T, target)) / 2


def _pnr_simclr(z, p, f, temperature):
    positive = (z[0] * z[1]).sum(1).mean()
    z, p, f = torch.cat(z), torch.cat(p), torch.cat(f)
    first = torch.logaddexp(_others(z, z, temperature), _others(z, f, temperature))
    second = torch.logaddexp(_others(p, f, temperature), _others(p, z, temperature))
    positive = positive + (p * f).sum(1).mean()
    return first.mean() + second.mean() - positive / temperature


class Lars:
    """LARS around SGD with momentum, as `jaxcl.optim.lars`, on lists of tensors."""

    def __init__(self, params, *, eta, momentum, weight_decay, exclude_1d, clip=True):
        self.params = params
        self.scaled = [i for i, p in enumerate(params) if p.ndim > 1 or not exclude_1d]
        self.buffers = [torch.zeros_like(p) for p in params]
        self.eta, self.momentum, self.decay = eta, momentum, weight_decay
        self.clip = clip

    @torch.no_grad()
    def step(self, lr):
        grads = [p.grad for p in self.params]
        norms = torch.stack(torch._foreach_norm(grads))
        some = torch.tensor(self.scaled, device=norms.device)
        w, g = [self.params[i] for i in self.scaled], [grads[i] for i in self.scaled]
        w_norm, g_norm = torch.stack(torch._foreach_norm(w)), norms[some]
        ratio = self.eta * w_norm / (g_norm + self.decay * w_norm + 1e-8)
        ratio = torch.clamp(ratio / lr, max=1.0) if self.clip else ratio
        # A zero tensor takes a plain step, a zero gradient none.
        ratio = torch.where(w_norm > 0, ratio, 1.0) * (g_norm > 0)
        torch._foreach_add_(g, w, alpha=self.decay)
        torch._foreach_mul_(g, list(ratio.unbind()))
        torch._foreach_mul_(self.buffers, self.momentum)
        torch._foreach_add_(self.buffers, grads)
        torch._foreach_add_(self.params, self.buffers, alpha=-lr)
        return norms.norm()


class Peer:
    """Networks, queues and optimiser of one run, and its step.

    Args:
      config: sections `encoder`, `method`, `optimizer`, `augment` of a job's config.
      state: a `jaxcl.core.TrainState` of numpy arrays in the second task; the peer
        starts from the same parameters, statistics and queues.
      precision: "float32", or "bfloat16" for autocast.
      channels_last: memory format of images and convolutions.
    """

    def __init__(self, config, state, *, device, precision, channels_last):
        method = dict(config["method"])
        self.method, self.device = method, torch.device(device)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.bf16 = precision == "bfloat16"
        self.moco = method["base"] == "mocov2plus"
        self.distils = method["strategy"] != "finetune"
        self.augment = Augment(config["augment"])
        encoder, extra = dict(config["encoder"], name=None), state.extra
        del encoder["name"]

        def network(params, stats):
            net = nn.ModuleDict({"encoder": ResNet(**encoder)})
            features = net["encoder"].num_features
            hidden, output = method["hidden_dim"], method["output_dim"]
            net["projector"] = _mlp(features, hidden, output, batch_norm=False)
            if "distiller" in params:
                hidden = method["distill_hidden_dim"]
                net["distiller"] = _mlp(output, hidden, output, batch_norm=True)
            _load(net, params, stats)
            return net.to(self.device, memory_format=self.format)

        self.net = network(state.params, state.stats)
        self.slow = self.teacher = None
        if self.moco:
            self.slow = network(extra.momentum, extra.momentum_stats)
            self.averaged = list(self.slow.parameters())
            parts = (self.net["encoder"], self.net["projector"])
            self.sources = [p for part in parts for p in part.parameters()]
        if self.distils:
            self.teacher = network(extra.teacher, extra.teacher_stats).eval()
        banks = (extra.key_queue, extra.frozen_queue)
        self.queues = [
            None if bank is None else torch.from_numpy(bank.copy()).to(self.device)
            for bank in banks
        ]
        self.pointer = 0  # of both: the teacher's are written from the same step on
        optimizer = dict(config["optimizer"])
        kept = ("eta", "momentum", "weight_decay", "exclude_1d", "clip")
        self.optimizer = Lars(
            list(self.net.parameters()), **{key: optimizer[key] for key in kept}
        )

    def _project(self, net, images):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return net["projector"](net["encoder"](images)).float()

    def _predict(self, z):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            return _unit(self.net["distiller"](_unit(z) if self.moco else z).float())

    def _loss(self, views, k, f):
        method = self.method
        tau, tau_d = method["temperature"], method["distill_temperature"]
        raw = [self._project(self.net, view) for view in views]
        z = [_unit(x) for x in raw]
        p = [self._predict(x) for x in raw] if self.distils else None
        if method["strategy"] == "pnr":
            if not self.moco:
                return _pnr_simclr(z, p, f, tau_d)
            banks = [[queue[v] for queue in self.queues] for v in (0, 1)]
            first = [_info_nce(z[v], k[1 - v], banks[1 - v], tau) for v in (0, 1)]
            second = [_info_nce(p[v], f[v], banks[1 - v], tau_d) for v in (0, 1)]
            return sum(first + second) / 2
        if self.moco:
            keys = self.queues[0]
            base = sum(
                _info_nce(z[v], k[1 - v], [keys[1 - v]], tau) / 2 for v in (0, 1)
            )
        else:
            base = _nt_xent(*z, tau)
        return base + _cassle(p, f, tau_d) if self.distils else base

    def step(self, views, lr, decay):
        """One step on two normalised views f32[B,C,H,W]; loss and gradient norm.

        `lr` is the learning rate, `decay` that of the momentum network.
        """
        views = [view.contiguous(memory_format=self.format) for view in views]
        k = f = None
        with torch.no_grad():
            if self.moco:
                k = [_unit(self._project(self.slow, view)) for view in views]
            if self.distils:
                f = _unit(self._project(self.teacher, torch.cat(views)))
                f = f.chunk(2)
        loss = self._loss(views, k, f)
        self.net.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = self.optimizer.step(lr)
        with torch.no_grad():
            if self.moco:
                torch._foreach_lerp_(self.averaged, self.sources, 1.0 - decay)
                self._enqueue(k, f)
        return {"loss": loss.detach(), "grad_norm": grad_norm}

    def _enqueue(self, k, f):
        size, count = self.queues[0].shape[1], len(k[0])
        slots = torch.arange(self.pointer, self.pointer + count, device=self.device)
        for queue, rows in zip(self.queues, (k, f), strict=True):
            if queue is not None:
                queue.index_copy_(1, slots % size, torch.stack(tuple(rows)))
        self.pointer = (self.pointer + count) % size


def _uniform(low, high, shape, device):
    return low + (high - low) * torch.rand(shape, device=device)


def _gray(x):
    weights = torch.tensor([0.299, 0.587, 0.114], device=x.device)
    return (x * weights[:, None, None]).sum(1, keepdim=True)


def _turned(x, turn):
    """The hue turned by `turn` of the circle: HSV there and back."""
    r, g, b = x.unbind(1)
    top = x.amax(1)
    chroma = top - x.amin(1)
    ramp = torch.where(top == r, g - b, torch.where(top == g, b - r, r - g))
    start = torch.where(top == r, 0.0, torch.where(top == g, 2.0, 4.0))
    hue = ramp / chroma.clamp_min(1e-12) + start + 6.0 * turn
    planes = []
    for offset in (5.0, 3.0, 1.0):
        place = (hue + offset) % 6.0
        planes.append(top - chroma * torch.minimum(place, 4.0 - place).clamp(0.0, 1.0))
    return torch.stack(planes, 1)


class Augment:
    """Two views of u8[B,3,H,W], each f32[B,3,size,size], normalised."""

    def __init__(self, section):
        self.options = dict(section)

    def __call__(self, images):
        return [self._view(images, v) for v in (0, 1)]

    def _view(self, images, view):
        o, n, device = self.options, len(images), images.device
        x = images.float() / 255.0
        if o.get("crop", True):
            x = self._crop(x)
        if any(o["jitter"]) and o["jitter_probability"]:
            x = self._jitter(x)
        chance = lambda p: torch.rand((n, 1, 1, 1), device=device) < p  # noqa: E731
        if o["grayscale"]:
            x = torch.where(chance(o["grayscale"]), _gray(x), x)
        if o["blur"][view]:
            x = torch.where(chance(o["blur"][view]), self._blur(x), x)
        if o["solarize"][view]:
            inverted = torch.where(x >= 128 / 255, 1.0 - x, x)
            x = torch.where(chance(o["solarize"][view]), inverted, x)
        if o["flip"]:
            x = torch.where(chance(o["flip"]), x.flip(-1), x)
        mean, std = (torch.tensor(o[key], device=device) for key in ("mean", "std"))
        return (x - mean[:, None, None]) / std[:, None, None]

    def _crop(self, x):
        n, _, height, width = x.shape
        area = height * width * _uniform(*self.options["scale"], (n, 10), x.device)
        bound = math.log(4 / 3)
        aspect = _uniform(-bound, bound, (n, 10), x.device).exp()
        w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first = fits.int().argmax(1, keepdim=True)
        whole = ~fits.any(1)
        w = torch.where(whole, width, w.gather(1, first)[:, 0])
        h = torch.where(whole, height, h.gather(1, first)[:, 0])
        top = (torch.rand(n, device=x.device) * (height - h + 1)).floor()
        left = (torch.rand(n, device=x.device) * (width - w + 1)).floor()
        size = self.options["size"]
        rows = self._weights(top, h, height, size)
        columns = self._weights(left, w, width, size)
        return (rows[:, None] @ x @ columns[:, None].mT).clamp(0.0, 1.0)

    def _weights(self, start, length, extent, size):
        """Antialiased bicubic resampling as matrices f32[B, size, extent]."""
        scale = (length / size)[:, None, None]
        begin, end = start[:, None, None], (start + length)[:, None, None]
        out = torch.arange(size, device=start.device)[:, None] + 0.5
        pixel = torch.arange(extent, device=start.device) + 0.5
        d = ((pixel - begin - out * scale) / scale.clamp_min(1.0)).abs()
        near = (1.5 * d - 2.5) * d * d + 1.0
        far = ((-0.5 * d + 2.5) * d - 4.0) * d + 2.0
        kernel = torch.where(d < 1.0, near, torch.where(d < 2.0, far, 0.0))
        kernel = kernel * ((pixel > begin) & (pixel < end))
        return kernel / kernel.sum(-1, keepdim=True)

    def _jitter(self, x):
        n, device = len(x), x.device
        applied = torch.rand((n, 1, 1, 1), device=device)
        applied = applied < self.options["jitter_probability"]

        def factor(strength):
            drawn = _uniform(max(0.0, 1 - strength), 1 + strength, (n, 1, 1, 1), device)
            return torch.where(applied, drawn, 1.0)

        *strengths, hue = self.options["jitter"]
        for operation in torch.randperm(4).tolist():
            if operation == 3:
                turn = _uniform(-hue, hue, (n, 1, 1), device) * applied[:, 0]
                x = _turned(x, turn) if hue else x
            elif strengths[operation]:
                by = factor(strengths[operation])
                if operation == 0:
                    x = (by * x).clamp(0.0, 1.0)
                    continue
                gray = _gray(x)
                if operation == 1:
                    gray = gray.mean((1, 2, 3), keepdim=True)
                x = torch.lerp(gray.expand_as(x), x, by).clamp(0.0, 1.0)
        return x

    def _blur(self, x):
        """Gaussian per image, replicated edges, as two banded products."""
        low, high = self.options["sigma"]
        radius, extent = math.ceil(5.5 * high), x.shape[-1]
        sigma = _uniform(low, high, (len(x), 1, 1, 1), x.device)
        pixel = torch.arange(extent, device=x.device)[:, None]
        distance = torch.arange(-radius, extent + radius, device=x.device) - pixel
        band = torch.exp(-0.5 * (distance / sigma) ** 2) * (distance.abs() <= radius)
        band = band / band.sum(-1, keepdim=True)
        padded = functional.pad(x, (radius,) * 4, mode="replicate")
        return band @ padded @ band.mT
