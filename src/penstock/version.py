"""The version and the name of the distribution, below all modules that record or print them.

``pyproject.toml`` takes the version from here.
"""

__version__ = "0.1.0"

DISTRIBUTION = "penstock-data"
"""The name on a package index. The project ``penstock`` there is another one, about tracing the flow of programs."""


def install_hint(extra: str) -> str:
    """The command that installs an extra, as errors show it; with its quotes, because zsh takes brackets for a pattern."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"
