"""A run's checkpoints: committed whole or not at all, never half loaded.

    <directory>/<step>/state/         arrays, by orbax, whatever mesh they lie on
                       control.json   what the controllers decided by, its arrays
                       control.npz    apart
                       pending.json   groups sampled but not yet trained on
                       manifest.json  size and checksum of each file above, the
                                      arrays' shapes, the model, the score

The manifest is written last, just before orbax commits the step by one rename.
A step that does not agree with its manifest is damaged and is never read further.
"""

from concurrent import futures
import contextlib
import json
import math
import os
import re
from typing import Any
import warnings

from etils import epath
import jax
import numpy as np
import orbax.checkpoint as ocp

from jaxrl_sched import storage
from jaxrl_sched.device import contents as contents_lib
from jaxrl_sched.device import manifest, mixed_state, multihost

_STEP = re.compile(r'(\d+)(\.orbax-checkpoint-tmp.*)?')
_WHOLE = re.compile(r'0|[1-9]\d*')
_TEMPORARY = '.orbax-checkpoint-tmp'  # orbax's own suffix of a step not committed


class SaveError(RuntimeError):
  """A step could not be saved."""


class Checkpoints:
  """Saves and restores the steps under one directory.

  Every process makes the same calls, as everywhere; process 0 decides, and alone
  cleans and deletes.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    keep: int = 2,
    model: dict[str, Any] | None = None,
    contents: dict[str, Any] | None = None,
    read_only: bool = False,
  ):
    """Opens the directory, and removes what a killed run left half written in it.

    Args:
      directory: a path, or gs://bucket/path. Made when absent.
      keep: how many steps stay: the newest ones, one place of them being held by
        the best as soon as a step has a score.
      model: a JSON-able description; a checkpoint of another model is refused.
        None: not compared.
      contents: what was read from files; see `contents.check`. None: not compared.
      read_only: touch nothing: a damaged step is then an error.
    """
    if keep < 1:
      raise ValueError(f'keep: {keep}, expected at least 1')
    path = os.fspath(directory)
    self._is_local = not storage.is_remote(path)
    self._directory = epath.Path(os.path.abspath(path) if self._is_local else path)
    self._keep = keep
    self._model = None if model is None else json.loads(json.dumps(model))
    self._contents = None if contents is None else json.loads(json.dumps(contents))
    self._read_only = read_only
    self._small: dict[str, bytes] = {}  # file name -> content, of the step being saved
    self._manifest: dict[str, Any] = {}  # of the step being saved, less its files
    self._saving: futures.Future | None = None
    self._thread = futures.ThreadPoolExecutor(1, 'checkpoint')
    # Slicing replicas apart, as orbax does by default, would compile at a save.
    arrays = ocp.type_handlers.ArrayHandler(
      use_replica_parallel=False, enable_write_sharding_file=False
    )
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    # Named processes make orbax wait in barriers of the coordination service, which
    # have a time limit and compile nothing.
    processes = set(range(multihost.count())) if multihost.count() > 1 else None
    among = ocp.options.MultiprocessingOptions(active_processes=processes)
    self._arrays = ocp.PyTreeCheckpointHandler(
      type_handler_registry=registry, multiprocessing_options=among
    )
    self._checkpointer = None
    if not read_only:
      self._checkpointer = ocp.AsyncCheckpointer(
        ocp.CompositeCheckpointHandler(
          state=self._arrays,
          composite_options=ocp.CompositeOptions(multiprocessing_options=among),
        ),
        async_options=ocp.AsyncOptions(post_finalization_callback=self._describe),
        multiprocessing_options=among,
      )
      if multihost.is_first():
        self._directory.mkdir(parents=True, exist_ok=True)
        self._clean()

  def save(
    self,
    step: int,
    state: Any,
    *,
    control: dict[str, Any],
    pending: list | dict,
    score: float | None,
  ) -> None:
    """Copies everything out, and writes it in the background.

    When this returns, arrays may be donated and the rest changed. A step that is
    there already stays as it is, since resuming is exact and this would be its like;
    only a score that it lacks is added.

    Args:
      step: how many learner steps lie behind this state.
      state: a tree of jax.Array, on any mesh.
      control: JSON and numpy arrays: string keys; numbers come back exactly.
      pending: JSON, likewise.
      score: the larger the better; None where nothing was evaluated.

    Raises:
      ValueError: something cannot be saved, by name.
      RuntimeError: an earlier save failed; it is raised once, here or in `wait`.
    """
    if self._read_only:
      raise ValueError(f'Checkpoints in {self._directory} were opened to be read only')
    arrays = _by_name(state)

    def prepare() -> bool:
      self.wait()
      for name, array in arrays.items():
        if not isinstance(array, jax.Array):
          raise ValueError(f'State {name}: {type(array).__name__}, expected jax.Array')
      if not multihost.is_first():
        return True
      self._clean()
      if score is not None and not math.isfinite(score):
        raise ValueError(f'Score of step {step}: {score}, expected a finite number')
      text, npz = mixed_state.dump(control, 'control')
      mixed_state.check_json(pending, 'pending')
      if self._path(step).exists():
        fault = manifest.fault(self._path(step))
        if fault is None:
          self._add_score(step, score)
          return False
        self._set_aside(step, fault)
      self._small = {
        'control.json': text.encode(),
        'control.npz': npz,
        'pending.json': json.dumps(pending).encode(),
      }
      self._manifest = {
        'step': step,
        'score': None if score is None else float(score),
        'model': self._model,
        'contents': self._contents,
        'arrays': _shapes(arrays),
      }
      return True

    if multihost.gather(prepare, name=f'checkpoint: save {step}')[0]:
      self._checkpointer.save(
        self._path(step), args=ocp.args.Composite(state=ocp.args.PyTreeSave(arrays))
      )
      self._saving = self._thread.submit(self._finish, step)

  def restore(
    self, like: Any, *, step: int | None = None, partly: bool = False
  ) -> tuple[int, Any, dict[str, Any], Any] | None:
    """Reads a step, the newest whole one unless told which.

    Args:
      like: a tree of jax.ShapeDtypeStruct with shardings, where arrays are to lie.
      step: None passes over damaged steps, with a warning, and renames them
        <step>.damaged, out of the way of a later save.
      partly: do not load what `like` has not. Its files are still checked.

    Returns:
      (step, state, control, pending), or None where `step` is None and there is
      nothing to read.

    Raises:
      ValueError: `step` is absent or damaged; or the checkpoint is of another model
        or another tree of arrays. The message names what differs.
    """
    wanted = _by_name(like)
    for name, array in wanted.items():
      if array.sharding is None:
        raise ValueError(f'State {name}: no sharding, expected one to restore to')
    self.wait()
    found = multihost.agree(
      lambda: self._choose(step, wanted, partly), name=f'checkpoint: choose {step}'
    )
    if found is None:
      return None
    step, control, pending = found
    arrays = {}

    def load() -> None:
      to = {
        name: ocp.ArrayRestoreArgs(
          sharding=array.sharding, global_shape=array.shape, dtype=array.dtype
        )
        for name, array in wanted.items()
      }
      arrays.update(
        self._arrays.restore(
          self._path(step) / 'state',
          args=ocp.args.PyTreeRestore(
            item=wanted, restore_args=to, partial_restore=partly
          ),
        )
      )

    multihost.gather(load, name=f'checkpoint: load {step}')
    leaves = [arrays[name] for name in wanted]
    state = jax.tree.unflatten(jax.tree.structure(like), leaves)
    return step, state, control, pending

  def steps(self) -> list[int]:
    """The steps that are whole, ascending: committed, with every file at its size."""
    return [
      step for step in self._committed() if manifest.fault(self._path(step)) is None
    ]

  def wait(self) -> None:
    """Waits for the save under way. Raises RuntimeError if it failed."""
    if self._saving is not None:
      saving, self._saving = self._saving, None
      saving.result()

  def close(self) -> None:
    """As `wait`; then nothing more can be saved."""
    try:
      self.wait()
    finally:
      self._thread.shutdown()
      if self._checkpointer is not None:
        try:
          self._checkpointer.close()
        except Exception as error:  # of a save that has failed, in its own words
          raise SaveError(f'{self._directory}: {_line(error)}') from error

  def _path(self, step: int) -> epath.Path:
    return self._directory / str(step)

  def _committed(self) -> list[int]:
    if not self._directory.exists():
      return []
    return sorted(
      int(path.name)
      for path in self._directory.iterdir()
      if _WHOLE.fullmatch(path.name) and ocp.utils.is_checkpoint_finalized(path)
    )

  def _describe(self) -> None:
    """Writes control, pending and manifest: all else is written, nothing committed."""
    step = self._manifest['step']
    path = self._checkpointer.get_temporary_path(self._path(step)).get()
    for name, content in self._small.items():
      (path / name).write_bytes(content)
    manifest.write(path, self._manifest, ['state', *self._small])

  def _add_score(self, step: int, score: float | None) -> None:
    """A step saved before it was evaluated gets its score when that is known."""
    if score is not None and manifest.read(self._path(step))['score'] is None:
      manifest.change(self._path(step), score=float(score))

  def _choose(
    self, step: int | None, wanted: dict[str, Any], partly: bool
  ) -> tuple[int, Any, Any] | None:
    """Finds the step to read, with its control and pending. On process 0."""
    committed = self._committed()
    if step is not None and step not in committed:
      there = ', '.join(map(str, committed)) or 'none'
      raise ValueError(f'No checkpoint {self._path(step)}; there are: {there}')
    for candidate in [step] if step is not None else reversed(committed):
      fault = manifest.fault(self._path(candidate), deep=True)
      if fault is None:
        self._check_fits(candidate, wanted, partly)
        path = self._path(candidate)
        control = mixed_state.load(
          (path / 'control.json').read_text(), (path / 'control.npz').read_bytes()
        )
        return candidate, control, json.loads((path / 'pending.json').read_text())
      if step is not None or self._read_only:
        there = ', '.join(map(str, self.steps())) or 'none'
        raise ValueError(
          f'Checkpoint {self._path(candidate)} is damaged: {fault}; whole ones: {there}'
        )
      self._set_aside(candidate, fault)
    return None

  def _check_fits(self, step: int, wanted: dict[str, Any], partly: bool) -> None:
    about = manifest.read(self._path(step))
    if self._model is not None:
      differing = _differences(_by_name(about['model'] or {}), _by_name(self._model))
      if differing:
        raise ValueError(
          f'Checkpoint {self._path(step)} is of another model: {differing}'
        )
    if self._contents is not None:
      where, before = str(self._path(step)), about.get('contents')
      if before is None:
        raise ValueError(f'Checkpoint {where} does not say what data it began with')
      contents_lib.check(before, self._contents, where)
    saved = about['arrays']
    if partly:
      saved = {name: shape for name, shape in saved.items() if name in wanted}
    differing = _differences(saved, _shapes(wanted))
    if differing:
      raise ValueError(f'Checkpoint {self._path(step)} has other arrays: {differing}')

  def _set_aside(self, step: int, fault: str) -> None:
    path = self._path(step)
    aside = path.with_name(f'{step}.damaged')
    number = 1
    while aside.exists():
      number += 1
      aside = path.with_name(f'{step}.damaged-{number}')
    path.rename(aside)
    warnings.warn(
      f'Checkpoint {path} is damaged: {fault}; moved to {aside.name}', stacklevel=2
    )

  def _finish(self, step: int) -> None:
    """In the background: waits for the commit, and only then deletes what is old."""
    try:
      self._checkpointer.wait_until_finished()
      if multihost.is_first():
        for old in self._superseded():
          self._delete(self._path(old))
    except Exception as error:  # raised at the next `wait` or `save`
      if multihost.is_first():
        with contextlib.suppress(Exception):  # where nothing can be reached any more
          self._clean()  # gives a full disk its room back
      raise SaveError(
        f'Checkpoint {self._path(step)} could not be saved: {_line(error)}'
      ) from error

  def _superseded(self) -> list[int]:
    """The steps that neither newness nor score keeps."""
    steps = self.steps()
    scores = {step: manifest.read(self._path(step))['score'] for step in steps}
    scored = [step for step in steps if scores[step] is not None]
    kept = set()
    if scored and self._keep > 1:
      kept.add(max(scored, key=lambda step: (scores[step], step)))
    for step in reversed(steps):
      if len(kept) < self._keep:
        kept.add(step)
    return [step for step in steps if step not in kept]

  def _delete(self, path: epath.Path) -> None:
    """First makes it uncommitted, so that half a deletion never counts as a step."""
    if self._is_local:
      path = path.rename(path.with_name(path.name + _TEMPORARY))
    else:
      (path / 'commit_success.txt').unlink(missing_ok=True)
    path.rmtree()

  def _clean(self) -> None:
    """Removes steps that were not committed, of this run or of one killed before.

    What a writer of a failed save still adds meanwhile is found the next time: at
    the next save, or the next start.
    """
    if not self._directory.exists():  # an object store makes no empty folders
      return
    for path in list(self._directory.iterdir()):
      if _STEP.fullmatch(path.name) and not ocp.utils.is_checkpoint_finalized(path):
        try:
          path.rmtree()
        except OSError as error:
          warnings.warn(f'{path} could not be removed: {error}', stacklevel=2)


def _line(error: Exception) -> str:
  return ' '.join(str(error).split())[:300]


def _by_name(tree: Any) -> dict[str, Any]:
  """The leaves of a tree by their path, such as 'params.layers.0.w'.

  Saved so, flat, a checkpoint does not hang on the classes of the tree's nodes.
  """
  leaves = jax.tree_util.tree_leaves_with_path(tree)
  named = {
    jax.tree_util.keystr(path, simple=True, separator='.'): leaf
    for path, leaf in leaves
  }
  if len(named) < len(leaves):
    raise ValueError('State: two leaves have one name; expected keys without dots')
  return named


def _shapes(arrays: dict[str, Any]) -> dict[str, str]:
  return {
    name: f'{np.dtype(a.dtype).name}[{", ".join(map(str, a.shape))}]'
    for name, a in arrays.items()
  }


def _differences(saved: dict[str, Any], expected: dict[str, Any]) -> str:
  """Names what differs, the first three in full; '' if nothing does."""
  names = [
    name
    for name in sorted(saved.keys() | expected.keys())
    if name not in saved or name not in expected or saved[name] != expected[name]
  ]
  texts = [
    f'{name}: saved {saved.get(name, "nothing")}, expected'
    f' {expected.get(name, "nothing")}'
    for name in names[:3]
  ]
  return '; '.join(texts + ([f'and {len(names) - 3} more'] if len(names) > 3 else []))
