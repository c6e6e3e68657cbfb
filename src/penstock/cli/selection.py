"""The objects that a command works on: one, all below a folder, or those of a pattern, after include and exclude filters."""

from __future__ import annotations

import errno
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.cli.options import option
from penstock.errors import AccessDeniedError, ConfigError, ObjectMissingError, ProtocolError
from penstock.store.inflight import InFlight
from penstock.text.patterns import expand_braces, has_glob, is_pattern, matcher, split_glob
from penstock.types import Head

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from penstock.cli.options import StoreLocation, Stores
    from penstock.types import Key, ObjectInfo


LOOKED_UP_MAX = 1000
"""Names for which ``check_absent`` asks the store."""

_NO_SUCH_NAME = (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterGroup:
    """The options that select keys."""

    include: list[str] | None = option("GLOB", "Take only keys that match; may be repeated.")
    exclude: list[str] | None = option(
        "GLOB", "Leave out keys that match, even if they match --include; may be repeated."
    )


class KeyFilter:
    """Selects keys that match an include, or any key if there is no include, and that match no exclude.

    A glob with a slash is matched against the key relative to the URL that was named; one without a slash is matched
    against the last segment of the key, at any depth.

    Args:
        include: Globs; None or empty takes every key.
        exclude: Globs; None or empty leaves out no key.

    Raises:
        ConfigError: A glob has invalid braces or brackets.
    """

    def __init__(self, include: Sequence[str] | None = None, exclude: Sequence[str] | None = None) -> None:
        self._include = [_glob(pattern) for pattern in include or ()]
        self._exclude = [_glob(pattern) for pattern in exclude or ()]

    def takes(self, key: Key) -> bool:
        """Return whether `key`, relative to the URL that was named, is selected."""
        if self._include and not any(matches(key) for matches in self._include):
            return False
        return not any(matches(key) for matches in self._exclude)


def nothing_left(count: int, url: str) -> ObjectMissingError:
    """Return the error for a filter that selects none of `count` objects."""
    return ObjectMissingError(
        f"--include and --exclude leave nothing of {count} objects",
        operation="LIST",
        url=url,
        hint="a key is taken if it matches an --include (or there is none) and no --exclude",
    )


def _glob(pattern: str) -> Callable[[str], bool]:
    matches = matcher(pattern)
    return matches if "/" in pattern else lambda key: matches(key.rpartition("/")[2])


class Selection:
    """The objects that a URL names, in key order; iterating lists them.

    A URL with wildcards or braces is a pattern, as in ``penstock.shards``, unless an object or folder has exactly this
    name. A pattern that ends with a slash means everything below the folders that match.

    Args:
        stores: Stores of the command.
        url: URL of an object or folder, or a pattern.
        filters: Options that select keys.

    Attributes:
        location: The object, the folder, or the folder above the pattern's first wildcard.
        only: The object, if `url` names one; otherwise None.
        prefix: Prefix that all keys share; names are relative to it.
        is_pattern: Whether `url` is a pattern.
        count: Number of objects that the last iteration yielded.

    Raises:
        ConfigError: `url` or a glob is invalid.
        ObjectMissingError: `url` has no wildcard, and nothing has this name.

    Cost: one request unless `url` ends with a slash, and one more if no object has this name.
    """

    def __init__(
        self,
        stores: Stores,
        url: str,
        filters: FilterGroup,
    ) -> None:
        self._filter = KeyFilter(filters.include, filters.exclude)
        self.url = url
        self.location = stores.locate(url)
        self.only: ObjectInfo | None = None
        self.prefix = self.location.key
        self.is_pattern = False
        self._head = ""
        self._matches: Callable[[str], bool] = lambda _: True
        self._left_out_count = 0
        self._names: frozenset[str] = frozenset()
        self._missing: set[str] = set()
        self.count = 0
        try:
            self._find()
        except ObjectMissingError:
            if not is_pattern(url):
                raise
            self._read_pattern(stores, url)

    def _find(self) -> None:
        """Find the object that the URL names, or else the folder, which may be named without its slash.

        Raises:
            ObjectMissingError: Neither the object nor the folder exists.
        """
        location = self.location
        if location.is_folder:
            if not is_pattern(self.url):
                return
        else:
            try:
                self.only = _described(location)
            except ObjectMissingError:
                self.prefix = location.key + "/"
            else:
                return
        if next(location.store.list(self.prefix), None) is None:
            raise ObjectMissingError(
                "neither this object nor an object below it exists",
                operation="HEAD",
                url=location.url,
                hint="check the key: penstock ls lists its prefix",
            )

    def _read_pattern(self, stores: Stores, url: str) -> None:
        folder, pattern = split_glob(url)
        self.is_pattern = True
        self.location = stores.locate(folder)
        self.prefix = self.location.key
        pattern += "**" if pattern.endswith("/") else ""
        self._matches = matcher(pattern)
        self._names = frozenset(name for name in expand_braces(pattern) if not has_glob(name))
        self._head = pattern[: min((pattern.find(each) for each in "*?[{" if each in pattern), default=0)]

    @property
    def listed_prefix(self) -> Key:
        """The prefix below which iterating lists: all that the keys have in common, by the URL."""
        return self.prefix + self._head

    def takes(self, key: Key) -> bool:
        """Return whether `key`, relative to ``prefix``, is one of the objects."""
        return self._matches(key) and self._filter.takes(key)

    def leaves_out(self, key: Key) -> bool:
        """Return whether this machine has something at `key`, relative to ``prefix``, although listings leave it out.

        Such are links that lead nowhere, what may lie below them, pipes, devices, what may not be looked at, and files that are
        new.
        """
        if self.location.path is None:
            return False
        path = self.location.root_path / (self.prefix + key)
        for each in (path, *path.parents):
            try:
                each.lstat()
                return not (each.is_dir() or (each != path and each.is_file()))
            except (OSError, ValueError) as error:
                if isinstance(error, OSError) and error.errno not in _NO_SUCH_NAME:
                    return True
        return False

    def check_absent(self, keys: Sequence[Key]) -> None:
        """Check that the store has none of some keys, relative to ``prefix``, which its listing has not shown.

        Of more than ``LOOKED_UP_MAX`` keys, at most so many are looked up, at equal distances: a listing that lacks objects
        usually lacks a great part of them.

        Raises:
            ProtocolError: It has one of them.
            StoreError: The store cannot tell.

        Cost: One request for each, all at the same time; none if the store is a directory of this machine.
        """
        if self.location.path is not None:
            return
        looked_up: InFlight[Key] = InFlight(self.location.store)
        try:
            for key in keys[:: -(-len(keys) // LOOKED_UP_MAX) or 1]:
                with suppress(ConfigError):  # the store cannot have such a key
                    looked_up.submit(Head(self.prefix + key), self.prefix + key)
            while looked_up:
                key, completion = looked_up.wait()
                if completion.error is None:
                    raise ProtocolError(
                        "the object exists, but the listing did not show it, so nothing is deleted",
                        operation="LIST",
                        url=self.location.store.describe(key),
                        hint="try again if it is new; otherwise this server does not list all that it has",
                    )
                # Without the right to list everything, S3 refuses to say that an object is missing.
                if not isinstance(completion.error, ObjectMissingError | AccessDeniedError):
                    raise completion.error
        finally:
            looked_up.cancel()

    def __iter__(self) -> Iterator[ObjectInfo]:
        self.count = self._left_out_count = 0
        self._missing = set(self._names)
        if self.only is not None:
            found, prefix = iter([self.only]), self.location.key.rpartition("/")[0]
            prefix += "/" if prefix else ""
        else:
            found, prefix = self.location.store.list(self.listed_prefix), self.prefix
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
        """Check that the finished iteration yielded an object, and every object that the braces of a pattern name.

        Raises:
            ObjectMissingError: Nothing was yielded, or an object that the braces name does not exist.
        """
        if self._missing:
            url = self.location.store.describe(self.prefix + min(self._missing))
            what = f"{len(self._missing)} of the {len(self._names)} objects that the braces name do not exist, such as this one"
            raise ObjectMissingError(what, operation="LIST", url=url)
        if self.count:
            return
        url = self.url if self.is_pattern else self.location.url
        if self._left_out_count:
            raise nothing_left(self._left_out_count, url)
        if self.is_pattern:
            what, hint = "no key matches this pattern", "* and ? do not match slashes, ** does"
        else:
            what, hint = "there is nothing below this URL", "check the spelling: penstock ls lists a shorter prefix"
        raise ObjectMissingError(what, operation="LIST", url=url, hint=hint)


def _described(location: StoreLocation) -> ObjectInfo:
    """Return what is known about one object; from the listing if a HEAD does not tell its size, as for a result to be made."""
    try:
        return location.store.stat(location.key)
    except ProtocolError:
        listed = next(location.store.list(location.key), None)
        if listed is None or listed.key != location.key:
            raise
        return listed
