"""Faults that the tests must notice, one wrong line each; mutate.py puts them in.

They are written from the equations and from what the code means: a wrong sign or
index, a missing stop of the gradient, a wrong norm, swapped views, a mask that nobody
reads, a wrong order, an update that is missing, a default that is not the paper's.
Each names the tests that must fail, as narrowly as it can: the whole list takes as
long as they do.
"""

from typing import NamedTuple


class Fault(NamedTuple):
    """One wrong line, and the tests that must notice it."""

    name: str  # "part: what is wrong"
    file: str  # from the root of the repository
    old: str  # occurs once in the file
    new: str
    tests: tuple[str, ...]  # files or node ids, from tests/
    slow: bool = False  # some of them are marked slow
    hangs: bool = False  # the code never ends


def _in(file, tests, *rows, **options):
    """Faults of one file: (name, old, new) each, or with tests of its own behind."""
    return [
        Fault(name, f"jaxcl/{file}", old, new, tuple(own or tests.split()), **options)
        for name, old, new, *own in rows
    ]


_EQUATION = "::test_values_and_gradients_equal_the_equation"


def _twins(module, *names):
    return " ".join(f"test_{module}.py{_EQUATION}[{name}]" for name in names)


_LOSSES = [
    *_in(
        "losses/contrastive.py",
        _twins("losses", "nt_xent"),
        (
            "loss: nt_xent has the row itself in the denominator",
            "denominator = logsumexp_of_others(dot(rows, rows) / temperature)",
            "denominator = jax.nn.logsumexp(dot(rows, rows) / temperature, axis=-1)",
        ),
        (
            "loss: nt_xent multiplies the positive by the temperature",
            "positive = jnp.sum(z1 * z2, axis=-1) / temperature",
            "positive = jnp.sum(z1 * z2, axis=-1) * temperature",
        ),
        (
            "loss: info_nce leaves its positive out where it is to be in",
            "    if positive_in_denominator:",
            "    if not positive_in_denominator:",
            _twins("losses", "info_nce"),
        ),
        (
            "loss: info_nce counts negatives that do not exist",
            "logits = jnp.where(exists, logits, _ABSENT)",
            "logits = jnp.where(exists, logits, logits)",
            _twins("losses", "info_nce_masked"),
        ),
        (
            "loss: m_hml divides by the slots, not by the rows stored",
            "- jnp.log(count)",
            "- jnp.log(len(memory))",
            _twins("losses", "m_hml_masked"),
        ),
        (
            "loss: sup_con sums over positives",
            "- total / jnp.maximum(count, 1)",
            "- total",
            _twins("losses", "sup_con"),
        ),
        (
            "loss: sup_con has the row itself among its positives",
            "(labels[:, None] == labels[None, :]) & ~own",
            "(labels[:, None] == labels[None, :]) | own",
            _twins("losses", "sup_con"),
        ),
        (
            "loss: sup_con ignores which rows are anchors",
            "loss = loss * anchor_mask",
            "loss = loss * jnp.ones_like(anchor_mask)",
            _twins("losses", "sup_con_masked"),
        ),
        (
            "loss: a mean over masked rows divides by all rows",
            "return jnp.sum(rows * mask) / jnp.maximum(jnp.sum(mask), 1)",
            "return jnp.sum(rows * mask) / len(rows)",
            _twins("replay_losses", "er_ace_masked"),
        ),
    ),
    *_in(
        "losses/noncontrastive.py",
        _twins("noncontrastive", "barlow"),
        (
            "loss: barlow_twins divides by B - 1",
            "contrastive.dot(a.T, b.T) / rows",
            "contrastive.dot(a.T, b.T) / (rows - 1)",
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
            _twins("noncontrastive", "vicreg"),
        ),
        (
            "loss: vicreg has the biased variance",
            "jnp.sqrt(jnp.sum(z * z, axis=0) / (rows - 1) + 1e-4)",
            "jnp.sqrt(jnp.sum(z * z, axis=0) / rows + 1e-4)",
            _twins("noncontrastive", "vicreg"),
        ),
        (
            "loss: byol sends a gradient to its target",
            "mean_cosine(predictions, jax.lax.stop_gradient(targets))",
            "mean_cosine(predictions, targets)",
            _twins("noncontrastive", "byol"),
        ),
    ),
    *_in(
        "losses/distill.py",
        _twins("losses", "cassle"),
        (
            "loss: cassle has one direction twice",
            "jax.nn.logsumexp(logits, axis=0) - positive",
            "jax.nn.logsumexp(logits, axis=1) - positive",
        ),
        (
            "loss: frozen features get a gradient",
            "return contrastive.l2_normalize(jax.lax.stop_gradient(x))",
            "return contrastive.l2_normalize(x)",
        ),
        (
            "loss: pseudo_negative takes the frozen feature of the same view",
            "return (between(p1, f2) + between(p2, f1)) / 2",
            "return (between(p1, f1) + between(p2, f2)) / 2",
            _twins("noncontrastive", "pseudo_negative_byol"),
        ),
        (
            "loss: pnr_simclr has frozen rows for pseudo-negatives of L2",
            "second = _logsumexp_of_others(p, (f, z) if pn2 else (f,), temperature)",
            "second = _logsumexp_of_others(p, (f, f) if pn2 else (f,), temperature)",
            _twins("losses", "pnr_simclr_True_True"),
        ),
        (
            "loss: pnr_simclr keeps its pseudo-negatives where pn1 is off",
            "(z, f) if pn1 else (z,), temperature)\n"
            "    second = _logsumexp_of_others(p, (f, z) if pn2 else (f,), temp",
            "(z, f), temperature)\n"
            "    second = _logsumexp_of_others(p, (f, z) if pn2 else (f,), temp",
            _twins("losses", "pnr_simclr_False_True"),
        ),
        (
            "loss: pnr_moco meets the key bank of its own view",
            "_queue_logsumexp(q, p if pn2 else None, key_queue)",
            "_queue_logsumexp(q, p if pn2 else None, key_queue[::-1])",
            _twins("losses", "pnr_moco"),
        ),
        (
            "loss: pnr_moco has one temperature",
            "jnp.stack([p2, p1])) / distill_temperature",
            "jnp.stack([p2, p1])) / temperature",
            _twins("losses", "pnr_moco"),
        ),
        (
            "loss: pnr_moco sends a gradient to its queues",
            "    queue = jax.lax.stop_gradient(queue)\n",
            "",
            _twins("losses", "pnr_moco"),
        ),
    ),
    *_in(
        "losses/prototype.py",
        _twins("prototype", "nce_default"),
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
            "_products(*told, exists).T / teacher_temperature",
            "_products(*told, exists).T / temperature",
            _twins("prototype", "prd_default"),
        ),
        (
            "loss: prd sends a gradient to the teacher",
            "told = jax.lax.stop_gradient((teacher_prototypes, teacher_z))",
            "told = (teacher_prototypes, teacher_z)",
            _twins("prototype", "prd_default"),
        ),
        (
            "loss: ird relates a row to itself",
            "~jnp.eye(len(z), dtype=bool) & exists",
            "jnp.ones((len(z), len(z)), bool) & exists",
            _twins("prototype", "ird_default"),
        ),
    ),
    *_in(
        "losses/replay.py",
        _twins("replay_losses", "er_ace_default"),
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
            _twins("replay_losses", "triplet_default"),
        ),
        (
            "loss: der sums over columns",
            "contrastive.masked_mean(jnp.mean(squares, axis=-1), example_mask)",
            "contrastive.masked_mean(jnp.sum(squares, axis=-1), example_mask)",
            _twins("replay_losses", "der_default"),
        ),
        (
            "loss: der sends a gradient to stored logits",
            "_wide(jax.lax.stop_gradient(stored_logits))",
            "_wide(stored_logits)",
            _twins("replay_losses", "der_default"),
        ),
        (
            "loss: icarl has labels for old classes and the teacher for new ones",
            "jnp.where(old_classes.astype(bool), teacher, own)",
            "jnp.where(old_classes.astype(bool), own, teacher)",
            _twins("replay_losses", "icarl_default"),
        ),
    ),
    *_in(
        "losses/incremental.py",
        _twins("incremental", "one"),
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
            "loss: nce_two swaps the shares of old and new",
            "jnp.logaddexp(jnp.log(growth) + ratio, jnp.log1p(-growth))",
            "jnp.logaddexp(jnp.log1p(-growth) + ratio, jnp.log(growth))",
            _twins("incremental", "two"),
        ),
        (
            "loss: change_ratio is upside down",
            "ratio = jax.nn.softplus(new) - jax.nn.softplus(old)",
            "ratio = jax.nn.softplus(old) - jax.nn.softplus(new)",
            _twins("incremental", "ratio"),
        ),
    ),
]

