"""What the figures of one workload have in common."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tools.bench import states
from tools.bench.settings import MIB, Settings


class Workload(ABC):
    """One workload and its figures; each repetition adds to them."""

    def __init__(self, settings: Settings, workload: str) -> None:
        """Build the state."""
        self.settings = settings
        self.state = states.build(workload, settings.nbytes)
        self.nbytes = states.nbytes_of(self.state.values())
        self.size = f"{workload}, {self.nbytes / MIB:.0f} MiB"
        self._names = 0

    @abstractmethod
    def repetition(self, turn: int) -> None:
        """Measure each contender."""

    def repeat(self) -> None:
        """Measure as often as the settings say."""
        for turn in range(self.settings.repeat):
            self.repetition(turn)
