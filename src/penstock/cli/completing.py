"""What shells are offered: values of options, profiles, and the buckets and keys of a URL. A failure offers nothing."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stdout, suppress
from typing import TYPE_CHECKING, Any, NoReturn

from penstock.cli.output import print_result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_SCHEME = "s3:"


def answer(main: Callable[[], object]) -> NoReturn:
    """Answer a shell that asks for completions, and exit. Bash splits URLs at the colon, and wants what follows it.

    Args:
        main: Prints what is offered, a word on each line, and exits.
    """
    if not _join_split_urls():
        main()
        raise SystemExit
    out = io.StringIO()
    with redirect_stdout(out), suppress(SystemExit):
        main()
    for line in out.getvalue().splitlines():
        print_result(line.removeprefix(_SCHEME))
    raise SystemExit


def _join_split_urls() -> bool:
    """Put URLs together again, in the variables by which bash asks, and return whether one is what it asks about."""
    words, position = os.environ.get("COMP_WORDS", "").split("\n"), os.environ.get("COMP_CWORD", "")
    if not position.isdigit():
        return False
    at, index, is_split = int(position), 0, False
    while index + 1 < len(words):
        if words[index : index + 2] == ["s3", ":"]:
            rest = words[index + 2 : index + 3]
            is_split |= at in (index + 1, index + 2)
            at -= sum(at > index + step for step in range(len(rest) + 1))
            words[index : index + 3] = [_SCHEME + "".join(rest)]
        index += 1
    os.environ["COMP_WORDS"], os.environ["COMP_CWORD"] = "\n".join(words), str(at)
    return is_split


def completed_url(ctx: Any, incomplete: str) -> list[str]:
    """Return the URLs of buckets, keys and folders in S3 that begin with a text; other words are left to the shell.

    Cost: one request, which is not tried again.
    """
    if not incomplete.startswith(_SCHEME + "//"):
        return []
    with suppress(Exception):  # a shell has no place for an error
        return [url for url in _urls(ctx.params, incomplete) if url.isprintable()]
    return []


def _urls(given: dict[str, Any], incomplete: str) -> Iterator[str]:
    from penstock.compose import connect, list_buckets
    from penstock.store.base import innermost
    from penstock.store.inflight import perform
    from penstock.types import ListPage

    options = {name: given[name] for name in ("endpoint_url", "region", "profile", "anonymous") if given.get(name)}
    bucket, slash, prefix = incomplete.removeprefix(f"{_SCHEME}//").partition("/")
    if not slash:
        for info in list_buckets(**options):
            if info.key.startswith(bucket):
                yield f"{_SCHEME}//{info.key.removesuffix('/')}/"
        return
    with connect(f"{_SCHEME}//{bucket}", **options) as store:
        page = perform(innermost(store), ListPage(prefix, "/")).value
        for key in sorted([*(info.key for info in page.objects), *page.prefixes]):
            yield f"{_SCHEME}//{bucket}/{key}"


def completed_value(values: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return what offers some values of an option, which are found out when a shell asks."""

    def offered(incomplete: str) -> list[str]:
        with suppress(Exception):
            return sorted(value for value in values() if value.startswith(incomplete))
        return []

    return offered


def profiles() -> list[str]:
    """Return the names of the profiles in the config files."""
    from penstock.store.credentials import botocore_session

    return list(botocore_session(None, None).available_profiles)


def formats() -> list[str]:
    """Return the names of the formats of shards."""
    from penstock.formats import FORMATS

    return list(FORMATS)