_MEMORIES = [
    *_in(
        "memory/policies.py",
        "test_memory.py::test_reservoir_against_one_row_at_a_time",
        (
            "memory: the reservoir draws below n, not up to n",
            "(key, number, number + 1)",
            "(key, number, jnp.maximum(number, 1))",
        ),
        (
            "memory: fifo keeps the first rows of a batch that is too large",
            "newer = jnp.sum(mask, dtype=jnp.int32) - jnp.cumsum",
            "newer = jnp.cumsum",
            "test_memory.py::test_fifo_against_a_queue",
        ),
        (
            "memory: a ring begins each batch where the last began",
            "return slots, (turn + more) % size",
            "return slots, turn",
            "test_policies.py::test_rings_against_queues",
        ),
        (
            "memory: class_balanced forgets how many rows of a full class came",
            "span = jnp.where(own, met[label], jnp.sum(pool))",
            "span = jnp.sum(pool)",
            "test_policies.py::test_class_balanced_against_one_row_at_a_time",
        ),
    ),
    *_in(
        "memory/buffer.py",
        "test_memory.py::test_write_against_one_row_at_a_time",
        (
            "memory: of rows with one slot the first stays",
            "jnp.full((capacity,), -1, jnp.int32).at[slots].max(rows, mode=",
            "jnp.full((capacity,), 9999, jnp.int32).at[slots].min(rows, mode=",
        ),
        (
            "memory: masked rows are written",
            "_last_writers(slots, mask & _computed(after), buffer.capacity)",
            "_last_writers(slots, _computed(after), buffer.capacity)",
        ),
        (
            "memory: rows that are dropped do not count as seen",
            "jnp.sum(mask, dtype=jnp.uint32)",
            "jnp.sum(mask & (slots < buffer.capacity), dtype=jnp.uint32)",
        ),
        (
            "memory: empty slots are drawn",
            "drawable = buffer.filled\n",
            "drawable = jnp.ones_like(buffer.filled)\n",
            "test_memory.py::test_rows_that_do_not_exist_are_masked",
        ),
        (
            "memory: draws ignore the weights",
            "score = score + log_weights",
            "score = score + 0.0",
            "test_memory.py::test_weighted_draws_follow_the_weights",
        ),
    ),
    *_in(
        "memory/herding.py",
        "test_herding.py::test_against_all_rows_for_every_choice",
        (
            "memory: herding follows the mean one row late",
            "(j + 1) * mean - total",
            "j * mean - total",
        ),
        (
            "memory: herding chooses a row twice",
            "return chosen, total, left.at[row].set(False)",
            "return chosen, total, left",
        ),
    ),
    *_in(
        "memory/duel.py",
        "test_duel_memory.py::test_select_is_the_plain_loop[affine-False]",
        (
            "memory: duel drops the most distinct row",
            "worst = jnp.argmax(scores)\n",
            "worst = jnp.argmin(jnp.where(window.alive, scores, jnp.inf))\n",
        ),
        (
            "memory: duel's sum stays as it was",
            "total=jnp.where(sure, window.total + gain, window.total)",
            "total=window.total",
        ),
        (
            "memory: duel's bound does not grow while the sum moves",
            "window.bound + moved + slack",
            "window.bound + slack",
        ),
        (
            "memory: duel's bound has no room for rounding",
            "window.bound + moved + slack",
            "window.bound + moved",
            "test_duel_memory.py::test_rows_that_are_left_out_win_no_near_tie",
        ),
        (
            "memory: duel multiplies as coarsely as the device likes to",
            "jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)",
            "jnp.matmul(a, b)",
            "test_duel_memory.py::test_scores_are_products_in_full_precision",
        ),
        (
            "memory: duel's scores lack the row that joined",
            "return present, scores + alike(_row(memory, incoming, joins))",
            "return present, scores",
            "test_duel_memory.py::test_select_is_the_plain_loop[exponential-False]",
        ),
        (
            "memory: duel's slots are one too far",
            "rank = jnp.cumsum(comes) - 1",
            "rank = jnp.cumsum(comes)",
            "test_duel_memory.py::test_slots_pair_kept_rows_with_free_slots_in_order",
        ),
    ),
    *_in(
        "memory/selection.py",
        "test_selection.py::test_proposal_against_loops",
        (
            "memory: the proposal counts a row's own prototype",
            "found = jnp.sum(jnp.where(mine, 0.0, shares), axis=0)",
            "found = jnp.sum(shares, axis=0)",
        ),
        (
            "memory: old classes have t / (t + 1) of the slots",
            "jnp.divmod((tasks - 1) * capacity, tasks)",
            "jnp.divmod(tasks * capacity, tasks + 1)",
            "test_selection.py::test_every_quota_has_its_share_as_its_mean",
        ),
    ),
    *_in(
        "memory/importance.py",
        "test_importance.py::test_the_gradient_is_that_of_the_sum_of_quadratics",
        (
            "memory: the penalty pushes parameters away",
            "weight * (f * p - a) / jnp.maximum",
            "weight * (a - f * p) / jnp.maximum",
        ),
        (
            "memory: the penalty holds to the last task alone",
            "lambda a, f, p: a + f * p",
            "lambda a, f, p: f * p",
        ),
        (
            "memory: squared gradients of the last task stay",
            "jax.tree.map(jnp.zeros_like, importance.squares)",
            "importance.squares",
        ),
        (
            "memory: importance is not divided by its mean",
            "x / jnp.where(mean > 0, mean, 1.0)",
            "x / jnp.where(mean > 0, 1.0, 1.0)",
        ),
    ),
    *_in(
        "memory/queue.py",
        "test_queue.py::test_enqueue_against_a_list",
        (
            "memory: the pointer of a queue at rest moves",
            "(pointer + jnp.where(active, count, 0)) % size",
            "(pointer + count) % size",
        ),
        (
            "memory: a queue at rest is written",
            "rows = jnp.where(active, rows, old)",
            "rows = jnp.where(True, rows, old)",
        ),
    ),
]

