"""A new difficulty table on resume: prompts change streams and keep what is known."""

import collections

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest
from schedules import EASY, HARD, USEFUL, play, prompt_of
from toys import through_files

from jaxrl_sched.control.asp import Asp
from jaxrl_sched.control.base import digest
from jaxrl_sched.control.difficulty import Tiers
from jaxrl_sched.control.scheduler import Scheduler
from jaxrl_sched.control.sleepers import FOREVER, SNOOZED
from jaxrl_sched.control.snooze import Snooze
from jaxrl_sched.control.source import Source
from jaxrl_sched.host.pruning import PromptPruner
from jaxrl_sched.types import Sampling

WEIGHTS = {'a': 2.0, 'b': 1.0}


def made(rates, **changed) -> tuple[Scheduler, Tiers]:
  rates = {name: np.array(of, float) for name, of in rates.items()}
  tiers = Tiers(rates, WEIGHTS, steps=40, release=0)
  sizes = {stream: len(i) for stream, (_, i) in tiers.streams().items()}
  pruner = PromptPruner(sizes, rate=0.3)
  return Scheduler(
    Source(Snooze(sizes, tiers.weights(0), 2, 2.0, 8), tiers),
    prompt_of,
    Sampling(max_new_tokens=4),
    groups_per_step=6,
    group_size=2,
    prompt_pruner=pruner,
    advantages_of=lambda rewards: rewards - rewards.mean(),
    **changed,
  ), tiers


def known(state, tiers) -> dict[tuple[str, int], tuple]:
  """(dataset, index) -> all that is known of a prompt, passes as distances."""
  found = {}
  for stream, (name, indices) in tiers.streams().items():
    rows = state['source']['snooze']['prompts'][stream]
    pool = state['pruner']['pools'][stream]
    number = state['source']['snooze']['place'][stream][0]
    for place, index in enumerate(indices.tolist()):
      row = {key: int(column[place]) for key, column in rows.items()}
      # When it wakes says something of a sleeper only; a wake that is past is past.
      wake = max(0, row['wake'] - number) if row['wake'] != FOREVER else FOREVER
      found[name, index] = (
        *(row[key] for key in ('state', 'streak', 'level', 'last', 'applied')),
        wake if row['state'] == SNOOZED else None,
        *(pool[key][place] for key in ('score', 'useful', 'asleep')),
      )
  return found


RATES = st.fixed_dictionaries(
  {
    'a': st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=17, max_size=17),
    'b': st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=9, max_size=9),
  }
)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(RATES, RATES, st.integers(1, 9), st.integers(0, 99))
def test_what_is_known_of_each_prompt_stays(old, new, steps, seed):
  kinds = np.random.default_rng(seed).integers(3, size=(17, 2))

  def outcome(request):
    is_b = request.prompt.dataset == 'b'
    return (USEFUL, EASY, HARD)[kinds[request.prompt.index, int(is_b)]]

  run, tiers = made(old)
  for step in range(steps):
    play(run, outcome, step)
  state = through_files(run.state_dict())

  same, _ = made(old)
  same.load_state_dict(state)
  assert same.notes() == [] and digest(same.state_dict()) == digest(state)

  other, its_tiers = made(new)
  other.load_state_dict(through_files(state))
  changed = [name for name in old if old[name] != new[name]]
  assert [note.split(' of ')[2].split()[0] for note in other.notes()] == changed
  there = through_files(other.state_dict())
  assert known(there, its_tiers) == known(state, tiers)
  for name in set(old) - set(changed):
    before, after = (s['source']['tiers']['planned'][name] for s in (state, there))
    assert before == after

  back, _ = made(old)
  back.load_state_dict(there)
  assert known(back.state_dict(), tiers) == known(state, tiers)

  counts = collections.Counter()
  for step in range(steps, steps + 3):
    _, batch, metrics, lines = play(other, outcome, step)
    counts.update(group.request.prompt.dataset for group in batch)
  assert counts['a'] >= counts['b']


def test_a_dataset_that_has_not_changed_goes_on_in_its_pass():
  """All of b come once before any comes twice, though a's table is another."""
  old = {'a': [0.5] * 10 + [0.0] * 10, 'b': [0.5] * 12}
  new = {'a': [0.0] * 10 + [0.5] * 10, 'b': [0.5] * 12}
  run, _ = made(old)
  asked = []

  def step_of(s, step):
    for requests in play(s, lambda r: USEFUL, step)[0]:
      asked.extend(r.prompt.index for r in requests if r.prompt.dataset == 'b')

  step_of(run, 0)
  assert 0 < len(asked) < 12
  after, _ = made(new)
  after.load_state_dict(through_files(run.state_dict()))
  for step in range(1, 8):
    step_of(after, step)
  assert sorted(asked[:12]) == list(range(12))


def test_a_stream_with_other_prompts_begins_a_new_pass():
  """Prompts that were medium are hard now and the other way round: all are asked for
  within the new pass, whatever the old ones had come to."""
  old = {'a': [0.5] * 8 + [0.0] * 8, 'b': [0.5]}
  new = {'a': [0.0] * 8 + [0.5] * 8, 'b': [0.5]}
  run, _ = made(old)
  play(run, lambda r: USEFUL, 0)
  after, _ = made(new)
  after.load_state_dict(through_files(run.state_dict()))
  before, places = (s.state_dict()['source']['snooze']['place'] for s in (run, after))
  for stream in ('a/hard', 'a/medium'):
    assert places[stream] == [before[stream][0] + 1, 0]
  asked = collections.Counter()
  for step in range(1, 7):
    for requests in play(after, lambda r: USEFUL, step)[0]:
      asked.update(r.prompt.index for r in requests if r.prompt.dataset == 'a')
  assert asked.keys() == set(range(16))


def test_what_was_drawn_by_the_old_table_must_be_in_first():
  rates = {'a': [0.5] * 8, 'b': [0.5] * 8}
  run, _ = made(rates, asp=Asp(lag=1), max_rounds=1)
  run.sent(run.plan(0))
  run.keep({0: []})
  state = through_files(run.state_dict())
  again, _ = made(rates, asp=Asp(lag=1), max_rounds=1)
  again.load_state_dict(state)
  other, _ = made(rates | {'a': [0.0] + [0.5] * 7}, asp=Asp(lag=1), max_rounds=1)
  with pytest.raises(ValueError, match=r'^tiers.table: .* under way .* the same table'):
    other.load_state_dict(state)


def test_another_number_of_prompts_is_refused():
  run, _ = made({'a': [0.5] * 8, 'b': [0.5] * 8})
  other, _ = made({'a': [0.5] * 9, 'b': [0.5] * 8})
  with pytest.raises(ValueError, match='prompts were .* when this run began'):
    other.load_state_dict(run.state_dict())
