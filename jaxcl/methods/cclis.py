"""CCLIS: replay drawn by importance, samples against prototypes, PRD.

Li, Azizov, Li, Liang, "Contrastive Continual Learning with Importance Sampling and
Prototype-Instance Relation Distillation", AAAI 2024 (P); Table 3's variants are
`keep`, `scope` and `weight`.

Departures:
- Losses are means over the batch, as in the released code, where P writes sums.
- PRD goes over old classes, as in the code; P's goes over all, of which the teacher's
  new prototypes are random (`distill_over="seen"`).
- The importance weights are P's; the code takes those of `scope="all_negatives"` for
  its CIFAR-100 and Tiny-ImageNet, by a mistake.
- A batch holds stored rows in proportion to their number, as in the code; P says
  half (`share=0.5`). Incomplete last batches are dropped.
- The prototypes' warm-up begins at the same share of the network's rate as it ends.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxcl import core
from jaxcl.losses import prototype
from jaxcl.methods import rehearsal

_CHUNK = 256  # images that are scored at a time


def make(
    parts: core.Parts,
    *,
    temperature=0.5,
    weight=0.6,
    distill_temperature=0.2,
    past_temperature=0.1,
    distill_over="old",
    scope="old",
    keep="importance",
    passes=5,
    leftover=False,
    share: float | None = None,
    memory_size=200,
    prototype_rate=0.01,
    hidden_dim=512,
    output_dim=128,
) -> core.Method:
    """Sample-NCE + weight * PRD, on a memory chosen near other classes' prototypes.

    Args:
      temperature: of Sample-NCE, and of the scores that choose the memory.
      weight: of PRD, lambda; 0: without.
      distill_temperature, past_temperature: of PRD, kappa of student and teacher.
      distill_over: "old", the classes of earlier tasks, or all "seen".
      scope: which negatives importance weighs, see `prototype.sample_nce`; "none" is
        plain prototype NCE.
      keep: "importance" draws what is kept by `prototype.proposal`, "uniform" draws
        it uniformly, and then weights nothing.
      passes: augmented views of each row that scores are averaged over.
      leftover: keep a term of the row's own class in the scores, as the released code
        does by a mistake.
      share: of a batch that is stored rows; None: theirs of all rows.
      memory_size: rows kept.
      prototype_rate: learning rate of the prototypes over that of the network.
      hidden_dim, output_dim: of the projector.

    Raises:
      ValueError: naming the field, the value and what is allowed.
    """
    given = locals()
    core.check_choice("config.method.distill_over", distill_over, ("old", "seen"))
    core.check_choice("config.method.scope", scope, prototype.SCOPES)
    core.check_choice("config.method.keep", keep, ("importance", "uniform"))
    for names, good, allowed in _RANGES:
        for name in names:
            if not good(given[name]):
                raise ValueError(
                    f"config.method.{name}={given[name]}: must be {allowed}"
                )
    scope = scope if keep == "importance" else "none"
    net = rehearsal.network(
        parts, hidden_dim=hidden_dim, output_dim=output_dim, prototypes=True
    )

    def step(state, batch):
        extra, label = state.extra, batch["label"]
        images = parts.augment(core.step_key(state), batch["image"])
        if images.shape[1] != 1:
            raise ValueError(f"config.augment.views={images.shape[1]}: cclis takes 1")
        images = images[:, 0]
        every = distill_over == "seen"
        over = extra.seen & (state.task > 0) if every else extra.taught
        told = rehearsal.teach(net, state, images, train=False) if weight else None
        chance = rehearsal.weights(extra, batch)
        # On the sphere, outside of the gradient.
        unit = core.l2_normalize(state.params["prototypes"])
        state = state.replace(params=state.params | {"prototypes": unit})

        def loss(params):
            z, stats = net(params, state.stats, images, train=True)
            value = prototype.sample_nce(
                z,
                label,
                params["prototypes"],
                chance,
                extra.old,
                temperature=temperature,
                scope=scope,
            )
            if weight:
                value += weight * prototype.prd(
                    z,
                    told,
                    params["prototypes"],
                    extra.teacher["prototypes"],
                    over,
                    temperature=distill_temperature,
                    teacher_temperature=past_temperature,
                )
            return value, stats

        shares = {"prototypes": prototype_rate}
        state, stats, metrics = core.descend(parts, state, loss, shares)
        return state.replace(stats=stats), metrics

    def score(state, key, images, label, mask):
        z = views(parts, net, state, key, images, passes)
        return prototype.proposal(
            z,
            label,
            state.params["prototypes"],
            state.extra.seen,
            temperature=temperature,
            example_mask=mask,
            leftover=leftover,
        )

    return rehearsal.method(
        parts,
        net,
        step,
        memory_size=memory_size,
        mixed=functools.partial(rehearsal.stratified, share=share),
        score=score if keep == "importance" else None,
    )


_RANGES = (
    (
        ("temperature", "distill_temperature", "past_temperature", "prototype_rate"),
        lambda x: 0 < x < math.inf,
        "above 0",
    ),
    (("weight",), lambda x: 0 <= x < math.inf, "at least 0"),
    (("passes",), lambda x: x >= 1, "at least 1"),
    (("share",), lambda x: x is None or 0 < x < 1, "between 0 and 1, or None"),
)


def views(parts, net, state, key, images, passes: int):
    """Unit rows of augmented images in evaluation mode, f32[passes,N,D]."""
    count = len(images)
    size = min(_CHUNK, count)
    steps = -(-count // size)
    padded = jnp.resize(images, (steps * size, *images.shape[1:]))
    padded = padded.reshape(steps, size, *images.shape[1:])

    def some(number):
        rows = parts.split(padded[number % steps])
        seen = parts.augment(jax.random.fold_in(key, number), rows)[:, 0]
        return net(state.params, state.stats, seen, train=False)[0]

    z = jax.lax.map(some, jnp.arange(passes * steps))
    return z.reshape(passes, steps * size, -1)[:, :count]
