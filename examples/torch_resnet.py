"""Load a ResNet that `jaxcl export --torch` wrote, with PyTorch alone.

model = load("exports/pnr_cifar100")
features = model(images)  # uint8[N, H, W, C] -> float32[N, D]
"""

import json
import pathlib

import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

DEPTHS = {10: (1, 1, 1, 1), 18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
DEPTHS[101] = (3, 4, 23, 3)


class Block(nn.Module):
    """A residual block, named as torchvision names its parts."""

    def __init__(self, wide, filters, stride, bottleneck):
        super().__init__()
        out = filters * 4 if bottleneck else filters
        convs = [(3, stride), (3, 1)]
        if bottleneck:
            convs = [(1, 1), (3, stride), (1, 1)]
        widths = [wide, *[filters] * (len(convs) - 1), out]
        self.count = len(convs)
        for i, (k, s) in enumerate(convs):
            conv = nn.Conv2d(widths[i], widths[i + 1], k, s, k // 2, bias=False)
            self.add_module(f"conv{i + 1}", conv)
            self.add_module(f"bn{i + 1}", nn.BatchNorm2d(widths[i + 1]))
        self.downsample = nn.Identity()
        if stride > 1 or wide != out:
            conv = nn.Conv2d(wide, out, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(out))

    def forward(self, x):
        """Add the block to its input."""
        y = x
        for i in range(1, self.count + 1):
            y = getattr(self, f"bn{i}")(getattr(self, f"conv{i}")(y))
            y = F.relu(y) if i < self.count else y
        return F.relu(y + self.downsample(x))


class ResNet(nn.Module):
    """The encoder that a card describes."""

    def __init__(self, card):
        super().__init__()
        made, given = card["encoder"], card["input"]
        self.pool, wide, bottleneck = made["pool"], made["width"], made["depth"] >= 50
        kernel, stride, pad = 3, 1, made["stem_padding"]
        self.maxpool = nn.Identity()
        if made["stem"] == "imagenet":
            kernel, stride, pad = 7, 2, 3
            self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.conv1 = nn.Conv2d(given["channels"], wide, kernel, stride, pad, bias=False)
        self.bn1 = nn.BatchNorm2d(wide)
        for stage, size in enumerate(DEPTHS[made["depth"]]):
            filters, blocks = made["width"] * 2**stage, []
            for i in range(size):
                stride = 2 if stage and not i else 1
                blocks.append(Block(wide, filters, stride, bottleneck))
                wide = filters * 4 if bottleneck else filters
            self.add_module(f"layer{stage + 1}", nn.Sequential(*blocks))
        for name in ("mean", "std"):
            moment = torch.tensor(given[name]).reshape(-1, 1, 1)
            self.register_buffer(name, moment, persistent=False)

    def forward(self, images):
        """Images u8[N, H, W, C] of the encoder's size -> features f32[N, D]."""
        x = (images.permute(0, 3, 1, 2).float() / 255 - self.mean) / self.std
        x = self.maxpool(F.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        if self.pool is None:
            return x.mean((2, 3))
        return F.avg_pool2d(x, self.pool).permute(0, 2, 3, 1).flatten(1)


def load(folder):
    """Load the folder of an export, ready for evaluation."""
    folder = pathlib.Path(folder)
    model = ResNet(json.loads((folder / "card.json").read_text()))
    model.load_state_dict(load_file(folder / "resnet_torch.safetensors"))
    return model.eval()
