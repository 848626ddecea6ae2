"""The step of the online methods, written in plain eager PyTorch.

`steps.py --peer` times it beside ours. Each method is one function that does what
`jaxcl.methods` has under its name: passes apart for incoming and for replayed rows in
train mode, plain SGD, u8 images in a reservoir, normalised when they are drawn.

Choices that favour this side: the memory is full, so that nothing is masked; slots are
chosen on the host, so that no step waits for a GPU; SGD uses torch's multi-tensor
functions. The network is `torch.compile`d where the caller asks for it, and otherwise
not.
"""

import importlib
import time

import numpy as np
import torch
from peers import torch_two_view
from torch import nn
from torch.nn import functional

from jaxcl import schema


class Network(nn.Module):
    """The encoder and one head over all classes."""

    def __init__(self, encoder, head, params, stats):
        super().__init__()
        options = {k: v for k, v in encoder.items() if k not in ("name", "conv_init")}
        self.encoder, self.cosine = torch_two_view.ResNet(**options), head == "cosine"
        torch_two_view.load(self.encoder, params["encoder"], stats["encoder"])
        tensors = {k: torch.from_numpy(np.array(v)) for k, v in params["head"].items()}
        self.weight = nn.Parameter(tensors["weight"])
        self.bias = None if self.cosine else nn.Parameter(tensors["bias"])

    def forward(self, x):
        """Features f32[B,D] and logits f32[B,C]."""
        features = self.encoder(x)
        if not self.cosine:
            return features, functional.linear(features, self.weight, self.bias)
        rows, weight = (
            t / (torch.linalg.vector_norm(t, dim=1, keepdim=True) + 1e-5)
            for t in (features, self.weight)
        )
        return features, 10.0 * rows @ weight.T


class Memory:
    """A full reservoir: u8 images, labels and logits on the device, tasks on the host.

    Args: `buffer`, a `jaxcl.memory.buffer.Buffer` of numpy arrays.
    """

    def __init__(self, buffer, device, channels_last):
        items = buffer.items
        if not buffer.filled.all():
            raise ValueError("the peer is written for a memory that is full")
        self.images = _images(items["image"], device, channels_last)
        self.label = torch.from_numpy(items["label"].astype(np.int64)).to(device)
        self.task = torch.from_numpy(items["task"].astype(np.int64))
        self.logits = None
        if "logits" in items:
            self.logits = torch.from_numpy(np.array(items["logits"])).to(device)
        self.seen = int(buffer.seen)

    def draw(self, count, allowed=None):
        """Slots without replacement, i64[count], of a mask bool[capacity]."""
        if allowed is None:
            return torch.randperm(len(self.task))[:count]
        slots = allowed.nonzero()[:, 0]
        return slots[torch.randperm(len(slots))[:count]]

    def write(self, images, label, task, logits=None):
        """Vitter's Algorithm R, for all rows at once."""
        number = torch.arange(self.seen, self.seen + len(images))
        drawn = torch.rand(len(number), dtype=torch.float64) * (number + 1)
        kept = (drawn < len(self.task)).nonzero()[:, 0]
        slots = drawn[kept].long()
        self.seen += len(number)
        self.task[slots] = task
        kept, slots = kept.to(label.device), slots.to(label.device)
        self.images[slots], self.label[slots] = images[kept], label[kept]
        if logits is not None:
            self.logits[slots] = logits[kept]


def _images(images, device, channels_last):
    """u8[B,H,W,C] of numpy -> u8[B,C,H,W] in the memory format of the convolutions."""
    tensor = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2)
    return (tensor if channels_last else tensor.contiguous()).to(device)


class Peer:
    """Network, memory and step of one method.

    Args:
      config: a job's config.
      state: a `jaxcl.core.TrainState` of numpy arrays in the second task, its memory
        full; the peer starts from the same.
      channels_last: memory format of images and convolutions.
      compiled: a backend of `torch.compile` for the network; None: eager.
    """

    def __init__(self, config, state, *, device, channels_last, compiled=None):
        name = config["method"]["name"]
        self.method, self.device = METHODS[name], torch.device(device)
        made = importlib.import_module(f"jaxcl.methods.{name}").make
        self.options = schema.defaults(made) | dict(config["method"])
        net = Network(
            config["encoder"], self.options["head"], state.params, state.stats
        )
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.net = net.to(self.device, memory_format=self.format).train()
        self.params = list(self.net.parameters())
        extra = state.extra
        self.memory = Memory(extra.memory, self.device, channels_last)
        self.seen = torch.from_numpy(np.array(extra.seen)).to(self.device)
        if compiled is not None:
            self.net.compile(backend=compiled)
        self.lr, self.task = config["optimizer"]["lr"], int(state.task)
        mean, std = (
            torch.tensor(config["augment"][k], device=self.device)[:, None, None]
            for k in ("mean", "std")
        )
        self.mean, self.std = 255 * mean, 255 * std

    def plain(self, images):
        """u8 -> f32, normalised."""
        x = (images.float() - self.mean) / self.std
        return x.contiguous(memory_format=self.format)

    def replay(self, slots):
        """Images f32[R,C,H,W] and labels of stored rows."""
        slots = slots.to(self.device)
        return self.plain(self.memory.images[slots]), self.memory.label[slots]

    def past(self):
        """Slots whose rows came before this task."""
        return self.memory.task < self.task

    def step(self, images, label):
        """One step on u8[B,C,H,W] and i64[B]; loss and gradient norm."""
        self.seen[label] = True
        for param in self.params:
            param.grad = None
        loss, logits = self.method(self, images, label)
        with torch.no_grad():
            grads = [param.grad for param in self.params]
            torch._foreach_add_(self.params, grads, alpha=-self.lr)
            norm = torch.stack(torch._foreach_norm(grads)).norm()
        self.memory.write(images, label, self.task, logits)
        return {"loss": loss.detach(), "grad_norm": norm}


