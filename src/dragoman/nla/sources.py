"""Where a pair or one of its halves comes from: a folder, the zoo inside the package, or a model hub."""

from __future__ import annotations

import re
from importlib import resources
from pathlib import Path

from dragoman.errors import FetchError, PairError
from dragoman.subjects.hub import is_http_error

ZOO_PREFIX = "zoo:"
HUB_PREFIX = "hf:"
PAIR_FILE = "pair.json"
_HUB_PATTERNS = ("*.json", "*.yaml", "*.safetensors", "*.md")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")


def zoo_folder() -> Path:
    """The folder of the pairs that ship with the package."""
    return Path(str(resources.files("dragoman") / "zoo"))


def zoo_names() -> list[str]:
    """Names of the shipped pairs, sorted."""
    folder = zoo_folder()
    return sorted(path.parent.name for path in folder.glob(f"*/{PAIR_FILE}")) if folder.is_dir() else []


def resolve_folder(spec: str | Path) -> Path:
    """The local folder that a spec names; of a hub only JSON, YAML, safetensors and text files are fetched.

    Args:
        spec: a folder, `zoo:NAME` or `hf:ORG/NAME[@revision]`.

    Raises:
        PairError: no such folder or zoo pair, or a spec that is none of the three.
        FetchError: the hub could not be reached or does not have it.
    """
    text = str(spec)
    if text.startswith(ZOO_PREFIX):
        return _from_zoo(text.removeprefix(ZOO_PREFIX))
    if text.startswith(HUB_PREFIX):
        return _from_hub(text.removeprefix(HUB_PREFIX))
    folder = Path(spec)
    if not folder.is_dir():
        raise PairError(
            f"there is no folder {text}",
            expected=f"a folder, hf:ORG/NAME, or zoo:NAME out of {zoo_names()}",
            consequence="there would be nothing to read with",
            remedy="check the path, or put zoo: or hf: in front of a name",
        )
    return folder


def _from_zoo(name: str) -> Path:
    # The list is asked, not the file system: a name can then hold no path.
    if name not in zoo_names():
        raise PairError(
            f"no pair named {name!r} ships with this version",
            expected=f"one of {zoo_names()}",
            consequence="there would be nothing to read with",
            remedy="use a name from the list, or a folder or hf:ORG/NAME",
        )
    return zoo_folder() / name


def _from_hub(name: str) -> Path:
    if not _HUB_NAME.fullmatch(name):
        raise PairError(
            f"{name!r} is no hub name",
            expected="hf:ORG/NAME or hf:ORG/NAME@revision",
            consequence="another repository could be fetched than was meant",
            remedy="write it in this form",
        )
    repository, _, revision = name.partition("@")
    # Not imported at the top: a local pair needs no hub client.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(
            snapshot_download(repository, revision=revision or None, allow_patterns=list(_HUB_PATTERNS))
        )
    except Exception as error:
        if not isinstance(error, OSError | HFValidationError) and not is_http_error(error):
            raise
        raise FetchError(
            f"{HUB_PREFIX}{name} could not be downloaded ({_first_line(error)})",
            expected="a reachable hub that has this repository and revision, or a copy in its cache",
            consequence="there would be nothing to read with",
            remedy="check the name and the network, or download it elsewhere and pass the folder",
        ) from error


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0].rstrip('.')}" if lines else type(error).__name__
