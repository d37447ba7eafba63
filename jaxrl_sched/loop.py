"""The training loop: sample until the batch is full, then learn from it.

No jax here: whatever answers to the Engine protocol runs under this loop.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_sched.control.pool import Closing
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.engine import Engine, Stopped
from jaxrl_sched.metrics import Recorder
from jaxrl_sched.types import Group

REFUSED = 20  # updates in a row, and the run ends
_BUSY = ('generate', 'reward', 'learn', 'load')


def train(
  engine: Engine,
  scheduler: Scheduler,
  recorder: Recorder,
  *,
  steps: int,
  save_every: int,
  evaluate_every: int,
  evaluate: Callable[[int], tuple[dict[str, float], float | None]] | None,
  compare_every: int = 50,
  samples_of: Callable[[Sequence[Group]], list[dict[str, Any]]] = lambda groups: [],
) -> bool:
  """Runs from `engine.step` to `steps` updates.

  Step v starts from weights version v. Before it, those weights are evaluated and
  saved where that is due, so a checkpoint, its score and line v of the metrics
  speak of the same weights; the last line, `steps`, has the final evaluation only. It
  comes before `steps` where the scheduler finds that nothing is left to learn from.

  Args:
    evaluate: step -> metrics and the score by which the best checkpoint is kept.
    compare_every: steps between comparisons of the controllers' state over processes.
    samples_of: groups of a step's first round -> lines of samples.jsonl.

  Returns:
    Whether the run has ended: at its last step, or before where there is nothing left to
    learn from or its last updates were all refused. False: it was asked to stop, and has
    saved.
  """
  refused = 0
  if scheduler.is_open and scheduler.resumed is not None:
    engine.resume(scheduler.resumed)
  for step in range(engine.step, steps + 1):
    if scheduler.is_open:
      scheduler.keep(engine.suspend())
    boundary = scheduler.freeze()
    try:
      found, score, began = {}, None, engine.now()
      is_last = step == steps or refused == REFUSED
      is_last |= scheduler.exhausted(step) is not None
      is_judged = evaluate is not None and (step % evaluate_every == 0 or is_last)
      is_saved = step > 0 and (step % save_every == 0 or is_last)
      # Bundles under way are a part of what is saved, with the tokens they have got; and
      # sampling them counts as the step's time, not as an evaluation's.
      if not scheduler.is_open and (is_judged or is_saved):
        scheduler.keep(engine.drain(step + scheduler.lag))
      drained = engine.now() - began
      if is_judged:
        found, score = evaluate(step)
      if step % compare_every == 0:
        engine.compare("the controllers' state", boundary)
      if is_saved:
        recorder.flush()  # what came before a checkpoint is on disk before it
        engine.save(boundary(), score=score)
      if is_last:
        recorder.rollouts(step, scheduler.pending())
        recorder.log(step, found)
        break
      numbers = _step(engine, scheduler, recorder, step, samples_of)
      numbers['time/step_s'] += drained
      recorder.log(step, found | numbers)
      for note in scheduler.notes():
        recorder.say(note)
      refused = _refused(refused, step, numbers, recorder)
    except Stopped:
      # Nothing of this step has changed the weights: a resume does it again.
      if not scheduler.is_open:
        scheduler.keep(engine.drain(step + scheduler.lag))
      recorder.flush()
      engine.save(boundary(), score=None)
      return False
  recorder.flush()
  return True


def _refused(
  before: int, step: int, numbers: dict[str, Any], recorder: Recorder
) -> int:
  """Updates refused in a row; a step without an update leaves that as it was."""
  # As Python's numbers: comparing arrays of a device would compile.
  if float(numbers.get('update/skipped', 0.0)) == 1:
    return before
  if not float(numbers.get('update/refused', 0.0)):
    return 0
  if before == 0:
    recorder.say(
      f'Step {step + 1}: the update was refused, as it is not finite; the weights stay. '
      f'After {REFUSED} in a row the run ends.'
    )
  return before + 1


def _step(engine, scheduler, recorder, step, samples_of) -> dict[str, Any]:
  """Step v of GRPO, as the algorithm reads."""
  began, generated = engine.now(), []

  # Sample until the batch is full of groups that can teach something. With a lag h
  # the bundle of step v + h gets on its way here, and that of step v has long been.
  if scheduler.is_open:
    generated += _fill(engine, scheduler, step)
  while not scheduler.is_open:
    while plan := engine.agree(lambda: scheduler.plan(step)):
      scheduler.sent(plan)
      engine.submit(plan)
    if not scheduler.is_awaiting(step):
      break
    groups = scheduler.waiting(step)
    if groups is None:
      groups = engine.collect(step, scheduler.enough)
    scheduler.observe(groups)
    generated += groups

  # Learn from it: groups, advantages over the full groups, and what pruning left.
  lesson = scheduler.take_batch(step)
  learned = engine.learn(lesson)
  asked = scheduler.asked(step)

  # Surplus may have been in grading until now; then the controllers know the step.
  learned_at = engine.now()
  if not scheduler.is_open:
    groups = engine.collect_rest()
    scheduler.observe(groups)
    generated += groups
  late = engine.now() - learned_at
  metrics, lines = scheduler.close(step)

  recorder.rollouts(step, lines)
  recorder.samples(step, samples_of(generated[:asked]))
  recorder.timeline(step, engine.spans())
  learned['time/reward_s'] = learned.get('time/reward_s', 0.0) + late
  took = engine.now() - began
  learned['time/step_s'] = took
  if scheduler.lag == 0:  # else the two sides are busy at the same time
    busy = (learned.get(f'time/{what}_s', 0.0) for what in _BUSY)
    learned['time/idle_s'] = took - sum(busy)
  return metrics | learned


def _fill(engine, scheduler, step) -> list[Group]:
  """A fill of the open pool: it ends as soon as useful groups fill the batch, and what is
  sampled then is continued in the next. Returns the groups completed in it."""
  engine.begin_fill(step, scheduler.begin_fill(step))
  while True:
    decision = engine.agree(lambda: scheduler.decide(step))
    if isinstance(decision, Closing):
      return scheduler.take(decision, step)
    if decision is not None:
      engine.feed(decision)
      scheduler.fed(decision)
    scheduler.report(*engine.advance(scheduler.tick))
