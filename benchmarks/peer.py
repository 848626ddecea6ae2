"""The training step of `jaxcl.methods.two_view`, written in plain eager PyTorch.

`throughput.py --peer` times it beside ours. What a step does here, in order: picks
rows of the u8 data set on the device; augments two views in batched torch operations
there (`Augment`); runs the momentum network (mocov2plus; training mode, no gradient)
on each view and the frozen teacher (cassle, pnr; eval mode) on both at once; runs
encoder, projector and predictor g on each view, in one pass per view as the published
code does; loss, backward, LARS around SGD with momentum, the norm of the gradient;
moves the momentum network's average; writes both queues. It does all that ours does.

Choices that favour this side: the order of the colour operations is drawn once per
batch and view, not per image, so each runs once; optimiser and average use torch's
multi-tensor functions; on a GPU cuDNN's autotuner and TF32 are on. It is not
`torch.compile`d. Of the method's options only those of PNR's configs exist.
"""

import collections
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional

_DEPTHS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
_ONLINE = ("encoder", "projector")


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
        kernel, stride, pad = (3, 1, stem_padding) if stem == "cifar" else (7, 2, 3)
        self.conv1 = nn.Conv2d(3, width, kernel, stride, pad, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.pool = nn.Identity() if stem == "cifar" else nn.MaxPool2d(3, 2, 1)
        self.blocks, inputs = [], width
        for stage, size in enumerate(_DEPTHS[depth]):
            for i in range(size):
                filters, down = width * 2**stage, 2 if stage > 0 and i == 0 else 1
                convs = [(filters, 3, down), (filters, 3, 1)]
                if depth == 50:  # bottlenecks
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
            if leaf == "weight":
                leaf = "kernel" if "kernel" in node else "scale"
            value = np.array(node[names.get(leaf, leaf)])
            if leaf == "kernel":
                value = value.T if value.ndim == 2 else value.transpose(3, 2, 0, 1)
            tensor.copy_(torch.from_numpy(value))


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
    same = (z[0] * z[1]).sum(1).mean()
    z, p, f = torch.cat(z), torch.cat(p), torch.cat(f)
    first = torch.logaddexp(_others(z, z, temperature), _others(z, f, temperature))
    second = torch.logaddexp(_others(p, f, temperature), _others(p, z, temperature))
    positive = same + (p * f).sum(1).mean()
    return first.mean() + second.mean() - positive / temperature


class Lars:
    """LARS around SGD with momentum, as `jaxcl.optim.lars`, on lists of tensors."""

    def __init__(self, params, *, eta, momentum, weight_decay, exclude_1d, clip=True):
        self.params, self.buffers = params, [torch.zeros_like(p) for p in params]
        self.scaled = [i for i, p in enumerate(params) if p.ndim > 1 or not exclude_1d]
        self.eta, self.clip = eta, clip
        self.momentum, self.decay = momentum, weight_decay

    @torch.no_grad()
    def step(self, lr):
        grads = [p.grad for p in self.params]
        norms = torch.stack(torch._foreach_norm(grads))
        w, g = [self.params[i] for i in self.scaled], [grads[i] for i in self.scaled]
        w_norm, g_norm = torch.stack(torch._foreach_norm(w)), norms[self.scaled]
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
        augment = Augment(config["augment"])
        self.augment = lambda images: [augment(images, view) for view in (0, 1)]
        extra = state.extra
        encoder = {k: v for k, v in config["encoder"].items() if k != "name"}

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
        if self.moco:
            self.slow = network(extra.momentum, extra.momentum_stats)
            self.averaged = list(self.slow.parameters())
            self.sources = [p for part in _ONLINE for p in self.net[part].parameters()]
        if self.distils:
            self.teacher = network(extra.teacher, extra.teacher_stats).eval()
        banks = (extra.key_queue, extra.frozen_queue)
        banks = [torch.from_numpy(b.copy()) for b in banks if b is not None]
        self.queues = [bank.to(self.device) for bank in banks]
        self.pointer = 0  # of both: the teacher's are written from the same step on
        optimizer = dict(config["optimizer"])
        del optimizer["name"], optimizer["lr"]
        self.optimizer = Lars(list(self.net.parameters()), **optimizer)

    def _apply(self, net, names, x):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            for name in names:
                x = net[name](x)
        return x.float()

    def _loss(self, views, k, f):
        tau, tau_d = self.method["temperature"], self.method["distill_temperature"]
        raw = [self._apply(self.net, _ONLINE, view) for view in views]
        z, p = [_unit(x) for x in raw], None
        if self.distils:
            given = z if self.moco else raw
            p = [_unit(self._apply(self.net, ["distiller"], x)) for x in given]
        if self.method["strategy"] == "pnr":
            if not self.moco:
                return _pnr_simclr(z, p, f, tau_d)
            banks = [[queue[v] for queue in self.queues] for v in (0, 1)]
            first = [_info_nce(z[v], k[1 - v], banks[1 - v], tau) for v in (0, 1)]
            second = [_info_nce(p[v], f[v], banks[1 - v], tau_d) for v in (0, 1)]
            return sum(first + second) / 2
        if self.moco:
            q = self.queues[0]
            base = sum(_info_nce(z[v], k[1 - v], [q[1 - v]], tau) for v in (0, 1)) / 2
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
                k = [_unit(self._apply(self.slow, _ONLINE, view)) for view in views]
            if self.distils:
                f = self._apply(self.teacher, _ONLINE, torch.cat(views))
                f = _unit(f).chunk(2)
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
        for queue, rows in zip(self.queues, (k, f), strict=False):
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
    """One view of u8[B,3,H,W] -> f32[B,3,size,size], normalised."""

    def __init__(self, section):
        self.options = dict(section)

    def __call__(self, images, view):
        o, n, device = self.options, len(images), images.device
        x = images.float() / 255.0
        if o.get("crop", True):
            x = self._crop(x)
        if any(o["jitter"]) and o["jitter_probability"]:
            x = self._jitter(x)

        def chance(p):
            return torch.rand((n, 1, 1, 1), device=device) < p

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
        aspect = _uniform(math.log(3 / 4), math.log(4 / 3), (n, 10), x.device).exp()
        w, h = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        first, whole = fits.int().argmax(1, keepdim=True), ~fits.any(1)
        w = torch.where(whole, width, w.gather(1, first)[:, 0])
        h = torch.where(whole, height, h.gather(1, first)[:, 0])
        top = (torch.rand(n, device=x.device) * (height - h + 1)).floor()
        left = (torch.rand(n, device=x.device) * (width - w + 1)).floor()
        rows, columns = self._weights(top, h, height), self._weights(left, w, width)
        return (rows @ x @ columns.mT).clamp(0.0, 1.0)

    def _weights(self, start, length, extent):
        """Antialiased bicubic resampling as matrices f32[B, 1, size, extent]."""
        size = self.options["size"]
        scale = (length / size)[:, None, None]
        begin, end = start[:, None, None], (start + length)[:, None, None]
        out = torch.arange(size, device=start.device)[:, None] + 0.5
        pixel = torch.arange(extent, device=start.device) + 0.5
        d = ((pixel - begin - out * scale) / scale.clamp_min(1.0)).abs()
        near = (1.5 * d - 2.5) * d * d + 1.0
        far = ((-0.5 * d + 2.5) * d - 4.0) * d + 2.0
        kernel = torch.where(d < 1.0, near, torch.where(d < 2.0, far, 0.0))
        kernel = kernel * ((pixel > begin) & (pixel < end))
        return (kernel / kernel.sum(-1, keepdim=True))[:, None]

    def _jitter(self, x):
        n, device = len(x), x.device
        draws = torch.rand((n, 1, 1, 1), device=device)
        applied = draws < self.options["jitter_probability"]

        def factor(strength):
            drawn = _uniform(max(0.0, 1 - strength), 1 + strength, (n, 1, 1, 1), device)
            return torch.where(applied, drawn, 1.0)

        *strengths, hue = self.options["jitter"]
        for operation in torch.randperm(4).tolist():
            if operation == 3:
                turn = _uniform(-hue, hue, (n, 1, 1), device) * applied[:, 0]
                x = _turned(x, turn) if hue else x
            elif operation == 0:
                x = (factor(strengths[0]) * x).clamp(0.0, 1.0)
            else:
                gray = _gray(x)
                gray = gray.mean((1, 2, 3), keepdim=True) if operation == 1 else gray
                by = factor(strengths[operation])
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
