"""The device engine on what the loop gives it."""

import dataclasses
import pathlib

import jax
import numpy as np
import toys

from jaxrl_sched import config as configs
from jaxrl_sched.types import Lesson

SMOKE = str(pathlib.Path(__file__).parents[2] / 'configs' / 'smoke.py')


def test_truncated_answers_that_alone_had_an_advantage_make_no_update(tmp_path):
  """The overlong filter leaves answers of advantage 0; an update would be one of
  momentum. The step counts on, the state stays as it is, and the reason is logged."""
  run = configs.prepare(configs.read(SMOKE, [('loss.overlong_filter', 'true')]))
  engine = configs.build_engine(run, tmp_path)
  rng = np.random.default_rng(0)
  group = toys.group(rng, 0, [3, 4, 5], known=250)
  first, second, third = group.completions
  cut = dataclasses.replace(third, finish='length')
  lesson = Lesson(
    groups=[dataclasses.replace(group, completions=(first, second, cut))],
    advantages=[np.array([0.0, 0.0, -1.0], np.float32)],
    keep=[np.ones(3)],
    count=1,
  )
  try:
    before = jax.device_get(engine._learner.state)
    metrics = engine.learn(lesson)
    after = jax.device_get(engine._learner.state)
  finally:
    engine.close()
  assert metrics['update/skipped'] == 1.0 and engine.step == 1
  assert metrics['update/why'] == 'advantages of all answers left 0'
  assert 'grad_norm' not in metrics
  jax.tree.map(np.testing.assert_array_equal, before, after)
