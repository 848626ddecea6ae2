"""Common parts of online continual methods: network, memory and step."""

from jaxcl.methods.online.network import Head as Head
from jaxcl.methods.online.network import Network as Network
from jaxcl.methods.online.network import Outputs as Outputs
from jaxcl.methods.online.network import Rows as Rows
from jaxcl.methods.online.step import Form as Form
from jaxcl.methods.online.step import ReplayFrom as ReplayFrom
from jaxcl.methods.online.step import apply_grads as apply_grads
from jaxcl.methods.online.step import augment_drawn as augment_drawn
from jaxcl.methods.online.step import build_network as build_network
from jaxcl.methods.online.step import cross_entropy as cross_entropy
from jaxcl.methods.online.step import descend as descend
from jaxcl.methods.online.step import draw_rows as draw_rows
from jaxcl.methods.online.step import join_rows as join_rows
from jaxcl.methods.online.step import make_method as make_method
from jaxcl.methods.online.step import past_tasks as past_tasks
from jaxcl.methods.online.step import prepare_images as prepare_images
from jaxcl.methods.online.step import replayable as replayable
from jaxcl.methods.online.step import stored_rows as stored_rows
from jaxcl.methods.online.step import write_batch as write_batch
