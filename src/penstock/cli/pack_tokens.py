"""The options of ``penstock pack`` that turn documents into blocks of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import function_of
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from penstock.pipeline import ConnectionOptions, Pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class TokensGroup:
    """The options for blocks of tokens."""

    tokens: Annotated[
        int | None,
        typer.Option("--tokens", metavar="N", help="Pack blocks of N tokens, of the documents in the shards at SRC."),
    ] = None
    tokenizer: Annotated[
        str | None,
        typer.Option(
            "--tokenizer",
            metavar="MODULE:FUNCTION",
            help="With --tokens: fn(text) that returns the tokens; without it, the field holds tokens.",
        ),
    ] = None
    field: Annotated[
        str | None,
        typer.Option(
            "--token-field",
            metavar="FIELD",
            help="With --tokens: the field with the text; default text, or without --tokenizer tokens.",
        ),
    ] = None
    separator: Annotated[
        int | None, typer.Option("--separator", metavar="ID", help="With --tokens: token that follows each document.")
    ] = None
    dtype: Annotated[
        str, typer.Option("--token-dtype", metavar="NAME", help="With --tokens: int32, uint16, uint32 or int64.")
    ] = "int32"

    def pipeline(self, url: str, *, shuffle: bool, seed: int, connection: ConnectionOptions) -> Pipeline | None:
        """Return the blocks of the documents at `url`; None without ``--tokens``.

        Raises:
            ConfigError: An option is out of bounds, or needs ``--tokens``.
        """
        from penstock.pipeline import Text, shards

        if self.tokens is None:
            if self.tokenizer is not None or self.separator is not None:
                raise ConfigError("--tokenizer and --separator need --tokens", hint="--tokens 2048")
            return None
        documents = shards(url, **connection)
        if shuffle:
            documents = documents.shuffle(seed=seed)
        if self.tokenizer is None:
            field = self.field or "tokens"
            documents = documents.select(field)
        else:
            field, text = "tokens", self.field or "text"
            documents = documents.decode(Text(text)).map(_Tokenize(function_of(self.tokenizer, "--tokenizer"), text))
        return documents.token_blocks(self.tokens, field=field, separator=self.separator, dtype=self.dtype)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class _Tokenize:
    """Calls the tokeniser on the text of a document."""

    function: Callable[[str], Any]
    field: str

    def __call__(self, sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": self.function(sample[self.field])}
