"""The gateway: an S3 endpoint that serves the objects of any store, transformed while they are read.

This module exports what a module of transforms needs. Importing it loads neither the server nor the worker processes.
"""

from typing import TYPE_CHECKING

from penstock.system.lazy import lazy_getattr

if TYPE_CHECKING:
    from penstock.gateway.objects import S3Error as S3Error
    from penstock.gateway.transforms.authoring import Response as Response
    from penstock.gateway.transforms.authoring import SourceReader as SourceReader
    from penstock.gateway.transforms.authoring import TransformRequest as TransformRequest
    from penstock.gateway.transforms.authoring import transform as transform
    from penstock.gateway.transforms.trial import try_transform as try_transform

_ORIGIN = {
    "S3Error": "objects",
    **dict.fromkeys(("Response", "SourceReader", "TransformRequest", "transform"), "transforms.authoring"),
    "try_transform": "transforms.trial",
}

__all__ = sorted(_ORIGIN)  # noqa: PLE0605 - computed from the one table


if not TYPE_CHECKING:
    __getattr__ = lazy_getattr(__name__, _ORIGIN)
