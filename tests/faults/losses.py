"""Faults of the losses."""

from faults import fault

STREAMED = "test_streaming_losses.py::test_value_and_gradients_are_those_of_the_matrix"
IN_A_STREAM = (
    "test_streaming_losses.py::test_a_loss_and_its_gradients_are_those_of_its_matrix"
)
FAULTS = [
    *fault.of(
        "losses/contrastive.py",
        fault.twins("losses", "nt_xent"),
        (
            "loss: nt_xent has the row itself in the denominator",
            "return jnp.mean(logsumexp_of_others(logits) - positive)",
            "return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - positive)",
        ),
        (
            "loss: nt_xent has another example's view for positive",
            "return jnp.arange(count) ^ 1",
            "return jnp.arange(count) ^ 2",
        ),
        (
            "loss: nt_xent subtracts two means",
            "return jnp.mean(logsumexp_of_others(logits) - positive)",
            "return jnp.mean(logsumexp_of_others(logits)) - "
            "jnp.mean(jnp.sum(z1 * z2, axis=-1) / temperature)",
            "test_losses.py::test_no_temperature_takes_a_loss_below_its_bound[nt_xent]",
        ),
        (
            "loss: m_hml is paid for a cosine above 1",
            "jnp.maximum(1 - jnp.sum(anchors * positives, axis=-1), 0) / temp",
            "(1 - jnp.sum(anchors * positives, axis=-1)) / temp",
            "test_losses.py::test_no_temperature_"
            "takes_a_loss_below_its_bound[m_hml_of_nothing]",
        ),
        (
            "loss: info_nce leaves its positive out where it is to be in",
            "    if positive_in_denominator:",
            "    if not positive_in_denominator:",
            fault.twins("losses", "info_nce"),
        ),
        (
            "loss: info_nce counts negatives that do not exist",
            "logits = jnp.where(exists, logits, _ABSENT)",
            "logits = jnp.where(exists, logits, logits)",
            fault.twins("losses", "info_nce_masked"),
        ),
        (
            "loss: m_hml divides by the slots, not by the rows stored",
            "- jnp.log(count)",
            "- jnp.log(len(memory))",
            fault.twins("losses", "m_hml_masked"),
        ),
        (
            "loss: a weighted mean divides by 1 where the weights add up to less",
            "jnp.sum(rows * mask) / jnp.where(total > 0, total, 1)",
            "jnp.sum(rows * mask) / jnp.maximum(total, 1)",
            "test_replay_losses.py::test_only_the_shares_of_weights_count",
        ),
        (
            "loss: sup_con sums over positives",
            "total / jnp.maximum(count, 1)",
            "total",
            fault.twins("losses", "sup_con"),
        ),
        (
            "loss: sup_con has the row itself among its positives",
            "(labels[:, None] == labels[None, :]) & ~own",
            "(labels[:, None] == labels[None, :]) | own",
            fault.twins("losses", "sup_con"),
        ),
        (
            "loss: sup_con ignores which rows are anchors",
            "loss = loss * anchor_mask",
            "loss = loss * jnp.ones_like(anchor_mask)",
            fault.twins("losses", "sup_con_masked"),
        ),
        (
            "loss: a mean over masked rows divides by all rows",
            "return jnp.sum(rows * mask) / jnp.where(total > 0, total, 1)",
            "return jnp.sum(rows * mask) / len(rows)",
            fault.twins("replay_losses", "er_ace_masked"),
        ),
    ),
    *fault.of(
        "losses/noncontrastive.py",
        fault.twins("noncontrastive", "barlow"),
        (
            "loss: barlow_twins divides by B - 1",
            "core.dot(a.T, b.T) / rows",
            "core.dot(a.T, b.T) / (rows - 1)",
        ),
        (
            "loss: barlow_twins pulls the diagonal to 0",
            "jnp.square(correlation - own)",
            "jnp.square(correlation)",
        ),
        (
            "loss: vicreg counts variances as covariances",
            "jnp.where(jnp.eye(features, dtype=bool), 0.0, product)",
            "product",
            fault.twins("noncontrastive", "vicreg"),
        ),
        (
            "loss: vicreg has the biased variance",
            "jnp.sqrt(jnp.sum(z * z, axis=0) / (rows - 1) + 1e-4)",
            "jnp.sqrt(jnp.sum(z * z, axis=0) / rows + 1e-4)",
            fault.twins("noncontrastive", "vicreg"),
        ),
        (
            "loss: simsiam sends a gradient to its targets",
            "    z1, z2 = jax.lax.stop_gradient((z1, z2))\n    return -(mean_cosine",
            "    return -(mean_cosine",
            fault.twins("noncontrastive", "simsiam"),
        ),
        (
            "loss: the statistic forgets that its integrand is even",
            '"code": _grid(0.0, 3.0, copies=2)',
            '"code": _grid(0.0, 3.0, copies=1)',
            fault.twins("noncontrastive", "epps_pulley"),
        ),
        (
            "loss: the statistic has a rectangle for its last trapezoid",
            "    weights[[0, -1]] /= 2\n",
            "    weights[0] /= 2\n",
            fault.twins("noncontrastive", "epps_pulley"),
        ),
        (
            "loss: lejepa's mean view is of all views",
            "jnp.mean(z[:, :centre], axis=1, keepdims=True)",
            "jnp.mean(z, axis=1, keepdims=True)",
            fault.twins("noncontrastive", "lejepa_default"),
        ),
        (
            "loss: lejepa stops the gradient of the mean view",
            "apart = jnp.mean(jnp.square(mean - z))",
            "apart = jnp.mean(jnp.square(jax.lax.stop_gradient(mean) - z))",
            # The global views' own gradient does not change: their distances to
            # their mean add up to 0. A view that is not in the mean tells.
            fault.twins("noncontrastive", "lejepa_default"),
        ),
        (
            "loss: dino compares a view with itself",
            "other = ~np.eye(shown, views, dtype=bool)",
            "other = np.ones((shown, views), bool)",
            fault.twins("noncontrastive", "dino"),
        ),
        (
            "loss: dino's targets get a gradient",
            "    targets = jax.lax.stop_gradient(targets)\n    logs",
            "    logs",
            fault.twins("noncontrastive", "dino"),
        ),
        (
            "loss: sinkhorn ends with the columns",
            "jax.nn.log_softmax(jax.nn.log_softmax(q, axis=0), axis=1)",
            "jax.nn.log_softmax(jax.nn.log_softmax(q, axis=1), axis=0)",
            "test_noncontrastive.py::test_sinkhorn_at_points_known_by_hand",
        ),
        (
            "loss: byol sends a gradient to its target",
            "mean_cosine(predictions, jax.lax.stop_gradient(targets))",
            "mean_cosine(predictions, targets)",
            fault.twins("noncontrastive", "byol"),
        ),
    ),
    *fault.of(
        "losses/distill.py",
        fault.twins("losses", "cassle"),
        (
            "loss: cassle's positive is not that of its denominator",
            "positive = contrastive.entries(logits, jnp.arange(len(p)))",
            "positive = jnp.sum(p * f, axis=-1) / temperature",
            "test_losses.py::test_no_temperature_takes_a_loss_below_its_bound[cassle]",
        ),
        (
            "loss: cassle has one direction twice",
            "jax.nn.logsumexp(logits, axis=0) - positive",
            "jax.nn.logsumexp(logits, axis=1) - positive",
        ),
        (
            "loss: frozen features get a gradient",
            "return core.l2_normalize(jax.lax.stop_gradient(x))",
            "return core.l2_normalize(x)",
        ),
        (
            "loss: pseudo_negative takes the frozen feature of the same view",
            "return (between(p1, f2) + between(p2, f1)) / 2",
            "return (between(p1, f1) + between(p2, f2)) / 2",
            fault.twins("noncontrastive", "pseudo_negative_byol"),
        ),
        (
            "loss: cassle_prototypes moves the frozen prototypes",
            "targets = jax.nn.softmax(jax.lax.stop_gradient(kept), axis=-1)",
            "targets = jax.nn.softmax(kept, axis=-1)",
            fault.twins("noncontrastive", "cassle_prototypes"),
        ),
        (
            "loss: less_forget moves the frozen features",
            "    f1, f2 = jax.lax.stop_gradient((f1, f2))\n"
            "    first = noncontrastive.mean_cosine",
            "    first = noncontrastive.mean_cosine",
            fault.twins("noncontrastive", "less_forget"),
        ),
        (
            "loss: pnr_simclr has frozen rows for pseudo-negatives of L2",
            "second = others(p, (f, z) if pn2 else (f,), temperature)",
            "second = others(p, (f, f) if pn2 else (f,), temperature)",
            fault.twins("losses", "pnr_simclr_True_True"),
        ),
        (
            "loss: pnr_simclr keeps its pseudo-negatives where pn1 is off",
            "first = others(z, (z, f) if pn1 else (z,), temperature)",
            "first = others(z, (z, f), temperature)",
            fault.twins("losses", "pnr_simclr_False_True"),
        ),
        (
            "loss: pnr_moco meets the key bank of its own view",
            "meet(q, p if pn2 else None, key_queue)",
            "meet(q, p if pn2 else None, key_queue[::-1])",
            fault.twins("losses", "pnr_moco"),
        ),
        (
            "loss: pnr_moco has one temperature",
            "jnp.stack([p2, p1])) / distill_temperature",
            "jnp.stack([p2, p1])) / temperature",
            fault.twins("losses", "pnr_moco"),
        ),
        (
            "loss: pnr_moco sends a gradient to its queues",
            "    queue = jax.lax.stop_gradient(queue)\n",
            "",
            fault.twins("losses", "pnr_moco"),
        ),
    ),
    *fault.of(
        "losses/prototype.py",
        fault.twins("prototype", "nce_default"),
        (
            "loss: sample_nce multiplies by the chance of a row",
            "return -jnp.log(weights) - jnp.log(",
            "return jnp.log(weights) - jnp.log(",
        ),
        (
            "loss: sample_nce weights candidates of new classes",
            "weighted = weighted & old & jnp.any(own & old, axis=0)",
            "weighted = weighted & old",
        ),
        (
            "loss: prd has the student's temperature for the teacher",
            "_products(*teacher, exists).T / teacher_temperature",
            "_products(*teacher, exists).T / temperature",
            fault.twins("prototype", "prd_default"),
        ),
        (
            "loss: prd sends a gradient to the teacher",
            "teacher = jax.lax.stop_gradient((teacher_prototypes, teacher_z))",
            "teacher = (teacher_prototypes, teacher_z)",
            fault.twins("prototype", "prd_default"),
        ),
        (
            "loss: ird relates a row to itself",
            "~jnp.eye(len(z), dtype=bool) & exists",
            "jnp.ones((len(z), len(z)), bool) & exists",
            fault.twins("prototype", "ird_default"),
        ),
    ),
    *fault.of(
        "losses/replay.py",
        fault.twins("replay_losses", "er_ace_default"),
        (
            "loss: er_ace lets incoming rows compete over all seen classes",
            "class_mask=incoming,",
            "class_mask=seen,",
        ),
        (
            "loss: er_ace lets replayed rows compete over unseen classes",
            "replay_labels, class_mask=seen, example_mask=replay_mask",
            "replay_labels, class_mask=None, example_mask=replay_mask",
        ),
        (
            "loss: triplet pushes positives and pulls negatives",
            "between(a, p) - between(a, n) + margin",
            "between(a, n) - between(a, p) + margin",
            fault.twins("replay_losses", "triplet_default"),
        ),
        (
            "loss: der sums over columns",
            "contrastive.masked_mean(jnp.mean(squares, axis=-1), example_mask)",
            "contrastive.masked_mean(jnp.sum(squares, axis=-1), example_mask)",
            fault.twins("replay_losses", "der_default"),
        ),
        (
            "loss: der sends a gradient to stored logits",
            "stored_logits = jax.lax.stop_gradient(stored_logits)",
            "stored_logits = jnp.asarray(stored_logits)",
            fault.twins("replay_losses", "der_default"),
        ),
        (
            "loss: icarl has labels for old classes and the teacher for new ones",
            "jnp.where(old_classes.astype(bool), teacher, own)",
            "jnp.where(old_classes.astype(bool), own, teacher)",
            fault.twins("replay_losses", "icarl_default"),
        ),
    ),
    *fault.of(
        "losses/incremental.py",
        fault.twins("incremental", "one"),
        (
            "loss: nce_one sums over negatives",
            " - jnp.log(jnp.maximum(count, 1))",
            "",
        ),
        (
            "loss: nce_one pushes its positive",
            "odds = weight + mean - positive / temperature",
            "odds = weight + mean + positive / temperature",
        ),
        (
            "loss: nce_one has the positive below where it should not",
            "jnp.where(known, odds, 0.0)",
            "jnp.where(known, jax.nn.softplus(odds), 0.0)",
            fault.twins("incremental", "one_without_positive"),
        ),
        (
            "loss: nce_two swaps the shares of old and new",
            "jnp.logaddexp(jnp.log(growth) + ratio, jnp.log1p(-growth))",
            "jnp.logaddexp(jnp.log1p(-growth) + ratio, jnp.log(growth))",
            fault.twins("incremental", "two"),
        ),
        (
            "loss: change_ratio is upside down",
            "ratio = jax.nn.softplus(new) - jax.nn.softplus(old)",
            "ratio = jax.nn.softplus(old) - jax.nn.softplus(new)",
            fault.twins("incremental", "ratio"),
        ),
    ),
    *fault.of(
        "losses/streaming.py",
        STREAMED + "[tpu-sizes1-True]",
        (
            "loss: a stream counts rows that do not exist",
            "others = jnp.where(exists, others, _NOBODY)",
            "others = jnp.where(exists, others, others)",
            STREAMED + "[plain-sizes1-True]",
        ),
        (
            "loss: on a TPU the sum keeps the scale of an older maximum",
            "scaled = sum_[...] * jnp.exp(top[...] - larger)",
            "scaled = sum_[...]",
        ),
        (
            "loss: on a TPU the gradient is that of the last tile",
            "sum_[...] += _product(weights",
            "sum_[...] = _product(weights",
        ),
        (
            "loss: on a GPU the sum keeps the scale of an older maximum",
            "scaled = total * jnp.exp(largest - larger)",
            "scaled = total",
            STREAMED + "[gpu-sizes1-True]",
        ),
        (
            "loss: on a GPU the largest share of the columns is taken for all",
            "jax.nn.logsumexp(top + jnp.log(sum_), axis=0)",
            "jnp.max(top + jnp.log(sum_), axis=0)",
            STREAMED + "[gpu-sizes1-True]",
        ),
        (
            "loss: on a GPU rows get the gradient of anchors that all count alike",
            "weights = weights * slope[columns][None, :]",
            "weights = weights * slope[0]",
            STREAMED + "[gpu-sizes1-True]",
        ),
        (
            "loss: of three products of bfloat16 one is missing",
            "contract(a, b) + (contract(a, b_rest) + contract(a_rest, b))",
            "contract(a, b) + contract(a, b_rest)",
            "test_streaming_losses.py::"
            "test_three_products_of_bfloat16_are_nearly_one_of_float32",
        ),
    ),
    *fault.of(
        "losses/contrastive.py",
        IN_A_STREAM + "[plain-nt_xent]",
        (
            "loss: a streamed nt_xent counts its positive twice",
            "example = jnp.arange(len(rows)) // 2",
            "example = jnp.arange(len(rows))",
        ),
        (
            "loss: a streamed m_hml forgets that q of equal rows is 1",
            "exists=mask) - 1 / temperature",
            "exists=mask)",
            IN_A_STREAM + "[plain-m_hml]",
        ),
    ),
    *fault.of(
        "losses/distill.py",
        IN_A_STREAM + "[plain-pnr_simclr]",
        (
            "loss: a streamed pnr_simclr has the row itself for positive",
            "jnp.sum(z * contrastive.interleave(z2, z1), axis=-1)",
            "jnp.sum(z * contrastive.interleave(z1, z2), axis=-1)",
        ),
        (
            "loss: a streamed cassle has one direction twice",
            "backward = others(f / temperature, p)",
            "backward = forward",
            IN_A_STREAM + "[plain-cassle]",
        ),
    ),
    *fault.of(
        "memory/duel.py",
        IN_A_STREAM + "[plain-distinctiveness]",
        (
            "loss: a streamed distinctiveness forgets that q of equal rows is 1",
            "jnp.log(count) - total + 1 / temperature",
            "jnp.log(count) - total",
        ),
    ),
    *fault.of(
        "sharding.py",
        "test_streaming_losses.py::test_devices_share_the_anchors[gpu]",
        (
            "loss: devices that cannot share the anchors are not told so",
            '        share("rows", len(leaf), mesh)',
            "        pass",
        ),
    ),
]
