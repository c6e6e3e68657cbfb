"""Keys of an access point whose objects have other suffixes than their sources: ``a.tar`` is served as ``a.tfrecord``.

Nothing here does I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping


class KeyRenaming:
    """How keys of sources become keys of results, and back.

    With suffixes, only sources that have one of them are served: an object that the transform is not meant for must not be
    served as it is, because the transform may be there to redact it.

    Args:
        suffixes: New suffix by old suffix; a new one may be empty. No suffixes serve every source under its own key.

    Raises:
        ConfigError: An old suffix is empty, a suffix contains a slash, or two old suffixes have the same new one.
    """

    def __init__(self, suffixes: Mapping[str, str]) -> None:
        if "" in suffixes:
            raise ConfigError("renamed_suffixes: an old suffix must not be empty", hint='".gz" = "" removes a suffix')
        for suffix in (*suffixes, *suffixes.values()):
            if "/" in suffix:
                raise ConfigError(f"renamed_suffixes: {suffix!r} must not contain a slash")
        if len(set(suffixes.values())) < len(suffixes):
            raise ConfigError("renamed_suffixes: two suffixes become the same one, so keys would have two sources")
        # The longest suffix wins, so that .tar.gz is not taken for .gz.
        self._new_by_old = dict(sorted(suffixes.items(), key=lambda pair: -len(pair[0])))
        self._old_by_new = {new: old for old, new in sorted(suffixes.items(), key=lambda pair: -len(pair[1]))}

    def result_key(self, source_key: str) -> str | None:
        """Return the key under which a source is served; None if it is not served."""
        if not self._new_by_old:
            return source_key
        for old, new in self._new_by_old.items():
            if source_key.endswith(old):
                return source_key[: -len(old)] + new
        return None

    def source_keys(self, key: str) -> list[str]:
        """Return the keys that the source of a result may have, the most probable first."""
        if not self._new_by_old:
            return [key]
        found = [key.removesuffix(new) + old for new, old in self._old_by_new.items() if key.endswith(new)]
        return [source_key for source_key in found if self.result_key(source_key) == key]

    def has_in_suffix(self, text: str) -> bool:
        """Whether a suffix contains `text`."""
        return any(text in suffix for suffix in (*self._new_by_old, *self._old_by_new))

    def source_prefix(self, prefix: str) -> str:
        """Return a prefix of all sources whose results begin with `prefix`. Sources of other results may have it, too."""
        shortest = prefix
        for new in self._old_by_new:
            for length in range(1, len(new) + 1):
                if prefix.endswith(new[:length]):
                    shortest = min(shortest, prefix[:-length], key=len)
        return shortest
