"""From answers to groups: what went wrong, what goes on, what was not kept."""

import dataclasses

import numpy as np
import pytest
import toys

from jaxrl_sched import evaluation
from jaxrl_sched.device.lanes import EVALUATION, Job, Part
from jaxrl_sched.device.marking import Marking
from jaxrl_sched.host.grading import GradingPool
from jaxrl_sched.types import Completion, Relief


@pytest.fixture(scope='module')
def pool():
  with GradingPool(workers=1, warm=['exact']) as pool:
    yield pool


def job(finishes, *, bundle=0, cut=(), relief=None):
  """A request for as many answers, each of two tokens, as there are finishes."""
  request = toys.request(3, [1, 2], len(finishes))
  prompt = dataclasses.replace(request.prompt, reward='exact', answer='right')
  request = dataclasses.replace(
    request, prompt=prompt, relief=Relief() if relief is None else relief
  )
  completions = {
    (3, k): Completion(
      draw=3,
      answer=k,
      tokens=np.zeros(0 if finish == 'aborted' else 2, np.int32),
      logps=np.zeros(0 if finish == 'aborted' else 2, np.float32),
      finish=finish,
      version=0,
    )
    for k, finish in enumerate(finishes)
  }
  found = Job(bundle, 0, [request], [], 1, lambda *_: None)
  found.here = Part(completions, {(3, 9 + i): n for i, n in enumerate(cut)})
  found.mine = frozenset(completions)
  return found


def marked(pool, job):
  marking = Marking(pool, lambda completion, stop_ids: 'right')
  for completion in job.here.completions.values():
    if completion.finish != 'paused':
      marking.submit(job.requests[0], completion)
  marking.begin(job, job.here)
  (group,) = marking.groups(job, while_waiting=lambda: None)
  return group


def test_an_answer_that_went_wrong_is_left_out_of_its_group(pool):
  """2.4; and one that never ran was not generated."""
  group = marked(pool, job(['stop', 'aborted', 'length'], cut=(4, 0)))
  assert [c.answer for c in group.completions] == [0, 2] and group.spares == (4,)
  np.testing.assert_array_equal(group.verdicts, [1, 1])


def test_in_an_evaluation_it_counts_as_failed(pool):
  group = marked(pool, job(['aborted', 'stop'], bundle=EVALUATION))
  np.testing.assert_array_equal(group.verdicts, [0, 1])
  assert group.faults == ('aborted', None)

  class Given:
    def evaluate(self, requests):
      return [group]

  found = evaluation.evaluate(
    Given(), [group.request.prompt], group.request.sampling, samples=2, k=(2,)
  )
  assert found['toy'].numbers['pass@1'] == 0.5
  assert found['toy'].numbers['grading_faults'] == 1


def test_a_group_that_goes_on_is_not_graded_yet(pool):
  pausing = Relief(pause_after=2)
  group = marked(pool, job(['stop', 'paused', 'aborted'], relief=pausing))
  assert group.is_paused and group.finishes == ['stop', 'paused', 'aborted']
  np.testing.assert_array_equal(group.verdicts, [0, 0, 0])
  whole = marked(pool, job(['stop', 'length'], relief=pausing))
  np.testing.assert_array_equal(whole.verdicts, [1, 1])
