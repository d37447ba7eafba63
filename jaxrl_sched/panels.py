"""Which metrics a report plots, and what is to be said of them."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Panel:
  """A plot of metrics. `keys` maps a key to its label; '*' is any text, in both."""

  title: str
  note: str
  keys: dict[str, str]
  unit_range: bool = False  # 0 to 1, whatever the values
  log: bool = False
  stacked: bool = False


TIME = Panel(
  'Time',
  'seconds a step',
  {
    'time/generate_s': 'generate',
    'time/reward_s': 'reward',
    'time/learn_s': 'learn',
    'time/idle_s': 'idle',
    'time/other_s': 'other',
  },
  stacked=True,
)
BESIDE = Panel(  # with a lag
  'Time',
  'seconds a step; sampling and learning go on at the same time, so no sum',
  {'time/step_s': 'step'}
  | {k: v for k, v in TIME.keys.items() if v not in ('idle', 'other')},
)

HELD_OUT = Panel(
  'Held out',
  'pass@1 on the prompts of evaluate.datasets',
  {'eval/*/pass@1': '*'},
  unit_range=True,
)
PARTIAL = Panel(  # where rewards are not all 0 or 1
  'Held out',
  'mean reward, of the maximum, on the prompts of evaluate.datasets',
  {'eval/*/reward': '*'},
)

SECTIONS = {
  'Learning': (
    HELD_OUT,
    Panel(
      'In training',
      'mean over all groups sampled, filtered ones too',
      {'reward/mean': 'reward', 'pass_rate': 'pass rate'},
    ),
    Panel('Loss', 'no measure of success: advantages sum to 0', {'loss': 'loss'}),
    Panel('Entropy', 'nats a token; at 0 nothing new is tried', {'entropy': 'entropy'}),
    Panel('Gradient norm', 'before clipping', {'grad_norm': 'gradient norm'}),
    Panel(
      'Distance',
      'clipped share of tokens; KL',
      {'clip_frac': 'clipped', 'kl': 'KL'},
    ),
    Panel(
      'Sampler against learner',
      'absolute difference of log-probabilities; lower is better',
      {'mismatch/logp_abs_mean': 'mean', 'mismatch/logp_abs_max': 'largest'},
      log=True,
    ),
    Panel('Learning rate', '', {'lr': 'learning rate'}),
  ),
  'Sampling': (
    Panel(
      'Length of answers',
      'tokens',
      {'rollout/length_mean': 'mean', 'rollout/length_max': 'longest'},
    ),
    Panel(
      'Truncated',
      'share of answers cut off at the limit',
      {'rollout/truncated': 'truncated'},
    ),
    Panel('Fate of groups', 'groups a step', {'fate/*': '*'}, stacked=True),
    Panel('Datasets', 'share of the groups trained on', {'share/*': '*'}, stacked=True),
    Panel('Speed', 'tokens generated a second of the step', {'speed': 'tokens/s'}),
    TIME,
    Panel(
      'Idle',
      'seconds a step in which one side waits for the other',
      {'time/idle_s/*': '*'},
    ),
  ),
  'Scheduling': (
    Panel('Group size', 'answers a prompt', {'sagc/group_size': 'group size'}),
    Panel(
      'Stragglers',
      'share of groups with one; the learned risk of each group size',
      {'sagc/event_rate': 'event rate', 'sagc/p/*': 'size *'},
      unit_range=True,
    ),
    Panel('Price of a straggler', 'lambda', {'sagc/lambda': 'lambda'}),
    Panel('Asleep', 'share of prompts, by dataset', {'snooze/asleep/*': '*'}),
    Panel(
      'Lengths foreseen',
      'rank correlation; share of groups under the predicted bound',
      {'lengths/rank_correlation': 'correlation', 'lengths/coverage': 'coverage'},
      unit_range=True,
    ),
    Panel(
      'Pruning',
      'share of answers and prompts kept; effective sample size',
      {
        'dppo/kept': 'answers',
        'dppo/prompts_kept': 'prompts',
        'dppo/ess': 'effective',
      },
      unit_range=True,
    ),
    Panel(
      'Packing',
      'share of row tokens in use',
      {'packing/density': 'density'},
      unit_range=True,
    ),
    Panel(
      'Lag',
      'weight versions behind',
      {'lag/mean': 'mean', 'lag/max': 'largest'},
    ),
  ),
}
