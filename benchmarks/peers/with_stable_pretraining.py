"""An experiment with stable-pretraining, as `experiments.py` asks for it.

Module, loss, augmentation and manager are its own, after its README's example. It has
no k-NN on all train images without augmentation, so the formula is written here.
"""

import functools
import os
import pathlib

import stages as stages_lib

stages = stages_lib.Stages()  # before the imports, which are part of it

import lightning  # noqa: E402
import numpy as np  # noqa: E402
import stable_pretraining as spt  # noqa: E402
import torch  # noqa: E402
from PIL import Image  # noqa: E402
from stable_pretraining import forward  # noqa: E402
from stable_pretraining.data import transforms  # noqa: E402


class Pairs(torch.utils.data.Dataset):
    """Images as PIL, with labels."""

    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, i):
        return Image.fromarray(self.images[i]), int(self.labels[i])


def loaders(asked, train, test):
    """Views of the train images, and both splits without augmentation."""
    moments = {"mean": asked["mean"], "std": asked["std"]}
    size = asked["size"], asked["size"]

    def view():
        return transforms.Compose(
            transforms.RGB(),
            transforms.RandomResizedCrop(size, scale=(0.2, 1.0)),
            transforms.RandomHorizontalFlip(p=0.5),
            transforms.ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8),
            transforms.RandomGrayscale(p=0.2),
            transforms.ToImage(**moments),
        )

    def loader(split, transform, batch, **how):
        names = ["image", "label"]
        data = spt.data.FromTorchDataset(Pairs(*split), names, transform=transform)
        return torch.utils.data.DataLoader(data, batch, **how)

    plain = transforms.Compose(transforms.RGB(), transforms.ToImage(**moments))
    views = transforms.MultiViewTransform([view(), view()])
    how = {"shuffle": True, "drop_last": True}
    fitted = loader(train, views, asked["batch"], **how)
    return fitted, loader(train, plain, 256), loader(test, plain, 256)


def embed(backbone, loader):
    """Features of length 1, and labels."""
    backbone.eval()
    with torch.no_grad():
        found = [(backbone(x["image"]), torch.as_tensor(x["label"])) for x in loader]
    features, labels = zip(*found, strict=True)
    return torch.nn.functional.normalize(torch.cat(features), dim=1), torch.cat(labels)


def neighbours(bank, known, held, k) -> torch.Tensor:
    """Classes by the weighted vote of the k nearest rows of the bank."""
    similar, nearest = (held @ bank.T).topk(k, dim=1)
    votes = torch.zeros(len(held), 10)
    votes.scatter_add_(1, known[nearest], (similar / 0.07).exp())
    return votes.argmax(dim=1)


def main() -> None:
    """Run the experiment of the settings, and report it."""
    asked = stages_lib.settings()
    torch.set_num_threads(1)
    lightning.seed_everything(asked["seed"], verbose=False)
    folder = pathlib.Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    os.chdir(folder)
    stages.turn("read")
    data = np.load(asked["data"])
    train, test = ((data[f"{x}_x"], data[f"{x}_y"]) for x in ("train", "test"))
    fitted, bank, judged = loaders(asked, train, test)
    backbone = spt.backbone.from_torchvision("resnet18", low_resolution=True)
    backbone.fc = torch.nn.Identity()
    projector = torch.nn.Sequential(
        torch.nn.Linear(512, asked["hidden"]),
        torch.nn.ReLU(),
        torch.nn.Linear(asked["hidden"], asked["out"]),
    )
    how = {"lr": asked["lr"], "momentum": 0.9, "weight_decay": 1e-4}
    constant = functools.partial(torch.optim.lr_scheduler.ConstantLR, factor=1.0)
    module = spt.Module(
        backbone=backbone,
        projector=projector,
        forward=forward.simclr,
        simclr_loss=spt.losses.NTXEntLoss(asked["method"]["temperature"]),
        optim={
            "optimizer": functools.partial(torch.optim.SGD, **how),
            "scheduler": constant,
        },
    )
    trainer = lightning.Trainer(
        max_epochs=asked["epochs"],
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        limit_val_batches=0,
    )
    stages.turn("train")
    both = spt.data.DataModule(train=fitted, val=judged)
    spt.Manager(trainer=trainer, module=module, data=both, seed=asked["seed"])()
    stages.turn("evaluate")
    features, known = embed(backbone, bank)
    held, truth = embed(backbone, judged)
    guess = neighbours(features, known, held, asked["neighbours"])
    accuracy = float((guess == truth).float().mean())
    stages.turn("save")
    torch.save(module.state_dict(), folder / "last.pt")
    stages.turn("rest")
    images = asked["epochs"] * len(fitted) * asked["batch"]
    stages_lib.report(stages, asked, accuracy=accuracy, images=images)


if __name__ == "__main__":
    main()