_OPTIMISERS = _in(
    "optim.py",
    "test_optim.py::test_lars_follows_the_released_code",
    (
        "optim: lars clips at 1, whatever the rate",
        "jnp.minimum(ratio / lr, 1.0)",
        "jnp.minimum(ratio, 1.0)",
    ),
    (
        "optim: lars scales biases",
        "if exclude_1d and w.ndim <= 1:",
        "if exclude_1d and w.ndim < 1:",
    ),
    (
        "optim: weight decay acts on biases",
        "lambda p: p.ndim > 1, params",
        "lambda p: p.ndim > 0, params",
        "test_optim.py::test_sgd_is_torchs",
    ),
    (
        "optim: nesterov is ignored",
        "optax.trace(momentum, nesterov) if",
        "optax.trace(momentum) if",
        "test_optim.py::test_sgd_is_torchs",
    ),
    (
        "optim: adam's decay is decoupled where it is not to be",
        "((moments, decay) if decoupled else (decay, moments))",
        "((decay, moments) if decoupled else (moments, decay))",
        "test_optim.py::test_adam_and_adamw",
    ),
    (
        "optim: the warm-up ends an epoch late",
        "ramp = jnp.minimum(e / max(warmup_epochs - 1, 1), 1.0)",
        "ramp = jnp.minimum(e / max(warmup_epochs, 1), 1.0)",
        "test_optim.py::test_warmup_cosine_steps_once_an_epoch",
    ),
    (
        "optim: the cosine does not come to its end",
        "(e - warmup_epochs) / (epochs - warmup_epochs)",
        "(e - warmup_epochs) / epochs",
        "test_optim.py::test_warmup_cosine_steps_once_an_epoch",
    ),
    (
        "optim: milestones come an epoch late",
        "(e >= m).astype",
        "(e > m).astype",
        "test_optim.py::test_step_decay_and_constant",
    ),
    (
        "optim: a task has the schedule of the next",
        "rates[jnp.minimum(task, len(schedules) - 1)]",
        "rates[jnp.minimum(task + 1, len(schedules) - 1)]",
        "test_optim.py::test_tasks_have_schedules_of_their_own",
        "test_core.py::test_each_task_has_its_rates_and_later_ones_the_last",
    ),
    (
        "optim: the slow network is nearly the fast one",
        "(decay * o + (1.0 - decay) * n)",
        "(decay * n + (1.0 - decay) * o)",
        "test_optim.py::test_ema_of_trees",
    ),
    (
        "optim: the momentum falls over a task",
        "return end - (end - start) * (jnp.cos(jnp.pi * progress) + 1.0) / 2.0",
        "return start + (end - start) * (jnp.cos(jnp.pi * progress) + 1.0) / 2.0",
        "test_optim.py::test_momentum_schedule",
    ),
)

_CORE = _in(
    "core.py",
    "test_core.py::test_progress_is_the_share_of_the_task_that_is_done",
    (
        "core: progress is that of the run",
        "return (state.step - state.task_start) / state.task_steps",
        "return state.step / state.task_steps",
    ),
    (
        "core: keys repeat in every task",
        "jax.random.fold_in(state.key, state.step)",
        "jax.random.fold_in(state.key, state.step - state.task_start)",
        "test_core.py::test_every_step_of_every_task_has_a_key_of_its_own",
    ),
    (
        "core: a share is ignored",
        "lambda d, share=share: share * d, direction[name]",
        "lambda d, share=share: d, direction[name]",
        "test_core.py::test_shares_scale_the_entries_that_they_name",
    ),
    (
        "core: a share is that of every entry",
        "direction = direction | {name: scaled}",
        "direction = jax.tree.map(lambda d: share * d, direction)",
        "test_core.py::test_shares_scale_the_entries_that_they_name",
    ),
    (
        "core: parameters go up the gradient",
        "lambda p, d: p - lr * d, state.params, direction",
        "lambda p, d: p + lr * d, state.params, direction",
        "test_core.py::test_shares_scale_the_entries_that_they_name",
    ),
    (
        "core: steps are not counted",
        "opt_state=opt_state, step=state.step + 1",
        "opt_state=opt_state, step=state.step",
        "test_core.py::test_shares_scale_the_entries_that_they_name",
    ),
    (
        "core: the state's numbers share a buffer",
        "task_start=zero + 0",
        "task_start=zero",
        "test_core.py::test_a_new_state_holds_no_array_twice",
    ),
    (
        "core: a copy is no copy",
        "jnp.array(x, copy=True)",
        "jnp.asarray(x)",
        "test_core.py::test_a_copy_has_buffers_of_its_own",
    ),
    (
        "core: a limit itself is refused",
        "(least <= value <= most and",
        "(least < value <= most and",
        "test_core.py::test_options_outside_of_their_range_are_named",
    ),
)

