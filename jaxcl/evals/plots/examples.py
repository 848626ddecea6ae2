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
    figure = canvas.make_figure(7, 6)
    axes = figure.add_subplot()
    axes.set(title=title, xticks=[], yticks=[])
    axes.set(xlabel="dimension 1 (no unit)", ylabel="dimension 2 (no unit)")
    dots = {"s": 14, "linewidths": 0.3, "edgecolors": "0.3"}
    if len(present) > canvas.MOST_NAMES:
        # No colours tell so many classes apart: those with near numbers look alike.
        picture = axes.scatter(*points.T, c=labels, cmap="viridis", **dots)
        figure.colorbar(picture, ax=axes, label="number of the class", shrink=0.8)
    else:
        for number, label in enumerate(present):
            name = names[label] if 0 <= label < len(names) else label
            style = canvas.choose_style(number) | {"label": canvas.shorten_name(name)}
            axes.scatter(*points[labels == label].T, **style, **dots)
        canvas.show_legend(axes, markerscale=2)
    canvas.save_figure(figure, path)


def neighbours(queries, nearest, similarities, path, *, title) -> None:
    """Draw images, and beside each its nearest neighbours under their similarity.

    Args:
      queries: u8[Q, H, W, C], C is 1 or 3.
      nearest: u8[Q, K, H, W, C].
      similarities: f[Q, K], written above each.
      path: of the picture.
    """
    rows, columns = similarities.shape
    figure = canvas.make_figure(1.0 + 1.1 * (columns + 1), 0.6 + 1.25 * rows)
    figure.suptitle(title)
    panels = figure.subplots(rows, columns + 1, squeeze=False)
    for row, (query, others) in enumerate(zip(queries, nearest, strict=True)):
        for column, image in enumerate([query, *others]):
            axes = panels[row, column]
            axes.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
            axes.set(xticks=[], yticks=[])
            if column:
                axes.set_title(f"{similarities[row, column - 1]:.2f}", fontsize=11)
            else:
                axes.spines[:].set(linewidth=3, edgecolor=canvas.COLOURS[0])
    panels[0, 0].set_title("image", fontsize=11)
    figure.tight_layout()
    canvas.save_figure(figure, path)
