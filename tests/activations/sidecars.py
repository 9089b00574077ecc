from __future__ import annotations

from dragoman.sidecar import Extraction, Sidecar


def dataset_sidecar(d_model: int) -> Sidecar:
    return Sidecar(
        kind="nla_dataset",
        d_model=d_model,
        extraction=Extraction(layer_index=20, base_model="smollm2-135m", injection_scale=None, norm="none"),
    )