_NORM = _in(
    "nets/norm.py",
    "test_nets.py::test_batch_norm_equals_pytorch_passes_one_after_the_other",
    (
        "norm: running variances are biased",
        "batch_var = batch_var * (count / (count - 1))",
        "batch_var = batch_var * 1.0",
    ),
    (
        "norm: all views have the same statistics",
        "groups if train else 1)",
        "1)",
    ),
    (
        "norm: momentum is the new value's weight",
        "self.momentum * old + (1.0 - self.momentum) * new",
        "self.momentum * new + (1.0 - self.momentum) * old",
    ),
    (
        "norm: the last view alone moves the running mean",
        "mean.value = self._blend(mean.value, batch_mean[0, view])",
        "mean.value = self._blend(mean.value, batch_mean[0, -1])",
    ),
)

_STEPS = [
    *_in(
        "methods/online.py",
        "test_online.py::test_er_replays_what_it_may[past_tasks]",
        (
            "step: past tasks are also the present one",
            'state.extra.memory.items["task"] < state.task',
            'state.extra.memory.items["task"] <= state.task',
        ),
        (
            "step: a pass without rows moves the statistics",
            "lambda new, old: jnp.where(some, new, old), after, stats",
            "lambda new, old: new, after, stats",
            "test_online.py"
            "::test_both_are_two_passes_and_none_replayed_leaves_statistics",
        ),
        (
            "step: classes that come are not seen",
            'state.extra.seen.at[batch["label"]].set(True)',
            "state.extra.seen | False",
            "test_online.py::test_er_ace_masks_each_part_by_itself[paper]",
        ),
        (
            "step: every update on a batch counts as a step",
            "state.replace(step=begun.step), incoming",
            "state, incoming",
            "test_online.py::test_updates_descend_again_on_the_same_batch",
        ),
        (
            "step: rows are stored with the task before",
            'jnp.broadcast_to(state.task, batch["label"].shape)',
            'jnp.broadcast_to(state.task - 1, batch["label"].shape)',
            "test_online.py::test_a_batch_is_written_after_its_updates",
        ),
    ),
    *_in(
        "methods/er.py",
        "test_online.py::test_er_replays_what_it_may",
        (
            "step: er replays classes of the batch, not the others",
            "return ~(label[:, None] == incoming.label).any(axis=1)",
            "return (label[:, None] == incoming.label).any(axis=1)",
        ),
    ),
    *_in(
        "methods/er_ace.py",
        "test_online.py::test_er_ace_masks_each_part_by_itself[paper]",
        (
            "step: er_ace swaps incoming and replayed rows",
            "new.logits, incoming.label, old.logits, replayed.label,",
            "old.logits, replayed.label, new.logits, incoming.label,",
        ),
    ),
    *_in(
        "methods/er_aml.py",
        "test_online.py::test_picks_are_uniform_over_what_is_allowed",
        (
            "step: er_aml picks the anchor for its positive",
            "positive = same & there & (jnp.arange(capacity + count) != own[:, None])",
            "positive = same & there",
        ),
        (
            "step: er_aml leaves gamma out",
            "return gamma * losses.triplet(",
            "return losses.triplet(",
            "test_online.py"
            "::test_er_aml_pulls_pairs_and_replays_all_classes_seen[paper]",
        ),
    ),
    *_in(
        "methods/mir.py",
        "test_mir.py::test_a_step_equals_its_twin[past]",
        (
            "step: mir replays what the step helps",
            "return later - before, scored",
            "return before - later, scored",
        ),
        (
            "step: mir's virtual step has rate 1",
            "ahead = jax.tree.map(lambda p, g: p - lr * g, params, grads)",
            "ahead = jax.tree.map(lambda p, g: p - g, params, grads)",
            "test_mir.py::test_a_step_equals_its_twin",
        ),
    ),
    *_in(
        "methods/gem.py",
        "test_gem.py::test_projection_by_hand",
        (
            "step: gem projects where all constraints are violated",
            "violated = jnp.any(along < 0)",
            "violated = jnp.all(along < 0)",
        ),
        (
            "step: gem leaves its margin out of the dual",
            "along + margin * jnp.sum(matrix, axis=1)",
            "along",
        ),
        (
            "step: gem is held by the present task, too",
            '(memory.items["task"] == task) & online.past_tasks(state)',
            '(memory.items["task"] == task)',
            "test_gem.py::test_gem_s_step",
        ),
    ),
    *_in(
        "methods/agem.py",
        "test_gem.py::test_agem_projection",
        (
            "step: agem projects gradients that agree",
            'jnp.minimum(jnp.vdot(gradient, unit, precision="highest"), 0.0)',
            'jnp.maximum(jnp.vdot(gradient, unit, precision="highest"), 0.0)',
        ),
    ),
    *_in(
        "methods/online_teacher.py",
        "test_icarl.py"
        "::test_the_teacher_is_the_network_at_the_begin_of_the_task_and_stays",
        (
            "step: icarl's teacher is that of the first task for good",
            "if task.index == 0:",
            "if task.index != 1:",
        ),
        (
            "step: icarl's teacher is in training mode",
            "each.images, train=False)",
            "each.images, train=True)",
            "test_icarl.py::test_paper_has_the_teacher_for_old_classes_of_every_row",
        ),
    ),
    *_in(
        "methods/icarl.py",
        "test_icarl.py"
        "::test_the_teacher_is_the_network_at_the_begin_of_the_task_and_stays",
        (
            "step: icarl's old classes stay none",
            "old = core.copy(state.extra.seen)",
            "old = core.copy(state.extra.old)",
        ),
    ),
    *_in(
        "methods/online_means.py",
        "test_icarl.py::test_the_nearest_mean_wins",
        (
            "step: empty slots count in the class means",
            "there = filled[slots] & (number < capacity)",
            "there = number < capacity",
        ),
        (
            "step: rows of the last chunk count twice in the class means",
            "there = filled[slots] & (number < capacity)",
            "there = filled[slots]",
        ),
    ),
    *_in(
        "methods/der.py",
        "test_der.py::test_a_step_is_the_equation",
        (
            "step: der leaves alpha out",
            "value += alpha * losses.der(",
            "value += losses.der(",
        ),
        (
            "step: der stores what it says of replayed rows",
            "return value, (stats, new.logits)",
            "return value, (stats, old.logits)",
        ),
    ),
    *_in(
        "methods/cclis.py",
        "test_cclis.py::test_a_later_step_is_the_equation[default]",
        (
            "step: cclis does not bring prototypes back to the sphere",
            'contrastive.l2_normalize(state.params["prototypes"])',
            'state.params["prototypes"]',
            "test_cclis.py"
            "::test_prototypes_are_moved_on_the_sphere_whatever_their_length",
        ),
        (
            "step: cclis trains prototypes at the network's rate",
            'shares = {"prototypes": prototype_rate}',
            "shares = {}",
        ),
        (
            "step: cclis has its teacher in training mode",
            "rehearsal.teach(net, state, images, train=False)",
            "rehearsal.teach(net, state, images, train=True)",
        ),
    ),
    *_in(
        "methods/co2l.py",
        "test_co2l.py::test_a_later_step_is_the_equation[default]",
        (
            "step: co2l has stored rows for anchors",
            "anchor_mask=state.extra.current[label]",
            "anchor_mask=None",
        ),
        (
            "step: co2l distils in the first task",
            "value += jnp.where(state.task > 0, later, 0)",
            "value += later",
            "test_co2l.py::test_the_first_task_is_contrast_alone",
        ),
    ),
    *_in(
        "methods/rehearsal.py",
        "test_rehearsal.py::test_three_tasks[co2l-12]",
        (
            "step: stored rows weigh like those of the task",
            "return jnp.where(jnp.any(same, axis=1), stored, fresh)",
            "return fresh",
            "test_rehearsal.py::test_weights_of_stored_rows_and_of_others",
        ),
        (
            "step: the teacher of cclis and co2l stays that of the first task",
            "if task.index > 0:",
            "if task.index == 1:",
        ),
        (
            "step: the end of a task counts one task too few",
            "extra.current, size, state.task + 1",
            "extra.current, size, state.task",
        ),
        (
            "step: a task's end forgets what was stored",
            "rows = np.concatenate([stored, task.train.rows]).astype(np.int32)",
            "rows = np.concatenate([0 * stored - 1, task.train.rows]).astype(np.int32)",
        ),
        (
            "step: a class of two tasks is old in the second",
            "return self.taught & ~self.current",
            "return self.taught",
            "test_rehearsal.py"
            "::test_a_class_of_both_the_memory_and_the_task_is_one_pool",
        ),
    ),
    *_in(
        "methods/duel.py",
        "test_duel.py::test_a_step_is_the_equation[moco]",
        (
            "step: duel's keys are of the queries' view",
            "*slow, views[:, 1], train=True",
            "*slow, views[:, 0], train=True",
        ),
        (
            "step: duel's slow network never moves",
            "slow = optim.ema(extra.momentum, state.params, setup.momentum)",
            "slow = extra.momentum",
        ),
        (
            "step: duel's slow network keeps no statistics",
            "extra = state.extra._replace(momentum_stats=slow_stats)",
            "extra = state.extra",
        ),
        (
            "step: duel's simclr has each row for its own positive",
            "pairs[:, ::-1].reshape(z.shape)",
            "pairs.reshape(z.shape)",
            "test_duel.py::test_a_step_is_the_equation[simclr]",
        ),
    ),
    *_in(
        "methods/icl_steps.py",
        "test_icl.py::test_old_and_new_anchors_take_turns",
        (
            "step: icl sees old rows in the first epoch alone",
            "turn = done % extra.epoch_steps < extra.old_steps",
            "turn = done < extra.old_steps",
        ),
        (
            "step: icl's outer gradient is at the weights before the inner steps",
            "jax.value_and_grad(outer, has_aux=True)(params)",
            "jax.value_and_grad(outer, has_aux=True)(state.params)",
            "test_icl.py::test_a_meta_step_is_the_equation[3-False-False]",
        ),
    ),
    *_in(
        "methods/icl.py",
        "test_icl.py::test_a_task_begins_with_its_weights[retrain]",
        (
            "step: icl's retraining begins from the present weights",
            'plan.strategy in ("retrain", "random")',
            'plan.strategy in ("random",)',
        ),
        (
            "step: icl's growth is none",
            "icl_orders.growth(task) if task.index > 0 else 0.0",
            "icl_orders.growth(task) if task.index < 0 else 0.0",
        ),
    ),
    *_in(
        "methods/icl_passes.py",
        "test_icl.py::test_old_and_new_anchors_take_turns",
        (
            "step: icl has a row's own positive among its negatives",
            "own = incremental.others(size) & mask",
            "own = jnp.ones((size, size), bool) & mask",
        ),
    ),
]