def _cross_entropy(logits, label, allowed=None):
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -torch.inf)
    return functional.cross_entropy(logits, label)


def _er(peer, images, label):
    x, y = peer.replay(peer.memory.draw(len(label), peer.past()))
    loss = _cross_entropy(peer.net(peer.plain(images))[1], label)
    loss = loss + _cross_entropy(peer.net(x)[1], y)
    loss.backward()
    return loss, None


def _er_ace(peer, images, label):
    x, y = peer.replay(peer.memory.draw(len(label)))
    present = torch.zeros_like(peer.seen)
    present[label] = True
    loss = _cross_entropy(peer.net(peer.plain(images))[1], label, present)
    loss = loss + _cross_entropy(peer.net(x)[1], y, peer.seen)
    loss.backward()
    return loss, None


def _mir(peer, images, label):
    slots = peer.memory.draw(peer.options["candidates"], peer.past())
    x, y = peer.replay(slots)
    loss = _cross_entropy(peer.net(peer.plain(images))[1], label)
    loss.backward()
    with torch.no_grad():
        grads, before = [p.grad for p in peer.params], [p.clone() for p in peer.params]
        low = functional.cross_entropy(peer.net(x)[1], y, reduction="none")
        # The pass after the step moves no running statistics: only the first one does.
        buffers = list(peer.net.buffers())
        kept = [b.clone() for b in buffers]
        torch._foreach_add_(peer.params, grads, alpha=-peer.lr)
        high = functional.cross_entropy(peer.net(x)[1], y, reduction="none")
        torch._foreach_copy_(peer.params, before)
        torch._foreach_copy_(buffers, kept)
        worst = (high - low).topk(len(label)).indices
    # Again from the memory, as where it is augmented.
    x, y = peer.replay(slots.to(peer.device)[worst])
    more = _cross_entropy(peer.net(x)[1], y)
    more.backward()
    return loss + more, None


def _der(peer, images, label):
    first, second = (peer.memory.draw(len(label)) for _ in range(2))
    (x, _), stored = peer.replay(first), peer.memory.logits[first.to(peer.device)]
    logits = peer.net(peer.plain(images))[1]
    loss = _cross_entropy(logits, label)
    loss = loss + peer.options["alpha"] * functional.mse_loss(peer.net(x)[1], stored)
    x, y = peer.replay(second)
    loss = loss + peer.options["beta"] * _cross_entropy(peer.net(x)[1], y)
    loss.backward()
    return loss, logits.detach()


# (peer, images, label) -> (loss, logits to store), the gradient left in the network.
METHODS = {"er": _er, "er_ace": _er_ace, "mir": _mir, "der": _der}


def timed(work, state, threads, *, device=None, compiled=False) -> tuple:
    """Return what `torch_two_view.timed` does, of an online method."""
    device = torch_two_view.settle(threads, device)
    source, batch = work.stream.tasks[1].train, work.config["batch_size"]
    examples, rows = source.examples, torch.from_numpy(np.array(source.rows))

    def windows(*, channels_last, **form):
        net = Peer(
            work.config, state, device=device, channels_last=channels_last, **form
        )
        images = _images(examples.images, device, channels_last)
        labels = torch.from_numpy(np.array(examples.label, np.int64)).to(device)

        def window(steps):
            start = time.perf_counter()
            for _ in range(steps):
                chosen = rows[torch.randperm(len(rows))[:batch]].to(device)
                net.step(images[chosen], labels[chosen])
            if device == "cuda":
                torch.cuda.synchronize()
            return time.perf_counter() - start

        return window

    best, name = torch_two_view.fastest(windows, compiled=compiled)
    return best, f"PyTorch {torch.__version__} {device} {name}"
