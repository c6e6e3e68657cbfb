"""What a training run costs with each way to feed its GPUs: see README.md in this folder.

``estimate(Workload(...))`` compares the options at list prices; ``Prices`` replaces these. ``penstock cost`` is the command.
"""

from penstock.cost.comparison import BreakEven as BreakEven
from penstock.cost.comparison import Estimate as Estimate
from penstock.cost.comparison import break_even as break_even
from penstock.cost.comparison import by_epochs as by_epochs
from penstock.cost.comparison import by_object_bytes as by_object_bytes
from penstock.cost.comparison import estimate as estimate
from penstock.cost.options import Charge as Charge
from penstock.cost.options import Option as Option
from penstock.cost.prices import Price as Price
from penstock.cost.prices import Prices as Prices
from penstock.cost.workload import Workload as Workload
