"""Which objects a command is about: one, all below a folder, or those that a pattern names, less what is left out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from penstock.errors import ObjectMissingError
from penstock.patterns import expand_braces, has_glob, is_pattern, matcher, split_glob

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cli.options import Connection
    from penstock.types import Key, ObjectInfo

Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Take only keys that match; may be repeated."),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option("--exclude", metavar="GLOB", help="Leave out keys that match; may be repeated, and beats --include."),
]


class Filter:
    """What ``--include`` and ``--exclude`` take: a key that matches an include, or any if there is none, and no exclude.

    A glob with a slash is held against the key relative to what was named, and one without against the last segment of
    the key, at any depth.

    Args:
        include: Globs; None or empty takes every key.
        exclude: Globs.

    Raises:
        ConfigError: a glob has braces or brackets that mean nothing.
    """

    def __init__(self, include: Sequence[str] | None, exclude: Sequence[str] | None) -> None:
        self._include = [_glob(pattern) for pattern in include or ()]
        self._exclude = [_glob(pattern) for pattern in exclude or ()]

    def takes(self, key: Key) -> bool:
        """Whether `key`, relative to what was named, is taken."""
        if self._include and not any(matches(key) for matches in self._include):
            return False
        return not any(matches(key) for matches in self._exclude)


def nothing_left(count: int, url: str) -> ObjectMissingError:
    """The error where a filter takes none of `count` objects."""
    return ObjectMissingError(
        f"--include and --exclude leave nothing of {count} objects",
        operation="LIST",
        url=url,
        hint="a key is taken if it matches an --include, or there is none, and no --exclude",
    )


def _glob(pattern: str) -> Callable[[str], bool]:
    matches = matcher(pattern)
    return matches if "/" in pattern else lambda key: matches(key.rpartition("/")[2])


class Selection:
    """The objects that `url` names, in key order: iterating lists them.

    A URL with wildcards or braces is a pattern, as in ``penstock.shards``, if no object and no folder is called exactly
    so. A pattern that ends with a slash means everything below the folders that match.

    Args:
        connection: Where to ask.
        url: URL of an object or folder, or a pattern.
        include: Globs of which a key must match one; without any, every key is taken.
        exclude: Globs of which a key must match none.

    Attributes:
        place: The object, the folder, or the folder above the pattern's first wildcard.
        only: The object, where `url` names one.
        prefix: Prefix that all keys share; names are relative to it.
        is_pattern: Whether `url` was taken for a pattern.
        count: Objects that the last iteration gave.

    Raises:
        ConfigError: `url` or a glob means nothing.
        ObjectMissingError: `url` has no wildcard, and there is nothing of this name.

    Cost: one request unless `url` ends with a slash, and one more where there is no object of this name.
    """

    def __init__(
        self,
        connection: Connection,
        url: str,
        *,
        include: Sequence[str] | None = None,
        exclude: Sequence[str] | None = None,
    ) -> None:
        self._filter = Filter(include, exclude)
        self.url = url
        self.place = connection.place(url)
        self.only: ObjectInfo | None = None
        self.prefix = self.place.key
        self.is_pattern = False
        self._head = ""
        self._matches: Callable[[str], bool] = lambda _: True
        self._left_out_count = 0
        self._names: frozenset[str] = frozenset()
        self._missing: set[str] = set()
        self.count = 0
        try:
            self._look()
        except ObjectMissingError:
            if not is_pattern(url):
                raise
            self._read_pattern(connection, url)

    def _look(self) -> None:
        """Whether there is an object; where there is none, whether it is a folder named without its slash."""
        place = self.place
        if place.is_folder:
            if not is_pattern(self.url):
                return
        else:
            try:
                self.only = place.store.stat(place.key)
            except ObjectMissingError:
                self.prefix = place.key + "/"
            else:
                return
        if next(place.store.list(self.prefix), None) is None:
            raise ObjectMissingError(
                "there is no such object, and nothing below it",
                operation="HEAD",
                url=place.url,
                hint="check the key: penstock ls lists its prefix",
            )

    def _read_pattern(self, connection: Connection, url: str) -> None:
        folder, pattern = split_glob(url)
        self.is_pattern = True
        self.place = connection.place(folder)
        self.prefix = self.place.key
        pattern += "**" if pattern.endswith("/") else ""
        self._matches = matcher(pattern)
        self._names = frozenset(name for name in expand_braces(pattern) if not has_glob(name))
        self._head = pattern[: min((pattern.find(each) for each in "*?[{" if each in pattern), default=0)]

    def takes(self, key: Key) -> bool:
        """Whether `key`, relative to ``prefix``, is one of the objects."""
        return self._matches(key) and self._filter.takes(key)

    def __iter__(self) -> Iterator[ObjectInfo]:
        self.count = self._left_out_count = 0
        self._missing = set(self._names)
        if self.only is not None:
            found, prefix = iter([self.only]), self.place.key.rpartition("/")[0]
            prefix += "/" if prefix else ""
        else:
            found, prefix = self.place.store.list(self.prefix + self._head), self.prefix
        for info in found:
            name = info.key[len(prefix) :]
            if self.only is None and not self._matches(name):
                continue
            self._missing.discard(name)
            if self._filter.takes(name):
                self.count += 1
                yield info
            else:
                self._left_out_count += 1

    def check_found(self) -> None:
        """Refuse that iterating, which has ended, gave nothing, or not all that the braces of a pattern name.

        Raises:
            ObjectMissingError: it did.
        """
        if self._missing:
            url = self.place.store.describe(self.prefix + min(self._missing))
            what = f"{len(self._missing)} of the {len(self._names)} objects that the braces name are not there, as this one"
            raise ObjectMissingError(what, operation="LIST", url=url)
        if self.count:
            return
        url = self.url if self.is_pattern else self.place.url
        if self._left_out_count:
            raise nothing_left(self._left_out_count, url)
        if self.is_pattern:
            what, hint = "no key matches this", "* and ? stay inside a folder, ** does not"
        else:
            what, hint = "there is nothing below this", "check its spelling: penstock ls lists a shorter prefix"
        raise ObjectMissingError(what, operation="LIST", url=url, hint=hint)