_EVALUATORS = [
    *_in(
        "evals/knn.py",
        "test_evals.py::test_votes_weigh_by_distance",
        (
            "eval: knn's weights have no temperature",
            "weights = jnp.exp(scores / temperature)",
            "weights = jnp.exp(scores)",
        ),
        (
            "eval: knn asks rows that it may not",
            "jax.lax.top_k(jnp.where(mask, scores, -jnp.inf), k)",
            "jax.lax.top_k(scores, k)",
        ),
    ),
    *_in(
        "evals/features.py",
        "test_evals.py::test_neighbours_are_those_of_brute_force[class-cosine]",
        (
            "eval: rows seen are those of earlier tasks",
            "(groups.train_task <= task)",
            "(groups.train_task < task)",
        ),
        (
            "eval: a task's classes are not told",
            "told = jnp.where(allowed[task], scores, -jnp.inf)",
            "told = scores",
            "test_evals.py::test_verdicts_are_those_of_brute_force",
        ),
        (
            "eval: a row of several tasks is of the last",
            "for t, task in reversed(list(enumerate(tasks))):",
            "for t, task in enumerate(tasks):",
            "test_online_head.py::test_predict_judges_the_rows_of_the_tasks_met",
        ),
        (
            "eval: tasks to come are judged",
            "np.arange(len(row)) <= task, row, np.nan",
            "np.arange(len(row)) <= task + 1, row, np.nan",
        ),
    ),
    *_in(
        "evals/linear.py",
        "test_evals.py::test_domain_probe_trains_on_its_domain_alone",
        (
            "eval: a domain's probe trains on all domains",
            "mine = np.flatnonzero(mask & (groups.train_task == t))",
            "mine = np.flatnonzero(mask)",
        ),
        (
            "eval: the semi-supervised probe has all labels",
            "mask = share & usable(state, task)",
            "mask = usable(state, task)",
            "test_evals.py"
            "::test_semi_supervised_probe_trains_on_its_share_alone[all-features]",
        ),
    ),
    *_in(
        "evals/head.py",
        "test_evals.py::test_probe_is_the_sgd_of_the_equations[features-16]",
        (
            "eval: the probe has no momentum",
            "momentum * v + g + weight_decay * p",
            "g + weight_decay * p",
        ),
        (
            "eval: the probe's rate falls an epoch late",
            "jnp.sum(milestones <= epoch)",
            "jnp.sum(milestones < epoch)",
        ),
        (
            "eval: the probe takes rows in order",
            "bits = jax.random.bits(key, rows.shape, jnp.uint32)",
            "bits = jnp.zeros(rows.shape, jnp.uint32)",
            "test_evals.py::test_epochs_of_a_probe_are_shuffled_anew",
        ),
    ),
    *_in(
        "evals/predict.py",
        "test_evals.py::test_predictions_of_rows_of_no_task_count_only_if_asked",
        (
            "eval: predictions of all tasks are judged by default",
            "met_only=True",
            "met_only=False",
        ),
        (
            "eval: met_only is ignored",
            "(task if met_only else none)",
            "task",
        ),
        (
            "eval: rows of no task are never judged",
            "(task if met_only else none)",
            "(task if met_only else none - 1)",
        ),
        (
            "eval: met_only leaves out the task just finished",
            "unjudged = met_only & (np.arange(len(row)) > task)",
            "unjudged = met_only & (np.arange(len(row)) >= task)",
        ),
        (
            "eval: met_only shows tasks to come",
            "unjudged = met_only & (np.arange(len(row)) > task)",
            "unjudged = np.zeros(len(row), bool)",
        ),
    ),
    *_in(
        "metrics.py",
        "test_metrics.py",
        (
            "eval: forgetting never is negative",
            "(_best(matrix[:-1]) - matrix[-1])[:-1]",
            "(_best(matrix) - matrix[-1])[:-1]",
        ),
        (
            "eval: stability may be negative",
            "best = np.maximum(_best(matrix[:-1]), matrix[-1])",
            "best = _best(matrix[:-1])",
        ),
        (
            "eval: plasticity counts the diagonal",
            "gain[j, j + 1 :]",
            "gain[j, j:]",
        ),
        (
            "eval: the accuracy after a task counts tasks to come",
            "_mean(row[: t + 1])",
            "_mean(row)",
        ),
        (
            "eval: a class is compared with itself",
            "others = jnp.sum(means, axis=0) - means",
            "others = jnp.sum(means, axis=0)",
        ),
    ),
]

