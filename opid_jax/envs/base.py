"""What a text environment is. No JAX here, and no algorithm."""

from collections.abc import Sequence
from typing import Any, Protocol

from opid_jax.types import Prompt, State, Task


class TextEnv(Protocol):
    """Environments are values: `reset` and `step` return a state and keep nothing.

    The module is found by its name, `opid_jax.envs.<name>`, and offers `make(settings) -> TextEnv`,
    where `settings` is a mapping of the fields of `config.env`.
    """

    max_turns: int

    def tasks(self, step: int, n: int) -> Sequence[Task]:
        """The `n` training tasks of training step `step`: deterministic, the same on every machine."""
        ...

    def panel(self, split: str, n: int) -> Sequence[Task]:
        """The first `n` tasks of a fixed evaluation panel, always in the same order.

        Raises:
          ValueError: if the split is unknown or holds fewer than `n` tasks.
        """
        ...

    def reset(self, task: Task) -> State:
        """The state before the first action."""
        ...

    def step(self, state: State, response: str) -> State:
        """Parses the response and acts. An invalid action is data (`valid=False`), not an exception.

        Raises:
          ValueError: if the state is already done.
        """
        ...

    def prompt(self, state: State) -> Prompt:
        """What the policy reads in this state, in slots, not yet shortened to any budget."""
        ...

    def describe(self) -> dict[str, Any]:
        """Data version, sizes and rules, stored with every run so that results can be compared."""
        ...
