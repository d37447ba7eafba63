"""The same loop and controllers on a simulated clock. Numpy only."""

from jaxrl_sched.control.timeline import makespan as makespan
from jaxrl_sched.sim.costs import Costs as Costs
from jaxrl_sched.sim.engine import SimEngine as SimEngine
from jaxrl_sched.sim.workload import Dataset as Dataset
from jaxrl_sched.sim.workload import Workload as Workload