_DATA = [
    *_in(
        "data/scenarios.py",
        "test_stream.py::test_class_scenario_released_order_in_tens",
        (
            "data: the order of classes is ignored",
            "enumerate(np.array_split(order, num_tasks))",
            "enumerate(np.array_split(np.sort(order), num_tasks))",
        ),
        (
            "data: a task is judged on all classes",
            "np.flatnonzero(np.isin(judge.label, classes))",
            "np.arange(len(judge.label))",
            "test_stream.py::test_class_scenario_partitions_by_label",
        ),
        (
            "data: earlier rows are also the task's own",
            "*before[:index]]",
            "*before[: index + 1]]",
            "test_stream.py::test_earlier_rows_are_those_of_the_tasks_before",
        ),
        (
            "data: earlier rows lack those of the last task",
            "*before[:index]]",
            "*before[: max(index - 1, 0)]]",
            "test_stream.py::test_earlier_rows_are_those_of_the_tasks_before",
        ),
        (
            "data: earlier rows of another run are also the new ones",
            "np.flatnonzero(domain < last)",
            "np.flatnonzero(domain <= last)",
            "test_stream.py::test_earlier_rows_are_those_of_the_tasks_before",
        ),
        (
            "data: slices are not shuffled",
            "np.split(shuffled, cuts)",
            "np.split(by_label, cuts)",
            "test_stream.py::test_data_scenario_slices_the_released_permutation",
        ),
        (
            "data: the last slice takes the remainder",
            "cuts = [rest + each * (index + 1)",
            "cuts = [each * (index + 1)",
            "test_stream.py::test_data_scenario_slices_the_released_permutation",
        ),
        (
            "data: a domain is judged on all domains",
            "np.flatnonzero(judge.domain == domain)",
            "np.arange(len(judge.domain))",
            "test_stream.py::test_domain_scenario",
        ),
        (
            "data: growth is the share of the old rows",
            "old = round((1 - growth) * len(rows))",
            "old = round(growth * len(rows))",
            "test_converge.py::test_growth_cuts_by_the_seed",
        ),
    ),
    *_in(
        "data/stream.py",
        "test_stream.py::test_schedule_is_random_access_over_seeded_epochs",
        (
            "data: every epoch has the same order",
            "default_rng([plan.seed, plan.task, epoch])",
            "default_rng([plan.seed, plan.task, 0])",
        ),
        (
            "data: every task has the same order",
            "default_rng([plan.seed, plan.task, epoch])",
            "default_rng([plan.seed, 0, epoch])",
        ),
        (
            "data: every task has the epochs of the first",
            "epochs = each[min(task, len(each) - 1)] if each else 0",
            "epochs = each[0] if each else 0",
            "test_stream.py::test_first_tasks_may_have_epochs_of_their_own",
        ),
    ),
    *_in(
        "data/splits.py",
        "test_sources.py::test_validation_is_stratified_seeded_and_apart_from_test",
        (
            "data: validation rows stay in the train split",
            "return take(train, np.flatnonzero(~mask)), take(",
            "return train, take(",
        ),
        (
            "data: the test split is not cut to the classes",
            "cut(dataset.test)\n",
            "dataset.test\n",
            "test_converge.py::test_some_classes_and_some_rows_of_each",
        ),
    ),
    *_in(
        "crops.py",
        "test_augment.py::test_random_resized_crop_is_pillows_crop_then_resize",
        (
            "data: shrinking has no antialiasing",
            "jnp.maximum(scale, 1.0)",
            "jnp.minimum(scale, 1.0)",
        ),
        (
            "data: crops swap width and height",
            "w = jnp.round(jnp.sqrt(area * aspect))\n"
            "    h = jnp.round(jnp.sqrt(area / aspect))",
            "h = jnp.round(jnp.sqrt(area * aspect))\n"
            "    w = jnp.round(jnp.sqrt(area / aspect))",
            "test_augment.py::test_boxes_are_distributed_as_torchvisions",
        ),
        (
            "data: crops begin at the top",
            "jnp.floor(u[-2] * (height - h + 1))",
            "jnp.floor(0 * (height - h + 1))",
            "test_augment.py::test_boxes_are_distributed_as_torchvisions",
        ),
    ),
    *_in(
        "augment.py",
        "test_augment.py::test_default_views_are_those_of_the_published_recipe",
        (
            "data: saturation is jittered as strongly as contrast",
            "_JITTER = (0.4, 0.4, 0.2, 0.1)",
            "_JITTER = (0.4, 0.4, 0.4, 0.1)",
        ),
        (
            "data: views are gray half as often",
            "grayscale: float = 0.2,",
            "grayscale: float = 0.1,",
        ),
        (
            "data: both views are the same",
            "jax.vmap(jax.random.fold_in, (0, None))(keys, view)",
            "jax.vmap(jax.random.fold_in, (0, None))(keys, 0)",
            "test_augment.py::test_keys_are_folded_from_position_then_view",
        ),
        (
            "data: solarising inverts the dark pixels",
            "jnp.where(image >= threshold, 1.0 - image, image)",
            "jnp.where(image < threshold, 1.0 - image, image)",
            "test_augment.py::test_gray_solarize_flip_normalize",
        ),
    ),
]

