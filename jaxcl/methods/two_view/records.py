"""The records that bases and strategies fill in, and the arguments of their functions.

A base is a module with `make(*, ...) -> Base`, a strategy one with
`make(*, ...) -> Strategy`. Their keyword arguments are options of `config.method`.
Every field except the first has a default.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax

from jaxcl import core
from jaxcl.memory import policies
from jaxcl.nets import chain, mlp

Form = Literal["code", "paper"]  # which to follow where they differ
Statistics = Literal["running", "batch"]
Following = Literal["task", "ema", "snapshot"]


class StepKeys(NamedTuple):
    """Random keys of an update, by use."""

    step: jax.Array  # fold in a constant of your own before you use it
    augment: jax.Array
    mix: jax.Array  # of mixtures with stored examples
    write: jax.Array  # of the places where examples are stored
    draw: jax.Array  # of the choice of stored examples
    augment_drawn: jax.Array


class Features(NamedTuple):
    """The arrays that a loss may read; [:, v] is of view v. None: there is none."""

    z: jax.Array  # f32[B,2,D], projections of the network that learns
    label: jax.Array  # i32[B]
    index: jax.Array | None = None  # i32[B], rows of the train split, where asked for
    o: jax.Array | None = None  # f32[B,2,D], the base's own predictor of z
    # f32[B,2,D], the distillation predictor g of z; or the student's head of h
    p: jax.Array | None = None
    k: jax.Array | None = None  # f32[B,2,D], projections of the slow network
    # f32[B,2,D], projections of the teacher; or features of that of config.teacher,
    # which need not be finite
    f: jax.Array | None = None
    # f32[2B,M,D], projections of masked patches, and of the same by the slow network,
    # which sees them
    patches: jax.Array | None = None
    slow_patches: jax.Array | None = None
    hides: jax.Array | None = None  # i32[2B], as in `Reading`
    # f32[B,2,H], of the encoder that learns and of the teacher's, where asked for
    h: jax.Array | None = None
    frozen_h: jax.Array | None = None
    local: jax.Array | None = None  # f32[B,L,D], projections of L local crops
    replayed: jax.Array | None = None  # f32[R,D], projections of stored examples
    # The base's own parameters that learn, see `Base.init_params`, by name; names of
    # those beside g begin with "distil_". All of the slow network's and the teacher's.
    params: dict = {}
    slow_params: dict = {}
    frozen_params: dict = {}
    state: core.PyTree = None  # the base's state before the step
    prepared: core.PyTree = None  # from `Base.prepare`
    stored: jax.Array | None = None  # f32[R,D], projections of `replayed` when stored
    stored_mask: jax.Array | None = None  # bool[R], rows that exist
    frozen_queue: jax.Array | None = None  # f32[2,K,D], unit rows of the teacher


class Base(NamedTuple):
    """A self-supervised method: its loss, its networks, its state."""

    loss: Callable  # Features -> f32[], the loss of a task alone
    # Features -> f32[], the term that CaSSLe adds, without its weight. None: there is
    # no such form, and "cassle" is refused.
    distil: Callable | None = None
    # (Features, pn1, pn2) -> f32[], the loss under PNR of a base with negatives; the
    # flags put pseudo-negatives in the first and in the second term
    pnr: Callable | None = None
    # One without negatives: the distance that PNR subtracts, a name of
    # `distill.pseudo_negative`. None: "pnr" is refused.
    distance: str | None = None
    # Learning rate of a linear probe on another data set: PNR, Table 17; VICReg's as in
    # the scripts. The table's last column has 3.0 for every base with PNR, its scripts
    # those of the base alone. None: a config must set it.
    linear_lr: float | None = None

    # Networks
    projector: mlp.ProjectorShape = mlp.CONTRASTIVE  # its defaults
    predictor_hidden_dim: int | None = None  # of its own predictor; None: it has none
    # Share of its slow network that an update keeps, at the start and end of each task;
    # None: it has no slow network
    momentum: tuple[float, float] | None = None
    distiller_input: Callable = lambda z: z  # projections -> input of g

    # Data
    # Fields of `Features` that are filled on demand: "label", "local", "h", "index".
    # With "index" projections are logits of the train images; one view is enough.
    reads: tuple[str, ...] = ()
    one_row: bool = False  # its loss says something of a batch of one row
    # Share of the patches that a view hides, and of the views that hide some; None: its
    # loss reads no patches.
    masks: tuple[float, float] | None = None
    strategies: tuple[str, ...] | None = None  # those that it goes with; None: all

    unread: tuple[str, ...] = ()  # options that were set and change nothing

    # Defaults of strategies
    weight: float = 1.0  # of the distillation under CaSSLe and PNR
    negative_weight: float = 1.0  # PNR's lambda, where it subtracts a distance

    # Parameters and state
    # (key, D) -> name -> f32[...], parameters beside its networks. Slow network and
    # teacher have a copy of each, and g has some of its own.
    init_params: Callable | None = None
    # (key, D) -> arrays that no gradient moves
    init_state: Callable | None = None
    # (key of the step, task i32[], progress f32[] in [0, 1), D) -> further arrays that
    # the losses read, in `Features.prepared`
    prepare: Callable | None = None
    # (task, progress, gradients of its parameters) -> the same, some of them changed
    mask_gradients: Callable | None = None
    # (state, Features, active=, aligned=) -> state after a step. `active` and `aligned`
    # are those of `queue.enqueue`.
    update: Callable | None = None
    queue_size: int | None = None  # rows of each queue; PNR has another as large


class Reading(NamedTuple):
    """The images of an update, and the arrays that their forward pass needs."""

    views: jax.Array  # f32[B,2,H,W,C], to train on
    replayed: jax.Array | None = None  # f32[R,H,W,C], images that pass by themselves
    features: dict = {}  # fields of `Features`
    drawn: core.PyTree = None  # read from a memory: writes to it come after
    active: bool | jax.Array = True  # bool[], rows of a memory are among the views
    share: float | jax.Array = 0.0  # of such rows, or of their part in mixtures

    # The step fills these in.
    local: jax.Array | None = None  # f32[B,L,h,w,C], local crops
    key: jax.Array | None = None  # for an encoder that drops branches
    places: jax.Array | None = None  # i32[2B,M], patches of each view for iBOT
    hides: jax.Array | None = None  # i32[2B], 1 where the view hides them, else 0


class Teacher(NamedTuple):
    """The frozen network, a copy of the one that learns."""

    statistics: Statistics  # by which it normalises
    follows: Following = "task"  # the copy of the last task; an average; snapshots
    ema: float = 0.999  # share of the old average after each step
    snapshot_every: int = 100  # batches between snapshots, each before its batch


class StudentHead(NamedTuple):
    """A head of the network that learns, which matches `core.Parts.teacher`."""

    hidden_layers: int = 0  # 0: a single Linear
    hidden_dim: int = 2048
    alone: bool = True  # it stands in place of the projector, and there is no base


class Strategy(NamedTuple):
    """The training of the tasks after the first, or of a stream."""

    # (Base, Features) -> f32[], added to the base's loss, times `weight`
    term: Callable | None = None
    weight: float = 1.0
    # (Base, Features) -> f32[], in place of base and term. Before there is a teacher,
    # the base's own loss is taken.
    loss: Callable | None = None
    check: Callable | None = None  # (name of the base, Base): refuse it, or warn
    teacher: Teacher | None = None  # reads features of the frozen network
    student: StudentHead | None = None  # reads features of config.teacher
    distiller_hidden_dim: int | None = None  # of the predictor g; None: there is none
    reads: tuple[str, ...] = ()  # ("h",): features of the encoder, too

    # State: arrays that no gradient moves
    # (Setup, key, params of all networks that learn, image u8[H,W,C]) -> state
    init_state: Callable | None = None
    # (state, StepKeys, views f32[B,2,H,W,C], core.Parts) -> Reading
    read: Callable = lambda state, keys, views, parts: Reading(views)
    # (state, TrainState before the step, gradients, lr) -> gradients, state
    change_gradients: Callable | None = None
    # (state, Features, active=, aligned=) -> state after a step, as of `Base.update`;
    # inactive while there is no teacher
    update: Callable | None = None
    # (state, key, images u8[B,H,W,C], Features, Reading) -> state with them stored
    store: Callable | None = None
    end_task: Callable | None = None  # (state, params) -> state

    # On a stream, whose memory is that of config.replay
    # Share that a use keeps of the projections stored with the rows; None: stores none
    stored_momentum: float | None = None
    mix: float | None = None  # mixes in replayed rows, from Beta(mix, mix)


class Setup(NamedTuple):
    """The constants of a method: its functions, networks and numbers; no arrays."""

    parts: core.Parts
    base: Base
    strategy: Strategy
    copied: chain.Chain  # encoder and projector; slow network and teacher copy them
    predictor: chain.Chain  # the base's own; of no nets where it has none
    distiller: chain.Chain  # the predictor g; of no nets where there is none
    student: chain.Chain  # its head beside the projector; of no nets where it has none
    dim: int  # of the projections
    base_params: tuple[str, ...]  # names of the base's own parameters
    drops: bool  # the encoder drops branches, by a key
    head_steps: int = 0  # first steps of the run, in which the encoder stays as it is

    # A stream, whose batches have several updates each
    online: bool = False
    policy: policies.Policy | None = None  # of the memory; None: there is none
    size: int = 0  # rows of the memory that an update draws
    beside: int = 0  # of these, rows that pass beside the incoming ones; LUMP: 0
    every_row: bool = False  # incoming rows are aligned, too


class Extra(NamedTuple):
    """The state of two-view methods apart from the network that learns."""

    momentum: core.PyTree  # f32, slow copy of encoder and projector; {} without one
    momentum_stats: core.PyTree  # f32, its own running statistics
    teacher: core.PyTree  # f32, frozen copy of encoder and projector; {} without one
    teacher_stats: core.PyTree  # f32
    base: core.PyTree  # the base's own state, see its module; None: it has none
    strategy: core.PyTree  # the strategy's own state; None: it has none
    memory: core.PyTree = None  # of a stream, see `stream.create`; None: there is none
    kept: core.PyTree = None  # what the policy of that memory counts
