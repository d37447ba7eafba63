"""Imports go one way only; the ground floors know nothing of jax."""

import ast
import pathlib
import re
import subprocess
import sys
import tomllib

import pytest

import jaxrl_sched

ROOT = pathlib.Path(jaxrl_sched.__file__).parent
FLOORS = {
  'types': 0,
  'journal': 0,
  'terminal': 0,
  'storage': 1,
  'host': 1,
  'control': 1,
  'engine': 1,
  'device': 2,
  'sim': 2,
  'loop': 3,
  'evaluation': 3,
  'console': 3,
  'metrics': 3,
  'plots': 3,
  'panels': 3,
  'report': 3,
  'comparison': 3,
  'settings': 4,
  'checks': 4,
  'controllers': 4,
  'models': 4,
  'config': 4,
  'footprint': 4,
  'fitting': 4,
  'train': 5,
  'evaluate': 5,
  'stratify': 5,
  'simulate': 5,
  'preflight': 5,
  'export': 5,
}
# The device and the simulator do not know each other.
APART = ({'device'}, {'sim'})
HEAVY = {'jax', 'flax', 'optax', 'orbax', 'grain', 'transformers', 'torch'}
# Above the ground floors too: the simulator runs this very loop without jax.
WITHOUT_JAX = {'sim', 'loop', 'evaluation', 'console', 'metrics', 'plots', 'report'}
WITHOUT_JAX |= {'simulate', 'comparison', 'panels'}
FILES = sorted(p for p in ROOT.rglob('*.py') if p.name != '__init__.py')


def imports(path: pathlib.Path) -> set[str]:
  """What a file imports, also inside functions: there it only comes later."""
  names = set()
  for node in ast.walk(ast.parse(path.read_text('utf-8'))):
    if isinstance(node, ast.Import):
      names |= {alias.name for alias in node.names}
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f'{path}:{node.lineno}: a relative import'
      names |= {f'{node.module}.{alias.name}' for alias in node.names}
  return names


def module(path: pathlib.Path) -> str:
  return '.'.join(path.relative_to(ROOT.parent).with_suffix('').parts)


def part(name: str) -> str:
  """'jaxrl_sched.host.packing.pack' -> 'host'."""
  return name.split('.')[1]


def test_every_module_has_a_floor():
  assert {part(module(path)) for path in FILES} <= FLOORS.keys()


@pytest.mark.parametrize('path', FILES, ids=module)
def test_imports_never_go_up(path):
  here = part(module(path))
  for name in imports(path):
    if name.startswith('jaxrl_sched.'):
      there = part(name)
      assert FLOORS[there] <= FLOORS[here], f'{module(path)} imports {name}'
      for apart in (APART, APART[::-1]):
        assert not (here in apart[0] and there in apart[1]), name
    if FLOORS[here] <= 1 or here in WITHOUT_JAX:
      assert name.split('.')[0] not in HEAVY, f'{module(path)} imports {name}'


@pytest.mark.parametrize(
  'name',
  [
    module(path)
    for path in FILES
    if FLOORS[part(module(path))] <= 1 or part(module(path)) in WITHOUT_JAX
  ],
)
def test_loading_it_does_not_load_jax(name):
  program = f"""
import sys
import {name}
print(*sorted(name for name in {HEAVY!r} if sys.modules.get(name)))
"""
  run = subprocess.run(
    [sys.executable, '-c', program], capture_output=True, text=True, check=True
  )
  assert run.stdout.split() == []


def test_only_one_file_asks_which_process_it_is():
  asking = re.compile(r'process_index\(|process_count\(')
  asks = {p.name for p in FILES if asking.search(p.read_text('utf-8'))}
  assert asks <= {'multihost.py'}


def test_what_is_imported_is_declared():
  """A fresh install has it: nothing is there only because something else needs it."""
  text = (ROOT.parent / 'pyproject.toml').read_text('utf-8')
  project = tomllib.loads(text)['project']
  extras = dict(project['optional-dependencies'])
  for_tests = distributions(extras.pop('test'))
  for_all = distributions(project['dependencies'] + sum(extras.values(), []))
  tests = sorted(pathlib.Path(__file__).parent.rglob('*.py'))
  own = {'jaxrl_sched', 'tests', 'bench', 'configs', *(p.stem for p in tests)}
  called = {'absl': 'absl_py', 'orbax': 'orbax_checkpoint'}  # where the names differ
  for path, declared in [(p, for_all) for p in FILES] + [
    (p, for_all | for_tests) for p in tests
  ]:
    for name in imports(path):
      top = name.split('.')[0]
      if top not in sys.stdlib_module_names | own:
        assert called.get(top, top).lower() in declared, f'{path} imports {name}'


def distributions(requirements: list[str]) -> set[str]:
  return {re.match(r'[\w-]+', r)[0].lower().replace('-', '_') for r in requirements}
