"""What launch/smollm2.py promises, as far as it needs no download."""

import importlib.util
import pathlib
import subprocess
import sys

SCRIPT = pathlib.Path(__file__).parents[1] / 'launch' / 'smollm2.py'


def test_help_makes_no_folder(tmp_path):
  run = subprocess.run(
    [sys.executable, SCRIPT, '--help'], cwd=tmp_path, capture_output=True, text=True
  )
  assert run.returncode == 0 and 'SmolLM2-135M-Instruct' in run.stdout
  assert list(tmp_path.iterdir()) == []


def test_others_may_read_what_they_may_read_of_any_new_file(tmp_path):
  spec = importlib.util.spec_from_file_location('smollm2', SCRIPT)
  script = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(script)
  made = tmp_path / 'made'
  made.mkdir()
  closed, new = made / 'model.safetensors', tmp_path / 'new'
  closed.touch()
  closed.chmod(0o600)
  new.touch()
  script.readable(made)
  assert closed.stat().st_mode == new.stat().st_mode
