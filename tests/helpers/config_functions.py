"""Every function whose keyword-only arguments are options of a config, by name."""

from jaxcl import lookup
from jaxcl.config import sections
from jaxcl.data import imbalance, scenarios, sources
from jaxcl.data.augment import graphs as augment_graphs
from jaxcl.data.augment import images as augment_images
from jaxcl.methods.icl import ddpg
from jaxcl.methods.online import replay
from jaxcl.methods.online_ssl import regularisers
from jaxcl.methods.two_view import bases, strategies


def modules(package):
    """The `make` of every module of a package, by name."""
    return {f"{package}.{x}": y.make for x, y in lookup.list_modules(package).items()}


FUNCTIONS = {
    **modules("jaxcl.methods"),
    **modules("jaxcl.evals"),
    **{f"encoder {name}": made for name, made in sections.ENCODERS.items()},
    **{f"optimizer {name}": made for name, made in sections.OPTIMIZERS.items()},
    **{f"schedule {name}": made for name, made in sections.SCHEDULES.items()},
    **{f"source {name}": made for name, made in sources.SOURCES.items()},
    **{f"base {name}": made for name, made in bases.BASES.items()},
    **{f"strategy {name}": made for name, made in strategies.STRATEGIES.items()},
    **{f"regulariser {x}": made for x, made in regularisers.REGULARISERS.items()},
    "augment images": augment_images.make,
    "augment images of evaluation": augment_images.make_eval,
    "augment graphs": augment_graphs.make,
    **{f"scenario {name}": own[0] for name, own in scenarios.SCENARIOS.items()},
    "scenario": scenarios.make,
    "imbalance": imbalance.dominated,
    "long_tail": imbalance.long_tail,
    "replay": replay.settings,
    "agent": ddpg.Options,
    "top": sections.TopLevel,
}
