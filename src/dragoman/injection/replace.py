"""Puts vectors in the place of marker embeddings, as a forward hook on the embedding module."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Generator
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.errors import InjectionError, VectorError
from dragoman.injection.marker import Marker
from dragoman.injection.sites import find_sites
from dragoman.scaling import Scale, rescale, resolve_scale
from dragoman.shapes import Vectors

_under_injection: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""Embedding modules with a hook of ours: two hooks on one module would both claim the same sites."""


class ReplaceInjector:
    """Replaces the embeddings at the marker's sites.

    The hook sees the ids that the module receives and replaces rows of what it returns, so block 0 sees the
    vector itself: a gain that the module applies (Gemma) is already behind it, one that the model applies
    later (Granite) is divided out by `gain_after`.

    Args:
        embedding: the module that turns ids into embeddings.
        marker: the marker and its neighbours.
        scale: norm that vectors take on entering, see `dragoman.scaling.rescale`.
        gain_after: factor that the model applies between this module and block 0.
    """

    def __init__(
        self, embedding: nn.Module, marker: Marker, scale: Scale, *, gain_after: float = 1.0
    ) -> None:
        assert gain_after > 0, f"gain_after is {gain_after}"
        self.embedding = embedding
        self.marker = marker
        self.scale: Scale = scale
        self.gain_after = gain_after

    @contextlib.contextmanager
    def inject(
        self,
        vectors: Vectors,
        sites_per_row: int | None = 1,
        *,
        left_context: int | None = None,
    ) -> Generator[None]:
        """Within the block, the first forward that has sites gets all vectors, in row-major order.

        Forwards before it (a constant prefix) and after it (decoding with a cache) pass through; the last id
        of each is the left context of the next. A forward before it that holds the marker between other
        neighbours is a drift of the prompt and raises. Gradients reach the vectors and all other embeddings.

        Args:
            vectors: raw, any device and float dtype, one for each site.
            sites_per_row: sites that every row must have; None allows any distribution (packed rows).
            left_context: the id before the first forward's column 0, when a prefix ran before the block.

        Raises:
            VectorError: vectors hold NaN or infinities, or their width is not the embedding's.
            InjectionError: the count of sites is not that of the vectors or the rows; a later forward holds a
                site again; no forward held one; an injection into the same module is active already.
        """
        self._check_vectors(vectors)
        if self.embedding in _under_injection:
            raise _nested()
        state = _Injection(self, vectors, sites_per_row, left_context)
        handle = self.embedding.register_forward_hook(state.hook, with_kwargs=True)
        _under_injection.add(self.embedding)
        try:
            yield
        finally:
            handle.remove()
            _under_injection.discard(self.embedding)
        state.check_consumed()

    def _check_vectors(self, vectors: Tensor) -> None:
        if vectors.ndim != 2 or not vectors.is_floating_point():
            raise VectorError(
                f"vectors have the shape {tuple(vectors.shape)} and dtype {vectors.dtype}",
                expected="floating-point vectors, [n d_model]",
                consequence="rows and columns would be confused",
                remedy="pass a two-dimensional tensor, one vector a row",
            )
        resolve_scale(self.scale, vectors.shape[1])
        finite = torch.isfinite(vectors).all(dim=1)
        if not bool(finite.all()):
            bad = (~finite).nonzero().flatten()
            raise VectorError(
                f"{len(bad)} of {len(vectors)} vectors hold NaN or infinities, first row {int(bad[0])}",
                expected="finite numbers",
                consequence="the whole row of the batch would become NaN and read as an empty explanation",
                remedy="drop these rows, or find out where the capture overflowed (float16?)",
            )


class _Injection:
    """One `inject` block: what is still to be placed, and what the forwards have shown so far."""

    def __init__(
        self, injector: ReplaceInjector, vectors: Tensor, sites_per_row: int | None, left_context: int | None
    ) -> None:
        self.injector = injector
        self.vectors = vectors
        self.sites_per_row = sites_per_row
        self.left_context: Tensor | int | None = left_context
        self.done = False
        self.forwards = 0

    def hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook: leaves the output alone, or returns it with the vectors in place."""
        del module
        ids = _received_ids(args, kwargs)
        marker = self.injector.marker
        left_context = self._context_for(ids)
        self.forwards += 1
        self.left_context = ids[:, -1].detach() if ids.shape[1] else self.left_context
        if not bool((ids == marker.token_id).any()):
            return output
        if self.done:
            if len(find_sites(ids, marker, left_context=left_context)):
                raise self._again()
            return output
        sites = find_sites(
            ids,
            marker,
            expected=len(self.vectors),
            per_row=self.sites_per_row,
            left_context=left_context,
        )
        self.done = True
        return self._replace(output, sites)

    def check_consumed(self) -> None:
        """Raises when the block ended and no forward had a site."""
        if self.done or not len(self.vectors):
            return
        seen = f"{self.forwards} forward passes went" if self.forwards != 1 else "1 forward pass went"
        raise InjectionError(
            f"{seen} through the embedding and none held the marker {self.injector.marker.char!r} "
            f"(token {self.injector.marker.token_id})",
            expected=f"one with {len(self.vectors)} injection sites",
            consequence="the model would have answered without seeing any vector",
            remedy="pass input_ids (not inputs_embeds) of a prompt that holds the marker, to the model that "
            "owns this embedding module",
        )

    def _context_for(self, ids: Tensor) -> Tensor | int | None:
        # A prefix may have run with one row and its cache been expanded since.
        context = self.left_context
        if isinstance(context, Tensor) and len(context) not in (1, len(ids)):
            return None
        return context

    def _replace(self, output: Tensor, sites: Tensor) -> Tensor:
        if self.vectors.shape[1] != output.shape[-1]:
            raise VectorError(
                f"vectors have {self.vectors.shape[1]} numbers",
                expected=f"{output.shape[-1]}, the width of the model",
                consequence="the vectors belong to another model",
                remedy="use vectors captured from the model of this pair",
            )
        # Scaled in float32 and rounded once, to what block 0 reads.
        scaled = rescale(self.vectors.to(output.device).float(), self.injector.scale)
        scaled = scaled / self.injector.gain_after
        rows, places = sites.unbind(dim=1)
        # Out of place: autograd keeps the other embeddings' gradients; the module's own output is untouched.
        return output.index_put((rows, places), scaled.to(output.dtype))

    def _again(self) -> InjectionError:
        return InjectionError(
            f"forward pass {self.forwards} holds an injection site, after the vectors were placed already",
            expected="the marker in one forward pass only",
            consequence="the marker's own embedding would be read as if it were a vector",
            remedy="open one inject block for each forward of a prompt; when generating, suppress the marker",
        )


def _received_ids(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    ids = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point():
        return ids
    shape = f"of shape {tuple(ids.shape)}" if isinstance(ids, Tensor) else f"({type(ids).__name__})"
    raise InjectionError(
        f"the embedding module received an argument {shape}",
        expected="token ids, [batch seq]",
        consequence="sites could not be found on what the model really reads",
        remedy="hand the injector the module that embeds token ids of the text model",
    )


def _nested() -> InjectionError:
    return InjectionError(
        "an injection into this embedding module is active already",
        expected="one inject block at a time",
        consequence="both would claim the same sites and one set of vectors would be lost",
        remedy="close the first block before opening the second, or pass all vectors to one",
    )
