"""Trajectories as people read them: one text per attempt, with its skills."""

import json
import os
from collections.abc import Mapping, Sequence

from opid_jax.skills import Hint
from opid_jax.types import Skills, Trajectory


def to_text(trajectory: Trajectory, skills: Skills | None, hints: Sequence[Sequence[Hint]] = ()) -> str:
  """One attempt, turn by turn.

  Args:
    skills: what the analyzer said about it; None when it was not asked.
    hints: per step, the skills that it was re-scored with.
  """
  outcome = 'success' if trajectory.success else 'out of turns' if trajectory.is_truncated else 'failure'
  lines = [f'=== {trajectory.task.id}, attempt {trajectory.attempt}: {outcome}, score {trajectory.score:.2f}']
  lines.append(f'Task: {trajectory.task.text}')
  if skills is not None:
    lines.append(f'Episode skill: {skills.episode or "-"}' if skills.usable else f'No skills: {skills.reason}')
  for index, step in enumerate(trajectory.steps):
    flags = ''.join(f' [{flag}]' for flag, on in (('invalid', not step.valid), ('cut', step.is_cut)) if on)
    lines += [f'--- step {index}{flags}', f'sees:   {step.observation}', f'writes: {step.response.strip()}']
    for hint in hints[index] if hints else ():
      lines.append(f'{hint.kind} skill: {hint.text} (weight {hint.weight:g})')
  return '\n'.join(lines) + '\n'


def to_json(trajectory: Trajectory, skills: Skills | None, hints: Sequence[Sequence[Hint]] = ()) -> Mapping:
  return {
    'task': trajectory.task.id,
    'text': trajectory.task.text,
    'group': trajectory.group,
    'attempt': trajectory.attempt,
    'success': trajectory.success,
    'score': trajectory.score,
    'truncated': trajectory.is_truncated,
    'skills': None if skills is None else {
      'episode': skills.episode, 'steps': {str(k): v for k, v in skills.steps.items()}, 'reason': skills.reason,
      'summary': skills.summary,
    },
    'steps': [
      {
        'observation': step.observation,
        'response': step.response,
        'action': step.action,
        'valid': step.valid,
        'cut': step.is_cut,
        'reward': step.reward,
        'hints': [hint._asdict() for hint in hints[index]] if hints else [],
      }
      for index, step in enumerate(trajectory.steps)
    ],
  }


def write(folder: str, name: str, entries: Sequence[tuple]) -> None:
  """Writes `name`.txt to read and `name`.jsonl to process; `entries`: (trajectory, skills, hints) each."""
  os.makedirs(folder, exist_ok=True)
  with open(os.path.join(folder, f'{name}.txt'), 'w', encoding='utf-8') as file:
    file.write('\n'.join(to_text(*entry) for entry in entries))
  with open(os.path.join(folder, f'{name}.jsonl'), 'w', encoding='utf-8') as file:
    file.writelines(json.dumps(to_json(*entry), ensure_ascii=False) + '\n' for entry in entries)
