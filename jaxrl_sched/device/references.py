"""Reference solutions in the sampler's place: what warm starts learn from."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from transformers import PreTrainedTokenizerBase

from jaxrl_sched.types import Completion, Prompt, Request, Share


class References:
  """Answers each request with its prompt's solution, ended by the end token.

  Trained on with advantage 1 and old log-probs that are the learner's own, the
  policy gradient is that of supervised learning.
  """

  def __init__(self, tokenizer: PreTrainedTokenizerBase):
    self._tokenizer = tokenizer

  def check(
    self, prompts: Iterable[Prompt], max_new_tokens: int, ids_below: int
  ) -> None:
    """Raises ValueError for the first prompt without a solution that fits.

    Args:
      ids_below: what all ids have to be below: the model's.
    """
    if self._tokenizer.eos_token_id is None:
      raise ValueError('teacher: the tokenizer has no end token to end solutions with')
    for prompt in prompts:
      tokens = self._tokens(prompt, max_new_tokens)
      largest = max(tokens)
      if self._tokenizer.eos_token_id in tokens[:-1]:
        raise ValueError(
          f'prompt {prompt.id!r}: its solution holds {self._tokenizer.eos_token!r}, '
          'expected text that ends only at its end'
        )
      if largest >= ids_below:
        raise ValueError(
          f'prompt {prompt.id!r}: its solution has token {largest}, expected ids below '
          f'{ids_below}, of which the model has embeddings'
        )

  def _tokens(self, prompt: Prompt, limit: int) -> np.ndarray:
    if not prompt.solution:
      raise ValueError(f'prompt {prompt.id!r}: no solution, needed by teacher')
    ids = self._tokenizer(prompt.solution, add_special_tokens=False).input_ids
    tokens = np.array([*ids, self._tokenizer.eos_token_id], np.int32)
    if len(tokens) > limit:
      raise ValueError(
        f'prompt {prompt.id!r}: its solution has {len(tokens)} tokens, expected at '
        f'most sampling.max_new_tokens={limit}'
      )
    return tokens

  def begin(
    self,
    requests: Sequence[Request],
    *,
    share: Share,
    version: int,
    on_finish: Callable[[Request, Completion], None],
  ) -> 'Given':
    """The solutions, as `Sampler.begin` gives answers."""
    given = Given()
    for i in share.requests.tolist():
      request = requests[i]
      tokens = self._tokens(request.prompt, request.sampling.max_new_tokens)
      completion = Completion(
        draw=request.draw,
        answer=0,
        tokens=tokens,
        logps=np.zeros(len(tokens), np.float32),
        finish='stop',
        version=version,
      )
      given.completions[request.draw, 0] = completion
      on_finish(request, completion)
    return given


class Given:
  """Solutions in place of a rollout: all are there at once."""

  busy = slot_steps = 0

  def __init__(self):
    self.completions: dict[tuple[int, int], Completion] = {}
    self.cut: dict[tuple[int, int], int] = {}

  def ready(self) -> bool:
    return True

  def advance(self) -> bool:
    return False

  def abandon(self) -> None:
    pass