_RUNS = [
    *_in(
        "job.py",
        "test_core.py::test_a_task_begins_where_the_run_stands",
        (
            "run: a task's start is not noted",
            '"task_start": np.int32(state.step)',
            '"task_start": np.int32(state.task_start)',
        ),
        (
            "run: a task's steps are those of one epoch",
            "np.int32(len(schedule(job, source, task.index)))",
            "np.int32(schedule(job, source, task.index).steps_per_epoch)",
        ),
        (
            "run: the method is not told of a task's beginning",
            "sharding.settle(job.method.begin_task(state, task), job.mesh)",
            "sharding.settle(state, job.mesh)",
        ),
    ),
    *_in(
        "train.py",
        "test_methods.py::test_resumes_bitwise_finite_one_compile[er]",
        (
            "run: a resumed task begins with its first batch",
            "work, source, task.index, step - begun)",
            "work, source, task.index, 0)",
        ),
        (
            "run: the end of a task is not told",
            "state = work.method.end_task(state, task)",
            "state = state",
            "test_importance.py::test_a_run_consolidates_at_the_end_of_each_task",
        ),
    ),
    *_in(
        "checkpoint.py",
        "test_checkpoint.py::test_restores_every_type_bitwise_on_another_mesh",
        (
            "run: a key is not restored",
            "return Restored(state, metadata",
            'return Restored({**state, "key": like["key"]}, metadata',
        ),
        (
            "run: the oldest checkpoint is restored",
            "for number in reversed(numbers):",
            "for number in numbers:",
            "test_checkpoint.py::test_damaged_newest_falls_back_and_says_so[flip]",
        ),
        (
            "run: a checksum does not see a swap",
            "weights = 2 * jnp.arange(words.size, dtype=jnp.uint32) + 1",
            "weights = jnp.ones(words.size, jnp.uint32)",
            "test_checkpoint.py::test_checksum_sees_one_bit_and_a_swap",
        ),
    ),
]

_BASE = "test_bases.py::test_a_base_is_its_equations"

_BASES = [
    *_in(
        "methods/ssl_bases.py",
        f"{_BASE}[mocov2plus-code]",
        (
            "step: moco swaps its key banks",
            "bank1, bank2 = features.key_queue",
            "bank2, bank1 = features.key_queue",
        ),
        (
            "step: moco swaps its keys",
            "(q1, q2), (k1, k2) = _views(features.z), _views(features.k)",
            "(q1, q2), (k2, k1) = _views(features.z), _views(features.k)",
        ),
        (
            "step: byol predicts the same view",
            "noncontrastive.byol(o1, k2) + noncontrastive.byol(o2, k1)",
            "noncontrastive.byol(o1, k1) + noncontrastive.byol(o2, k2)",
            f"{_BASE}[byol-code]",
        ),
        (
            "step: pnr adds its pseudo-negatives",
            "return total - options.negative_weight * apart",
            "return total + options.negative_weight * apart",
            f"{_BASE}[barlow_twins-code]",
        ),
        (
            "step: vicreg's lambda is cassle's weight",
            "negative_weight=23.0",
            "negative_weight=25.0",
            "test_bases.py::test_defaults_are_the_papers",
        ),
    ),
    *_in(
        "methods/ssl_strategies.py",
        "test_bases.py::test_a_strategy_is_its_equation[simclr]",
        (
            "step: cassle leaves its weight out",
            "+ options.weight * distilled",
            "+ distilled",
        ),
        (
            "step: der replays rows that do not exist",
            "example_mask=features.stored_mask",
            "example_mask=None",
        ),
    ),
]

