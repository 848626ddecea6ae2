"""An experiment with avalanche-lib, as `experiments.py` asks for it.

Strategy, memory, loop, metrics and networks are Avalanche's.
"""

import pathlib

import stages as stages_lib

stages = stages_lib.Stages()  # before the imports, which are part of it

import numpy as np  # noqa: E402
import torch  # noqa: E402
from avalanche import models  # noqa: E402
from avalanche.benchmarks.scenarios.supervised import (  # noqa: E402
    class_incremental_benchmark,
)
from avalanche.evaluation.metrics import accuracy_metrics  # noqa: E402
from avalanche.training import supervised  # noqa: E402
from avalanche.training.plugins import EvaluationPlugin  # noqa: E402


class Known(torch.utils.data.TensorDataset):
    """Images and labels, which Avalanche reads from `targets`."""

    def __init__(self, images, labels):
        super().__init__(images, labels)
        self.targets = labels.tolist()

    def __getitem__(self, i):
        image, _ = super().__getitem__(i)
        return image, self.targets[i]


def read(asked, split) -> Known:
    """Normalised images of a split."""
    data = np.load(asked["data"])
    images = torch.from_numpy(data[f"{split}_x"]).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(asked[x]).view(1, -1, 1, 1) for x in ("mean", "std"))
    return Known((images - mean) / std, torch.from_numpy(data[f"{split}_y"]).long())


def network(asked) -> torch.nn.Module:
    """The network of the settings."""
    encoder = asked["encoder"]
    if encoder["name"] == "resnet":
        from avalanche.models.slim_resnet18 import SlimResNet18

        return SlimResNet18(10, nf=encoder["width"])
    return models.SimpleMLP(
        num_classes=10,
        hidden_size=encoder["widths"][0],
        hidden_layers=len(encoder["widths"]),
        drop_rate=encoder.get("dropout", 0.0),
    )


def main() -> None:
    """Run the experiment of the settings, and report it."""
    asked = stages_lib.settings()
    torch.set_num_threads(1)
    torch.manual_seed(asked["seed"])
    stages.turn("read")
    data = class_incremental_benchmark(
        {split: read(asked, split) for split in ("train", "test")},
        num_experiences=asked["tasks"],
        class_order=list(range(10)),
    )
    model = network(asked)
    gdumb = asked["method"]["name"] == "gdumb"
    make = supervised.GDumb if gdumb else supervised.Replay
    metrics = accuracy_metrics(experience=True, stream=True)
    strategy = make(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=asked["lr"]),
        criterion=torch.nn.CrossEntropyLoss(),
        mem_size=asked["replay"]["capacity"],
        train_mb_size=asked["method"]["batch_size"] if gdumb else asked["batch"],
        train_epochs=asked["method"]["passes"] if gdumb else asked["epochs"],
        eval_mb_size=256,
        evaluator=EvaluationPlugin(metrics, loggers=[]),
    )
    images = 0
    for experience in data.train_stream:
        stages.turn("train")
        strategy.train(experience, num_workers=0)
        images += len(experience.dataset)
        stages.turn("evaluate")
        found = strategy.eval(data.test_stream, num_workers=0)
    name = "Top1_Acc_Stream/eval_phase/"
    accuracy = next(value for key, value in found.items() if key.startswith(name))
    stages.turn("save")
    folder = pathlib.Path(asked["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(strategy.model.state_dict(), folder / "last.pt")
    stages.turn("rest")
    stages_lib.report(stages, asked, accuracy=float(accuracy), images=images)


if __name__ == "__main__":
    main()
