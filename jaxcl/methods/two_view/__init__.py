"""Two-view self-supervised learning under a continual strategy."""

from jaxcl.methods.two_view.method import make

__all__ = ["FOLLOWING", "make"]

# Section config.method of an encoder without a run: SimCLR under CaSSLe. The encoder as
# it came is the first teacher.
FOLLOWING = {"name": "two_view", "base": "simclr", "strategy": "cassle"}
