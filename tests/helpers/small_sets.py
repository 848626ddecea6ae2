"""Labelled sets whose images nobody looks at."""

import numpy as np

from jaxcl.data import stream


def examples(label, domain=None):
    label = np.asarray(label, np.int32)
    domain = np.zeros_like(label) if domain is None else np.asarray(domain, np.int32)
    images = np.zeros((len(label), 2, 2, 1), np.uint8)
    return stream.Examples(label, domain, images)


def dataset(train, test=None, *, classes=5, domains=1, validation=None):
    return stream.Dataset(
        name="toy",
        class_names=tuple(f"c{i}" for i in range(classes)),
        domain_names=tuple(f"d{i}" for i in range(domains)),
        train=train,
        validation=validation,
        test=test,
    )
