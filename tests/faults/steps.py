"""Faults of the steps of each family of methods, and of where their tasks begin."""

import jax
import jax.numpy as jnp

from faults import fault
from faults.fault import always, gives, instead, keeps, makes, swaps, takes


def _step(name):
    return f"test_two_view.py::test_a_step_is_the_equations[mocov2plus-{name}]"


def _tasks(name):
    return f"test_two_view.py::test_three_tasks_are_the_equations[mocov2plus-{name}]"


def _passes_on(function):
    """Return the state after the step as it is."""
    return lambda setup, before, after: after


def _changes_nothing(function):
    """Return the state as it is."""
    return lambda setup, state: state


def _one_view(parts):
    """Augment so that the second view is the first one again."""

    def augment(key, images):
        views = parts.augment(key, images)
        return jnp.stack([views[:, 0], views[:, 0]], axis=1)

    return parts._replace(augment=augment)


def _first_rates(parts):
    return parts._replace(lr=lambda progress, task: parts.lr(progress, 0 * task))


def _after_the_second(*fields):
    """Wrap the begin of a task: from the third task on these fields stay."""

    def wrap(begin):
        def wrong(state, task):
            return (begin if task.index < 2 else keeps(*fields)(begin))(state, task)

        return wrong

    return wrap


def _does_nothing(_):
    return lambda state, task: state


def _at_no_rate(change):
    return lambda held, state, grads, lr: change(held, state, grads, 0.0)


def _found(name, patch):
    """Patch a `find`: patch the `make` that it returns for a name."""
    return gives(lambda make, of: patch(make) if of["name"] == name else make)


def _own_keys(loss):
    """Give the loss of a base the key of a view in place of the other view's."""
    return lambda features: loss(features._replace(k=features.k[:, ::-1]))


def _swapped_teacher(loss):
    """Give the loss of a strategy the teacher's views in the wrong order."""
    return lambda base, features: loss(base, features._replace(f=features.f[:, ::-1]))


_two_view = [
    *fault.of(
        "methods.two_view.make",
        _step("pnr"),
        ("two_view: the slow network never moves", makes(step=keeps("extra.momentum"))),
        ("two_view: no keys are queued", makes(step=keeps("extra.base"))),
        ("two_view: both views are one", takes(parts=_one_view)),
        ("two_view: every task has the rates of the first", takes(parts=_first_rates)),
        (
            "two_view: der stores nothing",
            makes(step=keeps("extra.strategy")),
            _step("der"),
        ),
        (
            "two_view: ewc never consolidates",
            makes(end_task=_does_nothing),
            _tasks("ewc"),
        ),
        (
            "two_view: the optimiser goes on into the next task",
            makes(begin_task=keeps("opt_state")),
            _tasks("finetune"),
        ),
        (
            "two_view: the teacher stays that of the first task",
            makes(begin_task=_after_the_second("extra.teacher")),
            _tasks("pnr"),
        ),
        (
            "two_view: g is not born anew with the second task",
            makes(begin_task=keeps("params", "stats")),
            _tasks("pnr"),
        ),
        (
            "two_view: embeddings are the projector's",
            gives(lambda method: method._replace(embed=method.project)),
            "test_two_view.py"
            "::test_evaluators_read_the_encoder_and_the_projector_in_evaluation_mode",
        ),
    ),
    *fault.of(
        "methods.two_view.step.keep_encoder",
        _tasks("pnr-heads"),
        ("two_view: weight decay moves a waiting encoder", _passes_on),
    ),
    *fault.of(
        "methods.two_view.step.end_warm_up",
        _tasks("pnr-heads"),
        ("two_view: momentum from before moves the encoder", _changes_nothing),
    ),
    *fault.of(
        "memory.queue.enqueue",
        _step("pnr"),
        ("two_view: queues hold raw rows", takes(rows=lambda rows: 2 * rows)),
    ),
    *fault.of(
        "memory.importance.observe",
        _tasks("ewc"),
        ("two_view: ewc observes every step", takes(active=always(True))),
    ),
    *fault.of(
        "methods.two_view.strategies.stored_examples.mix_examples",
        _step("lump"),
        ("two_view: lump mixes with rows that do not exist", takes(mask=jnp.ones_like)),
    ),
    *fault.of(
        "methods.two_view.bases.find_make",
        "test_bases.py::test_a_base_is_its_equations[mocov2plus-code]",
        (
            "two_view: moco compares a query with the key of its own view",
            _found("mocov2plus", makes(loss=_own_keys)),
        ),
        (
            "two_view: the momentum falls over a task",
            _found("mocov2plus", swaps("momentum_start", "momentum_end")),
            _step("pnr"),
        ),
    ),
    *fault.of(
        "losses.distill.pseudo_negative",
        "test_bases.py::test_a_base_is_its_equations[barlow_twins-code]",
        ("two_view: pnr pulls its pseudo-negatives", gives(lambda value: -value)),
    ),
    *fault.of(
        "methods.two_view.strategies.find_make",
        _step("pnr"),
        (
            "two_view: the teacher normalises by its batch unasked",
            _found("pnr", takes(frozen_bn=always("batch"))),
        ),
        (
            "two_view: the teacher's views are swapped",
            _found("pnr", makes(loss=_swapped_teacher)),
        ),
        (
            "two_view: cassle leaves its weight out",
            _found("cassle", takes(weight=always(1.0))),
            "test_bases.py::test_a_base_is_its_equations[simclr-code]",
        ),
        (
            "two_view: distil never adds the base",
            _found("distil", takes(base_weight=always(0.0))),
            "test_distil.py::test_the_loss_is_the_sum_of_its_terms[finite]",
        ),
        (
            "two_view: l2_sp pulls beyond its anchor",
            _found("l2_sp", makes(change_gradients=_at_no_rate)),
            "test_two_view.py::"
            "test_a_pull_goes_as_far_as_its_anchor_whatever_its_weight[l2_sp-40.0]",
        ),
    ),
    *fault.of(
        "config.teacher.read_teacher",
        "test_distil.py::test_the_teacher_sees_the_views_as_its_card_says[8]",
        (
            "two_view: the teacher sees what the student sees",
            takes(image=lambda image: image._replace(mean=(0.0,), std=(1.0,))),
        ),
    ),
    *fault.of(
        "config.teacher.describe",
        "test_distil.py::test_a_run_keeps_its_teachers_digest_and_no_weight",
        (
            "two_view: a run resumes with any teacher",
            gives(lambda card: card | {"weights": "", "checksum": ""}),
        ),
    ),
]


