"""Pictures of examples: points in the plane, images beside their neighbours."""

import numpy as np

from jaxcl.evals.plots import canvas


def scatter(points, labels, path, *, title, class_names=None) -> None:
    """Draw points in the plane, coloured by class.

    Args:
      points: f[N, 2], of no particular unit.
      labels: i[N].
      class_names: their names, written out for few classes; a class without one
        goes by its number.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    present, names = np.unique(labels), class_names or ()
    figure = canvas.figure_of(7, 6)
    axes = figure.add_subplot()
    axes.set(title=title, xticks=[], yticks=[])
    axes.set(xlabel="dimension 1 (no unit)", ylabel="dimension 2 (no unit)")
    dots = {"s": 14, "linewidths": 0.3, "edgecolors": "0.3"}
    picture = _dots(axes, points, labels, present, names, **dots)
    if picture is not None:
        figure.colorbar(picture, ax=axes, label="number of the class", shrink=0.8)
    else:
        canvas.legend(axes, markerscale=2)
    canvas.save(figure, path)


def _dots(axes, points, labels, present, names, **dots):
    """Points coloured by class; what a colour bar needs where classes are many.

    Args:
      present: i[P], all classes of the figure, in order.
    """
    if len(present) > canvas.MOST_NAMES:
        # No colours tell so many classes apart: those with near numbers look alike.
        dots |= {"cmap": "viridis", "vmin": present[0], "vmax": present[-1]}
        return axes.scatter(*points.T, c=labels, **dots)
    for number, label in enumerate(present):
        name = names[label] if 0 <= label < len(names) else label
        mine = points[labels == label].T
        axes.scatter(*mine, label=canvas.short(name), **canvas.style_of(number), **dots)


def marked(points, labels, pale, marks, path, *, title, class_names=None) -> None:
    """Draw the same points in panels side by side, others marked in each.

    Args:
      points: f[N, 2], of no particular unit.
      labels: i[N].
      pale: bool[N], points that all panels show, in pale colours of their classes.
      marks: title of a panel -> bool[N], points that it shows large, with a dark edge.
      path: of the picture.
      class_names: as of `scatter`.
    """
    points, labels = np.asarray(points), np.asarray(labels)
    present, names = np.unique(labels), class_names or ()
    figure = canvas.figure_of(6 * len(marks), 6)
    figure.suptitle(title, y=0.98)
    panels = figure.subplots(1, len(marks), sharex=True, sharey=True, squeeze=False)[0]
    strong = {"s": 34, "linewidths": 1.0, "edgecolors": "black"}
    for (name, chosen), axes in zip(marks.items(), panels, strict=True):
        axes.set(title=name, xticks=[], yticks=[], xlabel="dimension 1 (no unit)")
        for shown, dots in (
            (np.asarray(pale), {"s": 10, "linewidths": 0, "alpha": 0.3}),
            (np.asarray(chosen), strong),
        ):
            picture = _dots(axes, points[shown], labels[shown], present, names, **dots)
    panels[0].set_ylabel("dimension 2 (no unit)")
    if picture is not None:
        figure.colorbar(picture, ax=panels, label="number of the class", shrink=0.8)
    else:
        handles, texts = axes.get_legend_handles_labels()
        last = len(present)  # the names are there twice: pale, then marked
        canvas.legend(axes, handles[last:], texts[last:])
    canvas.save(figure, path)


def neighbours(queries, nearest, similarities, path, *, title) -> None:
    """Draw images, and beside each its nearest neighbours under their similarity.

    Args:
      queries: u8[Q, H, W, C], C is 1 or 3.
      nearest: u8[Q, K, H, W, C].
      similarities: f[Q, K], written above each.
      path: of the picture.
    """
    rows, columns = similarities.shape
    figure = canvas.figure_of(1.0 + 1.1 * (columns + 1), 0.6 + 1.25 * rows)
    figure.suptitle(title)
    panels = figure.subplots(rows, columns + 1, squeeze=False)
    for row, (query, others) in enumerate(zip(queries, nearest, strict=True)):
        for column, image in enumerate([query, *others]):
            axes = panels[row, column]
            axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            if column:
                axes.set_title(f"{similarities[row, column - 1]:.2f}", fontsize=8)
            else:
                axes.spines[:].set(linewidth=3, edgecolor=canvas.COLOURS[0])
    panels[0, 0].set_title("image", fontsize=8)
    figure.tight_layout()
    canvas.save(figure, path)
