"""Draw the class of each arriving image in six streams of digits."""

import functools

from jaxcl.data import scenarios, sources, stream
from jaxcl.evals import plots

digits = sources.load("digits")
looks = sources.load("digits_in_looks")
cut = functools.partial(scenarios.make, digits, seed=0)
streams = {
    "class: one pair after another": cut(name="class", num_tasks=5),
    "domain: one look after another": scenarios.make(looks, name="domain"),
    "blurry: classes fade, blur 0.5": cut(name="blurry", num_tasks=5),
    "recurring: classes come back": cut(name="recurring", num_tasks=5),
    "class, a long tail": cut(name="class", num_tasks=5, long_tail={"factor": 20}),
    "joint, 12 copies in a row": cut(name="joint", per_class=5, copies=12),
}
come = functools.partial(stream.arrivals, seed=0, batch_size=10)
plots.arrivals({title: come(tasks) for title, tasks in streams.items()}, "streams.png")
