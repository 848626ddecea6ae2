"""What is written on the axes of a figure."""


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]
