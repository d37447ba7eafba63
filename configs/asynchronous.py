"""The quickstart with sampling one step ahead of learning, each on devices of its own.

    JAX_NUM_CPU_DEVICES=8 python -m jaxrl_sched.train --config=configs/asynchronous.py \
      --workdir=runs/async

On a laptop eight devices are made of its cores, 4 to learn on and 4 to sample on
(`:engines` makes these four engines of one device each). They share the cores, so
nothing is gained in time: it is the path that a pod takes, to be looked at.

    :h1 (default), :h2     lag 1, lag 2
    :shared                lag 1 with both sides on the same devices
    :engines               lag 1, four sampling engines
    :sync                  lag 0 on the same devices, to compare with
"""

from ml_collections import ConfigDict

VARIANTS = ('h1', 'h2', 'shared', 'engines', 'sync')


def get_config(variant: str = 'h1') -> ConfigDict:
  import quickstart  # beside this file, found while a config is loaded

  if variant not in VARIANTS:
    raise ValueError(
      f'asynchronous.py:{variant}: expected one of {", ".join(VARIANTS)}'
    )
  c = quickstart.get_config()
  c.mesh = dict(data=4)
  c.sampler_mesh = dict(data=4)
  c.asp = dict(lag={'h2': 2, 'sync': 0}.get(variant, 1))
  c.lengths = ConfigDict({})
  c.scheduler.update(max_rounds=1, surplus='drop')
  if variant == 'shared':
    c.sampler_mesh = None
  if variant == 'engines':
    c.sampler_mesh = dict(data=1)
    c.asp.engines = 4
    c.sampler.slots = 32
  return c
