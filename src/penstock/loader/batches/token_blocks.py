"""Cuts the tokens of documents into blocks, in order, and knows the place after each block: a document and a token of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from penstock.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from penstock.loader.position import RebatchedPosition
    from penstock.pipeline import TokenBlocks


class TransformOutput(NamedTuple):
    """One sample that came out of the stages, or a block of tokens of several.

    Attributes:
        values: Values by name.
        key: Key of the stored sample that it was made of; of a block, that of its first token.
        url: URL of the shard of that sample.
        position: Position of that sample in the order of the job.
        after: Position after this output.
    """

    values: Mapping[str, Any]
    key: str
    url: str
    position: int
    after: RebatchedPosition


def cut_blocks(
    documents: Iterable[TransformOutput], stage: TokenBlocks, *, skip_tokens: int
) -> Iterator[TransformOutput]:
    """Concatenate the tokens of `documents`, and cut them into blocks of ``stage.length``.

    Args:
        documents: Outputs of the stages before this one, in order.
        stage: Length of a block, field, separator, padding and dtype.
        skip_tokens: Number of tokens of the first document that were handed out before.

    Raises:
        DecodeError: A document has no such field, or one that is not a sequence of whole numbers that the dtype holds.
    """
    block: _OpenBlock | None = None
    after: RebatchedPosition | None = None
    for document in documents:
        tokens, at = _tokens_of(document, stage), skip_tokens
        skip_tokens, after = 0, document.after
        while at < len(tokens):
            if block is None:
                block = _OpenBlock(stage, document)
            at += block.add(tokens[at:])
            if block.is_full:
                if at < len(tokens):  # it is the document before which `after` lies, and a part of it
                    yield block.output(after._replace(skip_count=after.skip_count - 1, skip_tokens=at))
                else:
                    yield block.output(after)
                block = None
    if block is not None and after is not None and stage.pad is not None:
        block.add(np.full(stage.length, stage.pad))
        yield block.output(after)


class _OpenBlock:
    """A block that is being filled; its first token is of the document `first`."""

    def __init__(self, stage: TokenBlocks, first: TransformOutput) -> None:
        self._stage = stage
        self._first = first
        self._filled = 0
        self._tokens = np.empty(stage.length, stage.dtype)
        self._position_ids = np.empty(stage.length, np.int64) if stage.position_ids else None

    @property
    def is_full(self) -> bool:
        return self._filled == self._stage.length

    def add(self, tokens: NDArray[Any]) -> int:
        """Add as many of these tokens of one document as fit, and return their number."""
        begin, end = self._filled, min(self._stage.length, self._filled + len(tokens))
        self._tokens[begin:end] = tokens[: end - begin]
        if self._position_ids is not None:
            self._position_ids[begin:end] = np.arange(end - begin)
        self._filled = end
        return end - begin

    def output(self, after: RebatchedPosition) -> TransformOutput:
        values = (self._tokens,) if self._position_ids is None else (self._tokens, self._position_ids)
        fields = dict(zip(self._stage.names, values, strict=True))
        return TransformOutput(fields, self._first.key, self._first.url, self._first.position, after)


def _tokens_of(document: TransformOutput, stage: TokenBlocks) -> NDArray[Any]:
    """The tokens of a document, and its separator: [count], of an integer dtype. A document without tokens has none."""
    try:
        found = document.values[stage.field]
        tokens = np.asarray(found)
        if not tokens.size:
            return np.empty(0, np.int64)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise TypeError(f"it is {type(found).__name__} of {tokens.dtype}{list(tokens.shape)}")
        if not np.can_cast(tokens.dtype, stage.dtype):
            bounds = np.iinfo(stage.dtype)
            if tokens.min() < bounds.min or tokens.max() > bounds.max:
                raise ValueError(f"{stage.dtype} does not hold all of {tokens.min()} to {tokens.max()}")
            tokens = tokens.astype(stage.dtype)
    except (KeyError, TypeError, ValueError) as error:
        missing = f"the document has no such field, only {', '.join(document.values)}"
        raise DecodeError(
            missing if isinstance(error, KeyError) else f"is not a sequence of whole numbers: {error}",
            hint="a .map() before .token_blocks() that returns {'tokens': tokenizer(...)}",
            stage="token_blocks",
            field=stage.field,
            sample_key=document.key,
            shard=document.url,
        ) from error
    return tokens if stage.separator is None else np.append(tokens, np.array(stage.separator, stage.dtype))


def cu_seqlens(position_ids: Any) -> NDArray[np.int32]:
    """Return where the documents of a batch begin and end, in the form that ``flash_attn_varlen_func`` takes.

    Args:
        position_ids: ``batch["position_ids"]`` of ``token_blocks``, int64[B, length]: an array, or a tensor of the host.

    Returns:
        int32[n + 1], from 0 to B x length, for n documents and parts of documents in ``batch["tokens"].reshape(-1)``.
    """
    flat = np.asarray(position_ids).reshape(-1)
    return np.append(np.flatnonzero(flat == 0), flat.size).astype(np.int32)
