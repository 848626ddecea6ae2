"""An experiment with jaxcl, as `experiments.py` asks for it."""

import functools
import pathlib
import time

import stages as stages_lib

# Methods of a run -> what they count as
STAGES = {
    "_train_task": "train",
    "_evaluate": "evaluate",
    "_save_checkpoint": "save",
}


def main() -> None:
    """Run the experiment of the settings, and report it."""
    stages = stages_lib.Stages()
    asked = stages_lib.settings()

    import jax  # now, since its import is what "start" measures

    from jaxcl.api import fit
    from jaxcl.config import build, files
    from jaxcl.methods import gdumb
    from jaxcl.run import checkpoint, finish, train

    compiling = []

    def note(event, seconds, **_):
        if event.startswith("/jax/core/compile"):
            compiling.append((time.time() - seconds, time.time()))

    jax.monitoring.register_event_duration_secs_listener(note)
    run = train._TrainingRun
    for name, stage in STAGES.items():
        setattr(run, name, _method(stages, stage, getattr(run, name)))
    for name in ("wait", "close"):
        own = getattr(checkpoint.Checkpoints, name)
        setattr(checkpoint.Checkpoints, name, _method(stages, "save", own))
    build_fit = gdumb.build_fit
    gdumb.build_fit = lambda *args: stages.during("train", build_fit(*args))
    finish.run_job = stages.during("rest", finish.run_job)
    stages.turn("read")
    run_one = two_views if "base" in asked else stream
    accuracy, images = run_one(asked, fit.fit, build, files, finish)
    stages.turn("rest")
    programs = len(compiling)
    stages_lib.report(
        stages, asked, compiling, accuracy=accuracy, images=images, programs=programs
    )


def _method(stages, stage, function):
    @functools.wraps(function)
    def timed(self, *args, **options):
        with stages.on(stage):
            return function(self, *args, **options)

    return timed


def two_views(asked, fit, *_) -> tuple[float, int]:
    """Train an encoder without labels; neighbours judge it."""
    options = {
        "optimizer": {"name": "sgd", "lr": asked["lr"], "weight_decay": 1e-4},
        "scale_lr": False,
        "schedule": {"name": "constant"},
        "evaluators": {"knn": {"k": asked["neighbours"]}},
        "evaluate_untrained": False,
        "plots": False,
        "tensorboard": False,
        "augment": {
            "size": asked["size"],
            "scale": (0.2, 1.0),
            "interpolation": "bilinear",
            "jitter": (0.4, 0.4, 0.4, 0.1),
            "mean": tuple(asked["mean"]),
            "std": tuple(asked["std"]),
        },
    }
    options |= {f"method.{key}": value for key, value in asked["method"].items()}
    encoder = {key: asked[key] for key in ("depth", "width", "conv_init")}
    result = fit(
        asked["data"],
        base=asked["base"],
        encoder={"name": "resnet"} | encoder,
        epochs=asked["epochs"],
        batch_size=asked["batch"],
        seed=asked["seed"],
        options=options,
        out=asked["folder"],
        quiet=True,
    )
    cost = result.results["cost"]["total"]
    return result.results["matrices"]["knn/class_incremental"][-1][-1], cost["images"]


def stream(asked, _, build, files, finish) -> tuple[float, int]:
    """Learn classes that come one after another, with a memory."""
    online = files.load_paper("online")
    config = online.start("experiment", asked["lr"])
    config.update(seed=asked["seed"], epochs=asked["epochs"], batch_size=asked["batch"])
    config.data = {"name": "npz", "path": asked["data"]}
    config.scenario = {"name": "class", "num_tasks": asked["tasks"]}
    size, mean, std = asked["size"], tuple(asked["mean"]), tuple(asked["std"])
    encoder = asked["encoder"]
    config.augment.update(size=size, mean=mean, std=std, flip=0.0)
    config.encoder = {k: tuple(v) if k == "widths" else v for k, v in encoder.items()}
    if encoder["name"] == "mlp":
        config.steps_per_call = 10  # as configs/baselines_mnist.py has it
    config.replay, config.method = asked["replay"], asked["method"]
    config.evaluators = {"predict": {"met_only": False}}
    config.plots = config.tensorboard = config.progress = False
    config.save_every = 0
    work = build.build(config, pathlib.Path(asked["folder"]))
    results = finish.run_job(work, pathlib.Path(asked["folder"]))
    final = results["matrices"]["predict/class_incremental"][-1]
    sizes = [len(task.test) for task in work.stream.tasks]
    accuracy = sum(a * n for a, n in zip(final, sizes, strict=True)) / sum(sizes)
    return accuracy, results["cost"]["total"]["images"]


if __name__ == "__main__":
    main()
