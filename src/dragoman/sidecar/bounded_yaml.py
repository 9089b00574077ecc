"""Small YAML files from strangers, capped in bytes, in nesting and in what aliases expand to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from dragoman.errors import SidecarError

_MAX_BYTES = 1 << 20
_MAX_NODES = 10_000
_MAX_DEPTH = 64


def load_yaml(file: Path) -> Any:
    """The one document of `file`, or None when it is empty.

    Aliases are allowed as far as the whole document, written out, has at most 10,000 values: a list that two
    keys share comes from many dumpers, a bomb does not fit.

    Raises:
        SidecarError: no such file, larger than 1 MiB, not UTF-8, not YAML, a key twice in one mapping, nested
            more than 64 levels, or aliases that multiply or contain themselves.
    """
    return _parse(file, _read_capped(file))


def dump_yaml(value: Any) -> str:
    """`value` as YAML, keys in their order, characters as they are, no aliases."""
    return yaml.dump(value, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=110)


def unreadable(file: Path, what: str) -> SidecarError:
    """The error for a file that is no sidecar at all."""
    return SidecarError(
        f"{file} {what}",
        expected="a small YAML mapping with kind, d_model, extraction, tokens and prompt_templates",
        consequence="the model would be used with settings it was not trained with",
        remedy="replace the file by the one that came with the model or the data",
    )


def shortened(value: Any, limit: int = 80) -> str:
    """`repr` of `value`, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


class _PlainDumper(yaml.SafeDumper):
    """Writes a repeated object out each time: other readers of sidecars need not know aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


class _BoundedLoader(yaml.SafeLoader):
    """Stops at too many values or levels while reading, and at a key that stands twice in one mapping.

    Plain YAML silently takes the last of two equal keys.
    """

    def __init__(self, file: Path, text: str) -> None:
        super().__init__(text)
        self._file = file
        self._values = 0
        self._depth = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._values += 1
        self._depth += 1
        if self._values > _MAX_NODES:
            raise unreadable(self._file, f"holds more than {_MAX_NODES} values")
        if self._depth > _MAX_DEPTH:
            raise unreadable(self._file, f"is nested more than {_MAX_DEPTH} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"the key {key_node.value!r} stands twice", key_node.start_mark
                    )
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def _read_capped(file: Path) -> str:
    try:
        with file.open("rb") as handle:
            content = handle.read(_MAX_BYTES + 1)
    except OSError as error:
        raise SidecarError(
            f"there is no readable sidecar at {file}: {error.strerror or error}",
            expected="nla_meta.yaml in the model's folder, or FILE.nla_meta.yaml beside a data file",
            consequence="layer, marker, prompt and scale would have to be guessed",
            remedy="fetch the sidecar from where the model or the data came from",
        ) from error
    if len(content) > _MAX_BYTES:
        raise unreadable(file, "is larger than 1 MiB, where a sidecar has a few KiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise unreadable(file, "is not UTF-8 text") from error


def _parse(file: Path, text: str) -> Any:
    try:
        loader = _BoundedLoader(file, text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_expansion(file, node)
        return loader.construct_document(node)
    except SidecarError:
        raise  # it is a ValueError too, and says more than the one below
    except (yaml.YAMLError, ValueError, OverflowError, TypeError) as error:
        raise unreadable(file, f"is not valid YAML: {' '.join(str(error).split())[:300]}") from error


def _check_expansion(file: Path, root: yaml.Node) -> None:
    """Refuses documents whose aliases multiply, nest or contain themselves, before any value is built."""
    known: dict[int, tuple[int, int] | None] = {}

    def written_out(node: yaml.Node) -> tuple[int, int]:
        """(values, levels) of the node with its aliases written out."""
        if id(node) in known:
            found = known[id(node)]
            if found is None:
                raise unreadable(file, "holds an alias to something that contains it")
            return found
        known[id(node)] = None
        parts = [written_out(child) for child in _children(node)]
        size = 1 + sum(values for values, _ in parts)
        depth = 1 + max((levels for _, levels in parts), default=0)
        if size > _MAX_NODES:
            raise unreadable(file, f"expands to more than {_MAX_NODES} values, as a YAML bomb does")
        if depth > _MAX_DEPTH:
            raise unreadable(file, f"is nested more than {_MAX_DEPTH} levels deep by its aliases")
        known[id(node)] = size, depth
        return size, depth

    written_out(root)


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    return list(node.value) if isinstance(node, yaml.SequenceNode) else []