def _swapped_parts(er_ace):
    """Give the incoming rows for the replayed ones, and the other way round."""

    def wrong(new, new_labels, old, old_labels, seen, *, replay_mask=None, **options):
        return er_ace(old, old_labels, new, new_labels, seen, **options)

    return wrong


def _judged_before(method, of):
    """The method's own evaluation sees the running statistics."""

    def wrong(state):
        return (
            of["method"].eval_state(state).replace(stats=method.eval_state(state).stats)
        )

    return method._replace(eval_state=wrong)


def _forgets_before(state, of):
    """Of the rows met, those of the last task alone."""
    memory = state.extra.memory._replace(seen=of["state"].extra.candidates.seen)
    return state.replace(extra=state.extra._replace(memory=memory))


def _always_projected(_):
    def wrong(gradient, reference):
        along = reference / jnp.maximum(jnp.max(jnp.abs(reference)), 1e-38)
        return gradient - gradient @ along / jnp.maximum(along @ along, 1e-38) * along

    return wrong


_masks = "test_online.py::test_er_ace_masks_each_part_by_itself[paper]"
_gem = "test_gem.py::test_projection_is_the_general_solver_s[7-options1]"
_teacher = (
    "test_icarl.py::test_the_teacher_is_the_network_at_the_begin_of_the_task_and_stays"
)
_written = "test_online.py::test_a_batch_is_written_after_its_updates"
_online = [
    *fault.of(
        "losses.replay.er_ace",
        _masks,
        ("online: er_ace swaps incoming and replayed rows", _swapped_parts),
    ),
    *fault.of(
        "methods.er_ace.make",
        _written,
        ("online: er_ace stores nothing", makes(step=keeps("extra.memory"))),
        (
            "online: every update on a batch counts as a step",
            makes(
                step=lambda step: (
                    lambda state, batch: (
                        lambda after, metrics: (
                            after.replace(step=state.step + 3),
                            metrics,
                        )
                    )(*step(state, batch))
                )
            ),
        ),
        (
            "online: classes that come are not seen",
            makes(step=keeps("extra.seen")),
            _masks,
        ),
    ),
    *fault.of(
        "methods.online.replayable",
        "test_online.py::test_er_replays_what_it_may[past_tasks]",
        (
            "online: rows of the present task are replayed, too",
            instead(lambda _, state, incoming: state.extra.memory.filled),
        ),
    ),
    *fault.of(
        "methods.er.make",
        "test_online.py::test_joint_er_is_one_mean_over_one_pass[absent]",
        (
            "online: unseen classes compete in joint er",
            takes(unseen=always("compete")),
        ),
    ),
    *fault.of(
        "methods.er_aml.make",
        "test_online.py::test_er_aml_pulls_pairs_and_replays_all_classes_seen[paper]",
        ("online: er_aml leaves gamma out", takes(gamma=always(1.0))),
    ),
    *fault.of(
        "methods.er_lwf.make",
        "test_er_lwf.py::test_a_step_is_one_mean_over_all_rows[paper]",
        ("online: er_lwf distils at temperature 2", takes(temperature=always(2.0))),
    ),
    *fault.of(
        "methods.mir.interference",
        "test_mir.py::test_a_step_equals_its_twin[past]",
        (
            "online: mir replays what the step helps",
            gives(lambda result: (-result[0], *result[1:])),
        ),
    ),
    *fault.of(
        "methods.gem.project",
        _gem,
        ("online: gem leaves its margin out", takes(margin=always(0.0))),
    ),
    *fault.of(
        "methods.agem.project",
        "test_gem.py::test_agem_projection",
        ("online: a-gem projects gradients that agree", _always_projected),
    ),
    *fault.of(
        "methods.icarl.make",
        _teacher,
        (
            "online: icarl's teacher is never renewed",
            makes(begin_task=keeps("extra.teacher")),
        ),
    ),
    *fault.of(
        "methods.online.statistics.use_memory_statistics",
        "test_online_statistics.py::"
        "test_what_an_evaluation_computes_itself_has_seen_the_new_statistics",
        ("online: class means are of the running statistics", gives(_judged_before)),
    ),
    *fault.of(
        "methods.mir.pick_highest",
        "test_mir.py::test_rows_that_do_not_exist_are_not_picked[2-best1]",
        (
            "online: mir picks rows that do not exist",
            takes(pool=lambda pool: pool._replace(mask=jnp.ones_like(pool.mask))),
        ),
    ),
    *fault.of(
        "methods.gss.complete",
        "test_gss.py::"
        "test_references_are_disjoint_draws_of_images_as_they_are[5-whole1]",
        (
            "online: gss compares with draws that lack rows",
            instead(lambda mask: mask.any(axis=1)),
        ),
    ),
    *fault.of(
        "methods.gcr._rebuild_memory",
        "test_gcr.py::test_a_chosen_memory_stands_for_all_rows_met",
        ("online: gcr's memory stands for the last task", gives(_forgets_before)),
    ),
    *fault.of(
        "methods.aser.Selector.balanced",
        "test_aser.py::test_rows_that_are_helped_stay_and_the_others_compete[True]",
        (
            "online: aser gives up rows that are helped",
            gives(lambda drawn, of: (*drawn[:2], of["allowed"])),
        ),
    ),
]


