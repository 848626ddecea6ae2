"""An experiment with lightly, as `experiments.py` asks for it.

Losses, heads, network, augmentation and k-NN are lightly's; the loop is that of its
documentation, with both orders of the views for MoCo and BYOL, as its benchmark has it.
"""

import copy
import pathlib

import stages as stages_lib

stages = stages_lib.Stages()  # before the imports, which are part of it

import numpy as np  # noqa: E402
import torch  # noqa: E402
from lightly import loss as losses  # noqa: E402
from lightly import transforms  # noqa: E402
from lightly.models import ResNetGenerator, modules, utils  # noqa: E402
from lightly.utils.benchmarking import knn_predict  # noqa: E402
from PIL import Image  # noqa: E402
from torchvision import transforms as vision  # noqa: E402


class Views(torch.utils.data.Dataset):
    """Images u8[N, H, W, 3] and labels; `transform` takes PIL images."""

    def __init__(self, images, labels, transform):
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return self.transform(Image.fromarray(self.images[i])), int(self.labels[i])


class Learner(torch.nn.Module):
    """Backbone, heads and loss of a method."""

    def __init__(self, asked):
        super().__init__()
        width = asked["width"] / 64
        name = {10: "resnet-9"}.get(asked["depth"], f"resnet-{asked['depth']}")
        self.backbone = ResNetGenerator(name, width=width)
        features = self.backbone.linear.in_features
        self.backbone.linear = torch.nn.Identity()
        heads, hidden, out = modules.heads, asked["hidden"], asked["out"]
        self.slow = self.prediction = None
        base = self.base = asked["base"]
        if base == "simclr":
            head = heads.SimCLRProjectionHead(features, hidden, out, batch_norm=False)
            self.loss = losses.NTXentLoss(asked["method"]["temperature"])
        elif base == "mocov2plus":
            head = heads.MoCoProjectionHead(features, hidden, out)
            rows = asked["method"]["queue_size"], out
            self.loss = losses.NTXentLoss(asked["method"]["temperature"], rows)
        elif base == "byol":
            head = heads.BYOLProjectionHead(features, hidden, out)
            self.prediction = heads.BYOLPredictionHead(out, hidden, out)
            self.loss = losses.NegativeCosineSimilarity()
        elif base == "vicreg":
            head = heads.VICRegProjectionHead(features, hidden, out, num_layers=3)
            self.loss = losses.VICRegLoss()
        else:
            head = heads.BarlowTwinsProjectionHead(features, hidden, out)
            self.loss = losses.BarlowTwinsLoss()
        self.fast = torch.nn.Sequential(self.backbone, head)
        if base in ("mocov2plus", "byol"):
            self.slow = copy.deepcopy(self.fast)
            utils.deactivate_requires_grad(self.slow)

    def forward(self, x1, x2):
        """The loss of two views."""
        if self.slow is None:
            return self.loss(self.fast(x1), self.fast(x2))
        utils.update_momentum(self.fast, self.slow, 0.99)
        q1, q2 = self.fast(x1), self.fast(x2)
        if self.prediction is not None:
            q1, q2 = self.prediction(q1), self.prediction(q2)
        with torch.no_grad():
            k1, k2 = self.slow(x1), self.slow(x2)
        return (self.loss(q1, k2) + self.loss(q2, k1)) / 2


def embed(backbone, images, labels, batch, normalize):
    """Features of length 1, and labels."""
    prepare = vision.Compose([vision.ToTensor(), vision.Normalize(**normalize)])
    data = torch.utils.data.DataLoader(Views(images, labels, prepare), batch)
    backbone.eval()
    with torch.no_grad():
        found = [(backbone(x), y) for x, y in data]
    features, known = zip(*found, strict=True)
    return torch.nn.functional.normalize(torch.cat(features), dim=1), torch.cat(known)


def main() -> None:
    """Run the experiment of the settings, and report it."""
    asked = stages_lib.settings()
    torch.set_num_threads(1)
    torch.manual_seed(asked["seed"])
    stages.turn("read")
    data = np.load(asked["data"])
    train, test = ((data[f"{x}_x"], data[f"{x}_y"]) for x in ("train", "test"))
    normalize = {"mean": asked["mean"], "std": asked["std"]}
    views = transforms.SimCLRTransform(
        input_size=asked["size"],
        cj_strength=0.5,
        min_scale=0.2,
        gaussian_blur=0.0,
        normalize=normalize,
    )
    loader = torch.utils.data.DataLoader(
        Views(*train, views), asked["batch"], shuffle=True, drop_last=True
    )
    model = Learner(asked)
    options = {"lr": asked["lr"], "momentum": 0.9, "weight_decay": 1e-4}
    optimizer = torch.optim.SGD(
        [x for x in model.parameters() if x.requires_grad], **options
    )
    stages.turn("train")
    images = 0
    for _ in range(asked["epochs"]):
        for (x1, x2), _ in loader:
            loss = model(x1, x2)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            images += len(x1)
    stages.turn("evaluate")
    bank, known = embed(model.backbone, *train, 256, normalize)
    held, truth = embed(model.backbone, *test, 256, normalize)
    guess = knn_predict(held, bank.T, known, 10, asked["neighbours"], 0.07)[:, 0]
    accuracy = float((guess == truth).float().mean())
    stages.turn("save")
    folder = pathlib.Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, folder / "last.pt")
    stages.turn("rest")
    stages_lib.report(stages, asked, accuracy=accuracy, images=images)


if __name__ == "__main__":
    main()
