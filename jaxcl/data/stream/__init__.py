"""Examples, tasks and scenarios: data, and the order in which they come."""

from jaxcl.data.stream.orders import epoch_order as epoch_order
from jaxcl.data.stream.orders import filled_order as filled_order
from jaxcl.data.stream.orders import numbers as numbers
from jaxcl.data.stream.orders import order_of_classes as order_of_classes
from jaxcl.data.stream.orders import released_permutation as released_permutation
from jaxcl.data.stream.sets import CHANNELS as CHANNELS
from jaxcl.data.stream.sets import LABELS as LABELS
from jaxcl.data.stream.sets import SPLITS as SPLITS
from jaxcl.data.stream.sets import Dataset as Dataset
from jaxcl.data.stream.sets import Examples as Examples
from jaxcl.data.stream.sets import as_domains as as_domains
from jaxcl.data.stream.sets import as_numbers as as_numbers
from jaxcl.data.stream.sets import count_rows as count_rows
from jaxcl.data.stream.sets import map_splits as map_splits
from jaxcl.data.stream.sets import splits_of as splits_of
from jaxcl.data.stream.sets import validate as validate
from jaxcl.data.stream.tasks import Schedule as Schedule
from jaxcl.data.stream.tasks import Source as Source
from jaxcl.data.stream.tasks import Stream as Stream
from jaxcl.data.stream.tasks import Task as Task
from jaxcl.data.stream.tasks import epochs_of_tasks as epochs_of_tasks
from jaxcl.data.stream.tasks import schedule as schedule