def _stream(name):
    return f"test_online_ssl.py::test_a_stream_is_the_equations[{name}]"


_online_ssl = [
    *fault.of(
        "methods.online_ssl.make",
        _stream("byol-cassle"),
        ("online_ssl: the teacher never moves", makes(step=keeps("extra.teacher"))),
    ),
    *fault.of(
        "methods.online_ssl.find_make",
        _stream("byol-cassle"),
        (
            "online_ssl: the weight is left out",
            _found("cassle", takes(weight=always(1.0))),
        ),
        (
            "online_ssl: stored projections move by the other share",
            _found("cla_r", takes(stored_momentum=lambda share: 1 - share)),
            _stream("simsiam-cla_r"),
        ),
    ),
]

_duel_step = "test_duel.py::test_a_step_is_the_equation[moco]"
_duel = [
    *fault.of(
        "methods.duel.make",
        _duel_step,
        ("duel: both views are one", takes(parts=_one_view)),
        ("duel: nothing enters the memory", makes(step=keeps("extra.memory"))),
        (
            "duel: the whole memory is negatives",
            takes(drawn=always(8)),
            "test_duel.py::test_rows_are_drawn_at_random_of_those_that_are_there[moco]",
        ),
        (
            "duel: the policy compares old features",
            takes(policy_features=always("step")),
            "test_duel.py::test_a_step_is_the_equation[moco-all]",
        ),
        (
            "duel: a task's memory is never fresh",
            takes(fresh_memory=always(False)),
            "test_duel.py::test_a_task_may_begin_with_an_empty_memory",
        ),
    ),
    *fault.of(
        "losses.contrastive.info_nce",
        _duel_step,
        ("duel: empty slots are negatives", takes(negative_mask=always(None))),
    ),
]