# The step of two-view methods, line by line.
_TWO_VIEW = [
    *_in(
        "methods/two_view.py",
        "test_two_view.py",
        (
            "two_view: the slow network never moves",
            "slow = optim.ema(extra.momentum, ssl_networks.copied(setup, params), "
            "decay)",
            "slow = extra.momentum",
        ),
        (
            "two_view: the slow network follows the parameters before the step",
            "    state = core.apply_gradients(state, grads, setup.parts.tx, lr)\n"
            "    extra = _moved(setup, extra, state.params, features, first, progress)",
            "    begun = state.params\n"
            "    state = core.apply_gradients(state, grads, setup.parts.tx, lr)\n"
            "    extra = _moved(setup, extra, begun, features, first, progress)",
        ),
        (
            "two_view: the momentum follows the progress of the run",
            "first, progress = state.task == 0, core.progress(state)",
            "first, progress = state.task == 0, state.step / state.task_steps",
        ),
        (
            "two_view: the slow network keeps no statistics",
            "extra = extra._replace(momentum_stats=slow_stats)",
            "extra = extra._replace(momentum_stats=extra.momentum_stats)",
        ),
        (
            "two_view: the slow network normalises both views at once",
            "images, train=True,\n            groups=2,",
            "images, train=True,\n            groups=1,",
        ),
        (
            "two_view: keys go to the bank of the other view",
            "extra.key_queue, extra.key_pointer, _banks(features.k))",
            "extra.key_queue, extra.key_pointer, _banks(features.k)[::-1])",
        ),
        (
            "two_view: queues hold raw rows",
            "return contrastive.l2_normalize(embeddings).swapaxes(0, 1)",
            "return embeddings.swapaxes(0, 1)",
        ),
        (
            "two_view: the frozen queue is filled with keys",
            "extra.frozen_queue, extra.frozen_pointer, _banks(features.f),",
            "extra.frozen_queue, extra.frozen_pointer, _banks(features.k),",
        ),
        (
            "two_view: the frozen queue is filled in the first task",
            "active=~first,",
            "active=True,",
        ),
        (
            "two_view: the first task has the strategy's loss, later ones the base's",
            "jax.lax.cond(first, gradient_of(setup.base.loss), later, outputs)",
            "jax.lax.cond(~first, gradient_of(setup.base.loss), later, outputs)",
        ),
        (
            "two_view: the teacher is that of the first task for good",
            "if not setup.strategy.teacher or task.index == 0:",
            "if not setup.strategy.teacher or task.index != 1:",
        ),
        (
            "two_view: the teacher has the slow network's statistics",
            "teacher_stats=core.copy(ssl_networks.copied(setup, state.stats)),",
            "teacher_stats=core.copy(\n            state.extra.momentum_stats\n"
            "            or ssl_networks.copied(setup, state.stats)\n        ),",
        ),
        (
            "two_view: the optimiser goes on into the next task",
            "state = state.replace(opt_state=setup.parts.tx.init(state.params))",
            "state = state.replace(opt_state=state.opt_state)",
        ),
        (
            "two_view: g is not born anew with the second task",
            "if setup.strategy.distiller and task.index == 1:",
            "if setup.strategy.distiller and task.index == -1:",
        ),
        (
            "two_view: the step's statistics are dropped",
            "return state.replace(stats=stats, extra=extra), metrics",
            "return state.replace(extra=extra), metrics",
        ),
        (
            "two_view: ewc has no penalty",
            "return jax.tree.map(jnp.add, grads, penalty), extra",
            "return grads, extra",
        ),
        (
            "two_view: ewc's penalty has the wrong sign",
            "return jax.tree.map(jnp.add, grads, penalty), extra",
            "return jax.tree.map(jnp.subtract, grads, penalty), extra",
        ),
        (
            "two_view: ewc's penalty does not know the rate",
            "importance.gradient(held, state.params, weight=weight, lr=lr)",
            "importance.gradient(held, state.params, weight=weight)",
        ),
        (
            "two_view: ewc sums gradients with the penalty",
            "importance.observe(held, grads, late)",
            "importance.observe(held, jax.tree.map(jnp.add, grads, penalty), late)",
        ),
        (
            "two_view: ewc observes all but the beginning of a task",
            "(core.progress(state) >= 1 - setup.fisher_share)",
            "(core.progress(state) >= setup.fisher_share)",
        ),
        (
            "two_view: ewc does not observe the last step of a short task",
            "last = state.step + 1 == state.task_start + state.task_steps",
            "last = state.step == state.task_start + state.task_steps",
        ),
        (
            "two_view: ewc does not consolidate",
            "held = jax.jit(importance.consolidate)(state.extra.importance, "
            "state.params)",
            "held = state.extra.importance",
        ),
        (
            "two_view: lump does not mix",
            "return jnp.where(mask[rows][:, None, None, None, None], mixed, views)",
            "return views",
        ),
        (
            "two_view: lump mixes with partners that do not exist",
            "return jnp.where(mask[rows][:, None, None, None, None], mixed, views)",
            "return mixed",
        ),
        (
            "two_view: der stores the projection of the other view",
            '"projection": outputs.z[:, 0]}',
            '"projection": outputs.z[:, 1]}',
        ),
        (
            "two_view: der replays the other view",
            "replayed = others[:, 0]",
            "replayed = others[:, 1]",
        ),
        (
            "two_view: der holds to rows that do not exist",
            'stored=items["projection"], stored_mask=mask)',
            'stored=items["projection"], stored_mask=None)',
        ),
        (
            "two_view: the batch is stored before the memory is read",
            "        others, mask, items = _drawn(",
            '        early = {"image": batch["image"]}\n'
            '        early["projection"] = jnp.zeros((len(views), setup.dim))\n'
            "        extra = _stored(extra, k_write, early, after=())\n"
            "        others, mask, items = _drawn(",
        ),
        (
            "two_view: nothing is stored",
            "extra = _stored(extra, k_write, offered, after=items)",
            "extra = extra",
        ),
    ),
    *_in(
        "methods/ssl_networks.py",
        "test_two_view.py",
        (
            "two_view: g is given raw queries",
            "given = setup.base.distiller_input(rows)",
            "given = rows",
        ),
        (
            "two_view: g's statistics are dropped",
            "p, after = two(p), after | more",
            "p = two(p)",
        ),
        (
            "two_view: g normalises both views at once",
            "apply(setup.distiller, params, stats, given, groups=2)",
            "apply(setup.distiller, params, stats, given, groups=1)",
        ),
        (
            "two_view: byol's predictor keeps no statistics",
            "o, after = two(o), after | more",
            "o = two(o)",
        ),
        (
            "two_view: replayed rows move the statistics from before the step",
            "apply(setup.copied, params, after, replayed)",
            "apply(setup.copied, params, stats, replayed)",
        ),
        (
            "two_view: the teacher is always in training mode",
            "train=setup.frozen_train, groups=2,",
            "train=True, groups=2,",
        ),
        (
            "two_view: the teacher is never in training mode",
            "train=setup.frozen_train, groups=2,",
            "train=False, groups=2,",
        ),
        (
            "two_view: the teacher is asked in the first task alone",
            "jax.lax.cond(state.task == 0, lambda: absent, features)",
            "jax.lax.cond(state.task != 0, lambda: absent, features)",
        ),
    ),
]

FAULTS = tuple(
    [
        *_LOSSES,
        *_MEMORIES,
        *_OPTIMISERS,
        *_CORE,
        *_NORM,
        *_STEPS,
        *_BASES,
        *_EVALUATORS,
        *_DATA,
        *_RUNS,
        *_TWO_VIEW,
    ]
)
