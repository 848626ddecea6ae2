"""A step of DINO with iBOT and KoLeo: a twin of all of it, in float64 NumPy.

The encoder is a Vision Transformer in name alone: a patch is multiplied by a matrix and
an embedding of its place is added, so that NumPy passes it, too. Gradients of the twin
are central differences. Which patches are hidden is what the encoder was told.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import interpreted, twins, two_view_losses
from jaxcl import core, optim
from jaxcl.methods import two_view
from jaxcl.nets import vit

B, SIDE, PATCH, WIDTH, DIM, PROTOTYPES = 4, 6, 2, 4, 3, 5
RATE, KEEP, CENTRE, STEPS = 0.05, 0.6, 0.8, 3
OPTIONS = {
    "hidden_layers": 0,
    "output_dim": DIM,
    "temperature": 0.4,
    "target_temperature": 0.5,
    "target_start": 0.5,
    "momentum_start": KEEP,
    "momentum_end": KEEP,
    "prototypes": PROTOTYPES,
    "prototypes_held": 0.0,
    "centre_momentum": CENTRE,
    "mask_share": 0.4,
    "ibot": 0.7,
    "koleo": 0.4,
}


class Tokens(vit.ViT):
    """Linear tokens, whose mean makes the features; `seen` has what was hidden."""

    @nn.compact
    def __call__(self, x, *, train, groups=1, hidden=None):
        x = patches_of(x) @ self.param("kernel", nn.initializers.normal(), (12, WIDTH))
        if hidden is not None:
            jax.debug.callback(lambda x: seen.append(np.asarray(x)), hidden)
            x = jnp.where(hidden[..., None], 0, x)
        x = jnp.tanh(x + self.param("place", nn.initializers.normal(), (9, WIDTH)))
        return x.mean(axis=1) if hidden is None else (x.mean(axis=1), x)


seen: list = []  # bool[2B,P] of each pass


def patches_of(images):
    """[N,S,S,C] -> [N,P,patch * patch * C]."""
    side = SIDE // PATCH
    x = images.reshape(len(images), side, PATCH, side, PATCH, -1)
    return x.swapaxes(2, 3).reshape(len(images), side * side, -1)


def embed(params, images, hidden):
    """Return features and projections of the views, and projections of all patches."""
    x = patches_of(images) @ params["encoder"]["kernel"]
    x = np.tanh(np.where(hidden[..., None], 0, x) + params["encoder"]["place"])
    (layer,) = params["projector"].values()
    pairs = x.mean(axis=1).reshape(B, 2, WIDTH)
    z, tokens = (rows @ layer["kernel"] + layer["bias"] for rows in (pairs, x))
    return pairs, z, tokens


def features_of(params, slow, centres, images, hidden):
    """Return what the losses read: of views that hide none, any patches."""
    places = np.argsort(~hidden, axis=1, kind="stable")[:, : hidden.sum(1).max()]
    h, z, tokens = embed(params, images, hidden)
    _, k, targets = embed(slow, images, hidden & False)
    return two_view_losses.Features(
        z=z,
        h=h,
        k=k,
        prototypes=params["prototypes"],
        slow_prototypes=slow["prototypes"],
        centre=centres.views,
        patch_centre=centres.patches,
        patches=np.take_along_axis(tokens, places[..., None], axis=1),
        slow_patches=np.take_along_axis(targets, places[..., None], axis=1),
        hides=hidden.any(axis=1),
        target_temperature=OPTIONS["target_temperature"],
    )


def close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("chance", [1.0, 0.5])
def test_a_step_is_the_equations(chance):
    net = Tokens(width=WIDTH, layers=1, heads=1, hidden=4, patch=PATCH, image_size=SIDE)
    parts = core.Parts(
        encoder=net,
        augment=lambda key, images: twins.views_of(images),
        tx=optim.sgd(momentum=0.0),
        lr=optim.by_task([optim.constant(RATE)]),
        num_classes=3,
    )
    method = two_view.make(
        parts, base="dino", strategy="finetune", mask_chance=chance, **OPTIONS
    )
    rng = np.random.default_rng(0)
    image = rng.integers(0, 256, (B, SIDE, SIDE, 3)).astype(np.uint8)
    batch = {"image": jnp.asarray(image), "label": jnp.zeros(B, jnp.int32)}
    batch["index"] = jnp.arange(B)
    state = jax.jit(method.init)(jax.random.key(3), batch)

    def other(leaf):
        return jnp.asarray(rng.normal(0, 0.5, leaf.shape), jnp.float32)

    extra = state.extra._replace(
        momentum=jax.tree.map(other, state.extra.momentum),
        base=jax.tree.map(other, state.extra.base),
    )
    state = state.replace(
        params=jax.tree.map(other, state.params),
        extra=extra,
        task_steps=jnp.int32(STEPS),
    )
    params, slow, centres = twins.to64((state.params, extra.momentum, extra.base))
    seen.clear()
    after, metrics = interpreted.jit(method.step)(state, batch)
    jax.effects_barrier()
    (hidden,) = [x for x in seen if x.any()]
    assert len(seen) == 2  # the slow network sees all
    assert set(hidden.sum(axis=1)) == ({0, 4} if chance < 1 else {4})
    patterns = {row.tobytes() for row in hidden if row.any()}
    assert len(patterns) > hidden.any(axis=1).sum() / 2  # each view hides its own

    images = twins.views_of(np.float64(image)).reshape(2 * B, SIDE, SIDE, 3)
    options = two_view_losses.Options(
        temperature=OPTIONS["temperature"], ibot=OPTIONS["ibot"], koleo=OPTIONS["koleo"]
    )
    leaves, tree = jax.tree.flatten(params)

    def loss(*leaves):
        x = features_of(jax.tree.unflatten(tree, leaves), slow, centres, images, hidden)
        return two_view_losses.dino(x, options)

    close(metrics["loss"], loss(*leaves))
    slopes = [twins.central_difference(loss, leaves, i) for i in range(len(leaves))]
    moved = [leaf - RATE * slope for leaf, slope in zip(leaves, slopes, strict=True)]
    wanted = jax.tree.unflatten(tree, moved)
    assert min(np.abs(slope).max() for slope in slopes) > 1e-3
    jax.tree.map(close, after.params, wanted)
    jax.tree.map(
        lambda found, old, new: close(found, KEEP * old + (1 - KEEP) * new),
        after.extra.momentum,
        slow,
        {name: wanted[name] for name in slow},
    )
    x = features_of(params, slow, centres, images, hidden)

    def centre(old, rows):
        logits = twins.unit(rows) @ twins.unit(slow["prototypes"]).T
        return CENTRE * old + (1 - CENTRE) * logits.mean(axis=(0, 1))

    close(after.extra.base.views, centre(centres.views, x.k))
    if chance == 1:  # else it is of patches, too, that no view hid
        close(after.extra.base.patches, centre(centres.patches, x.slow_patches))
