"""The version and the name of the distribution, and how it is installed, below all modules that record or print them.

``pyproject.toml`` takes the version from here.
"""

__version__ = "0.1.0"

DISTRIBUTION = "penstock-data"
"""The name on a package index. The project ``penstock`` there is another one, about tracing the flow of programs."""

IS_ON_INDEX = False
"""Whether a package index has the distribution. Until then hints and the README (tests/style compares them) name a clone."""


def install_command(*extras: str) -> str:
    """The command that installs penstock with extras; with its quotes, because zsh takes brackets for a pattern."""
    return f"pip install '{DISTRIBUTION if IS_ON_INDEX else '.'}[{','.join(extras)}]'"


def install_hint(extra: str) -> str:
    """How to install an extra, as errors say it."""
    return install_command(extra) + ("" if IS_ON_INDEX else " in a clone of penstock")
