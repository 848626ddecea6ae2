"""Encoders that start from given weights, and the parts of them that train.

Layers count from the images: 0 is what comes before the first block (a ViT's patches,
tokens and positions, a ResNet's first convolution), then one for each block of a ViT or
stage of a ResNet or ConvNeXt. Heads and last norms come after the last.

With `lora_rank` r, the matrices K [in, out] that are adapted compute with
K + (alpha / r) A B, where A [in, r] and B [r, out] are trained and K is not (LoRA: Hu
et al., ICLR 2022). With `open_layers` the last blocks are trained whole, too
(ExPLoRA: Khanna et al., ICML 2025).

Departures:
- The sum is formed before it is multiplied, so that one function serves training,
  evaluation and `merge_adapters`; the gradient of each adapted matrix is formed, too.
- A slow network averages A and B, not their product.
- Weight decay also acts on adapters, which pulls the network towards its start.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jaxcl import core, schema
from jaxcl.errors import Refused
from jaxcl.nets import convnext, layers, resnet, traits, vit

ADAPTERS = "lora"  # their entry among the parameters of the encoder
_PARTS = ("attention", "mlp")
_TARGETS = {
    "query_value": r"attention/(query|value)",
    "attention": r"attention/\w+",
    "all": r"(attention|mlp)/\w+",
}


class TuningSettings(NamedTuple):
    """The checked options of `settings`."""

    frozen_layers: int
    open_layers: int
    layer_decay: float
    lora_rank: int
    lora_alpha: float
    lora_on: str
    norms: bool
    statistics: str


# Named sets of options.
RECIPES: dict[str, dict] = {
    "decay": {"layer_decay": 0.75},  # of MAE's fine-tuning of large networks
    "lora": {"lora_rank": 8},
    "explora": {"lora_rank": 64, "open_layers": 1},
}


@schema.checked("config.tuning")
def settings(
    *,
    frozen_layers: schema.Natural = 0,
    layer_decay: Annotated[float, schema.Range(above=0, most=1)] = 1.0,
    lora_rank: Annotated[int, schema.Range(0, 4096)] = 0,
    lora_alpha: schema.Positive | None = None,
    lora_on: Literal["query_value", "attention", "all"] = "query_value",
    open_layers: schema.Natural = 0,
    norms: bool = True,
    statistics: Literal["batch", "running"] = "batch",
) -> TuningSettings:
    """Choose the parts of an encoder that train, and their learning rates.

    Args:
      frozen_layers: number of first layers that are not trained.
      layer_decay: factor of a layer's rate, relative to the layer after it.
      lora_rank: rank of the adapters; 0: there are none, and every layer that is not
        frozen trains.
      lora_alpha: alpha of the adapters' factor alpha / rank; None: the rank.
      lora_on: matrices with adapters: for queries and values, for all of the attention,
        or also for the MLP.
      open_layers: number of last blocks that are trained whole, besides adapters.
      norms: whether all norms train, besides adapters.
      statistics: by what the encoder's batch norm normalises while it trains: the
        "batch", which moves the running statistics; or the "running" statistics of the
        start, which stay.

    Raises:
      Refused: an option is out of its range, or needs adapters and there are none.
    """
    if not lora_rank and open_layers:
        raise Refused(
            f"config.tuning.open_layers={open_layers}: is for adapters "
            "(config.tuning.lora_rank above 0); config.tuning.frozen_layers freezes "
            "the first layers and trains all others"
        )
    alpha = float(lora_rank) if lora_alpha is None else lora_alpha
    return TuningSettings(
        frozen_layers=frozen_layers,
        open_layers=open_layers,
        layer_decay=layer_decay,
        lora_rank=lora_rank,
        lora_alpha=alpha,
        lora_on=lora_on,
        norms=norms,
        statistics=statistics,
    )


def read_section(section: dict | str | None) -> dict:
    """Return the options of config.tuning; a word stands for those in `RECIPES`."""
    return RECIPES[section] if isinstance(section, str) else section or {}


def count_layers(net: Any) -> int:
    """Count the layers of an encoder, the one before its blocks included.

    Raises:
      Refused: layers of this encoder are not known.
    """
    if isinstance(net, vit.ViT):
        return net.layers + 1
    if isinstance(net, resnet.ResNet):
        return len(net.stage_sizes) + 1
    if isinstance(net, convnext.ConvNeXt):
        return len(net.depths) + 1
    raise Refused(
        "config.tuning: the layers of config.encoder are not known; must be 'vit', "
        "'resnet' or 'convnext'"
    )


def layer_of(name: str, layers: int) -> int:
    """Find the number of the layer that a parameter belongs to.

    Args:
      name: path of the parameter, as "block_3/norm1/scale".
      layers: number of layers, from `count_layers`; heads and last norms get this
        number.
    """
    if match := re.match(r"block_(\d+)/", name):
        return int(match[1]) + 1
    if match := re.match(r"(?:layer|stage)(\d+)_", name):
        return int(match[1])
    return layers if name.startswith("norm/") else 0


def bare_module(encoder: Any) -> Any:
    """Return the flax module of an encoder, tuned or not."""
    return encoder.net if isinstance(encoder, TunedEncoder) else encoder


@dataclasses.dataclass(frozen=True)
class TunedEncoder:
    """An encoder that trains in part and is called like the bare encoder.

    Attributes:
      net: flax module.
      chosen: settings of the parts that are trained.
      weights: function () -> initial parameters and statistics, as arrays on the host;
        None: the net's own.
    """

    net: Any
    chosen: TuningSettings
    weights: Callable | None = None

    def __post_init__(self):
        with_batch_norm = resnet.ResNet, resnet.ConvNet
        if self.chosen.statistics == "running" and not isinstance(
            self.net, with_batch_norm
        ):
            raise Refused(
                "config.tuning.statistics='running': config.encoder has no batch norm; "
                "must be 'batch'"
            )
        if self._has_one_rate():
            return
        layers = count_layers(self.net)
        for name in ("frozen_layers", "open_layers"):
            if getattr(self.chosen, name) > layers:
                raise Refused(
                    f"config.tuning.{name}={getattr(self.chosen, name)}: the encoder "
                    f"has {layers} layers"
                )
        if self.chosen.lora_rank and not isinstance(self.net, vit.ViT):
            raise Refused(
                f"config.tuning.lora_rank={self.chosen.lora_rank}: adapters are for "
                "Vision Transformers (config.encoder.name='vit'); must be 0"
            )

    def _has_one_rate(self) -> bool:
        """Say whether all layers train, by one learning rate."""
        return self.chosen._replace(statistics="batch") == settings()

    @property
    def trains_whole(self) -> bool:
        """Whether every parameter trains at the full learning rate."""
        return self._has_one_rate() and not traits.read_traits(self.net).frozen

    def __getattr__(self, name: str) -> Any:
        """Take any other attribute from the encoder, see `traits.Traits`."""
        if name not in traits.Traits._fields:
            raise AttributeError(name)
        return getattr(self.net, name)

    def rate_share(self, path: tuple[str, ...]) -> float:
        """Return a parameter's share of the learning rate; 0 if it is frozen.

        Args:
          path: names on the way to the parameter, from the encoder's entry on.
        """
        adapter = path[0] == ADAPTERS
        name = "/".join(path[1:] if adapter else path)
        if path[0] in traits.read_traits(self.net).frozen:
            return 0.0
        if self._has_one_rate():
            return 1.0
        layers = count_layers(self.net)
        number, chosen = layer_of(name, layers), self.chosen
        rate = chosen.layer_decay ** (layers - number)
        if number < chosen.frozen_layers:
            return 0.0
        if not chosen.lora_rank or adapter:
            return rate
        norm = chosen.norms and re.search(r"(^|/)norm\d?/", name)
        opened = layers - chosen.open_layers <= number < layers
        return rate if norm or opened else 0.0

    def init(self, key: jax.Array, inputs: Any, **options: Any) -> dict:
        """Create variables: the given weights, and adapters that add 0 at first."""
        return self.init_with_output(key, inputs, **options)[1]

    def init_with_output(self, key: jax.Array, inputs: Any, **options: Any):
        """Create outputs, and variables as from `init`."""
        if self.weights is None:
            outputs, variables = self.net.init_with_output(key, inputs, **options)
        else:
            outputs, variables = self._start_outputs(key, inputs, options)
        adapters = self._start_adapters(key, variables["params"])
        params = variables["params"] | ({ADAPTERS: adapters} if adapters else {})
        return outputs, {**variables, "params": params}

    def _start_outputs(self, key, inputs, options):
        """Return outputs and variables of the given weights.

        They come from the host while the program runs. Constants would be compiled into
        the program, gigabytes for a large network.
        """

        def init_plain(inputs):
            return self.net.init_with_output(key, inputs, **options)

        outputs, shapes = jax.eval_shape(init_plain, inputs)
        shapes = {"params": shapes["params"], "stats": shapes.get("batch_stats", {})}
        params, stats = jax.pure_callback(self.weights, tuple(shapes.values()))
        variables = {"params": params} | ({"batch_stats": stats} if stats else {})
        return jnp.zeros(outputs.shape, outputs.dtype), variables

    def _start_adapters(self, key, params):
        """Start adapters: A [in, r] as PyTorch's layers, B [r, out] at 0."""
        chosen, adapters = self.chosen, {}
        if not chosen.lora_rank:
            return adapters
        # Frozen and fully trained blocks have no adapters.
        first, end = chosen.frozen_layers, count_layers(self.net) - chosen.open_layers
        for number in range(max(first, 1), end):
            block = f"block_{number - 1}"
            names = [(part, dense) for part in _PARTS for dense in params[block][part]]
            for part, dense in names:
                if re.fullmatch(_TARGETS[chosen.lora_on], f"{part}/{dense}"):
                    rows, columns = params[block][part][dense]["kernel"].shape
                    key = jax.random.fold_in(key, 1)
                    a = layers.torch_uniform(rows)(key, (rows, chosen.lora_rank))
                    pair = {"a": a, "b": jnp.zeros((chosen.lora_rank, columns))}
                    adapters.setdefault(block, {}).setdefault(part, {})[dense] = pair
        return adapters

    def merge_adapters(self, params: core.PyTree) -> core.PyTree:
        """Merge the adapters into the weights: parameters of the plain encoder, f32."""
        factor = self.chosen.lora_alpha / max(self.chosen.lora_rank, 1)

        def with_product(tree, pairs):
            if "a" in pairs:
                exact = jax.lax.Precision.HIGHEST
                product = jnp.dot(pairs["a"], pairs["b"], precision=exact)
                return {**tree, "kernel": tree["kernel"] + factor * product}
            merged = {name: with_product(tree[name], x) for name, x in pairs.items()}
            return {**tree, **merged}

        plain = {name: tree for name, tree in params.items() if name != ADAPTERS}
        return with_product(plain, params.get(ADAPTERS, {}))

    def apply(self, variables: dict, inputs: Any, **options: Any) -> Any:
        """Apply the encoder; frozen parameters get no gradient."""

        def stop_frozen_gradient(path, leaf):
            names = tuple(entry.key for entry in path)
            return leaf if self.rate_share(names) else jax.lax.stop_gradient(leaf)

        params = jax.tree_util.tree_map_with_path(
            stop_frozen_gradient, variables["params"]
        )
        merged = {**variables, "params": self.merge_adapters(params)}
        if self.chosen.statistics == "running":
            options["train"] = False
        return self.net.apply(merged, inputs, **options)
