"""The directory tree of a training container, below a base directory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DEFAULT_BASE = Path("/opt/ml")


@dataclass(frozen=True, slots=True, kw_only=True)
class ContainerLayout:
    """The paths below a base directory.

    Attributes:
        base: Base directory, ``/opt/ml`` on SageMaker.
    """

    base: Path = DEFAULT_BASE

    @property
    def input(self) -> Path:
        """Directory of the data and the configuration."""
        return self.base / "input"

    @property
    def config(self) -> Path:
        """Directory of the configuration files."""
        return self.base / "input" / "config"

    @property
    def data(self) -> Path:
        """Directory of the channels."""
        return self.base / "input" / "data"

    @property
    def model(self) -> Path:
        """Directory whose contents become the model."""
        return self.base / "model"

    @property
    def output(self) -> Path:
        """Directory of the failure file and of further results."""
        return self.base / "output"

    @property
    def output_data(self) -> Path:
        """Directory whose contents become the output."""
        return self.base / "output" / "data"

    @property
    def intermediate(self) -> Path:
        """Directory of intermediate output."""
        return self.base / "output" / "intermediate"

    @property
    def failure(self) -> Path:
        """File whose first 1 024 characters say why a run failed."""
        return self.base / "output" / "failure"

    @property
    def checkpoints(self) -> Path:
        """Directory that is uploaded while the program runs."""
        return self.base / "checkpoints"

    @property
    def code(self) -> Path:
        """Directory of the training code."""
        return self.base / "code"

    def directories(self) -> list[Path]:
        """Return all directories that exist when the program starts."""
        return [self.config, self.data, self.model, self.output_data, self.intermediate, self.checkpoints, self.code]

    def written_directories(self) -> list[Path]:
        """Return all directories in which a run itself writes, or from which it stores results, each above those in it."""
        return [self.input, self.config, self.data, self.model, self.output, self.output_data, self.checkpoints]