_turns = "test_icl.py::test_old_and_new_anchors_take_turns"
_meta = "test_icl.py::test_a_meta_step_is_the_equation[3-False-False]"
_icl = [
    *fault.of(
        "methods.icl.make",
        _meta,
        (
            "icl: retraining goes on from the weights before",
            makes(begin_task=keeps("params")),
            "test_icl.py::test_a_task_begins_with_its_weights[retrain]",
        ),
    ),
    *fault.of(
        "losses.incremental.others",
        _turns,
        (
            "icl: a row is its own negative",
            gives(lambda allowed: jnp.ones_like(allowed)),
        ),
    ),
    *fault.of(
        "methods.icl.orders.inner_steps",
        "test_icl.py::test_inner_steps_are_those_of_the_paper",
        ("icl: one inner step is missing", gives(lambda steps: max(steps - 1, 1))),
    ),
    *fault.of(
        "methods.icl.ddpg.scale_action",
        "test_ddpg.py::test_rates_span_the_range_evenly_on_their_scale[linear]",
        ("icl: rates begin at 0", gives(lambda rate, of: rate - of["options"].low)),
    ),
]

_default = "::test_a_later_step_is_the_equation[default]"
_three = "test_rehearsal.py::test_three_tasks[co2l-12]"
_rehearsal = [
    *fault.of(
        "methods.cclis.make",
        f"test_cclis.py{_default}",
        (
            "cclis: prototypes move a hundred times too fast",
            takes(prototype_rate=always(1.0)),
        ),
    ),
    *fault.of(
        "methods.rehearsal.teacher_rows",
        f"test_cclis.py{_default}",
        ("cclis: the teacher normalises by its batch", takes(train=always(True))),
    ),
    *fault.of(
        "methods.rehearsal.weights",
        "test_rehearsal.py::test_weights_of_stored_rows_and_of_others",
        (
            "cclis: stored rows weigh like those of the task",
            takes(
                extra=lambda extra: extra._replace(
                    memory=extra.memory._replace(row=0 * extra.memory.row - 1)
                )
            ),
        ),
    ),
    *fault.of(
        "losses.contrastive.sup_con",
        f"test_co2l.py{_default}",
        ("co2l: stored rows are anchors", takes(anchor_mask=always(None))),
    ),
    *fault.of(
        "methods.co2l.make",
        "test_co2l.py::test_the_first_task_is_contrast_alone",
        (
            "co2l: the first task distils",
            makes(
                step=lambda step: (
                    lambda state, *others: (
                        lambda after, metrics: (after.replace(task=state.task), metrics)
                    )(*step(state.replace(task=state.task + 1), *others))
                )
            ),
        ),
        (
            "co2l: a task's end stores nothing",
            makes(end_task=keeps("extra.memory")),
            _three,
        ),
        (
            "co2l: the teacher stays that of the first task",
            makes(begin_task=_after_the_second("extra.teacher")),
            _three,
        ),
    ),
]

# Which key, which rows, which task: kinds that single tests had left open.
_kinds = [
    *fault.of(
        "methods.online.draw_rows",
        "test_methods.py::test_no_two_draws_share_a_key[er]",
        (
            "online: every draw has the same key",
            takes(key=lambda key: jax.random.key(0)),
        ),
    ),
    *fault.of(
        "methods.frozen.make_method",
        "test_frozen.py::test_every_row_of_a_task_counts_once",
        (
            "frozen methods: the last incomplete batch is left out",
            makes(source=lambda source: lambda state, task: task.train),
        ),
    ),
    *fault.of(
        "methods.two_view.bases.dino.warm_temperature",
        "test_two_view.py::test_targets_warm_up_in_the_first_task_alone",
        (
            "dino: targets warm up in every task",
            takes(moment=lambda moment: moment._replace(task=0)),
        ),
    ),
    *fault.of(
        "methods.two_view.strategies.l2_sp.make",
        "test_two_view.py::test_the_anchor_moves_to_the_weights_after_each_task",
        (
            "l2_sp: the anchor stays that of the first task",
            makes(end_task=lambda end: lambda anchor, params: anchor),
        ),
    ),
    *fault.of(
        "methods.online.distillation.begin_task",
        "test_methods.py::test_a_task_begins_with_what_the_method_says[er_lwf]",
        (
            "online: the teacher stays that of the second task",
            _after_the_second("extra.teacher"),
        ),
    ),
]

FAULTS = [*_two_view, *_online, *_online_ssl, *_duel, *_icl, *_rehearsal, *_kinds]
