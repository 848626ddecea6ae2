"""The training step of `jaxcl.methods.two_view`, written in plain eager PyTorch.

`steps.py --peer` times it beside ours. What a step does here, in order: picks rows of
the u8 data set on the device; augments two views there in batched operations
(`torch_augment.py`); runs the momentum network (MoCo; training mode, no gradient) on
each view and the frozen teacher (PNR; eval mode) on both at once; runs encoder,
projector and predictor g on each view, in one pass per view as the published code does;
loss (`torch_losses.py`), backward, LARS around SGD with momentum, the norm of the
gradient; moves the momentum network's average; writes both queues. It does all that
ours does.

Choices that favour this side: the order of the colour operations is drawn once per
batch and view, not per image, so each runs once; optimiser and average use torch's
multi-tensor functions; on a GPU cuDNN's autotuner and TF32 are on. Networks and loss
are `torch.compile`d where the caller asks for it, and otherwise not. Of the method's
options only those of PNR's configs exist, of bases and strategies only those of
`torch_losses.LOSSES`.
"""

import collections
import time

import jax
import numpy as np
import torch
from peers import torch_augment, torch_losses
from torch import nn
from torch.nn import functional

from jaxcl import optim, schema

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

    def __init__(self, *, depth=18, width, stem="cifar", stem_padding=1, pool=None):
        super().__init__()
        self.window = pool
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
        x = x.float()
        if self.window is None:
            return x.mean((2, 3))
        windows = functional.avg_pool2d(x, self.window)
        return windows.permute(0, 2, 3, 1).flatten(1)


def _mlp(params):
    """Linear-(BN)-ReLU repeated, then a Linear, as wide as its flax parameters."""
    layers = collections.OrderedDict()
    count = sum(name.startswith("linear") for name in params)
    for i in range(1, count + 1):
        inputs, width = params[f"linear{i}"]["kernel"].shape
        layers[f"linear{i}"] = nn.Linear(inputs, width)
        if f"bn{i}" in params:
            layers[f"bn{i}"] = nn.BatchNorm1d(width)
        if i < count:
            layers[f"relu{i}"] = nn.ReLU(inplace=True)
    return nn.Sequential(layers)


def load(module, params, stats):
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


