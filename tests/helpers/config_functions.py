"""Every function whose keyword-only arguments are options of a config, by name."""

import importlib
import pathlib
import sys

from jaxcl import lookup
from jaxcl.config import sections
from jaxcl.data.augment import graphs as augment_graphs
from jaxcl.data.augment import images as augment_images
from jaxcl.data.sources import by_name
from jaxcl.data.stream import imbalance, scenarios
from jaxcl.methods import online_ssl
from jaxcl.methods.icl import ddpg
from jaxcl.methods.online import replay
from jaxcl.methods.two_view import bases, strategies
from jaxcl.nets import tuning

sys.path.append(str(pathlib.Path(__file__).parents[2] / "examples"))


def modules(package):
    """The `make` of every module of a package, by name."""
    return {f"{package}.{x}": y.make for x, y in lookup.list_modules(package).items()}


def example(name, function="make"):
    """A function of examples/my_package, whose modules hold to the same rules."""
    return getattr(importlib.import_module(f"my_package.my_{name}"), function)


FUNCTIONS = {
    **modules("jaxcl.methods"),
    **modules("jaxcl.evals"),
    **{f"encoder {name}": make for name, make in sections.ENCODERS.items()},
    **{f"optimizer {name}": make for name, make in sections.OPTIMIZERS.items()},
    **{f"schedule {name}": make for name, make in sections.SCHEDULES.items()},
    **{f"source {name}": make for name, make in by_name.SOURCES.items()},
    **{f"base {name}": make for name, make in bases.BASES.items()},
    **{f"strategy {name}": make for name, make in strategies.STRATEGIES.items()},
    **{f"regulariser {x}": make for x, make in online_ssl.REGULARISERS.items()},
    "augment images": augment_images.make,
    "augment images of evaluation": augment_images.make_eval,
    "augment local": augment_images.make_local_crops,
    "augment graphs": augment_graphs.make,
    **{f"scenario {name}": x.functions[0] for name, x in scenarios.SCENARIOS.items()},
    "scenario": scenarios.make,
    "imbalance": imbalance.dominated,
    "long_tail": imbalance.long_tail,
    "replay": replay.settings,
    "agent": ddpg.Options,
    "tuning": tuning.settings,
    "mesh": sections.read_sides,
    "top": sections.TopLevel,
    "example method": example("method"),
    "example base": example("base"),
    "example strategy": example("strategy"),
    "example evaluator": example("evaluator"),
    "example source": example("source", "blobs"),
    "example encoder": example("encoder", "flat"),
    "example optimizer": example("optimizer", "sign"),
}
