"""The hosts of a run and the place of this one: from arguments, or from the variables of the program that started it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

DEFAULT_HOST = "algo-1"
HOSTS_MAX = 10_000

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hosts:
    """The hosts of a run.

    Attributes:
        names: Names of all hosts, sorted.
        current: Name of this host.

    Raises:
        ConfigError: This host is not one of them, or a name occurs twice.
    """

    names: tuple[str, ...] = (DEFAULT_HOST,)
    current: str = DEFAULT_HOST

    def __post_init__(self) -> None:
        if len(set(self.names)) != len(self.names) or not all(self.names):
            raise ConfigError(f"the hosts {', '.join(self.names)} must have different names")
        if list(self.names) != sorted(self.names):
            raise ConfigError("the names of the hosts must be sorted")
        if self.current not in self.names:
            raise ConfigError(f"this host, {self.current!r}, is not one of {', '.join(self.names)}")

    @property
    def rank(self) -> int:
        """Place of this host among all, from 0."""
        return self.names.index(self.current)

    @property
    def count(self) -> int:
        """Number of hosts."""
        return len(self.names)

    @property
    def master(self) -> str:
        """Address of the first host; the loopback address if there is only one, whose name nothing may resolve."""
        return self.names[0] if self.count > 1 else "127.0.0.1"


def find_hosts(environment: Mapping[str, str], *, names: Sequence[str] = (), current: str | None = None) -> Hosts:
    """Return the hosts of this run.

    They come from the first of: the arguments; SLURM's list of nodes; the node counts of torchrun or Open MPI, whose hosts
    become ``algo-1``, ``algo-2`` and so on. Otherwise there is one host.

    Args:
        environment: Variables of this process.
        names: Names of all hosts, in any order.
        current: Name of this host.

    Raises:
        ConfigError: Only one of `names` and `current` is given, or a variable is not valid.
    """
    if names or current is not None:
        if not names or current is None:
            raise ConfigError("hosts and current-host go together", hint="--hosts a,b --current-host a")
        return Hosts(names=tuple(sorted(names)), current=current)
    return _of_slurm(environment) or _of_torchrun(environment) or _of_open_mpi(environment) or Hosts()


def _of_slurm(environment: Mapping[str, str]) -> Hosts | None:
    nodes, number = environment.get("SLURM_STEP_NODELIST"), environment.get("SLURM_NODEID")
    if nodes is None or number is None or "SLURM_PROCID" not in environment:
        return None  # sbatch sets some of these outside of any step, too
    names = expand_nodes(nodes)
    index = _number("SLURM_NODEID", number, len(names))
    return Hosts(names=tuple(sorted(names)), current=names[index])


def _of_torchrun(environment: Mapping[str, str]) -> Hosts | None:
    number, count = environment.get("GROUP_RANK"), environment.get("GROUP_WORLD_SIZE")
    if number is None or count is None:
        return None
    return _numbered("GROUP_RANK", number, _number("GROUP_WORLD_SIZE", count, HOSTS_MAX + 1))


def _of_open_mpi(environment: Mapping[str, str]) -> Hosts | None:
    words = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    if any(word not in environment for word in words):
        return None
    rank, size, local = (_number(word, environment[word], 1 << 31) for word in words)
    if not local or size % local:
        raise ConfigError(f"{size} MPI processes are not the same number, {local}, on each host", hint="--hosts")
    return _numbered("OMPI_COMM_WORLD_RANK", str(rank // local), size // local)


def _numbered(word: str, number: str, count: int) -> Hosts:
    width = len(str(count))  # leading zeros, so that the sorted order is that of the numbers
    names = tuple(f"algo-{index + 1:0{width}d}" for index in range(count))
    return Hosts(names=names, current=names[_number(word, number, count)])


def _number(word: str, text: str, bound: int) -> int:
    if not text.isdecimal() or int(text) >= bound:
        raise ConfigError(f"the environment has {word}={text!r}, which is not a whole number in [0, {bound})")
    return int(text)


def expand_nodes(text: str) -> list[str]:
    """Return the nodes of a SLURM node list, such as ``gpu[01-03,07],login``, in its order.

    Raises:
        ConfigError: The list is not valid, or names more than ``HOSTS_MAX`` nodes.
    """
    names: list[str] = []
    for match in re.finditer(r"([^,\[\]]*)(?:\[([^\]]*)\])?([^,\[\]]*)(?:,|$)", text):
        head, ranges, tail = match[1], match[2], match[3]
        if ranges is None:
            names += [head] if head else []
            continue
        for each in ranges.split(","):
            found = _RANGE.fullmatch(each)
            if found is None:
                raise ConfigError(f"{text!r} is not a list of SLURM nodes: {each!r}", hint="gpu[01-03,07]")
            first, last = int(found[1]), int(found[2] or found[1])
            if last - first >= HOSTS_MAX:
                raise ConfigError(f"{text!r} names more than {HOSTS_MAX} nodes")
            names += [f"{head}{number:0{len(found[1])}d}{tail}" for number in range(first, last + 1)]
    if not names or len(names) > HOSTS_MAX:
        raise ConfigError(f"{text!r} names {len(names)} nodes; 1 to {HOSTS_MAX} are possible")
    return names