class Lars:
    """LARS around SGD with momentum, as `jaxcl.optim.lars`, on lists of tensors."""

    def __init__(self, params, *, eta, momentum, weight_decay, exclude_1d, clip):
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
      compiled: a backend of `torch.compile` for networks and loss; None: eager.

    Raises:
      ValueError: no peer of this base under this strategy is written.
    """

    def __init__(
        self, config, state, *, device, precision, channels_last, compiled=None
    ):
        self.options = options = torch_losses.options(config["method"])
        chosen = options["base"], options["strategy"]
        if chosen not in torch_losses.LOSSES:
            raise ValueError(
                f"no peer of {' with '.join(chosen)} is written; there are those of "
                + ", ".join(map(" with ".join, torch_losses.LOSSES))
            )
        self.loss = torch_losses.LOSSES[chosen]
        self.unit_given = options["base"] == "mocov2plus"  # g is given unit rows
        self.device = torch.device(device)
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.bf16 = precision == "bfloat16"
        augment = torch_augment.Augment(config["augment"])
        self.augment = lambda images: [augment(images, view) for view in (0, 1)]
        extra = state.extra
        encoder = {k: v for k, v in config["encoder"].items() if k != "name"}

        def network(params, stats):
            heads = {name: tree for name, tree in params.items() if name != "encoder"}
            net = nn.ModuleDict({"encoder": ResNet(**encoder)})
            net.update({name: _mlp(tree) for name, tree in heads.items()})
            load(net, params, stats)
            return net.to(self.device, memory_format=self.format)

        self.net = network(state.params, state.stats)
        self.slow = self.teacher = None
        if options["base"] == "mocov2plus":
            self.slow = network(extra.momentum, extra.momentum_stats)
            self.averaged = list(self.slow.parameters())
            self.sources = [p for part in _ONLINE for p in self.net[part].parameters()]
        if options["strategy"] != "finetune":
            self.teacher = network(extra.teacher, extra.teacher_stats).eval()
        queues = [x for x in (extra.base, extra.strategy) if x is not None]
        banks = [torch.from_numpy(held.rows.copy()) for held in queues]
        self.queues = [bank.to(self.device) for bank in banks]
        self.pointer = 0  # of both: the teacher's are written from the same step on
        chosen = schema.defaults(optim.lars) | dict(config["optimizer"])
        names = ("eta", "momentum", "weight_decay", "exclude_1d", "clip")
        chosen = {name: chosen[name] for name in names}
        self.optimizer = Lars(list(self.net.parameters()), **chosen)
        if compiled is not None:
            self.loss = torch.compile(self.loss, backend=compiled)
            for net in filter(None, (self.net, self.slow, self.teacher)):
                for part in net.values():
                    part.compile(backend=compiled)

    def _apply(self, net, names, x):
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.bf16):
            for name in names:
                x = net[name](x)
        return x.float()

    def _features(self, views):
        """What the network that learns gives, and the others beside it."""

        def each(net, names, rows):
            return [self._apply(net, names, x) for x in rows]

        k = f = p = None
        with torch.no_grad():
            if self.slow is not None:
                k = each(self.slow, _ONLINE, views)
            if self.teacher is not None:
                f = self._apply(self.teacher, _ONLINE, torch.cat(views)).chunk(2)
        z = each(self.net, _ONLINE, views)
        if "distiller" in self.net:
            given = map(torch_losses.unit, z) if self.unit_given else z
            p = each(self.net, ["distiller"], given)
        return torch_losses.Features(z, p, k, f, self.queues)

    def step(self, views, lr, decay):
        """One step on two normalised views f32[B,C,H,W]; loss and gradient norm.

        `lr` is the learning rate, `decay` that of the momentum network.
        """
        views = [view.contiguous(memory_format=self.format) for view in views]
        features = self._features(views)
        loss = self.loss(features, self.options)
        self.net.zero_grad(set_to_none=True)
        loss.backward()
        grad_norm = self.optimizer.step(lr)
        with torch.no_grad():
            if self.slow is not None:
                torch._foreach_lerp_(self.averaged, self.sources, 1.0 - decay)
            if self.queues:
                self._enqueue(features.k, features.f)
        return {"loss": loss.detach(), "grad_norm": grad_norm}

    def _enqueue(self, k, f):
        size, count = self.queues[0].shape[1], len(k[0])
        slots = torch.arange(self.pointer, self.pointer + count, device=self.device)
        for queue, rows in zip(self.queues, (k, f), strict=False):
            rows = torch_losses.unit(torch.stack(tuple(rows)))
            queue.index_copy_(1, slots % size, rows)
        self.pointer = (self.pointer + count) % size


def fastest(windows, *, compiled: bool) -> tuple:
    """Find the fastest form of a peer; return its window, and its name.

    Args:
      windows: (channels_last, compiled) -> function of a number of steps to seconds.
      compiled: whether `torch.compile` is tried, in the faster memory format.
    """
    best = None

    def attempt(name, channels_last, backend):
        nonlocal best
        window = windows(channels_last=channels_last, compiled=backend)
        window(2)  # the first steps allocate, compile, and tune cuDNN
        seconds = min(window(1) for _ in range(3))
        if best is None or seconds < best[0]:
            best = seconds, name, window, channels_last

    attempt("channels last", True, None)
    attempt("contiguous", False, None)
    if compiled:
        _, name, _, channels_last = best
        attempt(f"{name}, compiled", channels_last, "inductor")
    return best[2], best[1]


def settle(threads: int, device: str | None) -> str:
    """Set PyTorch up for timing; the device, by default the GPU that JAX has."""
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = True
    if device is not None:
        return device
    cuda = jax.default_backend() == "gpu" and torch.cuda.is_available()
    return "cuda" if cuda else "cpu"


def timed(work, state, threads, *, device=None, compiled=False) -> tuple:
    """Return seconds of a window as a function of its steps, and what is timed.

    Both memory formats are tried, and `torch.compile` if asked; the fastest form stays.

    Args:
      work: our job.
      state: where our side starts, as numpy.
      threads: number of them.
      device: "cuda" or "cpu"; None: the GPU that JAX has.
      compiled: whether `torch.compile` is tried.
    """
    device, config = settle(threads, device), work.config
    images = np.asarray(work.stream.dataset.train.images).transpose(0, 3, 1, 2)
    data = torch.from_numpy(images.copy()).to(device)

    def windows(**form):
        net = Peer(config, state, device=device, precision=config["precision"], **form)
        decay = net.options.get("momentum_start")  # None: there is no slow network

        def window(steps):
            start = time.perf_counter()
            for _ in range(steps):
                rows = torch.randint(len(data), (config["batch_size"],)).to(device)
                views = net.augment(data[rows])
                net.step(views, config["optimizer"]["lr"], decay)
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        return window

    best, name = fastest(windows, compiled=compiled)
    return best, f"PyTorch {torch.__version__} {device} {name}"
