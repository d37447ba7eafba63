"""Prompts asked more than once are counted, and said or refused."""

import json

import numpy as np
import pytest

from jaxrl_sched.device import repeats
from jaxrl_sched.device.prompts import PromptSet
from jaxrl_sched.device.tokenizers import build_byte_tokenizer


@pytest.fixture
def asked(tmp_path):
  """What the records of each dataset ask, rendered by a plain template or another."""
  tokenizer = build_byte_tokenizer(tmp_path / 'bytes')

  def asked(*, template='Q: {prompt}', max_tokens=64, **datasets):
    for name, records in datasets.items():
      text = '\n'.join(
        json.dumps(dict(prompt=prompt, answer=answer)) for prompt, answer in records
      )
      (tmp_path / f'{name}.jsonl').write_text(text)
    given = {name: dict(source=f'{name}.jsonl') for name in datasets}
    settings = dict(tokenizer=tokenizer, template=template, max_tokens=max_tokens)
    return PromptSet(given, **settings, root=tmp_path).asked

  return asked


def test_held_out_prompts_that_are_trained_on_are_counted(asked):
  trained = asked(a=[('x', 1), ('y', 2)], b=[('z', 3)])
  held_out = asked(h=[('x', 1), ('z', 9), ('new', 1), ('X', 1)], i=[('q', 1)])
  found = repeats.overlaps(trained, held_out)
  assert found == {'h': (2, 4), 'i': (0, 1)}
  repeats.check_overlaps(found, 0.5)
  with pytest.raises(ValueError) as caught:
    repeats.check_overlaps(found, 0.49)
  assert str(caught.value).startswith(
    'config.evaluate.datasets.h: 2 of 4 prompts are also trained on, expected at most a '
    'share of 0.49'
  )


def test_prompts_too_long_to_be_trained_on_do_not_count(asked):
  trained = asked(a=[('long one', 1), ('y', 2)], max_tokens=6)
  held_out = asked(h=[('long one', 1)])
  assert repeats.overlaps(trained, held_out) == {'h': (0, 1)}


def test_prompts_are_compared_as_they_are_rendered(asked):
  same = asked(a=[('x', 1)]), asked(h=[('x', 1)], template='A: {prompt}')
  assert repeats.overlaps(*same) == {'h': (0, 1)}


def test_repeats_and_contradictions_within_a_dataset_are_said(asked):
  sets = asked(
    a=[('x', 1), ('y', 1), ('x', '1'), ('y', 2), ('y', 2), ('z', 3)],
    b=[('x', 1), ('w', 1)],
    c=[('v', 1)],
  )
  assert repeats.notes(sets, 'prompts') == [
    'prompts a: 3 of 6 prompts ask what another one of it asks, 1 of them with '
    'different answers',
    'prompts b: 1 prompts are in other datasets, too',
  ]


def test_hashes_take_16_bytes_a_prompt(asked):
  (pairs,) = asked(a=[(str(i), i) for i in range(50)]).values()
  assert pairs.dtype == np.uint64 and pairs.nbytes == 16 * 50
  assert len(np.unique(pairs[:, 0])) == 50
